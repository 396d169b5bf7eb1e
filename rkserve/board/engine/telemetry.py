"""Telemetry of a board from its kernel: NPU, clocks, governors, temperature and memory.

It knows the places of these figures for each SoC, and the formats of the rknpu driver and the
kernel. It never writes and never raises: a missing figure is None (or empty), and a note gives the
reason. Notes also name governors that cost speed. The root is an argument: ``/`` on a board.

A read may block while the driver hangs: call this off the event loop and with a time limit.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rkserve.core.board_report import CpuClock, EngineUse, Hardware

T = TypeVar("T")

# Revisions of a SoC (RK3588S) keep its nodes, so names are compared by their beginning.
NPU_NODES: Mapping[str, str] = MappingProxyType(
    {
        "RK3588": "fdab0000.npu",
        "RK3576": "27700000.npu",
        "RK3562": "ff300000.npu",
        "RV1126B": "22000000.npu",
    }
)
MAX_FILE_BYTES = 8192  # /proc/meminfo, the longest, has about 1,500
MAX_ZONES = 64
FULL_PERCENT = 100
# The driver's own figures: debugfs is for root only, /proc/rknpu a build option.
DRIVER_FOLDERS = ("sys/kernel/debug/rknpu", "proc/rknpu")
DEVFREQ = "sys/class/devfreq"
DDR = f"{DEVFREQ}/dmc"
CPUFREQ = "sys/devices/system/cpu/cpufreq"
MAX_CPU_CLOCKS = 16
# Governors that hold a clock; with the others RKLLM's short pieces of work on the CPU are over
# before the clock rises.
HOLDING = ("performance", "userspace")
SLOWEST = "powersave"
THERMAL = "sys/class/thermal"
ZONES = ("npu-thermal", "soc-thermal")
# Beyond these the sensor is off or broken.
CELSIUS = (-60.0, 200.0)


class _Unknown(Exception):
    """A missing figure, with the reason. Never leaves this module."""


def read_engine_use(root: Path, pid: int) -> EngineUse | None:
    """Return the resources of an engine process; None where the kernel does not show them."""
    place = root / "proc" / str(pid)
    try:
        rows = _rows((place / "status").read_text(encoding="ascii", errors="replace"))
        memory_bytes = int(rows["RssAnon"].split()[0]) * 1024  # the kernel's kB
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        files = sum(1 for _ in (place / "fd").iterdir())
        limits = (place / "limits").read_text(encoding="ascii", errors="replace")
    except OSError:
        return EngineUse(memory_bytes)
    found = re.search(r"^Max open files +(\d+)", limits, re.MULTILINE)
    return EngineUse(memory_bytes, files, int(found[1]) if found else None)


def _rows(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (row.partition(":") for row in text.splitlines())}


def read_telemetry(root: Path, state: Path | None = None) -> Hardware:
    """Return all figures that can be read now under ``root``.

    ``state`` is a folder on the disk to report, None for no disk.
    """
    board = _Reader(root)
    soc = board.first("SoC", board.soc) or ""
    npu_hz, npu_max_hz, npu_governor = board.npu_clocks(soc)
    ddr_hz, ddr_max_hz, ddr_governor, ddr_load = board.ddr()
    disk_total, disk_free = (None, None) if state is None else board.disk(state)
    cpu_clocks = board.first("CPU clocks", board.cpu_clocks) or ()
    board.judge(npu_governor, ddr_governor, cpu_clocks)
    loads = [partial(board.npu_load, folder) for folder in DRIVER_FOLDERS]
    return Hardware(
        soc=soc,
        npu_load=board.first("NPU load", *loads) or (),
        npu_hz=npu_hz,
        npu_max_hz=npu_max_hz,
        npu_governor=npu_governor,
        cpu_clocks=cpu_clocks,
        ddr_hz=ddr_hz,
        ddr_governor=ddr_governor,
        ddr_load=ddr_load,
        temperature_c=board.first("temperature", board.temperature),
        driver_version=board.driver_version(),
        memory_total_bytes=board.first("memory", partial(board.memory, "MemTotal")),
        memory_available_bytes=board.first("free memory", partial(board.memory, "MemAvailable")),
        notes=tuple(board.notes),
        ddr_max_hz=ddr_max_hz,
        disk_total_bytes=disk_total,
        disk_free_bytes=disk_free,
    )


def read_soc(root: Path) -> str:
    """Return the SoC's name from the device tree under ``root``, empty where there is none."""
    board = _Reader(root)
    return board.first("SoC", board.soc) or ""


