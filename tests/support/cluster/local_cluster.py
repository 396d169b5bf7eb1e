"""A Ray cluster of this machine for the tests that need one: started, questioned and ended here.

It has ports, a temporary folder and lock files of its own, so that it disturbs no other cluster of
the same machine, and no process of it is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rkserve.bringup import ray_worker
from rkserve.config.board_group import CPU
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.child_process import free_port
from rkserve.deployments.haproxy import METRICS_MS, PATIENCE
from tests.support.paths import PROJECT

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

MODEL = "sim-chat"
# Each look costs boards and Routers a part of a busy core.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.25
# For addresses that begin with http, where it only spares httpx to read 140 certificates each time.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# A cluster starts in 10 s on two idle cores, and in minutes where others compute, too.
START_S = 300.0
_ENVIRON = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    **PATIENCE,
    # A node that is removed counts as a failed start of each group that cannot start on it.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1000000",
    # Ray's own 15 lets all else on the machine go first, and these tests are what one waits for.
    "RAY_worker_niceness": "0",
    # At Serve's own 0.1 s an idle controller takes a twentieth of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # As behind HAProxy: at Serve's own 0.1 s no replica and no proxy is ever idle.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": str(METRICS_MS),
}
# A raylet ends itself where a part of it does not come up, which was seen on a busy machine once in
# some hundred starts; what a board does then, as systemd does for it, is to join again.
JOIN_TRIES = 3
_SETTLED_S = 3.0
_SYSTEM = {
    # A node that was removed is noticed after three of these.
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    # For Ray's dashboard, which is not started: every process reports every second otherwise.
    "enable_metrics_collection": False,
    "task_events_report_interval_ms": 0,
    # Processes that no replica uses: each has an environment of its own.
    "prestart_worker_first_driver": False,
}


def wait_for(
    what: str,
    look: Callable[[], T | None],
    timeout_s: float = 60.0,
    *,
    instead: Callable[[], object] | None = None,
) -> T:
    """Return the result of ``look`` once it is true.

    Args:
        what: names the condition, for the failure's message.
        look: called again and again.
        timeout_s: seconds until the failure.
        instead: returns the state that the failure's message shows.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = SHORTEST_PAUSE_S
    while not (found := look()):
        if time.monotonic() >= deadline_s:
            state = "" if instead is None else f", but: {instead()}"
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}{state}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
    return found


# What tells an old report of a board from its latest one.
_STATE = "rkserve_board_state"
_FIGURES = {
    "rkserve_board_requests_total": "requests",
    "rkserve_board_aborted_total": "aborted",
    "rkserve_board_failed_total": "failed",
    "rkserve_board_running": "running",
    "rkserve_engine_starts_total": "engine_starts",
}


