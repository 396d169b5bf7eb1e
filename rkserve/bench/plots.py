"""Which lines a report shows: how latencies are distributed, and what happened over time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from rkserve.bench.charts import Chart, ChartLine, Point
from rkserve.bench.outcome import RequestOutcome
from rkserve.bench.player import PlayedRun

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
