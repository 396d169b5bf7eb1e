"""Resources of all processes of a cluster over time: memory, files, threads, and their slopes.

A slope is fitted by least squares to all processes of a role together, each at its own level. Its
interval takes into account that samples of one process resemble their neighbours.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from benchmarks.harness.growth import FILES, OURS, THREADS
from rkserve.bench.processes import part_of

EVERY_S = 10.0
HOUR_S = 3600.0
RSS_GOAL_BYTES = 1e6  # an hour
LONG_HOURS = 6.0  # from which on slopes are held to the goal
FEWEST_SAMPLES = 6
LEAST_WARM_S, MOST_WARM_S = 30.0, 600.0
# An engine has its memory from its load on, and is replaced often.
ENGINE_WARM_S = 30.0
NORMAL_95 = 1.96
HAPROXY = "haproxy"


@dataclass(frozen=True, slots=True)
class Held:
    """The resources of one process at one moment, in seconds of the monotonic clock."""

    at_s: float
    rss: int
    pss: int
    files: int
    threads: int


@dataclass
class ProcessTrace:
    """All samples of one process, which plays a role."""

    role: str
    samples: list[Held] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slope:
    """A growth in bytes per hour, with half the width of its 95 % interval."""

    per_hour: float
    half: float


@dataclass(frozen=True, slots=True)
class RoleFigures:
    """The resources of all processes of a role that lived long enough.

    ``files`` and ``threads`` are the largest growth of one process, from the median of the first
    third of its samples to that of the last one. ``hours`` are the lifetimes together.
    """

    role: str
    processes: int
    hours: float
    rss: float
    slope: Slope | None
    pss_slope: Slope | None
    files: float
    threads: float
    zombies: int

    @property
    def ours(self) -> bool:
        """True if the goals are for this role."""
        return self.role in OURS

    @property
    def files_constant(self) -> bool:
        """True if files and threads stay as they are."""
        return self.files <= FILES and self.threads <= THREADS


def warm_up_s(lasted_s: float) -> float:
    """Return how much of each process's life is left out, and at least has to follow."""
    return min(MOST_WARM_S, max(LEAST_WARM_S, lasted_s / 10))


def figures_of(
    traces: Iterable[ProcessTrace], zombies: Mapping[str, int], lasted_s: float
) -> list[RoleFigures]:
    """Sum the processes up by their role, in the order of their names."""
    by_role: dict[str, list[Sequence[Held]]] = {}
    for trace in traces:
        warm_s = ENGINE_WARM_S if trace.role == "engine" else warm_up_s(lasted_s)
        kept = warm(trace.samples, warm_s)
        if len(kept) >= FEWEST_SAMPLES and kept[-1].at_s - kept[0].at_s >= warm_s:
            by_role.setdefault(trace.role, []).append(kept)
    return [
        RoleFigures(
            role,
            len(kept),
            sum(one[-1].at_s - one[0].at_s for one in kept) / HOUR_S,
            median(held.rss for one in kept for held in one),
            slope([[(held.at_s, held.rss) for held in one] for one in kept]),
            slope([[(held.at_s, held.pss) for held in one] for one in kept]),
            max(_growth([held.files for held in one]) for one in kept),
            max(_growth([held.threads for held in one]) for one in kept),
            zombies.get(role, 0),
        )
        for role, kept in sorted(by_role.items())
    ]


def warm(samples: Sequence[Held], warm_s: float) -> Sequence[Held]:
    """Return the samples behind the first seconds of a process."""
    return [one for one in samples if one.at_s - samples[0].at_s >= warm_s] if samples else []


def slope(series: Sequence[Sequence[tuple[float, float]]]) -> Slope | None:
    """Fit one slope to several series of (seconds, value), each with its own level.

    None where time has no extent. The correlation of residuals from sample to sample lowers the
    number of independent ones.
    """
    centred = [
        [(at - _mean(at for at, _ in one), value - _mean(v for _, v in one)) for at, value in one]
        for one in series
        if len(one) > 1
    ]
    spread = sum(at * at for one in centred for at, _ in one)
    if not spread:
        return None
    fitted = sum(at * value for one in centred for at, value in one) / spread
    rest = [[value - fitted * at for at, value in one] for one in centred]
    squares = sum(value * value for one in rest for value in one)
    count = sum(len(one) for one in rest)
    alike = sum(a * b for one in rest for a, b in pairwise(one)) / squares if squares else 0.0
    alike = min(max(alike, 0.0), 0.99)
    variance = squares / max(count - len(rest) - 1, 1)
    # The variance of a mean of correlated values, relative to that of independent ones.
    error = math.sqrt(variance / spread * (1 + alike) / (1 - alike))
    return Slope(fitted * HOUR_S, NORMAL_95 * error * HOUR_S)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _growth(values: Sequence[int]) -> float:
    third = max(1, len(values) // 3)
    return median(values[-third:]) - median(values[:third])


# -- samples ---------------------------------------------------------------------------------------


class ResourceSampler:
    """Samples of every process with ``folder`` in its environment, in a thread."""

    def __init__(self, folder: Path, every_s: float = EVERY_S) -> None:
        self._folder = str(folder)
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resources", daemon=True)
        self._failure: BaseException | None = None
        self.traces: dict[tuple[int, float], ProcessTrace] = {}
        self.zombies: dict[str, int] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End. Raises the failure of the thread."""
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(self._every_s):
                self.look()
        except Exception as exc:  # noqa: BLE001 - it is raised where the sampler is stopped
            self._failure = exc

    def look(self) -> None:
        """Take one sample of each process."""
        ours: dict[int, str] = {}
        ended: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.status() == psutil.STATUS_ZOMBIE:
                    ended.append(process)
                elif belongs_to(process, self._folder):
                    ours[process.pid] = self._take(process)
        found: dict[str, int] = {}
        for process in ended:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (parent := process.ppid()) in ours:
                    found[ours[parent]] = found.get(ours[parent], 0) + 1
        for role, count in found.items():
            self.zombies[role] = max(self.zombies.get(role, 0), count)

    def _take(self, process: psutil.Process) -> str:
        role = role_of(process)
        with process.oneshot():
            memory = process.memory_full_info()
            held = Held(
                time.monotonic(),
                memory.rss,
                memory.pss,
                process.num_fds(),
                process.num_threads(),
            )
        key = (process.pid, process.create_time())
        trace = self.traces.get(key)
        if trace is None or trace.role != role:  # a worker of Ray has no role before its name
            trace = self.traces[key] = ProcessTrace(role)
        trace.samples.append(held)
        return role


def role_of(process: psutil.Process) -> str:
    """Return the part of a cluster that a process plays; HAProxy is apart from its manager."""
    if process.name() == HAPROXY:
        return HAPROXY
    return part_of(" ".join(process.cmdline()))


def belongs_to(process: psutil.Process, folder: str) -> bool:
    """Return whether a process was started with files in a folder; its parent may have ended."""
    return any(folder in value for value in process.environ().values())


def processes_of(folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the processes that were started with files in a folder, as their pid and role."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and belongs_to(process, str(folder)):
                role = role_of(process)
                if wanted(role):
                    found.append(f"{process.pid} ({role})")
    return found
