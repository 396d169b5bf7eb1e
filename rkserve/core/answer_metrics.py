"""The metrics of answers, bound to their labels once, and the usage of API keys by day (UTC).

A token costs a Router no lookup of labels. Usage is counted in memory until it is stored.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as MultiSet
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from rkserve.core.messages import Finished, FinishReason
from rkserve.core.skew import crosses_versions

# From 400 tokens/s to the gap that a client notices as a stop.
TOKEN_GAP_BUCKETS_S = (
    0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5,
    5, 10, 30,
)  # fmt: skip
# The ends of answers apart from those of ``FinishReason``.
ERROR, HANG_UP = "error", "hang_up"
# One that upstreams alone have gets its series when it comes.
REASONS = (
    *(reason.value for reason in FinishReason if reason is not FinishReason.FILTERED),
    *(ERROR, HANG_UP),
)


class ReasonCounters(dict[str, Counter]):
    """Counters of one model's answers by how they ended, made when they are looked up."""

    def __init__(self, make: Callable[[str], Counter]) -> None:
        super().__init__()
        self._make = make
        for reason in REASONS:
            self[reason] = make(reason)

    def __missing__(self, reason: str) -> Counter:
        """Return the counter of an end that has not come before."""
        made = self[reason] = self._make(reason)
        return made


class TokenGaps:
    """Inter-token latencies of one model, for one event loop.

    An observation takes a third of the time of the library's, which locks each of its two values:
    0.3 us of the 170 us or more that a token costs a Router.
    """

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_GAP_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float, tokens: int = 1) -> None:
        """Observe tokens that came ``gap_s`` apart."""
        self._counts[bisect_left(TOKEN_GAP_BUCKETS_S, gap_s)] += tokens
        self._sum_s += gap_s * tokens

    def buckets(self) -> tuple[Sequence[tuple[str, float]], float]:
        """Return the cumulative counts by upper bound, and the sum of all."""
        bounds = (*(str(float(bound)) for bound in TOKEN_GAP_BUCKETS_S), "+Inf")
        counts = (float(count) for count in accumulate(self._counts))
        return list(zip(bounds, counts, strict=True)), self._sum_s


class TokenGapCollector(Collector):
    """Exports the inter-token latencies of all models."""

    def __init__(self) -> None:
        self._models: dict[str, TokenGaps] = {}

    def of(self, model: str) -> TokenGaps:
        """Return those of a model."""
        return self._models.setdefault(model, TokenGaps())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram."""
        family = HistogramMetricFamily(
            "rkserve_inter_token_seconds",
            "Time between two tokens of an answer at the Router, without pauses.",
            labels=("model",),
        )
        for model, gaps in self._models.items():
            family.add_metric((model,), *gaps.buckets())
        yield family


class AnswerFigures:
    """The metrics of one model's answers, bound once, so that tokens cost no lookup of labels."""

    def __init__(
        self, gaps: TokenGaps, prompt: Histogram, answer: Histogram, reasons: Mapping[str, Counter]
    ) -> None:
        """``prompt`` and ``answer`` are lengths; ``reasons`` has a counter for each end."""
        self.gaps = gaps
        self._prompt, self._answer, self._reasons = prompt, answer, reasons

    def finished(self, event: Finished) -> None:
        """Count a generation that its board has ended."""
        self._prompt.observe(event.usage.prompt_tokens)
        self._answer.observe(event.usage.completion_tokens)
        self._reasons[event.reason.value].inc()

    def broken(self, reason: str, generations: int) -> None:
        """Count generations without an end in order; ``reason`` is ``ERROR`` or ``HANG_UP``."""
        self._reasons[reason].inc(generations)


class AdapterCalls:
    """The adapters of this Router's calls, by name: of those that wait for a board, and of those
    that boards have accepted.
    """

    def __init__(self) -> None:
        self.waiting: MultiSet[str] = MultiSet()
        self.running: MultiSet[str] = MultiSet()

    @contextmanager
    def waits(self, adapter: str | None) -> Iterator[None]:
        """Count a call that waits for boards."""
        if adapter is None:
            yield
            return
        self.waiting[adapter] += 1
        try:
            yield
        finally:
            self.waiting[adapter] -= 1


DAY_S = 86400
DAYS_KEPT = 62  # a month and the one before it


