"""What is loaded: servers that run already, or simulated boards that are started for it.

It knows how one comes to a target and what of its processes is measured; not what is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rkserve.bench.harness.figures import CpuUse
from rkserve.bench.harness.processes import BenchProcesses, Say, SimulatedDeployment
from rkserve.bench.harness.procfs import PROC, ProcessMemory, ProcessReading, memory
from rkserve.bench.monitors import NamedProcesses, NamedProcessMonitor
from rkserve.bench.target import Target

DEFAULT_POLICY = "as configured"


class ProcessMonitor(Protocol):
    """Reads processes around a run."""

    def start(self) -> None:
        """Before the run."""

    def stop(self) -> tuple[CpuUse, Mapping[str, Sequence[ProcessMemory]]]:
        """After it."""


class SystemUnderTest(Protocol):
    """Several things that are loaded one after the other, by name."""

    @property
    def names(self) -> Sequence[str]:
        """What they are called in the report."""

    @property
    def about(self) -> Mapping[str, str]:
        """What they are, in words for the report."""

    @property
    def time_factor(self) -> float:
        """How much faster or slower than the trace says they are to be played."""

    @property
    def clients(self) -> int:
        """So many requests at once keep all of it busy."""

    def enter(self, name: str) -> Target:
        """Have it ready, and say where it is. Raises ``BenchFailed``."""

    def watch(self) -> ProcessMonitor | None:
        """Return what reads its processes."""

    def close(self) -> None:
        """End what was started."""


class RunningServers:
    """Servers that run already, somewhere."""

    time_factor = 1.0

    def __init__(
        self, targets: Sequence[Target], watched: Sequence[NamedProcesses] = (), clients: int = 4
    ) -> None:
        self._targets = {one.name: one for one in targets}
        self._watched = watched
        self.clients = clients

    @property
    def names(self) -> Sequence[str]:
        """What they are called."""
        return list(self._targets)

    @property
    def about(self) -> Mapping[str, str]:
        """Models and ways of asking; addresses are nobody's business."""
        return {name: f"{one.model}, {one.api}" for name, one in self._targets.items()}

    def enter(self, name: str) -> Target:
        """Say where it is."""
        return self._targets[name]

    def watch(self) -> NamedProcessMonitor | None:
        """Return what reads the processes that were named."""
        return NamedProcessMonitor(self._watched) if self._watched else None

    def close(self) -> None:
        """They were there before."""


@dataclass(frozen=True, slots=True)
class SimulatedClusterConfig:
    """Boards to start, once for each policy by which requests are given to them."""

    boards: int
    profile: str
    time_scale: float
    policies: Sequence[str] = (DEFAULT_POLICY,)


class SimulatedCluster:
    """A cluster of simulated boards of our own, once for each policy."""

    def __init__(self, wanted: SimulatedClusterConfig, folder: Path, say: Say) -> None:
        self._wanted = wanted
        self._crew = BenchProcesses(folder, say)

    @property
    def names(self) -> Sequence[str]:
        """The policies."""
        return self._wanted.policies

    @property
    def about(self) -> Mapping[str, str]:
        """How many there are, and how fast."""
        one = self._wanted
        speed = f"{one.boards} simulated boards, {one.profile}, time scale {one.time_scale:g}"
        return {"boards": speed}

    @property
    def time_factor(self) -> float:
        """Faster boards are asked faster."""
        return self._wanted.time_scale or 1.0

    @property
    def clients(self) -> int:
        """A board has one answer at a time."""
        return self._wanted.boards

    def enter(self, name: str) -> Target:
        """Deploy the boards under this policy."""
        args = {} if name == DEFAULT_POLICY else {"router": {"policy": name}}
        one = self._wanted
        self._crew.deploy(
            SimulatedDeployment(one.profile, one.boards, time_scale=one.time_scale, args=args)
        )
        host, port = self._crew.address
        return Target(name, f"http://{host}:{port}", self._crew.model.id)

    def watch(self) -> ProcessMonitor:
        """Return what reads the cluster's processes."""
        return _CrewWatch(self._crew)

    def close(self) -> None:
        """End the cluster."""
        self._crew.close()


class _CrewWatch:
    """All processes of a crew, each under its part's name."""

    def __init__(self, crew: BenchProcesses) -> None:
        self._crew = crew
        self._before: ProcessReading | None = None

    def start(self) -> None:
        self._before = self._crew.read()

    def stop(self) -> tuple[CpuUse, Mapping[str, Sequence[ProcessMemory]]]:
        assert self._before is not None
        use = CpuUse(os.cpu_count() or 1)
        use.add(self._before, self._crew.read())
        return use, memory(PROC, self._crew.pids())
