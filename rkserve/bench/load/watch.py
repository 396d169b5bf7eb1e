"""CPU and memory of processes of this machine that are named by pid or by a part of their command.

It knows /proc. Processes of other machines it cannot see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rkserve.bench.child import BenchFailed
from rkserve.bench.figures import CpuUse
from rkserve.bench.procfs import PROC, Memory, Reading, memory_of, pids_with, read_named


@dataclass(frozen=True, slots=True)
class Watched:
    """Processes under one name: trees below ``pid``, or below all whose command has ``text``."""

    name: str
    pid: int | None = None
    text: str = ""


def parse_watched(given: str) -> Watched:
    """Read ``name=pid`` or ``name=part of the command``. Raises ``ValueError``."""
    name, equals, what = given.partition("=")
    if not equals or not name.strip() or not what.strip():
        raise ValueError(f"{given!r} is not name=pid or name=part of a command")
    if what.isdigit():
        return Watched(name.strip(), pid=int(what))
    return Watched(name.strip(), text=what)


class Watch:
    """Reads processes before and after a run. Raises ``BenchFailed`` where there are none."""

    def __init__(self, watched: Sequence[Watched], root: Path = PROC) -> None:
        self._watched, self._root = watched, root
        if missing := [one.name for one in watched if not self._roots(one)]:
            raise BenchFailed(f"no process runs that is {', '.join(missing)}")
        self._before: Reading | None = None

    def start(self) -> None:
        """Read them for the first time."""
        self._before = self._read()

    def stop(self) -> tuple[CpuUse, Mapping[str, Sequence[Memory]]]:
        """Return what they have used since, and what they hold."""
        assert self._before is not None
        after, use = self._read(), CpuUse(os.cpu_count() or 1)
        use.add(self._before, after)
        return use, memory_of(self._root, after.processes)

    def _read(self) -> Reading:
        return read_named(self._root, {one.name: self._roots(one) for one in self._watched})

    def _roots(self, one: Watched) -> list[int]:
        if one.pid is not None:
            return [one.pid] if (self._root / str(one.pid)).exists() else []
        return pids_with(self._root, one.text)
