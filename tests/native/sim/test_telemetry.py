"""The fake /sys and /proc: every SoC's paths, and the formats that drivers and kernels print."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import ConfigError
from rkserve.native.sim.telemetry import (
    MANIFEST,
    SOCS,
    BoardReadings,
    ensure_tree,
    main,
    show_load,
    tree,
    write,
)

LOADS = {"RK3588": (48, 50, 9), "RK3576": (0, 100), "RK3562": (37,), "RV1126B": (5,)}


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        pytest.param(
            "RK3588",
            {
                "sys/kernel/debug/rknpu/load": "NPU load:  Core0: 48%, Core1: 50%, Core2:  9%,\n",
                "sys/kernel/debug/rknpu/freq": "1000000000\n",
                "sys/class/devfreq/fdab0000.npu/cur_freq": "1000000000\n",
                "sys/class/devfreq/dmc/cur_freq": "2112000000\n",
                "proc/device-tree/compatible": "radxa,rock-5b\0rockchip,rk3588\0",
                "proc/meminfo": "MemTotal:       16777216 kB\n"
                "MemFree:        12582912 kB\nMemAvailable:   12582912 kB\n",
            },
            id="RK3588",
        ),
        pytest.param(
            "RK3576",
            {
                "sys/kernel/debug/rknpu/load": "NPU load:  Core0:  0%, Core1: 100%,\n",
                "sys/kernel/debug/rknpu/freq": "1000000000\n",
                "sys/class/devfreq/27700000.npu/max_freq": "1000000000\n",
                "sys/class/devfreq/dmc/max_freq": "2112000000\n",
                "proc/device-tree/compatible": "radxa,rock-4d\0rockchip,rk3576\0",
            },
            id="RK3576",
        ),
        pytest.param(
            "RK3562",
            {
                "sys/kernel/debug/rknpu/load": "NPU load:  37%\n",
                "sys/kernel/debug/rknpu/freq": "1000000000\n",
                "sys/class/devfreq/ff300000.npu/cur_freq": "1000000000\n",
                "sys/class/devfreq/dmc/max_freq": "2112000000\n",
                "proc/device-tree/compatible": "rockchip,rk3562-evb1-lp4x-v10\0rockchip,rk3562\0",
            },
            id="RK3562",
        ),
        pytest.param(
            "RV1126B",
            {
                "sys/kernel/debug/rknpu/load": "NPU load:   5%\n",
                "sys/kernel/debug/rknpu/freq": "950000000\n",
                "sys/class/devfreq/22000000.npu/max_freq": "950000000\n",
                "sys/class/devfreq/dmc/max_freq": "1332000000\n",
                "proc/device-tree/compatible": "rockchip,rv1126b-evb1-v10\0rockchip,rv1126b\0",
                "proc/meminfo": "MemTotal:        2097152 kB\n"
                "MemFree:         1572864 kB\nMemAvailable:    1572864 kB\n",
            },
            id="RV1126B",
        ),
    ],
)
def test_each_soc_has_its_own_paths_and_formats(platform: str, expected: dict[str, str]) -> None:
    files = tree(platform, BoardReadings(load_percent=LOADS[platform]))
    assert files | expected == files
    assert files["sys/kernel/debug/rknpu/version"] == "RKNPU driver: v0.9.8\n"
    assert files["sys/module/rknpu/version"] == "0.9.8\n"
    nodes = {name.split("/")[3] for name in files if name.startswith("sys/class/devfreq/")}
    assert nodes == {SOCS[platform].npu, "dmc"}
    loads = re.findall(r"(\d+)\s*%", files["sys/kernel/debug/rknpu/load"])
    assert tuple(map(int, loads)) == LOADS[platform]


@pytest.mark.parametrize("platform", SOCS)
def test_the_tree_of_each_soc_is_complete(platform: str) -> None:
    files = tree(platform, BoardReadings())
    for name in ("version", "load", "freq", "volt", "power", "delayms", "reset"):
        assert f"sys/kernel/debug/rknpu/{name}" in files
    for node in (SOCS[platform].npu, "dmc"):
        for name in ("cur_freq", "available_frequencies", "governor", "min_freq", "max_freq"):
            assert f"sys/class/devfreq/{node}/{name}" in files
        current = files[f"sys/class/devfreq/{node}/cur_freq"]
        available = files[f"sys/class/devfreq/{node}/available_frequencies"]
        assert current.strip() in available.split()
    zones = {text for name, text in files.items() if name.endswith("/type")}
    assert zones & {"npu-thermal\n", "soc-thermal\n"}
    # The SoC is the part after the comma of the last name.
    compatible = files["proc/device-tree/compatible"]
    assert compatible.rstrip("\0").split("\0")[-1].split(",")[-1].upper() == platform
    assert files["sys/firmware/devicetree/base/compatible"] == compatible


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        pytest.param({}, {"load": "NPU load:  Core0:  0%, Core1:  0%, Core2:  0%,\n"}, id="idle"),
        pytest.param({"npu_mhz": 600}, {"freq": "600000000\n"}, id="a lower clock"),
        pytest.param({"npu_uv": 675_000}, {"volt": "675000\n"}, id="a voltage"),
        pytest.param({"powered": False}, {"power": "off\n"}, id="powered off"),
        pytest.param({"driver": "0.9.6"}, {"version": "RKNPU driver: v0.9.6\n"}, id="a driver"),
    ],
)
def test_figures_show_in_the_driver_s_files(
    figures: dict[str, Any], expected: dict[str, str]
) -> None:
    files = tree("rk3588", BoardReadings(**figures, proc_rknpu=True))
    for name, text in expected.items():
        assert files[f"sys/kernel/debug/rknpu/{name}"] == text
        assert files[f"proc/rknpu/{name}"] == text


def test_clocks_heat_and_memory_are_figures_too() -> None:
    figures = BoardReadings(
        ddr_mhz=528, npu_governor="userspace", npu_celsius=61.25, soc_celsius=55, memory_mb=8192,
        available_mb=1000,
    )  # fmt: skip
    files = tree("RK3588", figures)
    assert files["sys/class/devfreq/dmc/load"] == "7@528000000Hz\n"
    assert files["sys/class/devfreq/fdab0000.npu/governor"] == "userspace\n"
    assert files["sys/class/devfreq/fdab0000.npu/userspace/set_freq"] == "1000000000\n"
    heat = {
        files[f"sys/class/thermal/thermal_zone{n}/type"]: files[
            f"sys/class/thermal/thermal_zone{n}/temp"
        ]
        for n in range(3)
    }
    assert heat["npu-thermal\n"] == "61250\n"
    assert heat["soc-thermal\n"] == "55000\n"
    assert "MemTotal:        8388608 kB\n" in files["proc/meminfo"]
    assert "MemAvailable:    1024000 kB\n" in files["proc/meminfo"]


def test_a_board_without_the_dmc_handler_has_no_ddr_node() -> None:
    assert not [name for name in tree("RK3588", BoardReadings(dmc=False)) if "dmc" in name]


@pytest.mark.parametrize(
    ("platform", "figures", "words"),
    [
        pytest.param("RK3399", {}, "RK3588, RK3576, RK3562, RV1126B", id="another SoC"),
        pytest.param("RK3576", {"load_percent": (1, 2, 3)}, "2 cores, and 3 loads", id="a core"),
        pytest.param("RK3562", {"load_percent": (101,)}, "not 101", id="a load over 100"),
        pytest.param("RK3588", {"ddr_load_percent": -1}, "not -1", id="a negative load"),
        pytest.param("RV1126B", {"npu_mhz": 1000}, "no clock of 1000 MHz.* 950", id="a clock"),
        pytest.param("RK3588", {"npu_governor": "fast"}, "userspace", id="a governor"),
        pytest.param("RK3588", {"memory_mb": 10, "available_mb": 11}, "of 10 MB", id="memory"),
    ],
)
def test_figures_that_a_board_cannot_show_are_refused(
    platform: str, figures: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tree(platform, BoardReadings(**figures))


def on_disk(root: Path) -> dict[str, str]:
    """Return the files below a root, without the list of them."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    del found[MANIFEST]
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def test_what_is_written_is_the_tree_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "root", "RK3588", BoardReadings())
    assert on_disk(tmp_path / "root") == tree("RK3588", BoardReadings())


