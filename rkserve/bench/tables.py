"""The parts of every report: Markdown tables, targets with their verdicts, and the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rkserve import __version__

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


def machine_line(machine: Machine) -> str:
    """Return the machine as a paragraph of a report."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Machine: {machine.cores} cores ({machine.processor}), {machine.memory_gb:.0f} GB; "
        f"{versions}. Boards, engines, cluster and clients share it.\n"
    )


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
