"""Pauses that are renewed for the length of a block, by both clients."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

from rkserve.client import (
    Client,
    LeaseLost,
    OperationUndone,
)
from rkserve.client.lease import Lease
from tests.support.cluster.control_clients import (
    PAUSE,
    RESUME,
    waiting,
)
from tests.support.cluster.fake_control import FakeControl, envelope, error, ok


def test_a_block_is_paused_and_resumed(server: FakeControl, client: Client) -> None:
    server.on(PAUSE, ok(envelope())).on(RESUME, ok(envelope()))
    with client.paused(adapter="tone", lease_s=60) as lease:
        assert lease.operation.id == "op-1"
        lease.check()
    assert server.routes == [PAUSE, RESUME]
    assert server.json(0)["lease_s"] == 60
    assert server.json(1) == {"adapter": "tone"}


def test_a_block_that_raises_is_resumed_and_its_error_is_the_one_to_see(
    server: FakeControl, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.on(PAUSE, ok(envelope())).on(RESUME, error(409, "operation_conflict"))
    with pytest.raises(ZeroDivisionError), client.paused():
        raise ZeroDivisionError
    assert server.routes == [PAUSE, RESUME]
    assert "ends with its lease" in caplog.text


def test_what_could_not_be_paused_is_not_entered_and_not_resumed(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, error(504, "operation_timeout"))
    with pytest.raises(OperationUndone), client.paused():
        pytest.fail("the block must not be entered")
    assert server.routes == [PAUSE]


def test_a_lease_is_renewed_while_the_block_runs(server: FakeControl, client: Client) -> None:
    renewed = threading.Event()

    def again(_: httpx.Request) -> httpx.Response:
        if len(server.asked) >= 3:
            renewed.set()
        return ok(envelope())

    server.on(PAUSE, again).on(RESUME, ok(envelope()))
    with client.paused(lease_s=0.03):
        assert renewed.wait(30)
    assert server.routes[-1] == RESUME
    assert server.routes.count(RESUME) == 1
    pauses = [at for at, route in enumerate(server.routes) if route == PAUSE]
    bodies = [{k: v for k, v in server.json(at).items() if k != "timeout_s"} for at in pauses]
    assert all(body == bodies[0] for body in bodies), "another pause would not take its place"
    keys = {server.asked[at].headers["idempotency-key"] for at in pauses}
    assert len(keys) == len(pauses)


def test_a_lease_that_was_not_renewed_in_time_is_told_at_the_end(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, ok(envelope())).on(RESUME, ok(envelope()))
    with pytest.raises(LeaseLost, match="lease of 60 s"), client.paused(lease_s=60):
        server.now += 61
    assert server.routes == [PAUSE, RESUME]


def test_a_lease_that_was_lost_once_stays_lost() -> None:
    now = [0.0]
    lease = Lease(None, 10.0, 0.0, lambda: now[0])  # type: ignore[arg-type]
    now[0] = 9.0
    lease.began(8.0)
    now[0] = 17.0
    assert not lease.lost
    now[0] = 19.0
    assert lease.lost
    lease.began(19.0)
    assert lease.lost


def test_the_asynchronous_client_renews_and_resumes_when_it_is_cancelled(
    server: FakeControl,
) -> None:
    async def main() -> None:
        renewed = asyncio.Event()

        def again(_: httpx.Request) -> httpx.Response:
            if len(server.asked) >= 3:
                renewed.set()
            return ok(envelope())

        server.on(PAUSE, again).on(RESUME, ok(envelope()))

        async def train() -> None:
            async with waiting(server) as client, client.paused(lease_s=0.03):
                await asyncio.Event().wait()

        task = asyncio.create_task(train())
        await asyncio.wait_for(renewed.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert server.routes[-1] == RESUME
