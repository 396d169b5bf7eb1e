"""A scripted server of the cluster's view: the page's real files, and events that a test sends.

A thread of its own serves it on a real port, for a browser or a client.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rkserve.core.api_keys import UNLIMITED, KeyScope, digest_of, granted
from rkserve.core.child_process import free_port
from rkserve.core.errors import RkserveError
from rkserve.http.app import add_page
from rkserve.http.auth import Access, Gate, may_operate
from rkserve.router.auth.key_ring import ClientKey, KeyRing, Keys
from tests.support.boards.fake_boards import eventually
from tests.support.paths import PROJECT

EXAMPLE: dict[str, Any] = json.loads(
    (PROJECT / "tests/data/cluster_view/example.json").read_text(encoding="utf-8")
)
POINTS = 60
Json = dict[str, Any]


def example_snapshot() -> Json:
    """The snapshot of the schema's example: three boards, one with a slow DDR clock."""
    found: Json = copy.deepcopy(EXAMPLE["events"][0]["data"])
    return found


def fleet_snapshot(count: int, models: tuple[str, ...] = ("qwen3-1.7b", "qwen3-4b")) -> Json:
    """A snapshot of ``count`` boards in good order, with figures that differ from each other."""
    made = example_snapshot()
    view = made["view"]
    names = [f"rock-{number:02}" for number in range(1, count + 1)]
    entry = {**view["boards"]["rock-03"]}
    view["boards"] = {
        name: {**entry, "node": name, "model": models[at * len(models) // count]}
        for at, name in enumerate(names)
    }
    view["order"] = names
    view["now"] = {
        column: [_varied(values[0], at, column) for at in range(count)]
        for column, values in view["now"].items()
    }
    view["verdict"] = {"verdict": "READY", "reasons": [], "more": 0}
    model = next(iter(view["models"].values()))
    served = [one["model"] for one in view["boards"].values()]
    view["models"] = {
        name: {**model, "boards": served.count(name), "ready": served.count(name)}
        for name in dict.fromkeys(served)
    }
    view["pauses"] = view["rollouts"] = view["requests"] = view["operations"] = {}
    decode = view["now"]["decode_tokens_per_s"]
    made["history"]["columns"] = {
        name: {"decode_tokens_per_s": [_varied(decode[at], at + point, "") for point in range(60)]}
        for at, name in enumerate(names)
    }
    made["history"]["states"] = {name: [{"state": "ready", "points": POINTS}] for name in names}
    return made


def _varied(value: float | None, at: int, column: str) -> float | None:
    if value is None or column in ("ddr_mhz", "npu_mhz", "paused", "running", "queued"):
        return value
    changed = value * (1 + 0.08 * ((at * 7919) % 11 - 5) / 5)
    return round(changed, 1) if isinstance(value, float) else round(changed)


class ClusterServer:
    """The page with scripted answers by ``METHOD /path``; unknown ones are 404 errors.

    With ``key``, the admin key, calls need it or one of ``keys``: secrets with their scope. A
    refusal is a pair of status and message.
    """

    def __init__(
        self, snapshot: Json, *, key: str = "", keys: Mapping[str, KeyScope] | None = None
    ) -> None:
        self.view, self._history = snapshot["view"], snapshot["history"]
        self.port = free_port()
        clients = tuple(
            ClientKey(digest_of(secret.encode()), secret, UNLIMITED, granted([scope]))
            for secret, scope in (keys or {}).items()
        )
        self._closed = bool(key)
        self._gate = Gate(KeyRing(Keys(digest_of(key.encode()), clients) if key else Keys()))
        self.answers: dict[str, Json | tuple[int, str]] = {
            "GET /v1/usage": EXAMPLE["usage"],
            "GET /v1/audit": {"object": "list", "data": []},
        }
        self.lines: list[Json] = []
        self.asked: list[tuple[str, str, Any]] = []
        self.streams = 0
        self.refuses_streams = False
        self._queues: list[asyncio.Queue[tuple[str, Json] | None]] = []
        self._up = threading.Event()

    @property
    def url(self) -> str:
        """The address of the chat page; the cluster's page is at ``cluster`` below it."""
        return f"http://127.0.0.1:{self.port}/"

    def send(self, patch: Json, event: str = "delta") -> None:
        """Send a patch to all viewers, and keep it for later ones."""

        def put() -> None:
            _merge(self.view, patch)
            for queue in self._queues:
                queue.put_nowait((event, patch))

        self._loop.call_soon_threadsafe(put)

    def tick(self, **columns: list[float | None]) -> None:
        """Send another sample."""
        view = self.view
        self.send({"tick": view["tick"] + 1, "at_s": view["at_s"] + 5, "now": columns})

    def cut(self) -> None:
        """End the streams of all viewers."""

        def end() -> None:
            for queue in self._queues:
                queue.put_nowait(None)

        self._loop.call_soon_threadsafe(end)

    def changes(self) -> list[tuple[str, str, Any]]:
        """The calls so far that change something: method, path and body."""
        return [one for one in self.asked if one[0] != "GET"]

    @contextmanager
    def running(self) -> Iterator[ClusterServer]:
        """Serve while this is entered."""
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        thread.start()
        assert self._up.wait(60)
        try:
            yield self
        finally:
            self._server.should_exit = self._server.force_exit = True
            self.cut()
            thread.join(60)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = FastAPI(openapi_url=None)
        app.state.gate = self._gate
        add_page(app)
        app.add_api_route("/v1/cluster/events", self._events)
        app.add_api_route("/{path:path}", self._answer, methods=["GET", "POST"])
        settings: Any = {"log_level": "error", "lifespan": "off", "access_log": False}
        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, **settings)
        )
        serving = asyncio.ensure_future(self._server.serve())
        await eventually(lambda: self._server.started or serving.done())
        self._up.set()
        await serving

    def _refused(self, request: Request) -> Response | None:
        path = request.url.path
        reads = path.endswith(("/events", "/history", "/usage"))
        try:
            if self._closed:
                self._gate.admit(request, Access.READ if reads else Access.OPERATE)
        except RkserveError as refused:
            return _error(refused.http_status, str(refused))
        return None

    async def _events(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if self.refuses_streams:
            return _error(503, "The Router starts.")
        self.streams += 1
        queue: asyncio.Queue[tuple[str, Json] | None] = asyncio.Queue()
        self._queues.append(queue)
        operator = may_operate(request) if self._closed else self.view["operator"]
        first = json.dumps({"view": {**self.view, "operator": operator}, "history": self._history})

        async def stream() -> AsyncIterator[str]:
            yield f"id: 1\nevent: snapshot\ndata: {first}\n\n"
            try:
                while (one := await queue.get()) is not None:
                    yield f"event: {one[0]}\ndata: {json.dumps(one[1])}\n\n: alive\n\n"
            finally:
                self._queues.remove(queue)

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def _answer(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        body = await request.body()
        path = request.url.path
        self.asked.append((request.method, path, json.loads(body) if body else None))
        if path.endswith("/logs") and self.lines:
            text = "".join(f"{json.dumps(line)}\n" for line in self.lines)
            return Response(text, media_type="application/x-ndjson")
        if path.endswith("/history") and f"GET {path}" not in self.answers:
            return JSONResponse(self._board_history(path.split("/")[3]))
        found = self.answers.get(f"{request.method} {path}", (404, f"There is no {path}."))
        return _error(*found) if isinstance(found, tuple) else JSONResponse(found)

    def _board_history(self, board: str) -> Json:
        at = self.view["order"].index(board)
        columns = {
            column: [_varied(values[at], at + point // 9, column) for point in range(360)]
            for column, values in self.view["now"].items()
        }
        return {**EXAMPLE["board_history"], "board": board, "columns": columns}


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


def _merge(target: Json, patch: Json) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value
