"""A connection that also waits for parts of an answer, and hangs up in the middle of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rkserve.bench.connection import Connection, Incoming
from rkserve.bench.processes import BenchFailed


class WatchedConnection(Connection):
    """One kept-alive connection whose answers are looked at while they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        super().data_received(data)
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        super().connection_lost(exc)
        self._arrived.set()

    async def ask(self, request: bytes, until_s: float) -> Incoming:
        """Send a request and wait for its answer, or for ``until_s``; then it hangs up."""
        self.send(request)
        return await self.answer(until_s)

    async def answer_at(self, until_s: float) -> tuple[Incoming, float]:
        """Wait for the answer, and return it with the moment behind all that came before it.

        Every socket that has something is read in one turn of the loop, in no particular order; the
        moment is the one between that turn and the next. Raises ``BenchFailed`` at ``until_s``.
        """
        assert self._ended is not None
        arrived_s = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(lambda _: arrived_s.set_result(time.monotonic()))
        incoming = await self.answer(until_s)
        if not arrived_s.done():
            raise BenchFailed("a control call was not answered in time")
        return incoming, arrived_s.result()

    async def reach(self, enough: Callable[[Incoming], bool], until_s: float) -> None:
        """Wait until so much of the answer is there.

        Raises ``BenchFailed`` at ``until_s``, or where the answer ends before.
        """
        assert self._incoming is not None
        assert self._ended is not None
        while not enough(self._incoming):
            if self._ended.done():
                self._ended.result()
                raise BenchFailed("an answer ended before it got as far as it should")
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), until_s - time.monotonic())
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                raise BenchFailed("an answer did not get as far as it should") from None

    async def answer(self, until_s: float) -> Incoming:
        """Wait for the answer to what was sent, or for ``until_s``; then it hangs up."""
        incoming = self.so_far
        if not await self.ends_by(until_s):
            self.close()
        return incoming

    def leave(self) -> Incoming:
        """Hang up in the middle of an answer. Returns what there was of it."""
        assert self._incoming is not None
        incoming = self._incoming
        self.close()
        return incoming
