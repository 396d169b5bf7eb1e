"""A Ray cluster of several nodes with simulated boards, as a process; it ends with its stdin.

Each node has a simulated NPU, or a CPU that computes with llama.cpp, and a board of each group of
that kind.

A node can be cut off as by a power failure, and another one joined. Only processes that were
started here are stopped here. ``BoardNodes`` is the parent's end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rkserve.bench.processes import BenchFailed, CommandProcess, Json, serve_commands
from rkserve.bench.systems import HOST, RAY_ENVIRON, RELEASE
from rkserve.config.board_group import CPU, NPU
from rkserve.core.child_process import free_port, free_ports
from rkserve.deployments.haproxy import FLAG
from rkserve.deployments.haproxy import environ as front_environ
from rkserve.native.sim.build import ensure_built

APP = "rkserve"
START_S, JOIN_S = 900.0, 300.0
JOIN_TRIES = 3
# A node that is lost is noticed after two seconds, where its connections do not say so at once.
_SYSTEM = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


class BoardNodes:
    """The cluster as a child process, with all its files in ``folder``.

    ``front`` puts HAProxy before the Routers. ``environ`` is added to the environment of all of it.
    """

    def __init__(
        self, folder: Path, *, front: bool = False, environ: Mapping[str, str] | None = None
    ) -> None:
        home = folder / "home-head"  # the head's state is not to mix with the account's own
        home.mkdir()
        # Short: the path of HAProxy's socket may have 97 characters.
        proxy = front_environ(folder / "f", free_ports()) if front else {FLAG: "0"}
        variables = {
            **RAY_ENVIRON,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_worker_niceness": "0",  # as on real clusters
            "RAY_TMPDIR": str(folder),
            "HOME": str(home),
            **proxy,
            **(environ or {}),
        }
        self._folder = folder
        self.address = HOST, free_port()
        self._child = CommandProcess("benchmarks.harness.board_nodes", self.log, variables)

    @property
    def log(self) -> Path:
        """The output of the child."""
        return self._folder / "cluster.log"

    @property
    def pid(self) -> int:
        """The child, below which all processes are whose parent lives."""
        return self._child.pid

    def start(self, **command: Any) -> None:
        """Start Ray, the application, and so many nodes; see ``_Nodes``. Raises ``BenchFailed``.

        There is one group, or one for each of ``groups``, which state where they differ from it. Of
        the nodes, numbered from 0, those from ``npus`` on have no NPU and offer their CPU.
        """
        place = {"folder": str(self._folder), "port": self.address[1]}
        self._child.ask({"do": "start", **place, **command}, START_S)

    def replace(self, node: int) -> None:
        """Cut a node off and join another one in its place. Raises ``BenchFailed``."""
        self.lose(node)
        self.join(node)

    def lose(self, node: int) -> None:
        """Cut a node off. Raises ``BenchFailed``."""
        self._child.ask({"do": "lose", "node": node}, JOIN_S)

    def join(self, node: int) -> None:
        """Join a node under a number that is free. Raises ``BenchFailed``."""
        self._child.ask({"do": "join", "node": node}, JOIN_S)

    def close(self) -> None:
        """End the cluster."""
        self._child.close()


class _Nodes:
    """The cluster and the nodes with boards, by their numbers."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._command: Json = {}
        self._nodes: dict[int, Any] = {}

    def start(self, command: Json) -> Json:
        """Start Ray, so many nodes, and the application on them."""
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from rkserve.app import build

        self._command = command
        folder = Path(command["folder"])
        head = {
            "num_cpus": 2,
            "include_dashboard": False,
            "temp_dir": str(folder / "ray"),
            "_system_config": _SYSTEM,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)
        http = {"host": HOST, "port": command["port"]}
        serve.start(proxy_location="HeadOnly", http_options=http)
        args = {
            "boards": [self._group(one) for one in command.get("groups", [{}])],
            "state_dir": "~/state",
            "router": command["router"],
            "coordinator": {"data_dir": str(folder / "data"), **command.get("coordinator", {})},
        }
        target = serve.RunTarget(build(args), name=APP, route_prefix="/")
        # How many boards there are is for Serve to find out, which a call that waits would not see.
        serve.run_many([target], wait_for_applications_running=False)
        for number in range(command["boards"]):
            self.join({"node": number})
        return {}

    def _group(self, own: Json) -> Json:
        """Return a group of the configuration; ``own`` is where it differs from the others."""
        command = self._command
        npu = {} if "cpu" in own else {"library": str(ensure_built(RELEASE))}
        return {
            "name": command["name"],
            "model": command["model"],
            "prompt_cache": {"park": False},
            "max_boards": 64,
            **npu,
            **command["group"],
            **own,
        }

    def join(self, command: Json) -> Json:
        """Join a node under a number that is free, with a home and a control file of its own."""
        number = command["node"]
        if number in self._nodes:
            raise BenchFailed(f"node {number} is there")
        home = Path(self._command["folder"]) / f"home-{number}"
        home.mkdir(exist_ok=True)
        environ = {
            "HOME": str(home),
            "RKSIM_CONTROL": str(home / "control"),
            "RKSIM_TIME_SCALE": repr(self._command["time_scale"]),
            "RKSIM_LOAD_MS": repr(self._command["load_ms"]),
        }
        for left in reversed(range(JOIN_TRIES)):
            before = set(self._cluster.worker_nodes)
            try:
                self._nodes[number] = self._cluster.add_node(
                    num_cpus=1,
                    resources={NPU if number < self._command.get("npus", math.inf) else CPU: 1},
                    env_vars=environ,
                    # Boards of one host are told apart by it.
                    node_ip_address=f"127.0.1.{number + 1}",
                    include_dashboard=False,
                    temp_dir=str(Path(self._command["folder"]) / "ray"),
                )
            except TimeoutError:  # Ray gives a raylet 30 s, which a busy machine exceeds
                sys.stderr.write(f"node {number} did not join in time\n")
                for node in set(self._cluster.worker_nodes) - before:
                    self._cluster.remove_node(node, allow_graceful=False)
                if not left:
                    raise BenchFailed(f"node {number} did not join in {JOIN_TRIES} tries") from None
            else:
                break
        return {}

    def lose(self, command: Json) -> Json:
        """Cut a node off."""
        node = self._nodes.pop(command["node"])
        self._cluster.remove_node(node, allow_graceful=False)
        return {}

    def end(self) -> None:
        """End all of it."""
        import ray
        from ray import serve

        if self._cluster is not None:
            serve.shutdown()
            ray.shutdown()
            self._cluster.shutdown()


def main() -> None:
    """Serve the parent's commands."""
    nodes = _Nodes()
    steps = {"start": nodes.start, "join": nodes.join, "lose": nodes.lose}
    try:
        serve_commands(lambda command, _: steps[command["do"]](command))
    finally:
        nodes.end()


if __name__ == "__main__":
    main()
