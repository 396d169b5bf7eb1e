"""A healthy board as a tree of files, for one fault at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rkserve.doctor.collect import Checkup, collect
from rkserve.doctor.facts import (
    BoardFacts,
    ClockState,
    DoctorReport,
    HeadAnswer,
    MeasuredSpeed,
    ProcessLimits,
    Severity,
)
from rkserve.doctor.rules import report_on
from rkserve.native.sim import telemetry
from rkserve.verdicts.hardware import soc_of

CPU = "sys/devices/system/cpu/cpufreq"
AARCH64, X86_64 = 183, 62
LIBRARY = "usr/lib/librkllmrt.so"
PROCESS = ProcessLimits(
    machine="aarch64",
    python=(3, 11),
    python_wanted=((3, 10), (3, 14)),
    libc=(2, 36),
    cpus=8,
    open_files=1_048_576,
    ray="2.60.0",
    ray_wanted="2.60.*",
)
MODELS = {
    "RK3588": ("Qwen2.5-1.5B-Instruct", "Qwen2.5-1.5B-Instruct_w8a8_rk3588.rkllm", 1_690_000_000),
    "RK3576": ("Qwen3-0.6B", "Qwen3-0.6B-rk3576-w4a16_g128.rkllm", 500_000_000),
    "RK3562": ("Qwen3-0.6B", "Qwen3-0.6B-rk3562-w8a8.rkllm", 750_000_000),
    "RV1126B": ("Qwen2-0.5B", "Qwen2-0.5B-rv1126b-w4a16.rkllm", 380_000_000),
}
MEMINFO = """SwapTotal:       1048576 kB
SwapFree:        1048576 kB
CmaTotal:          16384 kB
CmaFree:           12000 kB
"""
MOUNTS = """/dev/nvme0n1p2 / ext4 rw,noatime 0 0
proc /proc proc rw 0 0
tmpfs /tmp tmpfs rw,size=8G 0 0
"""


def elf(version: str = "1.3.0", machine: int = AARCH64, promised: int = 0) -> bytes:
    """Return a file that looks like the vendor's library."""
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    struct.pack_into("<H", head, 18, machine)
    struct.pack_into("<Q", head, 40, promised)
    named = f"RKLLM SDK (version: {version} (2026-02)".encode() if version else b"nothing"
    return bytes(head) + b"\0libgomp.so.1\0" + named + bytes(64)


