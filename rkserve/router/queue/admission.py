"""Admission to the queue of one model: its bound, deadlines and expected service times. Pure.

One queue serves all boards of a model. It is bounded: an overflow evicts the least urgent and
youngest request. A request that cannot meet its deadline is rejected at once, so that boards work
on useful requests only. The clock is passed in; routing policies choose the boards.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from rkserve.core.errors import DeadlineUnreachable, QueueFull, QueueTimeout, RkserveError
from rkserve.router.queue.fairness import FairQueue, Waiting

LATEST = 0.1  # the weight of one answer in the averages
FEW = 4  # answers that an estimate needs at least
SAFE = 2.0  # mean deviations above the mean; few answers exceed that
MOST_RATIO = 8.0  # the cap for outliers, such as disturbed runs


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The size of a request before it runs. ``prompt_tokens`` is at least 1."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """The measured times of one answer. ``held_ms`` is its time on a board, without pauses."""

    prefill_tokens: int
    prefill_ms: float
    decode_tokens: int
    decode_ms: float
    tokens: int
    held_ms: float


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """The expected time on a board: the mean, and a bound that most requests keep."""

    likely_ms: float
    safe_ms: float


@dataclass(slots=True)
class _Mean:
    """An exponential moving average; the first few values have equal weight."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(LATEST, 1 / self.count)


