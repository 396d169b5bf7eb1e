"""Faults of SoC, driver, device files, clocks, heat and memory, and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.doctor.facts import Severity
from tests.support.boards.doctor_board import CPU, LIBRARY, DoctorBoard, Fault, check, elf

ERROR, WARNING, UNKNOWN = Severity.ERROR, Severity.WARNING, Severity.UNKNOWN
NEW_KERNEL = "sudo apt install linux-image-vendor-rk35xx linux-dtb-vendor-rk35xx && sudo reboot"
NO_HEAT = "# give the board a heat sink and a fan, and free its air"


def settings(board: DoctorBoard, text: str) -> DoctorBoard:
    board.settings.write_text(text)
    return board


def no_dri(board: DoctorBoard) -> DoctorBoard:
    board.drop("dev/dri")
    return board.device("dev/rknpu")


def driver_folders() -> tuple[str, ...]:
    return ("sys/kernel/debug/rknpu", "sys/module/rknpu")


def large(board: DoctorBoard) -> DoctorBoard:
    with board.weights.open("r+b") as file:
        file.truncate(4_500_000_000)
    return board


FAULTS = {
    # -- SoC, kernel, driver
    "soc-unsupported": Fault(
        "soc-unsupported",
        lambda b: b.put("proc/device-tree/compatible", "pine64,x\0rockchip,rk3399\0"),
        ERROR,
        "The SoC RK3399 is not supported; RKLLM runs on RK3588, RK3576, RK3562, RV1126B.",
        "# use a board with one of these SoCs",
    ),
    "no device tree": Fault(
        "soc-unknown",
        lambda b: b.drop("proc/device-tree"),
        ERROR,
        "This machine names no Rockchip SoC; RKLLM runs on RK3588, RK3576, RK3562, RV1126B.",
        "cat /proc/device-tree/compatible",
    ),
    "old kernel": Fault(
        "kernel-old",
        lambda b: b.put("proc/sys/kernel/osrelease", "4.19.232\n"),
        WARNING,
        "The kernel is 4.19.232; the NPU's driver needs 5.10 or later, and the vendor's 6.1 is "
        "the safest.",
        NEW_KERNEL,
    ),
    "driver 0.9.6, small model": Fault(
        "driver-old",
        lambda b: b.sensors(driver="0.9.6"),
        WARNING,
        "The NPU's driver is 0.9.6: the runtime asks for 0.9.7 or later; 0.9.8 is wanted.",
        NEW_KERNEL,
    ),
    "driver 0.9.6, large model": Fault(
        "driver-old",
        lambda b: (b.sensors(driver="0.9.6"), large(b)),
        ERROR,
        "The NPU's driver is 0.9.6, with which it cannot allocate models of more than 3 GB; 0.9.8 "
        "is wanted.",
        NEW_KERNEL,
    ),
    "driver 0.8.2": Fault(
        "driver-old",
        lambda b: b.sensors(driver="0.8.2"),
        ERROR,
        "The NPU's driver is 0.8.2, with which its w8a8 matrix products fail; 0.9.8 is wanted.",
        NEW_KERNEL,
    ),
    "driver 0.9.7 and RKLLM 1.3.1": Fault(
        "driver-old",
        lambda b: (b.sensors(driver="0.9.7"), b.raw(LIBRARY, elf("1.3.1"))),
        WARNING,
        "The NPU's driver is 0.9.7: 1.3.1 was reported to run with 0.9.8 only; 0.9.8 is wanted.",
        NEW_KERNEL,
    ),
    "no driver": Fault(
        "driver-missing",
        lambda b: b.drop("dev/dri", "sys/bus/platform/drivers/RKNPU", *driver_folders()),
        ERROR,
        "The kernel has no driver 'rknpu', without which RKLLM finds no NPU.",
        NEW_KERNEL,
    ),
    "mainline rocket": Fault(
        "driver-rocket",
        lambda b: (
            b.drop("dev/dri", "sys/bus/platform/drivers/RKNPU", *driver_folders()),
            b.put("sys/module/rocket/refcnt", "1"),
        ),
        ERROR,
        "The kernel drives the NPU by the mainline driver 'rocket', which RKLLM cannot use.",
        NEW_KERNEL,
    ),
    "driver's version hidden": Fault(
        "driver-unknown",
        lambda b: b.drop(*driver_folders()),
        UNKNOWN,
        "The version of the NPU's driver is unknown; RKLLM asks for 0.9.8.",
        "sudo cat /sys/kernel/debug/rknpu/version",
    ),
    "stuck job": Fault(
        "npu-stuck",
        lambda b: b.put(
            "sys/kernel/debug/rknpu/load", "NPU load:  Core0:  0%, Core1:  0%, Core2: 429496%,"
        ),
        ERROR,
        "A job on the NPU does not end: every later request waits for it.",
        "sudo reboot",
    ),
    # -- device files
    "no device file": Fault(
        "node-missing",
        lambda b: b.drop("dev/dri"),
        ERROR,
        "The NPU has no device file: neither a render node of rknpu nor /dev/rknpu.",
        "sudo dmesg | grep -i rknpu",
    ),
    "node of root's group only": Fault(
        "node-permission",
        lambda b: (b.root / "dev/dri/renderD129").chmod(0o600),
        ERROR,
        "ray may not use /dev/dri/renderD129.",
        'echo \'SUBSYSTEM=="drm", KERNEL=="renderD129", GROUP="render", MODE="0660"\' | '
        "sudo tee /etc/udev/rules.d/99-rknpu.rules && sudo udevadm control --reload && "
        "sudo udevadm trigger",
    ),
    "user not in the group": Fault(
        "node-permission",
        lambda b: b.put("etc/group", f"render:x:{b.group}:\nvideo:x:44:ray\n"),
        ERROR,
        "ray may not use /dev/dri/renderD129.",
        "sudo usermod -aG render ray  # then log in again",
    ),
    "/dev/rknpu without dma_heap": Fault(
        "heap-missing",
        no_dri,
        ERROR,
        "The NPU is /dev/rknpu, which takes memory from /dev/dma_heap, and that is not there.",
        NEW_KERNEL,
    ),
    "dma_heap of root": Fault(
        "node-permission",
        lambda b: (no_dri(b), b.device("dev/dma_heap/system", 0o600)),
        ERROR,
        "ray may not use /dev/dma_heap/system.",
        'echo \'SUBSYSTEM=="dma_heap", KERNEL=="system", GROUP="render", MODE="0660"\' | '
        "sudo tee /etc/udev/rules.d/99-rknpu.rules && sudo udevadm control --reload && "
        "sudo udevadm trigger",
    ),
    # -- clocks and heat
    "ondemand": Fault(
        "cpu-governor",
        lambda b: b.put(f"{CPU}/policy4/scaling_governor", "ondemand\n"),
        WARNING,
        "The CPU clock of CPU 4 5 6 7 follows the load (governor ondemand); decoding was measured "
        "at 9.3 instead of 12.5 tokens/s.",
        "echo performance | sudo tee /sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    ),
    "CPU limit": Fault(
        "cpu-limit",
        lambda b: b.put(f"{CPU}/policy4/scaling_max_freq", "1200000\n"),
        WARNING,
        "The CPU clock of CPU 4 5 6 7 is limited to 1200 of 2256 MHz.",
        "for p in /sys/devices/system/cpu/cpufreq/policy*; do "
        "sudo cp $p/cpuinfo_max_freq $p/scaling_max_freq; done",
    ),
    "NPU limit": Fault(
        "npu-limit",
        lambda b: b.put("sys/class/devfreq/fdab0000.npu/max_freq", "600000000\n"),
        WARNING,
        "The NPU clock is limited to 600 of 1000 MHz.",
        "echo 1000000000 | sudo tee /sys/class/devfreq/fdab0000.npu/max_freq",
    ),
    "NPU held low": Fault(
        "npu-slow",
        lambda b: b.sensors(npu_governor="userspace", npu_mhz=300),
        WARNING,
        "The NPU clock is held at 300 of 1000 MHz (governor userspace).",
        "echo performance | sudo tee /sys/class/devfreq/fdab0000.npu/governor",
    ),
    "slow DDR": Fault(
        "ddr-slow",
        lambda b: b.sensors(ddr_mhz=528),
        WARNING,
        "The DDR clock is 528 of 2112 MHz (governor dmc_ondemand), which halves decoding on some "
        "boards.",
        "echo performance | sudo tee /sys/class/devfreq/dmc/governor",
    ),
    "no DMC": Fault(
        "ddr-missing",
        lambda b: b.sensors(dmc=False),
        WARNING,
        "The DDR clock can be neither read nor set, and decoding may be half as fast as on other "
        "boards: the loader lacks the DMC handler.",
        "# flash the newest loader of the board's maker (SPI flash and eMMC), then reboot",
    ),
    "hot": Fault(
        "hot",
        lambda b: b.sensors(npu_celsius=87.5),
        WARNING,
        "The SoC has 88 degrees Celsius; clocks fall soon above 80.",
        NO_HEAT,
    ),
    "throttled": Fault(
        "throttled",
        lambda b: b.put("sys/class/thermal/cooling_device0/cur_state", "2\n"),
        WARNING,
        "The kernel holds clocks down because of heat.",
        NO_HEAT,
    ),
    # -- memory
    "too little memory": Fault(
        "memory-total",
        lambda b: b.sensors(memory_mb=1500),
        ERROR,
        "The model needs about 1690 MB, and Ray and rkserve 350 MB; the board has 1573 MB.",
        "# choose a smaller model or another quantization, or a lower context_length",
    ),
    "memory in use": Fault(
        "memory-available",
        lambda b: b.sensors(available_mb=1000),
        WARNING,
        "The model needs about 1690 MB, and 1049 MB are available.",
        "ps -eo rss,pid,comm --sort=-rss | head",
    ),
    "memory nearly gone": Fault(
        "memory-low",
        lambda b: setattr(b.sensors(available_mb=300), "names_model", False),
        WARNING,
        "315 of 17180 MB are available; the kernel ends the largest process, the engine, where "
        "none are left.",
        "ps -eo rss,pid,comm --sort=-rss | head",
    ),
    "KV cache too large": Fault(
        "memory-total",
        lambda b: settings(
            b,
            "context_length: 16384\nkv_bytes_per_token: 1000000\neos_token_ids: [1]\n",
        ),
        ERROR,
        "The model needs about 18074 MB, and Ray and rkserve 350 MB; the board has 17180 MB.",
        "# choose a smaller model or another quantization, or a lower context_length",
    ),
    "small CMA without IOMMU": Fault(
        "cma-small",
        lambda b: b.drop("sys/bus/platform/devices/fdab0000.npu/iommu_group"),
        ERROR,
        "The NPU has no IOMMU and takes memory from the contiguous area of 17 MB; the model needs "
        "about 1690 MB.",
        "# enable the IOMMU of the NPU in the device tree, or boot with a larger cma=",
    ),
    "swapped": Fault(
        "swap-used",
        lambda b: b.put(
            "proc/meminfo",
            b.read("proc/meminfo").replace("SwapTotal:       1048576", "SwapTotal:       9048576"),
        ),
        WARNING,
        "8192 MB of memory are swapped out: the board has too little of it.",
        "ps -eo rss,pid,comm --sort=-rss | head",
    ),
    # -- hostile trees: what cannot be read is one finding, and no traceback
    "a folder as governor": Fault(
        "unreadable",
        lambda b: (
            b.drop(f"{CPU}/policy4/scaling_governor"),
            b.put(f"{CPU}/policy4/scaling_governor/x", ""),
        ),
        UNKNOWN,
        f"/{CPU}/policy4/scaling_governor could not be read: it is no regular file.",
        f"ls -ld /{CPU}/policy4/scaling_governor",
    ),
    "garbage as CPU clock": Fault(
        "unreadable",
        lambda b: b.raw(f"{CPU}/policy0/scaling_max_freq", b"\x00\xff\xfe9"),
        UNKNOWN,
        f"/{CPU}/policy0/scaling_max_freq could not be read: '\\ufffd\\ufffd9' is no number.",
        f"ls -ld /{CPU}/policy0/scaling_max_freq",
    ),
    "a loop of links": Fault(
        "unreadable",
        lambda b: b.link("sys/class/thermal/cooling_device0/cur_state", "cur_state"),
        UNKNOWN,
        "/sys/class/thermal/cooling_device0/cur_state could not be read: Too many levels of "
        "symbolic links.",
        "ls -ld /sys/class/thermal/cooling_device0/cur_state",
    ),
    "a link out of the tree": Fault(
        "unreadable",
        lambda b: b.link("proc/sys/kernel/osrelease", "/etc/hostname"),
        UNKNOWN,
        "/proc/sys/kernel/osrelease could not be read: it is a link that leads out of the tree.",
        "ls -ld /proc/sys/kernel/osrelease",
    ),
    "a broken sensor": Fault(
        "unreadable",
        lambda b: [b.put(f"sys/class/thermal/thermal_zone{n}/temp", "999999\n") for n in (0, 2)],
        UNKNOWN,
        "The temperature is unknown.",
        "# read the file of the evidence on the board",
    ),
    "garbage as NPU load": Fault(
        "unreadable",
        lambda b: b.raw("sys/kernel/debug/rknpu/load", bytes(range(256))),
        UNKNOWN,
        "The NPU load is unknown.",
        "# read the file of the evidence on the board",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_has_one_finding_with_its_command(tmp_path: Path, fault: Fault) -> None:
    check(fault, tmp_path / "board")
