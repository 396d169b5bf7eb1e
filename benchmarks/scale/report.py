"""The report of the simulation, in Markdown. Pure."""

from __future__ import annotations

import platform

from benchmarks.scale.cases import Grown, Outcome, Results
from benchmarks.scale.conversations import Shape
from rkserve.bench.results import figure, percent, table

LIMIT_US = 200.0


def render(results: Results) -> str:
    """Return the whole report."""
    parts = [
        "# Scale, simulated\n\n"
        "Written by `make bench-scale`, which plays conversations against clusters on paper: the "
        "real code of routing, admission and rollouts decides, in one process and without Ray. "
        f"Seed {results.seed}; Python {platform.python_version()} on {platform.machine()}. "
        "Boards, users, disks and networks are formulas and their times simulated; those of "
        "decisions, hashing and reports are CPU time of this machine. What follows from it is in "
        "[scaling.md](../explanation/scaling.md).\n",
        *_policies(results),
        *_decided(results),
        *_grown(results),
        *_memory(results),
        *_loaded(results),
        *_rollouts(results),
    ]
    return "\n".join(parts)


def _policies(results: Results) -> list[str]:
    if not results.policies:
        return []
    parts = ["## The same conversations against every policy\n"]
    for load, found in results.policies.items():
        base = next(one for one in found if one.name == "round_robin")
        parts += [f"**{load}**\n", table(_HEAD, [_row(one, base) for one in found])]
    return parts


_HEAD = (
    "policy",
    "hit ratio",
    "x round_robin",
    "TTFT p50, ms",
    "less",
    "p90, ms",
    "p99, ms",
    "tokens/s",
)


def _row(one: Outcome, base: Outcome) -> tuple[str, ...]:
    return (
        one.name,
        percent(one.hit),
        figure(one.hit / base.hit if base.hit else None),
        figure(one.ttft_p50_ms, 0),
        percent(1 - one.ttft_p50_ms / base.ttft_p50_ms, 0),
        figure(one.ttft_p90_ms, 0),
        figure(one.ttft_p99_ms, 0),
        figure(one.tokens_per_s),
    )


def _decided(results: Results) -> list[str]:
    if not results.decided:
        return []
    head = (
        "boards",
        "contexts known",
        "decision p50, µs",
        "p99, µs",
        "hashing p50, µs",
        "report with a change, µs",
        "report without, µs",
        "holdings of a report, bytes",
    )
    rows = [
        (
            figure(one.boards, 0),
            figure(one.contexts, 0),
            figure(one.decide_p50_us, 0),
            figure(one.decide_p99_us, 0),
            figure(one.hash_p50_us, 0),
            figure(one.full_report_us, 0),
            figure(one.same_report_us, 0),
            figure(one.report_bytes, 0),
        )
        for one in results.decided
    ]
    largest = max(results.decided, key=lambda one: one.boards)
    us = largest.decide_p50_us
    verdict = "reached" if us <= LIMIT_US else "missed"
    return [
        "## Decisions\n",
        f"Prompts of {largest.tokens + 60} tokens; a fifth of the boards is free, each holds 100 "
        "contexts that share a system prompt of 256 tokens. Half of the prompts go on with one.\n",
        table(head, rows),
        f"Decision at {largest.boards:,} boards, median, at most {LIMIT_US:.0f} µs: {us:.0f} µs, "
        f"{verdict}.\n",
    ]


def _grown(results: Results) -> list[str]:
    if not results.grown:
        return []
    head = (
        "boards",
        "sessions",
        "turns",
        "policy",
        "hit ratio",
        "TTFT p50, ms",
        "p99, ms",
        "busy",
        "tokens/s",
        "decisions a turn",
        "decision p50, µs",
        "p99, µs",
        "hashing p50, µs",
        "report p50, µs",
        "contexts",
        "process, MB",
    )
    return [
        "## Growth\n",
        f"One Router, all boards as busy as at any size, a third of them slow ({_shape()}).\n",
        table(head, [_size(one) for one in results.grown]),
    ]


def _shape() -> str:
    shape = Shape(turns=3, systems=32)
    return (
        f"{shape.turns:g} turns on average, {shape.user_tokens} tokens each, answers of "
        f"{shape.answer_tokens}, {shape.systems} system prompts of {shape.system_tokens}"
    )


def _size(one: Grown) -> tuple[str, ...]:
    out = one.outcome
    return (
        str(one.boards),
        figure(one.sessions, 0),
        figure(out.turns, 0),
        out.name,
        percent(out.hit),
        figure(out.ttft_p50_ms, 0),
        figure(out.ttft_p99_ms, 0),
        percent(out.busy, 0),
        figure(out.tokens_per_s, 0),
        figure(out.decisions / max(1, out.turns), 2),
        figure(out.decide_p50_us, 0),
        figure(out.decide_p99_us, 0),
        figure(out.hash_p50_us, 0),
        figure(out.report_p50_us, 0),
        figure(one.contexts, 0),
        figure(one.resident_mb, 0),
    )


def _memory(results: Results) -> list[str]:
    if not results.remembered:
        return []
    rows = [
        (figure(one.contexts, 0), figure(one.tokens, 0), figure(one.bytes_each, 0))
        for one in results.remembered
    ]
    return [
        "## Memory of the index\n",
        "What a Router keeps for each context that boards told it of, a hundred of each board, "
        "with all that leads there.\n",
        table(("contexts", "tokens each", "bytes each"), rows),
    ]


def _loaded(results: Results) -> list[str]:
    if not results.loaded:
        return []
    head = (
        "offered / capacity",
        "requests",
        "in time",
        "in time, each s",
        "refused",
        "late",
        "greedy key's part",
        "fairness",
    )
    rows = [
        (
            figure(one.factor),
            figure(one.offered, 0),
            figure(one.good, 0),
            figure(one.good_per_s, 2),
            figure(one.refused, 0),
            figure(one.late, 0),
            percent(one.greedy),
            figure(one.fairness, 3),
        )
        for one in results.loaded
    ]
    return [
        "## Overload\n",
        "Each request wants its answer within 20 s. Ten keys; one asks for five times as much as "
        "each other. Fairness is Jain's index of the board time that keys got.\n",
        table(head, rows),
    ]


def _rollouts(results: Results) -> list[str]:
    if not results.rollouts:
        return []
    head = (
        "boards",
        "strategy",
        "ended",
        "took, s",
        "staging, s",
        "boards died",
        "lagging",
        "events",
        "deciding, ms",
        "each p99, µs",
    )
    rows = [
        (
            str(one.boards),
            one.strategy,
            one.state,
            figure(one.took_s),
            figure(one.staged_s),
            str(one.died),
            str(one.lagging),
            str(one.events),
            figure(one.decide_ms),
            figure(one.decide_p99_us, 0),
        )
        for one in results.rollouts
    ]
    return [
        "## Rollouts\n",
        "An adapter of 40 MB over one uplink of 110 MB/s, a tenth of the boards at a time; boards "
        "die on the way and come back 20 s later.\n",
        table(head, rows),
    ]
