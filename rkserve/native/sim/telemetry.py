"""A fake /sys and /proc of a board with its NPU load, clocks, temperatures and memory.

The module knows the paths of each SoC and the formats of the rknpu driver and the kernel. The tree
is written under a given root; a folder with other content is refused. ``python -m
rkserve.native.sim.telemetry ROOT --platform RK3588`` writes one.

Each file is replaced atomically, so that a concurrent reader sees old or new content. A simulated
board has a tree of its own: ``ensure_tree`` makes it, ``show_load`` updates its load.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from rkserve.core.errors import ConfigError

# Lists the files of the tree; other files are never removed.
MANIFEST = ".rkserve-telemetry"
MHZ = 1_000_000
LOAD_FILES = ("sys/kernel/debug/rknpu/load", "proc/rknpu/load")
GOVERNORS = ("rknpu_ondemand", "userspace")


@dataclass(frozen=True)
class Soc:
    """The device nodes, clocks, thermal zones and memory of one SoC."""

    compatible: tuple[str, ...]
    cores: int
    npu: str
    npu_mhz: tuple[int, ...]
    ddr_mhz: tuple[int, ...]
    zones: tuple[str, ...]
    memory_mb: int
    cpus: tuple[tuple[str, int], ...]  # the CPUs of each clock, and the highest one in MHz


# The node, the number of cores and the highest clocks are the vendor's; docs/reference/simulator.md
# says which of the rest is assumed.
SOCS: Mapping[str, Soc] = MappingProxyType(
    {
        "RK3588": Soc(
            compatible=("radxa,rock-5b", "rockchip,rk3588"),
            cores=3,
            npu="fdab0000.npu",
            npu_mhz=(300, 400, 500, 600, 700, 800, 900, 1000),
            ddr_mhz=(528, 1068, 1560, 2112),
            zones=("soc-thermal", "gpu-thermal", "npu-thermal"),
            memory_mb=16384,
            cpus=(("0 1 2 3", 1800), ("4 5", 2400), ("6 7", 2400)),
        ),
        "RK3576": Soc(
            compatible=("radxa,rock-4d", "rockchip,rk3576"),
            cores=2,
            npu="27700000.npu",
            npu_mhz=(300, 400, 500, 600, 700, 800, 900, 1000),
            ddr_mhz=(528, 1068, 1560, 2112),
            zones=("soc-thermal", "gpu-thermal", "npu-thermal"),
            memory_mb=8192,
            cpus=(("0 1 2 3", 2016), ("4 5 6 7", 2208)),
        ),
        "RK3562": Soc(
            compatible=("rockchip,rk3562-evb1-lp4x-v10", "rockchip,rk3562"),
            cores=1,
            npu="ff300000.npu",
            npu_mhz=(300, 400, 500, 600, 700, 800, 900, 1000),
            ddr_mhz=(324, 528, 1056, 2112),
            zones=("soc-thermal",),
            memory_mb=4096,
            cpus=(("0 1 2 3", 2016),),
        ),
        "RV1126B": Soc(
            compatible=("rockchip,rv1126b-evb1-v10", "rockchip,rv1126b"),
            cores=1,
            npu="22000000.npu",
            npu_mhz=(396, 510, 600, 700, 800, 950),
            ddr_mhz=(324, 528, 924, 1332),
            zones=("soc-thermal",),
            memory_mb=2048,
            cpus=(("0 1 2 3", 1608),),
        ),
    }
)


@dataclass(frozen=True)
class BoardReadings:
    """The current readings of a board. None is the SoC's highest clock, or its usual memory."""

    load_percent: tuple[int, ...] = ()  # one per NPU core; none at all is an idle NPU
    npu_mhz: int | None = None
    npu_governor: str = GOVERNORS[0]
    cpu_governor: str = "performance"
    npu_uv: int = 850_000
    powered: bool = True
    ddr_mhz: int | None = None
    ddr_load_percent: int = 7
    dmc: bool = True  # False: a loader without the DMC handler, which has no DDR node at all
    npu_celsius: float = 45.0
    soc_celsius: float = 43.0
    memory_mb: int | None = None
    available_mb: int | None = None
    driver: str = "0.9.8"
    proc_rknpu: bool = False  # the driver was built to show its files under /proc/rknpu too


