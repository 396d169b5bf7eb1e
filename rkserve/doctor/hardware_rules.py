"""Rules about a board's hardware and kernel: SoC, driver, device files, clocks, heat, memory."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator

from rkserve.core.board_report import Hardware
from rkserve.doctor.facts import BoardFacts, ClockDomain, DeviceNode, Finding, Severity
from rkserve.doctor.known import WANTED_DRIVER, driver_row
from rkserve.verdicts.hardware import (
    COOL,
    LARGEST,
    MEGA,
    NEARLY,
    SOCS,
    Shortfall,
    low_ddr,
    low_memory,
    mhz,
    raise_npu,
    soc_of,
)
from rkserve.verdicts.hardware import heat as hot

OLDEST_KERNEL = (5, 10)
# Reported beside each other where the reading of a figure failed, instead of being absent.
ODD = ("is not understood", "is a folder", "cannot be read", "is longer", "is empty", "is off or")
FIXED = ("performance", "userspace")
API = "/v1/boards/"
OWN_MB = 350  # Ray and rkserve on a board's node
NEW_KERNEL = "sudo apt install linux-image-vendor-rk35xx linux-dtb-vendor-rk35xx && sudo reboot"
UDEV = (
    'echo \'SUBSYSTEM=="{subsystem}", KERNEL=="{kernel}", GROUP="render", MODE="0660"\' | '
    "sudo tee /etc/udev/rules.d/99-rknpu.rules && sudo udevadm control --reload && "
    "sudo udevadm trigger"
)
READ, WRITE = stat.S_IROTH, stat.S_IWOTH


def error(name: str, sentence: str, command: str, *evidence: str) -> Finding:
    """Return a finding that stops serving."""
    return Finding(
        id=name, severity=Severity.ERROR, sentence=sentence, command=command, evidence=evidence
    )


def warning(name: str, sentence: str, command: str, *evidence: str) -> Finding:
    """Return a finding that disturbs serving."""
    return Finding(
        id=name, severity=Severity.WARNING, sentence=sentence, command=command, evidence=evidence
    )


def unknown(name: str, sentence: str, command: str, *evidence: str) -> Finding:
    """Return a finding about a check that was impossible."""
    return Finding(
        id=name, severity=Severity.UNKNOWN, sentence=sentence, command=command, evidence=evidence
    )


def shortfall(name: str, found: Shortfall | None) -> Iterator[Finding]:
    """Yield a warning about a figure that is worse than it should be."""
    if found is not None:
        yield warning(name, found.sentence, found.command, found.evidence)


def soc(facts: BoardFacts) -> Iterator[Finding]:
    """A SoC that RKLLM has no NPU code for, or none at all."""
    hardware = facts.hardware
    if hardware is None:
        return
    names = ", ".join(one.name for one in SOCS)
    if not hardware.soc:
        why = _note(hardware, "SoC") or "there is no device tree"
        yield error(
            "soc-unknown",
            f"This machine names no Rockchip SoC; RKLLM runs on {names}.",
            "cat /proc/device-tree/compatible",
            why,
        )
    elif soc_of(hardware.soc) is None:
        yield error(
            "soc-unsupported",
            f"The SoC {hardware.soc} is not supported; RKLLM runs on {names}.",
            "# use a board with one of these SoCs",
            f"/proc/device-tree/compatible: {hardware.soc}",
        )


def kernel(facts: BoardFacts) -> Iterator[Finding]:
    """A kernel that is older than the vendor's drivers."""
    found = re.match(r"(\d+)\.(\d+)", facts.kernel or "")
    if found is not None and (int(found[1]), int(found[2])) < OLDEST_KERNEL:
        wanted = ".".join(map(str, OLDEST_KERNEL))
        yield warning(
            "kernel-old",
            f"The kernel is {facts.kernel}; the NPU's driver needs {wanted} or later, and the "
            "vendor's 6.1 is the safest.",
            NEW_KERNEL,
            f"/proc/sys/kernel/osrelease: {facts.kernel}",
        )
    modules = facts.security_modules
    if modules is not None and "landlock" not in modules.split(","):
        yield warning(
            "kernel-landlock",
            "The kernel has no Landlock: engine processes are confined by seccomp alone, and may "
            "read every file that this user may.",
            "zcat /proc/config.gz | grep LANDLOCK  # if it is built in: add landlock to lsm= of "
            "the kernel's command line",
            f"/sys/kernel/security/lsm: {modules}",
        )


