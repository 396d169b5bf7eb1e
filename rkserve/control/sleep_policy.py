"""Which models sleep, what wakes them, and when they may be put to sleep: pure rules.

It knows what the cluster shall be, and boards' reports as far as these say whether anybody used
them; how anything is asked of boards it does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rkserve.control.params import Json
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import ActivePause, Desired, Scope

IDLE, REQUEST = "idle", "request"  # the callers of sleep and wake-up operations of our own
DEFAULT_LOAD_S = 180.0
# Such a board may yet serve, or be woken; others are not counted on.
ALIVE = frozenset(
    {
        BoardState.READY,
        BoardState.RECOVERING,
        BoardState.LOADING,
        BoardState.JOINING,
        BoardState.ASLEEP,
    }
)


@dataclass(frozen=True, slots=True)
class SleepPolicy:
    """How a model's boards are configured to sleep.

    After ``idle_s`` seconds in which nobody asked for it the model is unloaded (None: never). With
    ``wakes`` the next request ends that. Its file takes ``load_s`` seconds to load at most.
    """

    idle_s: float | None = None
    wakes: bool = True
    load_s: float = DEFAULT_LOAD_S

    @classmethod
    def of(cls, groups: Iterable[SleepPolicy]) -> SleepPolicy:
        """Return that of a model which several groups serve: the most cautious of theirs."""
        known = list(groups)
        idle = [one.idle_s for one in known if one.idle_s is not None]
        return cls(
            max(idle) if idle and len(idle) == len(known) else None,
            all(one.wakes for one in known),
            max((one.load_s for one in known), default=DEFAULT_LOAD_S),
        )


def sleeps(desired: Desired, board_id: str, model: str) -> list[ActivePause]:
    """Return the sleeps that cover a board."""
    return [p for p in desired.pauses if p.level is not None and p.scope.covers(board_id, model)]


def wakeable(desired: Desired, model: str, boards: Iterable[BoardReport]) -> bool:
    """Whether a request for the model finds no board awake, and wakes one.

    ``boards`` are the model's. Where there is none, it is as if there were one.
    """
    if not any(one.wakes for one in desired.pauses):
        return False  # at once: every request asks
    names = [one.board_id for one in boards if one.state in ALIVE]
    covering = [sleeps(desired, name, model) for name in names or [""]]
    return all(covering) and any(all(one.wakes for one in each) for each in covering)


def unused(desired: Desired, model: str, boards: Iterable[BoardReport], idle_s: float) -> bool:
    """Whether all of a model's boards are awake, well, and nobody asked them for anything lately.

    What somebody paused, as a whole or for an adapter, is in use: they will come back to it.
    """
    known = list(boards)
    held = any(pause.scope.covers(one.board_id, model) for pause in desired.pauses for one in known)
    return bool(known) and not held and all(_rests(one, idle_s) for one in known)


def _rests(board: BoardReport, idle_s: float) -> bool:
    jobs = board.running + board.queued + board.paused
    return board.state is BoardState.READY and not jobs and board.idle_s >= idle_s


def of_model(model: str) -> Scope:
    """Return the scope of a model on all boards."""
    return Scope(models=(model,))


def requested(model: str) -> dict[str, Json]:
    """Return the parameters of a wake-up operation that a request for a model needs."""
    return {"models": list(of_model(model).models), "requested": True}
