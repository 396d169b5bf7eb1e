"""Admission of one board: order of service, expiry and rejection. Pure: the clock is passed in.

A board makes one run at a time, of one request or of a batch, or several runs of one request each,
which begin and end by themselves. The queue in front of it is bounded and first come, first served;
a request that waits longer than the limit expires. Requests are known by *ticket*, the board's own
number: request ids come from outside and may repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from rkserve.core.errors import QueueFull


@dataclass(frozen=True, slots=True)
class Start:
    """Start one run with these requests."""

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expire:
    """Reject a request that waited too long."""

    ticket: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Release the board from these requests, which hold it without running while others wait."""

    tickets: tuple[int, ...]


Decision = Start | Expire | Release


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    since_s: float
    key: Hashable
    returned: bool  # it had a run before
    barred_s: float | None = None  # since when it is barred; that time does not count as waiting


class Admission:
    """The queue of one board and the tickets that have the current run.

    Up to ``batch`` requests of the same ``key`` share a run. A run that is not full waits
    ``window_s`` for more, from the moment that the board is free and its first request is there.
    ``hold_s`` is how long one request may keep others waiting by holding the board (``hold``), over
    all of its pauses; None is unlimited. A barred request keeps its place, does not start, and its
    waiting time stands still; see ``bar``.

    Where it ``joins``, each request has a run of its own, up to ``batch`` of the same key at the
    same time, and none waits for more. One of another key waits until all have ended, and meanwhile
    none joins.
    """

    def __init__(
        self,
        queue_limit: int,
        queue_timeout_s: float,
        batch: int = 1,
        window_s: float = 0.0,
        hold_s: float | None = None,
    ) -> None:
        self.queue_limit = queue_limit
        self.running: tuple[int, ...] = ()
        self.joins = False  # set once the engine is known
        self._running_key: Hashable = None
        self._timeout_s = queue_timeout_s
        self._batch = batch
        self._window_s = window_s
        self._hold_s = hold_s
        # In the order of service: requests that had a run before, then the others, each as they
        # came.
        self._queue: list[_Waiting] = []
        self._barred: Callable[[int], bool] = lambda _: False
        self._free_since_s: float | None = None  # None: busy, or not ready
        self._held_since_s: float | None = None
        self._hold_left_s: float | None = None  # of this hold; None: unlimited, or already released
        self._typical_s = 10.0  # a first guess; replaced by the measured time of runs

    @property
    def queued(self) -> int:
        """The number of queued requests."""
        return len(self._queue)

    @property
    def ahead(self) -> int:
        """The number of requests ahead of a new one."""
        ahead = len(self._queue) + len(self.running)
        return max(0, ahead + 1 - self._batch) if self.joins else ahead

    def offer(self, ticket: int, now_s: float, key: Hashable = None) -> int:
        """Queue a request and return how many are ahead of it. Raises ``QueueFull``."""
        # A free board takes a whole run beside the queue.
        beside = 0 if self.running else self._batch
        if self.joins:
            beside = self._batch - len(self.running)
        room = self.queue_limit + beside
        if len(self._queue) >= room:
            raise QueueFull(self.queued, self.retry_after_s())
        ahead = self.ahead
        self._queue.append(self._waiting(ticket, now_s, key, returned=False))
        return ahead

    def readmit(
        self, ticket: int, now_s: float, key: Hashable = None, *, yields: bool = False
    ) -> None:
        """Queue a request that had a run before, ahead of those that did not; it is never rejected.

        With ``yields`` it goes behind the first of those: it released the board for them and is
        back before they started.
        """
        returned = sum(waiting.returned for waiting in self._queue)
        place = returned + 1 if yields else returned
        self._queue.insert(place, self._waiting(ticket, now_s, key, returned=not yields))

    def bar(self, barred: Callable[[int], bool], now_s: float) -> None:
        """Keep tickets for which ``barred`` is true from starting; release the others."""
        self._barred = barred
        self._queue = [self._looked_at(waiting, now_s) for waiting in self._queue]

    def rekey(self, ticket: int, key: Hashable) -> None:
        """Change the key of a request that may be queued."""
        self._queue = [replace(w, key=key) if w.ticket == ticket else w for w in self._queue]

    def withdraw(self, ticket: int) -> bool:
        """Remove a request from the queue; False where it is not queued."""
        for waiting in self._queue:
            if waiting.ticket == ticket:
                self._queue.remove(waiting)
                return True
        return False

    def holdable(self, spent_s: float) -> bool:
        """Return whether a request that kept others waiting for ``spent_s`` may hold the board."""
        return self._hold_s is None or spent_s < self._hold_s or not self._free

    def hold(self, now_s: float, spent_s: float = 0.0) -> None:
        """Note that the running requests hold the board without using it: a pause inside the
        runtime.

        ``spent_s`` is the sum of what ``unhold`` returned for this request.
        """
        self._held_since_s = now_s
        self._hold_left_s = None if self._hold_s is None else max(0.0, self._hold_s - spent_s)

    def unhold(self, now_s: float) -> float:
        """End the hold; return how long others waited for it."""
        since_s = self._waited_for_s()
        self._held_since_s = self._hold_left_s = None
        return 0.0 if since_s is None else max(0.0, now_s - since_s)

    def decide(self, *, ready: bool, now_s: float) -> list[Decision]:
        """Return the actions due now, in order."""
        decisions: list[Decision] = list(self._expire(now_s))
        release_s = self._release_s()
        if release_s is not None and release_s <= now_s:
            self._hold_left_s = None  # decided once; `finished` frees the board
            decisions.append(Release(self.running))
        if self.joins:
            return decisions + (self._join() if ready else [])
        if not ready or self.running:
            self._free_since_s = None
            return decisions
        if self._free_since_s is None:
            self._free_since_s = now_s
        start_s = self._start_s()
        if start_s is not None and start_s <= now_s:
            decisions.append(self._start())
        return decisions

    def next_event_s(self) -> float | None:
        """Return when ``decide`` next has something to do by itself, on the clock of ``offer``.

        The window of a batch is included only after ``decide`` has found the board free.
        """
        events = [waiting.since_s + self._timeout_s for waiting in self._free]
        events += [when_s for when_s in (self._release_s(), self._start_s()) if when_s is not None]
        return min(events, default=None)

    def finished(self, took_s: float, ticket: int | None = None) -> None:
        """Note that the run has ended after ``took_s``; with ``joins`` that of ``ticket``."""
        left = self.running if self.joins else ()
        self.running = tuple(one for one in left if one != ticket)
        self._held_since_s = self._hold_left_s = None
        self._typical_s += 0.2 * (took_s - self._typical_s)

    def retry_after_s(self) -> int:
        """Seconds until the queue may have room: the time of one typical run."""
        return max(1, round(self._typical_s))

    @property
    def _free(self) -> list[_Waiting]:
        """Queued requests that are not barred."""
        return [waiting for waiting in self._queue if waiting.barred_s is None]

    def _waiting(self, ticket: int, now_s: float, key: Hashable, *, returned: bool) -> _Waiting:
        barred_s = now_s if self._barred(ticket) else None
        return _Waiting(ticket, now_s, key, returned, barred_s)

    def _looked_at(self, waiting: _Waiting, now_s: float) -> _Waiting:
        barred = self._barred(waiting.ticket)
        if barred is (waiting.barred_s is not None):
            return waiting
        if waiting.barred_s is None:
            return replace(waiting, barred_s=now_s)
        spent_s = now_s - waiting.barred_s
        return replace(waiting, since_s=waiting.since_s + spent_s, barred_s=None)

    def _expire(self, now_s: float) -> Iterator[Expire]:
        # A readmitted request began to wait later than those behind it, so all are checked.
        late = [w for w in self._free if w.since_s + self._timeout_s <= now_s]
        for waiting in late:
            self._queue.remove(waiting)
            yield Expire(waiting.ticket, now_s - waiting.since_s)

    def _waited_for_s(self) -> float | None:
        """Return since when others wait for a held board; None while none does."""
        waiting = self._free
        if self._held_since_s is None or not waiting:
            return None
        return max(self._held_since_s, min(w.since_s for w in waiting))

    def _release_s(self) -> float | None:
        """Return when the holder must release the board; None while no request waits for it."""
        since_s = self._waited_for_s()
        if since_s is None or self._hold_left_s is None:
            return None
        return since_s + self._hold_left_s

    def _start_s(self) -> float | None:
        """Return when the next run begins if no request comes; None where the board is not free."""
        waiting = self._free
        if self._free_since_s is None or not waiting:
            return None
        startable_s = max(self._free_since_s, waiting[0].since_s)
        full = len(self._mates()) == self._batch
        return startable_s if full else startable_s + self._window_s

    def _mates(self) -> list[_Waiting]:
        """Return the first queued request and those behind it that can share its run."""
        waiting = self._free
        return [one for one in waiting if one.key == waiting[0].key][: self._batch]

    def _join(self) -> list[Decision]:
        """Start the requests that may run beside those that do; first come, first served."""
        started: list[Decision] = []
        mates = self._mates() if not self.running else self._free[: self._batch]
        for one in mates:
            if self.running and one.key != self._running_key:
                break
            # One that left its run, which has not returned, has its entry still.
            if len(self.running) >= self._batch or one.ticket in self.running:
                break
            self._queue.remove(one)
            self.running, self._running_key = (*self.running, one.ticket), one.key
            started.append(Start((one.ticket,)))
        return started

    def _start(self) -> Start:
        mates = self._mates()
        self._queue = [waiting for waiting in self._queue if waiting not in mates]
        self.running = tuple(waiting.ticket for waiting in mates)
        self._free_since_s = None
        return Start(self.running)
