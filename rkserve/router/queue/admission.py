"""Admission to the queue of one model: its order, its bound and the deadlines. Pure.

One queue serves all boards of a model. It is bounded: an overflow evicts the least urgent and
youngest request. A request that cannot meet its deadline is rejected at once, so that boards work
on useful requests only.

More urgent requests go first. At equal urgency the owner with the least service for its weight goes
first, so that a thousand requests of one owner do not delay the single request of another. Service
is measured in board time instead of requests, so that long requests gain nothing. The clock is
passed in; routing policies choose the boards.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from rkserve.core.errors import DeadlineUnreachable, QueueFull, QueueTimeout, RkserveError
from rkserve.router.queue.reservation import ServiceTime

T = TypeVar("T")
# The assumed service time before any is known: shares then count requests.
UNKNOWN_MS = 1000.0
ANONYMOUS = ""


# A request's ID, and its board time in seconds since the last call.
Use = Callable[[str, float], None]


def _unmetered(request_id: str, seconds: float) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """The terms on which a call's requests wait in the queue.

    ``flow`` is the owner (calls without a key share one), which gets service by its ``weight``. A
    lower ``priority`` goes first. After ``deadline_s``, which is ``timeout_s`` after arrival, the
    answer is useless; ``came_s`` is the time of arrival. All times are on the queue's clock.
    ``use`` is called with the board time of each request. The upstreams with the keys ``unsuited``
    cannot serve the call.
    """

    flow: str = ANONYMOUS
    weight: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    timeout_s: float = 0.0
    came_s: float | None = None
    use: Use = field(default=_unmetered, compare=False)
    unsuited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """The service that a queue gets: ``places`` at boards, of which ``free`` are free.

    At most ``limit`` requests may wait. ``elsewhere`` requests wait at the boards themselves, each
    for about ``typical_ms``.
    """

    places: int
    free: int
    limit: int
    elsewhere: int = 0
    typical_ms: float = UNKNOWN_MS


@dataclass(eq=False, slots=True)
class QueueEntry(Generic[T]):
    """One request that waits or is being served.

    ``number`` grows with each arrival. ``flow`` is the owner, and ``cost_ms`` the expected board
    time. A request that is ``ahead`` goes before all that are not. It must start by ``start_by_s``
    to meet its deadline if it takes ``safe_ms``.
    """

    number: int
    flow: str
    weight: float
    priority: int
    cost_ms: float
    ahead: bool
    what: T
    terms: QueueTerms
    safe_ms: float
    since_s: float
    start_by_s: float
    queued: bool = True
    started_s: float = 0.0
    charged_ms: float = 0.0  # charged to its owner since it got its board


@dataclass(slots=True)
class _Flow(Generic[T]):
    """The waiting requests of one owner at one priority, in the order of arrival."""

    entries: dict[int, QueueEntry[T]] = field(default_factory=dict)
    cost_ms: float = 0.0  # the weighted cost of all of them

    @property
    def weight(self) -> float:
        """The owner's weight."""
        return next(iter(self.entries.values())).weight


