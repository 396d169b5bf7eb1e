"""Sleep and wake-up as changes of what the cluster shall be: old value in, new value out.

A sleep is a pause with a level, and ``changes`` has what holds for both; the same rules are kept
here. It knows nothing of boards, of what they answer, or of who may ask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rkserve.control import state_changes
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import OperationConflict, RequestError


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
    ``models`` are all that are served: a sleep that ends with a request is one for each model, so
    that a request wakes no more than its own. Raises as ``pause`` does, and ``RequestError`` for an
    adapter, which boards have no way to unload.
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
    """Whether it sleeps like that already, and another sleep would change no more than its end.

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
    """Take back every sleep that lies within ``scope`` (None: all); return these too. No pause is.

    To wake what is not asleep changes nothing. With ``only_weights`` the models are loaded and
    boards stay paused, which ends once ``only_kv`` is asked for as well. Raises
    ``OperationConflict`` where a sleep of more than the scope would go on, for what was answered to
    be awake would not be; and for ``only_kv`` of what has no weights yet.
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
    """Take back every sleep of a model that ends with a request for it; return these too."""
    within = Scope(models=(model,))
    gone = tuple(p for p in desired.pauses if p.wakes and p.scope.within(within))
    return state_changes.without(desired, gone), gone