@dataclass
class DoctorBoard:
    """The tree at ``root`` and the facts beside it; change one, and ask for the report."""

    root: Path
    soc: str = "RK3588"
    readings: telemetry.BoardReadings = field(default_factory=telemetry.BoardReadings)
    process: ProcessLimits | None = PROCESS
    clock: ClockState | None = field(
        default_factory=lambda: ClockState(year=2026, kept_by="chrony")
    )
    head: HeadAnswer | None = field(default_factory=lambda: HeadAnswer(address="10.0.0.1:6379"))
    measured: MeasuredSpeed | None = None
    free_bytes: int | None = 20_000_000_000
    user: str | None = "ray"
    library: Path | None = None
    model: Path = field(init=False)
    names_model: bool = True

    def __post_init__(self) -> None:
        soc = soc_of(self.soc)
        assert soc is not None
        self.known = soc
        telemetry.write(self.root, self.soc, self.readings)
        self.put("proc/sys/kernel/osrelease", "6.1.115-vendor-rk35xx\n")
        self.put("sys/kernel/security/lsm", "capability,landlock,yama\n")
        self.put("proc/meminfo", self.read("proc/meminfo") + MEMINFO)
        self.put("proc/mounts", MOUNTS)
        self.put("sys/bus/platform/drivers/RKNPU/bind", "")
        self.put(f"sys/bus/platform/devices/{soc.npu_node}/iommu_group", "")
        for policy in (0, 4):
            folder = f"{CPU}/policy{policy}"
            self.put(f"{folder}/scaling_governor", "performance\n")
            self.put(f"{folder}/related_cpus", f"{' '.join(map(str, range(policy, policy + 4)))}\n")
            self.put(f"{folder}/scaling_max_freq", "2256000\n")
            self.put(f"{folder}/cpuinfo_max_freq", "2256000\n")
        self.put("sys/class/thermal/cooling_device0/type", "thermal-cpufreq-0\n")
        self.put("sys/class/thermal/cooling_device0/cur_state", "0\n")
        self.put("sys/class/thermal/cooling_device1/type", "pwm-fan\n")
        self.put("sys/class/thermal/cooling_device1/cur_state", "3\n")
        self.device("dev/dri/renderD129")
        self.link(f"dev/dri/by-path/platform-{soc.npu_node}-render", "../renderD129")
        self.put(
            "etc/passwd", f"root:x:0:0::/root:/bin/sh\nray:x:{self.owner + 1}:4242::/home/ray:/b\n"
        )
        self.put("etc/group", f"render:x:{self.group}:ray\nvideo:x:44:ray\n")
        self.put("home/ray/.ray/auth_token", "secret", 0o600)
        self.put("usr/lib/aarch64-linux-gnu/libgomp.so.1", "")
        self.raw(LIBRARY, elf())
        self._make_model()

    def _make_model(self) -> None:
        name, weights, size = MODELS[self.soc]
        self.model = self.root.with_name(f"{self.root.name}-models") / name
        self.model.mkdir(parents=True)
        self.weights = self.model / weights
        with self.weights.open("wb") as file:
            file.write(b"RKLLM weights")
            file.truncate(size)  # sparse
        self.settings = self.model / "rkserve.yaml"
        self.settings.write_text("context_length: 4096\neos_token_ids: [151645]\n")
        tokens = [{"id": 151645, "content": "<|im_end|>", "special": True}]
        tokenizer = {"model": {"vocab": {}}, "added_tokens": tokens}
        (self.model / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = {"chat_template": "{{ messages }}", "eos_token": "<|im_end|>"}
        (self.model / "tokenizer_config.json").write_text(json.dumps(config))

    @property
    def owner(self) -> int:
        """The user id of the tree's files."""
        return self.root.stat().st_uid

    @property
    def group(self) -> int:
        """The group id of the tree's files."""
        return self.root.stat().st_gid or 105

    def read(self, path: str) -> str:
        """Return a file's text."""
        return (self.root / path).read_text()

    def put(self, path: str, text: str, mode: int = 0o644) -> DoctorBoard:
        """Write a file."""
        return self.raw(path, text.encode(), mode)

    def raw(self, path: str, content: bytes, mode: int = 0o644) -> DoctorBoard:
        """Write a file of bytes."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
        return self

    def device(self, path: str, mode: int = 0o660) -> DoctorBoard:
        """Write a file in the place of a device."""
        self.put(path, "", mode)
        if self.owner == 0:
            os.chown(self.root / path, 0, self.group)
        return self

    def link(self, path: str, target: str) -> DoctorBoard:
        """Make a link."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        return self

    def drop(self, *paths: str) -> DoctorBoard:
        """Remove files, or folders with their content."""
        for path in paths:
            there = self.root / path
            if there.is_dir() and not there.is_symlink():
                self.drop(*(f"{path}/{one.name}" for one in there.iterdir()))
                there.rmdir()
            else:
                there.unlink()
        return self

    def sensors(self, **changes: object) -> DoctorBoard:
        """Change what the board's telemetry shows; the files beside it stay."""
        figures = replace(self.readings, **changes)  # type: ignore[arg-type]
        kept = self.read("proc/meminfo").partition("SwapTotal")[2]
        for path, text in telemetry.tree(self.soc, figures).items():
            self.put(path, text)
        if not figures.dmc:
            self.drop("sys/class/devfreq/dmc")
        return self.put("proc/meminfo", f"{self.read('proc/meminfo')}SwapTotal{kept}")

    def facts(self) -> BoardFacts:
        """Return the facts of the board."""
        free = self.free_bytes
        request = Checkup(
            root=self.root,
            library=self.library,
            model=self.model if self.names_model else None,
            user=self.user,
            process=self.process,
            clock=self.clock,
            head=self.head,
            free_bytes=lambda _: free,
        )
        return collect(request).model_copy(update={"measured": self.measured})

    def report(self) -> DoctorReport:
        """Return the report about the board."""
        return report_on(self.facts())


@dataclass(frozen=True)
class Fault:
    """A change of a healthy board, and the one finding that it has. ``{m}`` is the model folder,
    ``{w}`` its weights.
    """

    name: str
    plant: Callable[[DoctorBoard], object]
    severity: Severity
    sentence: str
    command: str
    soc: str = "RK3588"


def check(fault: Fault, root: Path) -> None:
    """Plant a fault, and compare the report with its one finding."""
    board = DoctorBoard(root, fault.soc)
    model, weights = str(board.model), str(board.weights)
    fault.plant(board)
    report = board.report()
    found = [(one.id, one.severity, one.sentence, one.command) for one in report.findings]
    sentence, command = (
        text.replace("{m}", model).replace("{w}", weights)
        for text in (fault.sentence, fault.command)
    )
    assert found == [(fault.name, fault.severity, sentence, command)]
    assert report.findings[0].evidence
    assert report.healthy is (fault.severity is not Severity.ERROR)
