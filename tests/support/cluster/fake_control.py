"""The control API as a program sees it, in this process: scripted answers, and what was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Answer = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


def envelope(state: str = "succeeded", **changes: Any) -> dict[str, Any]:
    """What every mutating call answers."""
    return {
        "operation_id": "op-1",
        "kind": "pause",
        "state": state,
        "epoch": 7,
        "applied": True,
        "total": 2,
        "succeeded": 2,
        "results": {"sim-0": {"status": "paused", "latency_ms": 12.5, "stopped": 3}},
        "failed": [],
        "phases": {"stopping": 12.5},
        **changes,
    }


def stored(state: str, **changes: Any) -> dict[str, Any]:
    """An operation as the list of operations has it."""
    body = envelope(state, phase="done", params={}, who="local", error=None, **changes)
    return {"id": body.pop("operation_id"), "object": "operation", **body}


PARTLY = {
    "succeeded": 1,
    "failed": [{"board": "sim-1", "error": "board_failed", "message": "It does not answer."}],
}


def ok(body: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=body)


def error(status: int, code: str, *, retry_after: str | None = None, **more: Any) -> httpx.Response:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    said = {"message": f"It is {code}.", "type": "server_error", "param": None, "code": code}
    return httpx.Response(status, json={"error": said, **more}, headers=headers)


@dataclass
class FakeControl:
    """Answers by ``METHOD /path``, in turn; the last one stays. ``now`` is the clock of tests."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    asked: list[httpx.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    now: float = 100.0
    slept: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, route: str, *answers: Answer) -> FakeControl:
        self.answers[route] = list(answers)
        return self

    @property
    def routes(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.asked]

    def json(self, at: int = -1) -> Any:
        return json.loads(self.bodies[at])

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)

    def _answer(self, request: httpx.Request, body: bytes) -> httpx.Response:
        with self.lock:
            self.asked.append(request)
            self.bodies.append(body)
            left = self.answers[f"{request.method} {request.url.path}"]
            said = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(said, Exception):
            raise said
        if callable(said):
            return said(request)
        # A fresh one each time: httpx ties a response to its request.
        return httpx.Response(said.status_code, content=said.content, headers=said.headers)

    def handle(self, request: httpx.Request) -> httpx.Response:
        return self._answer(request, request.read())

    async def handle_async(self, request: httpx.Request) -> httpx.Response:
        return self._answer(request, await request.aread())
