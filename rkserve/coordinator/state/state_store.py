"""What the cluster shall be and what is being done about it: on the disk first, then in memory.

Nothing is believed, sent or answered before the ledger has it, but for what any successor would
read out of the ledger as well: that a lease has ended. It knows no boards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from rkserve.control.operations import UPDATES, Operation, OperationKind
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.core.desired_state import Desired
from rkserve.core.errors import LedgerFailed

log = logging.getLogger(__name__)

# What could not be written down is so many epochs later than the ledger. A successor that does not
# know of it makes a few epochs before it hears boards; none may be the same with another content.
LEAP = 100
# Operations that bring files to boards.
_BRINGING = (OperationKind.ADAPTER_STAGE, *sorted(UPDATES))


class StateStore:
    """The Coordinator's memory. Use it from one event loop, but for what says otherwise; nothing
    in it waits but ``after``.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._desired = ledger.desired()
        self._going_on = {one.id: one for one in ledger.running()}
        self._turned = asyncio.Event()
        self._owes = False  # what is desired is not in the ledger yet
        self._owed: list[AuditEntry] = []
        self._unwritten: dict[str, Operation] = {}  # that ended, and could not be written down

    @property
    def desired(self) -> Desired:
        """What the cluster shall be now."""
        return self._desired

    @property
    def running(self) -> tuple[Operation, ...]:
        """Operations that are not over, in the order in which they began."""
        return tuple(self._going_on.values())

    def write(
        self,
        desired: Desired | None = None,
        *operations: Operation,
        audit: Iterable[AuditEntry] = (),
    ) -> None:
        """Write it down; then it holds.

        Raises:
            LedgerFailed: nothing was written, and everything is as it was.
        """
        now = self._desired if desired is None else desired
        changed = self._owes or now != self._desired
        self._ledger.write(
            desired=now if changed else None,
            operations=[*self._unwritten.values(), *operations],
            audit=[*self._owed, *audit],
        )
        self._owes, self._owed, self._unwritten = False, [], {}
        for one in operations:
            if one.over:
                self._going_on.pop(one.id, None)
            else:
                self._going_on[one.id] = one
        self._turn(now)

    def derive(self, desired: Desired, *ended: Operation, audit: Iterable[AuditEntry] = ()) -> None:
        """Have what follows from the ledger and the time alone hold, also where it cannot be
        written: a full disk keeps nobody paused. It is written with the next thing that can be.
        """
        lines = list(audit)
        try:
            self.write(desired, *ended, audit=lines)
        except LedgerFailed as exc:
            log.warning("it holds without being written down: %s", exc)
            for one in ended:
                self._going_on.pop(one.id, None)
                self._unwritten[one.id] = one
            self._owes, self._owed = True, [*self._owed, *lines]
            if desired != self._desired:
                self._turn(replace(desired, epoch=desired.epoch + LEAP))

    def catch_up(self) -> None:
        """Write down what could not be so far. Raises ``LedgerFailed``."""
        if self._owes:
            self.write()

    def _turn(self, desired: Desired) -> None:
        if desired != self._desired:
            self._desired = desired
            self._turned.set()
            self._turned = asyncio.Event()

    def show(self, operation: Operation) -> None:
        """Remember how an operation that goes on stands, for whoever asks; nothing rests on it."""
        if operation.id in self._going_on:
            self._going_on[operation.id] = operation

    def jump(self, epoch: int) -> None:
        """Go past an epoch that somebody has heard of already: the ledger was lost or is old.

        Boards refuse what is older than what they obey, so that the cluster would never change
        again.
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
        """Return what the cluster shall be once that is not of ``epoch``, or after ``wait_s``."""
        self.jump(epoch)
        if self._desired.epoch == epoch:
            try:
                await asyncio.wait_for(self._turned.wait(), wait_s)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return self._desired
        return self._desired

    def unsettled(self) -> list[Operation]:
        """Return what recovery must know: operations that are not over, and those that paused."""
        made = [self._ledger.operation(pause.operation) for pause in self._desired.pauses]
        known = {one.id: one for one in (*made, *self._going_on.values()) if one is not None}
        return list(known.values())

    def stagings(self) -> list[Operation]:
        """Return all stagings that are remembered. Call it in any thread: they may be many."""
        return [one for kind in _BRINGING for one in self._ledger.of_kind(kind)]

    def partial(self) -> list[Operation]:
        """Return those that some boards had yet to follow."""
        return self._ledger.partial()

    def operation(self, name: str) -> Operation | None:
        """Return the operation of that id, also one that is over."""
        unwritten = self._going_on.get(name) or self._unwritten.get(name)
        return unwritten or self._ledger.operation(name)

    def operations(self, limit: int) -> list[Operation]:
        """Return the latest ones, the last one first. Call it in any thread."""
        return self._ledger.operations(limit)

    def by_key(self, key: str) -> Operation | None:
        """Return the operation that was made with that idempotency key."""
        return self._ledger.by_key(key)

    def audit(self, limit: int) -> list[AuditEntry]:
        """Return the latest lines of the audit log, the last one first. Call it in any thread."""
        return self._ledger.audit(limit)
