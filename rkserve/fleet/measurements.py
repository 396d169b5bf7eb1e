"""Measurements of boards by one Router: speeds, recent rates, and failures. Pure.

``Rates`` is the recent throughput of a board, for display. ``Speed`` estimates the time per token,
for routing: from the board's own measurements if there are any, else from those of boards of its
kind (group and platform), else from those of all boards, else from a prior. ``CircuitBreaker``
keeps requests off failing boards; a board is identified by its key there, and the replacement of a
replica has a new key, and starts with a closed circuit. The clock is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from rkserve.core.board_report import BoardReport

# Between an RK3576 and an RK3588 with a model of 1.5B parameters, as the vendor publishes them.
PRIOR_PREFILL_MS = 4.0
PRIOR_DECODE_MS = 75.0
PREFILL_MEMORY = 8192  # tokens after which half of what was measured is forgotten
DECODE_MEMORY = 1024
# A board that is slower than its kind by more is stuck, and its time is left out of their average.
STUCK = 8.0
UNUSED_S = 120.0  # after this time without work, a board's own measurements are forgotten
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

    def is_far_above(self, tokens: float, ms: float) -> bool:
        """True if that work took more than ``STUCK`` times the average."""
        return self.each is not None and ms > STUCK * self.each * tokens > 0

    @property
    def each(self) -> float | None:
        """The milliseconds per token; None before the first measurement."""
        return self.ms / self.tokens if self.tokens else None


@dataclass(slots=True)
class _Pair:
    prefill: TokenTime
    decode: TokenTime


def _pair() -> _Pair:
    return _Pair(TokenTime(PREFILL_MEMORY), TokenTime(DECODE_MEMORY))


class Speed:
    """The time per token of one board.

    A board that is slow for a while (a frozen process, heat) gets no requests as long as others
    are free, and so no new measurements. After ``UNUSED_S`` it counts as fast as its kind again.
    """

    __slots__ = (
        *("_pairs", "_replica", "_seen", "_worked_s"),
        *("decode_ms", "kind", "level", "prefill_ms"),
    )

    def __init__(self, book: ModelSpeeds, kind: str) -> None:
        # In order of preference: the board itself, boards of its kind, all boards.
        self._pairs = (_pair(), book.kind(kind), book.everybody)
        # The latest counters of its replica: tokens and ms of prefill, then of decoding.
        self._replica, self._seen = "", (0, 0.0, 0, 0.0)
        self._worked_s = -math.inf
        self.kind = kind
        self.prefill_ms = PRIOR_PREFILL_MS
        self.decode_ms = PRIOR_DECODE_MS
        self.level = 0
        self._settle()

    def update(self, report: BoardReport, now_s: float) -> None:
        """Take over a report; a new replica's counters start at zero."""
        before = self._seen if self._replica == report.replica else (0, 0.0, 0, 0.0)
        self._replica = report.replica
        if -math.inf < self._worked_s < now_s - UNUSED_S:
            self._pairs = (_pair(), *self._pairs[1:])
        self._seen = (
            *(report.prefill_tokens, report.prefill_ms),
            *(report.decode_tokens, report.decode_ms),
        )
        if self._seen != before or report.running or self._worked_s == -math.inf:
            self._worked_s = now_s
        own, kind, everybody = self._pairs
        prefilled = (self._seen[0] - before[0], self._seen[1] - before[1])
        decoded = (self._seen[2] - before[2], self._seen[3] - before[3])
        stuck = kind.prefill.is_far_above(*prefilled) or kind.decode.is_far_above(*decoded)
        for pair in (own,) if stuck else (own, kind, everybody):
            pair.prefill.add(*prefilled)
            pair.decode.add(*decoded)
        self._settle()

    @property
    def known(self) -> bool:
        """True if it was measured, of the board itself or of others of its kind."""
        return any(pair.prefill.each and pair.decode.each for pair in self._pairs[:2])

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
        """Return the average of the boards of one kind."""
        return self._kinds.setdefault(name, _pair())


WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second over the window, idle time included."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class Rates:
    """The recent throughput of one board."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._replica = ""
        # The time of each report, and the tokens that were prefilled and decoded by then.
        self._seen: deque[tuple[float, int, int]] = deque()

    def update(self, report: BoardReport, now_s: float) -> None:
        """Take over a report; a new replica's counters start at zero."""
        if self._replica != report.replica:
            self._seen.clear()
        self._replica = report.replica
        self._seen.append((now_s, report.prefill_tokens, report.decode_tokens))
        # One report from before the window stays; a slow reporter would have no rate without it.
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self._window_s:  # noqa: PLR2004 - both ends
            self._seen.popleft()

    def now(self) -> Rate:
        """Return the rate over the window; zero before the second report."""
        if len(self._seen) <= 1:
            return Rate()
        (first_s, *first), (last_s, *last) = self._seen[0], self._seen[-1]
        took_s = last_s - first_s
        if took_s <= 0:
            return Rate()
        return Rate(*(max(0, now - then) / took_s for then, now in zip(first, last, strict=True)))