class FairQueue(Generic[T]):
    """The requests that wait for boards of one model."""

    def __init__(self) -> None:
        self._ahead: list[QueueEntry[T]] = []  # by priority and number
        self._levels: dict[int, dict[str, _Flow[T]]] = {}
        self.size = 0  # without those that are ahead, which were admitted before
        # The weighted service of each owner. An owner that returns starts at the level of the least
        # served one that waits, so that idle time earns no credit.
        self._served: dict[str, float] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return self.size + len(self._ahead)

    def by_priority(self) -> dict[int, int]:
        """Return the number of waiting requests at each priority."""
        counts: dict[int, int] = {}
        for one in self._ahead:
            counts[one.priority] = counts.get(one.priority, 0) + 1
        for priority, flows in self._levels.items():
            waiting = sum(len(flow.entries) for flow in flows.values())
            counts[priority] = counts.get(priority, 0) + waiting
        return counts

    def add(self, one: QueueEntry[T]) -> None:
        """Add a request behind those of its owner at the same priority."""
        if one.ahead:
            bisect.insort(self._ahead, one, key=lambda other: (other.priority, other.number))
            return
        flows = self._levels.setdefault(one.priority, {})
        if all(one.flow not in level for level in self._levels.values()):
            self._served[one.flow] = max(self._served.get(one.flow, 0.0), self._floor)
        flow = flows.setdefault(one.flow, _Flow())
        flow.entries[one.number] = one
        flow.cost_ms += one.cost_ms / one.weight
        self.size += 1

    def remove(self, one: QueueEntry[T]) -> None:
        """Remove a waiting request."""
        if one.ahead:
            self._ahead.remove(one)
            return
        flows = self._levels[one.priority]
        flow = flows[one.flow]
        del flow.entries[one.number]
        flow.cost_ms -= one.cost_ms / one.weight
        self.size -= 1
        if not flow.entries:
            del flows[one.flow]
        if not flows:
            del self._levels[one.priority]

    def serve(self, one: QueueEntry[T]) -> None:
        """Remove a request that gets a board, and charge its expected time to its owner."""
        self.remove(one)
        self._floor = max(self._floor, self._served.get(one.flow, self._floor))
        self.bill(one, one.cost_ms)

    def bill(self, one: QueueEntry[T], ms: float) -> None:
        """Correct the service of a request's owner by that time, which may be negative."""
        self._served[one.flow] = self._served.get(one.flow, self._floor) + ms / one.weight

    @property
    def ahead(self) -> Sequence[QueueEntry[T]]:
        """The waiting requests that go before all others, in serving order."""
        return self._ahead

    def order(self) -> Iterator[QueueEntry[T]]:
        """Yield the waiting requests in serving order, without changing the queue."""
        had: dict[str, float] = {}  # the service of the owners by then

        def charged(one: QueueEntry[T]) -> float:
            before = had.get(one.flow, self._served.get(one.flow, self._floor))
            had[one.flow] = before + one.cost_ms / one.weight
            return had[one.flow]

        for one in self._ahead:
            charged(one)
            yield one
        for priority in sorted(self._levels):
            flows = self._levels[priority]
            turns = [
                (
                    had.get(name, self._served.get(name, self._floor)),
                    name,
                    iter(flow.entries.values()),
                )
                for name, flow in flows.items()
            ]
            heapq.heapify(turns)
            while turns:
                _, name, rest = turns[0]
                following = next(rest, None)
                if following is None:
                    heapq.heappop(turns)
                    continue
                yield following
                heapq.heapreplace(turns, (charged(following), name, rest))

    def ahead_of(self, flow: str, priority: int) -> float:
        """Return the service before one more request of that owner, in ms."""
        total = sum(one.cost_ms for one in self._ahead)
        for level, flows in self._levels.items():
            if level < priority:
                total += sum(one.cost_ms * one.weight for one in flows.values())
        mine = self._levels.get(priority, {})
        own = mine.get(flow)
        until = 0.0 if own is None else own.cost_ms
        until += self._served.get(flow, self._floor) if own is not None else self._floor
        for name, other in mine.items():
            share = other.cost_ms
            if name != flow:
                share = min(share, max(0.0, until - self._served.get(name, self._floor)))
            total += share * other.weight
        return total

    def victim(self, newcomer: QueueEntry[T]) -> QueueEntry[T]:
        """Return the request to evict: the youngest of the largest owner at the lowest urgency.

        It may be the new request.
        """
        worst = max(self._levels, default=newcomer.priority)
        if newcomer.priority > worst:
            return newcomer
        flows = self._levels.get(worst, {})
        backlog = {name: flow.cost_ms for name, flow in flows.items()}
        if newcomer.priority == worst:
            own = backlog.get(newcomer.flow, 0.0)
            backlog[newcomer.flow] = own + newcomer.cost_ms / newcomer.weight
        most = max(backlog, key=lambda name: backlog[name], default=newcomer.flow)
        if newcomer.priority == worst and backlog[newcomer.flow] >= backlog[most]:
            return newcomer
        return next(reversed(flows[most].entries.values()))