@dataclass(slots=True)
class ServiceTimeModel:
    """Statistics of the answers of one model, over all boards.

    Lengths are kept by the client's token limit, in powers of two: answers with a limit of 4,000
    tokens say nothing about those with a limit of 100.
    """

    _prefill_ms: _Mean = field(default_factory=_Mean)  # of one token
    _decode_ms: _Mean = field(default_factory=_Mean)
    _fresh: _Mean = field(default_factory=_Mean)  # the share of a prompt that is not cached
    _lengths: dict[int, _Mean] = field(default_factory=dict)
    # The time on a board, relative to the estimate from token counts.
    _ratio: _Mean = field(default_factory=_Mean)
    _spread: _Mean = field(default_factory=_Mean)

    def of(self, asked: RequestSize) -> ServiceTime | None:
        """Return the expected service time; None before enough answers have ended."""
        plain_ms = self._plain_ms(asked)
        if plain_ms is None or self._ratio.count < FEW:
            return None
        ratio = self._ratio.value
        return ServiceTime(plain_ms * ratio, plain_ms * (ratio + SAFE * self._spread.value))

    def heard(self, asked: RequestSize, took: AnswerTiming) -> None:
        """Learn from a completed answer."""
        plain_ms = self._plain_ms(asked)
        if plain_ms:
            ratio = min(MOST_RATIO, took.held_ms / plain_ms)
            self._spread.add(abs(ratio - self._ratio.value) if self._ratio.count else ratio / 2)
            self._ratio.add(ratio)
        if took.prefill_tokens > 0 and took.prefill_ms > 0:
            self._prefill_ms.add(took.prefill_ms / took.prefill_tokens)
        if took.decode_tokens > 0 and took.decode_ms > 0:
            self._decode_ms.add(took.decode_ms / took.decode_tokens)
        self._fresh.add(min(1.0, took.prefill_tokens / asked.prompt_tokens))
        self._lengths.setdefault(asked.max_tokens.bit_length(), _Mean()).add(took.tokens)

    @property
    def typical_ms(self) -> float | None:
        """The mean service time of any answer; None before the first one."""
        lengths = [mean.value for mean in self._lengths.values()]
        if not lengths or not self._decode_ms.count:
            return None
        return self._decode_ms.value * sum(lengths) / len(lengths)

    def _plain_ms(self, asked: RequestSize) -> float | None:
        if not self._decode_ms.count and not self._prefill_ms.count:
            return None
        mean = self._lengths.get(asked.max_tokens.bit_length())
        tokens = asked.max_tokens if mean is None else min(asked.max_tokens, mean.value)
        fresh = self._fresh.value * asked.prompt_tokens
        return fresh * self._prefill_ms.value + tokens * self._decode_ms.value


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
    ``use`` is called with the board time of each request.
    """

    flow: str = ANONYMOUS
    weight: float = 1.0
    priority: int = 0
    deadline_s: float | None = None
    timeout_s: float = 0.0
    came_s: float | None = None
    use: Use = field(default=_unmetered, compare=False)


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
class QueueEntry(Waiting, Generic[T]):
    """One request that waits or is being served.

    It must start by ``start_by_s`` to meet its deadline if it takes ``safe_ms``.
    """

    what: T
    claim: QueueTerms
    safe_ms: float
    since_s: float
    start_by_s: float
    queued: bool = True
    started_s: float = 0.0
    charged_ms: float = 0.0  # charged to its owner since it got its board


class AdmissionQueue(Generic[T]):
    """The queue of one model at one Router. ``timeout_s`` is the longest wait."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: FairQueue[QueueEntry[T]] = FairQueue()
        self._numbers = itertools.count()
        self._ends: list[
            tuple[float, int, QueueEntry[T]]
        ] = []  # by entry: the time at which its wait ends
        # Of the entries on boards: their number, and the sum of their expected end times.
        self._served = 0
        self._served_until_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def by_priority(self) -> dict[int, int]:
        """Return the number of waiting requests at each priority."""
        return self._queue.by_priority()

    def offer(
        self,
        what: T,
        claim: QueueTerms,
        expected: ServiceTime | None,
        supply: Capacity,
        now_s: float,
    ) -> tuple[QueueEntry[T], QueueEntry[T] | None]:
        """Add a request; return its entry, and the entry that is evicted for it.

        Raises:
            QueueFull: the new request itself would be evicted.
            DeadlineUnreachable: it cannot meet its deadline.
        """
        ticket = self._ticket(what, claim, expected, now_s)
        wait_ms = self._wait_ms(claim, supply, now_s)
        if now_s + wait_ms / 1e3 > ticket.start_by_s:
            raise _unreachable(ticket, now_s, wait_ms)
        leaves = None
        if self._queue.size + supply.elsewhere >= supply.limit + supply.free:
            leaves = self._queue.victim(ticket)
            if leaves is ticket:
                raise self.full(claim, supply, now_s)
            self.withdraw(leaves)
        self._enter(ticket)
        return ticket, leaves

    def readmit(
        self,
        what: T,
        claim: QueueTerms,
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
            claim = replace(claim, deadline_s=None)
        ticket = self._ticket(what, claim, expected, since_s, ahead=ahead)
        self._enter(ticket)
        return ticket

    def withdraw(self, ticket: QueueEntry[T]) -> None:
        """Remove an entry; do nothing if it is not waiting."""
        if ticket.queued:
            ticket.queued = False
            self._queue.remove(ticket)

    def order(self) -> Iterator[QueueEntry[T]]:
        """Yield the waiting entries in serving order; the queue must not change meanwhile."""
        return self._queue.order()

    def start(self, ticket: QueueEntry[T], now_s: float) -> None:
        """Move an entry from the queue to a board."""
        ticket.queued = False
        ticket.started_s = now_s
        self._queue.serve(ticket)
        ticket.charged_ms = ticket.cost_ms
        self._served += 1
        self._served_until_s += _until_s(ticket)

    def charge(self, ticket: QueueEntry[T], used_ms: float) -> None:
        """Charge an entry for ``used_ms`` on a board so far, as far as that exceeds the
        estimate.
        """
        if used_ms > ticket.charged_ms:
            self._queue.charge(ticket.flow, ticket.weight, used_ms - ticket.charged_ms)
            ticket.charged_ms = used_ms

    def ended(self, ticket: QueueEntry[T], used_ms: float) -> None:
        """Settle an entry that leaves its board after ``used_ms``, pauses on the board included."""
        self._served -= 1
        self._served_until_s -= _until_s(ticket)
        if not self._served:
            self._served_until_s = 0.0  # float sums do not cancel exactly
        self._queue.charge(ticket.flow, ticket.weight, used_ms - ticket.charged_ms)

    def expire(self, now_s: float) -> list[tuple[QueueEntry[T], RkserveError]]:
        """Remove the entries that have waited too long; return each with its error."""
        found: list[tuple[QueueEntry[T], RkserveError]] = []
        while (end_s := self.next_event_s()) is not None and end_s <= now_s:
            _, _, ticket = heapq.heappop(self._ends)
            self.withdraw(ticket)
            if ticket.start_by_s <= now_s:
                found.append((ticket, _unreachable(ticket, now_s, 0.0)))
            else:
                waited_s = now_s - ticket.since_s
                found.append((ticket, QueueTimeout(waited_s, _seconds(ticket.cost_ms))))
        return found

    def next_event_s(self) -> float | None:
        """Return the next time at which ``expire`` has work; None if never."""
        while self._ends and not self._ends[0][2].queued:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def full(self, claim: QueueTerms, supply: Capacity, now_s: float) -> QueueFull:
        """Return the error of a request that finds no room, with the expected time to a free
        place.
        """
        waiting = self._queue.size + supply.elsewhere
        return QueueFull(waiting, _seconds(self._wait_ms(claim, supply, now_s)))

    def _wait_ms(self, claim: QueueTerms, supply: Capacity, now_s: float) -> float:
        """Return the expected wait of one more request with these terms."""
        if supply.free > len(self._queue):
            return 0.0
        busy_ms = max(0.0, (self._served_until_s - self._served * now_s) * 1e3)
        ahead_ms = self._queue.ahead_of(claim.flow, claim.priority)
        ahead_ms += supply.elsewhere * supply.typical_ms
        return (busy_ms + ahead_ms) / max(1, supply.places)

    def _ticket(
        self,
        what: T,
        claim: QueueTerms,
        expected: ServiceTime | None,
        since_s: float,
        *,
        ahead: bool = False,
    ) -> QueueEntry[T]:
        likely_ms = UNKNOWN_MS if expected is None else expected.likely_ms
        safe_ms = 0.0 if expected is None else expected.safe_ms
        return QueueEntry(
            number=next(self._numbers),
            flow=claim.flow,
            weight=claim.weight,
            priority=claim.priority,
            cost_ms=likely_ms,
            ahead=ahead,
            what=what,
            claim=claim,
            safe_ms=safe_ms,
            since_s=since_s,
            start_by_s=math.inf if claim.deadline_s is None else claim.deadline_s - safe_ms / 1e3,
        )

    def _enter(self, ticket: QueueEntry[T]) -> None:
        self._queue.add(ticket)
        end_s = min(ticket.since_s + self._timeout_s, ticket.start_by_s)
        heapq.heappush(self._ends, (end_s, ticket.number, ticket))


def _until_s(ticket: QueueEntry[T]) -> float:
    return ticket.started_s + ticket.cost_ms / 1e3


def _unreachable(ticket: QueueEntry[T], now_s: float, wait_ms: float) -> DeadlineUnreachable:
    timeout_s = ticket.claim.timeout_s
    # Alone it would meet its deadline: the client may retry when the queue is that much shorter.
    late_ms = wait_ms + ticket.safe_ms - timeout_s * 1e3
    retry_s = _seconds(late_ms) if ticket.safe_ms < timeout_s * 1e3 else None
    needs_s = now_s - ticket.since_s + (wait_ms + ticket.safe_ms) / 1e3
    return DeadlineUnreachable(timeout_s, needs_s, retry_s)


def _seconds(ms: float) -> int:
    return max(1, math.ceil(ms / 1e3 - 1e-3))
