"""The table of a board's states: everything it lists, and that nothing else is possible."""

from __future__ import annotations

import itertools

import pytest

from rkserve.board.run.supervisor import OPEN, SICK, TRANSITIONS, BoardEvent, CrashLog, advance
from rkserve.core.board_report import BoardState
from rkserve.core.errors import Misuse

S, E = BoardState, BoardEvent


@pytest.mark.parametrize(
    ("events", "state"),
    [
        pytest.param([E.LOADED], S.READY, id="it loads"),
        pytest.param([E.LOAD_FAILED], S.FAILED, id="it cannot load"),
        pytest.param([E.LOADED, E.ENGINE_DIED], S.RECOVERING, id="a crash"),
        pytest.param([E.LOADED, E.ENGINE_DIED, E.LOADED], S.READY, id="a crash, and back"),
        pytest.param([E.LOADED, E.WATCHDOG], S.HUNG, id="a hang"),
        pytest.param([E.LOADED, E.WATCHDOG, E.ENGINE_ENDED, E.LOADED], S.READY, id="hung, ended"),
        pytest.param(
            [E.LOADED, E.ENGINE_DIED, E.TOO_MANY_CRASHES, E.COOLED, E.LOADED], S.READY, id="cooled"
        ),
        pytest.param([E.LOADED, E.BROKE], S.FAILED, id="a bug of ours"),
        pytest.param([E.STOP], S.STOPPED, id="stopped while it loads"),
        pytest.param([E.LOADED, E.SLEEP], S.ASLEEP, id="asleep"),
        pytest.param([E.LOADED, E.SLEEP, E.WAKE, E.LOADED], S.READY, id="awake again"),
        pytest.param([E.LOADED, E.SLEEP, E.WAKE, E.LOAD_FAILED], S.FAILED, id="not to be woken"),
        pytest.param([E.SLEEP, E.WAKE, E.LOADED], S.READY, id="asleep from the start"),
        pytest.param([E.LOADED, E.ENGINE_DIED, E.SLEEP], S.ASLEEP, id="asleep after a crash"),
    ],
)
def test_a_board_lives(events: list[BoardEvent], state: BoardState) -> None:
    now = S.LOADING
    for event in events:
        now = advance(now, event)
    assert now is state


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in itertools.product(S, E) if pair not in TRANSITIONS],
    ids=lambda value: value.name,
)
def test_what_the_table_does_not_list_is_refused(state: BoardState, event: BoardEvent) -> None:
    with pytest.raises(Misuse, match=event.value):
        advance(state, event)


# "lost" is the Router's word; "joining" is what a board that is well reports until it is told, and
# "fetching" what a replica reports that has no engine to supervise yet.
OF_A_BOARD = [state for state in S if state not in (S.LOST, S.JOINING, S.FETCHING)]


@pytest.mark.parametrize("state", OF_A_BOARD)
def test_every_state_can_be_stopped(state: BoardState) -> None:
    assert advance(state, E.STOP) is S.STOPPED


def test_a_board_takes_requests_only_where_it_can_still_answer_them() -> None:
    assert not OPEN & SICK
    resting = {state for state in OF_A_BOARD if state not in OPEN | SICK}
    assert resting == {S.QUARANTINED, S.STOPPED}


def test_crashes_are_too_many_only_within_the_window() -> None:
    crashes = CrashLog(limit=3, window_s=60)
    assert [crashes.crashed(now_s) for now_s in (0, 30, 60, 61, 62)] == [False] * 3 + [True] * 2
