"""The machine that a benchmark runs on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rkserve import __version__


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
