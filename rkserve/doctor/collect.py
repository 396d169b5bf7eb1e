"""The facts of a board, read from /proc, /sys, /etc and /dev below a root. Nothing is changed.

With another root than ``/`` only the tree is looked at: the limits, the clock and the Ray of the
machine on which the check runs are not those of the board.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rkserve.board.engine.telemetry import DDR, DEVFREQ, THERMAL, read_telemetry
from rkserve.core.board_report import Hardware
from rkserve.doctor import files, node
from rkserve.doctor.facts import (
    BoardFacts,
    ClockDomain,
    ClockState,
    CoolingDevice,
    DeviceNode,
    HeadAnswer,
    LibraryFile,
    MeasuredSpeed,
    MemoryFigures,
    ProcessLimits,
    ReportedState,
    UnreadSource,
)
from rkserve.doctor.known import expected_speed
from rkserve.doctor.tree import Tree
from rkserve.native.library_file import llama_cpp_release
from rkserve.verdicts.hardware import soc_of

CPUFREQ = "sys/devices/system/cpu/cpufreq"
ROCKET = ("sys/module/rocket", "sys/bus/platform/drivers/rocket", "dev/accel/accel0")
RKNPU = (
    *("sys/bus/platform/drivers/RKNPU", "sys/module/rknpu", "proc/rknpu"),
    *("sys/kernel/debug/rknpu", "dev/rknpu"),
)
STATE = "/var/lib/rkserve"
# Answers of a cluster have long contexts, too, at which published boards are up to a third slower.
ENOUGH_TOKENS, LONG_CONTEXTS = 500, 0.7


@dataclass(frozen=True, slots=True)
class Checkup:
    """The sources of a check. Without ``library`` the usual places are searched; without ``model``
    no model is looked at.

    ``process``, ``clock``, ``head`` and ``free_bytes`` are facts of the running machine, None where
    the tree is that of another.
    """

    root: Path = Path("/")
    library: Path | None = None
    model: Path | None = None
    state: Path = Path(STATE)
    user: str | None = None
    process: ProcessLimits | None = None
    clock: ClockState | None = None
    head: HeadAnswer | None = None
    free_bytes: Callable[[Path], int | None] | None = None


LSM = "sys/kernel/security/lsm"


def collect(request: Checkup) -> BoardFacts:
    """Return all facts about a board that can be read.

    Raises:
        ValueError: this machine has no such user.
    """
    tree = Tree(request.root)
    hardware = read_telemetry(request.root)
    user = node.user(tree, request.user)
    model = files.model(request.model) if request.model is not None else None
    cpu = model is not None and model.cpu
    # A board that computes on its CPU needs none of the vendor's.
    library = None if cpu and request.library is None else files.library(tree, request.library)
    npu_devices = _devices(tree, hardware.soc)
    return BoardFacts(
        hardware=hardware,
        kernel=tree.text("proc/sys/kernel/osrelease"),
        security_modules=tree.text(LSM) if tree.exists(LSM) else None,
        npu_driver=bool(npu_devices) or any(map(tree.exists, RKNPU)),
        rocket_driver=any(map(tree.exists, ROCKET)),
        npu=_npu(tree, hardware.soc),
        ddr=_clock(tree, "DDR", DDR),
        cpus=_cpus(tree),
        cooling=_cooling(tree),
        # A tree from a report may lack /dev, and its libraries.
        nodes=npu_devices if tree.exists("dev") else None,
        heaps=_heaps(tree),
        user=user,
        memory=_memory(tree, hardware.soc),
        library=library,
        model=model,
        llama_cpp=llama_cpp_release() if cpu else None,
        memory_need_mb=files.memory_need(hardware.soc, model) if model is not None else None,
        disks=files.disks(tree, request.state, request.model, request.free_bytes),
        process=request.process,
        raylet=node.raylet(tree),
        clock=request.clock,
        head=request.head,
        token=node.token(tree, user),
        unread=tuple(tree.unread),
    )


def reported_facts(row: Mapping[str, Any]) -> BoardFacts:
    """Return the facts in a board's report, a row of ``GET /v1/boards``."""
    circuit = row.get("circuit") or {}
    status = ReportedState(
        id=str(row.get("id", "")),
        state=str(row.get("state", "")),
        reason=str(row.get("reason") or ""),
        circuit=str(circuit.get("state") or "closed"),
        circuit_reason=str(circuit.get("reason") or ""),
    )
    given = row.get("hardware")
    # A newer Router may know more.
    names = {one.name for one in fields(Hardware)}
    known = {key: given[key] for key in names & set(given)} if isinstance(given, Mapping) else given
    try:
        facts = BoardFacts.model_validate({"status": status, "hardware": known})
    except ValidationError as exc:
        source = UnreadSource(path=f"/v1/boards/{status.id}", reason=str(exc).splitlines()[0])
        return BoardFacts(status=status, unread=(source,))
    release, simulated = str(row.get("release") or ""), row.get("platform") == "simulated"
    library = LibraryFile(
        path=str(row.get("library") or ""),
        machine="unknown",
        versions=(release,) if release else (),
        simulated=simulated,
    )
    speed = None if simulated else _reported_speed(row, facts.hardware)
    return facts.model_copy(update={"library": library if release else None, "measured": speed})


