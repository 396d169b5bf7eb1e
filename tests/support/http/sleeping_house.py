"""A Router without Ray whose models sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rkserve.control import sleep as sleep_changes
from rkserve.control.calls import OperationKind, OperationRequest
from rkserve.control.operations import (
    OperationOutcome,
    OperationState,
)
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import Desired, PauseMode, Scope, SleepLevel
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.fakes import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import House

K = OperationKind

MODEL = "sim-chat"

ASLEEP = BoardState.ASLEEP


def house(*boards: str, **head: Any) -> House:
    """Boards that answer, and a Coordinator."""
    return House(FakeBoards.answering(*(boards or ("a",))), head=FakeHead(**head))


def send(of: House, method: str, path: str, **rest: Any) -> Any:
    """Make one request."""
    return run_loop(of(method, path, **rest))


def slept(*boards: str, mode: PauseMode = PauseMode.KEEP, wakes: bool = True) -> Desired:
    """What the cluster shall be once its model was put to sleep."""
    scope = Scope((MODEL,), boards)
    return sleep_changes.sleep(
        Desired(6), "op-9", scope, mode, SleepLevel.UNLOADED, now_s=0.0, wakes=wakes
    )


def napping(
    *boards: str,
    desired: Desired | None = None,
    wake: Callable[[OperationRequest], Any] | None = None,
) -> House:
    """Boards whose model is unloaded, and a Coordinator that wakes them."""
    names = boards or ("a", "b")
    of = house(*names, desired=slept() if desired is None else desired)
    slept_well = {"state": ASLEEP, "level": 1, "epoch": 7, "queue_limit": 99}
    of.boards.reported = [report(name, **slept_well) for name in names]
    of.head.says["perform"] = wake or (lambda call: woken(of, call))
    return of


def woken(of: House, call: OperationRequest) -> OperationOutcome:
    """Say, as the Coordinator does, that boards are about to load."""
    assert call.kind is K.WAKE
    assert (call.params, call.who) == ({"models": [MODEL], "requested": True}, "request")
    assert call.background
    of.head.desired, _ = sleep_changes.wake_for_request(of.head.desired, MODEL)
    return of.head.outcome(call, 202, state=OperationState.RUNNING, results={})
