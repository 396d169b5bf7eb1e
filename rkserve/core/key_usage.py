"""The usage of API keys by day (UTC), counted in memory until it is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from rkserve.core.skew import crosses_versions

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
