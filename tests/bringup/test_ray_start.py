"""The hook of ``ray start`` on a head, with stand-ins for Ray's functions that start processes."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from ray._common.utils import load_class
from ray._private import services
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

from rkserve.bringup import ray_start, ray_worker
from rkserve.bringup.processes import BOARD, HEAD
from rkserve.bringup.ray_node import DASHBOARD_WAITS, RAYLET_RUNS
from rkserve.bringup.settings import settings_of

HOOK = "RAY_START_HOOK"
NODE = "ab" * 28
ASKED = {"include_dashboard": None, "raise_on_failure": False}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of a start, in their order; the raylet registers at the third look."""
    made: list[Any] = []

    def get_node(address: str, _: str) -> dict[str, Any]:
        made.append(f"look at {address}")
        if made.count(made[-1]) <= 2:
            raise RuntimeError("no such node")
        return {}

    monkeypatch.delenv(DASHBOARD_WAITS, raising=False)
    monkeypatch.setattr(services, "start_ray_process", services.start_ray_process)
    monkeypatch.setattr(Node, "start_ray_processes", lambda _: made.append("raylet"))
    monkeypatch.setattr(Node, "start_api_server", lambda _, **options: made.append(options))
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(os, "nice", made.append)
    monkeypatch.setattr(ray_start, "POLL_S", 0.0)
    return made


def started(raylet: subprocess.Popen[bytes] | None = None) -> SimpleNamespace:
    """Call the hook and then the steps of Ray's start; return the parameters."""
    params = SimpleNamespace(ray_client_server_port=10001, worker_path="ray's own")
    node = Node.__new__(Node)
    node._gcs_address, node._node_id = "head:6379", "id"
    node.all_processes = {PROCESS_TYPE_RAYLET: [SimpleNamespace(process=raylet)]}
    load_class(settings_of(HEAD)[HOOK])(params, True)
    node.start_api_server(**ASKED)
    node.start_ray_processes()
    return params


def test_the_dashboard_follows_the_raylet(
    steps: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    params = started()
    assert steps == [
        "raylet",
        *["look at head:6379"] * 3,
        ray_start.NICENESS,
        ASKED,
    ]
    assert RAYLET_RUNS in capsys.readouterr().out
    assert params.worker_path == ray_worker.__file__
    assert params.ray_client_server_port is None, "0 would be refused, and no option is 10001"


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the raylet's place."""
    environ = {"HOME": "/root", "LD_PRELOAD": "", "RAY_LD_PRELOAD_ON_WORKERS": "0"}
    with subprocess.Popen(
        (sys.executable, "-c", "import time; time.sleep(1000)"), env=environ
    ) as it:
        yield it
        it.kill()


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[str]]:
    """The other end of standard input, and a dashboard that waits for it."""
    monkeypatch.setenv(DASHBOARD_WAITS, "1")
    read, write = os.pipe()
    with os.fdopen(read) as ours, os.fdopen(write, "w") as theirs:
        monkeypatch.setattr(sys, "stdin", ours)
        yield theirs


