"""``rkserve doctor`` at a terminal: output, JSON, exit codes, and wrong usage."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from subprocess import run

import httpx
import pytest

from rkserve.cli.context import Exit
from rkserve.doctor.facts import DoctorReport, FleetReport
from rkserve.native.sim.build import ensure_built
from tests.support.boards.doctor_board import LIBRARY, DoctorBoard, elf
from tests.support.cluster.fake_control import FakeControl, ok
from tests.support.http.terminal import Terminal
from tests.support.paths import PROJECT


@pytest.fixture
def board(tmp_path: Path) -> DoctorBoard:
    return DoctorBoard(tmp_path / "board")


def test_a_healthy_tree_is_said_to_be_so(rkserve: Terminal, board: DoctorBoard) -> None:
    code, out, _ = rkserve(
        "doctor", "--root", str(board.root), "--model", str(board.model), "--user", "ray"
    )
    assert (code, out) == (
        Exit.DONE,
        "no findings: RK3588, driver 0.9.8, RKLLM 1.3.0, model Qwen2.5-1.5B-Instruct\n",
    )


def test_warnings_alone_exit_with_0(rkserve: Terminal, board: DoctorBoard) -> None:
    board.sensors(ddr_mhz=528)
    code, out, _ = rkserve("doctor", "--root", str(board.root))
    assert code == Exit.DONE
    assert out.splitlines() == [
        "warning ddr-slow: The DDR clock is 528 of 2112 MHz (governor dmc_ondemand), which halves "
        "decoding on some boards.",
        "    seen: /sys/class/devfreq/dmc/cur_freq: 528000000",
        "    mend: echo performance | sudo tee /sys/class/devfreq/dmc/governor",
        "0 error, 1 warning, 0 unknown: RK3588, driver 0.9.8, RKLLM 1.3.0",
    ]


def test_an_error_exits_with_1_and_json_is_the_report(
    rkserve: Terminal, board: DoctorBoard
) -> None:
    board.drop(LIBRARY)
    code, out, err = rkserve("doctor", "--json", "--root", str(board.root))
    assert (code, err) == (Exit.FAILED, "")
    report = DoctorReport.model_validate_json(out)
    assert [one.id for one in report.findings] == ["library-missing"]
    assert report.facts.hardware is not None
    assert report.facts.hardware.soc == "RK3588"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--root", "/nowhere"], id="no such root"),
        pytest.param(["--root", "{root}", "--head", "http://head:8000"], id="head of a tree"),
        pytest.param(["--root", "{root}", "--measure"], id="no model to measure"),
        pytest.param(["--head", "head:8000"], id="no URL"),
        pytest.param(["--user", "absent-user"], id="no such user"),
        pytest.param(["--root", "{root}", "--fleet"], id="a tree and a cluster"),
    ],
)
def test_wrong_usage_exits_with_2(rkserve: Terminal, board: DoctorBoard, words: list[str]) -> None:
    given = [word.replace("{root}", str(board.root)) for word in words]
    assert rkserve("doctor", *given)[0] == Exit.USAGE


@pytest.mark.engine
def test_a_measurement_is_made_and_shown(
    rkserve: Terminal, board: DoctorBoard, tmp_path: Path
) -> None:
    folder = tmp_path / "Qwen2.5-1.5B-Instruct"
    shutil.copytree(PROJECT / "models" / "sim-chat", folder)
    code, out, err = rkserve(
        *("doctor", "--root", str(board.root), "--library", str(ensure_built("1.3.0"))),
        *("--model", str(folder), "--seconds", "0.2"),
        RKSIM_PROFILE="rk3588-qwen2.5-1.5b-w8a8",
        RKSIM_TIME_SCALE="3",
    )
    assert (code, err.strip()) == (
        Exit.DONE,
        "Measuring for 0 s after the model is loaded ...",
    )
    assert out.startswith("warning slow: decode ")
    assert "expected 16.7: no cause found in clocks or heat." in out
    assert out.rstrip().endswith(" tokens/s of 16.7")


def test_a_model_with_errors_is_not_measured(rkserve: Terminal, board: DoctorBoard) -> None:
    board.raw(LIBRARY, elf("1.4.0"))
    library = str(board.root / LIBRARY)
    root = ("--root", str(board.root))
    _, out, err = rkserve("doctor", *root, "--library", library, "--model", str(board.model))
    assert err.strip() == "Not measured: the library or the model folder has errors."
    assert "library-release" in out


BOARDS = [
    {"id": "rk@one", "state": "ready", "release": "1.3.0", "hardware": {"soc": "RK3588"}},
    {
        "id": "rk@two",
        "state": "hung",
        "reason": "no token for 60 s",
        "release": "1.3.0",
        "hardware": {"soc": "RK3588", "temperature_c": 91.0, "driver_version": "0.9.8"},
    },
]


def test_a_cluster_is_checked_board_by_board(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/boards", ok({"data": BOARDS}))
    code, out, err = rkserve("doctor", "--fleet")
    assert (code, err) == (Exit.FAILED, "")
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "rk@one: no findings: RK3588, RKLLM 1.3.0",
        "error board-down: The board is hung: no token for 60 s.",
        "warning hot: The SoC has 91 degrees Celsius; clocks fall soon above 80.",
        "rk@two: 1 error, 1 warning, 0 unknown: RK3588, driver 0.9.8, RKLLM 1.3.0",
    ]


def test_a_cluster_in_json_is_a_fleet_report(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/boards", ok({"data": BOARDS[:1]}))
    code, out, _ = rkserve("doctor", "--fleet", "--json")
    assert code == Exit.DONE
    assert [one.board for one in FleetReport.model_validate_json(out).boards] == ["rk@one"]


def test_a_cluster_that_is_not_there_exits_with_4(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/boards", httpx.ConnectError("refused"))
    assert rkserve("doctor", "--fleet")[0] == Exit.UNREACHABLE


def test_this_machine_is_checked_without_ray_and_without_a_library() -> None:
    script = """if True:
        import sys
        from rkserve.cli import main
        sys.argv = ["rkserve", "doctor", "--json"]
        try:
            main()
        except SystemExit as exc:
            assert exc.code in (0, 1), exc.code
        loaded = {"ray", "_cffi_backend", "numpy"} & set(sys.modules)
        assert not loaded, loaded
    """
    done = run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert DoctorReport.model_validate_json(done.stdout).facts.process is not None
