"""The state table of a handle, pair by pair, against a grid that is written the other way round."""

from __future__ import annotations

import itertools

import pytest

from rkserve.core.errors import Misuse
from rkserve.native.binding.preconditions import HandleEvent, HandleState, advance

# One column per event, in this order; one letter per cell says the state after, a dot is Misuse.
EVENTS = [
    HandleEvent.INIT,
    HandleEvent.INIT_FAILED,
    HandleEvent.RUN,
    HandleEvent.TOKEN,
    HandleEvent.PAUSE,
    HandleEvent.RESUME,
    HandleEvent.ABORT,
    HandleEvent.RETURNED,
    HandleEvent.CALL_FAILED,
    HandleEvent.CLEAR_KV,
    HandleEvent.CLEAR_KV_RANGE,
    HandleEvent.KV_SIZE,
    HandleEvent.CONFIGURE,
    HandleEvent.PROMPT_CACHE,
    HandleEvent.DESTROY,
    HandleEvent.DRAIN,
    HandleEvent.EVALUATE,
]
LETTERS = {
    "u": HandleState.UNLOADED,
    "i": HandleState.IDLE,
    "p": HandleState.PREFILL,
    "g": HandleState.GENERATING,
    "z": HandleState.PAUSED,
    "a": HandleState.ABORTING,
    "b": HandleState.BROKEN,
    "d": HandleState.DESTROYED,
}
GRID = {
    HandleState.UNLOADED: "ib...............",
    HandleState.IDLE: "..p...i..i.iiid.p",
    HandleState.PREFILL: "...g..aii........",
    HandleState.GENERATING: "...gz.aii........",
    HandleState.PAUSED: ".....g....zz..dg.",
    HandleState.ABORTING: "...az.aii........",
    HandleState.BROKEN: ".................",
    HandleState.DESTROYED: ".................",
}


@pytest.mark.parametrize(
    ("state", "event"),
    [
        pytest.param(state, event, id=f"{state.value}: {event.value}")
        for state, event in itertools.product(HandleState, HandleEvent)
    ],
)
def test_every_pair_is_listed_or_misuse(state: HandleState, event: HandleEvent) -> None:
    letter = GRID[state][EVENTS.index(event)]
    if letter == ".":
        with pytest.raises(Misuse, match=event.value):
            advance(state, event)
    else:
        assert advance(state, event) is LETTERS[letter]


def test_nothing_leads_out_of_an_end_state() -> None:
    for state in (HandleState.BROKEN, HandleState.DESTROYED):
        for event in HandleEvent:
            with pytest.raises(Misuse, match=state.value):
                advance(state, event)
