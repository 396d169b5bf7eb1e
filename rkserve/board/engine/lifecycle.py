"""The states of one board as a table, and the limit of crashes before a quarantine. Pure."""

from __future__ import annotations

from collections import deque
from enum import Enum

from rkserve.core.board_report import BoardState
from rkserve.core.errors import Misuse


class BoardEvent(Enum):
    """An event of a board."""

    LOADED = "the model is loaded"
    LOAD_FAILED = "the model cannot be loaded"
    ENGINE_DIED = "the engine process ended by itself"
    WATCHDOG = "the engine cannot be used any more"
    ENGINE_ENDED = "that engine was ended"
    RENEW = "the engine is replaced in order"
    SLEEP = "its model is unloaded"
    WAKE = "its model is wanted again"
    TOO_MANY_CRASHES = "too many crashes in a short time"
    COOLED = "the quarantine is over"
    BROKE = "a part of the board ended by an internal error"
    STOP = "the replica shuts down"


_S, _E = BoardState, BoardEvent

TRANSITIONS: dict[tuple[BoardState, BoardEvent], BoardState] = {
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.LOADING, _E.LOAD_FAILED): _S.FAILED,
    (_S.LOADING, _E.STOP): _S.STOPPED,
    # It was asleep when its replica ended, and was not woken since.
    (_S.LOADING, _E.SLEEP): _S.ASLEEP,
    (_S.READY, _E.ENGINE_DIED): _S.RECOVERING,
    (_S.READY, _E.WATCHDOG): _S.HUNG,
    # Only a new handle forgets adapters: planned, between two runs, and no crash.
    (_S.READY, _E.RENEW): _S.RECOVERING,
    (_S.READY, _E.SLEEP): _S.ASLEEP,
    (_S.READY, _E.STOP): _S.STOPPED,
    # Health fails while hung; an engine that not even SIGKILL ends keeps the board here until
    # the replica is replaced.
    (_S.HUNG, _E.ENGINE_ENDED): _S.RECOVERING,
    (_S.HUNG, _E.STOP): _S.STOPPED,
    (_S.RECOVERING, _E.LOADED): _S.READY,
    (_S.RECOVERING, _E.LOAD_FAILED): _S.FAILED,
    (_S.RECOVERING, _E.TOO_MANY_CRASHES): _S.QUARANTINED,
    # Without an engine there is nothing to unload.
    (_S.RECOVERING, _E.SLEEP): _S.ASLEEP,
    (_S.RECOVERING, _E.STOP): _S.STOPPED,
    (_S.QUARANTINED, _E.COOLED): _S.RECOVERING,
    (_S.QUARANTINED, _E.SLEEP): _S.ASLEEP,
    (_S.QUARANTINED, _E.STOP): _S.STOPPED,
    (_S.ASLEEP, _E.WAKE): _S.LOADING,
    (_S.ASLEEP, _E.STOP): _S.STOPPED,
    (_S.FAILED, _E.STOP): _S.STOPPED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,
    # A bug of rkserve must not leave a board that looks healthy and never answers: health fails,
    # and the replica is replaced.
    (_S.LOADING, _E.BROKE): _S.FAILED,
    (_S.ASLEEP, _E.BROKE): _S.FAILED,
    (_S.READY, _E.BROKE): _S.FAILED,
    (_S.HUNG, _E.BROKE): _S.FAILED,
    (_S.RECOVERING, _E.BROKE): _S.FAILED,
    (_S.QUARANTINED, _E.BROKE): _S.FAILED,
    (_S.FAILED, _E.BROKE): _S.FAILED,
    (_S.STOPPED, _E.BROKE): _S.STOPPED,
}

# Health fails here: a fresh replica may help where the board cannot help itself. Not so in
# quarantine, which ends by itself: a fresh replica would forget why the board rests.
SICK = frozenset({BoardState.HUNG, BoardState.FAILED})
# Requests are accepted here, and wait where it is not ready. The desired state decides whether a
# sleeping board accepts any; one that loads for the first time has no engine facts yet, see
# ``EngineSupervisor.open``.
OPEN = frozenset({BoardState.READY, BoardState.RECOVERING, BoardState.ASLEEP, BoardState.LOADING})


def advance(state: BoardState, event: BoardEvent) -> BoardState:
    """Return the state after ``event``.

    Raises:
        Misuse: the table does not list the event in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Misuse(f"'{event.value}' cannot happen to a board that is {state.value}") from None


class CrashLog:
    """Counts crashes within a sliding window."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._times: deque[float] = deque()

    def crashed(self, now_s: float) -> bool:
        """Record a crash; True where the limit is reached within the window."""
        self._times.append(now_s)
        while self._times[0] <= now_s - self._window_s:
            self._times.popleft()
        return len(self._times) >= self._limit

    def forgive(self) -> None:
        """Discount the last crash."""
        if self._times:
            self._times.pop()