def tree(platform: str, figures: BoardReadings) -> dict[str, str]:
    """Return every file of the board by its path without the leading slash.

    Raises:
        ConfigError: the platform is unknown, or a reading is impossible on it.
    """
    soc = _soc(platform)
    _check(soc, figures)
    driver = _driver(soc, figures)
    files = {f"sys/kernel/debug/rknpu/{name}": text for name, text in driver.items()}
    if figures.proc_rknpu:
        files |= {f"proc/rknpu/{name}": text for name, text in driver.items()}
    files["sys/module/rknpu/version"] = f"{figures.driver}\n"
    files |= _devfreq(soc, figures) | _cpufreq(soc, figures)
    for number, zone in enumerate(soc.zones):
        celsius = figures.npu_celsius if zone == "npu-thermal" else figures.soc_celsius
        folder = f"sys/class/thermal/thermal_zone{number}"
        files |= {f"{folder}/type": f"{zone}\n", f"{folder}/temp": f"{round(celsius * 1000)}\n"}
    compatible = "".join(f"{name}\0" for name in soc.compatible)
    # The kernel makes the first one a link to the second.
    files["proc/device-tree/compatible"] = compatible
    files["sys/firmware/devicetree/base/compatible"] = compatible
    files["proc/meminfo"] = _meminfo(soc, figures)
    return files


def _soc(platform: str) -> Soc:
    soc = SOCS.get(platform.upper())
    if soc is None:
        raise ConfigError(f"platform {platform!r} is unknown; there are {', '.join(SOCS)}")
    return soc


def _check(soc: Soc, figures: BoardReadings) -> None:
    loads = figures.load_percent
    percents = (*loads, figures.ddr_load_percent)
    wrong = [percent for percent in percents if percent not in range(101)]
    if wrong:
        raise ConfigError(f"a load is 0 to 100 percent, not {wrong[0]}")
    if loads and len(loads) != soc.cores:
        raise ConfigError(f"this NPU has {soc.cores} cores, and {len(loads)} loads were given")
    for name, given, known in (
        ("NPU", figures.npu_mhz, soc.npu_mhz),
        ("DDR", figures.ddr_mhz, soc.ddr_mhz),
    ):
        if given is not None and given not in known:
            choices = ", ".join(map(str, known))
            raise ConfigError(f"the {name} has no clock of {given} MHz; there are {choices}")
    if figures.npu_governor not in GOVERNORS:
        raise ConfigError(f"the NPU's governor is {' or '.join(GOVERNORS)}")
    total = figures.memory_mb or soc.memory_mb
    if not 0 <= (figures.available_mb or 0) <= total:
        raise ConfigError(f"of {total} MB, {figures.available_mb} MB cannot be available")


def _driver(soc: Soc, figures: BoardReadings) -> dict[str, str]:
    """Return the files of the rknpu driver, in its formats."""
    loads = figures.load_percent or (0,) * soc.cores
    if soc.cores == 1:
        load = f" {loads[0]:2d}%"
    else:
        load = "".join(f" Core{core}: {percent:2d}%," for core, percent in enumerate(loads))
    return {
        "version": f"RKNPU driver: v{figures.driver}\n",
        "load": f"NPU load: {load}\n",
        "freq": f"{_hertz(figures.npu_mhz, soc.npu_mhz)}\n",
        "volt": f"{figures.npu_uv}\n",
        "power": "on\n" if figures.powered else "off\n",
        "delayms": "3000\n",
        "reset": "on\n",
    }


