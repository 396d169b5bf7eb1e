"""The states of one RKLLM handle, and the calls that each state allows, as a table without C.

The runtime checks almost nothing: a full clear of a paused handle, or a second run on a running
one, crashes the process. Every call is therefore an event of this table first; an unlisted event
raises ``Misuse`` and never reaches the library.
"""

from __future__ import annotations

from enum import Enum

from rkserve.core.errors import Misuse


class HandleState(Enum):
    """The state of a handle."""

    UNLOADED = "unloaded"
    IDLE = "idle"
    PREFILL = "prefill"
    GENERATING = "generating"
    PAUSED = "paused"
    ABORTING = "aborting"
    BROKEN = "broken"
    DESTROYED = "destroyed"


class HandleEvent(Enum):
    """A call on a handle, or a report from it."""

    INIT = "init"
    INIT_FAILED = "init failed"
    RUN = "run"
    TOKEN = "token"
    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    EVALUATE = "compute hidden states or logits"
    ABORT = "abort"
    RETURNED = "run returned"
    CALL_FAILED = "call failed"
    CLEAR_KV = "clear the whole KV cache"
    CLEAR_KV_RANGE = "clear a KV range"
    KV_SIZE = "get the KV cache size"
    CONFIGURE = "set template, tools, adapter or cross attention"
    PROMPT_CACHE = "load or release a prompt cache"
    DESTROY = "destroy"


_S, _E = HandleState, HandleEvent

TRANSITIONS: dict[tuple[HandleState, HandleEvent], HandleState] = {
    (_S.UNLOADED, _E.INIT): _S.IDLE,
    # A failed init may have left anything behind (1.3.0 can even crash later): never reuse it.
    (_S.UNLOADED, _E.INIT_FAILED): _S.BROKEN,
    (_S.IDLE, _E.RUN): _S.PREFILL,
    (_S.IDLE, _E.EVALUATE): _S.PREFILL,
    (_S.IDLE, _E.CLEAR_KV): _S.IDLE,
    (_S.IDLE, _E.KV_SIZE): _S.IDLE,
    (_S.IDLE, _E.CONFIGURE): _S.IDLE,
    (_S.IDLE, _E.PROMPT_CACHE): _S.IDLE,
    (_S.IDLE, _E.DESTROY): _S.DESTROYED,
    # Harmless in the field on an idle handle, but unproven: the binding does not pass it on.
    (_S.IDLE, _E.ABORT): _S.IDLE,
    (_S.PREFILL, _E.TOKEN): _S.GENERATING,
    (_S.PREFILL, _E.ABORT): _S.ABORTING,
    (_S.PREFILL, _E.RETURNED): _S.IDLE,
    (_S.PREFILL, _E.CALL_FAILED): _S.IDLE,
    (_S.GENERATING, _E.TOKEN): _S.GENERATING,
    (_S.GENERATING, _E.PAUSE): _S.PAUSED,
    (_S.GENERATING, _E.ABORT): _S.ABORTING,
    (_S.GENERATING, _E.RETURNED): _S.IDLE,
    (_S.GENERATING, _E.CALL_FAILED): _S.IDLE,
    # An abort is asynchronous: tokens still arrive, and a second abort changes nothing.
    (_S.ABORTING, _E.TOKEN): _S.ABORTING,
    (_S.ABORTING, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.RETURNED): _S.IDLE,
    # The callback had returned 1 before the abort came, and the library paused: so it is.
    (_S.ABORTING, _E.PAUSE): _S.PAUSED,
    (_S.ABORTING, _E.CALL_FAILED): _S.IDLE,
    # Paused: resume, drain, look, cut a range, or destroy. No full clear, no other conversation,
    # nothing computed (M6). A resumption that is refused leaves the library paused, as a PAUSE.
    (_S.PAUSED, _E.RESUME): _S.GENERATING,
    (_S.PAUSED, _E.DRAIN): _S.GENERATING,
    (_S.PAUSED, _E.CLEAR_KV_RANGE): _S.PAUSED,
    (_S.PAUSED, _E.KV_SIZE): _S.PAUSED,
    (_S.PAUSED, _E.DESTROY): _S.DESTROYED,
}


def advance(state: HandleState, event: HandleEvent) -> HandleState:
    """Return the state after ``event``.

    Raises:
        Misuse: the table does not list the event in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Misuse(f"'{event.value}' is not allowed while the handle is {state.value}") from None
