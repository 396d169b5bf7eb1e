"""The desired state and the running operations: on disk first, then in memory.

Nothing is used, sent or answered before it is in the ledger, except for what any successor would
derive from the ledger too: the end of a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from rkserve.control.calls import OperationKind
from rkserve.control.operations import UPDATES, ControlOperation
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.core.desired_state import Desired
from rkserve.core.errors import LedgerFailed

log = logging.getLogger(__name__)

# A state that could not be stored is this many epochs later than the ledger. A successor without it
# makes a few epochs before it hears from boards; none may reuse a number with another content.
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
                "epoch %d is known out there, and the ledger only knows %d: it was lost or comes "
                "from a backup; going on after that epoch with what the ledger says",
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
