"""The child processes of a benchmark, the cluster and its clients, and the calls to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rkserve.api.common.renderer import Renderer
from rkserve.bench.harness.child import BenchFailed, CommandProcess, Json
from rkserve.bench.harness.procfs import PROC, ProcessReading, read
from rkserve.bench.harness.stream import Exchange, InterruptedAnswer
from rkserve.config.serve_config import resolve_folder
from rkserve.core.ports import free_port, free_ports
from rkserve.deployments.haproxy import FLAG, PATIENCE, available, environ
from rkserve.models.folder import open_model_folder

HOST = "127.0.0.1"
MODEL = Path("models/sim-chat")
RELEASE = "1.3.0"
ANSWER_S = 60.0  # more than one paced answer takes, with a queue in front of it
SLACK_S = 5.0  # a child answers a little after its clients gave up
START_S, DEPLOY_S = 300.0, 300.0
RAY_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    **PATIENCE,
}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    """The deployment of a cluster. ``park`` enables its boards' disk tier for conversations.

    ``queue_limit`` is how many requests may wait for one board; ``crash_limit`` crashes of its
    engine quarantine it, and ``health_check_timeout_s`` is Ray's limit for its health check.
    ``args`` are more of the application's arguments, ``{"router": {"policy": "prefix"}}`` say.
    """

    profile: str
    boards: int = 1
    time_scale: float = 1.0
    park: bool = True
    queue_limit: int = 16
    crash_limit: int = 3
    health_check_timeout_s: float = 5.0
    args: Mapping[str, Any] = field(default_factory=dict)


class BenchProcesses:
    """Child processes, each started at its first use and ended by ``close``.

    ``folder`` takes all files, ``model`` is the folder of the model that the boards serve.
    """

    def __init__(
        self, folder: Path, say: Say, model: Path = MODEL, *, front: bool | None = None
    ) -> None:
        """``front``: with HAProxy before the Routers; None is where it can be had."""
        self.say = say
        self.model = open_model_folder(resolve_folder(model))
        self.renderer = Renderer(self.model)
        self._folder = folder
        self._front = available() if front is None else front
        self._stack = ExitStack()
        self._port = free_port()
        self._client: CommandProcess | None = None
        self._cluster: CommandProcess | None = None
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
        """End all children and what they started."""
        self._stack.close()

    def rest(self) -> None:
        """End the cluster; the next deployment starts another one."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = self._deployed = None

    # -- the cluster and its clients ----------------------------------------------------------

    def deploy(self, wanted: SimulatedDeployment) -> None:
        """Replace the deployment of the cluster; return when all boards are ready."""
        if self._deployed == wanted:
            return
        self.say(f"deploying {wanted.boards} board{'s' if wanted.boards > 1 else ''}")
        self._deployed = None
        command = {"do": "deploy", "release": RELEASE, "model": str(self.model.path)}
        place = {"folder": str(self._folder), "port": self._port}
        self._cluster_child().ask({**command, **place, **asdict(wanted)}, DEPLOY_S)
        self._deployed = wanted

    def send(self, bodies: Sequence[Json], **command: float) -> None:
        """Start clients on ``bodies``; ``exchanges`` returns their results."""
        self._client_child().send(self._to(do="load", bodies=list(bodies), **command))

    def exchanges(self, timeout_s: float) -> list[Exchange]:
        """Wait for the clients to end. Raises ``BenchFailed``."""
        answer = self._client_child().receive(timeout_s)
        return [Exchange.from_json(value) for value in answer["exchanges"]]

    def answer(self, body: Json) -> tuple[Exchange, str]:
        """Send one request and return its exchange and text. Raises ``BenchFailed``."""
        found = self._ask_client(do="talk", body=body)
        return Exchange.from_json(found["exchange"]), found["text"]

    def hang_up(self, **command: Any) -> Json:
        """Hang up during an answer; see ``client.hang_up``. Raises ``BenchFailed``."""
        return self._ask_client(do="hang up", **command)

    def interrupt(self, body: Json, pauses_s: Sequence[float], rest_s: float) -> InterruptedAnswer:
        """Pause and resume an answer; see ``client.interrupt``. Raises ``BenchFailed``."""
        command = {"body": body, "pauses_s": list(pauses_s), "rest_s": rest_s}
        return InterruptedAnswer.from_json(self._ask_client(do="interrupt", **command))

    def post(self, path: str, query: Json, content: bytes, timeout_s: float) -> Json:
        """Send bytes to the cluster and return its answer. Raises ``BenchFailed``."""
        return post((HOST, self._port), path, query, content, timeout_s)

    def read(self) -> ProcessReading:
        """Read all processes of the cluster and of its clients, and the machine."""
        return read(PROC, self.pids())

    def pids(self) -> list[int]:
        """Return the roots of the process trees of servers and clients."""
        children = (self._cluster, self._client, *self._others())
        return [child.pid for child in children if child is not None]

    def sleep_until(self, at_s: float, doing: str) -> None:
        """Sleep, and show the time left."""
        while (left_s := at_s - time.monotonic()) > 0:
            self.say(f"{doing}, {left_s:.0f} s to go")
            time.sleep(min(left_s, 1.0))

    # -- the children -------------------------------------------------------------------------

    def _others(self) -> tuple[CommandProcess | None, ...]:
        """Return further children, started by a subclass, that serve or send requests."""
        return ()

    def _to(self, **command: Any) -> Json:
        return {"host": HOST, "port": self._port, **command}

    def _ask_client(self, **command: Any) -> Json:
        until_s = time.monotonic() + ANSWER_S
        return self._client_child().ask(self._to(until_s=until_s, **command), ANSWER_S + SLACK_S)

    def _client_child(self) -> CommandProcess:
        if self._client is None:
            self._client = self._child("rkserve.bench.harness.client")
            self._stack.callback(self._client.close)
        return self._client

    def _cluster_child(self) -> CommandProcess:
        if self._cluster is None:
            self.say("starting Ray")
            self._cluster = self._child("rkserve.bench.harness.cluster", self._cluster_environ())
            self._stack.callback(self._cluster.close)
            folder, port = str(self._folder), self._port
            self._cluster.ask({"do": "start", "folder": folder, "port": port}, START_S)
        return self._cluster

    def _cluster_environ(self) -> dict[str, str]:
        if not self._front:
            return {**RAY_ENVIRON, FLAG: "0"}
        place = self._folder / "f"  # short: the path of HAProxy's socket may have 97 characters
        return {**RAY_ENVIRON, **environ(place, free_ports())}

    def _child(self, module: str, environ: dict[str, str] | None = None) -> CommandProcess:
        return CommandProcess(module, self._folder / f"{module.rpartition('.')[2]}.log", environ)


def chat_body(model: str, messages: Sequence[Json], new_tokens: int, **more: Any) -> Json:
    """Return the body of a streamed, greedy call for ``new_tokens``."""
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def post(
    address: tuple[str, int], path: str, query: Json, content: bytes, timeout_s: float
) -> Json:
    """Send bytes and return the answer's JSON. Raises ``BenchFailed`` where it is not HTTP 200."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    with contextlib.closing(connection):
        try:
            headers = {"content-type": "application/octet-stream"}
            connection.request("POST", f"{path}?{urlencode(query)}", content, headers)
            answer = connection.getresponse()
            words = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            raise BenchFailed(f"{path}: {exc!r}") from exc
    if answer.status != http.client.OK:
        raise BenchFailed(f"{path} was answered by HTTP {answer.status}: {words.decode()}")
    found: Json = json.loads(words)
    return found
