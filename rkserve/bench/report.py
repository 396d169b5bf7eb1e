"""Results as Markdown that is also readable on a terminal, and as charts. Pure.

Charts are SVG, written by hand: a few hundred points need no plotting library on a 4 GB board.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from xml.sax.saxutils import escape

from rkserve.bench.figures import Distribution, Percentile, Ratio, TraceFigures
from rkserve.bench.outcome import RequestOutcome
from rkserve.bench.player import PlayedRun
from rkserve.bench.results import (
    MISSING,
    BenchResults,
    RunResult,
    figure,
    megabytes,
    percent,
    table,
    verdicts_section,
)


def render(results: BenchResults, drawn: Mapping[str, Chart] | None = None) -> str:
    """Return the report; ``drawn`` are the charts that lie beside it, by name."""
    parts = (
        _opening(results),
        verdicts_section(results.verdicts),
        _rates(results.runs),
        _latencies(results.runs),
        _errors(results.runs),
        _ratios(results),
        _prefixes(results.runs),
        _boards(results.runs),
        _processes(results.runs),
        results.appendix,
        _pictures(drawn or {}),
        _method(results),
    )
    return "\n".join(part for part in parts if part)


def summary(results: BenchResults) -> str:
    """Return what fits on a screen: rates, latencies, errors, ratios, targets."""
    parts = (
        _rates(results.runs),
        _latencies(results.runs),
        _errors(results.runs),
        _ratios(results),
        verdicts_section(results.verdicts),
        results.appendix,
        *warnings(results),
    )
    return "\n".join(part for part in parts if part)


def warnings(results: BenchResults) -> list[str]:
    """Say why figures may not be what they seem."""
    sentences = (
        [] if results.complete else ["Interrupted: these are the figures of what there was.\n"]
    )
    for run in results.runs:
        found, name = run.figures, run.figures.target
        if found.generator.doubt:
            sentences.append(f"{name}: {found.generator.doubt}\n")
        if found.without_usage:
            sentences.append(
                f"{name}: {found.without_usage} answers came without usage; their tokens are "
                "counted by events.\n"
            )
        if found.not_streamed:
            sentences.append(
                f"{name}: {found.not_streamed} answers were not streamed: the first text is the "
                "last.\n"
            )
    return sentences


def _opening(results: BenchResults) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    about = "".join(f"- {name}: {value}\n" for name, value in results.about.items())
    warned = "\n".join(warnings(results))
    return (
        f"# {results.title}\n\n{about}- within the limits: {results.slo}\n"
        f"- load generator's machine: {machine.cores} cores ({machine.processor}), "
        f"{machine.memory_gb:.0f} GB; {versions}\n" + (f"\n{warned}" if warned else "")
    )


def _rates(runs: Sequence[RunResult]) -> str:
    rows = [_rate_row(run.figures) for run in runs]
    head = [
        *("", "asked", "answered", "errors", "cut", "asked/s", "answers/s", "tokens/s"),
        *("tokens per event", "goodput/s", "good tokens/s", "within limits"),
    ]
    return f"## Rates\n\n{table(head, rows)}" if rows else ""


def _rate_row(found: TraceFigures) -> list[str]:
    return [
        found.target,
        figure(found.asked, 0),
        figure(found.answered, 0),
        figure(sum(found.errors.values()), 0),
        figure(found.cut, 0),
        figure(found.offered_rate, 2),
        figure(found.answer_rate, 2),
        figure(found.token_rate, 1),
        figure(found.tokens_per_event, 2),
        figure(found.goodput, 2),
        figure(found.good_token_rate, 1),
        percent(found.good_share),
    ]


def _latencies(runs: Sequence[RunResult]) -> str:
    measures: tuple[tuple[str, Callable[[TraceFigures], Distribution | None]], ...] = (
        ("TTFT", lambda found: found.ttft_ms),
        ("between texts", lambda found: found.gap_ms),
        ("per token", lambda found: found.token_ms),
        ("end-to-end", lambda found: found.e2e_ms),
        ("queue, as the server says", lambda found: found.queue_ms),
        ("until refused", lambda found: found.refused_ms),
    )
    rows = [
        [f"{name}: {run.figures.target}", *_cells(found)]
        for name, of in measures
        for run in runs
        if (found := of(run.figures)) is not None
    ]
    head = ["ms", "p50", "95 % interval", "p90", "p99", "95 % interval", "largest", "mean", "n"]
    return f"## Latencies\n\n{table(head, rows)}" if rows else ""


def _cells(found: Distribution) -> list[str]:
    return [
        figure(found.p50.value),
        _interval(found.p50),
        figure(found.p90.value),
        figure(found.p99.value),
        _interval(found.p99),
        figure(found.largest),
        figure(found.mean),
        figure(found.count, 0),
    ]


def _interval(of: Percentile) -> str:
    if of.low is None or of.high is None:
        return MISSING
    return f"{figure(of.low)} to {figure(of.high)}"


def _errors(runs: Sequence[RunResult]) -> str:
    labels = list(dict.fromkeys(label for run in runs for label in run.figures.errors))
    rows = [
        [label, *(figure(run.figures.errors.get(label, 0), 0) for run in runs)] for label in labels
    ]
    waits = [run.figures.retry_after_s for run in runs]
    if any(waits):
        cells = (MISSING if one is None else figure(one.p50.value, 0) for one in waits)
        rows.append(["Retry-After p50, s", *cells])
    head = ["", *(run.figures.target for run in runs)]
    return f"## Errors\n\n{table(head, rows)}" if rows else ""


def _ratios(results: BenchResults) -> str:
    if not results.comparisons:
        return ""
    names = list(results.comparisons[0].ratios)
    rows = [
        [f"{one.target} / {one.to}", *(_ratio(one.ratios[name]) for name in names)]
        for one in results.comparisons
    ]
    return (
        f"## Beside each other\n\n{table(['', *names], rows)}\n"
        "The same trace for all. Intervals of 95 % are from sessions drawn again, in pairs.\n"
    )


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return MISSING
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _prefixes(runs: Sequence[RunResult]) -> str:
    rows = []
    for run in runs:
        found = run.figures.prefix
        if found.reporting:
            rows.append(
                [
                    run.figures.target,
                    MISSING if found.ratio is None else percent(found.ratio),
                    MISSING if found.of_reusable is None else percent(found.of_reusable),
                    percent(found.hits / found.reporting),
                    figure(found.prompt, 0),
                    figure(found.cached, 0),
                ]
            )
    head = ["", "cached", "of what turns left", "answers with a hit", "prompt tokens", "of cache"]
    return (
        f"## Prompt tokens that came from a cache\n\n{table(head, rows)}\n"
        "By `usage.prompt_tokens_details.cached_tokens`. What turns left: the tokens of a prompt "
        "that were in its session's turn before; more than all of it is shared system prompts.\n"
        if rows
        else ""
    )


def _boards(runs: Sequence[RunResult]) -> str:
    names = sorted({name for run in runs for name in run.figures.boards})
    rows = [[name, *(figure(run.figures.boards.get(name, 0), 0) for run in runs)] for name in names]
    continued = [run.figures.continued for run in runs]
    if any(continued):
        rows.append(["continued elsewhere, times", *(figure(one, 0) for one in continued)])
    head = ["answers by board", *(run.figures.target for run in runs)]
    return f"## Boards\n\n{table(head, rows)}" if rows else ""


def _processes(runs: Sequence[RunResult]) -> str:
    parts = list(
        dict.fromkeys(
            part for run in runs if run.cpu for part in (*run.cpu.by_part_ms, *run.memories)
        )
    )
    rows = [[part, *(_process_cell(run, part) for run in runs)] for part in parts]
    if not rows:
        return ""
    return (
        f"## Processes\n\n{table(['', *(run.figures.target for run in runs)], rows)}\n"
        "CPU of one core and per token that arrived; number of processes x RSS of the largest (its "
        "PSS) when the run was over.\n"
    )


def _process_cell(run: RunResult, part: str) -> str:
    if run.cpu is None:
        return MISSING
    spent_ms = run.cpu.by_part_ms.get(part, 0.0)
    tokens = run.figures.token_rate * run.figures.window_s
    each = f", {spent_ms / tokens:.3f} ms" if tokens else ""
    memories = run.memories.get(part, ())
    top = max(memories, key=lambda one: one.rss, default=None)
    held = "" if top is None else f"; {len(memories)} x {megabytes(top.rss)} "
    held += "" if top is None else f"({megabytes(top.pss)}) MB"
    return f"{percent(spent_ms / (run.cpu.wall_ms or 1.0))}{each}{held}"


def _pictures(drawn: Mapping[str, Chart]) -> str:
    return "\n".join(f"![{chart.title}]({name}.svg)\n" for name, chart in drawn.items())


def _method(results: BenchResults) -> str:
    rows = [
        [
            run.figures.target,
            figure(run.figures.window_s),
            percent(run.figures.generator.cpu_share),
            figure(run.figures.generator.us_per_event, 0),
            figure(run.figures.generator.lag_p99_ms),
            figure(run.figures.generator.late_p99_ms),
            figure(run.figures.generator.late_most_ms),
        ]
        for run in results.runs
    ]
    head = [
        *("load generator", "window, s", "CPU of one core", "us per event"),
        *("loop late p99, ms", "sent late p99, ms", "most, ms"),
    ]
    closed = any(run.played.plan.clients for run in results.runs)
    return (
        f"## How\n\n{table(head, rows)}\n"
        "Latencies count from when a request was due: a connection that must be opened first, and "
        "a load generator that comes late, are in them. In an open loop a session begins when the "
        "trace says, whatever the server does, so that a slow server does not slow down what "
        "measures it (coordinated omission); its next turn waits for the answer before. "
        + (
            "In a closed loop a slow server gets fewer requests, which latencies do not show. "
            * closed
        )
        + "Nothing is asked twice. Rates are counted in the window: from the end of the warm-up to "
        "the last request, or to the last answer if all were asked within the time of one answer. "
        "Intervals of percentiles are by ranks, and take answers as independent, "
        "which turns of one session are not quite.\n"
    )


# -- charts ---------------------------------------------------------------------------------------

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