class AdmissionQueue(FairQueue[T]):
    """The queue of one model at one Router. ``timeout_s`` is the longest wait."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._ends: list[
            tuple[float, int, QueueEntry[T]]
        ] = []  # by entry: the time at which its wait ends
        # Of the entries on boards: their number, and the sum of their expected end times.
        self._running = 0
        self._running_until_s = 0.0

    def offer(
        self,
        what: T,
        terms: QueueTerms,
        expected: ServiceTime | None,
        supply: Capacity,
        now_s: float,
    ) -> tuple[QueueEntry[T], QueueEntry[T] | None]:
        """Add a request; return its entry, and the entry that is evicted for it.

        Raises:
            QueueFull: the new request itself would be evicted.
            DeadlineUnreachable: it cannot meet its deadline.
        """
        entry = self._entry(what, terms, expected, now_s)
        wait_ms = self._wait_ms(terms, supply, now_s)
        if now_s + wait_ms / 1e3 > entry.start_by_s:
            raise _unreachable(entry, now_s, wait_ms)
        leaves = None
        if self.size + supply.elsewhere >= supply.limit + supply.free:
            leaves = self.victim(entry)
            if leaves is entry:
                raise self.full(terms, supply, now_s)
            self.withdraw(leaves)
        self._enter(entry)
        return entry, leaves

    def readmit(
        self,
        what: T,
        terms: QueueTerms,
        expected: ServiceTime | None,
        since_s: float,
        *,
        ahead: bool = False,
    ) -> QueueEntry[T]:
        """Add a request that was admitted before, at ``since_s``; it is never rejected.

        An entry that is ``ahead`` goes before all that are not, and has no deadline: its answer has
        begun or was promised, and its client decides how long to wait.
        """
        if ahead:
            terms = replace(terms, deadline_s=None)
        entry = self._entry(what, terms, expected, since_s, ahead=ahead)
        self._enter(entry)
        return entry

    def withdraw(self, entry: QueueEntry[T]) -> None:
        """Remove an entry; do nothing if it is not waiting."""
        if entry.queued:
            entry.queued = False
            self.remove(entry)

    def start(self, entry: QueueEntry[T], now_s: float) -> None:
        """Move an entry from the queue to a board."""
        entry.queued = False
        entry.started_s = now_s
        self.serve(entry)
        entry.charged_ms = entry.cost_ms
        self._running += 1
        self._running_until_s += _until_s(entry)

    def charge(self, entry: QueueEntry[T], used_ms: float) -> None:
        """Charge an entry for ``used_ms`` on a board so far, as far as that exceeds the
        estimate.
        """
        if used_ms > entry.charged_ms:
            self.bill(entry, used_ms - entry.charged_ms)
            entry.charged_ms = used_ms

    def ended(self, entry: QueueEntry[T], used_ms: float) -> None:
        """Settle an entry that leaves its board after ``used_ms``, pauses on the board included."""
        self._running -= 1
        self._running_until_s -= _until_s(entry)
        if not self._running:
            self._running_until_s = 0.0  # float sums do not cancel exactly
        self.bill(entry, used_ms - entry.charged_ms)

    def expire(self, now_s: float) -> list[tuple[QueueEntry[T], RkserveError]]:
        """Remove the entries that have waited too long; return each with its error."""
        found: list[tuple[QueueEntry[T], RkserveError]] = []
        while (end_s := self.next_event_s()) is not None and end_s <= now_s:
            _, _, entry = heapq.heappop(self._ends)
            self.withdraw(entry)
            if entry.start_by_s <= now_s:
                found.append((entry, _unreachable(entry, now_s, 0.0)))
            else:
                waited_s = now_s - entry.since_s
                found.append((entry, QueueTimeout(waited_s, _seconds(entry.cost_ms))))
        return found

    def next_event_s(self) -> float | None:
        """Return the next time at which ``expire`` has work; None if never."""
        while self._ends and not self._ends[0][2].queued:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def full(self, terms: QueueTerms, supply: Capacity, now_s: float) -> QueueFull:
        """Return the error of a request that finds no room, with the expected time to a free
        place.
        """
        waiting = self.size + supply.elsewhere
        return QueueFull(waiting, _seconds(self._wait_ms(terms, supply, now_s)))

    def _wait_ms(self, terms: QueueTerms, supply: Capacity, now_s: float) -> float:
        """Return the expected wait of one more request with these terms."""
        if supply.free > len(self):
            return 0.0
        busy_ms = max(0.0, (self._running_until_s - self._running * now_s) * 1e3)
        ahead_ms = self.ahead_of(terms.flow, terms.priority)
        ahead_ms += supply.elsewhere * supply.typical_ms
        return (busy_ms + ahead_ms) / max(1, supply.places)

    def _entry(
        self,
        what: T,
        terms: QueueTerms,
        expected: ServiceTime | None,
        since_s: float,
        *,
        ahead: bool = False,
    ) -> QueueEntry[T]:
        likely_ms = UNKNOWN_MS if expected is None else expected.likely_ms
        safe_ms = 0.0 if expected is None else expected.safe_ms
        return QueueEntry(
            number=next(self._numbers),
            flow=terms.flow,
            weight=terms.weight,
            priority=terms.priority,
            cost_ms=likely_ms,
            ahead=ahead,
            what=what,
            terms=terms,
            safe_ms=safe_ms,
            since_s=since_s,
            start_by_s=math.inf if terms.deadline_s is None else terms.deadline_s - safe_ms / 1e3,
        )

    def _enter(self, entry: QueueEntry[T]) -> None:
        self.add(entry)
        end_s = min(entry.since_s + self._timeout_s, entry.start_by_s)
        heapq.heappush(self._ends, (end_s, entry.number, entry))


def _until_s(entry: QueueEntry[T]) -> float:
    return entry.started_s + entry.cost_ms / 1e3


def _unreachable(entry: QueueEntry[T], now_s: float, wait_ms: float) -> DeadlineUnreachable:
    timeout_s = entry.terms.timeout_s
    # Alone it would meet its deadline: the client may retry when the queue is that much shorter.
    late_ms = wait_ms + entry.safe_ms - timeout_s * 1e3
    retry_s = _seconds(late_ms) if entry.safe_ms < timeout_s * 1e3 else None
    needs_s = now_s - entry.since_s + (wait_ms + entry.safe_ms) / 1e3
    return DeadlineUnreachable(timeout_s, needs_s, retry_s)


def _seconds(ms: float) -> int:
    return max(1, math.ceil(ms / 1e3 - 1e-3))
