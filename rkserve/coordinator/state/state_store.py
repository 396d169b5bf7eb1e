"""The desired state and the running operations, on disk first, then in memory; and their recovery.

Nothing is used, sent or answered before it is in the ledger, except for what any successor would
derive from the ledger too: the end of a lease. At the Coordinator's start every operation that the
ledger has as unfinished is completed or undone; boards are brought to the result like any board
that returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from rkserve.control import state_changes, weight_changes
from rkserve.control.calls import AdapterRolloutAction, OperationKind, ServingAction
from rkserve.control.operations import (
    HOLDS,
    UPDATES,
    ControlError,
    ControlOperation,
    OperationState,
    Phase,
)
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.core.desired_state import ActivePause, Desired
from rkserve.core.errors import LedgerFailed

log = logging.getLogger(__name__)

# A state that could not be stored is this many epochs later than the ledger. A successor without it
# makes a few epochs before boards report to it; none may reuse a number with another content.
LEAP = 100
# Operations that bring files to boards.
_BRINGING = (OperationKind.ADAPTER_STAGE, *sorted(UPDATES))


class StateStore:
    """The Coordinator's memory. Use it from one event loop unless stated otherwise; only ``after``
    waits.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._desired = ledger.desired()
        self._going_on = {one.id: one for one in ledger.running()}
        self._changed = asyncio.Event()
        self._unstored = False  # the desired state is not in the ledger yet
        self._unstored_audit: list[AuditEntry] = []
        self._unwritten: dict[
            str, ControlOperation
        ] = {}  # ended operations that could not be stored

    @property
    def desired(self) -> Desired:
        """The current desired state."""
        return self._desired

    @property
    def running(self) -> tuple[ControlOperation, ...]:
        """The running operations, in the order of their beginning."""
        return tuple(self._going_on.values())

    def write(
        self,
        desired: Desired | None = None,
        *operations: ControlOperation,
        audit: Iterable[AuditEntry] = (),
    ) -> None:
        """Store a change; then it is in effect.

        Raises:
            LedgerFailed: nothing was stored, and nothing has changed.
        """
        now = self._desired if desired is None else desired
        changed = self._unstored or now != self._desired
        self._ledger.write(
            desired=now if changed else None,
            operations=[*self._unwritten.values(), *operations],
            audit=[*self._unstored_audit, *audit],
        )
        self._unstored, self._unstored_audit, self._unwritten = False, [], {}
        for one in operations:
            if one.over:
                self._going_on.pop(one.id, None)
            else:
                self._going_on[one.id] = one
        self._publish(now)

    def derive(
        self, desired: Desired, *ended: ControlOperation, audit: Iterable[AuditEntry] = ()
    ) -> None:
        """Put a consequence of the ledger and the time into effect, even if it cannot be stored: a
        full disk must not keep requests paused. It is stored with the next successful write.
        """
        lines = list(audit)
        try:
            self.write(desired, *ended, audit=lines)
        except LedgerFailed as exc:
            log.warning("it holds without being written down: %s", exc)
            for one in ended:
                self._going_on.pop(one.id, None)
                self._unwritten[one.id] = one
            self._unstored, self._unstored_audit = True, [*self._unstored_audit, *lines]
            if desired != self._desired:
                self._publish(replace(desired, epoch=desired.epoch + LEAP))

    def catch_up(self) -> None:
        """Store pending changes. Raises ``LedgerFailed``."""
        if self._unstored:
            self.write()

    def _publish(self, desired: Desired) -> None:
        if desired != self._desired:
            self._desired = desired
            self._changed.set()
            self._changed = asyncio.Event()

    def show(self, operation: ControlOperation) -> None:
        """Update a running operation in memory, for readers only."""
        if operation.id in self._going_on:
            self._going_on[operation.id] = operation

    def jump(self, epoch: int) -> None:
        """Skip to the epoch after one that is in use already: the ledger was lost or is old.

        Boards refuse states older than the one they obey, so the cluster could never change again.
        """
        if epoch > self._desired.epoch:
            log.warning(
                "boards obey epoch %d, and the ledger has only %d: it was lost or comes from a "
                "backup; going on after that epoch with the content of the ledger",
                epoch,
                self._desired.epoch,
            )
            self.write(replace(self._desired, epoch=epoch + 1))

    async def after(self, epoch: int, wait_s: float) -> Desired:
        """Return the desired state once its epoch is not ``epoch``, or after ``wait_s``."""
        self.jump(epoch)
        if self._desired.epoch == epoch:
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return self._desired
        return self._desired

    def unsettled(self) -> list[ControlOperation]:
        """Return the operations for recovery: those that are not over, and those with a current
        pause.
        """
        made = [self._ledger.operation(pause.operation) for pause in self._desired.pauses]
        known = {one.id: one for one in (*made, *self._going_on.values()) if one is not None}
        return list(known.values())

    def stagings(self) -> list[ControlOperation]:
        """Return all recorded stagings. Call it in any thread: they may be many."""
        return [one for kind in _BRINGING for one in self._ledger.of_kind(kind)]

    def partial(self) -> list[ControlOperation]:
        """Return the operations that some boards have yet to follow."""
        return self._ledger.partial()

    def operation(self, name: str) -> ControlOperation | None:
        """Return the operation of that ID, also one that is over."""
        unwritten = self._going_on.get(name) or self._unwritten.get(name)
        return unwritten or self._ledger.operation(name)

    def operations(self, limit: int) -> list[ControlOperation]:
        """Return the latest ones, the last one first. Call it in any thread."""
        return self._ledger.operations(limit)

    def by_key(self, key: str) -> ControlOperation | None:
        """Return the operation with that idempotency key."""
        return self._ledger.by_key(key)

    def audit(self, limit: int) -> list[AuditEntry]:
        """Return the latest entries of the audit log, the last one first. Call it in any thread."""
        return self._ledger.audit(limit)


INTERRUPTED = "operation_interrupted"
_UNDONE = "The Coordinator was restarted before it was done; what it had changed was taken back."
_FAILED = "The Coordinator was restarted before it had changed anything; ask again."
_UNKNOWN = "The Coordinator was restarted; which boards have done it is not known: ask again."

_S = OperationState


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
    if one.action.errand:
        return one.end(_S.FAILED, now_s, ControlError(503, INTERRUPTED, _UNKNOWN))
    if stands(desired, one):
        return one.end(_S.PARTIAL, now_s)
    if one.epoch:
        return one.end(_S.UNDONE, now_s, ControlError(503, INTERRUPTED, _UNDONE))
    return one.end(_S.FAILED, now_s, ControlError(503, INTERRUPTED, _FAILED))


def stands(desired: Desired, one: ControlOperation) -> bool:
    """Return whether its change is already part of the desired state, so that boards need only
    follow.

    Never for a pause or a sleep that was not acknowledged: its caller got no confirmation.
    """
    if not one.epoch or one.kind in HOLDS:
        return False
    if one.action.one_change:
        return True
    if isinstance(one.action, AdapterRolloutAction):
        line = desired.line(one.action.model, one.action.name)
        active = None if line is None or line.candidate else line.active
        return active is not None and active.ref.version == one.action.version
    return one.phase is Phase.RELEASING