def test_writing_again_replaces_figures_and_removes_what_is_gone(tmp_path: Path) -> None:
    write(tmp_path, "RK3588", BoardReadings(proc_rknpu=True))
    write(tmp_path, "RK3576", BoardReadings(dmc=False, load_percent=(7, 8)))
    assert on_disk(tmp_path) == tree("RK3576", BoardReadings(dmc=False, load_percent=(7, 8)))
    assert not (tmp_path / "proc" / "rknpu").exists()
    assert [path.name for path in (tmp_path / "sys/class/devfreq").iterdir()] == ["27700000.npu"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="other content"):
        write(tmp_path, "RK3588", BoardReadings())
    assert [path.name for path in tmp_path.rglob("*")] == ["sys", "mine"]
    with pytest.raises(ConfigError, match="other content"):
        write(Path("/"), "RK3588", BoardReadings())


def test_the_command_line_sets_every_figure(tmp_path: Path) -> None:
    line = (
        "--platform rk3588 --load 1 2 3 --npu-mhz 900 --npu-governor userspace --npu-uv 1 --off "
        "--ddr-mhz 1560 --ddr-load 99 --npu-celsius 50.5 --soc-celsius 40 --memory-mb 4096 "
        "--available-mb 2048 --driver 0.9.7 --proc-rknpu"
    )
    main([str(tmp_path), *line.split()])
    figures = BoardReadings(
        load_percent=(1, 2, 3), npu_mhz=900, npu_governor="userspace", npu_uv=1, powered=False,
        ddr_mhz=1560, ddr_load_percent=99, npu_celsius=50.5, soc_celsius=40, memory_mb=4096,
        available_mb=2048, driver="0.9.7", proc_rknpu=True,
    )  # fmt: skip
    assert on_disk(tmp_path) == tree("RK3588", figures)
    main([str(tmp_path), "--platform", "RK3588", "--no-dmc"])
    assert on_disk(tmp_path) == tree("RK3588", BoardReadings(dmc=False))