@pytest.mark.parametrize("how", ["line", "end", "time"])
def test_the_dashboard_waits_where_the_caller_says_so(
    how: str,
    steps: list[Any],
    stdin: IO[str],
    raylet: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = 0.01 if how == "time" else 60.0
    monkeypatch.setattr(ray_start, "DASHBOARD_WAITS_S", limit_s)
    begun = threading.Thread(target=started, args=[raylet])
    begun.start()
    if how == "line":
        begun.join(0.1)
        assert "raylet" in steps
        assert ASKED not in steps
        stdin.write("\n")
        stdin.flush()
    elif how == "end":
        stdin.close()
    begun.join(60)
    assert steps[-2:] == [ray_start.NICENESS, ASKED]
    assert DASHBOARD_WAITS not in os.environ, "Ray's processes would inherit it"


def test_there_is_no_dashboard_of_a_raylet_that_ends_meanwhile(
    steps: list[Any], stdin: IO[str], raylet: subprocess.Popen[bytes]
) -> None:
    raylet.kill()
    with pytest.raises(SystemExit, match="the raylet has ended"):
        started(raylet)
    assert ASKED not in steps
    assert not stdin.closed


class Processes:
    """A stand-in for Ray's function that starts processes, and the servers that the hook starts."""

    def __init__(self, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self.raylet, self.commands = raylet, dict[str, list[str]]()
        self.servers: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.fails = False
        monkeypatch.setattr(services, "start_ray_process", self.start)
        monkeypatch.setattr(subprocess, "Popen", self.start_server)

    def start(self, command: list[str], process_type: str, fate_share: bool) -> SimpleNamespace:
        assert not fate_share
        self.commands[process_type] = command
        return SimpleNamespace(process=self.raylet)

    def start_server(self, command: tuple[str, ...], **options: Any) -> SimpleNamespace:
        if self.fails:
            raise OSError("no memory")
        os.fstat(int(command[3]))
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.servers.append((command, options))
        return SimpleNamespace()


@pytest.fixture
def processes(raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(raylet, monkeypatch)


def raylet_command(folder: Path) -> list[str]:
    """Return the words of a raylet's command that matter here."""
    files = (f"--raylet_socket_name={folder}/raylet", f"--log_dir={folder}")
    workers = f"--python_worker_command=python setup_worker.py {ray_worker.__file__} --x"
    return ["raylet", *files, workers, "--maximum_startup_concurrency=2"]


def test_the_fork_server_starts_with_the_raylet(
    steps: list[Any], processes: Processes, tmp_path: Path
) -> None:
    started()
    made = services.start_ray_process(raylet_command(tmp_path), "raylet", fate_share=False)
    assert made.process is processes.raylet
    ((command, options),) = processes.servers
    python, program, serves, descriptor, socket = command
    assert (python, program, serves) == (sys.executable, ray_worker.__file__, ray_worker.SERVES)
    assert socket == f"{tmp_path}/raylet"
    assert options["pass_fds"] == [int(descriptor)]
    pid = str(processes.raylet.pid)
    assert options["env"] == {
        "HOME": "/root",
        "RAY_LD_PRELOAD_ON_WORKERS": "0",
        "RAY_RAYLET_PID": pid,
        "SPT_NOENV": "1",
    }
    assert Path(options["stderr"].name) == tmp_path / "fork_server.err"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert processes.commands["raylet"] == [
        *raylet_command(tmp_path)[:-1],
        f"--maximum_startup_concurrency={ray_start.STARTUP_CONCURRENCY}",
    ]


def test_other_processes_of_ray_start_as_ever(
    steps: list[Any], processes: Processes, tmp_path: Path
) -> None:
    started()
    services.start_ray_process(raylet_command(tmp_path), "gcs_server", fate_share=False)
    assert processes.commands["gcs_server"] == raylet_command(tmp_path)
    executes = [word.replace("ray_worker", "default_worker") for word in raylet_command(tmp_path)]
    services.start_ray_process(executes, "raylet", fate_share=False)
    assert processes.commands["raylet"] == executes
    assert not processes.servers


def test_a_raylet_whose_fork_server_does_not_start_runs(
    steps: list[Any], processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started()
    processes.fails = True
    made = services.start_ray_process(raylet_command(tmp_path), "raylet", fate_share=False)
    assert made.process is processes.raylet
    assert (
        "the fork server of workers did not start: OSError('no memory')" in capsys.readouterr().err
    )


def command_with_agents(folder: Path, listens: int) -> list[str]:
    """Return a raylet's command with agents at fixed ports, the last one at ``listens``."""
    return [
        *raylet_command(folder),
        "--labels=",
        "--head",
        *("--metrics-agent-port=7003", "--metrics_export_port=7005"),
        *("--runtime_env_agent_port=7004", f"--session_dir={folder}", f"--node_id={NODE}"),
        f"--dashboard_agent_command=python -u agent.py --grpc-port=7003 --listen-port={listens} -x",
        "--runtime_env_agent_command=python -u main.py --runtime-env-agent-port=7004",
    ]


def test_a_raylet_knows_the_ports_of_agents_that_still_import(
    steps: list[Any], processes: Processes, tmp_path: Path
) -> None:
    started()
    command = command_with_agents(tmp_path, 7006)
    services.start_ray_process(command, PROCESS_TYPE_RAYLET, fate_share=False)
    ports = {file.name: int(file.read_text()) for file in tmp_path.glob(f"*_{NODE}")}
    assert ports == {
        f"metrics_agent_port_{NODE}": 7003,
        f"runtime_env_agent_port_{NODE}": 7004,
        f"metrics_export_port_{NODE}": 7005,
        f"dashboard_agent_listen_port_{NODE}": 7006,
    }
    nice = f"{shutil.which('nice')} -n {ray_start.NICENESS}"
    made = processes.commands[PROCESS_TYPE_RAYLET]
    for agent, program in (("dashboard", "agent.py"), ("runtime_env", "main.py")):
        (word,) = [word for word in made if word.startswith(f"--{agent}_agent_command=")]
        assert word.startswith(f"--{agent}_agent_command={nice} python -u {program} ")
    assert {"--labels=", "--head"} <= set(made)
    assert len(made) == len(command)


@pytest.mark.parametrize("without", ["port", "nice"])
def test_a_raylet_waits_for_agents_that_choose_their_ports(
    without: str,
    steps: list[Any],
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if without == "nice":
        monkeypatch.setenv("PATH", str(tmp_path))
    started()
    command = command_with_agents(tmp_path, 0 if without == "port" else 7006)
    services.start_ray_process(command, PROCESS_TYPE_RAYLET, fate_share=False)
    assert set(command) - set(processes.commands[PROCESS_TYPE_RAYLET]) == {
        "--maximum_startup_concurrency=2"
    }
    assert not [*tmp_path.glob(f"*_{NODE}")]


def test_ray_still_starts_its_raylet_so() -> None:
    """The names and options of Ray's that the hook counts on."""
    text = inspect.getsource(services.start_raylet)
    options = (ray_start.CONCURRENCY, ray_start.WORKERS, ray_start.RAYLET_SOCKET, ray_start.LOGS)
    of_agents = ("--metrics-agent-port=", "--metrics_export_port=", "--runtime_env_agent_port=")
    agents = (ray_start.DASHBOARD_AGENT, ray_start.RUNTIME_ENV_AGENT)
    for option in (*options, *of_agents, *agents, "--session_dir=", "--node_id=", "--listen-port="):
        assert f'"{option}' in text
    assert "start_ray_process(\n        command,\n" in text


def test_workers_are_executed_where_an_operator_asks_for_it(
    steps: list[Any], processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_of(HEAD)[ray_start.FORKED_WORKERS] == "1"
    monkeypatch.setenv(ray_start.FORKED_WORKERS, "0")
    assert started().worker_path == "ray's own"
    command = raylet_command(tmp_path)
    services.start_ray_process(command, PROCESS_TYPE_RAYLET, fate_share=False)
    assert (processes.commands, processes.servers) == ({PROCESS_TYPE_RAYLET: command}, [])


def test_a_raylet_that_does_not_register_is_left_to_ray(
    steps: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_start, "REGISTERED_S", 0.0)
    started()
    assert steps == ["raylet", ray_start.NICENESS, ASKED]
    assert RAYLET_RUNS not in capsys.readouterr().out


def test_a_node_that_joins_starts_as_ever(steps: list[Any]) -> None:
    assert HOOK not in settings_of(BOARD)
    params = SimpleNamespace(ray_client_server_port=10001, worker_path="ray's own")
    ray_start.tune(params, head=False)
    Node.__new__(Node).start_ray_processes()
    assert (steps, params.ray_client_server_port) == (["raylet"], 10001)
    assert params.worker_path == "ray's own"


def test_ray_start_leaves_out_the_imports_of_other_commands() -> None:
    """With Ray's own command: the options of `ray start`, and no other command of a module."""
    text = (
        "import atexit, sys; from rkserve.bringup import ray_start; "
        "atexit.register(lambda: print(sorted(n for n in sys.modules if n == 'ray.serve'))); "
        "ray_start.main()"
    )

    def run(*words: str) -> str:
        command = (sys.executable, "-c", text, *words)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return done.stdout + done.stderr

    assert "--node-ip-address" in (printed := run("start", "--help"))
    assert printed.endswith("\n[]\n")
    assert "No such command 'serve'" in run("serve", "--help")
