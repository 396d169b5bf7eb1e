"""One stream at the Router: its events, which come by a connection, and its end, which Ray tells.

The two overtake each other. Whoever reads gets every event first, then the end. It knows neither
sockets nor Ray.
"""

from __future__ import annotations

import asyncio
from collections import deque

from rkserve.errors import RkserveError
from rkserve.messages import Delta, Event, Finished, merged

# Ray has lost sight of a board, and events of it may be under way still.
STRAGGLERS_S = 2.0
# A process that dies closes its connections before Ray can say that it has died.
VERDICT_S = 0.25


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
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False  # the board has taken it
        self._finished = False  # the answer has ended well
        self._ended = False  # the board has sent its last event
        self._answered = False  # the call is over
        self._error: RkserveError | None = None  # of the call
        self._lost: RkserveError | None = None  # of the connection
        self._settled = False  # nothing comes any more

    # -- from the connection ------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """An event came. What nobody has read yet is merged, so that it stays short."""
        self._heard = True
        self._finished = isinstance(event, Finished)
        add(self._events, event)
        self._wake()

    def end(self) -> None:
        """The board has sent its last event."""
        self._ended = True
        if self._answered or self._lost is not None:
            self._settle()

    def cut(self, error: RkserveError, verdict_s: float = VERDICT_S) -> None:
        """The connection is lost: no event comes; Ray may say why within ``verdict_s``."""
        self._lost = error
        if self._answered or not verdict_s:
            self._settle()
        else:
            self._settle_in(verdict_s)

    # -- from the call ------------------------------------------------------------------------

    def answered(self, error: RkserveError | None, *, reached: bool) -> None:
        """The call is over. ``reached``: it is the board itself that says so, and it says so to
        the connection, too; otherwise Ray does.
        """
        self._answered, self._error = True, error
        never_there = error is not None and not reached and not self._heard
        if never_there or self._ended or self._lost is not None:
            self._settle()
        elif error is not None and not reached:
            self._settle_in(STRAGGLERS_S)

    # -- to the reader ------------------------------------------------------------------------

    async def next(self) -> Event | None:
        """Return the next event; None after the last one.

        Raises:
            RkserveError: how the stream ended, after its events.
        """
        while not self._events:
            if self._settled:
                self._raise()
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
        return self._finished or self._ended or self._lost is not None

    def close(self) -> None:
        """Nobody reads any more."""
        self._settle()

    # -- inside -------------------------------------------------------------------------------

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._lost is not None and not (self._ended and self._answered):
            raise self._lost

    def _settle_in(self, seconds: float) -> None:
        if not self._settled and self._timer is None:
            self._timer = self._loop.call_later(seconds, self._settle)

    def _settle(self) -> None:
        self._settled = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
