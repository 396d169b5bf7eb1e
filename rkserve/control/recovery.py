"""Recovery at the Coordinator's start: every unfinished operation is completed or undone.

Its input is the last desired state and the operations from the ledger, stored in one transaction.
Boards are brought to the result like any board that returns.
"""

from __future__ import annotations

from collections.abc import Iterable

from rkserve.control import state_changes, weight_changes
from rkserve.control.calls import AdapterRolloutAction, OperationKind, ServingAction
from rkserve.control.operations import (
    HOLDS,
    ControlError,
    ControlOperation,
    OperationState,
    Phase,
)
from rkserve.core.desired_state import ActivePause, Desired

INTERRUPTED = "operation_interrupted"
_UNDONE = "The Coordinator was restarted before it was done; what it had changed was taken back."
_FAILED = "The Coordinator was restarted before it had changed anything; ask again."
_UNKNOWN = "The Coordinator was restarted; which boards have done it is not known: ask again."

_K, _S = OperationKind, OperationState
# These make a single change of the desired state, which stands once it is stored.
_ONE_CHANGE = frozenset({_K.RESUME, _K.WAKE, _K.LABEL, _K.ADAPTER_STAGE, _K.ADAPTER_RETIRE})


def recover(
    desired: Desired, operations: Iterable[ControlOperation], now_s: float
) -> tuple[Desired, tuple[ControlOperation, ...]]:
    """Return the recovered desired state, and the operations that have changed.

    ``operations`` are all that are not over, and those that made a current pause. ``now_s`` is in
    seconds since 1970. Pauses that were not acknowledged, those whose lease has ended and all those
    of rollouts are removed, and so are candidates and changes of base weights in progress: an
    uncommitted rollout is undone, a committed one stands, ``partial`` until all boards have
    followed. The result is at most one epoch later; a second call changes nothing.
    """
    known = {one.id: one for one in operations}
    ended = {one.id: _ended(desired, one, now_s) for one in known.values() if not one.over}
    after = {**known, **ended}
    dead = {pause.operation for pause in desired.pauses if _is_dead(pause, after)}
    candidates = [line for line in desired.lines if line.candidate is not None]
    recovered = state_changes.as_one(
        desired,
        lambda now: state_changes.expire(now, now_s)[0],
        *(lambda now, one=one: state_changes.withdraw(now, one) for one in sorted(dead)),
        *(lambda now, one=one: state_changes.drop(now, one.model, one.name) for one in candidates),
        *(lambda now, one=one: weight_changes.undo(now, one.model) for one in desired.weights),
    )
    return recovered, tuple(ended.values())


def _is_dead(pause: ActivePause, operations: dict[str, ControlOperation]) -> bool:
    made_by = operations.get(pause.operation)
    if made_by is None:
        return False  # an old one, whose record has expired: it was acknowledged long ago
    return isinstance(made_by.action, ServingAction) or made_by.state in (_S.FAILED, _S.UNDONE)


def _ended(desired: Desired, one: ControlOperation, now_s: float) -> ControlOperation:
    if one.kind in (_K.CACHE_RESET, _K.ABORT):
        return one.end(_S.FAILED, now_s, ControlError(503, INTERRUPTED, _UNKNOWN))
    if stands(desired, one):
        return one.end(_S.PARTIAL, now_s)
    if one.epoch:
        return one.end(_S.UNDONE, now_s, ControlError(503, INTERRUPTED, _UNDONE))
    return one.end(_S.FAILED, now_s, ControlError(503, INTERRUPTED, _FAILED))


def stands(desired: Desired, one: ControlOperation) -> bool:
    """Return whether its change is already part of the desired state, so that boards need only
    follow.

    Never for a pause or a sleep that was not acknowledged: the caller was not told that it holds.
    """
    if not one.epoch or one.kind in HOLDS:
        return False
    if one.kind in _ONE_CHANGE:
        return True
    if isinstance(one.action, AdapterRolloutAction):
        line = desired.line(one.action.model, one.action.name)
        active = None if line is None or line.candidate else line.active
        return active is not None and active.ref.version == one.action.version
    return one.phase is Phase.RELEASING
