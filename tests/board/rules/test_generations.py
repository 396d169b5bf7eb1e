"""The table of a generation's states, and what may be asked in each."""

from __future__ import annotations

import itertools

import pytest

from rkserve.board.rules.generations import TRANSITIONS, GenerationEvent, advance, judge
from rkserve.core.board_report import GenerationState
from rkserve.core.errors import Misuse, StateConflict
from rkserve.core.messages import ControlAction

S, E, A = GenerationState, GenerationEvent, ControlAction

PAUSE = (E.STARTED, E.TOKEN, E.PAUSE_ASKED, E.PAUSED)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        pytest.param([E.STARTED, E.TOKEN, E.TOKEN, E.ENDED], S.ENDED, id="it answers"),
        pytest.param([E.ENDED], S.ENDED, id="it waits too long"),
        pytest.param([E.STARTED, E.TOKEN, E.PAUSE_ASKED], S.PAUSING, id="it is being paused"),
        pytest.param([E.STARTED, E.TOKEN, E.PAUSE_ASKED, E.TOKEN, E.PAUSED], S.PAUSED, id="paused"),
        pytest.param(
            [E.STARTED, E.TOKEN, E.PAUSE_ASKED, E.ENDED], S.ENDED, id="its end beats the pause"
        ),
        pytest.param(
            [*PAUSE, E.EDITED, E.EDITED, E.RESUME_ASKED, E.STARTED, E.TOKEN],
            S.GENERATING,
            id="edited twice and resumed with its KV cache",
        ),
        pytest.param(
            [*PAUSE, E.RESUME_ASKED, E.REQUEUED, *PAUSE],
            S.PAUSED,
            id="resumed by way of the queue and paused again",
        ),
        pytest.param(
            [*PAUSE, E.RESUME_ASKED, E.ENDED],
            S.ENDED,
            id="an edit has completed it",
        ),
        pytest.param([E.STARTED, E.TOKEN, E.REWOUND, E.STARTED], S.PREFILLING, id="rewound"),
        pytest.param(
            [E.STARTED, E.TOKEN, E.PAUSE_ASKED, E.ABORT_ASKED, E.PAUSED, E.ENDED],
            S.ENDED,
            id="an abort overtakes a pause",
        ),
        pytest.param(
            [E.ABORT_ASKED, E.ABORT_ASKED, E.ENDED], S.ENDED, id="aborted twice in the queue"
        ),
    ],
)
def test_a_generation_lives(events: list[GenerationEvent], state: GenerationState) -> None:
    now = S.QUEUED
    for event in events:
        now = advance(now, event)
    assert now is state


@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(state, event, id=f"{event.name} when {state.value}")
        for state, event in itertools.product(S, E)
        if (state, event) not in TRANSITIONS
    ],
)
def test_what_the_table_does_not_list_is_an_error(
    state: GenerationState, event: GenerationEvent
) -> None:
    with pytest.raises(Misuse, match=f"'{event.value}' cannot happen.*{state.value}"):
        advance(state, event)


ALLOWED = {
    A.PAUSE: {S.GENERATING},
    A.EDIT: {S.PAUSED},
    A.RESUME: {S.PAUSED},
    A.ABORT: set(S) - {S.ENDED},
}


@pytest.mark.parametrize(
    ("action", "state"), [*itertools.product(A, S)], ids=lambda value: str(value.value)
)
def test_an_action_is_allowed_or_refused_with_the_state_in_the_message(
    action: ControlAction, state: GenerationState
) -> None:
    if state in ALLOWED[action]:
        assert judge(state, action) in {S.PAUSING, S.PAUSED, S.RESUMING, S.ABORTING}
        return
    with pytest.raises(StateConflict) as refused:
        judge(state, action)
    assert f"Cannot {action.value} a generation that is {state.value}." in refused.value.message
    assert refused.value.http_status == 409


def test_a_refusal_says_what_to_do_instead() -> None:
    with pytest.raises(StateConflict, match=r"Pause it first\."):
        judge(S.GENERATING, A.EDIT)
    with pytest.raises(StateConflict, match="after its first token"):
        judge(S.PREFILLING, A.PAUSE)


def test_every_state_can_end_and_none_leaves_its_end() -> None:
    for state in set(S) - {S.ENDED}:
        assert advance(state, E.ENDED) is S.ENDED
        assert judge(state, A.ABORT) is S.ABORTING
    assert not [state for state, _ in TRANSITIONS if state is S.ENDED]
