"""A pause or a sleep that is renewed for as long as it is needed: when, and whether it was in time.

It knows clocks and leases, and neither threads nor connections.
"""

from __future__ import annotations

from collections.abc import Callable

from rkserve.client.answers import Operation
from rkserve.client.errors import LeaseLost

# A renewal may fail twice, and the third one is still in time.
RENEWALS_PER_LEASE = 3


class Lease:
    """What the body of ``with client.paused()`` gets: ask ``lost`` before what needs the pause.

    ``operation`` is the pause as it was answered. For ``with client.asleep()`` it is a sleep.
    """

    def __init__(
        self, operation: Operation, lease_s: float, asked_s: float, clock: Callable[[], float]
    ) -> None:
        """``asked_s`` is when the pause was asked for: its lease runs from no earlier than that."""
        self.operation = operation
        self.lease_s = lease_s
        self._clock = clock
        self._safe_until_s = asked_s + lease_s
        self._late = False

    @property
    def now_s(self) -> float:
        """The time by the clock of the lease."""
        return self._clock()

    @property
    def every_s(self) -> float:
        """How often to renew."""
        return self.lease_s / RENEWALS_PER_LEASE

    def began(self, asked_s: float) -> None:
        """Take note that a pause which was asked for at that time has been granted."""
        self._late = self.lost
        self._safe_until_s = asked_s + self.lease_s

    @property
    def lost(self) -> bool:
        """Whether the pause may have ended by itself at any time since it began."""
        return self._late or self._clock() > self._safe_until_s

    def check(self) -> None:
        """Raise ``LeaseLost`` if ``lost``."""
        if self.lost:
            raise LeaseLost(
                f"The {self.operation.kind} of operation '{self.operation.id}' was not renewed "
                f"within its lease of {self.lease_s:g} s: boards may have gone on meanwhile."
            )