def _devfreq(soc: Soc, figures: BoardReadings) -> dict[str, str]:
    npu_hz = _hertz(figures.npu_mhz, soc.npu_mhz)
    files = _clock(soc.npu, npu_hz, soc.npu_mhz, figures.npu_governor)
    if figures.dmc:
        ddr_hz = _hertz(figures.ddr_mhz, soc.ddr_mhz)
        files |= _clock("dmc", ddr_hz, soc.ddr_mhz, "dmc_ondemand")
        files["sys/class/devfreq/dmc/load"] = f"{figures.ddr_load_percent}@{ddr_hz}Hz\n"
    return files


def _cpufreq(soc: Soc, figures: BoardReadings) -> dict[str, str]:
    """Return the CPU clocks: at their highest with ``performance``, else as of an idle board."""
    files: dict[str, str] = {}
    for cpus, highest in soc.cpus:
        folder = f"sys/devices/system/cpu/cpufreq/policy{cpus.split()[0]}"
        now = highest if figures.cpu_governor == "performance" else 408
        shown = {
            "related_cpus": cpus,
            "scaling_cur_freq": f"{now * 1000}",
            "scaling_max_freq": f"{highest * 1000}",
            "cpuinfo_max_freq": f"{highest * 1000}",
            "scaling_governor": figures.cpu_governor,
        }
        files |= {f"{folder}/{name}": f"{text}\n" for name, text in shown.items()}
    return files


def _clock(node: str, hertz: int, choices_mhz: Sequence[int], governor: str) -> dict[str, str]:
    shown = {
        "cur_freq": f"{hertz}",
        "available_frequencies": " ".join(str(mhz * MHZ) for mhz in choices_mhz),
        "governor": governor,
        "min_freq": f"{min(choices_mhz) * MHZ}",
        "max_freq": f"{max(choices_mhz) * MHZ}",
    }
    if governor == "userspace":  # the kernel has this one with that governor only
        shown["userspace/set_freq"] = f"{hertz}"
    return {f"sys/class/devfreq/{node}/{name}": f"{text}\n" for name, text in shown.items()}


def _hertz(chosen_mhz: int | None, choices_mhz: Sequence[int]) -> int:
    return (max(choices_mhz) if chosen_mhz is None else chosen_mhz) * MHZ


def _meminfo(soc: Soc, figures: BoardReadings) -> str:
    total = figures.memory_mb or soc.memory_mb
    available = total * 3 // 4 if figures.available_mb is None else figures.available_mb
    rows = {"MemTotal:": total, "MemFree:": available, "MemAvailable:": available}
    return "".join(f"{name:<16}{mb * 1024:>8} kB\n" for name, mb in rows.items())


def write(root: Path, platform: str, figures: BoardReadings) -> None:
    """Write the tree under ``root``, which is new, empty, or was written here before.

    Raises:
        ConfigError: the figures are wrong, or ``root`` has other content.
    """
    files = tree(platform, figures)
    manifest = root / MANIFEST
    if manifest.is_file():
        before = manifest.read_text(encoding="utf-8").splitlines()
    elif root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} has other content; name an empty folder, or a new one")
    else:
        before = []
    # The manifest has all names before the first file is written, so that an interrupted write can
    # be repeated.
    _put(manifest, _listed({*before, *files}))
    for name, text in files.items():
        _put(root / name, text)
    for name in set(before) - set(files):
        _remove(root, name)
    _put(manifest, _listed(files))


def _listed(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in sorted(names))


def ensure_tree(root: Path, platform: str, figures: BoardReadings) -> None:
    """Create a simulated board's tree, or update it; an equal one is not written again.

    A new tree appears atomically, also if several boards create the same one at once. The load of
    an existing tree is kept; everything else that differs from ``figures`` is overwritten.

    Raises:
        ConfigError: the figures are wrong, or ``root`` has other content.
    """
    if (root / MANIFEST).is_file():
        if not _shows(root, tree(platform, figures)):
            write(root, platform, figures)
        return
    if root.exists():  # an empty folder, or one with other content, which is refused
        write(root, platform, figures)
        return
    root.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{root.name}.", dir=root.parent) as folder:
        fresh = Path(folder, "tree")
        write(fresh, platform, figures)
        try:
            fresh.rename(root)
        except OSError as exc:
            if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
        else:
            return
    ensure_tree(root, platform, figures)  # another process was faster; compare its tree


