"""The report as Markdown: measurements, machine and targets. Pure.

It contains no date, no host name and no path, so that two reports differ in figures only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.exchange import HangUp, InterruptedAnswer
from benchmarks.harness.figures import Spread, machine_line
from benchmarks.harness.prompts import NEW_TOKENS, PROFILE, PROMPT_TOKENS, profile
from benchmarks.serving.cases import Loaded, Pair
from benchmarks.serving.guided import GuidedFound
from benchmarks.serving.oneboard_figures import Batches, ParkedFigures, ParkedRound, PauseFigures
from benchmarks.serving.report_cases import (
    batches_section,
    guided_section,
    parked_section,
    pauses_section,
    tokenpath_section,
)
from benchmarks.serving.summary import HangUpFigures, LoadFigures, PairFigures, RunFigures
from benchmarks.serving.tokenpath import TokenPaths
from benchmarks.serving.tokenpath_figures import WayFigures
from rkserve.bench.figures import Ratio
from rkserve.bench.processes import PARTS, CpuUse, ProcessMemory
from rkserve.bench.results import (
    MISSING,
    Machine,
    TargetVerdict,
    figure,
    megabytes,
    percent,
    table,
    verdicts_section,
)


@dataclass(frozen=True)
class Results:
    """Everything that one run of the benchmark found."""

    machine: Machine
    verdicts: Sequence[TargetVerdict]
    pair: tuple[Pair, PairFigures] | None
    hang_ups: tuple[Sequence[HangUp], HangUpFigures] | None
    paced: Sequence[tuple[Loaded, LoadFigures]]
    ceiling: Sequence[tuple[Loaded, LoadFigures]]
    parked: tuple[Sequence[ParkedRound], ParkedFigures] | None = None
    pauses: Sequence[tuple[Sequence[InterruptedAnswer], PauseFigures]] = ()
    batches: Batches | None = None
    one_board_cpu: Mapping[str, CpuUse] = field(default_factory=dict)
    paths: tuple[TokenPaths, Sequence[WayFigures]] | None = None
    guided: GuidedFound | None = None
    failed: Sequence[str] = ()  # cases without a result, with the reason


def render(results: Results) -> str:
    """Return the report."""
    parts: tuple[Callable[[Results], str], ...] = (
        _opening,
        _targets,
        _pair,
        _hang_ups,
        _paced,
        _ceiling,
        _one_board,
        _cpu,
        _idle,
        _memory,
        _noise,
        _method,
    )
    return "\n".join(text for part in parts if (text := part(results)))


def _opening(results: Results) -> str:
    return (
        "# Benchmarks\n\n"
        "Written by `make bench`, which starts a Ray cluster of its own with simulated boards "
        f"(`{PROFILE}` where nothing else is said) and measures in one run, side by side. Every "
        f"prompt has exactly {PROMPT_TOKENS} tokens, and every answer {NEW_TOKENS} where nothing "
        "else is said.\n\n"
        f"{machine_line(results.machine)}"
    )


def _targets(results: Results) -> str:
    failed = [f"**Failed**: {one}\n" for one in results.failed]
    return "\n".join((*failed, verdicts_section(results.verdicts)))


def _pair(results: Results) -> str:
    if results.pair is None:
        return ""
    _, figures = results.pair
    board = profile()
    rows = [
        _pair_row("TTFT p50, ms", figures, lambda f: f.ttft_ms.p50, 1, figures.ttft),
        _pair_row("TTFT p99, ms", figures, lambda f: f.ttft_ms.p99),
        _pair_row("inter-token latency p50, ms", figures, lambda f: f.gap_ms.p50, 2),
        _pair_row("inter-token latency p99, ms", figures, lambda f: f.gap_ms.p99, 2),
        _pair_row("tokens/s, first to last", figures, _p50_decode, 3, figures.decode),
        _pair_row("tokens/s, whole answer", figures, lambda f: f.whole_rate.p50, 3, figures.whole),
        _pair_row("tokens/s, never idle", figures, lambda f: f.never_idle_rate, 3),
        _pair_row("answers", figures, lambda f: f.ttft_ms.count, 0),
    ]
    head = ["", "(a) binding alone", "(b) through the cluster", "b / a"]
    return (
        "## (a) The binding alone, (b) one client through the cluster\n\n"
        f"{table(head, rows)}\n"
        f"The profile itself says {board.prefill_ms(PROMPT_TOKENS):.1f} ms and "
        f"{board.tokens_per_s(PROMPT_TOKENS, NEW_TOKENS):.2f} tokens/s from first to last. Runs "
        "of (a) and (b) take turns, so that a drift of the machine hits both.\n"
    )


def _p50_decode(figures: RunFigures) -> float:
    return figures.decode_rate.p50


def _pair_row(
    name: str,
    pair: PairFigures,
    value: Callable[[RunFigures], float],
    digits: int = 1,
    of: Ratio | None = None,
) -> list[str]:
    alone = value(pair.alone)
    through = None if pair.through is None else value(pair.through)
    quotient = MISSING
    if of is not None:
        quotient = f"{of.value:.3f} ({of.low:.3f} to {of.high:.3f})"
    return [name, figure(alone, digits), figure(through, digits), quotient]


def _hang_ups(results: Results) -> str:
    if results.hang_ups is None:
        return ""
    _, figures = results.hang_ups
    freed = figures.freed_ms
    values = (freed.p50, freed.p99, figures.largest_ms, figures.step_ms)
    row = [
        "hang-up to free board, ms",
        *(figure(value) for value in values),
        figure(freed.count, 0),
    ]
    head = ["", "p50", "p99", "largest", "one decode step", "hang-ups"]
    return (
        "## A client that leaves in mid-stream\n\n"
        f"{table(head, [row])}\n"
        "One client leaves an answer at a random moment of a decode step, while the request of "
        "another waits for the same board. The time is from closing the connection to the first "
        "text of that other answer, less the prefill that the runtime reports for it. So it holds, "
        "beyond the end of the run, the clearing of the context, the start of the next run and the "
        "way of its first text to the client: too much by a few milliseconds, never too little. "
        "The run itself can end at a token only, which takes half a decode step on average.\n"
    )


def _paced(results: Results) -> str:
    if not results.paced:
        return ""
    rows = [
        [
            loaded.load.name,
            figure(figures.rate, 2),
            MISSING if figures.of_sum is None else f"{figures.of_sum:.4f}",
            figure(figures.ttft_ms.p50 / 1e3, 2),
            figure(figures.ttft_ms.p99 / 1e3, 2),
            *_p50_p99(figures.unqueued_ttft_ms),
            figure(figures.gap_ms.p50, 2),
            figure(figures.gap_ms.p99, 2),
        ]
        for loaded, figures in results.paced
    ]
    head = [
        *("", "tokens/s", "of the sum", "TTFT p50, s", "p99, s"),
        *("without queue p50, ms", "p99, ms", "inter-token p50, ms", "p99, ms"),
    ]
    return (
        "## (c) Boards with four clients each\n\n"
        f"{table(head, rows)}\n"
        "The sum is the number of boards times what (a) reaches when one run follows the other at "
        "once, prefill included. With four clients three answers wait for every board, which is "
        "most of the TTFT; without the queue it is the TTFT less the wait that the board reports.\n"
    )


def _p50_p99(spread: Spread | None) -> list[str]:
    return [figure(value) for value in ((spread.p50, spread.p99) if spread else (None, None))]


def _ceiling(results: Results) -> str:
    if not results.ceiling:
        return ""
    rows = [
        [
            loaded.load.name,
            figure(figures.rate, 0),
            figure(figures.answers_per_s),
            figure(figures.rate / figures.tokens_per_event, 0),
            figure(figures.tokens_per_event, 2),
            figure(figures.ttft_ms.p50),
            figure(figures.ttft_ms.p99),
            figure(sum(figures.cpu_ms_per_token.values()), 3),
            percent(loaded.cpu.ours_share, 0),
        ]
        for loaded, figures in results.ceiling
    ]
    head = [
        *("", "tokens/s", "answers/s", "events/s", "tokens per event"),
        *("TTFT p50, ms", "p99, ms", "CPU per token, ms", "of all cores"),
    ]
    return (
        "## (d) The ceiling: boards that take no time\n\n"
        f"{table(head, rows)}\n"
        "At `time_scale` 0 the simulated runtime costs microseconds a token, so this is what the "
        "path itself can carry on this machine. A path that is behind carries several tokens in "
        "one event; where boards take a twentieth of their time it still carries them one by "
        "one, and is what a token costs when the machine is busy. Conversations are not parked "
        "here (`prompt_cache.park` is off): the disk would be what is measured.\n"
    )


def _one_board(results: Results) -> str:
    parts = []
    if results.parked is not None:
        parts.append(parked_section(results.parked[1]))
    if results.pauses:
        parts.append(pauses_section([figures for _, figures in results.pauses]))
    if results.batches is not None:
        parts.append(batches_section(results.batches))
    if results.paths is not None:
        parts.append(tokenpath_section(results.paths[1]))
    if results.guided is not None:
        parts.append(guided_section(results.guided))
    return "\n".join(parts)


def _cpu(results: Results) -> str:
    columns: list[tuple[str, Mapping[str, float]]] = []
    if results.pair is not None and results.pair[0].through:
        pair = results.pair[0]
        tokens = sum(one.completion_tokens for one in pair.through)
        columns.append(("(b)", {p: ms / tokens for p, ms in pair.cpu.by_part_ms.items()}))
    loads = (*results.paced, *results.ceiling)
    columns += [(f"{of.load.case} {of.load.name}", f.cpu_ms_per_token) for of, f in loads]
    if not columns:
        return ""
    rows = [
        [part, *(figure(column.get(part), 3) for _, column in columns)]
        for part in _seen(*(column for _, column in columns))
    ]
    rows.append(["total", *(figure(sum(column.values()), 3) for _, column in columns)])
    worked = [MISSING] * (len(columns) - len(loads))
    worked += [figure(f.work_ms_per_token, 3) for _, f in loads]
    rows.append(["total above idle", *worked])
    return (
        "## CPU per token, by process, in ms\n\n"
        f"{table(['', *(name for name, _ in columns)], rows)}\n"
        "The time of all processes of a kind, idling included, by the tokens that arrived: at a "
        "board's pace much of it is what idling costs anyway, which the last row leaves out.\n"
    )


def _idle(results: Results) -> str:
    idle = [(of.load, of.idle) for of, _ in results.paced if of.idle.wall_ms]
    if not idle:
        return ""
    rows = [
        [part, *(percent(_of_a_core(use, part)) for _, use in idle)]
        for part in _seen(*(use.by_part_ms for _, use in idle))
    ]
    rows.append(["total", *(percent(sum(_of_a_core(u, p) for p in u.by_part_ms)) for _, u in idle)])
    head = ["", *(load.name.partition(",")[0] for load, _ in idle)]
    return f"## Idle: CPU by process, of one core\n\n{table(head, rows)}"


def _memory(results: Results) -> str:
    loads = [(of.load, of.memories) for of, _ in results.paced or results.ceiling]
    if not loads:
        return ""
    rows = [
        [part, *(_memory_cell(memories.get(part, ())) for _, memories in loads)]
        for part in _seen(*(memories for _, memories in loads))
    ]
    return (
        "## Resident memory, in MB\n\n"
        f"{table(['', *(load.name for load, _ in loads)], rows)}\n"
        "Number of processes x the largest one's RSS (its PSS, which counts a page that n "
        "processes share as 1/n). A board replica is without its engine; the engine is without a "
        "real model, which is in the library's memory.\n"
    )


def _memory_cell(memories: Sequence[ProcessMemory]) -> str:
    if not memories:
        return MISSING
    top = max(memories, key=lambda one: one.rss)
    return f"{len(memories)} x {megabytes(top.rss)} ({megabytes(top.pss)})"


def _noise(results: Results) -> str:
    uses: list[tuple[str, CpuUse]] = []
    if results.pair is not None and results.pair[0].through:
        uses.append(("(b)", results.pair[0].cpu))
    loads = (*results.paced, *results.ceiling)
    uses += [(f"{of.load.case} {of.load.name}", of.cpu) for of, _ in loads]
    uses += results.one_board_cpu.items()
    return noise_section(uses)


def noise_section(uses: Iterable[tuple[str, CpuUse]]) -> str:
    """Return who else worked on the machine while each case was measured."""
    rows = [
        [name, percent(use.ours_share), percent(use.others_share), percent(use.stolen_share)]
        for name, use in uses
    ]
    if not rows:
        return ""
    head = ["share of all cores", "the benchmark", "other processes", "hypervisor"]
    return (
        "## Noise\n\n"
        f"{table(head, rows)}\n"
        "What other processes and the hypervisor took while it measured; above a few per cent the "
        "figures say more about them than about rkserve.\n"
    )


def _method(results: Results) -> str:
    uses = [of.cpu for of, _ in (*results.paced, *results.ceiling)]
    nice = {part: level for use in uses for part, level in use.nice.items()}
    levels = ", ".join(f"{part} {level}" for part, level in nice.items())
    running = f"Nice levels as found: {levels}.\n" if levels else ""
    return (
        "## How\n\n"
        f"{_windows(results)}Clients are raw asyncio connections, kept "
        "alive, in one process, that note the time of every event and parse nothing until the "
        "measurement is over. (a) is a process with the binding and no more, which makes the same "
        "calls as the engine. TTFT is from the request to the first text; inter-token latency "
        "between events that bring text. CPU time is from /proc/<pid>/stat, memory from "
        "smaps_rollup. Ray runs without its dashboard and log forwarding, otherwise with its "
        f"defaults. {running}"
    )


def _windows(results: Results) -> str:
    lengths = {
        of.load.case: f"{of.end_s - of.start_s:.0f} s in {of.load.case}"
        for of, _ in (*results.paced, *results.ceiling)
    }
    return f"Measured windows: {', '.join(lengths.values())}. " if lengths else ""


def _of_a_core(use: CpuUse, part: str) -> float:
    return use.by_part_ms.get(part, 0.0) / use.wall_ms


def _seen(*columns: Mapping[str, object]) -> list[str]:
    return [part for part in PARTS if any(part in column for column in columns)]
