"""Leases: pauses and sleeps that are renewed for the length of a block.

Renewal runs in a thread for ``Client`` and in a task for ``AsyncClient``; these two are written by
hand, for a thread and a task end differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

from rkserve.client.answers import Operation
from rkserve.client.errors import ClientError, LeaseLost

log = logging.getLogger(__name__)
# Repeat the call that grants the lease, with a time limit in seconds.
Renew: TypeAlias = Callable[["float | None"], Operation]
AsyncRenew: TypeAlias = Callable[["float | None"], Awaitable[Operation]]

# A renewal may fail twice, and the third one is still in time.
RENEWALS_PER_LEASE = 3


class Lease:
    """The lease of ``with client.paused()`` or ``asleep()``: check it before relying on the pause.

    ``operation`` is the pause or sleep as it was answered.
    """

    def __init__(
        self, operation: Operation, lease_s: float, asked_s: float, clock: Callable[[], float]
    ) -> None:
        """``asked_s`` is the time of the call: the lease begins no earlier than that."""
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
        """The interval between renewals."""
        return self.lease_s / RENEWALS_PER_LEASE

    def began(self, asked_s: float) -> None:
        """Extend the lease after a renewal that was sent at ``asked_s``."""
        self._late = self.lost
        self._safe_until_s = asked_s + self.lease_s

    @property
    def lost(self) -> bool:
        """True if the pause may have expired at any time since it began."""
        return self._late or self._clock() > self._safe_until_s

    def check(self) -> None:
        """Raise ``LeaseLost`` if ``lost``."""
        if self.lost:
            raise LeaseLost(
                f"The {self.operation.kind} of operation '{self.operation.id}' was not renewed "
                f"within its lease of {self.lease_s:g} s: boards may have gone on meanwhile."
            )


@contextlib.contextmanager
def leased(
    ask: Renew,
    release: Callable[[], Any],
    lease_s: float,
    timeout_s: float | None,
    clock: Callable[[], float],
) -> Iterator[Lease]:
    """Acquire with ``ask``, renew until the block ends, then ``release``.

    Raises:
        LeaseLost: at the end of a block without an error, if the lease had expired meanwhile.
    """
    asked_s = clock()
    lease = Lease(ask(timeout_s), lease_s, asked_s, clock)
    done = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(lease, ask, done), name="rkserve-lease", daemon=True
    )
    renewing.start()

    def end() -> None:
        done.set()
        # A renewal that is under way must not arrive after the release.
        renewing.join()
        release()

    try:
        yield lease
    except BaseException:
        try:
            end()
        except ClientError as exc:  # the block's own error is the one to raise
            _not_ended(lease, exc)
        raise
    lost = lease.lost
    end()
    if lost:
        lease.check()


@contextlib.asynccontextmanager
async def leased_async(
    ask: AsyncRenew,
    release: Callable[[], Awaitable[Any]],
    lease_s: float,
    timeout_s: float | None,
    clock: Callable[[], float],
) -> AsyncIterator[Lease]:
    """Do the same as ``leased``, with a task."""
    asked_s = clock()
    lease = Lease(await ask(timeout_s), lease_s, asked_s, clock)
    done = asyncio.Event()
    renewing = asyncio.create_task(_renew_async(lease, ask, done), name="rkserve-lease")

    async def end() -> None:
        done.set()
        # A renewal that is under way must not arrive after the release.
        await renewing
        await release()

    try:
        yield lease
    except BaseException:
        try:
            await end()
        except ClientError as exc:  # the block's own error is the one to raise
            _not_ended(lease, exc)
        raise
    lost = lease.lost
    await end()
    if lost:
        lease.check()


def _renew(lease: Lease, ask: Renew, done: threading.Event) -> None:
    """Repeat the call: the new lease replaces the one that ends sooner."""
    while not done.wait(lease.every_s):
        asked_s = lease.now_s
        try:
            ask(lease.every_s)
        except ClientError as exc:
            _not_renewed(lease, exc)
        else:
            lease.began(asked_s)


async def _renew_async(lease: Lease, ask: AsyncRenew, done: asyncio.Event) -> None:
    while not await _set(done, lease.every_s):
        asked_s = lease.now_s
        try:
            await ask(lease.every_s)
        except ClientError as exc:
            _not_renewed(lease, exc)
        else:
            lease.began(asked_s)


async def _set(event: asyncio.Event, within_s: float) -> bool:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), within_s)
    return event.is_set()


def _not_renewed(lease: Lease, exc: ClientError) -> None:
    one = lease.operation
    log.warning("the %s '%s' was not renewed: %s", one.kind, one.id, exc)


def _not_ended(lease: Lease, exc: ClientError) -> None:
    one = lease.operation
    log.warning("the %s '%s' ends with its lease: %s", one.kind, one.id, exc)
