"""One stream at the Router: its events, and how it ended. It knows neither sockets nor Ray."""

from __future__ import annotations

import asyncio
from collections import deque

from rkserve.core.errors import RkserveError
from rkserve.core.messages import Delta, Event, Finished, merged


def add(events: deque[Event], event: Event) -> None:
    """Append an event to those that wait; deltas in a row become one, where that loses nothing."""
    if events and isinstance(event, Delta) and isinstance(last := events[-1], Delta):
        whole = merged(last, event)
        if whole is not None:
            events[-1] = whole
            return
    events.append(event)


class Inbox:
    """One stream. ``stream`` is its number on its connection."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: RkserveError | None = None  # how it ended
        self._ended = False  # nothing comes any more
        self._finished = False  # the answer has ended well
        self.heard = False  # anything, of the board
        self.lost = False  # with its connection

    # -- from the connection ------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """An event came. What nobody has read yet is merged, so that it stays short."""
        self.heard = True
        self._finished = isinstance(event, Finished)
        add(self._events, event)
        self._wake()

    def fail(self, error: RkserveError) -> None:
        """The board says how the call failed: that comes behind all events."""
        self.heard = True
        self._end(error)

    def end(self) -> None:
        """The board has sent its last event."""
        self._end(None)

    def cut(self, error: RkserveError) -> None:
        """The connection is lost: no event comes."""
        if not self._ended:
            self.lost = True
            self._end(None if self._finished else error)

    # -- to the reader ------------------------------------------------------------------------

    async def next(self) -> Event | None:
        """Return the next event; None after the last one.

        Raises:
            RkserveError: how the stream ended, after its events.
        """
        while not self._events:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    @property
    def over(self) -> bool:
        """Whether the board sends nothing more: there is nothing to leave."""
        return self._finished or self._ended

    def close(self) -> None:
        """Nobody reads any more."""
        self._end(None)

    # -- inside -------------------------------------------------------------------------------

    def _end(self, error: RkserveError | None) -> None:
        if self._ended:
            return
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
