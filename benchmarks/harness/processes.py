"""The processes of the benchmarks: cluster, clients, a controller and bare bindings."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from benchmarks.harness.exchange import Exchange, InterruptedAnswer
from rkserve.api.common.renderer import Renderer
from rkserve.bench.processes import BenchFailed, CommandProcess, Json, OnProgress
from rkserve.bench.systems import MODEL, RELEASE, BenchProcesses, Note
from rkserve.config.board_group import BoardGroupConfig, SimulatedConfig
from rkserve.config.serve_config import engine_environ
from rkserve.native.sim.build import ensure_built

ANSWER_S = 60.0  # more than one paced answer takes, with a queue in front of it
SLACK_S = 5.0  # a child answers a little after its clients gave up
CLIENT, CONTROLLER, BINDING = (
    "benchmarks.harness.client",
    "benchmarks.control.load",
    "benchmarks.harness.binding",
)


class BenchCrew(BenchProcesses):
    """A cluster with its clients and a controller, and bindings that serve without a cluster."""

    def __init__(
        self, folder: Path, note: Note, model: Path = MODEL, *, front: bool | None = None
    ) -> None:
        """See ``BenchProcesses``."""
        super().__init__(folder, note, model, front=front)
        self.renderer = Renderer(self.model)

    def send(self, bodies: Sequence[Json], **command: float) -> None:
        """Start clients on ``bodies``; ``exchanges`` returns their results."""
        self._child(CLIENT).send(self._to(do="load", bodies=list(bodies), **command))

    def exchanges(self, timeout_s: float) -> list[Exchange]:
        """Wait for the clients to end. Raises ``BenchFailed``."""
        answer = self._child(CLIENT).receive(timeout_s)
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
        return post(self.address, path, query, content, timeout_s)

    def control(self, timeout_s: float, heard: OnProgress, **command: Any) -> Json:
        """Load the cluster while a plan is played. Raises ``BenchFailed``."""
        asked = self._to(timeout_s=timeout_s, **command)
        return self._child(CONTROLLER).ask(asked, timeout_s + SLACK_S, heard)

    def sleep_until(self, at_s: float, doing: str) -> None:
        """Sleep, and show the time left."""
        while (left_s := at_s - time.monotonic()) > 0:
            self.note(f"{doing}, {left_s:.0f} s to go")
            time.sleep(min(left_s, 1.0))

    def binding(self, profile: str) -> CommandProcess:
        """Return a process with the binding alone, at a board's pace; it ends with the others."""
        child = self._binding(SimulatedConfig(profile=profile, release=RELEASE), 1)
        self._stack.callback(child.close)
        return child

    @contextmanager
    def batching_binding(
        self,
        profile: str,
        n_batch: int,
        *,
        time_scale: float,
        gain: str,
        quirks: Mapping[str, bool] | None = None,
    ) -> Iterator[CommandProcess]:
        """Give a process with the binding alone for as long as the block lasts."""
        simulated = SimulatedConfig.model_validate(
            {
                "profile": profile,
                "release": RELEASE,
                "time_scale": time_scale,
                "batch_gain": gain,
                "load_s": 0.0,  # loading is not what is measured
            }
        )
        child = self._binding(simulated, n_batch, quirks)
        try:
            yield child
        finally:
            child.close()

    def _binding(
        self, simulated: SimulatedConfig, n_batch: int, quirks: Mapping[str, bool] | None = None
    ) -> CommandProcess:
        group = BoardGroupConfig(name="alone", model=MODEL, simulated=simulated)
        child = self._process(BINDING, engine_environ(group, "alone"))
        model, library = str(self.model.path), str(ensure_built(RELEASE))
        command: Json = {"do": "load", "model": model, "library": library, "n_batch": n_batch}
        command["quirks"] = dict(quirks or {})
        try:
            child.ask(command, ANSWER_S)
        except BaseException:
            child.close()
            raise
        return child

    def _to(self, **command: Any) -> Json:
        host, port = self.address
        return {"host": host, "port": port, **command}

    def _ask_client(self, **command: Any) -> Json:
        until_s = time.monotonic() + ANSWER_S
        return self._child(CLIENT).ask(self._to(until_s=until_s, **command), ANSWER_S + SLACK_S)


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