def _reported_speed(row: Mapping[str, Any], hardware: Hardware | None) -> MeasuredSpeed | None:
    """Return the average speed since a board's start, None where it says nothing."""
    tokens, ms = row.get("decode_tokens") or 0, row.get("decode_ms") or 0.0
    if hardware is None or row.get("n_batch") != 1 or tokens < ENOUGH_TOKENS or ms <= 0:
        return None
    expected = expected_speed(
        hardware.soc, (str(row.get("model") or ""),), int(row.get("own_bytes") or 0)
    )
    if expected is None:
        return None
    return MeasuredSpeed(
        release=str(row.get("release") or ""),
        decode_tokens_per_s=1000 * tokens / ms,
        decode_tokens=tokens,
        expected_tokens_per_s=expected.decode_tokens_per_s,
        slow_share=LONG_CONTEXTS * expected.slow_share,
        basis=f"{expected.basis}; the average since the board's start, over all contexts",
        hardware=hardware,
    )


def _devices(tree: Tree, soc: str) -> tuple[DeviceNode, ...]:
    """Return the device file of the NPU, the one that RKLLM opens."""
    known = soc_of(soc)
    names = []
    if known is not None:
        named = tree.link(f"dev/dri/by-path/platform-{known.npu_node}-render")
        names += [named] if named else []
    for name in tree.names("sys/class/drm"):
        driver = tree.link(f"sys/class/drm/{name}/device/driver")
        if name.startswith("renderD") and (driver or "").lower() == "rknpu":
            names.append(name)
    found = [_device(tree, f"dev/dri/{name}") for name in dict.fromkeys(names)]
    found.append(_device(tree, "dev/rknpu"))
    return tuple(one for one in found if one is not None)


def _heaps(tree: Tree) -> tuple[DeviceNode, ...]:
    found = [_device(tree, f"dev/dma_heap/{name}") for name in tree.names("dev/dma_heap")]
    return tuple(one for one in found if one is not None)


def _device(tree: Tree, path: str) -> DeviceNode | None:
    found = tree.stat(path)
    if found is None:
        return None
    return DeviceNode(
        path=f"/{path}",
        mode=found.st_mode & 0o7777,
        uid=found.st_uid,
        gid=found.st_gid,
        group=node.group_name(tree, found.st_gid),
    )


def _npu(tree: Tree, soc: str) -> ClockDomain | None:
    known = soc_of(soc)
    there = tree.names(DEVFREQ)
    wanted = [known.npu_node] if known is not None else []
    alike = [name for name in there if name.endswith(".npu")]
    name = next((one for one in (*wanted, *alike) if one in there), None)
    return _clock(tree, "NPU", f"{DEVFREQ}/{name}") if name is not None else None


