"""What is read of a board: four SoCs, every way in which a file can fail, and any bytes at all."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.engine.telemetry import (
    MAX_FILE_BYTES,
    NPU_NODES,
    fastest_cores,
    read_soc,
    read_telemetry,
)
from rkserve.core.board_report import CpuClock, Hardware
from rkserve.native.sim.telemetry import SOCS, BoardReadings, tree, write
from tests.support.paths import TESTS

DATA = TESTS / "data"
SAID = {"compatible", "governor", "scaling_governor", "power", "type"}  # words
DEBUGFS = "sys/kernel/debug/rknpu"
NOBODY = 65534


def slow(cpus: str, governor: str = "ondemand") -> str:
    return (
        f"CPU {cpus}: governor is {governor}; a model that decoded 12.5 tokens/s with performance "
        "was seen to decode 9.3 with ondemand"
    )


EXPECTED = {
    "rk3588": Hardware(
        soc="RK3588",
        npu_load=(0.0, 0.0, 0.0),
        npu_hz=300_000_000,
        npu_max_hz=1_000_000_000,
        npu_governor="rknpu_ondemand",
        cpu_clocks=(
            CpuClock("0-3", 408_000_000, 1800_000_000, "ondemand"),
            CpuClock("4-5", 408_000_000, 2400_000_000, "ondemand"),
            CpuClock("6-7", 408_000_000, 2352_000_000, "ondemand"),
        ),
        temperature_c=37.0,
        driver_version="0.9.8",
        memory_total_bytes=16_338_620 * 1024,
        memory_available_bytes=14_925_308 * 1024,
        notes=(
            "DDR clock, governor and load: /sys/class/devfreq/dmc is not there; "
            "a loader without the DMC handler shows none",
            *map(slow, ("0-3", "4-5", "6-7")),
        ),
    ),
    "rk3576": Hardware(
        soc="RK3576",
        npu_load=(51.0, 48.0),
        npu_hz=1_000_000_000,
        npu_max_hz=1_000_000_000,
        npu_governor="userspace",
        cpu_clocks=(
            CpuClock("0-3", 2016_000_000, 2016_000_000, "performance"),
            CpuClock("4-7", 2208_000_000, 2208_000_000, "userspace"),
        ),
        ddr_hz=2_112_000_000,
        ddr_governor="userspace",
        ddr_load=63.0,
        ddr_max_hz=2_112_000_000,
        temperature_c=66.923,
        driver_version="0.9.7",
        memory_total_bytes=8_056_732 * 1024,
        memory_available_bytes=5_217_396 * 1024,
    ),
    "rk3562": Hardware(
        soc="RK3562",
        npu_load=(37.0,),
        npu_hz=1_000_000_000,
        cpu_clocks=(CpuClock("0-3", 1008_000_000, 2016_000_000, "schedutil"),),
        ddr_hz=528_000_000,
        ddr_max_hz=1_056_000_000,
        ddr_governor="dmc_ondemand",
        ddr_load=7.0,
        temperature_c=52.3,
        driver_version="0.9.8",
        memory_total_bytes=3_999_716 * 1024,
        memory_available_bytes=2_916_128 * 1024,
        notes=(
            "highest NPU clock: /sys/class/devfreq has no ff300000.npu",
            slow("0-3", "schedutil"),
        ),
    ),
    "rv1126b": Hardware(
        soc="RV1126B",
        npu_load=(100.0,),
        npu_hz=800_000_000,
        npu_max_hz=950_000_000,
        npu_governor="rknpu_ondemand",
        cpu_clocks=(CpuClock("0-3", 1608_000_000, 1608_000_000, "performance"),),
        ddr_hz=1_332_000_000,
        ddr_max_hz=1_332_000_000,
        ddr_governor="dmc_ondemand",
        ddr_load=41.0,
        temperature_c=91.75,
        driver_version="0.9.8",
        memory_total_bytes=2_013_184 * 1024,
        memory_available_bytes=1_107_032 * 1024,
    ),
}


@pytest.mark.parametrize("board", EXPECTED)
def test_each_soc_s_tree_is_read(board: str) -> None:
    assert read_telemetry(DATA / board) == EXPECTED[board]
    assert read_soc(DATA / board) == EXPECTED[board].soc


@pytest.mark.parametrize("platform", SOCS)
def test_what_the_simulated_board_shows_is_read_back(tmp_path: Path, platform: str) -> None:
    loads = tuple(range(40, 40 + SOCS[platform].cores))
    figures = BoardReadings(
        load_percent=loads, npu_celsius=61.5, soc_celsius=61.5, ddr_load_percent=12
    )
    write(tmp_path, platform, figures)
    found = read_telemetry(tmp_path)
    assert (found.soc, found.npu_load, found.temperature_c) == (platform, loads, 61.5)
    assert (found.npu_max_hz, found.ddr_load) == (SOCS[platform].npu_mhz[-1] * 1_000_000, 12.0)
    assert found.notes == ()


@pytest.mark.parametrize("governor", ["ondemand", "powersave", "schedutil", "conservative"])
def test_a_cpu_clock_that_is_not_held_is_a_finding(tmp_path: Path, governor: str) -> None:
    write(tmp_path, "RK3576", BoardReadings(cpu_governor=governor))
    found = read_telemetry(tmp_path)
    assert [(one.cpus, one.governor) for one in found.cpu_clocks] == [
        ("0-3", governor),
        ("4-7", governor),
    ]
    assert found.notes == (slow("0-3", governor), slow("4-7", governor))


@pytest.mark.parametrize("what", ["NPU", "DDR"])
def test_a_clock_that_stays_at_its_lowest_is_a_finding(tmp_path: Path, what: str) -> None:
    write(tmp_path, "RK3588", BoardReadings())
    node = {"NPU": NPU_NODES["RK3588"], "DDR": "dmc"}[what]
    (tmp_path / f"sys/class/devfreq/{node}/governor").write_text("powersave\n")
    found = read_telemetry(tmp_path)
    assert found.notes == (f"{what} governor is powersave: its clock stays at the lowest",)


@pytest.mark.parametrize(
    ("cpus", "shown"),
    [
        pytest.param("4 5 6 7", "4-7", id="neighbours"),
        pytest.param("0 2", "0,2", id="others between them"),
        pytest.param("3", "3", id="one"),
        pytest.param("0-3", "0-3", id="a range already"),
        pytest.param("four", "4", id="no numbers: the policy's own"),
    ],
)
def test_cpus_that_share_a_clock_are_named_together(tmp_path: Path, cpus: str, shown: str) -> None:
    write(tmp_path, "RK3576", BoardReadings())
    (tmp_path / "sys/devices/system/cpu/cpufreq/policy4/related_cpus").write_text(f"{cpus}\n")
    assert [one.cpus for one in read_telemetry(tmp_path).cpu_clocks] == ["0-3", shown]


def test_a_kernel_without_cpu_clocks_says_so(tmp_path: Path) -> None:
    write(tmp_path, "RK3562", BoardReadings())
    shutil.rmtree(tmp_path / "sys/devices")
    found = read_telemetry(tmp_path)
    assert found.cpu_clocks == ()
    assert found.notes == ("CPU clocks: /sys/devices/system/cpu/cpufreq is not there",)


def test_the_disk_of_a_folder_is_a_figure_where_one_is_named(tmp_path: Path) -> None:
    write(tmp_path, "RK3588", BoardReadings())
    assert read_telemetry(tmp_path).disk_total_bytes is None
    found = read_telemetry(tmp_path, tmp_path)
    assert found.disk_total_bytes == shutil.disk_usage(tmp_path).total
    assert 0 <= (found.disk_free_bytes or -1) <= (found.disk_total_bytes or 0)
    missing = read_telemetry(tmp_path, tmp_path / "state")
    assert missing.disk_free_bytes is None
    assert missing.notes == ("disk: state is not there",)


def test_reader_and_writer_know_the_same_nodes() -> None:
    assert {name: soc.npu for name, soc in SOCS.items()} == NPU_NODES


def shape(text: str) -> str:
    """A text with its figures and its padding taken out."""
    return re.sub(r" +", " ", re.sub(r"\d+", "N", text)).replace(": N", ":N")


@pytest.mark.parametrize("board", EXPECTED)
def test_the_data_has_the_formats_that_the_writer_writes(board: str) -> None:
    """Neither was recorded; they must at least not contradict each other."""
    written = tree(board, BoardReadings(proc_rknpu=True, npu_governor="userspace"))
    compared = 0
    for name in written.keys() - {"proc/meminfo"}:
        file = DATA / board / name
        if file.is_file() and file.name not in SAID:
            found, expected = shape(file.read_text()), shape(written[name])
            if file.name == "available_frequencies":  # as many as the board has
                found, expected = found.split()[0], expected.split()[0]
            assert found == expected, name
            compared += 1
    assert compared > 10


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A busy RK3588 of our own, to break."""
    write(tmp_path / "board", "RK3588", BoardReadings(load_percent=(48, 50, 9)))
    return tmp_path / "board"


