"""Rules of sleep and wake-up, and both as changes of the desired state. Pure.

A sleep is a pause with a level: the rules of ``state_changes`` for pauses hold for it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from rkserve.control import state_changes
from rkserve.control.calls import WakeAction
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import OperationConflict, RequestError

IDLE, REQUEST = (
    "idle",
    "request",
)  # the callers of the Coordinator's own sleep and wake-up operations
DEFAULT_LOAD_S = 180.0
# Boards in these states may yet serve or be woken.
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
    """The configured sleep of a model's boards.

    After ``idle_s`` seconds without a request the model is unloaded (None: never). With ``wakes``
    the next request wakes it. Its file takes at most ``load_s`` seconds to load.
    """

    idle_s: float | None = None
    wakes: bool = True
    load_s: float = DEFAULT_LOAD_S

    @classmethod
    def of(cls, groups: Iterable[SleepPolicy]) -> SleepPolicy:
        """Return the policy of a model served by several groups: the most cautious of theirs."""
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
    """Return whether no board of the model is awake and a request wakes one.

    ``boards`` are the model's; none counts as one. Drained ones take no request, awake or asleep.
    """
    if not any(one.wakes for one in desired.pauses):
        return False  # early, because every request calls this
    names = [one.board_id for one in boards if one.state in ALIVE]
    if names and not (names := [one for one in names if one not in desired.drained]):
        return False
    covering = [sleeps(desired, name, model) for name in names or [""]]
    return all(covering) and any(all(one.wakes for one in each) for each in covering)


def unused(desired: Desired, model: str, boards: Iterable[BoardReport], idle_s: float) -> bool:
    """Return whether all boards of a model are awake, healthy and without requests for ``idle_s``.

    Paused boards and adapters count as used: their callers will resume them.
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


def requested(model: str) -> WakeAction:
    """Return the wake-up for a request."""
    return WakeAction(models=(model,), requested=True)


def sleep(
    desired: Desired,
    operation: str,
    scope: Scope,
    mode: PauseMode,
    level: SleepLevel,
    *,
    now_s: float,
    lease_s: float | None = None,
    wakes: bool = False,
    models: Sequence[str] = (),
    running: Collection[str] = (),
) -> Desired:
    """Put a part of the cluster to sleep, for ``lease_s`` seconds at most (None: until woken).

    It is a pause that also unloads, and the same rules hold; a deeper sleep includes a lighter one.
    ``models`` are all served ones: a sleep that ends with a request becomes one for each model, so
    that a request wakes only its own. Raises as ``pause`` does, and ``RequestError`` for an
    adapter, which boards cannot unload.
    """
    if scope.adapter is not None:
        raise RequestError("An adapter cannot sleep, only boards can: pause it.", "adapter")
    parts = [scope]
    if wakes:
        parts = [replace(scope, models=(model,)) for model in scope.models or models]
    expires_s = state_changes.lease_end(lease_s, now_s)
    asked = [
        ActivePause(operation, part, mode, False, now_s, expires_s, level, wakes) for part in parts
    ]
    return state_changes.as_one(
        desired,
        *(lambda now, one=one: state_changes.add(now, one, {*running, operation}) for one in asked),
    )


def renews(
    desired: Desired, scope: Scope, mode: PauseMode, level: SleepLevel, models: Sequence[str]
) -> bool:
    """Return whether the scope already sleeps in that way, so that another sleep changes only its
    end.

    ``models`` are all that are served.
    """
    like = [one.scope for one in desired.pauses if (one.mode, one.level) == (mode, level)]
    parts = [replace(scope, models=(model,)) for model in scope.models or models]
    return all(any(part.within(one) for one in like) for part in parts)


def wake(
    desired: Desired,
    scope: Scope | None = None,
    running: Collection[str] = (),
    *,
    only_weights: bool = False,
    only_kv: bool = False,
) -> tuple[Desired, tuple[ActivePause, ...]]:
    """Remove every sleep within ``scope`` (None: all); return these too. Pauses stay.

    Waking an awake part changes nothing. With ``only_weights`` the models are loaded and boards
    stay paused, until ``only_kv`` is requested as well. Raises ``OperationConflict`` if a sleep of
    a wider scope would continue to cover a part of the scope, and for ``only_kv`` before the
    weights are loaded.
    """
    within = Scope() if scope is None else scope
    asleep = [p for p in desired.pauses if p.level is not None and p.operation not in running]
    meant = tuple(one for one in asleep if one.scope.within(within))
    for one in asleep:
        if one not in meant and state_changes.overlap(one.scope, within):
            raise OperationConflict(
                f"It sleeps by operation '{one.operation}', which put "
                f"{state_changes.describe(one.scope)} to sleep: wake that."
            )
    deep = tuple(one for one in meant if one.level != SleepLevel.PAUSED)
    if only_kv and deep:
        raise OperationConflict("There is no KV cache without the weights: wake these first.")
    if not only_weights:
        return state_changes.without(desired, meant), meant
    if not deep:
        return desired, ()
    pauses = (replace(p, level=SleepLevel.PAUSED) if p in deep else p for p in desired.pauses)
    return state_changes.follow_up(desired, pauses=tuple(pauses)), deep


def wake_for_request(desired: Desired, model: str) -> tuple[Desired, tuple[ActivePause, ...]]:
    """Remove every sleep of a model that ends with a request for it; return these too."""
    within = Scope(models=(model,))
    gone = tuple(p for p in desired.pauses if p.wakes and p.scope.within(within))
    return state_changes.without(desired, gone), gone
