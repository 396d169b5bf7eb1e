"""Clients of a scripted control API, in virtual time, and runs of one call by either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rkserve.client import (
    AsyncClient,
    Client,
)
from tests.support.cluster.fake_control import FakeControl, envelope, ok, stored

PAUSE, RESUME = "POST /pause", "POST /resume"
UPLOAD, ROLLOUT = "POST /v1/lora_adapters", "POST /v1/lora_adapters/tone/rollout"
SLEEP, WAKE, ASKED = "POST /sleep", "POST /wake_up", "GET /v1/operations/op-1"
Use = Callable[[Any], Any]
CONTENT = b"adapter" * 400_000  # several pieces


def waiting(server: FakeControl) -> AsyncClient:
    return AsyncClient(
        "http://head:8000",
        admin_key="secret",
        transport=httpx.MockTransport(server.handle_async),
        sleep=server.sleep_async,
        clock=server.clock,
    )


def pushing(server: FakeControl, *ends: dict[str, Any]) -> None:
    names = {"name": "tone", "version": "v1", "model": "sim-chat"}
    server.on(UPLOAD, ok({**names, **envelope("running", kind="adapter_stage")}, 202))
    server.on(ROLLOUT, ok({**names, **envelope("running", operation_id="op-2")}, 202))
    server.on("GET /v1/operations/op-1", ok(stored("running")), ok(stored("succeeded")))
    server.on("GET /v1/operations/op-2", *(ok(end) for end in ends))


def once(server: FakeControl, use: Use) -> Any:
    client = Client(
        "http://head:8000",
        transport=httpx.MockTransport(server.handle),
        sleep=server.sleep,
        clock=server.clock,
    )
    with client:
        return use(client)


def awaited(server: FakeControl, use: Use) -> Any:
    async def main() -> Any:
        client = AsyncClient(
            "http://head:8000",
            transport=httpx.MockTransport(server.handle_async),
            sleep=server.sleep_async,
            clock=server.clock,
        )
        async with client:
            return await use(client)

    return asyncio.run(main())


both = pytest.mark.parametrize("run", [once, awaited], ids=["sync", "async"])