def driver(facts: BoardFacts) -> Iterator[Finding]:
    """A missing, foreign or old NPU driver, and a job that it cannot end."""
    hardware = facts.hardware
    if hardware is None:
        return
    for note in hardware.notes:
        if "a job is stuck" in note:
            yield error(
                "npu-stuck",
                "A job on the NPU does not end: every later request waits for it.",
                "sudo reboot",
                note,
            )
    if hardware.driver_version:
        yield from _driver_version(facts, hardware.driver_version)
    elif facts.npu_driver is False and soc_of(hardware.soc) is not None:
        if facts.rocket_driver:
            yield error(
                "driver-rocket",
                "The kernel drives the NPU by the mainline driver 'rocket', which RKLLM cannot "
                "use.",
                NEW_KERNEL,
                "/sys/module/rocket is there, and no rknpu",
            )
        else:
            yield error(
                "driver-missing",
                "The kernel has no driver 'rknpu', without which RKLLM finds no NPU.",
                NEW_KERNEL,
                "neither /sys/module/rknpu nor /proc/rknpu nor /sys/kernel/debug/rknpu is there",
            )
    elif facts.npu_driver:
        yield unknown(
            "driver-unknown",
            f"The version of the NPU's driver is unknown; RKLLM asks for {WANTED_DRIVER}.",
            "sudo cat /sys/kernel/debug/rknpu/version",
            _note(hardware, "driver version"),
        )


def _driver_version(facts: BoardFacts, version: str) -> Iterator[Finding]:
    library, model = facts.library, facts.model
    release = library.versions[0] if library is not None and len(library.versions) == 1 else ""
    size = model.weights_bytes if model is not None else 0
    row = driver_row(tuple(int(part) for part in version.split(".")), release, size)
    if row is not None:
        make = error if row.stops else warning
        yield make(
            "driver-old",
            f"The NPU's driver is {version}, with which {row.consequence}; "
            f"{WANTED_DRIVER} is wanted."
            if row.stops
            else f"The NPU's driver is {version}: {row.consequence}; {WANTED_DRIVER} is wanted.",
            NEW_KERNEL,
            f"driver version: {version}",
        )


def nodes(facts: BoardFacts) -> Iterator[Finding]:
    """Device files of the NPU that are missing, or that Ray's user cannot open."""
    known = soc_of(facts.hardware.soc) if facts.hardware else None
    if facts.nodes is None or known is None or facts.npu_driver is False:
        return  # without a driver there is no device
    if not facts.nodes:
        node = known.npu_node
        yield error(
            "node-missing",
            "The NPU has no device file: neither a render node of rknpu nor /dev/rknpu.",
            "sudo dmesg | grep -i rknpu",
            f"/dev/dri/by-path/platform-{node}-render is not there",
        )
        return
    needed = [facts.nodes[0]]
    if needed[0].path == "/dev/rknpu":
        needed += facts.heaps  # without a render node memory comes from these
        if not facts.heaps:
            yield error(
                "heap-missing",
                "The NPU is /dev/rknpu, which takes memory from /dev/dma_heap, and that is not "
                "there.",
                NEW_KERNEL,
                "/dev/dma_heap is empty or not there",
            )
    for one in needed:
        yield from _permission(facts, one)