def remove(path: Path) -> None:
    path.unlink()


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def make_unreadable_memory(path: Path) -> None:
    """A file that opens and then fails with EIO."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def holding(text: str) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return put


@pytest.mark.parametrize(
    ("line", "loads", "stuck"),
    [
        pytest.param(
            "NPU load:  Core0: 48%, Core1:  0%, Core2: 429496%,\n",
            (48.0, 0.0, 100.0),
            ["core 2: a job is stuck (/{path} says 429496 %)"],
            id="one of three",
        ),
        pytest.param(
            "NPU load:  20000%\n",
            (100.0,),
            ["core 0: a job is stuck (/{path} says 20000 %)"],
            id="the only one",
        ),
        pytest.param("NPU load:  Core0: 100%, Core1: 0%,\n", (100.0, 0.0), [], id="none"),
    ],
)
def test_a_stuck_job_is_named_and_the_other_cores_keep_their_load(
    board: Path, line: str, loads: tuple[float, ...], stuck: list[str]
) -> None:
    (board / DEBUGFS / "load").write_text(line, encoding="utf-8")
    found = read_telemetry(board)
    assert found.npu_load == loads
    assert list(found.notes) == [note.format(path=f"{DEBUGFS}/load") for note in stuck]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        pytest.param(remove, "is not there", id="removed"),
        pytest.param(make_folder, "is a folder", id="a folder"),
        pytest.param(make_pipe, "is empty", id="a pipe that nobody fills"),
        pytest.param(make_loop, r"cannot be read \(Too many levels", id="a link to itself"),
        pytest.param(make_unreadable_memory, r"cannot be read \(Input/output", id="an I/O error"),
        pytest.param(holding(""), "is empty", id="empty"),
        pytest.param(holding(" \n"), "is empty", id="blank"),
        pytest.param(holding("NPU load:  Core0: 48%, Core1"), "is not understood", id="torn"),
        pytest.param(holding("NPU load:  -\n"), "not understood: 'NPU load:  -'", id="no figure"),
        pytest.param(holding("9" * MAX_FILE_BYTES + "%"), "is longer than 8192 bytes", id="huge"),
        pytest.param(holding("NPU load: ٣%\n"), "is not understood", id="foreign digits"),
        pytest.param(holding("NPU load: 9" + "0" * 30 + "%"), "is not understood", id="long"),
    ],
)
def test_a_load_that_cannot_be_had_is_unknown_and_harms_nothing_else(
    board: Path, harm: Callable[[Path], None], reason: str
) -> None:
    before = read_telemetry(board)
    harm(board / DEBUGFS / "load")
    found = read_telemetry(board)
    (note,) = found.notes
    assert re.fullmatch(
        rf"NPU load: /{DEBUGFS}/load .*{reason}.*; /proc/rknpu/load is not there", note
    )
    assert found.npu_load == ()
    unchanged = [name for name in Hardware.__slots__ if name not in {"npu_load", "notes"}]
    assert [getattr(found, name) for name in unchanged] == [
        getattr(before, name) for name in unchanged
    ]


NPU = "sys/class/devfreq/fdab0000.npu"
DDR = "sys/class/devfreq/dmc"


@pytest.mark.parametrize(
    ("path", "text", "expected", "notes"),
    [
        pytest.param(f"{NPU}/cur_freq", "0\n", {"npu_hz": 10**9}, [], id="the driver's clock"),
        pytest.param(
            f"{NPU}/available_frequencies", "x\n", {"npu_max_hz": 10**9}, [], id="the limit"
        ),
        pytest.param(
            f"{DDR}/cur_freq", "<none>\n", {"ddr_hz": 2_112_000_000}, [], id="clock in the load"
        ),
        pytest.param(
            f"{DEBUGFS}/version", "v\n", {"driver_version": "0.9.8"}, [], id="the module's version"
        ),
        pytest.param(
            f"{DDR}/load",
            "101@2112000000Hz\n",
            {"ddr_load": None},
            [f"DDR load: /{DDR}/load says 101 %"],
            id="a load over 100 %",
        ),
        pytest.param(
            f"{DDR}/governor",
            "a b\n",
            {"ddr_governor": ""},
            [f"DDR governor: /{DDR}/governor is not understood: 'a b'"],
            id="two governors",
        ),
        pytest.param(
            "proc/meminfo",
            "MemAvailable:  12 kB\nMemTotal:  16",
            {"memory_total_bytes": None, "memory_available_bytes": 12288},
            ["memory: /proc/meminfo has no MemTotal"],
            id="half a row of memory",
        ),
        pytest.param(
            "proc/device-tree/compatible",
            "a,b\0rockchip,\0",
            {"soc": "", "npu_hz": 10**9},
            ["SoC: /proc/device-tree/compatible names no SoC: 'rockchip,'"],
            id="a SoC without a name",
        ),
    ],
)
def test_a_second_source_answers_where_there_is_one(
    board: Path, path: str, text: str, expected: dict[str, object], notes: list[str]
) -> None:
    (board / path).write_text(text, encoding="utf-8")
    found = read_telemetry(board)
    assert {name: getattr(found, name) for name in expected} == expected
    assert list(found.notes) == notes


def test_the_npu_is_not_powered_up_to_read_its_clock(board: Path) -> None:
    write(board, "RK3588", BoardReadings(powered=False))
    (board / NPU / "cur_freq").unlink()
    found = read_telemetry(board)
    assert found.npu_hz is None
    assert any("not powered up to ask" in note for note in found.notes)


@pytest.mark.parametrize(
    ("zones", "expected"),
    [
        pytest.param({"soc-thermal": "43000", "npu-thermal": "61000"}, 61.0, id="the NPU's first"),
        pytest.param({"soc-thermal": "43000"}, 43.0, id="else the SoC's"),
        pytest.param({"npu-thermal": "-274000", "soc-thermal": "43000"}, 43.0, id="a sensor off"),
        pytest.param({"npu_thermal": "-5500"}, -5.5, id="winter, and another spelling"),
        pytest.param({"gpu-thermal": "43000"}, None, id="neither"),
        pytest.param({"npu-thermal": "hot"}, None, id="no number"),
        pytest.param({}, None, id="no zone"),
    ],
)
def test_the_temperature_is_the_npu_s_or_the_soc_s(
    board: Path, zones: dict[str, str], expected: float | None
) -> None:
    shutil.rmtree(board / "sys/class/thermal")
    for number, (kind, temp) in enumerate(zones.items()):
        folder = board / f"sys/class/thermal/thermal_zone{number}"
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "temp").write_text(f"{temp}\n")
    found = read_telemetry(board)
    assert found.temperature_c == expected
    assert bool(found.notes) is (expected is None)


def test_a_zone_without_a_name_hides_no_other(board: Path) -> None:
    (board / "sys/class/thermal/thermal_zone0/type").unlink()
    assert read_telemetry(board).temperature_c == 45.0


@pytest.mark.parametrize(
    ("compatible", "soc", "read"),
    [
        pytest.param("radxa,rock-5a\0rockchip,rk3588s\0", "RK3588S", True, id="a revision"),
        pytest.param("rockchip,rk3588\0vendor,board\0", "RK3588", True, id="an odd order"),
        pytest.param("rockchip,rk3566\0", "RK3566", True, id="a SoC that is not listed"),
        pytest.param("qemu,virt\0", "VIRT", True, id="another maker"),
        pytest.param("\0\0", "", True, id="nothing but ends"),
    ],
)
def test_any_npu_folder_serves_a_soc_that_is_not_listed(
    board: Path, compatible: str, soc: str, read: bool
) -> None:
    (board / "proc/device-tree/compatible").write_text(compatible)
    found = read_telemetry(board)
    assert (found.soc, read_soc(board)) == (soc, soc)
    assert (found.npu_hz == 10**9) is read


def test_the_soc_s_own_npu_folder_goes_before_another(board: Path) -> None:
    other = board / "sys/class/devfreq/00000000.npu"
    other.mkdir()
    (other / "cur_freq").write_text("1\n")
    assert read_telemetry(board).npu_hz == 10**9


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may read everything; lay that aside."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_without_root_the_load_is_unknown_and_a_note_says_so() -> None:
    with TemporaryDirectory() as folder:  # pytest's own is closed to others
        root = Path(folder)
        root.chmod(0o755)
        write(root / "board", "RK3588", BoardReadings(load_percent=(1, 2, 3)))
        debugfs, private = root / "board/sys/kernel/debug", root / "board" / NPU / "cur_freq"
        debugfs.chmod(0)  # the kernel mounts it 0700 and root's
        private.chmod(0)
        with unprivileged():
            found = read_telemetry(root / "board")
        debugfs.chmod(0o755)
    assert (found.npu_load, found.npu_hz) == ((), None)
    assert (found.driver_version, found.npu_max_hz) == ("0.9.8", 10**9)
    assert found.notes == (
        f"NPU clock: /{NPU}/cur_freq may not be read by this user; /{DEBUGFS}/power needs root; "
        "/proc/rknpu/power is not there",
        f"NPU load: /{DEBUGFS}/load needs root; /proc/rknpu/load is not there",
    )


@pytest.mark.parametrize("there", ["nothing", "a folder", "a file"])
def test_a_machine_without_any_of_it_says_so_for_each_figure(tmp_path: Path, there: str) -> None:
    if there == "a folder":
        (tmp_path / "root").mkdir()
    elif there == "a file":
        (tmp_path / "root").write_text("x", encoding="utf-8")
    found = read_telemetry(tmp_path / "root")
    assert found == Hardware(notes=found.notes)
    figures = {note.partition(":")[0] for note in found.notes}
    assert figures == {
        "SoC",
        "NPU clock",
        "highest NPU clock",
        "NPU load",
        "DDR clock, governor and load",
        "CPU clocks",
        "temperature",
        "driver version",
        "memory",
        "free memory",
    }


def test_the_answer_crosses_processes() -> None:
    found = read_telemetry(DATA / "rk3588")
    assert pickle.loads(pickle.dumps(found)) == found


def assert_sane(found: Hardware) -> None:
    """Every figure is unknown, or one that a board can have; every word is printable."""
    counts = (
        found.npu_hz,
        found.npu_max_hz,
        found.ddr_hz,
        found.memory_total_bytes,
        found.memory_available_bytes,
    )
    assert all(count is None or 0 <= count < 2**63 for count in counts)
    percents = (*found.npu_load, *([] if found.ddr_load is None else [found.ddr_load]))
    assert all(0 <= percent <= 100 for percent in percents)
    if found.temperature_c is not None:
        assert math.isfinite(found.temperature_c)
        assert -60 <= found.temperature_c <= 200
    words = (found.soc, found.ddr_governor, found.npu_governor, found.driver_version, *found.notes)
    assert all(word.isascii() and (word.isprintable() or not word) for word in words)
    assert all(len(word) < 500 for word in words)


# Whole files of anything, and pieces of the real formats put together wrongly.
PIECES = (
    *(b"NPU load: ", b" Core0: ", b"48%,", b"7@528000000Hz", b"9" * 400, b"-", b"\n", b" "),
    *(b"MemTotal: ", b" kB\n", b"rockchip,", b"rk3588", b"\xff\xfe", b"v0.9.8", b"1000000000"),
    b"\0",
)
ANYTHING = st.one_of(
    st.binary(max_size=64), st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)
)


@given(data=st.data())
def test_any_bytes_in_any_file_are_read_without_an_error(data: st.DataObject) -> None:
    platform = data.draw(st.sampled_from(list(SOCS)))
    files = tree(platform, BoardReadings(proc_rknpu=True))
    read_ones = sorted(name for name in files if not name.startswith("sys/firmware"))
    bad = data.draw(st.dictionaries(st.sampled_from(read_ones), ANYTHING, min_size=1))
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bad.get(name, text.encode()))
        assert_sane(read_telemetry(root))


@given(content=ANYTHING)
def test_a_board_of_nothing_but_one_content_is_read_without_an_error(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for name in tree("RK3588", BoardReadings(proc_rknpu=True)):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert_sane(read_telemetry(root))


def test_the_fastest_cores_are_those_of_the_highest_capacity(tmp_path: Path) -> None:
    assert fastest_cores(tmp_path, {3, 1, 2}) == (1, 2, 3)  # a PC does not tell
    for core, capacity in enumerate((406, 406, 1003, 1024)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
    assert fastest_cores(tmp_path, range(4)) == (2, 3)
    assert fastest_cores(tmp_path, {0, 1}) == (0, 1)  # of those that the process may use
