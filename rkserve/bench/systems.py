"""Systems under test: servers that run already, or a cluster of simulated boards."""

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
    """Targets that are loaded one after the other, by name."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the targets in the report."""

    @property
    def about(self) -> Mapping[str, str]:
        """Descriptions for the report."""

    @property
    def time_factor(self) -> float:
        """The factor on all times of traces."""

    @property
    def clients(self) -> int:
        """The number of concurrent requests that keeps a target busy."""

    def enter(self, name: str) -> Target:
        """Prepare a target and return its address. Raises ``BenchFailed``."""

    def watch(self) -> ProcessMonitor | None:
        """Return a monitor of its processes."""

    def close(self) -> None:
        """Stop everything that was started."""


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
        """The names of the servers."""
        return list(self._targets)

    @property
    def about(self) -> Mapping[str, str]:
        """Models and APIs; addresses stay out of reports."""
        return {name: f"{one.model}, {one.api}" for name, one in self._targets.items()}

    def enter(self, name: str) -> Target:
        """Return the target."""
        return self._targets[name]

    def watch(self) -> NamedProcessMonitor | None:
        """Return a monitor of the named processes."""
        return NamedProcessMonitor(self._watched) if self._watched else None

    def close(self) -> None:
        """Do nothing: the servers were not started here."""


@dataclass(frozen=True, slots=True)
class SimulatedClusterConfig:
    """Boards to start, once for each routing policy."""

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
        """The number and speed of the boards."""
        one = self._wanted
        speed = f"{one.boards} simulated boards, {one.profile}, time scale {one.time_scale:g}"
        return {"boards": speed}

    @property
    def time_factor(self) -> float:
        """The time scale of the boards."""
        return self._wanted.time_scale or 1.0

    @property
    def clients(self) -> int:
        """One request for each board."""
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
        """Return a monitor of the cluster's processes."""
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
