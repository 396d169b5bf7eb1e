"""The charts of a report, as lines of points and as SVG. Pure.

The SVG is written by hand: a few hundred points need no plotting library on a 4 GB board.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from xml.sax.saxutils import escape

from rkserve.bench.outcome import RequestOutcome
from rkserve.bench.player import PlayedRun

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 40, 48
LEGEND_STEP, LEGEND_ROW = 170, 16
# Told apart by people who do not see all colours (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MOST_POINTS = 400
TICKS = 6
NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One run's line."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same axes. ``log_x`` is for what spans decades; y begins at 0."""

    title: str
    x: str
    y: str
    lines: Sequence[ChartLine]
    log_x: bool = False

    @property
    def empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(line.points for line in self.lines)


@dataclass(frozen=True, slots=True)
class _Axes:
    low_x: float
    high_x: float
    high_y: float
    log_x: bool

    def at(self, point: Point) -> str:
        return f"{self.x(point[0]):.1f},{self.y(point[1]):.1f}"

    def x(self, value: float) -> float:
        low, high = self._scaled(self.low_x), self._scaled(self.high_x)
        share = (self._scaled(value) - low) / ((high - low) or 1.0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / (self.high_y or 1.0) * (HEIGHT - TOP - BOTTOM)

    def x_ticks(self) -> list[float]:
        return decades(self.low_x, self.high_x) if self.log_x else ticks(self.low_x, self.high_x)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low_x)) if self.log_x else value


def svg(chart: Chart) -> str:
    """Return the drawing."""
    lines = [ChartLine(one.name, _thinned(one.points)) for one in chart.lines]
    axes = _axes([point for line in lines for point in line.points], log_x=chart.log_x)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 14, chart.title, 'font-size="13" font-weight="bold"'),
        *_grid(axes),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.x, 'text-anchor="middle"'),
        _text(14, middle, chart.y, f'text-anchor="middle" transform="rotate(-90 14 {middle:.1f})"'),
        *(_drawn(number, line, axes) for number, line in enumerate(lines)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Return round values between two."""
    if high <= low:
        return [low]
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in NICE if one * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the 1, 2 and 5 of each decade between two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [head * 10.0**power for power in powers for head in (1, 2, 5)]
    return [one for one in found if low * (1 - 1e-9) <= one <= high * (1 + 1e-9)]


def _axes(points: Sequence[Point], *, log_x: bool) -> _Axes:
    xs = [x for x, _ in points if x > 0 or not log_x] or [1.0]
    high_y = max((y for _, y in points), default=1.0)
    return _Axes(min(xs), max(xs), high_y or 1.0, log_x)


def _grid(axes: _Axes) -> list[str]:
    parts = []
    for value in axes.x_ticks():
        x = axes.x(value)
        parts.append(_rule(x, TOP, x, HEIGHT - BOTTOM))
        parts.append(_text(x, HEIGHT - BOTTOM + 14, f"{value:g}", 'text-anchor="middle"'))
    for value in ticks(0.0, axes.high_y):
        y = axes.y(value)
        parts.append(_rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", 'text-anchor="end"'))
    return parts


def _drawn(number: int, line: ChartLine, axes: _Axes) -> str:
    colour = COLOURS[number % len(COLOURS)]
    x, y = LEFT + number % 4 * LEGEND_STEP, 28 + number // 4 * LEGEND_ROW
    path = " ".join(axes.at(point) for point in line.points)
    return "\n".join(
        (
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>',
            f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{colour}"/>',
            _text(x + 20, y - 2, line.name),
        )
    )


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MOST_POINTS:
        return points
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(number * step)] for number in range(MOST_POINTS)]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        'stroke="#dddddd" stroke-width="1"/>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#222222" {more}>{escape(text)}</text>'


BUCKETS = 60


def charts(runs: Sequence[PlayedRun]) -> dict[str, Chart]:
    """Return the charts of runs beside each other, by the name of their file; none is empty."""
    drawn = {
        "ttft": _distribution(
            "Time to first token: share of answers that had it by then",
            runs,
            lambda one: [one.ttft_ms],
        ),
        "end-to-end": _distribution(
            "End-to-end: share of answers that were complete by then",
            runs,
            lambda one: [one.e2e_ms],
        ),
        "gaps": _distribution(
            "Between texts: share of gaps no longer than that", runs, lambda one: one.gaps_ms
        ),
        "ttft-over-time": Chart(
            "Time to first token over time (median of those due then)",
            "s from the start",
            "ms",
            [ChartLine(run.target, ttft_over_time(run)) for run in runs],
        ),
        "running": Chart(
            "Requests without their whole answer",
            "s from the start",
            "requests",
            [ChartLine(run.target, running(run)) for run in runs],
        ),
        "tokens": Chart(
            "Texts that arrived",
            "s from the start",
            "events/s",
            [ChartLine(run.target, events_over_time(run)) for run in runs],
        ),
    }
    return {name: chart for name, chart in drawn.items() if not chart.empty}


def _distribution(
    title: str, runs: Sequence[PlayedRun], of: Callable[[RequestOutcome], Sequence[float]]
) -> Chart:
    lines = [
        ChartLine(run.target, shares([ms for one in run.outcomes if one.ok for ms in of(one)]))
        for run in runs
    ]
    return Chart(title, "ms", "%", lines, log_x=True)


def shares(values: Sequence[float]) -> list[Point]:
    """Return the cumulative distribution, in per cent."""
    ordered = sorted(values)
    return [(value, 100 * (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]


def ttft_over_time(played: PlayedRun) -> list[Point]:
    """Return the median of what was due in each stretch of time."""
    width_s = _width_s(played)
    found: dict[int, list[float]] = {}
    for one in played.outcomes:
        if one.ok:
            place = int((one.asked.due_s - played.start_s) / width_s)
            found.setdefault(place, []).append(one.ttft_ms)
    return [((place + 0.5) * width_s, median(found[place])) for place in sorted(found)]


def events_over_time(played: PlayedRun) -> list[Point]:
    """Return the events with text per second, in each stretch of time."""
    width_s = _width_s(played)
    counts = [0] * (BUCKETS + 1)
    for one in played.outcomes:
        for at_s in one.text_s:
            counts[min(BUCKETS, int((at_s - played.start_s) / width_s))] += 1
    if not any(counts):
        return []
    return [((place + 0.5) * width_s, count / width_s) for place, count in enumerate(counts[:-1])]


def running(played: PlayedRun) -> list[Point]:
    """Return how many requests were under way, at each moment at which that changed."""
    steps: list[tuple[float, int]] = []
    for one in played.outcomes:
        over_s = max(one.over_s or played.end_s, one.asked.due_s)
        steps += [(one.asked.due_s, 1), (over_s, -1)]
    found, count = [], 0
    for at_s, step in sorted(steps):
        count += step
        found.append((at_s - played.start_s, float(count)))
    return found


def _width_s(played: PlayedRun) -> float:
    return max((played.end_s - played.start_s) / BUCKETS, 1e-3)