def _permission(facts: BoardFacts, node: DeviceNode) -> Iterator[Finding]:
    user = facts.user
    if user is None or user.uid == 0:
        return
    both = READ | WRITE
    shift = 6 if user.uid == node.uid else 3 if node.gid in user.gids else 0
    if (node.mode >> shift) & both == both:
        return
    of_group = (node.mode >> 3) & both == both and bool(node.group) and node.gid != 0
    kernel_name = node.path.rpartition("/")[2]
    subsystem = {"dri": "drm", "dma_heap": "dma_heap"}.get(node.path.split("/")[2], "misc")
    yield error(
        "node-permission",
        f"{user.name} may not use {node.path}.",
        f"sudo usermod -aG {node.group} {user.name}  # then log in again"
        if of_group
        else UDEV.format(subsystem=subsystem, kernel=kernel_name),
        f"{node.path}: mode {node.mode:04o}, group {node.group or node.gid}",
    )


def cpu_clocks(facts: BoardFacts) -> Iterator[Finding]:
    """CPU clocks that are not held at their highest; RKLLM computes parts of a step on the CPU."""
    free = [one for one in facts.cpus if one.governor is not None and one.governor not in FIXED]
    if free:
        yield warning(
            "cpu-governor",
            f"The CPU clock of {_names(free)} follows the load (governor "
            f"{', '.join(sorted({str(one.governor) for one in free}))}); decoding was measured at "
            "9.3 instead of 12.5 tokens/s.",
            "echo performance | sudo tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
            *(f"{one.path}/scaling_governor: {one.governor}" for one in free),
        )
    low = [one for one in facts.cpus if _limited(one)]
    if low:
        yield warning(
            "cpu-limit",
            f"The CPU clock of {_names(low)} is limited to "
            f"{', '.join(f'{mhz(one.limit_hz or 0)} of {mhz(one.highest_hz or 0)}' for one in low)}"
            " MHz.",
            "for p in /sys/devices/system/cpu/cpufreq/policy*; do "
            "sudo cp $p/cpuinfo_max_freq $p/scaling_max_freq; done",
            *(f"{one.path}/scaling_max_freq: {mhz(one.limit_hz or 0)} MHz" for one in low),
        )


def npu_clock(facts: BoardFacts) -> Iterator[Finding]:
    """An NPU clock that cannot reach its highest."""
    clock = facts.npu
    if clock is None:
        return
    highest = clock.highest_hz or 0
    if _limited(clock):
        yield warning(
            "npu-limit",
            f"The NPU clock is limited to {mhz(clock.limit_hz or 0)} of {mhz(highest)} MHz.",
            raise_npu(clock.path, highest, held=False),
            f"{clock.path}/max_freq: {clock.limit_hz}",
        )
    fixed = clock.governor in ("userspace", "powersave")
    if fixed and clock.current_hz is not None and clock.current_hz < NEARLY * highest:
        yield warning(
            "npu-slow",
            f"The NPU clock is held at {mhz(clock.current_hz)} of {mhz(highest)} MHz (governor "
            f"{clock.governor}).",
            raise_npu(clock.path, highest, held=True),
            f"{clock.path}/cur_freq: {clock.current_hz}",
        )


def ddr_clock(facts: BoardFacts) -> Iterator[Finding]:
    """A memory clock below its highest, or one that the kernel does not show.

    A reading under load counts more: an idle board may lower the clock.
    """
    loaded = facts.measured.hardware if facts.measured is not None else None
    hardware = loaded or facts.hardware
    if hardware is None or soc_of(hardware.soc) is None:
        return
    note = _note(hardware, "DDR clock, governor and load")
    if "is not there" in note:
        yield warning(
            "ddr-missing",
            "The DDR clock can be neither read nor set, and decoding may be half as fast as on "
            "other boards: the loader lacks the DMC handler.",
            "# flash the newest loader of the board's maker (SPI flash and eMMC), then reboot",
            note,
        )
    yield from shortfall("ddr-slow", low_ddr(hardware, facts.ddr.highest_hz if facts.ddr else None))