SAME_KIND = 0.75  # of the highest capacity: little cores have half of it and less


def fastest_cores(root: Path, allowed: Iterable[int]) -> tuple[int, ...]:
    """Return the big ones of the ``allowed`` cores, by the kernel; all where it knows none.

    ``cpu_capacity`` is there on machines with cores of several kinds. It counts the clock as well,
    which differs between equal cores, so that a small distance to the highest one is no kind.
    """
    cores = sorted(allowed)
    capacities: dict[int, int] = {}
    for core in cores:
        try:
            text = (root / f"sys/devices/system/cpu/cpu{core}/cpu_capacity").read_text()
            capacities[core] = int(text)
        except (OSError, ValueError):
            return tuple(cores)
    most = max(capacities.values(), default=0)
    return tuple(core for core in cores if capacities[core] >= SAME_KIND * most)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the sources of one board and collects the reasons for missing figures."""

    root: Path
    notes: list[str] = field(default_factory=list)

    def first(self, figure: str, *sources: Callable[[], T]) -> T | None:
        """Return the figure of the first source that has it; note all reasons where none has."""
        reasons = []
        for source in sources:
            try:
                return source()
            except _Unknown as exc:
                reasons.append(str(exc))
        self.notes.append(f"{figure}: {'; '.join(reasons)}")
        return None

    def soc(self) -> str:
        path = "proc/device-tree/compatible"
        names = self._text(path).rstrip("\0\n").split("\0")
        # The board's maker stands before the SoC's, which is the last.
        name = next((n for n in reversed(names) if n.startswith("rockchip,")), names[-1])
        soc = name.rpartition(",")[2].upper()
        if re.fullmatch(r"[A-Z0-9._-]{1,32}", soc) is None:
            raise _Unknown(f"/{path} names no SoC: {_shown(name)}")
        return soc

    def npu_clocks(self, soc: str) -> tuple[int | None, int | None, str]:
        """The NPU's clock, the highest that it can be set to, and its governor."""
        # Some kernels (RK3562) show the clock in the driver's folder only.
        driver = [partial(self._driver_hertz, folder) for folder in DRIVER_FOLDERS]
        try:
            folder = self._npu_folder(soc)
        except _Unknown as exc:
            self.notes.append(f"highest NPU clock: {exc}")
            return self.first("NPU clock", *driver), None, ""
        current = self.first("NPU clock", partial(self._hertz, f"{folder}/cur_freq"), *driver)
        highest = self.first(
            "highest NPU clock",
            partial(self._highest_hertz, f"{folder}/available_frequencies"),
            # The current limit, which heat or a script may have lowered: better than nothing.
            partial(self._hertz, f"{folder}/max_freq"),
        )
        governor = self.first("NPU governor", partial(self._word, f"{folder}/governor"))
        return current, highest, governor or ""

    def _npu_folder(self, soc: str) -> str:
        """Return the NPU's devfreq folder: that of the SoC, or one that looks alike."""
        there = self._names(DEVFREQ)
        known = [node for name, node in NPU_NODES.items() if soc.startswith(name)]
        alike = sorted(name for name in there if re.fullmatch(r"[\w.-]{1,64}\.npu", name, re.ASCII))
        for node in (*known, *alike):
            if node in there:
                return f"{DEVFREQ}/{node}"
        raise _Unknown(f"/{DEVFREQ} has no {known[0] if known else '*.npu'}")

    def _driver_hertz(self, folder: str) -> int:
        # Reading `freq` makes the driver power the NPU up; with a read each second it would never
        # be off.
        power = self._text(f"{folder}/power").strip()
        if power != "on":
            raise _Unknown(f"/{folder}/power is {_shown(power)}: the NPU is not powered up to ask")
        return self._hertz(f"{folder}/freq")

    def npu_load(self, folder: str) -> tuple[float, ...]:
        path = f"{folder}/load"
        text = self._text(path)
        loads = [int(each) for each in re.findall(r"(?<!\d)(\d{1,20})\s*%", text, re.ASCII)]
        whole = text.count("Core") in {0, len(loads)}  # half a line is no figure
        if not loads or not whole:
            raise _Unknown(f"/{path} is not understood: {_shown(text)}")
        for core, percent in enumerate(loads):
            # The driver counts the time of a job when it ends; one that does not end overflows.
            if percent > FULL_PERCENT:
                self.notes.append(f"core {core}: a job is stuck (/{path} says {percent} %)")
        return tuple(float(min(percent, FULL_PERCENT)) for percent in loads)

    def ddr(self) -> tuple[int | None, int | None, str, float | None]:
        """The memory's clock, the highest that it can be set to, its governor and its load."""
        try:
            self._names(DDR)
        except _Unknown as exc:
            reason = f"{exc}; a loader without the DMC handler shows none"
            self.notes.append(f"DDR clock, governor and load: {reason}")
            return None, None, "", None
        load = f"{DDR}/load"
        ddr_load = r"(\d{1,3})@([1-9]\d{0,11})Hz"
        hertz = self.first(
            "DDR clock",
            partial(self._hertz, f"{DDR}/cur_freq"),
            lambda: int(self._match(load, ddr_load)[2]),
        )
        try:
            highest: int | None = self._highest_hertz(f"{DDR}/available_frequencies")
        except _Unknown:  # not shown by every kernel; the SoC's highest stands in for it
            highest = None
        named = self.first("DDR governor", partial(self._word, f"{DDR}/governor"))
        percent = self.first("DDR load", lambda: self._percent(load, ddr_load))
        return hertz, highest, named or "", percent

    def disk(self, folder: Path) -> tuple[int | None, int | None]:
        """Total and free bytes of a folder's file system."""
        try:
            found = os.statvfs(folder)
        except OSError as exc:
            self.notes.append(f"disk: {folder.name} {_reason('', exc)}")
            return None, None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def cpu_clocks(self) -> tuple[CpuClock, ...]:
        """The clocks of the CPUs, in the order of the CPUs that share them."""
        folders = (
            re.fullmatch(r"policy(\d{1,4})", name, re.ASCII) for name in self._names(CPUFREQ)
        )
        numbers = sorted(int(found[1]) for found in folders if found is not None)
        if not numbers:
            raise _Unknown(f"/{CPUFREQ} has no policy*")
        return tuple(self._cpu_clock(f"{CPUFREQ}/policy{n}", n) for n in numbers[:MAX_CPU_CLOCKS])

    def _cpu_clock(self, folder: str, number: int) -> CpuClock:
        each = r"\d{1,4}(?:[ -]\d{1,4})*"
        shared = self.first(
            "CPUs of a clock", lambda: self._match(f"{folder}/related_cpus", each)[0]
        )
        cpus = _ranges(shared) if shared is not None else str(number)
        hertz = self.first(
            f"clock of CPU {cpus}", partial(self._kilohertz, f"{folder}/scaling_cur_freq")
        )
        highest = self.first(
            f"highest clock of CPU {cpus}", partial(self._kilohertz, f"{folder}/cpuinfo_max_freq")
        )
        governor = self.first(
            f"governor of CPU {cpus}", partial(self._word, f"{folder}/scaling_governor")
        )
        return CpuClock(cpus, hertz, highest, governor or "")

    def judge(self, npu: str, ddr: str, cpus: tuple[CpuClock, ...]) -> None:
        """Note the governors that cost speed."""
        for cpu in cpus:
            if cpu.governor and cpu.governor not in HOLDING:
                self.notes.append(
                    f"CPU {cpu.cpus}: governor is {cpu.governor}; a model that decoded 12.5 "
                    "tokens/s with performance was seen to decode 9.3 with ondemand"
                )
        for what, governor in (("NPU", npu), ("DDR", ddr)):
            if governor == SLOWEST:
                self.notes.append(f"{what} governor is {governor}: its clock stays at the lowest")

    def temperature(self) -> float:
        """Degrees Celsius of the NPU, or of the SoC where the NPU has no sensor of its own."""
        found: dict[str, str] = {}
        for name in sorted(self._names(THERMAL))[:MAX_ZONES]:
            if re.fullmatch(r"thermal_zone\d{1,4}", name, re.ASCII) is None:
                continue
            try:
                kind = self._text(f"{THERMAL}/{name}/type").strip().replace("_", "-")
            except _Unknown:  # one zone without a name hides no other
                continue
            found.setdefault(kind, f"{THERMAL}/{name}/temp")
        reasons = []
        for path in (found[zone] for zone in ZONES if zone in found):
            try:
                return self._celsius(path)
            except _Unknown as exc:
                reasons.append(str(exc))
        raise _Unknown("; ".join(reasons) or f"/{THERMAL} has no {' or '.join(ZONES)}")

    def driver_version(self) -> str:
        folders = (*DRIVER_FOLDERS, "sys/module/rknpu")
        sources = [partial(self._version, f"{folder}/version") for folder in folders]
        return self.first("driver version", *sources) or ""

    def _version(self, path: str) -> str:
        return self._match(path, r"(?:RKNPU driver: )?v?(\d{1,4}(?:\.\d{1,4}){1,3})")[1]

    def memory(self, row: str) -> int:
        path = "proc/meminfo"
        found = re.search(rf"^{row}:\s+(\d{{1,12}}) kB$", self._text(path), re.ASCII | re.MULTILINE)
        if found is None:
            raise _Unknown(f"/{path} has no {row}")
        return int(found[1]) * 1024

    def _hertz(self, path: str) -> int:
        return int(self._match(path, r"[1-9]\d{0,11}")[0])

    def _kilohertz(self, path: str) -> int:
        return int(self._match(path, r"[1-9]\d{0,8}")[0]) * 1000

    def _word(self, path: str) -> str:
        return self._match(path, r"[\w-]{1,32}")[0]

    def _highest_hertz(self, path: str) -> int:
        choices = self._match(path, r"[1-9]\d{0,11}(?:\s+[1-9]\d{0,11})*")[0]
        return max(map(int, choices.split()))

    def _percent(self, path: str, pattern: str) -> float:
        percent = float(self._match(path, pattern)[1])
        if percent > FULL_PERCENT:
            raise _Unknown(f"/{path} says {percent:.0f} %")
        return percent

    def _celsius(self, path: str) -> float:
        celsius = int(self._match(path, r"-?\d{1,7}")[0]) / 1000
        if not CELSIUS[0] <= celsius <= CELSIUS[1]:
            raise _Unknown(f"/{path} says {celsius:.0f} degrees: the sensor is off or broken")
        return celsius

    def _match(self, path: str, pattern: str) -> re.Match[str]:
        text = self._text(path).strip()
        found = re.fullmatch(pattern, text, re.ASCII)
        if found is None:
            raise _Unknown(f"/{path} is not understood: {_shown(text)}")
        return found

    def _text(self, path: str) -> str:
        try:
            raw = _read(self.root / path)
        except OSError as exc:
            raise _Unknown(f"/{path} {_reason(path, exc)}") from None
        if len(raw) > MAX_FILE_BYTES:
            raise _Unknown(f"/{path} is longer than {MAX_FILE_BYTES} bytes")
        if not raw.strip():
            raise _Unknown(f"/{path} is empty")
        return raw.decode("ascii", "replace").replace("\ufffd", "?")

    def _names(self, folder: str) -> frozenset[str]:
        try:
            return frozenset(path.name for path in (self.root / folder).iterdir())
        except OSError as exc:
            raise _Unknown(f"/{folder} {_reason(folder, exc)}") from None


def _ranges(cpus: str) -> str:
    """Return CPU numbers as the kernel lists them elsewhere, such as ``0-3`` for ``0 1 2 3``."""
    numbers = cpus.split()
    if not all(number.isdecimal() for number in numbers) or len(numbers) == 1:
        return cpus
    first, last = int(numbers[0]), int(numbers[-1])
    return f"{first}-{last}" if last - first == len(numbers) - 1 else ",".join(numbers)


def _read(path: Path) -> bytes:
    # Non-blocking, because a pipe in the file's place must not hold the caller. The kernel gives
    # these files whole in one read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _reason(path: str, exc: OSError) -> str:
    if isinstance(exc, PermissionError):
        return "needs root" if path.startswith(DRIVER_FOLDERS) else "may not be read by this user"
    if isinstance(exc, IsADirectoryError):
        return "is a folder"
    if exc.errno in {errno.ENOENT, errno.ENOTDIR}:
        return "is not there"
    return f"cannot be read ({exc.strerror or type(exc).__name__})"


def _shown(text: str) -> str:
    return ascii(text.strip()[:24])