def _clock(tree: Tree, name: str, folder: str) -> ClockDomain | None:
    if not tree.exists(folder):
        return None
    steps = tree.text(f"{folder}/available_frequencies") or ""
    hertz = [int(one) for one in steps.split() if re.fullmatch(r"\d{1,12}", one, re.ASCII)]
    return ClockDomain(
        name=name,
        path=f"/{folder}",
        governor=_word(tree, f"{folder}/governor"),
        current_hz=tree.number(f"{folder}/cur_freq"),
        limit_hz=tree.number(f"{folder}/max_freq"),
        highest_hz=max(hertz, default=None),
    )


def _cpus(tree: Tree) -> tuple[ClockDomain, ...]:
    found = []
    for name in tree.names(CPUFREQ):
        folder = f"{CPUFREQ}/{name}"
        if re.fullmatch(r"policy\d{1,4}", name, re.ASCII) is None:
            continue
        cpus = tree.text(f"{folder}/related_cpus") or ""
        named = cpus if re.fullmatch(r"[\d ]{1,64}", cpus, re.ASCII) else name
        limit = tree.number(f"{folder}/scaling_max_freq")
        highest = tree.number(f"{folder}/cpuinfo_max_freq")
        found.append(
            ClockDomain(
                name=f"CPU {named}" if named is cpus else named,
                path=f"/{folder}",
                governor=_word(tree, f"{folder}/scaling_governor"),
                limit_hz=limit * 1000 if limit is not None else None,
                highest_hz=highest * 1000 if highest is not None else None,
            )
        )
    return tuple(found)


def _word(tree: Tree, path: str) -> str | None:
    text = tree.text(path)
    if text is None or re.fullmatch(r"[\w-]{1,32}", text, re.ASCII):
        return text
    tree.note(path, OSError(0, f"{text[:24]!a} is no name"))
    return None


def _cooling(tree: Tree) -> tuple[CoolingDevice, ...]:
    found = []
    for name in tree.names(THERMAL):
        folder = f"{THERMAL}/{name}"
        if re.fullmatch(r"cooling_device\d{1,4}", name, re.ASCII) is None:
            continue
        kind, state = tree.text(f"{folder}/type"), tree.number(f"{folder}/cur_state")
        if kind is not None and state is not None:
            found.append(CoolingDevice(path=f"/{folder}", kind=ascii(kind[:32])[1:-1], state=state))
    return tuple(found)


def _memory(tree: Tree, soc: str) -> MemoryFigures | None:
    text = tree.text("proc/meminfo")
    if text is None:
        return None
    rows = {
        found[1]: int(found[2]) * 1024
        for found in re.finditer(r"^(\w{1,32}):\s+(\d{1,12}) kB$", text, re.ASCII | re.MULTILINE)
    }
    known = soc_of(soc)
    device = f"sys/bus/platform/devices/{known.npu_node}" if known is not None else ""
    shown = bool(device) and tree.exists(device)
    return MemoryFigures(
        swap_total_bytes=rows.get("SwapTotal", 0),
        swap_free_bytes=rows.get("SwapFree", 0),
        cma_total_bytes=rows.get("CmaTotal"),
        npu_iommu=tree.exists(f"{device}/iommu_group") if shown else None,
    )


def this_machine(
    head_url: str | None, ray_port: int = node.RAY_PORT
) -> tuple[ProcessLimits, ClockState, HeadAnswer | None]:
    """Return the facts of the machine on which the check runs, and of the head as seen from it.

    Raises:
        ValueError: ``head_url`` is no URL of a host.
    """
    head, skew_s = node.head(head_url, ray_port) if head_url is not None else (None, None)
    return node.limits(), node.wall_clock(skew_s), head


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of a folder, or of the nearest one above it."""
    for one in (folder, *folder.parents):
        try:
            found = os.statvfs(one)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None
