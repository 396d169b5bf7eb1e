"""``ray start`` of heads and boards, and changes to it on a head by Ray's own hook
(``RAY_START_HOOK``).

``python -m rkserve.bringup.ray_start start ...`` is ``ray start ...`` without the imports of Ray's
other commands, which are more than half of its own.

The hook gets the parameters of ``ray start`` before it starts anything. Ray's dashboard imports for
seconds, and Ray waits for it before it starts the raylet. No request needs the dashboard: it starts
after the raylet here, with a lower priority than the processes that requests need, and after the
first answer if the caller asks for that.

A raylet waits for its agents, which import for seconds, too, until it knows their ports. Those are
fixed, so that it knows them from the start, and agents have the dashboard's priority.

Workers are forks of one process that has imported Ray (``ray_worker``), which starts with the
raylet.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray import _raylet
from ray._private import services
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

from rkserve.bringup import ray_worker
from rkserve.bringup.ray_node import DASHBOARD_WAITS, RAYLET_RUNS

# Commands that Ray adds to `ray` where it can import them: `ray list`, `ray job` and `ray serve`.
OTHER_COMMANDS = (
    "ray.util.state.state_cli",
    "ray.dashboard.modules.job.cli",
    "ray.serve.scripts",
)
FORKED_WORKERS = "RKSERVE_FORKED_WORKERS"
# The longest wait of the dashboard, which has the errors of replicas that do not start.
DASHBOARD_WAITS_S = 20.0
NICENESS = 10  # of the dashboard and the agents
REGISTERED_S = 30.0  # Ray's own limit
POLL_S = 0.1
# Ray starts as many workers at a time as there are cores, since each imports for seconds. A fork
# takes 0.1 s, and waits for other processes after that.
STARTUP_CONCURRENCY = 16
DASHBOARD_AGENT, RUNTIME_ENV_AGENT = "--dashboard_agent_command", "--runtime_env_agent_command"
CONCURRENCY, WORKERS, RAYLET_SOCKET, LOGS = (
    "--maximum_startup_concurrency=",
    "--python_worker_command=",
    "--raylet_socket_name=",
    "--log_dir=",
)


def tune(params: Any, head: bool) -> None:
    """Leave out Ray Client's server, fork workers, and start the dashboard last.

    Args:
        params: Ray's ``RayParams`` of this start.
        head: False for a node that joins a cluster, which has neither, and one worker.
    """
    if not head:
        return
    params.ray_client_server_port = None  # no option of `ray start` leaves it out
    start_agents_beside_raylets()
    if os.environ.get(FORKED_WORKERS) != "0":
        params.worker_path = ray_worker.__file__
        start_servers_with_raylets()
    start_api_server, start_ray_processes = Node.start_api_server, Node.start_ray_processes
    waits = bool(os.environ.pop(DASHBOARD_WAITS, ""))
    asked: dict[str, Any] = {}

    def later(_: Node, **options: Any) -> None:
        asked.update(options)

    def raylet_first(node: Node) -> None:
        start_ray_processes(node)
        if _has_registered(node):
            sys.stdout.write(f"{RAYLET_RUNS}\n")
            sys.stdout.flush()
            if waits and not _may_go_on(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid):
                sys.exit("rkserve: the raylet has ended")
        os.nice(NICENESS)  # of this process, which only waits from here on, too
        start_api_server(node, **asked)

    Node.start_api_server, Node.start_ray_processes = later, raylet_first


def start_agents_beside_raylets() -> None:
    """Have this process start raylets that do not wait for their agents."""
    start_ray_process = services.start_ray_process

    def with_ports(command: list[str], process_type: str, *rest: Any, **options: Any) -> Any:
        if process_type == PROCESS_TYPE_RAYLET:
            command = _with_known_agents(command)
        return start_ray_process(command, process_type, *rest, **options)

    services.start_ray_process = with_ports


def _with_known_agents(command: list[str]) -> list[str]:
    """Store the ports of a raylet's agents where they would; return its command with their
    niceness.

    It is unchanged if a port is not fixed: the raylet waits for that.
    """
    given = dict(word.partition("=")[::2] for word in command)
    listens = re.search(r" --listen-port=(\d+)", given.get(DASHBOARD_AGENT, ""))
    names: Any = _raylet  # the declarations of its names are not complete
    ports = {
        names.METRICS_AGENT_PORT_NAME: given.get("--metrics-agent-port"),
        names.METRICS_EXPORT_PORT_NAME: given.get("--metrics_export_port"),
        names.RUNTIME_ENV_AGENT_PORT_NAME: given.get("--runtime_env_agent_port"),
        names.DASHBOARD_AGENT_LISTEN_PORT_NAME: listens and listens[1],
    }
    nice = shutil.which("nice")
    if nice is None or not all(int(port or 0) for port in ports.values()):
        return command
    for name, port in ports.items():
        names.persist_port(given["--session_dir"], given["--node_id"], name, int(port or 0))
    agents = f"({DASHBOARD_AGENT}|{RUNTIME_ENV_AGENT})="
    return [re.sub(agents, rf"\g<0>{nice} -n {NICENESS} ", word, count=1) for word in command]


def start_servers_with_raylets() -> None:
    """Have this process start a fork server right after each raylet whose workers are forks."""
    start_ray_process = services.start_ray_process

    def with_server(command: list[str], process_type: str, *rest: Any, **options: Any) -> Any:
        if process_type != PROCESS_TYPE_RAYLET or not _forks(command):
            return start_ray_process(command, process_type, *rest, **options)
        set_words = [word for word in command if not word.startswith(CONCURRENCY)]
        started = start_ray_process(
            [*set_words, f"{CONCURRENCY}{STARTUP_CONCURRENCY}"], process_type, *rest, **options
        )
        try:
            _start_fork_server(command, started.process.pid)
        except (OSError, StopIteration) as exc:
            # The first worker becomes the server then.
            sys.stderr.write(f"rkserve: the fork server of workers did not start: {exc!r}\n")
        return started

    services.start_ray_process = with_server


def _forks(command: list[str]) -> bool:
    workers = (word for word in command if word.startswith(WORKERS))
    return ray_worker.__file__ in next(workers, "")


def _start_fork_server(command: list[str], pid: int) -> None:
    """Start the fork server of the raylet with this command and pid.

    Raises:
        OSError: the raylet has ended, or a process cannot be started.
        StopIteration: the command has no socket or no folder for logs.
    """
    socket, logs = (
        next(word.removeprefix(option) for word in command if word.startswith(option))
        for option in (RAYLET_SOCKET, LOGS)
    )
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environ = dict(os.fsdecode(word).partition("=")[::2] for word in words if word)
    raylet = os.pidfd_open(pid)
    # As Ray does for all that it starts: Ctrl-C is for the program that ends them in order.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with (Path(logs) / "fork_server.err").open("ab") as log:
            server = subprocess.Popen(
                (sys.executable, ray_worker.__file__, ray_worker.SERVES, str(raylet), socket),
                env=ray_worker.workers_environ(environ, pid),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[raylet],
                start_new_session=True,
            )
        server.returncode = 0  # it ends with its raylet, and not before this process
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(raylet)


def _may_go_on(raylet: int) -> bool:
    """Wait for a line of standard input, or its end, but not for long; False if the raylet ends."""
    process = os.pidfd_open(raylet)  # of a child, which has not been waited for
    ready, _, _ = select.select([sys.stdin, process], [], [], DASHBOARD_WAITS_S)
    os.close(process)
    return process not in ready


def _has_registered(node: Node) -> bool:
    """Wait for the raylet's registration; Ray reports it if that does not come."""
    deadline_s = time.monotonic() + REGISTERED_S
    while time.monotonic() < deadline_s:
        try:
            services.get_node(node.gcs_address, node.node_id)
        except RuntimeError:
            time.sleep(POLL_S)
        else:
            return True
    return False


def main() -> None:
    """Run Ray's command with the arguments of this process."""
    left_out: dict[str, Any] = dict.fromkeys(OTHER_COMMANDS)
    sys.modules.update(left_out)  # the import of one that is None fails
    from ray.scripts import scripts  # after that

    scripts.main()


if __name__ == "__main__":
    main()
