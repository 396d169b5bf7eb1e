"""Results as Markdown that is also readable on a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rkserve.bench.charts import Chart
from rkserve.bench.figures import Distribution, Percentile, Ratio, TraceFigures
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
    said = [] if results.complete else ["Interrupted: these are the figures of what there was.\n"]
    for run in results.runs:
        found, name = run.figures, run.figures.target
        if found.generator.doubt:
            said.append(f"{name}: {found.generator.doubt}\n")
        if found.without_usage:
            said.append(
                f"{name}: {found.without_usage} answers came without usage; their tokens are "
                "counted by events.\n"
            )
        if found.not_streamed:
            said.append(
                f"{name}: {found.not_streamed} answers were not streamed: the first text is the "
                "last.\n"
            )
    return said


def _opening(results: BenchResults) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    about = "".join(f"- {name}: {said}\n" for name, said in results.about.items())
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
        if found.told:
            rows.append(
                [
                    run.figures.target,
                    MISSING if found.ratio is None else percent(found.ratio),
                    MISSING if found.of_reusable is None else percent(found.of_reusable),
                    percent(found.hits / found.told),
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