def heat(facts: BoardFacts) -> Iterator[Finding]:
    """A hot board, and clocks that the kernel lowered because of it."""
    if facts.hardware is not None:
        yield from shortfall("hot", hot(facts.hardware))
    throttled = [
        one for one in facts.cooling if one.state > 0 and re.search("cpufreq|devfreq", one.kind)
    ]
    if throttled:
        yield warning(
            "throttled",
            "The kernel holds clocks down because of heat.",
            COOL,
            *(f"{one.path}: {one.kind}, step {one.state}" for one in throttled),
        )


def memory(facts: BoardFacts) -> Iterator[Finding]:
    """Memory that does not suffice for the model, and memory on the swap device."""
    hardware, need_mb = facts.hardware, facts.memory_need_mb
    if hardware is None:
        return
    total, free = hardware.memory_total_bytes, hardware.memory_available_bytes
    if need_mb is not None and total is not None and total / MEGA < need_mb + OWN_MB:
        yield error(
            "memory-total",
            f"The model needs about {need_mb:.0f} MB, and Ray and rkserve {OWN_MB} MB; the board "
            f"has {total / MEGA:.0f} MB.",
            "# choose a smaller model or another quantization, or a lower context_length",
            f"/proc/meminfo: MemTotal {total / MEGA:.0f} MB",
        )
    elif facts.raylet is not None:
        pass  # the model of a serving board is in memory already
    elif need_mb is not None and free is not None and free / MEGA < need_mb:
        yield warning(
            "memory-available",
            f"The model needs about {need_mb:.0f} MB, and {free / MEGA:.0f} MB are available.",
            LARGEST,
            f"/proc/meminfo: MemAvailable {free / MEGA:.0f} MB",
        )
    yield from shortfall("memory-low", low_memory(hardware))
    figures = facts.memory
    if figures is None:
        return
    cma = figures.cma_total_bytes
    if figures.npu_iommu is False and need_mb is not None and (cma or 0) / MEGA < need_mb:
        yield error(
            "cma-small",
            f"The NPU has no IOMMU and takes memory from the contiguous area of "
            f"{(cma or 0) / MEGA:.0f} MB; the model needs about {need_mb:.0f} MB.",
            "# enable the IOMMU of the NPU in the device tree, or boot with a larger cma=",
            f"/proc/meminfo: CmaTotal {(cma or 0) / MEGA:.0f} MB",
        )
    swapped = figures.swap_total_bytes - figures.swap_free_bytes
    if total is not None and swapped > total // 10:
        yield warning(
            "swap-used",
            f"{swapped / MEGA:.0f} MB of memory are swapped out: the board has too little of it.",
            LARGEST,
            f"/proc/meminfo: SwapTotal less SwapFree is {swapped / MEGA:.0f} MB",
        )


def unread(facts: BoardFacts) -> Iterator[Finding]:
    """Sources that are there and could not be read."""
    for one in facts.unread:
        yield unknown(
            "unreadable",
            f"{one.path} could not be read: {one.reason}.",
            f"rkserve boards show '{one.path.removeprefix(API)}'"
            if one.path.startswith(API)
            else f"ls -ld {shlex.quote(one.path)}",
            f"{one.path}: {one.reason}",
        )
    for note in facts.hardware.notes if facts.hardware else ():
        figure, _, reason = note.partition(": ")
        known = any(one.path in reason for one in facts.unread)
        if not known and any(word in reason for word in ODD):
            yield unknown(
                "unreadable",
                f"The {figure} is unknown.",
                "# read the file of the evidence on the board",
                reason,
            )


def _note(hardware: Hardware, figure: str) -> str:
    """Return the reason why a figure is unknown, empty if it is known."""
    prefix = f"{figure}: "
    return next((one[len(prefix) :] for one in hardware.notes if one.startswith(prefix)), "")


def _limited(clock: ClockDomain) -> bool:
    limit, highest = clock.limit_hz, clock.highest_hz
    return limit is not None and highest is not None and limit < NEARLY * highest


def _names(clocks: list[ClockDomain]) -> str:
    return ", ".join(one.name for one in clocks)
