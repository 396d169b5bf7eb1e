"""Processes of a benchmark: CPU time and memory of process trees, and children with JSON commands.

CPU time and memory are read from /proc under a root that is passed in. Processes are named by
their part of a cluster, known by its command line, or under a name that a caller gives them. Those
of other machines cannot be seen. A child ends when its stdin closes, so that no process survives a
killed benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkserve.core.errors import RkserveError

PROC = Path("/proc")
KIB = 1024
MS_PER_TICK = 1000 / os.sysconf("SC_CLK_TCK")
# First match counts. Ray names its workers after what they run: ray::ServeReplica:<app>:<name>.
_PARTS: tuple[tuple[str, str], ...] = (
    ("rkserve.native.engine.process", "engine"),
    ("benchmarks.harness.client", "client"),
    ("benchmarks.control.load", "client"),
    ("rkserve.bench.cluster", "driver"),
    ("benchmarks.harness.board_nodes", "driver"),
    ("benchmarks.harness.binding", "binding alone"),
    (":Board-", "board replica"),
    (":Router", "router"),
    (":Coordinator", "coordinator"),
    ("ray::ProxyActor", "proxy"),
    ("HAProxy", "proxy"),
    ("haproxy", "proxy"),
    ("ray::ServeController", "controller"),
    ("/raylet", "raylet"),
    ("/gcs_server", "gcs"),
)
OTHER = "other Ray"
PARTS = (*dict.fromkeys(part for _, part in _PARTS), OTHER)
_STAT_AFTER_NAME = 3  # the fields behind the name are counted from 3, as in man 5 proc


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process by pid and start time, because pids are reused."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/<pid>/stat that are used; CPU time in milliseconds."""

    identity: ProcessIdentity
    parent: int
    cpu_ms: float
    nice: int
    zombie: bool


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes resident, and the proportional share that counts a page used by n processes 1/n."""

    rss: int
    pss: int


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """CPU time of all cores together, in milliseconds, since boot."""

    busy_ms: float
    stolen_ms: float


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """All measured processes, each with its part, and the whole machine, at one moment."""

    at_s: float
    processes: Mapping[ProcessIdentity, tuple[str, Stat]]
    machine: MachineTimes


def parse_stat(text: str) -> Stat:
    """Read a line of /proc/<pid>/stat. The name in it may hold blanks and parentheses."""
    pid = int(text.partition(" ")[0])
    fields = text.rpartition(")")[2].split()

    def field(number: int) -> int:
        return int(fields[number - _STAT_AFTER_NAME])

    return Stat(
        identity=ProcessIdentity(pid, field(22)),
        parent=field(4),
        cpu_ms=(field(14) + field(15)) * MS_PER_TICK,
        nice=field(19),
        zombie=fields[0] == "Z",
    )


def parse_rollup(text: str) -> ProcessMemory:
    """Read /proc/<pid>/smaps_rollup."""
    kib = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "Pss"):
            kib[name] = int(value.split()[0])
    return ProcessMemory(kib.get("Rss", 0) * KIB, kib.get("Pss", 0) * KIB)


def parse_machine(text: str) -> MachineTimes:
    """Read the first line of /proc/stat. Guests' time is in the user's already."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(value) * MS_PER_TICK for value in text.splitlines()[0].split()[1:9]
    )
    return MachineTimes(user + nice + system + irq + softirq, steal)


def part_of(command_line: str) -> str:
    """Return the part of a cluster that a process is, by its command line."""
    return next((part for mark, part in _PARTS if mark in command_line), OTHER)


def read(root: Path, pids: Iterable[int]) -> ProcessReading:
    """Read the processes ``pids`` with all below them, and the machine."""
    return ProcessReading(
        time.monotonic(), snapshot(root, pids), parse_machine((root / "stat").read_text())
    )


def read_named(root: Path, roots: Mapping[str, Iterable[int]]) -> ProcessReading:
    """Read the processes below ``roots``, each part named by its caller, and the machine."""
    found = {
        stat.identity: (name, stat) for name, pids in roots.items() for stat in _tree(root, pids)
    }
    return ProcessReading(time.monotonic(), found, parse_machine((root / "stat").read_text()))


def identity_of(root: Path, pid: int) -> ProcessIdentity | None:
    """Return the identity of the process with this pid, or None."""
    stat = _stat(root, pid)
    return None if stat is None or stat.zombie else stat.identity


def age_s(root: Path, pid: int) -> float:
    """Return the seconds since the process with this pid began; 0 if there is none."""
    stat = _stat(root, pid)
    if stat is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.identity.started * MS_PER_TICK / 1e3


