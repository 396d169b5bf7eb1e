"""Who starts, who waits, who is turned away on one board. Pure: the clock is passed in.

A board runs one generation at a time. The queue in front of it is bounded and first come, first
served; a request that waits longer than the limit is given up. It knows requests by *ticket*, the
board's own number for one: request ids come from outside and may come twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rkserve.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Start:
    """This request gets the board now."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Expire:
    """This request waited too long."""

    ticket: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    since_s: float


class Admission:
    """The queue of one board and who holds it."""

    def __init__(self, queue_limit: int, queue_timeout_s: float) -> None:
        self.queue_limit = queue_limit
        self._timeout_s = queue_timeout_s
        self._queue: deque[_Waiting] = deque()
        self.running: int | None = None
        self._typical_s = 10.0  # a first guess; replaced by what generations really take

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def ahead(self) -> int:
        """Requests that a new one would have before it."""
        return len(self._queue) + (self.running is not None)

    def offer(self, ticket: int, now_s: float) -> int:
        """Queue a request and return how many are ahead of it. Raises ``QueueFull``."""
        if self.ahead > self.queue_limit:
            raise QueueFull(self.queued, self.retry_after_s())
        ahead = self.ahead
        self._queue.append(_Waiting(ticket, now_s))
        return ahead

    def withdraw(self, ticket: int) -> bool:
        """Take a request out of the queue; False where it is not waiting."""
        for waiting in self._queue:
            if waiting.ticket == ticket:
                self._queue.remove(waiting)
                return True
        return False

    def decide(self, *, ready: bool, now_s: float) -> list[Start | Expire]:
        """Return what must be done now, in order."""
        decisions: list[Start | Expire] = []
        while self._queue and now_s - self._queue[0].since_s >= self._timeout_s:
            late = self._queue.popleft()
            decisions.append(Expire(late.ticket, now_s - late.since_s))
        if ready and self.running is None and self._queue:
            self.running = self._queue.popleft().ticket
            decisions.append(Start(self.running))
        return decisions

    def next_expiry_s(self) -> float | None:
        """When the oldest waiting request expires, on the clock of ``offer``."""
        return self._queue[0].since_s + self._timeout_s if self._queue else None

    def finished(self, took_s: float) -> None:
        """The running request has let go of the board after ``took_s``."""
        self.running = None
        self._typical_s += 0.2 * (took_s - self._typical_s)

    def retry_after_s(self) -> int:
        """Seconds until a place in the queue may be free: one typical generation."""
        return max(1, round(self._typical_s))