class Circuit(str, Enum):
    """The state of a board's circuit."""

    CLOSED = "closed"  # all requests pass
    OPEN = "open"  # no requests for a while
    HALF_OPEN = "half_open"  # one probe, which closes or opens the circuit


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """``failures`` within ``window_s`` open the circuit for ``open_s``.

    Each failed probe doubles that time, up to ``longest_s``. A probe without a result for
    ``probe_s`` is abandoned, and another one may be sent.
    """

    failures: int = 3
    window_s: float = 30.0
    open_s: float = 2.0
    longest_s: float = 60.0
    probe_s: float = 30.0


@dataclass(slots=True)
class _Board:
    failed_s: deque[float] = field(default_factory=deque)
    reason: str = ""
    until_s: float | None = None  # None: closed
    lasts_s: float = 0.0  # the duration of the last opening
    probe_s: float | None = None  # the time at which the probe was sent


class CircuitBreaker:
    """The circuits of all boards of one Router."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self.failing: dict[str, _Board] = {}  # boards with recent failures only

    def circuit(self, key: str, now_s: float) -> Circuit:
        """Return the state of the board's circuit."""
        board = self.failing.get(key)
        if board is None or board.until_s is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now_s < self._again_s(board) else Circuit.HALF_OPEN

    def blocked(self, now_s: float) -> list[str]:
        """Return the keys of boards with an open circuit."""
        return [key for key in self.failing if self.circuit(key, now_s) is Circuit.OPEN]

    def soonest_s(self, now_s: float) -> float | None:
        """Return the time at which the first of ``blocked`` half-opens; None without any."""
        return min([self._again_s(self.failing[key]) for key in self.blocked(now_s)], default=None)

    def sent(self, key: str, now_s: float) -> None:
        """Note a request to the board; the first one after the open time is the probe."""
        board = self.failing.get(key)
        if board is not None and board.until_s is not None and now_s >= board.until_s:
            board.probe_s = now_s

    def worked(self, key: str) -> None:
        """Close the circuit after a success and forget earlier failures."""
        self.failing.pop(key, None)

    def failed(self, key: str, reason: str, now_s: float) -> bool:
        """Count a request lost by the board's fault; return whether that opens the circuit."""
        board, rules = self.failing.setdefault(key, _Board()), self._rules
        board.reason = reason
        board.failed_s.append(now_s)
        while board.failed_s[0] <= now_s - rules.window_s:
            board.failed_s.popleft()
        if board.until_s is not None and now_s >= board.until_s:
            return self._open(board, now_s, min(2 * board.lasts_s, rules.longest_s))
        if board.until_s is None and len(board.failed_s) >= rules.failures:
            return self._open(board, now_s, rules.open_s)
        return False

    def undecided(self, key: str) -> None:
        """Note a request that ended without showing the board's health; allow another probe."""
        board = self.failing.get(key)
        if board is not None:
            board.probe_s = None

    def forgive(self, key: str) -> None:
        """Remove the last failure, which was not the board's fault."""
        board = self.failing.get(key)
        if board is None:
            return
        board.failed_s.pop()
        board.until_s = board.probe_s = None
        if not board.failed_s:
            del self.failing[key]

    def reason(self, key: str, now_s: float) -> str:
        """Return why the circuit is not closed; empty if it is."""
        board = self.failing.get(key)
        if board is None or board.until_s is None:
            return ""
        left_s = max(0.0, board.until_s - now_s)
        return (
            f"{len(board.failed_s)} requests failed, last: {board.reason}; next in {left_s:.1f} s"
        )

    def keep(self, keys: frozenset[str]) -> None:
        """Forget all boards but these."""
        for key in self.failing.keys() - keys:
            del self.failing[key]

    def _open(self, board: _Board, now_s: float, lasts_s: float) -> bool:
        board.until_s, board.lasts_s, board.probe_s = now_s + lasts_s, lasts_s, None
        return True

    def _again_s(self, board: _Board) -> float:
        """Return the time at which an open circuit half-opens without news of the board."""
        assert board.until_s is not None
        probed_s = 0.0 if board.probe_s is None else board.probe_s + self._rules.probe_s
        return max(board.until_s, probed_s)
