"""Figures of a board's hardware that are worse than they should be, with the commands that help.

They hold for a reading that a board took of itself and for one that it reported to a cluster: the
doctor's findings and the verdicts on a cluster have the same limits, sentences and commands.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rkserve.core.board_report import Hardware

MEGA = 1_000_000
HOT_C = 80.0
# Published best figures are reached by some boards with slightly lower steps.
NEARLY = 0.95
SCARCE = 25  # a board with less than this part of its memory available is close to its end
FULL_BYTES, LOW_BYTES = 64 * MEGA, 1000 * MEGA
DDR = "/sys/class/devfreq/dmc"
COOL = "# give the board a heat sink and a fan, and free its air"
LARGEST = "ps -eo rss,pid,comm --sort=-rss | head"
HELD = ("userspace", "powersave")  # governors that hold a clock, at its lowest or at any step


@dataclass(frozen=True, slots=True)
class KnownSoc:
    """A SoC with an NPU for RKLLM. Clocks are its highest; ``dtypes`` those of the vendor's
    table.
    """

    name: str
    npu_node: str
    npu_cores: int
    npu_mhz: int
    ddr_mhz: int
    dtypes: tuple[str, ...]


SOCS = (
    KnownSoc("RK3588", "fdab0000.npu", 3, 1000, 2112, ("w8a8",)),
    KnownSoc("RK3576", "27700000.npu", 2, 1000, 2112, ("w4a16", "w8a8")),
    KnownSoc("RK3562", "ff300000.npu", 1, 1000, 2112, ("w8a8",)),
    KnownSoc("RV1126B", "22000000.npu", 1, 950, 1332, ("w4a16", "w8a8")),
)


def soc_of(name: str) -> KnownSoc | None:
    """Return the SoC by its name in the device tree, also of a revision such as RK3588S."""
    return next((soc for soc in SOCS if name.upper().startswith(soc.name)), None)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A figure beyond its limit, both in ``unit``, and the command that helps."""

    sentence: str
    evidence: str
    command: str
    figure: float
    limit: float
    unit: str


def mhz(hertz: int) -> str:
    """Return a clock in MHz, without the unit."""
    return f"{hertz / MEGA:.0f}"


def highest_ddr_hz(hardware: Hardware) -> int | None:
    """Return the highest clock of the memory: the board's own, else the SoC's; None if unknown."""
    known = soc_of(hardware.soc)
    return hardware.ddr_max_hz or (known.ddr_mhz * MEGA if known is not None else None)


def low_ddr(hardware: Hardware, highest_hz: int | None = None) -> Shortfall | None:
    """Return a memory clock below its highest. An idle board may lower it in order."""
    highest = highest_hz or highest_ddr_hz(hardware)
    now = hardware.ddr_hz
    if highest is None or now is None or now >= NEARLY * highest:
        return None
    return Shortfall(
        f"The DDR clock is {mhz(now)} of {mhz(highest)} MHz (governor "
        f"{hardware.ddr_governor or 'unknown'}), which halves decoding on some boards.",
        f"{DDR}/cur_freq: {now}",
        f"echo performance | sudo tee {DDR}/governor",
        now / MEGA,
        NEARLY * highest / MEGA,
        "MHz",
    )


def raise_npu(path: str, highest_hz: int, *, held: bool) -> str:
    """Return the command for an NPU clock below its highest: of its governor, or of its limit."""
    if held:
        return f"echo performance | sudo tee {path}/governor"
    return f"echo {highest_hz} | sudo tee {path}/max_freq"


def low_npu(hardware: Hardware) -> Shortfall | None:
    """Return an NPU clock below its highest. An idle NPU lowers it in order."""
    known = soc_of(hardware.soc)
    highest = hardware.npu_max_hz or (known.npu_mhz * MEGA if known is not None else None)
    now = hardware.npu_hz
    if highest is None or now is None or now >= NEARLY * highest:
        return None
    node = known.npu_node if known is not None else "*.npu"
    governor = hardware.npu_governor
    return Shortfall(
        f"The NPU clock is {mhz(now)} of {mhz(highest)} MHz while it works (governor "
        f"{governor or 'unknown'}).",
        f"/sys/class/devfreq/{node}/cur_freq: {now}",
        raise_npu(f"/sys/class/devfreq/{node}", highest, held=governor in HELD),
        now / MEGA,
        NEARLY * highest / MEGA,
        "MHz",
    )


def heat(hardware: Hardware) -> Shortfall | None:
    """Return a temperature at which clocks fall soon."""
    celsius = hardware.temperature_c
    if celsius is None or celsius < HOT_C:
        return None
    return Shortfall(
        f"The SoC has {celsius:.0f} degrees Celsius; clocks fall soon above {HOT_C:.0f}.",
        f"thermal zone: {celsius:.1f} degrees",
        COOL,
        celsius,
        HOT_C,
        "degrees Celsius",
    )


def low_memory(hardware: Hardware) -> Shortfall | None:
    """Return available memory that is close to its end."""
    total, free = hardware.memory_total_bytes, hardware.memory_available_bytes
    if total is None or free is None or free >= total // SCARCE:
        return None
    return Shortfall(
        f"{free / MEGA:.0f} of {total / MEGA:.0f} MB are available; the kernel ends the "
        "largest process, the engine, where none are left.",
        f"/proc/meminfo: MemAvailable {free / MEGA:.0f} MB",
        LARGEST,
        free / MEGA,
        total / SCARCE / MEGA,
        "MB",
    )


def low_disk(folder: str, free_bytes: int | None) -> Shortfall | None:
    """Return a disk with too little space for the files that rkserve and Ray write.

    ``folder`` is empty where it is not known.
    """
    if free_bytes is None or free_bytes >= LOW_BYTES:
        return None
    largest = f"{shlex.quote(folder or 'FOLDER')} /tmp/ray /var/log | sort -h | tail"
    return Shortfall(
        f"{folder or 'The state folder'} has {free_bytes / MEGA:.0f} MB free; adapters, prompt "
        f"caches and Ray's logs need {LOW_BYTES / MEGA:.0f} MB.",
        f"{folder or 'statvfs'}: {free_bytes} bytes free",
        f"sudo du -xh --max-depth=2 {largest}",
        free_bytes / MEGA,
        LOW_BYTES / MEGA,
        "MB",
    )