@crosses_versions
@dataclass(frozen=True, slots=True)
class DayUsage:
    """The usage of one API key on one day (UTC); ``day`` counts from 1970-01-01, which is 0."""

    day: int
    key: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    board_s: float = 0.0

    def plus(self, other: DayUsage) -> DayUsage:
        """Return the usage of both together, of this day and key."""
        return DayUsage(
            self.day,
            self.key,
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.board_s + other.board_s,
        )

    def later(self, other: DayUsage) -> DayUsage:
        """Return the later one of two readings of the same counts."""
        return max(self, other, key=DayUsage._counts)

    def _counts(self) -> tuple[int, int, int, float]:
        return self.requests, self.prompt_tokens, self.completion_tokens, self.board_s


@crosses_versions
@dataclass(frozen=True, slots=True)
class RouterUsage:
    """The usage that one Router answers with.

    ``stored`` is read from ``file``, which all Routers of a node share; an empty name is none that
    can be used. ``unstored`` is this Router's alone.
    """

    router: str
    file: str = ""
    stored: tuple[DayUsage, ...] = ()
    unstored: tuple[DayUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The usage of all keys by day, and the names of the Routers that answered or did not.

    ``unstored`` are the Routers without a file: their counts begin with their start.
    """

    days: Sequence[DayUsage]
    up: Sequence[str]
    silent: Sequence[str] = ()
    unstored: Sequence[str] = ()


def together(routers: Iterable[RouterUsage]) -> list[DayUsage]:
    """Return the sum of the Routers' usage; a file that several of them have read counts once."""
    files: dict[str, dict[tuple[int, str], DayUsage]] = {}
    rows: list[DayUsage] = []
    for one in routers:
        rows += one.unstored
        of_file = files.setdefault(one.file, {})
        for row in one.stored:
            known = of_file.get((row.day, row.key))
            of_file[row.day, row.key] = row if known is None else known.later(row)
    for of_file in files.values():
        rows += of_file.values()
    found: dict[tuple[int, str], DayUsage] = {}
    for row in rows:
        known = found.get((row.day, row.key))
        found[row.day, row.key] = row if known is None else known.plus(row)
    return list(found.values())


@dataclass(slots=True)
class UsageCounts:
    """Counts of one key on one day."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    board_s: float = 0.0


class UsageByDay:
    """The usage of all keys at one Router that is not stored yet. Use from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns the time in seconds since 1970."""
        self._clock = clock
        # In the order of their beginning: a clock that was set back keeps no day forever.
        self._days: dict[int, dict[str, UsageCounts]] = {}

    @property
    def today(self) -> int:
        """The number of the current day, see ``DayUsage``."""
        return int(self._clock() // DAY_S)

    def of(self, key: str) -> UsageCounts:
        """Return the counts of a key on the current day."""
        return self._of(self.today, key)

    def rows(self) -> list[DayUsage]:
        """Return the usage of each key on each day."""
        return [
            DayUsage(day, key, one.requests, one.prompt_tokens, one.completion_tokens, one.board_s)
            for day, of_day in self._days.items()
            for key, one in of_day.items()
        ]

    def take(self) -> list[DayUsage]:
        """Return the usage of each key on each day, and count from zero."""
        rows = self.rows()
        self._days.clear()
        return rows

    def put_back(self, rows: Iterable[DayUsage]) -> None:
        """Add usage that was taken and could not be stored."""
        for row in rows:
            counts = self._of(row.day, row.key)
            counts.requests += row.requests
            counts.prompt_tokens += row.prompt_tokens
            counts.completion_tokens += row.completion_tokens
            counts.board_s += row.board_s

    def _of(self, day: int, key: str) -> UsageCounts:
        of_day = self._days.get(day)
        if of_day is None:
            of_day = self._days[day] = {}
            while len(self._days) > DAYS_KEPT:
                del self._days[next(iter(self._days))]
        counts = of_day.get(key)
        if counts is None:
            counts = of_day[key] = UsageCounts()
        return counts


class KeyUsage:
    """The usage of one API key at one Router, by the key's name."""

    def __init__(
        self, requests: Counter, prompt: Counter, completion: Counter, name: str, days: UsageByDay
    ) -> None:
        self._requests, self._prompt, self._completion = requests, prompt, completion
        self._name, self._days = name, days

    def called(self) -> None:
        """Count an admitted call."""
        self._requests.inc()
        self._days.of(self._name).requests += 1

    def spent(self, *, prompt: int = 0, completion: int = 0) -> None:
        """Count tokens."""
        self._prompt.inc(prompt)
        self._completion.inc(completion)
        counts = self._days.of(self._name)
        counts.prompt_tokens += prompt
        counts.completion_tokens += completion

    def used_board(self, seconds: float) -> None:
        """Count board time."""
        self._days.of(self._name).board_s += seconds
