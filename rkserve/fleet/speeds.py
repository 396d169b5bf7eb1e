"""Measured board speeds, from the counters in board reports. Pure.

``Rates`` is the recent throughput of a board, for display. ``Speed`` estimates the time per token,
for routing: from the board's own measurements if there are any, else from those of boards of its
platform, else from those of all boards, else from a prior.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Between an RK3576 and an RK3588 with a model of 1.5B parameters, as the vendor publishes them.
PRIOR_PREFILL_MS = 4.0
PRIOR_DECODE_MS = 75.0
PREFILL_MEMORY = 8192  # tokens after which half of what was measured is forgotten
DECODE_MEMORY = 1024
STEP = math.log(1.25)  # boards that differ by less are equally fast
SLACK = 0.65  # of a step: a board near a border stays where it is


@dataclass(slots=True)
class TokenTime:
    """The average milliseconds per token, weighted towards recent measurements."""

    memory: int
    tokens: float = 0.0
    ms: float = 0.0

    def add(self, tokens: float, ms: float) -> None:
        """Add the work since the last call."""
        if tokens <= 0 or ms <= 0:
            return
        kept: float = 0.5 ** (tokens / self.memory)
        self.tokens = self.tokens * kept + tokens
        self.ms = self.ms * kept + ms

    @property
    def each(self) -> float | None:
        """The milliseconds per token; None before the first measurement."""
        return self.ms / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True)
class WorkCounters:
    """A replica's counters of work since its start, from its report."""

    replica: str
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0


@dataclass(slots=True)
class _Pair:
    prefill: TokenTime
    decode: TokenTime


def _pair() -> _Pair:
    return _Pair(TokenTime(PREFILL_MEMORY), TokenTime(DECODE_MEMORY))


class Speed:
    """The time per token of one board."""

    __slots__ = ("_pairs", "_seen", "decode_ms", "kind", "level", "prefill_ms")

    def __init__(self, book: ModelSpeeds, kind: str) -> None:
        # In order of preference: the board itself, boards of its kind, all boards.
        self._pairs = (_pair(), book.kind(kind), book.everybody)
        self._seen: WorkCounters | None = None
        self.kind = kind
        self.prefill_ms = PRIOR_PREFILL_MS
        self.decode_ms = PRIOR_DECODE_MS
        self.level = 0
        self._settle()

    def heard(self, now: WorkCounters) -> None:
        """Take over a report; a new replica's counters start at zero."""
        before = self._seen
        if before is None or before.replica != now.replica:
            before = WorkCounters(now.replica)
        self._seen = now
        prefill = (now.prefill_tokens - before.prefill_tokens, now.prefill_ms - before.prefill_ms)
        decode = (now.decode_tokens - before.decode_tokens, now.decode_ms - before.decode_ms)
        for pair in self._pairs:
            pair.prefill.add(*prefill)
            pair.decode.add(*decode)
        self._settle()

    def _settle(self) -> None:
        prefill = (pair.prefill.each for pair in self._pairs)
        decode = (pair.decode.each for pair in self._pairs)
        self.prefill_ms = next((ms for ms in prefill if ms is not None), PRIOR_PREFILL_MS)
        self.decode_ms = next((ms for ms in decode if ms is not None), PRIOR_DECODE_MS)
        exact = math.log(self.decode_ms) / STEP
        if abs(exact - self.level) > SLACK:
            self.level = round(exact)


class ModelSpeeds:
    """The speeds of all boards of one model."""

    def __init__(self) -> None:
        self.everybody = _pair()
        self._kinds: dict[str, _Pair] = {}

    def kind(self, name: str) -> _Pair:
        """Return the average of the boards of one kind (a platform)."""
        return self._kinds.setdefault(name, _pair())


WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens that a replica had prefilled and decoded at a time."""

    now_s: float
    replica: str
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second over the window, idle time included."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class Rates:
    """The recent throughput of one board."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[TokenCounts] = deque()

    def heard(self, counted: TokenCounts) -> None:
        """Take over a report; a new replica's counters start at zero."""
        if self._seen and self._seen[-1].replica != counted.replica:
            self._seen.clear()
        self._seen.append(counted)
        # One report from before the window stays; a slow reporter would have no rate without it.
        while len(self._seen) > 2 and self._seen[1].now_s <= counted.now_s - self._window_s:  # noqa: PLR2004 - both ends
            self._seen.popleft()

    def now(self) -> Rate:
        """Return the rate over the window; zero before the second report."""
        if len(self._seen) <= 1:
            return Rate()
        first, last = self._seen[0], self._seen[-1]
        took_s = last.now_s - first.now_s
        if took_s <= 0:
            return Rate()
        return Rate(
            max(0, last.prefill_tokens - first.prefill_tokens) / took_s,
            max(0, last.decode_tokens - first.decode_tokens) / took_s,
        )
