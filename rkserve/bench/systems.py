"""Systems under test: servers that run already, or a cluster of simulated boards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rkserve.bench.processes import (
    PROC,
    BenchFailed,
    CommandProcess,
    ProcessMonitor,
    ProcessReading,
    pids_with,
    read,
    read_named,
)
from rkserve.bench.target import Target
from rkserve.config.serve_config import resolve_folder
from rkserve.core.child_process import free_port, free_ports
from rkserve.deployments.haproxy import FLAG, PATIENCE, available, environ
from rkserve.models.folder import open_model_folder

HOST = "127.0.0.1"
MODEL = Path("models/sim-chat")
RELEASE = "1.3.0"
CLUSTER = "rkserve.bench.cluster"
START_S, DEPLOY_S = 300.0, 300.0
RAY_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    **PATIENCE,
}
Note = Callable[[str], None]
DEFAULT_POLICY = "as configured"


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    """The deployment of a cluster. ``park`` enables its boards' disk tier for conversations.

    Without ``prefix_reuse`` boards recompute each prompt that does not go on with the last one, as
    benchmarks need whose prompts are alike and are measured as new.

    ``queue_limit`` is how many requests may wait for one board; ``crash_limit`` crashes of its
    engine quarantine it, and ``health_check_timeout_s`` is Ray's limit for its health check.
    ``args`` are more of the application's arguments, ``{"router": {"policy": "prefix"}}`` say.
    """

    profile: str
    boards: int = 1
    time_scale: float = 1.0
    park: bool = True
    prefix_reuse: bool = True
    queue_limit: int = 16
    crash_limit: int = 3
    health_check_timeout_s: float = 5.0
    args: Mapping[str, Any] = field(default_factory=dict)


class BenchProcesses:
    """Child processes, each started at its first use and ended by ``close``.

    ``folder`` takes all files, ``model`` is the folder of the model that the boards serve.
    ``front`` puts HAProxy before the Routers; None does so where it is available.
    """

    def __init__(
        self, folder: Path, note: Note, model: Path = MODEL, *, front: bool | None = None
    ) -> None:
        self.note = note
        self.model = open_model_folder(resolve_folder(model))
        self._folder = folder
        self._front = available() if front is None else front
        self._stack = ExitStack()
        self._port = free_port()
        self._children: dict[str, CommandProcess] = {}
        self._deployed: SimulatedDeployment | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the cluster."""
        return HOST, self._port

    @property
    def folder(self) -> Path:
        """The folder of all files."""
        return self._folder

    def close(self) -> None:
        """End all children and their descendants."""
        self._stack.close()

    def rest(self) -> None:
        """End the cluster; the next deployment starts another one."""
        if (cluster := self._children.pop(CLUSTER, None)) is not None:
            cluster.close()
            self._deployed = None

    def deploy(self, wanted: SimulatedDeployment) -> None:
        """Replace the deployment of the cluster; return when all boards are ready."""
        if self._deployed == wanted:
            return
        if CLUSTER not in self._children:
            self.note("starting Ray")
            place = {"folder": str(self._folder), "port": self._port}
            self._child(CLUSTER, self._cluster_environ()).ask({"do": "start", **place}, START_S)
        self.note(f"deploying {wanted.boards} board{'s' if wanted.boards > 1 else ''}")
        self._deployed = None
        command = {"do": "deploy", "release": RELEASE, "model": str(self.model.path)}
        place = {"folder": str(self._folder), "port": self._port}
        self._child(CLUSTER).ask({**command, **place, **asdict(wanted)}, DEPLOY_S)
        self._deployed = wanted

    def read(self) -> ProcessReading:
        """Read all processes of the cluster and of its clients, and the machine."""
        return read(PROC, self.pids())

    def pids(self) -> list[int]:
        """Return the roots of the process trees of servers and clients."""
        return [child.pid for child in self._children.values()]

    def _child(self, module: str, environ: dict[str, str] | None = None) -> CommandProcess:
        """Return the child that runs a module; start it at its first use."""
        if module not in self._children:
            self._children[module] = child = self._process(module, environ)
            self._stack.callback(child.close)
        return self._children[module]

    def _process(self, module: str, environ: dict[str, str] | None = None) -> CommandProcess:
        return CommandProcess(module, self._folder / f"{module.rpartition('.')[2]}.log", environ)

    def _cluster_environ(self) -> dict[str, str]:
        if not self._front:
            return {**RAY_ENVIRON, FLAG: "0"}
        place = self._folder / "f"  # short: the path of HAProxy's socket may have 97 characters
        return {**RAY_ENVIRON, **environ(place, free_ports())}


