"""The page: figures of all sides, their ratio to the plain one, and what they consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.figures import machine_line
from benchmarks.serving.plain.measure import BOARD, HEAD, Figures
from benchmarks.serving.plain.pace import PREFILL_S, TOKEN_S, TOKENS
from benchmarks.serving.plain.ray_apps import AT_ONCE
from benchmarks.serving.plain.sides import Side
from rkserve.bench.results import Machine

BASE = "plain"  # ratios are to this side
SUM = (*HEAD, *BOARD)
INTRODUCTION = """\
# Beside plain Ray Serve and gateways

Written by `make bench-plain`: {boards} boards with a token every {token_ms:.0f} ms, a prefill of \
{prefill_ms:.0f} ms, answers of {tokens} tokens, one stream and as many as boards. Each side runs \
alone, one after the other. *Plain* is an application as Ray's documentation writes one. *Direct \
streaming* is wired as in Ray's `serve.llm`, which itself needs vLLM or SGLang. The ingress and \
the router of these take up to {at_once} requests at once (Ray's default of 5 is below the number \
of streams), and both sides behind Ray's HAProxy have `RAY_SERVE_THROUGHPUT_OPTIMIZED=1`. LiteLLM \
and SMG have their default settings, except that SMG takes its servers in turn (all streams have \
one prompt, and its default would send them to one server) and that LiteLLM checks a key, without \
which it does not start.

CPU times are ms per token that arrived. *Head* is what runs on the head: proxies, gateways and \
routers. *With boards* adds what runs on boards. Boards differ between sides (the last table), so \
that sums compare only where they are the same, and heads everywhere. *Above idle* is without what \
the same processes take when nothing is asked. *TTFT added* is what is beyond the prefill. A side \
that cannot keep up has less than its tokens a second, and its TTFT grows with the length of the \
run.
"""
RATIOS = "As a share of plain Ray Serve at as many streams:"
PARTS = """\
The parts, in ms per token. Ray's own processes (raylet, GCS, Serve's controller) and rkserve's \
Coordinator are *beside* the sums; gateways have no such processes. *Busy* is the share of all \
cores' time that was taken, also by the clients and by anything else on the machine."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a side at each load, and the reason why there are none or not all.

    ``left_out`` is true where it could not be installed.
    """

    side: Side
    figures: Sequence[Figures]
    failure: str = ""
    left_out: bool = False


def page(results: Sequence[Result], boards: int, machine: Machine) -> str:
    """Return the report as Markdown."""
    introduction = INTRODUCTION.format(
        boards=boards,
        token_ms=TOKEN_S * 1e3,
        prefill_ms=PREFILL_S * 1e3,
        tokens=TOKENS,
        at_once=AT_ONCE,
    )
    titles = {result.side.name: result.side.title for result in results}
    found = [one for result in results for one in result.figures]
    blocks = [introduction.rstrip(), machine_line(machine).strip(), failures(results)]
    if found:
        blocks += [figures_table(found, titles)]
        if any(one.side == BASE for one in found):
            blocks += [RATIOS, ratio_table(found, titles)]
        blocks += [PARTS, parts_table(found, titles)]
    blocks.append(sides_table([result.side for result in results]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def failures(results: Sequence[Result]) -> str:
    """Return a line for each side without all of its figures."""
    return "\n".join(
        f"- **Not measured**: {result.side.title}"
        f"{' with all streams' if result.figures else ''}: {_one_line(result.failure)}"
        for result in results
        if result.failure
    )


def figures_table(found: Sequence[Figures], titles: Mapping[str, str]) -> str:
    """Return the figures of each side at each load."""
    lines = [
        "| side | streams | tokens/s | TTFT added p50, ms | head, ms a token | above idle "
        "| with boards | above idle |",
        _rule(7),
    ]
    lines += [
        f"| {titles[one.side]} | {one.streams} | {one.tokens_per_s:.0f} | {one.ttft_ms:.1f} | "
        + " | ".join(f"{cost:.3f}" for cost in costs(one))
        + " |"
        for one in found
    ]
    return "\n".join(lines)


def costs(one: Figures) -> tuple[float, ...]:
    """Return the cost of the head and of the sum, each gross and above idle; ms per token."""
    return (
        one.cost(HEAD),
        one.cost(HEAD, net=True),
        one.cost(SUM),
        one.cost(SUM, net=True),
    )


def ratio_table(found: Sequence[Figures], titles: Mapping[str, str]) -> str:
    """Return each side's costs as shares of the plain side's at the same load."""
    base = {one.streams: costs(one) for one in found if one.side == BASE}
    lines = ["| side | streams | head | above idle | with boards | above idle |", _rule(5)]
    for one in found:
        if one.side == BASE or one.streams not in base:
            continue
        shares = (
            f"{cost / of:.3f}" if of else "-"
            for cost, of in zip(costs(one), base[one.streams], strict=True)
        )
        lines.append(f"| {titles[one.side]} | {one.streams} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


def parts_table(found: Sequence[Figures], titles: Mapping[str, str]) -> str:
    """Return the cost of each part, in ms per token."""
    names = [*(f"head: {part}" for part in HEAD), *(f"boards: {part}" for part in BOARD)]
    lines = [f"| side | streams | {' | '.join(names)} | beside | busy |", _rule(len(names) + 3)]
    for one in found:
        cells = [f"{one.gross[part]:.3f}" if part in one.gross else "-" for part in SUM]
        lines.append(
            f"| {titles[one.side]} | {one.streams} | {' | '.join(cells)} | {one.beside():.3f} "
            f"| {one.busy:.0%} |"
        )
    return "\n".join(lines)


def sides_table(sides: Sequence[Side]) -> str:
    """Return what is head and what is board in each side."""
    lines = ["| side | head | boards |", "| --- | --- | --- |"]
    lines += [f"| {side.title} | {side.head} | {side.boards} |" for side in sides]
    return "\n".join(lines)


def _rule(figures: int) -> str:
    return "| --- |" + " ---: |" * figures


def _one_line(text: str) -> str:
    return " ".join(text.split())
