"""Histories in memory: the last 30 minutes of each board, and counts of traffic for three days.

Memory is bounded: a board takes 24 KB (13 figures of 4 bytes, its state, and 10 minutes of decoding
times), 100 boards 2.4 MB; the traffic of a model takes 387 points of some 500 bytes, 190 KB.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.verdicts.facts import BoardView

EVERY_S = 5.0
POINTS = 360
SPARK_POINTS = 60
SPEED_POINTS = 120  # 10 minutes, as the alert's window
FEWEST_DECODED = 64  # tokens below which a speed says little
MEGA = 1_000_000
# The figures of a board that change all the time, in the order of a history's columns.
FIGURES = (
    "decode_tokens_per_s",  # over the last seconds, idle time included
    "prefill_tokens_per_s",
    "speed_tokens_per_s",  # of decoding alone, over the last minutes
    "running",
    "queued",
    "paused",
    "kv_percent",
    "cached_percent",
    "npu_percent",
    "npu_mhz",
    "ddr_mhz",
    "temperature_c",
    "memory_mb",
)
SPARKS = ("decode_tokens_per_s", "running", "npu_percent", "temperature_c")
_STATES = tuple(BoardState)
# Of several states within one point of a sparkline, the first one here is shown.
_WORST = (
    *(BoardState.LOST, BoardState.FAILED, BoardState.STOPPED, BoardState.HUNG),
    *(BoardState.QUARANTINED, BoardState.RECOVERING, BoardState.JOINING, BoardState.LOADING),
    *(BoardState.FETCHING, BoardState.ASLEEP, BoardState.READY),
)


def figures_of(board: BoardView) -> tuple[float | None, ...]:
    """Return the figures of a board, rounded to what a reader can use; None is unknown."""
    report, hardware = board.report, board.report.hardware
    capacity = report.context_len * report.n_batch
    load = hardware.npu_load if hardware is not None else ()
    return (
        round(board.decode_tokens_per_s, 1),
        round(board.prefill_tokens_per_s, 1),
        None if board.speed_tokens_per_s is None else round(board.speed_tokens_per_s, 1),
        report.running,
        report.queued,
        report.paused,
        _percent(report.kv_positions, capacity),
        _percent(report.cached_tokens, report.prompt_tokens),
        round(sum(load) / len(load)) if load else None,
        _mega(hardware.npu_hz) if hardware is not None else None,
        _mega(hardware.ddr_hz) if hardware is not None else None,
        _rounded(hardware.temperature_c) if hardware is not None else None,
        _mega(hardware.memory_available_bytes) if hardware is not None else None,
    )


def _percent(part: int, whole: int) -> int | None:
    return round(100 * part / whole) if whole else None


def _mega(count: int | None) -> int | None:
    return None if count is None else round(count / MEGA)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


class BoardHistory:
    """The samples of one board, in rings. ``count`` of them have been taken."""

    __slots__ = ("_at", "_columns", "_decoded", "_seen", "_states", "_sums", "count")

    def __init__(self) -> None:
        self._states = bytearray(POINTS)
        self._columns = [array("f", bytes(4 * POINTS)) for _ in FIGURES]
        self._at = self.count = 0
        # Tokens and milliseconds that were decoded since the sample before, and their sums.
        self._decoded = (array("d", bytes(8 * SPEED_POINTS)), array("d", bytes(8 * SPEED_POINTS)))
        self._sums = [0.0, 0.0]
        self._seen = ("", 0.0, 0.0)

    def add(self, state: BoardState, figures: Sequence[float | None]) -> None:
        """Add a sample, and forget the oldest one beyond the limit."""
        self._states[self._at] = _STATES.index(state)
        for column, value in zip(self._columns, figures, strict=True):
            column[self._at] = math.nan if value is None else value
        self._at = (self._at + 1) % POINTS
        self.count += 1

    def decoded(self, report: BoardReport) -> None:
        """Note the decoding since the last call, once for each sample and before it."""
        replica, tokens, ms = self._seen
        if replica != report.replica:  # whose counters began at zero
            tokens = ms = 0.0
        # What a board decoded before this Router's start has no place in the window.
        first = not replica
        since = (report.decode_tokens - tokens, report.decode_ms - ms)
        self._seen = (report.replica, float(report.decode_tokens), report.decode_ms)
        at = self.count % SPEED_POINTS
        for index, ring in enumerate(self._decoded):
            value = 0.0 if first else max(0.0, since[index])
            self._sums[index] += value - ring[at]
            ring[at] = value

    @property
    def speed_tokens_per_s(self) -> float | None:
        """The speed of decoding over the last ten minutes, None where it says little."""
        tokens, ms = self._sums
        return 1000 * tokens / ms if tokens >= FEWEST_DECODED and ms > 0 else None

    def column(self, index: int) -> list[float | None]:
        """Return the values of a figure, the latest last."""
        ring = self._columns[index]
        return [_plain(ring[at]) for at in self._order()]

    def spans(self) -> list[tuple[BoardState, int]]:
        """Return the states, each with the number of samples that it lasted."""
        return _spans([_STATES[self._states[at]] for at in self._order()])

    def sparks(self) -> tuple[dict[str, list[float | None]], list[tuple[BoardState, int]]]:
        """Return the columns and states of a sparkline, of which each point is several samples."""
        order, size = list(self._order()), POINTS // SPARK_POINTS
        groups = [order[max(0, end - size) : end] for end in range(len(order), 0, -size)][::-1]
        columns = {}
        for name in SPARKS:
            ring = self._columns[FIGURES.index(name)]
            columns[name] = [_mean([ring[at] for at in group]) for group in groups]
        states = [
            min((_STATES[self._states[at]] for at in group), key=_WORST.index) for group in groups
        ]
        return columns, _spans(states)

    def _order(self) -> Iterator[int]:
        """Yield the places of the samples in the rings, the oldest first."""
        kept = min(self.count, POINTS)
        return ((self._at - kept + number) % POINTS for number in range(kept))


def _plain(value: float) -> float | None:
    """Return a number as short in JSON as the figure was; 32 bits would show seven digits."""
    if math.isnan(value):
        return None
    return int(value) if value == int(value) else round(value, 1)


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return _plain(round(sum(known) / len(known), 1)) if known else None


def _spans(states: Sequence[BoardState]) -> list[tuple[BoardState, int]]:
    return [(state, len(list(group))) for state, group in groupby(states)]


class CountHistory:
    """Counters at earlier times: every 15 s for an hour, more rarely for three days.

    The counters are arrays by name, and only grow.
    """

    LEVELS = ((15.0, 3600.0), (300.0, 6 * 3600.0), (3600.0, 72 * 3600.0))

    def __init__(self) -> None:
        self._levels: list[deque[tuple[float, Mapping[str, array[int]]]]] = [
            deque() for _ in self.LEVELS
        ]

    def add(self, now_s: float, counts: Mapping[str, array[int]]) -> None:
        """Keep the counters of now, where the last ones are old enough."""
        for kept, (every_s, keep_s) in zip(self._levels, self.LEVELS, strict=True):
            if kept and now_s < kept[-1][0] + every_s:
                continue
            kept.append((now_s, counts))
            # One from before the window stays, which is the window's beginning.
            while len(kept) > 1 and kept[1][0] <= now_s - keep_s:
                kept.popleft()

    def before(self, at_s: float) -> Mapping[str, array[int]]:
        """Return the counters at that time or shortly before; at the start, if that was later."""
        for kept in self._levels:
            if kept and kept[0][0] <= at_s:
                return next(counts for when_s, counts in reversed(kept) if when_s <= at_s)
        return {}
