"""How tests pause generations and look at them; the boards are those of pausing_fixtures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.cluster.local_cluster import App
from tests.support.http.talk import Reply, act, streaming

KEY = "key of the operator"
OPERATOR = {"authorization": f"Bearer {KEY}"}
HOLD_S = 1.5
TALK_S = 120.0  # who waits for a stream that never goes on fails, and does not hang
# 30 ms for a token: an answer of COUNT takes seconds. Fast is as fast as it goes.
SLOW, FAST = 0.5, 0.0
COUNT, COUNTED = "Count to 50", ", ".join(str(n) for n in range(1, 51)) + "."
KEPT_OR_NOT = [pytest.param(True, id="kept"), pytest.param(False, id="recomputed")]
# For tests of the Router's part, which is the same either way.
KEPT_FIRST = [KEPT_OR_NOT[0], pytest.param(False, id="recomputed", marks=pytest.mark.long)]


BRIEF = "brief"
WITH_USAGE: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}


def pace(app: App, time_scale: float) -> None:
    """Let all boards go on at another speed, from their next token on."""
    for number in range(app.boards):
        app.cluster.control(f"{app.group}-{number}", f"time_scale={time_scale}")


def stop_at(app: App, gate: str) -> None:
    """Stop all boards at a gate (docs/reference/simulator.md) until ``pace`` is called."""
    for number in range(app.boards):
        app.cluster.control(f"{app.group}-{number}", f"gate={gate}", "time_scale=0")


def engines(app: App) -> dict[str, int]:
    return {report.board_id: report.engine_pid for report in app.reports()}


def is_free(app: App) -> bool:
    return not any(r.running + r.queued + r.paused for r in app.reports())


def settle(app: App) -> None:
    """Wait until both Routers have heard that both boards are idle: each may be the next asked."""
    for _ in range(10):
        app.settled()


def run(app: App, talk: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run a talk with a client for the application."""

    async def with_client() -> None:
        async with app.http() as http:
            await asyncio.wait_for(talk(http), TALK_S)

    asyncio.run(with_client())


@asynccontextmanager
async def paused(
    http: httpx.AsyncClient, text: str = COUNT, **extra: Any
) -> AsyncIterator[tuple[Reply, dict[str, Any]]]:
    """Open a stream and pause it after a few tokens; also gives what the pause's answer says."""
    async with streaming(http, text, **{"temperature": 0, **extra}) as reply:
        await reply.read(deltas=5)
        yield reply, await act(http, reply.id, "pause")


async def refused(http: httpx.AsyncClient, reply: Reply, action: str, **body: Any) -> Any:
    """Return the error of a control call that must be refused, with its status."""
    response = await http.post(f"/v1/generations/{reply.id}/{action}", json=body)
    assert response.status_code >= 400, response.text
    return {"status": response.status_code, **response.json()["error"]}


async def listed(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    response = await http.get("/v1/generations", headers=OPERATOR)
    assert response.status_code == 200, response.text
    assert response.json()["failed"] == []
    found: list[dict[str, Any]] = response.json()["data"]
    return found


async def the_only(http: httpx.AsyncClient, seen: Callable[[dict[str, Any]], bool]) -> str:
    """Return the id of the only generation that there is, once it looks as it has to."""
    for _ in range(600):
        found = await listed(http)
        if len(found) == 1 and seen(found[0]):
            return str(found[0]["id"])
        await asyncio.sleep(0.05)
    raise AssertionError(f"these generations: {found}")


async def generated(http: httpx.AsyncClient, reply: Reply, tokens: int) -> None:
    """Wait until the board has that many tokens of it; what its client has read may be older."""
    for _ in range(600):
        state = await state_of(http, reply)
        if state["state"] == "generating" and state["tokens"] >= tokens:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"it is {state}")


async def state_of(http: httpx.AsyncClient, reply: Reply) -> dict[str, Any]:
    response = await http.get(f"/v1/generations/{reply.id}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found
