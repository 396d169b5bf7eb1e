"""Readings beside a run: processes of this machine, and a server's boards as it lists them.

Processes are named by pid or by a part of their command, and read from /proc; those of other
machines it cannot see. Boards are read over HTTP, from ``/v1/boards``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.bench.harness.child import BenchFailed
from rkserve.bench.harness.figures import CpuUse
from rkserve.bench.harness.procfs import (
    PROC,
    ProcessMemory,
    ProcessReading,
    memory_of,
    pids_with,
    read_named,
)
from rkserve.bench.target import Target, get_json

BOARDS_EVERY_S = 0.5  # Routers ask their boards once a second
BOARDS_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class BoardSample:
    """A board's own figures at one moment of the monotonic clock; None is what it does not tell.

    ``npu_load`` is the mean over its cores, in percent. ``memory_mb`` is the engine's peak.
    """

    at_s: float
    board: str
    npu_load: float | None = None
    npu_mhz: float | None = None
    memory_mb: float | None = None
    memory_available_mb: float | None = None
    temperature_c: float | None = None


class BoardMonitor:
    """Reads a server's boards again and again around a run; nothing, where it lists none."""

    def __init__(self, target: Target, every_s: float = BOARDS_EVERY_S) -> None:
        self._target, self._every_s = target, every_s
        self._samples: list[BoardSample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="boards", daemon=True)

    def start(self) -> None:
        """Begin with a first reading."""
        self._read()
        if self._samples:  # else it has no boards, and does not get any
            self._thread.start()

    def stop(self) -> tuple[BoardSample, ...]:
        """Return all readings, the last of which is of now."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._samples:
            self._read()
        return tuple(self._samples)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._read()

    def _read(self) -> None:
        at_s = time.monotonic()
        try:
            told = get_json(self._target.url, "/boards", self._target.key, BOARDS_LIMIT_S)
            self._samples += [_sample(at_s, one) for one in told["data"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Other servers have no boards, and one that is overloaded tells of them next time.
            return


def _sample(at_s: float, told: dict[str, Any]) -> BoardSample:
    hardware = told.get("hardware") or {}
    loads, available = hardware.get("npu_load") or (), hardware.get("memory_available_bytes")
    return BoardSample(
        at_s,
        str(told["id"]),
        sum(loads) / len(loads) if loads else None,
        None if hardware.get("npu_hz") is None else hardware["npu_hz"] / 1e6,
        told.get("memory_mb"),
        None if available is None else available / 1e6,
        hardware.get("temperature_c"),
    )


@dataclass(frozen=True, slots=True)
class NamedProcesses:
    """Processes under one name: trees below ``pid``, or below all whose command has ``text``."""

    name: str
    pid: int | None = None
    text: str = ""


def parse_watched(given: str) -> NamedProcesses:
    """Read ``name=pid`` or ``name=part of the command``. Raises ``ValueError``."""
    name, equals, what = given.partition("=")
    if not equals or not name.strip() or not what.strip():
        raise ValueError(f"{given!r} is not name=pid or name=part of a command")
    if what.isdigit():
        return NamedProcesses(name.strip(), pid=int(what))
    return NamedProcesses(name.strip(), text=what)


class NamedProcessMonitor:
    """Reads processes before and after a run. Raises ``BenchFailed`` where there are none."""

    def __init__(self, watched: Sequence[NamedProcesses], root: Path = PROC) -> None:
        self._watched, self._root = watched, root
        if missing := [one.name for one in watched if not self._roots(one)]:
            raise BenchFailed(f"no process runs that is {', '.join(missing)}")
        self._before: ProcessReading | None = None

    def start(self) -> None:
        """Read them for the first time."""
        self._before = self._read()

    def stop(self) -> tuple[CpuUse, Mapping[str, Sequence[ProcessMemory]]]:
        """Return what they have used since, and what they hold."""
        assert self._before is not None
        after, use = self._read(), CpuUse(os.cpu_count() or 1)
        use.add(self._before, after)
        return use, memory_of(self._root, after.processes)

    def _read(self) -> ProcessReading:
        return read_named(self._root, {one.name: self._roots(one) for one in self._watched})

    def _roots(self, one: NamedProcesses) -> list[int]:
        if one.pid is not None:
            return [one.pid] if (self._root / str(one.pid)).exists() else []
        return pids_with(self._root, one.text)
