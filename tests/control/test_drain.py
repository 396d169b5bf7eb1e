"""Drained boards as changes of the desired state, and the rules of moving their requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rkserve.control import drain as changes
from rkserve.control.calls import OperationKind
from rkserve.control.operations import conflict
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import OperationConflict
from tests.support.values.control_values import action, recorded

K = OperationKind


def board(name: str, state: BoardState = BoardState.READY, **more: Any) -> BoardReport:
    return BoardReport(name, "m", state, **more)


def test_a_drain_is_in_the_desired_state_until_it_is_ended() -> None:
    drained = changes.drain(Desired(4), ["b2", "b1"], move=False)
    assert (drained.epoch, drained.drained, drained.moved) == (5, ("b1", "b2"), ())
    assert changes.drain(drained, ["b1"], move=False) is drained
    target = drained.target("b1", "m")
    assert (target.drained, target.moves) == (True, False)
    assert not drained.target("b3", "m").drained
    one = changes.undrain(drained, ["b1", "b9"])
    assert (one.epoch, one.drained) == (6, ("b2",))
    assert changes.undrain(one, ["b1"]) is one


def test_the_last_call_decides_what_becomes_of_running_requests() -> None:
    waits = changes.drain(Desired(1), ["b1"], move=False)
    moves = changes.drain(waits, ["b1"], move=True)
    assert (moves.epoch, moves.drained, moves.moved) == (3, ("b1",), ("b1",))
    assert moves.target("b1", "m").moves
    assert changes.drain(moves, ["b1"], move=False).moved == ()
    assert changes.undrain(moves, ["b1"]) == Desired(4)


def test_a_drained_board_follows_pauses_sleeps_and_weights() -> None:
    pause = ActivePause("op", Scope(), PauseMode.KEEP, level=SleepLevel.UNLOADED)
    target = Desired(2, (pause,), drained=("b1",)).target("b1", "m")
    assert (target.drained, target.level) == (True, SleepLevel.UNLOADED)
    assert target.hold is not None


ASLEEP = Desired(2, (ActivePause("op", Scope((), ("b",)), PauseMode.KEEP, level=SleepLevel(1)),))
PAUSED = Desired(2, (ActivePause("op", Scope((), ("b",)), PauseMode.KEEP),))


@pytest.mark.parametrize(
    ("desired", "reports", "why"),
    [
        pytest.param(Desired(1), [board("a"), board("b")], "", id="another one serves"),
        pytest.param(PAUSED, [board("a"), board("b")], "", id="a paused one keeps them"),
        pytest.param(Desired(1), [board("a")], "'mode': 'wait'", id="it is the only one"),
        pytest.param(
            Desired(1), [board("a"), board("b", BoardState.LOST)], "No other", id="others are lost"
        ),
        pytest.param(ASLEEP, [board("a"), board("b")], "No other", id="the other one sleeps"),
        pytest.param(
            Desired(1, drained=("b",)),
            [board("a"), board("b")],
            "rkserve boards undrain b",
            id="the other one is drained",
        ),
        pytest.param(
            Desired(1), [board("a"), BoardReport("b", "n", BoardState.READY)], "'m'", id="model"
        ),
    ],
)
def test_requests_are_moved_only_where_another_board_takes_them(
    desired: Desired, reports: Sequence[BoardReport], why: str
) -> None:
    if not why:
        changes.require_takers(desired, ["a"], reports)
        return
    with pytest.raises(OperationConflict, match=why):
        changes.require_takers(desired, ["a"], reports)


def test_boards_that_are_drained_together_do_not_take_each_other_s_requests() -> None:
    with pytest.raises(OperationConflict):
        changes.require_takers(Desired(1), ["a", "b"], [board("a"), board("b")])


@pytest.mark.parametrize(
    ("report", "left"),
    [
        pytest.param(board("a", epoch=5), 0, id="empty"),
        pytest.param(board("a", epoch=6, running=1, queued=2, paused=3), 6, id="requests"),
        pytest.param(board("a", epoch=4), None, id="a report from before the drain"),
        pytest.param(board("a", BoardState.LOST, epoch=5), None, id="lost"),
        pytest.param(None, None, id="none"),
    ],
)
def test_the_requests_that_are_left_are_those_of_a_report_after_the_drain(
    report: BoardReport | None, left: int | None
) -> None:
    assert changes.left_at(report, 5) == left
    reports = {} if report is None else {"a": report}
    assert changes.remaining(["a"], reports, 5) == ({} if left == 0 else {"a": left})


@pytest.mark.parametrize(
    ("doing", "params", "excluded"),
    [
        pytest.param(K.RESTART, {"boards": ["a"]}, True, id="a restart of it"),
        pytest.param(K.RESTART, {"boards": ["b"]}, False, id="a restart of another board"),
        pytest.param(K.MEASURE, {"boards": ["a"]}, True, id="its measurement"),
        pytest.param(K.REBASE, {"model": "m"}, True, id="other base weights"),
        pytest.param(K.REBASE, {"model": "n"}, False, id="other base weights of another model"),
        pytest.param(K.SLEEP, {"boards": ["a"]}, True, id="it goes to sleep"),
        pytest.param(K.WAKE, {"boards": ["b"]}, False, id="another board wakes up"),
        pytest.param(K.PAUSE, {}, True, id="a pause that still stops boards"),
        pytest.param(K.DRAIN, {"boards": ["a"]}, False, id="a drain that waits for its end"),
        pytest.param(K.ADAPTER_STAGE, {"model": "m"}, False, id="an adapter on its way"),
    ],
)
@pytest.mark.parametrize("asked", [K.RESTART, K.MEASURE])
def test_an_errand_to_a_board_waits_for_operations_on_its_engine(
    asked: OperationKind, doing: OperationKind, params: dict[str, object], excluded: bool
) -> None:
    running = [recorded("op", doing, params=params)]
    why = conflict(running, action(asked, {"models": ["m"], "boards": ["a"]}))
    assert (why is not None) is excluded