class SystemUnderTest(ABC):
    """Targets that are loaded one after the other, by name.

    ``about`` describes them for the report. ``time_factor`` stretches all times of traces, and so
    many ``clients`` keep a target busy.
    """

    names: Sequence[str]
    about: Mapping[str, str]
    time_factor = 1.0
    clients: int

    @abstractmethod
    def enter(self, name: str) -> Target:
        """Prepare a target and return its address. Raises ``BenchFailed``."""

    @abstractmethod
    def watch(self) -> ProcessMonitor | None:
        """Return a monitor of its processes."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything that was started."""


@dataclass(frozen=True, slots=True)
class NamedProcesses:
    """Processes under one name: trees below ``pid``, or below all whose command has ``text``."""

    name: str
    pid: int | None = None
    text: str = ""


def parse_watched(given: str) -> NamedProcesses:
    """Read ``name=pid`` or ``name=part of the command``. Raises ``ValueError``."""
    name, equals, what = given.partition("=")
    if not equals or not name.strip() or not what.strip():
        raise ValueError(f"{given!r} is not name=pid or name=part of a command")
    if what.isdigit():
        return NamedProcesses(name.strip(), pid=int(what))
    return NamedProcesses(name.strip(), text=what)


def watch_named(watched: Sequence[NamedProcesses], root: Path = PROC) -> ProcessMonitor:
    """Return a monitor of named processes. Raises ``BenchFailed`` where one has no process."""
    if missing := [one.name for one in watched if not _roots(root, one)]:
        raise BenchFailed(f"no process runs that is {', '.join(missing)}")
    return ProcessMonitor(
        lambda: read_named(root, {one.name: _roots(root, one) for one in watched}), root
    )


def _roots(root: Path, one: NamedProcesses) -> list[int]:
    if one.pid is not None:
        return [one.pid] if (root / str(one.pid)).exists() else []
    return pids_with(root, one.text)


class RunningServers(SystemUnderTest):
    """Servers that run already, somewhere. Their addresses stay out of reports."""

    def __init__(
        self, targets: Sequence[Target], watched: Sequence[NamedProcesses] = (), clients: int = 4
    ) -> None:
        self._targets = {one.name: one for one in targets}
        self._watched = watched
        self.names = list(self._targets)
        self.about = {one.name: f"{one.model}, {one.api}" for one in targets}
        self.clients = clients

    def enter(self, name: str) -> Target:
        """Return the target."""
        return self._targets[name]

    def watch(self) -> ProcessMonitor | None:
        """Return a monitor of the named processes."""
        return watch_named(self._watched) if self._watched else None

    def close(self) -> None:
        """Do nothing: the servers were not started here."""


class SimulatedCluster(SystemUnderTest):
    """A cluster of simulated boards of our own, deployed once for each routing policy."""

    def __init__(
        self, wanted: SimulatedDeployment, policies: Sequence[str], folder: Path, note: Note
    ) -> None:
        self._wanted = wanted
        self._crew = BenchProcesses(folder, note)
        self.names = policies
        speed = f"{wanted.profile}, time scale {wanted.time_scale:g}"
        self.about = {"boards": f"{wanted.boards} simulated boards, {speed}"}
        self.time_factor = wanted.time_scale or 1.0
        self.clients = wanted.boards

    def enter(self, name: str) -> Target:
        """Deploy the boards under this policy."""
        args = {} if name == DEFAULT_POLICY else {"router": {"policy": name}}
        self._crew.deploy(replace(self._wanted, args=args))
        host, port = self._crew.address
        return Target(name, f"http://{host}:{port}", self._crew.model.id)

    def watch(self) -> ProcessMonitor:
        """Return a monitor of the cluster's processes."""
        return ProcessMonitor(self._crew.read)

    def close(self) -> None:
        """End the cluster."""
        self._crew.close()