@dataclass
class LocalCluster:
    """One Ray cluster with Serve; ``folder`` holds all its files."""

    folder: Path
    port: int
    cluster: Any
    homes: int = field(default=0)
    shared: list[str] = field(default_factory=list)  # applications of several test files
    handles: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the proxy listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_dir(self) -> Path:
        """Where control files of simulated boards are looked for."""
        return self.folder / "control"

    @property
    def python_dir(self) -> Path:
        """A folder from which every process of the cluster can import."""
        return self.folder / "python"

    def model_copy(self, name: str, shelf: str = "models", **settings: Any) -> Path:
        """Copy the model's folder under another name, with more settings and without adapters."""
        target = self.folder / shelf / name
        shutil.rmtree(target, ignore_errors=True)  # of an application that is gone
        without = shutil.ignore_patterns("adapters")
        shutil.copytree(PROJECT / "models" / MODEL, target, ignore=without)
        with (target / "rkserve.yaml").open("a", encoding="utf-8") as file:
            file.writelines(f"{key}: {value}\n" for key, value in settings.items())
        return target

    def simulated(self, group: str, boards: int, **settings: Any) -> dict[str, Any]:
        """Return the settings of a group of boards that run twenty times as fast as real ones."""
        simulated = {
            "boards": boards,
            "time_scale": 0.05,
            "load_s": 0.2,
            "control_dir": str(self.control_dir),
            **settings.pop("simulated", {}),
        }
        # A gate that holds a run back, or a busy machine, is no hang.
        patience = {"least_s": 30.0, **settings.pop("patience", {})}
        return {
            "name": group,
            "model": f"models/{MODEL}",
            "simulated": simulated,
            "patience": patience,
            **settings,
        }

    def deploy(self, name: str, args: dict[str, Any]) -> str:
        """Build an application, hand it to Serve under ``/name``, and return its URL."""
        from ray import serve

        from rkserve.app import build

        # One application alone may keep its ledger there.
        kept = {"data_dir": str(self.folder / "data" / name), **args.get("coordinator", {})}
        router = {"replicas": 1, **args.get("router", {})}  # each is a process that has to start
        config = {
            "state_dir": str(self.folder / "state"),
            "channel": {"silence_s": 10.0},  # longer than a busy machine keeps a process waiting
            **args,
            "coordinator": kept,
            "router": router,
        }
        target = serve.RunTarget(build(config), name=name, route_prefix=f"/{name}")
        serve.run_many([target], wait_for_applications_running=False)
        return f"{self.url}/{name}"

    def delete(self, name: str) -> None:
        """Take an application away again."""
        from ray import serve

        serve.delete(name)

    def delete_shared(self) -> None:
        """Take away the applications whose last test has run, without waiting for it."""
        from ray import serve

        while self.shared:
            serve.delete(self.shared.pop(), _blocking=False)

    def reports(self, app: str, group: str) -> list[BoardReport]:
        """Ask every board of a group for its report, past the Router; sorted by board."""
        from ray import serve
        from ray.serve.exceptions import DeploymentUnavailableError

        # Each handle is a client of Serve's controller for as long as this process runs.
        if (app, group) not in self.handles:
            self.handles[app, group] = serve.get_deployment_handle(f"Board-{group}", app)
        handle = self.handles[app, group]
        try:
            answers = handle.broadcast("report").results(timeout_s=20, return_exceptions=True)
        except DeploymentUnavailableError:
            return []  # no replica at all
        found = [answer for answer in answers if isinstance(answer, BoardReport)]
        return sorted(found, key=lambda report: report.board_id)

    def status(self, app: str, group: str) -> str:
        """Return what ``serve status`` says of a group's deployment."""
        from ray import serve

        deployments = serve.status().applications[app].deployments
        deployment = deployments.get(f"Board-{group}")
        return "" if deployment is None else str(deployment.message)

    def control(self, board_id: str, *lines: str) -> None:
        """Tell a simulated board what to do from its next token on; no line: nothing special."""
        target = self.control_dir / f"{board_id}.control"
        fresh = target.with_suffix(".fresh")
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        fresh.replace(target)  # a board never reads half a file

    def add_board_node(self, *, address: str = "localhost", **environ: str) -> Any:
        """Join a node with an NPU, as ``ray start --resources='{"rknpu": 1}'`` on a board does.

        Its home is its own, so that ``state_dir: ~/...`` differs from node to node as the disks of
        real boards do. Nodes with one ``address`` have one name, as their boards have.
        """
        self.homes += 1
        home = self.folder / f"home-{self.homes}"
        home.mkdir()
        for _ in range(JOIN_TRIES):
            node = self.cluster.add_node(
                num_cpus=1,
                node_ip_address=address,
                resources={"rknpu": 1},
                env_vars={"HOME": str(home), **environ},
                include_dashboard=False,
                temp_dir=str(self.folder / "ray"),
            )
            if _outlives_its_start(node):
                return node
            _LOG.warning("a raylet ended right after it had joined; %s", _last_words(self.folder))
            self.remove_node(node)
        raise AssertionError(f"no raylet of {JOIN_TRIES} outlived its start")

    def remove_node(self, node: Any) -> None:
        """Cut a node off as a power failure would."""
        self.cluster.remove_node(node, allow_graceful=False)


@dataclass(frozen=True)
class App:
    """One deployed application with one group of simulated boards."""

    cluster: LocalCluster
    name: str
    group: str
    boards: int

    @classmethod
    def deploy(cls, cluster: LocalCluster, group: str, boards: int, **settings: Any) -> App:
        """Deploy simulated boards; ``router`` is the Router's, other settings are the group's."""
        router = settings.pop("router", {})
        one = cluster.simulated(group, boards, **settings)
        cluster.deploy(group, {"boards": [one], "router": router})
        return cls(cluster, group, group, boards)

    @property
    def url(self) -> str:
        """Where the application answers."""
        return f"{self.cluster.url}/{self.name}"

    def http(self) -> httpx.AsyncClient:
        """A plain client for the application; paths are relative to it."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits, verify=NO_TLS)

    def http_sync(self) -> httpx.Client:
        """The same for code that does nothing else meanwhile."""
        return httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)

    def reports(self) -> list[BoardReport]:
        """Ask every board for its report."""
        return self.cluster.reports(self.name, self.group)

    def report(self, board_id: str) -> BoardReport | None:
        """Return the report of one board, None while it has no replica that answers."""
        found = (r for r in self.reports() if r.board_id == board_id)
        return next(found, None)

    def replica_pid(self, deployment: str) -> int:
        """Return the process of a deployment's only replica, once there is one."""
        mark, folder = f"ServeReplica:{self.name}:{deployment}", str(self.cluster.folder)

        def find() -> int | None:
            for process in psutil.process_iter():
                try:
                    is_it = any(mark in word for word in process.cmdline())
                    if is_it and process.environ().get("RAY_TMPDIR") == folder:
                        return process.pid
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            return None

        return wait_for(f"a {deployment} of {self.name}", find)

    def ready(self) -> None:
        """Wait until every model has a board that serves."""

        def ready() -> bool:
            # On a busy machine Serve's proxy may not listen yet, or take its time to answer.
            with self.http_sync() as http, contextlib.suppress(httpx.TransportError):
                return http.get("/ready").status_code == 200
            return False

        wait_for(f"{self.name} to be ready", ready, START_S)

    def waiting(self) -> int:
        """Return how many generations wait at the Router for a place."""
        return int(sum(one.value for one in self._samples("rkserve_queue_depth")))

    def _samples(self, *names: str) -> list[Sample]:
        """Return the samples of these metrics; to read those of all takes longer than to ask."""
        with self.http_sync() as http:
            text = http.get("/metrics").text
        wanted = re.compile(rf"(?:{'|'.join(names)})[{{ ]")
        lines = [line for line in text.splitlines() if wanted.match(line)]
        families = text_string_to_metric_families("\n".join([*lines, ""]))
        return [sample for family in families for sample in family.samples]

    def settled(self) -> list[BoardReport]:
        """Wait until every board is ready and idle, and the Router has heard so."""

        def settled() -> list[BoardReport] | None:
            found = self.reports()
            idle = [r for r in found if r.state is BoardState.READY and not r.running + r.queued]
            if not len(idle) == len(found) == self.boards:
                return None
            heard = self._heard()  # also of the boards of other groups
            return found if all(heard.get(r.board_id) == _figures(r) for r in found) else None

        return wait_for(f"the boards of {self.name} to settle", settled, START_S)

    def _heard(self) -> dict[str, dict[str, float]]:
        """Return what the Router last heard of each board."""
        heard: dict[str, dict[str, float]] = {}
        for sample in self._samples(_STATE, *_FIGURES):
            if sample.labels.get("state", BoardState.READY.value) == BoardState.READY.value:
                heard.setdefault(sample.labels["board"], {})[sample.name] = sample.value
        return heard


