"""Growth of processes over many equal rounds: memory, files and threads.

They are read from /proc under a root that is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rkserve.bench.processes import KIB, ProcessIdentity, snapshot
from rkserve.bench.results import TargetVerdict

WATCHED = ("coordinator", "router", "board replica", "engine", "proxy", "controller")
OURS = ("coordinator", "router", "board replica", "engine")
# Allocators and Ray's buffers breathe, and a connection may be open at one look and not at another.
RSS_SHARE = 0.05
FILES, THREADS = 4.0, 2.0
FEWEST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Belongings:
    """The memory, files and threads of one process."""

    rss: int
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The sums over the processes of each part after a number of rounds."""

    rounds: int
    parts: dict[str, Belongings]


@dataclass(frozen=True, slots=True)
class Growth:
    """The sums over the processes of a part, before and after, by medians of samples.

    ``processes`` is their number, ``rounds`` lie between the middles of both stretches.
    """

    part: str
    rounds: int
    before: Belongings
    after: Belongings

    @property
    def rss_share(self) -> float:
        """The growth of memory, as a share of the memory before."""
        return (self.after.rss - self.before.rss) / self.before.rss

    def verdicts(self) -> list[TargetVerdict]:
        """Hold it to staying as it was, where the part is ours."""
        if self.part not in OURS:
            return []
        name = f"{self.part}, over {self.rounds} rounds: more"
        files = self.after.files - self.before.files
        threads = self.after.threads - self.before.threads
        percent = 100 * self.rss_share
        return [
            TargetVerdict(f"{name} memory", percent, 100 * RSS_SHARE, at_most=True, unit="%"),
            TargetVerdict(f"{name} files", files, FILES, at_most=True, unit="files"),
            TargetVerdict(f"{name} threads", threads, THREADS, at_most=True, unit="threads"),
        ]


def sample(root: Path, pids: Iterable[int], rounds: int) -> Sample:
    """Read what the processes ``pids`` and all below them have now, by part."""
    parts: dict[str, Belongings] = {}
    for identity, (part, _) in snapshot(root, pids).items():
        if part in WATCHED and (found := _belongings(root, identity)) is not None:
            parts[part] = _sum(parts.get(part, Belongings(0, 0, 0)), found)
    return Sample(rounds, parts)


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Compare the second quarter of the samples with the last one; the first one warms up.

    Too few samples say nothing.
    """
    if len(samples) < FEWEST_SAMPLES:
        return []
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    rounds = _middle(late) - _middle(early)
    return [
        Growth(part, rounds, _median(part, early), _median(part, late))
        for part in WATCHED
        if all(part in one.parts for one in (*early, *late))
    ]


def _belongings(root: Path, identity: ProcessIdentity) -> Belongings | None:
    place = root / str(identity.pid)
    try:
        lines = (place / "status").read_text(errors="replace").splitlines()
        files = sum(1 for _ in (place / "fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has ended since
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in status:
        return None  # it is ending
    return Belongings(int(status["VmRSS"].split()[0]) * KIB, files, int(status["Threads"]))


def _sum(one: Belongings, other: Belongings) -> Belongings:
    return Belongings(one.rss + other.rss, one.files + other.files, one.threads + other.threads)


def _middle(samples: Sequence[Sample]) -> int:
    return round(median(one.rounds for one in samples))


def _median(part: str, samples: Sequence[Sample]) -> Belongings:
    found = [one.parts[part] for one in samples]
    return Belongings(
        round(median(one.rss for one in found)),
        round(median(one.files for one in found)),
        round(median(one.threads for one in found)),
    )
