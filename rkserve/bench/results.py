"""The results of a benchmark: as JSON, as lines of outcomes, and the parts of every report.

Reports are Markdown: tables, targets with their verdicts, and the machine. Results name neither
date, host, path nor key.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rkserve import __version__
from rkserve.bench.figures import Comparison, Slo, TraceFigures
from rkserve.bench.outcome import OutcomeKind, RequestOutcome
from rkserve.bench.player import PlayedRun
from rkserve.bench.processes import CpuUse, Json, ProcessMemory
from rkserve.bench.target import BoardSample

MISSING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table. The first column holds names, the others figures."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join(_line(row, widths) for row in (head, rule, *rows)) + "\n"


def figure(value: float | None, digits: int = 1) -> str:
    """Return a figure with so many digits behind the point; a dash for one that is not there."""
    return MISSING if value is None else f"{value:,.{digits}f}".replace(",", " ")


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage."""
    return f"{figure(100 * share, digits)} %"


def megabytes(size: float) -> str:
    """Return bytes as millions of them."""
    return figure(size / 1e6, 0)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *figures = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join((name, *figures))} |"


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """A target and its measured value; ``detail`` is the uncertainty."""

    what: str
    measured: float
    bound: float
    at_most: bool
    unit: str = ""
    detail: str = ""

    @property
    def reached(self) -> bool:
        """True if the target holds; the interval of the measurement does not count."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


def verdicts_section(verdicts: Sequence[TargetVerdict]) -> str:
    """Return the targets with their measurements as a section; empty without targets."""
    detailed = any(one.detail for one in verdicts)
    rows = [
        [
            one.what,
            f"{'≤' if one.at_most else '≥'} {_with_unit(one.bound, one.unit)}",
            _with_unit(one.measured, one.unit),
            *([one.detail or MISSING] if detailed else ()),
            "reached" if one.reached else "missed",
        ]
        for one in verdicts
    ]
    head = ["what", "target", "measured", *(["95 % interval"] if detailed else ()), "verdict"]
    return f"## What it must reach\n\n{table(head, rows)}" if rows else ""


def _with_unit(value: float, unit: str) -> str:
    if not unit:
        return f"{value:.3f}"
    return f"{figure(value, 2 if unit in ('s', '%') else 0)} {unit}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a run, with the versions that matter."""

    cores: int
    processor: str
    memory_gb: float
    versions: Mapping[str, str]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> Machine:
    """Read this machine's figures."""
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    kib = next(int(line.split()[1]) for line in meminfo.splitlines() if "MemTotal" in line)
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    return Machine(
        cores=cores(),
        processor=next(names, "processor unnamed"),
        memory_gb=kib * 1024 / 1e9,
        versions={
            "Python": ".".join(str(part) for part in sys.version_info[:3]),
            "Ray": version("ray"),
            "rkserve": __version__,
        },
    )


@dataclass(frozen=True)
class RunResult:
    """One run, what the processes that were watched took for it, and the boards' own figures where
    it captures.
    """

    played: PlayedRun
    figures: TraceFigures
    cpu: CpuUse | None = None
    memories: Mapping[str, Sequence[ProcessMemory]] = field(default_factory=dict)
    boards: Sequence[BoardSample] = ()


@dataclass(frozen=True)
class BenchResults:
    """All runs. ``about`` says in a few words each what was played, and on what.

    ``appendix`` is what else the report says, as Markdown, and ``more`` the same as JSON.
    """

    title: str
    machine: Machine
    about: Mapping[str, str]
    slo: Slo
    runs: Sequence[RunResult]
    comparisons: Sequence[Comparison] = ()
    verdicts: Sequence[TargetVerdict] = ()
    complete: bool = True
    appendix: str = ""
    more: Json = field(default_factory=dict)

    @property
    def answered(self) -> int:
        """Answers of all runs together."""
        return sum(run.figures.answered for run in self.runs)

    @property
    def error_share(self) -> float:
        """Requests of all runs that ended in an error, by those that ended."""
        errors = sum(sum(run.figures.errors.values()) for run in self.runs)
        ended = sum(run.figures.asked - run.figures.cut for run in self.runs)
        return errors / ended if ended else 0.0

    @property
    def unreachable(self) -> bool:
        """True if no request reached a server."""
        kinds = {one.kind for run in self.runs for one in run.played.outcomes}
        return kinds == {OutcomeKind.CONNECT}

    @property
    def missed(self) -> list[TargetVerdict]:
        """Targets that were not reached."""
        return [one for one in self.verdicts if not one.reached]

    def to_json(self) -> Json:
        """Return everything but the single outcomes."""
        return {
            "title": self.title,
            "complete": self.complete,
            "machine": _plain(asdict(self.machine)),
            "about": dict(self.about),
            "slo": asdict(self.slo),
            "runs": [_run(run) for run in self.runs],
            "comparisons": [_plain(asdict(one)) for one in self.comparisons],
            "targets": [{**asdict(one), "reached": one.reached} for one in self.verdicts],
            **self.more,
        }


def outcome_lines(runs: Sequence[RunResult]) -> Iterator[str]:
    """Yield each request of all runs as a line of JSON; times count from the start of its run."""
    for run in runs:
        for one in run.played.outcomes:
            yield json.dumps(_outcome(one, run.played), ensure_ascii=False)


def _run(run: RunResult) -> Json:
    prefix, generator = run.figures.prefix, run.figures.generator
    fields: Json = _plain(asdict(run.figures))
    fields["prefix"] |= {"ratio": prefix.ratio, "of_reusable": prefix.of_reusable}
    fields["generator"]["doubt"] = generator.doubt
    fields["processes"] = {
        name: {
            "cpu_ms": None if run.cpu is None else run.cpu.by_part_ms.get(name),
            "processes": len(run.memories.get(name, ())),
            "rss_bytes": sum(one.rss for one in run.memories.get(name, ())),
            "pss_bytes": sum(one.pss for one in run.memories.get(name, ())),
        }
        for name in {**(run.cpu.by_part_ms if run.cpu else {}), **run.memories}
    }
    return fields


def _outcome(one: RequestOutcome, played: PlayedRun) -> Json:
    since_s = played.start_s
    fields: Json = _plain(asdict(replace(one, captured=None)))
    asked = fields.pop("asked")
    del fields["captured"]  # it has a file of its own
    times = {
        name: None if value is None else round(value - since_s, 6)
        for name, value in (
            ("due_s", one.asked.due_s),
            ("sent_s", one.asked.sent_s),
            ("head_s", one.head_s),
            ("end_s", one.end_s),
            ("over_s", one.over_s),
        )
    }
    texts = [round(at_s - since_s, 6) for at_s in one.text_s]
    who = {"run": played.target, "session": asked["session"], "turn": asked["turn"]}
    return {**who, **fields, **times, "text_s": texts}


def _plain(value: Any) -> Any:
    """Return the value as plain JSON types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
