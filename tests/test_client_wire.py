"""The client against the Router's real routes, with scripted boards and a scripted Coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_boards import FakeBoards, report
from fake_head import FakeHead, line
from router_house import House

from rkserve.client import AsyncClient, NotFound, OperationFailed
from rkserve.control.calls import Call, Outcome
from rkserve.control.operations import (
    BoardResult,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    ResultStatus,
)
from rkserve.desired import Desired


class Head(FakeHead):
    """Operations in the background are over when they are asked for."""

    end: OperationState = OperationState.SUCCEEDED

    def _operation(self, name: str) -> Operation:
        call = self.calls[int(name.removeprefix("op-")) - 1]
        bad = self.end is not OperationState.SUCCEEDED
        error = OperationError(503, "stage_failed", "The disk is full.") if bad else None
        done: Outcome = self.outcome(call, state=self.end, error=error)
        assert done.operation.id != ""
        return Operation(name, call.kind, self.end, results=self.results, error=error)


def drive(head: FakeHead, use: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """Let a client use a Router; return what it makes of it."""

    async def main() -> Any:
        house = House(FakeBoards([report("a")], {}), head=head)
        await house.service.fleet.refresh()
        await house.cluster.refresh()
        transport = httpx.ASGITransport(house.app, client=("127.0.0.1", 1))
        async with AsyncClient("http://router", transport=transport) as client:
            return await use(client)

    return asyncio.run(main())


def head(**changes: Any) -> Head:
    return Head(desired=Desired(epoch=3, lines=(line(),)), **changes)


def test_a_pause_reaches_the_coordinator_and_its_answer_is_read() -> None:
    asked = head(results={"a": BoardResult(ResultStatus.OK, 12.5, details={"stopped": 2})})

    async def use(client: AsyncClient) -> None:
        done = await client.pause(boards="a*", lease_s=30, key="k-1")
        assert (done.kind, done.state, done.total, done.epoch) == ("pause", "succeeded", 1, 3)
        assert done.results["a"].latency_ms == 12.5
        assert (await client.resume(boards="a")).kind == "resume"

    drive(asked, use)
    pause, resume = asked.calls
    assert (pause.kind, pause.key) == (OperationKind.PAUSE, "k-1")
    assert pause.params["mode"] == "keep"
    assert pause.params["clear_cache"] is False
    assert pause.params["lease_s"] == 30
    assert list(pause.params["boards"]) == ["a"]  # type: ignore[arg-type]
    assert resume.kind is OperationKind.RESUME


def test_a_push_becomes_two_operations() -> None:
    asked = head()
    pushed = drive(
        asked, lambda client: client.push_adapter(b"weights", "tone", "v2", strategy="rolling")
    )
    assert pushed.label == "tone@v2"
    assert b"".join(asked.parts) == b"weights"
    staged, rolled = asked.calls
    assert (staged.kind, staged.background) == (OperationKind.ADAPTER_STAGE, True)
    assert (rolled.kind, rolled.background) == (OperationKind.ADAPTER_ROLLOUT, True)
    assert rolled.params["strategy"] == "rolling"
    assert (staged.key, rolled.key) == (staged.key, f"{staged.key}:rollout")


def test_a_push_that_fails_to_stage_is_not_rolled_out() -> None:
    asked = head()
    asked.end = OperationState.FAILED
    with pytest.raises(OperationFailed, match="The disk is full"):
        drive(asked, lambda client: client.push_adapter(b"weights", "tone", "v2"))
    assert [call.kind for call in asked.calls] == [OperationKind.ADAPTER_STAGE]


@pytest.mark.parametrize(
    ("use", "kind"),
    [
        (lambda c: c.rollout("tone", "v1", weight=0.5, strategy="canary"), "adapter_rollout"),
        (lambda c: c.rollback("tone"), "adapter_rollback"),
        (lambda c: c.promote("tone", model="sim-chat"), "adapter_promote"),
        (lambda c: c.remove_adapter("tone", "v1"), "adapter_retire"),
        (lambda c: c.remove_adapter("tone"), "adapter_retire"),
        (lambda c: c.reset_cache(boards="a"), "cache_reset"),
        (lambda c: c.set_weight_version("step-9"), "label"),
    ],
    ids=["rollout", "rollback", "promote", "remove", "remove all", "reset", "label"],
)
def test_every_change_is_understood(
    use: Callable[[AsyncClient], Awaitable[Any]], kind: str
) -> None:
    asked = head()
    assert drive(asked, use).kind == kind
    (call,) = asked.calls
    assert isinstance(call, Call)
    assert call.key


def test_everything_that_can_be_looked_at_is_read() -> None:
    async def use(client: AsyncClient) -> None:
        paused = await client.is_paused()
        assert (bool(paused), list(paused.boards)) == (False, ["a"])
        assert (await client.cluster())["total"]["boards"] == 1
        assert [one["id"] for one in await client.boards()] == ["a"]
        assert [one["name"] for one in await client.adapters()] == ["tone"]
        assert "sim-chat" in [one["id"] for one in await client.models()]
        assert [one.id for one in await client.operations(limit=2)] == ["op-0", "op-1"]
        assert await client.audit() == [{"who": "local", "kind": "pause"}]
        assert await client.weight_version() == "default"

    drive(head(), use)


def test_an_operation_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(NotFound, match="operation_not_found"):
        drive(FakeHead(), lambda client: client.operation("none"))
