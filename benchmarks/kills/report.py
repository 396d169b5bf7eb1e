"""The report of a kill run as Markdown. Pure.

It contains no date, no host name and no path, so that two reports differ in figures only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kills.figures import KillFigures, quantile, total
from rkserve.bench.tables import Machine, figure, machine_line, table

_HEAD = [
    "killed",
    "times",
    "answers",
    "went on",
    "times",
    "lost",
    "wrong",
    "silence p50, ms",
    "p99, ms",
    "next token p50, ms",
    "p99, ms",
]


@dataclass(frozen=True, slots=True)
class KillRun:
    """What a run found, and how it was made."""

    machine: Machine
    found: Sequence[KillFigures]
    how: str
    took_s: float


def render(run: KillRun) -> str:
    """Return the report."""
    every = total(run.found)
    bars = [
        ["board kills", "", str(every.kills), ""],
        ["requests lost", "0", str(every.lost), _verdict(every.lost)],
        ["answers with a character lost or doubled", "0", str(every.wrong), _verdict(every.wrong)],
    ]
    return (
        "# Benchmark of kills\n\n"
        "Written by `make bench-kills`, which starts a Ray cluster of its own with simulated "
        "boards, ends one after the other of them while clients stream, and holds every answer to "
        f"what it must be; {run.took_s / 60:.0f} minutes. What is done about a board that is lost "
        "is in [continuing.md](../explanation/continuing.md).\n\n"
        f"{machine_line(run.machine)}\n"
        "## What it must reach\n\n"
        f"{table(['what', 'target', 'measured', 'verdict'], bars)}\n"
        f"{_kinds(run, every)}"
    )


def _verdict(found: int) -> str:
    return "missed" if found else "reached"


def _kinds(run: KillRun, every: KillFigures) -> str:
    return (
        "## By what was killed\n\n"
        f"{table(_HEAD, [_row(one) for one in [*run.found, every]])}\n"
        f"{run.how} An answer is *lost* if it ended with an error or not at all, and *wrong* if "
        "its text, its finish reason or its usage is not what the same cluster said before the "
        "first kill. *Silence* is the longest time between two pieces of text that the client of "
        "an answer saw which went on once; of one that never had to, it is "
        f"{figure(quantile(every.calm_ms, 0.5), 0)} ms (p50) and "
        f"{figure(quantile(every.calm_ms, 0.99), 0)} ms (p99). *Next token* is what of it is left "
        "once the Router has noticed the loss: the wait for a place at another board, and the "
        "prefill there.\n"
        f"{_flaws(run.found)}"
    )


def _row(one: KillFigures) -> list[str]:
    counts = (one.kills, one.answers, one.continued, one.continuations, one.lost, one.wrong)
    times = (
        quantile(one.silences_ms, 0.5),
        quantile(one.silences_ms, 0.99),
        quantile(one.waits_ms, 0.5),
        quantile(one.waits_ms, 0.99),
    )
    return [one.name, *map(str, counts), *(figure(ms, 0) for ms in times)]


def _flaws(found: Sequence[KillFigures]) -> str:
    lines = [f"- {one.name}: {flaw}\n" for one in found for flaw in one.flaws]
    return "\n" + "".join(lines) if lines else ""
