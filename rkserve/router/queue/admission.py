"""Who waits for a board, who is turned away, and until when it is worth to wait. Pure.

One queue for all boards of a model, so that the first that is free takes the next request. It is
bounded: where one too many would wait, the least urgent and youngest leaves. What cannot be ready
in time is refused at once, and never started: boards are kept for work that is still of use. The
clock is passed in, and which board takes a request is decided elsewhere.
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

LATEST = 0.1  # how much one answer counts
FEW = 4  # answers, before which a mean says little
SAFE = 2.0  # mean deviations above the mean, which few answers exceed
MOST_RATIO = 8.0  # one run that was disturbed says nothing of the next one


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What can be known of a request before it runs. ``prompt_tokens`` is at least 1."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """What one answer took. ``held_ms`` is how long it kept its place, without its pauses."""

    prefill_tokens: int
    prefill_ms: float
    decode_tokens: int
    decode_ms: float
    tokens: int
    held_ms: float


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """How long a request will keep its place: on average, and with few exceptions."""

    likely_ms: float
    safe_ms: float


@dataclass(slots=True)
class _Mean:
    """A mean that follows what comes; the first few count alike."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(LATEST, 1 / self.count)


@dataclass(slots=True)
class ServiceTimeModel:
    """What answers of one model take, on whichever board.

    Lengths are remembered by the limit that the client set, as powers of two: who asks for 4,000
    tokens at most does not tell what those get who ask for 100.
    """

    _prefill_ms: _Mean = field(default_factory=_Mean)  # of one token
    _decode_ms: _Mean = field(default_factory=_Mean)
    _fresh: _Mean = field(default_factory=_Mean)  # share of a prompt that is not in a KV cache
    _lengths: dict[int, _Mean] = field(default_factory=dict)
    # What a request kept its place for, compared with what was expected of its tokens.
    _ratio: _Mean = field(default_factory=_Mean)
    _spread: _Mean = field(default_factory=_Mean)

    def of(self, asked: RequestSize) -> ServiceTime | None:
        """Return what is expected; None before enough answers have ended."""
        plain_ms = self._plain_ms(asked)
        if plain_ms is None or self._ratio.count < FEW:
            return None
        ratio = self._ratio.value
        return ServiceTime(plain_ms * ratio, plain_ms * (ratio + SAFE * self._spread.value))

    def heard(self, asked: RequestSize, took: AnswerTiming) -> None:
        """Learn from an answer that ended in order."""
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
        """What an answer takes of which nothing is known; None before the first one."""
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

# Until the first answers have ended nobody knows what they take: shares are then counted by them.
UNKNOWN_MS = 1000.0
ANONYMOUS = ""


# A request's id, and the seconds for which it had a board since the last time.
Use = Callable[[str, float], None]