def run(root: Path, platform: str) -> subprocess.CompletedProcess[str]:
    module = "rkserve.native.sim.telemetry"
    command = [sys.executable, "-m", module, str(root), "--platform", platform]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_module_runs_and_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path / "root", "RK3399")
    assert done.returncode == 1
    assert done.stderr == (
        "rkserve: platform 'RK3399' is unknown; there are RK3588, RK3576, RK3562, RV1126B\n"
    )
    assert not (tmp_path / "root").exists()
    done = run(tmp_path / "root", "RK3562")
    assert (done.returncode, done.stderr) == (0, "")
    assert on_disk(tmp_path / "root") == tree("RK3562", BoardReadings())


def test_a_simulated_board_gets_its_tree_whole_and_keeps_it(tmp_path: Path) -> None:
    root, figures = tmp_path / "state" / "board", BoardReadings(memory_mb=4096)
    ensure_tree(root, "RK3588", figures)
    assert on_disk(root) == tree("RK3588", figures)
    show_load(root, "RK3588", 50)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    ensure_tree(root, "RK3588", figures)
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert [path.name for path in root.parent.iterdir()] == ["board"]


@pytest.mark.parametrize(
    ("platform", "figures"),
    [
        pytest.param("RK3576", BoardReadings(), id="another SoC"),
        pytest.param("RK3588", BoardReadings(memory_mb=8192), id="other memory"),
        pytest.param("RK3588", BoardReadings(dmc=False), id="a folder less"),
    ],
)
def test_a_tree_of_another_board_is_written_over(
    tmp_path: Path, platform: str, figures: BoardReadings
) -> None:
    ensure_tree(tmp_path, "RK3588", BoardReadings())
    ensure_tree(tmp_path, platform, figures)
    shown = {name: text for name, text in on_disk(tmp_path).items() if "/dmc/" in name}
    expected = tree(platform, figures)
    assert expected.items() <= on_disk(tmp_path).items()
    assert shown.keys() == {name for name in expected if "/dmc/" in name}


def test_a_tree_that_lost_a_file_is_mended(tmp_path: Path) -> None:
    ensure_tree(tmp_path, "RK3588", BoardReadings())
    (tmp_path / "proc" / "meminfo").unlink()
    ensure_tree(tmp_path, "RK3588", BoardReadings())
    assert on_disk(tmp_path) == tree("RK3588", BoardReadings())


def test_a_stranger_s_folder_gets_no_tree(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="other content"):
        ensure_tree(tmp_path, "RK3588", BoardReadings())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_boards_that_start_at_once_agree_on_one_tree(tmp_path: Path) -> None:
    root = tmp_path / "board"
    with ThreadPoolExecutor(8) as pool:
        started = [pool.submit(ensure_tree, root, "RK3562", BoardReadings()) for _ in range(8)]
    assert [one.result() for one in started] == [None] * 8
    assert on_disk(root) == tree("RK3562", BoardReadings())
    assert [path.name for path in tmp_path.iterdir()] == ["board"]


@pytest.mark.parametrize("platform", SOCS)
def test_a_load_shows_on_every_core_and_nowhere_else(tmp_path: Path, platform: str) -> None:
    ensure_tree(tmp_path, platform, BoardReadings(proc_rknpu=True, npu_celsius=61.5))
    show_load(tmp_path, platform, 50)
    loads = (50,) * SOCS[platform].cores
    busy = BoardReadings(load_percent=loads, proc_rknpu=True, npu_celsius=61.5)
    assert on_disk(tmp_path) == tree(platform, busy)


@pytest.mark.parametrize(
    ("show", "words"),
    [
        pytest.param(partial(show_load, percent=101), "not 101", id="too much"),
        pytest.param(partial(show_load, percent=5), "not a tree of a board", id="no tree"),
    ],
)
def test_a_load_that_cannot_be_shown_is_refused(tmp_path: Path, show: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        show(tmp_path, "RK3588")
    assert not list(tmp_path.iterdir())