def is_alive(root: Path, identity: ProcessIdentity) -> bool:
    """Return True while the process with this pid and start time runs."""
    return identity_of(root, identity.pid) == identity


def descendants(root: Path, pid: int) -> list[ProcessIdentity]:
    """All processes below ``pid``."""
    return [stat.identity for stat in _tree(root, [pid]) if stat.identity.pid != pid]


def has_ended_below(root: Path, pid: int, name: str) -> bool:
    """Return whether a process with this program's name below ``pid`` has ended, uncollected."""
    return any(
        stat.zombie and _program(root, stat.identity.pid) == name for stat in _tree(root, [pid])
    )


def snapshot(root: Path, pids: Iterable[int]) -> dict[ProcessIdentity, tuple[str, Stat]]:
    """The processes ``pids`` and all below them, each with its part."""
    return {
        stat.identity: (part_of(_command_line(root, stat.identity.pid)), stat)
        for stat in _tree(root, pids)
    }


def memory_of(
    root: Path, processes: Mapping[ProcessIdentity, tuple[str, Stat]]
) -> dict[str, list[ProcessMemory]]:
    """Memory of processes that were read before, by part."""
    found: dict[str, list[ProcessMemory]] = {}
    for identity, (part, _) in processes.items():
        try:
            text = (root / str(identity.pid) / "smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended since, or it is another account's
        found.setdefault(part, []).append(parse_rollup(text))
    return found


def pids_with(root: Path, text: str) -> list[int]:
    """Return all processes with ``text`` in their command line.

    This process and its ancestors do not count: their command lines quote the option.
    """
    asking, pid = set(), os.getpid()
    while pid not in asking and (stat := _stat(root, pid)) is not None:
        asking.add(pid)
        pid = stat.parent
    pids = (int(entry.name) for entry in root.iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid not in asking and text in _command_line(root, pid)]


def _tree(root: Path, pids: Iterable[int]) -> list[Stat]:
    stats = [
        stat
        for entry in root.iterdir()
        if entry.name.isdigit() and (stat := _stat(root, int(entry.name))) is not None
    ]
    wanted, before = set(pids), -1
    while before != len(wanted):  # /proc is in the order of pids, which says nothing of age
        before = len(wanted)
        wanted |= {stat.identity.pid for stat in stats if stat.parent in wanted}
    return [stat for stat in stats if stat.identity.pid in wanted]


def _stat(root: Path, pid: int) -> Stat | None:
    try:
        return parse_stat((root / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def _program(root: Path, pid: int) -> str:
    """Return the name of a process, which one that has ended still has."""
    try:
        return (root / str(pid) / "comm").read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _command_line(root: Path, pid: int) -> str:
    try:
        return (root / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@dataclass
class CpuUse:
    """The CPU use of processes over one or several intervals, in milliseconds."""

    cores: int
    wall_ms: float = 0.0
    by_part_ms: dict[str, float] = field(default_factory=dict)
    nice: dict[str, int] = field(default_factory=dict)
    machine_ms: float = 0.0
    stolen_ms: float = 0.0

    def add(self, before: ProcessReading, after: ProcessReading) -> None:
        """Count the time between two readings; a process that is new counts from its start."""
        self.wall_ms += (after.at_s - before.at_s) * 1e3
        self.machine_ms += after.machine.busy_ms - before.machine.busy_ms
        self.stolen_ms += after.machine.stolen_ms - before.machine.stolen_ms
        for identity, (part, stat) in after.processes.items():
            earlier = before.processes.get(identity)
            spent_ms = stat.cpu_ms - (earlier[1].cpu_ms if earlier else 0.0)
            self.by_part_ms[part] = self.by_part_ms.get(part, 0.0) + spent_ms
            self.nice[part] = stat.nice

    @property
    def ours_share(self) -> float:
        """Share of all cores' time that the measured processes took."""
        return self._share(sum(self.by_part_ms.values()))

    @property
    def others_share(self) -> float:
        """Share that everything else on the machine took: noise."""
        return max(0.0, self._share(self.machine_ms) - self.ours_share)

    @property
    def stolen_share(self) -> float:
        """Share that the hypervisor kept for itself: noise."""
        return self._share(self.stolen_ms)

    def _share(self, spent_ms: float) -> float:
        return spent_ms / (self.cores * self.wall_ms) if self.wall_ms else 0.0


class ProcessMonitor:
    """Readings of processes before and after a run."""

    def __init__(self, look: Callable[[], ProcessReading], root: Path = PROC) -> None:
        self._look, self._root = look, root
        self._before: ProcessReading | None = None

    def start(self) -> None:
        """Read them for the first time."""
        self._before = self._look()

    def stop(self) -> tuple[CpuUse, Mapping[str, Sequence[ProcessMemory]]]:
        """Return the CPU time that they have used since, and their memory now."""
        assert self._before is not None
        after, use = self._look(), CpuUse(os.cpu_count() or 1)
        use.add(self._before, after)
        return use, memory_of(self._root, after.processes)


Json = dict[str, Any]
OnProgress = Callable[[Json], None]  # progress before the answer
READ_SIZE = 1 << 16
LAST_WORDS = 15
GRACE_S = 45.0  # Serve ends its replicas one by one, and each of them its engine


class BenchFailed(RkserveError):
    """The benchmark cannot go on."""


def hold(flaws: Sequence[str]) -> None:
    """Raise ``BenchFailed`` if there are flaws that invalidate measurements."""
    if flaws:
        raise BenchFailed(f"not fit for measuring: {'; '.join(flaws)}")


class CommandProcess:
    """One process of the benchmark. Its output goes to ``log``."""

    def __init__(self, module: str, log: Path, environ: dict[str, str] | None = None) -> None:
        self._name, self._log = module, log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **(environ or {})},
                # Ctrl-C in the terminal is for the parent, which then ends its children in order.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._pending = b""

    @property
    def pid(self) -> int:
        """The pid of the child, the root of its process tree."""
        return self._process.pid

    def ask(
        self, command: Json, timeout_s: float, on_progress: OnProgress = lambda _: None
    ) -> Json:
        """Send a command and wait for its answer. Raises ``BenchFailed``."""
        self.send(command)
        return self.receive(timeout_s, on_progress)

    def send(self, command: Json) -> None:
        """Send a command. Raises ``BenchFailed`` where the child has ended."""
        try:
            self._in.write(json.dumps(command).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None

    def receive(self, timeout_s: float, on_progress: OnProgress = lambda _: None) -> Json:
        """Wait for the answer to the last command. Raises ``BenchFailed``.

        ``on_progress`` gets the child's progress messages before its answer.
        """
        deadline_s = time.monotonic() + timeout_s
        while "progress" in (answer := self._line(deadline_s)):
            on_progress(answer["progress"])
        if "failed" in answer:
            raise self._failed(answer["failed"])
        return answer

    def close(self) -> None:
        """End the child and all its descendants; kill them after a time limit."""
        family = descendants(PROC, self.pid)
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            family = descendants(PROC, self.pid)
            self._process.kill()
            self._process.wait()
        self._out.close()
        _end_orphans(family)

    def _line(self, deadline_s: float) -> Json:
        parts = [self._pending]
        while b"\n" not in parts[-1]:
            parts.append(self._read(deadline_s))
        line, _, self._pending = b"".join(parts).partition(b"\n")
        message: Json = json.loads(line)
        return message

    def _read(self, deadline_s: float) -> bytes:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([self._out], [], [], left_s)[0]:
            raise self._failed("does not answer")
        chunk = os.read(self._out.fileno(), READ_SIZE)
        if not chunk:
            # It has closed its end and cleans up; the reason is in the log when it has exited.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            raise self._failed("has ended")
        return chunk

    def _failed(self, how: str) -> BenchFailed:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        words = "\n".join(["", *lines[-LAST_WORDS:]])
        return BenchFailed(f"{self._name} {how}.{words if lines else ''}")


def _end_orphans(family: list[ProcessIdentity]) -> None:
    """End processes that outlived the child, after it was killed or has crashed."""
    for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        left = [one for one in family if is_alive(PROC, one)]
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and any(is_alive(PROC, one) for one in left):
            time.sleep(0.05)


def serve_commands(carry_out: Callable[[Json, OnProgress], Json]) -> None:
    """Execute the commands from stdin until it closes: the child's end.

    ``carry_out`` may report progress before it returns the answer. All prints go to stderr; an
    ``RkserveError`` is the answer to its command.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers, "wb") as out:

        def send(words: Json) -> None:
            out.write(json.dumps(words).encode() + b"\n")
            out.flush()

        for command in _commands():
            try:
                answer = carry_out(command, lambda words: send({"progress": words}))
            except RkserveError as exc:
                answer = {"failed": str(exc)}
            send(answer)


def _commands() -> Iterator[Json]:
    for line in sys.stdin.buffer:
        yield json.loads(line)
