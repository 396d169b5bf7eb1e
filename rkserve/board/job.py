"""One request on one board: its generation, and the channel to the consumer that streams it.

It knows asyncio and nothing of engines or queues.
"""

from __future__ import annotations

import asyncio

from rkserve.board.generation import Generation
from rkserve.board.watchdog import Watchdog
from rkserve.errors import RkserveError
from rkserve.messages import Delta, Finished


class Job:
    """A request between admission and its last event.

    ``ticket`` is the board's number for it, which is also the run's: unlike a request id it never
    comes twice.
    """

    def __init__(self, ticket: int, generation: Generation, arrived_s: float) -> None:
        self.ticket = ticket
        self.generation = generation
        self.arrived_s = arrived_s
        self.started_s = arrived_s
        self.reused = 0
        self.watchdog: Watchdog | None = None  # from the moment that a run is asked for
        self.stopping = False  # an abort was asked for
        self.abandoned = False  # the consumer is gone
        self.outcome: Finished | RkserveError | None = None
        self._news = asyncio.Event()
        self._nearer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def token(self, token_id: int, data: bytes) -> None:
        """Take one token of the runtime."""
        if self.generation.accept(token_id, data):
            self._news.set()

    def end(self, outcome: Finished | RkserveError) -> None:
        """Settle how the request ended; the first word counts."""
        if self.outcome is None:
            self.outcome = outcome
            self._news.set()

    async def next_event(self) -> Delta | Finished:
        """Return what came since the last call as one delta, or ``Finished`` after all of it.

        Raises the ``RkserveError`` that ended the request, after the text before it.
        """
        while True:
            self._news.clear()
            delta = self.generation.take()
            if delta is not None:
                return delta
            if isinstance(self.outcome, RkserveError):
                raise self.outcome
            if self.outcome is not None:
                return self.outcome
            await self._news.wait()

    def nearer_deadline(self) -> asyncio.Future[None]:
        """Return a future that completes when the watchdog's deadline comes nearer."""
        if self._nearer.done():
            self._nearer = asyncio.get_running_loop().create_future()
        return self._nearer

    def hurry(self) -> None:
        """Wake whoever supervises the run: the deadline has come nearer."""
        if not self._nearer.done():
            self._nearer.set_result(None)