def _outlives_its_start(node: Any) -> bool:
    deadline_s = time.monotonic() + _SETTLED_S
    while time.monotonic() < deadline_s:
        if not node.remaining_processes_alive():
            return False
        time.sleep(0.1)
    return True


def _last_words(folder: Path) -> str:
    """The ends of the logs in which a raylet says why it ended."""
    logs = [*(folder / "ray").glob("session_*/logs/raylet*.*")]
    newest = sorted(logs, key=lambda path: path.stat().st_mtime)[-4:]
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in newest)


def _figures(report: BoardReport) -> dict[str, float]:
    """What is to be heard of a board that is ready."""
    return {_STATE: 1.0, **{metric: getattr(report, name) for metric, name in _FIGURES.items()}}


@contextlib.contextmanager
def running_cluster() -> Iterator[LocalCluster]:
    """Start a cluster with one node and Serve, and end it with every process of it."""
    # Short: the paths of Ray's sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="rk-", dir="/tmp"))
    for name in ("ray", "control", "state", "python"):
        (folder / name).mkdir()
    path = os.pathsep.join([str(folder / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _environ({**_ENVIRON, "RAY_TMPDIR": str(folder), "PYTHONPATH": path}):
        try:
            yield from _started(folder)
        finally:
            expect_no_process_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _started(folder: Path) -> Iterator[LocalCluster]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    with _servers_with_raylets():
        cluster = _head(Cluster, folder)
    try:
        ray.init(address=cluster.address, namespace="rkserve-tests", log_to_driver=False)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield LocalCluster(folder, port, cluster)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def _head(cluster: Any, folder: Path) -> Any:
    """Start a cluster of Ray's class for them with its head."""
    return cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "resources": {CPU: 1},  # for groups that compute on it
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,  # Ray's autoscaler
            "worker_path": ray_worker.__file__,  # as on heads of users
            "temp_dir": str(folder / "ray"),
            "_system_config": _SYSTEM,
        },
    )


@contextlib.contextmanager
def _servers_with_raylets() -> Iterator[None]:
    """Start Ray's workers on a head as `ray start` does there."""
    from ray._private import services

    from rkserve.bringup import ray_start

    before = services.start_ray_process
    ray_start.start_servers_with_raylets()
    try:
        yield
    finally:
        services.start_ray_process = before


@contextlib.contextmanager
def _environ(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Ray's workers before they have an actor, whose name they take then, and its agents.
_STARTING = (
    "default_worker.py",
    ray_worker.STARTING,
    "dashboard/agent.py",
    "runtime_env/agent/main.py",
)


def expect_no_process_of(folder: Path) -> None:
    """End what outlived Ray's own shutdown, also what lost its parent; needing to is an error."""
    _, left = psutil.wait_procs(_processes_of(folder), timeout=20)
    named = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE:
                continue  # its parent alone has not noticed its end
            # A part of Ray that was starting waits for the head as long as PATIENCE says.
            if not any(part in command for part in _STARTING):
                named.append(f"{process.pid}, child of {process.ppid()}: {command}")
            process.kill()
    assert not named, f"processes outlived the cluster: {named}"


def _processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that were started with our temporary folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
    return found