def _unmetered(request_id: str, seconds: float) -> None:
    """Count nothing."""


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """What a request may ask of the queue.

    ``flow`` is whose it is: those without a key share one, and each gets service by its ``weight``.
    A lower ``priority`` goes first. Its answer is of no use after ``deadline_s``, on the queue's
    clock; it was given ``timeout_s``. ``came_s`` is when its call came, on the same clock. ``use``
    is told of the board time of each of its requests.
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
    """What serves the queue: ``places`` at boards, of which ``free`` are; ``limit`` may wait, and
    ``elsewhere`` so many wait at the boards themselves already, each for about ``typical_ms``.
    """

    places: int
    free: int
    limit: int
    elsewhere: int = 0
    typical_ms: float = UNKNOWN_MS


@dataclass(eq=False, slots=True)
class QueueEntry(Waiting, Generic[T]):
    """One request in the queue, or served from it; ``start_by_s`` is when it must have a board to
    be ready in time, which takes it ``safe_ms`` with few exceptions.
    """

    what: T
    claim: QueueTerms
    safe_ms: float
    since_s: float
    start_by_s: float
    queued: bool = True
    started_s: float = 0.0
    charged_ms: float = 0.0  # to its owner, since it has its board


class AdmissionQueue(Generic[T]):
    """The queue of one model at one Router. ``timeout_s`` is the longest wait."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: FairQueue[QueueEntry[T]] = FairQueue()
        self._numbers = itertools.count()
        self._ends: list[tuple[float, int, QueueEntry[T]]] = []  # when each has waited too long
        # Of those that are served: how many, and the sum of the times at which they should end.
        self._served = 0
        self._served_until_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def by_priority(self) -> dict[int, int]:
        """Return how many wait at each priority."""
        return self._queue.by_priority()

    def offer(
        self,
        what: T,
        claim: QueueTerms,
        expected: ServiceTime | None,
        supply: Capacity,
        now_s: float,
    ) -> tuple[QueueEntry[T], QueueEntry[T] | None]:
        """Let a request wait; return its ticket, and the one of who has to leave for it.

        Raises:
            QueueFull: the newcomer itself is the one.
            DeadlineUnreachable: it could not be ready in time.
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
        """Let one wait that was let in before, at ``since_s``: it is never turned away.

        What is ``ahead`` goes before all that is not, and has no deadline: its answer has begun or
        was promised, and whoever it is for decides when that comes too late.
        """
        if ahead:
            claim = replace(claim, deadline_s=None)
        ticket = self._ticket(what, claim, expected, since_s, ahead=ahead)
        self._enter(ticket)
        return ticket

    def withdraw(self, ticket: QueueEntry[T]) -> None:
        """It waits no longer; once more does no harm."""
        if ticket.queued:
            ticket.queued = False
            self._queue.remove(ticket)

    def order(self) -> Iterator[QueueEntry[T]]:
        """Yield those that wait as they are served; the queue must not change meanwhile."""
        return self._queue.order()

    def start(self, ticket: QueueEntry[T], now_s: float) -> None:
        """It has a board."""
        ticket.queued = False
        ticket.started_s = now_s
        self._queue.serve(ticket)
        ticket.charged_ms = ticket.cost_ms
        self._served += 1
        self._served_until_s += _until_s(ticket)

    def charge(self, ticket: QueueEntry[T], used_ms: float) -> None:
        """It has had a board for ``used_ms`` so far: what is above the estimate is charged now."""
        if used_ms > ticket.charged_ms:
            self._queue.charge(ticket.flow, ticket.weight, used_ms - ticket.charged_ms)
            ticket.charged_ms = used_ms

    def ended(self, ticket: QueueEntry[T], used_ms: float) -> None:
        """It has let go of the board, which it had for ``used_ms``, pauses on it included."""
        self._served -= 1
        self._served_until_s -= _until_s(ticket)
        if not self._served:
            self._served_until_s = 0.0  # sums of floats do not cancel out
        self._queue.charge(ticket.flow, ticket.weight, used_ms - ticket.charged_ms)

    def expire(self, now_s: float) -> list[tuple[QueueEntry[T], RkserveError]]:
        """Take out those that have waited too long, with what each is told."""
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
        """When ``expire`` has something to do; None: never, as it is."""
        while self._ends and not self._ends[0][2].queued:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def full(self, claim: QueueTerms, supply: Capacity, now_s: float) -> QueueFull:
        """Return what one is told that finds no room: to come back when those before it have left
        the queue, by what they are thought to take.
        """
        waiting = self._queue.size + supply.elsewhere
        return QueueFull(waiting, _seconds(self._wait_ms(claim, supply, now_s)))

    def _wait_ms(self, claim: QueueTerms, supply: Capacity, now_s: float) -> float:
        """How long one more request of that claim would wait."""
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
    # Alone it would be ready in time: it may come again when the queue is that much shorter.
    late_ms = wait_ms + ticket.safe_ms - timeout_s * 1e3
    retry_s = _seconds(late_ms) if ticket.safe_ms < timeout_s * 1e3 else None
    needs_s = now_s - ticket.since_s + (wait_ms + ticket.safe_ms) / 1e3
    return DeadlineUnreachable(timeout_s, needs_s, retry_s)


def _seconds(ms: float) -> int:
    return max(1, math.ceil(ms / 1e3 - 1e-3))