def _shows(root: Path, files: Mapping[str, str]) -> bool:
    for name, text in {MANIFEST: _listed(files), **files}.items():
        if name in LOAD_FILES:
            continue
        try:
            if (root / name).read_text(encoding="utf-8") != text:
                return False
        except OSError:
            return False
    return True


def show_load(root: Path, platform: str, percent: int) -> None:
    """Set the load of every NPU core in a tree.

    Raises:
        ConfigError: the platform or the load is invalid, or ``root`` has no tree.
    """
    soc = _soc(platform)
    figures = BoardReadings(load_percent=(percent,) * soc.cores)
    _check(soc, figures)
    shown = [root / name for name in LOAD_FILES if (root / name).is_file()]
    if not shown:
        raise ConfigError(f"{root} is not a tree of a board")
    for path in shown:
        _put(path, _driver(soc, figures)["load"])


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _remove(root: Path, name: str) -> None:
    path = root / name
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == root or not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tree that the command line describes."""
    usual = BoardReadings()
    parser = argparse.ArgumentParser(
        prog="python -m rkserve.native.sim.telemetry",
        description="Write a fake /sys and /proc of a board under a folder.",
    )
    parser.add_argument("root", type=Path, help="an empty folder, a new one, or one written before")
    parser.add_argument("--platform", required=True, help=", ".join(SOCS))
    parser.add_argument("--load", type=int, nargs="+", default=[], help="percent, one per NPU core")
    parser.add_argument("--npu-mhz", type=int)
    parser.add_argument("--cpu-governor", default=usual.cpu_governor, help="such as ondemand")
    parser.add_argument("--npu-governor", default=usual.npu_governor, help=" or ".join(GOVERNORS))
    parser.add_argument("--npu-uv", type=int, default=usual.npu_uv, help="microvolts")
    parser.add_argument("--off", action="store_true", help="the NPU is powered off")
    parser.add_argument("--ddr-mhz", type=int)
    parser.add_argument("--ddr-load", type=int, default=usual.ddr_load_percent, help="percent")
    parser.add_argument("--no-dmc", action="store_true", help="a board without the DDR node")
    parser.add_argument("--npu-celsius", type=float, default=usual.npu_celsius)
    parser.add_argument("--soc-celsius", type=float, default=usual.soc_celsius)
    parser.add_argument("--memory-mb", type=int)
    parser.add_argument("--available-mb", type=int)
    parser.add_argument("--driver", default=usual.driver, help="version of the rknpu driver")
    parser.add_argument("--proc-rknpu", action="store_true", help="the driver's files in /proc too")
    given = parser.parse_args(argv)
    figures = BoardReadings(
        load_percent=tuple(given.load),
        npu_mhz=given.npu_mhz,
        npu_governor=given.npu_governor,
        cpu_governor=given.cpu_governor,
        npu_uv=given.npu_uv,
        powered=not given.off,
        ddr_mhz=given.ddr_mhz,
        ddr_load_percent=given.ddr_load,
        dmc=not given.no_dmc,
        npu_celsius=given.npu_celsius,
        soc_celsius=given.soc_celsius,
        memory_mb=given.memory_mb,
        available_mb=given.available_mb,
        driver=given.driver,
        proc_rknpu=given.proc_rknpu,
    )
    try:
        write(given.root, given.platform, figures)
    except (ConfigError, OSError) as exc:
        sys.exit(f"rkserve: {exc}")


if __name__ == "__main__":
    main()
