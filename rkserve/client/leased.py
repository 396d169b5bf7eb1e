"""A block that holds the cluster under a lease: ask, renew beside it, and end it however it goes.

It knows threads, tasks and leases; what is held, and by which call, it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

from rkserve.client.answers import Operation
from rkserve.client.errors import ClientError
from rkserve.client.lease import Lease

log = logging.getLogger(__name__)
# Ask for it (once more), within so many seconds where that is said.
Ask: TypeAlias = Callable[["float | None"], Operation]
AskAsync: TypeAlias = Callable[["float | None"], Awaitable[Operation]]


@contextlib.contextmanager
def leased(
    ask: Ask,
    release: Callable[[], Any],
    lease_s: float,
    timeout_s: float | None,
    clock: Callable[[], float],
) -> Iterator[Lease]:
    """Hold what ``ask`` asks for until the block ends, then ``release`` it.

    Raises:
        LeaseLost: at the end of a block that went well, if it was not held throughout.
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
        # A renewal that is under way must not come after the end.
        renewing.join()
        release()

    try:
        yield lease
    except BaseException:
        try:
            end()
        except ClientError as exc:  # the block's own error is the one to hear of
            _not_ended(lease, exc)
        raise
    lost = lease.lost
    end()
    if lost:
        lease.check()


@contextlib.asynccontextmanager
async def leased_async(
    ask: AskAsync,
    release: Callable[[], Awaitable[Any]],
    lease_s: float,
    timeout_s: float | None,
    clock: Callable[[], float],
) -> AsyncIterator[Lease]:
    """Do what ``leased`` does, in a task."""
    asked_s = clock()
    lease = Lease(await ask(timeout_s), lease_s, asked_s, clock)
    done = asyncio.Event()
    renewing = asyncio.create_task(_renew_async(lease, ask, done), name="rkserve-lease")

    async def end() -> None:
        done.set()
        # A renewal that is under way must not come after the end.
        await renewing
        await release()

    try:
        yield lease
    except BaseException:
        try:
            await end()
        except ClientError as exc:  # the block's own error is the one to hear of
            _not_ended(lease, exc)
        raise
    lost = lease.lost
    await end()
    if lost:
        lease.check()


def _renew(lease: Lease, ask: Ask, done: threading.Event) -> None:
    """Ask for the same again and again: it takes the place of the one that ends sooner."""
    while not done.wait(lease.every_s):
        asked_s = lease.now_s
        try:
            ask(lease.every_s)
        except ClientError as exc:
            _not_renewed(lease, exc)
        else:
            lease.began(asked_s)


async def _renew_async(lease: Lease, ask: AskAsync, done: asyncio.Event) -> None:
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
