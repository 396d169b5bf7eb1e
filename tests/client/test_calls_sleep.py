"""Blocks for which models sleep, in both clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rkserve.client import (
    AsyncClient,
    Client,
    LeaseLost,
    OperationFailed,
    PartlyDone,
    Progress,
)
from tests.support.cluster.control_clients import ASKED, SLEEP, WAKE, awaited, once
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored


def sleeping(server: FakeControl) -> FakeControl:
    server.on(SLEEP, ok(envelope("running", kind="sleep"), 202))
    server.on(WAKE, ok(envelope("running", operation_id="op-2", kind="wake"), 202))
    server.on(ASKED, ok(stored("succeeded", kind="sleep")))
    return server.on("GET /v1/operations/op-2", ok(stored("succeeded", kind="wake")))


def blocked(body: Callable[[Any], None], **how: Any) -> dict[str, Callable[[FakeControl], None]]:
    """Return what sleeps for the length of ``body``, in both clients."""

    def once_(server: FakeControl) -> None:
        def use(client: Client) -> None:
            with client.asleep(**how) as lease:
                body(lease)

        once(server, use)

    def awaited_(server: FakeControl) -> None:
        async def use(client: AsyncClient) -> None:
            async with client.asleep(**how) as lease:
                body(lease)

        awaited(server, use)

    return {"sync": once_, "async": awaited_}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_block_sleeps_and_wakes(server: FakeControl, kind: str) -> None:
    sleeping(server)
    told: list[Progress] = []

    def body(lease: Any) -> None:
        assert lease.operation.kind == "sleep"
        assert WAKE not in server.routes
        lease.check()

    blocked(body, level=2, models="m", boards="a*", on_progress=told.append)[kind](server)
    assert server.routes == [SLEEP, ASKED, WAKE, "GET /v1/operations/op-2"]
    assert server.json(0) == {
        "level": 2,
        "mode": "keep",
        "model": ["m"],
        "selector": ["a*"],
        "lease_s": 300.0,
        "async": True,
    }
    assert server.json(2) == {"model": ["m"], "selector": ["a*"], "async": True}
    assert [one.step for one in told] == ["sleep", "wake"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_block_that_raises_wakes_and_its_error_is_the_one_to_see(
    server: FakeControl, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    sleeping(server).on(WAKE, error(409, "operation_conflict"))

    def body(_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        blocked(body)[kind](server)
    assert server.routes[-1] == WAKE
    assert "the sleep 'op-1' ends with its lease" in caplog.text


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_boards_that_cannot_load_are_told_at_the_end_of_a_block(
    server: FakeControl, kind: str
) -> None:
    sleeping(server).on("GET /v1/operations/op-2", ok(stored("partial", kind="wake", **PARTLY)))
    with pytest.raises(PartlyDone, match="sim-1"):
        blocked(lambda _: None)[kind](server)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_did_not_fall_asleep_is_not_entered_and_not_woken(
    server: FakeControl, kind: str
) -> None:
    sleeping(server).on(ASKED, ok(stored("undone", kind="sleep", **PARTLY)))
    with pytest.raises(OperationFailed):
        blocked(lambda _: pytest.fail("the block must not be entered"))[kind](server)
    assert WAKE not in server.routes


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_sleep_that_ended_before_its_block_is_told(server: FakeControl, kind: str) -> None:
    def body(_: Any) -> None:
        server.now += 61

    with pytest.raises(LeaseLost, match="The sleep of operation 'op-1'"):
        blocked(body, lease_s=60)[kind](sleeping(server))
    assert WAKE in server.routes
