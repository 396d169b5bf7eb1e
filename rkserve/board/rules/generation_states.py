"""States of one generation on a board as a table, with the actions allowed in each. Pure."""

from __future__ import annotations

from enum import Enum

from rkserve.core.board_report import GenerationState
from rkserve.core.errors import Misuse, StateConflict
from rkserve.core.messages import ControlAction


class GenerationEvent(Enum):
    """An event of a generation."""

    STARTED = "a run starts"
    ARRIVED = "it arrives paused from another board"
    TOKEN = "a token"
    PAUSE_ASKED = "a call or a hook requests a pause"
    HELD = "the cluster stops it"
    FREED = "it continues before it was paused"
    PAUSED = "it emits no more tokens"
    EDITED = "an edit"
    RESUME_ASKED = "a resumption is requested"
    REWOUND = "a hook changed its context"
    REQUEUED = "it waits for the board"
    ABORT_ASKED = "an abort is requested"
    ENDED = "its last event is settled"


_S, _E = GenerationState, GenerationEvent

TRANSITIONS: dict[tuple[GenerationState, GenerationEvent], GenerationState] = {
    (_S.QUEUED, _E.STARTED): _S.PREFILLING,
    (_S.QUEUED, _E.ARRIVED): _S.PAUSED,
    (_S.QUEUED, _E.ABORT_ASKED): _S.ABORTING,
    (_S.QUEUED, _E.ENDED): _S.ENDED,
    (_S.PREFILLING, _E.TOKEN): _S.GENERATING,
    # Unlike a client the cluster may stop it here; the prefill itself cannot be cut short.
    (_S.PREFILLING, _E.HELD): _S.PAUSING,
    (_S.PREFILLING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.PREFILLING, _E.ENDED): _S.ENDED,
    (_S.GENERATING, _E.TOKEN): _S.GENERATING,
    (_S.GENERATING, _E.PAUSE_ASKED): _S.PAUSING,
    (_S.GENERATING, _E.HELD): _S.PAUSING,
    (_S.GENERATING, _E.REWOUND): _S.RESUMING,
    (_S.GENERATING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.GENERATING, _E.ENDED): _S.ENDED,
    # A pause races the last token: the answer may still end, which is fine.
    (_S.PAUSING, _E.TOKEN): _S.PAUSING,
    (_S.PAUSING, _E.PAUSED): _S.PAUSED,
    # Only its version changed, or the cluster has resumed.
    (_S.PAUSING, _E.FREED): _S.RESUMING,
    (_S.PAUSING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.PAUSING, _E.ENDED): _S.ENDED,
    (_S.PAUSED, _E.EDITED): _S.PAUSED,
    (_S.PAUSED, _E.RESUME_ASKED): _S.RESUMING,
    (_S.PAUSED, _E.ABORT_ASKED): _S.ABORTING,
    # Its pause timed out, or the client is gone.
    (_S.PAUSED, _E.ENDED): _S.ENDED,
    # Kept in the KV cache it starts at once; recomputed it queues first.
    (_S.RESUMING, _E.STARTED): _S.PREFILLING,
    (_S.RESUMING, _E.REQUEUED): _S.QUEUED,
    (_S.RESUMING, _E.ABORT_ASKED): _S.ABORTING,
    # An edit may have completed the answer: then no run follows.
    (_S.RESUMING, _E.ENDED): _S.ENDED,
    # An abort is asynchronous; a second one has no effect.
    (_S.ABORTING, _E.TOKEN): _S.ABORTING,
    (_S.ABORTING, _E.ABORT_ASKED): _S.ABORTING,
    # The runtime had paused before the abort: the run is drained, and the abort continues.
    (_S.ABORTING, _E.PAUSED): _S.ABORTING,
    (_S.ABORTING, _E.ENDED): _S.ENDED,
}

_ASKED = {
    ControlAction.PAUSE: GenerationEvent.PAUSE_ASKED,
    ControlAction.EDIT: GenerationEvent.EDITED,
    ControlAction.RESUME: GenerationEvent.RESUME_ASKED,
    ControlAction.ABORT: GenerationEvent.ABORT_ASKED,
}

_NOT_YET = "It can be paused after its first token."
_PAUSE_FIRST = "Pause it first."
_GOING_ON = "It is not paused."
_SOON = "Wait until it is paused."

_HINTS: dict[tuple[ControlAction, GenerationState], str] = {
    (ControlAction.PAUSE, _S.QUEUED): _NOT_YET,
    (ControlAction.PAUSE, _S.PREFILLING): _NOT_YET,
    (ControlAction.PAUSE, _S.RESUMING): "It can be paused again after its next token.",
    (ControlAction.PAUSE, _S.PAUSING): "It is being paused already.",
    (ControlAction.PAUSE, _S.PAUSED): "Edit, resume or abort it.",
    (ControlAction.EDIT, _S.GENERATING): _PAUSE_FIRST,
    (ControlAction.EDIT, _S.PAUSING): _SOON,
    (ControlAction.RESUME, _S.GENERATING): _GOING_ON,
    (ControlAction.RESUME, _S.RESUMING): _GOING_ON,
    (ControlAction.RESUME, _S.PAUSING): _SOON,
}


def advance(state: GenerationState, event: GenerationEvent) -> GenerationState:
    """Return the state after ``event``.

    Raises:
        Misuse: the table does not list the event in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Misuse(
            f"'{event.value}' cannot happen to a generation that is {state.value}"
        ) from None


def judge(state: GenerationState, action: ControlAction) -> GenerationState:
    """Return the state after ``action``.

    Raises:
        StateConflict: the state does not allow it; the generation is not affected.
    """
    after = TRANSITIONS.get((state, _ASKED[action]))
    if after is None:
        raise StateConflict(action.value, state.value, _HINTS.get((action, state), ""))
    return after
