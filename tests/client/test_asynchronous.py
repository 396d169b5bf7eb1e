"""The client against the Router's real routes, with scripted boards and a scripted Coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest

from rkserve.client import AsyncClient, NotFound, OperationFailed, Refused
from rkserve.control.calls import OperationKind, OperationRequest, StoredArtifact
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationOutcome,
    OperationState,
    ResultStatus,
)
from rkserve.core.desired_state import BaseVersion, Desired
from rkserve.core.logs import LogPage, LogRing
from rkserve.models.files import Parameter
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.cluster.fake_head import FakeHead, line, version
from tests.support.http.router_house import House
from tests.support.values.control_values import recorded

NOTHING: Mapping[Any, Any] = {}
TENSORS = [{"name": "lm_head", "shape": [4, 8], "dtype": "torch.bfloat16"}]


class Head(FakeHead):
    """Operations in the background are over when they are asked for."""

    end: OperationState = OperationState.SUCCEEDED

    def _operation(self, name: str) -> ControlOperation:
        call = self.calls[int(name.removeprefix("op-")) - 1]
        bad = self.end is not OperationState.SUCCEEDED
        error = ControlError(503, "stage_failed", "The disk is full.") if bad else None
        done: OperationOutcome = self.outcome(call, state=self.end, error=error)
        assert done.operation.id != ""
        return recorded(name, call.kind, self.end, results=self.results, error=error)


def drive(
    head: FakeHead, use: Callable[[AsyncClient], Awaitable[Any]], says: Mapping[Any, Any] = NOTHING
) -> Any:
    """Let a client use a Router; return what it makes of it."""

    async def main() -> Any:
        house = House(FakeBoards([report("a")], says=dict(says)), head=head)
        await house.service.fleet.refresh()
        await house.cluster.refresh()
        transport = httpx.ASGITransport(house.app, client=("127.0.0.1", 1))
        async with AsyncClient("http://localhost", transport=transport) as client:
            return await use(client)

    return asyncio.run(main())


def head(**changes: Any) -> Head:
    return Head(desired=Desired(epoch=3, lines=(line(),)), **changes)


def test_a_pause_reaches_the_coordinator_and_its_answer_is_read() -> None:
    asked = head(results={"a": BoardOutcome(ResultStatus.OK, 12.5, details={"stopped": 2})})

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


def test_a_sleep_reaches_the_coordinator_as_it_was_asked_for() -> None:
    asked = head()

    async def use(client: AsyncClient) -> None:
        async with client.asleep(level=2, boards="a*", lease_s=90):
            pass
        await client.unload_model("sim-chat")

    drive(asked, use)
    sleep, wake, unload = asked.calls
    assert (sleep.kind, wake.kind) == (OperationKind.SLEEP, OperationKind.WAKE)
    told = {name: sleep.params[name] for name in ("level", "mode", "lease_s", "wakes")}
    assert told == {"level": 2, "mode": "keep", "lease_s": 90, "wakes": False}
    assert list(sleep.params["boards"]) == list(wake.params["boards"]) == ["a"]  # type: ignore[arg-type]
    assert unload.kind is OperationKind.SLEEP
    assert unload.params["wakes"] is None, "as configured"
    assert list(unload.params["models"]) == ["sim-chat"]  # type: ignore[arg-type]


def test_weights_reach_the_coordinator_as_they_were_pushed() -> None:
    base = BaseVersion("sim-chat", "v2", "b" * 64, len(b"base weights"))
    listed = (Parameter("lm_head", (4, 8), "bfloat16"),)
    staged = version("tone", "v2", len(b"weights"))
    found = {"sim-chat@v2": StoredArtifact(base, listed), "tone@v2": StoredArtifact(staged)}
    asked = head(says={"upload_end_model": base, "find_weights": lambda _model, name: found[name]})

    async def use(client: AsyncClient) -> None:
        pushed = await client.push_weights(b"base weights", "v2", parameters=TENSORS)
        assert (pushed.label, pushed.model) == ("sim-chat@v2", "sim-chat")
        await client.receive_weight_update(7, pushed)
        await client.receive_weight_update(8, pushed, TENSORS, in_flight="abort")
        await client.update_weights(pushed, "eight", max_unavailable=2)
        asked.parts.clear()  # of the first upload
        pushed_adapter = await client.push_adapter(b"weights", "tone", "v2", activate=False)
        await client.receive_weight_update(9, pushed_adapter)
        with pytest.raises(Refused, match="does not fit"):
            await client.receive_weight_update(10, "tone@v2", TENSORS)

    drive(asked, use)
    kinds = [call.kind.value for call in asked.calls]
    assert kinds == ["weight_update"] * 2 + ["rebase", "adapter_stage", "weight_update"]
    steps = [call.params.get("step") for call in asked.calls]
    assert steps == [7, 8, None, None, 9]
    told = [call.params.get("in_flight") for call in asked.calls]
    assert told == ["switch", "abort", "pin", None, "switch"]
    assert asked.calls[0].params["digest"] == asked.calls[2].params["digest"] == base.digest
    assert asked.calls[2].params["label"] == "eight"
    assert asked.calls[4].params["name"] == "tone"
    assert all(call.background for call in asked.calls)


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
        (lambda c: c.update_weights("default"), "rebase"),
        (lambda c: c.sleep(2, boards="a", lease_s=9), "sleep"),
        (lambda c: c.wake(["weights"], models="sim-chat"), "wake"),
        (lambda c: c.load_model("sim-chat"), "wake"),
        (lambda c: c.unload_model("sim-chat", 2, "abort", wake_on_request=True), "sleep"),
    ],
    ids=[
        "rollout",
        "rollback",
        "promote",
        "remove",
        "remove all",
        "reset",
        "label",
        "update",
        "sleep",
        "wake",
        "load",
        "unload",
    ],
)
def test_every_change_is_understood(
    use: Callable[[AsyncClient], Awaitable[Any]], kind: str
) -> None:
    asked = head()
    assert drive(asked, use).kind == kind
    (call,) = asked.calls
    assert isinstance(call, OperationRequest)
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
        assert (await client.weight_info())["models"]["sim-chat"]["boards"]["a"]["own"] is True
        asleep = await client.is_sleeping()
        assert (bool(asleep), dict(asleep.boards)) == (False, {"a": None})

    drive(head(), use)


def test_an_operation_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(NotFound, match="operation_not_found"):
        drive(FakeHead(), lambda client: client.operation("none"))


def test_the_log_of_a_board_and_of_all_processes() -> None:
    """Also with characters at which clients split lines."""
    ring = LogRing()
    for message in ("one", "two\u2028", "three"):
        ring.handle(logging.LogRecord("rkserve.x", logging.INFO, "", 1, message, None, None))
    asked = head(says={"logs": LogPage("p")})

    async def use(client: AsyncClient) -> None:
        found = [line["message"] async for line in client.logs("a", tail=2)]
        assert found == ["two\u2028", "three"]
        found = [line["source"] async for line in client.logs()]
        assert found == ["a", "a", "a"]
        with pytest.raises(NotFound, match="nobody"):
            await anext(client.logs("nobody"))

    drive(asked, use, {("replica of a", "logs"): ring.page})
