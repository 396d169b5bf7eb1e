"""The collector on whole trees: this machine, an empty one, and hostile ones."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from rkserve.api.openai.models import board_entry
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.doctor.collect import Checkup, collect, free_bytes, reported_facts, this_machine
from rkserve.doctor.facts import DoctorReport
from rkserve.doctor.rules import report_on
from tests.support.boards.doctor_board import DoctorBoard
from tests.support.sampler import Sampler

pytestmark = pytest.mark.slow


def files_of(root: Path) -> list[Path]:
    return sorted(one for one in root.rglob("*") if one.is_file() or one.is_symlink())


def test_an_empty_tree_has_findings_and_no_traceback(tmp_path: Path) -> None:
    report = report_on(collect(Checkup(root=tmp_path)))
    assert [one.id for one in report.findings] == ["soc-unknown"]


def test_this_machine_can_be_checked() -> None:
    process, clock, head = this_machine(None)
    assert head is None
    checkup = Checkup(process=process, clock=clock, free_bytes=free_bytes)
    assert report_on(collect(checkup)).facts.kernel == os.uname().release


@pytest.mark.parametrize("kind", ["garbage", "empty", "folder", "gone", "loop", "pipe"])
def test_any_file_may_be_hostile(tmp_path: Path, kind: str, sampled: Sampler) -> None:
    """Single files of a board in turn; the report can always be written and read again."""
    board = DoctorBoard(tmp_path / "board")
    noise = random.Random(5)
    for file in sampled(files_of(board.root)):
        kept = file.readlink() if file.is_symlink() else file.read_bytes()
        owner = file.lstat()
        file.unlink()
        spoil(file, kind, noise)
        report = board.report()
        assert DoctorReport.model_validate_json(report.model_dump_json()) == report
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
        if isinstance(kept, Path):
            file.symlink_to(kept)
        else:
            file.write_bytes(kept)
            file.chmod(owner.st_mode & 0o7777)
            os.chown(file, owner.st_uid, owner.st_gid)
    assert board.report().findings == ()


def spoil(file: Path, kind: str, noise: random.Random) -> None:
    if kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind != "gone":
        file.write_bytes(noise.randbytes(700) if kind == "garbage" else b"")


def test_a_render_node_is_found_by_its_driver_too(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    board.drop("dev/dri/by-path")
    assert [one.id for one in board.report().findings] == ["node-missing"]
    board.link("sys/class/drm/renderD129/device/driver", "../../../../bus/platform/drivers/RKNPU")
    board.link(
        "sys/class/drm/renderD128/device/driver", "../../../../bus/platform/drivers/panfrost"
    )
    assert board.report().findings == ()


def row(board: DoctorBoard, **changes: object) -> dict[str, object]:
    """Return a row of GET /v1/boards of a board that serves."""
    hardware = board.facts().hardware
    assert hardware is not None
    report = BoardReport(
        board_id="rk@one",
        model="Qwen2.5-1.5B-Instruct",
        state=BoardState.READY,
        release="1.3.0",
        platform="RK3588",
        decode_tokens=1000,
        decode_ms=66_000.0,
        own_bytes=1_690_000_000,
        hardware=hardware,
    )
    entry = board_entry(report, ("closed", ""))
    return json.loads(json.dumps({**entry, **changes}))  # type: ignore[no-any-return]


def test_a_report_of_a_healthy_board_has_no_findings(tmp_path: Path) -> None:
    report = report_on(reported_facts(row(DoctorBoard(tmp_path / "board"))))
    assert (report.board, report.findings) == ("rk@one", ())
    assert report.facts.measured is not None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        pytest.param({"state": "hung", "reason": "no token"}, "board-down", id="it hangs"),
        pytest.param(
            {"circuit": {"state": "open", "reason": "3 failures"}}, "board-avoided", id="avoided"
        ),
        pytest.param({"decode_ms": 140_000.0}, "slow", id="half as fast"),
        pytest.param({"hardware": {"soc": 5}}, "unreadable", id="no hardware"),
        pytest.param({"hardware": "x"}, "unreadable", id="no object"),
    ],
)
def test_a_report_of_a_cluster_is_checked_by_the_same_rules(
    tmp_path: Path, changes: dict[str, object], found: str
) -> None:
    entry = row(DoctorBoard(tmp_path / "board"), **changes)
    assert [one.id for one in report_on(reported_facts(entry)).findings] == [found]


@pytest.mark.parametrize("state", ["loading", "ready", "asleep", "joining", "recovering"])
def test_a_board_that_sleeps_or_loads_is_healthy(tmp_path: Path, state: str) -> None:
    entry = row(DoctorBoard(tmp_path / "board"), state=state)
    assert report_on(reported_facts(entry)).findings == ()


def test_a_report_from_a_newer_router_is_read(tmp_path: Path) -> None:
    entry = row(DoctorBoard(tmp_path / "board"))
    assert isinstance(entry["hardware"], dict)
    entry["hardware"]["fan_rpm"] = 900
    assert report_on(reported_facts(entry)).findings == ()
    assert report_on(reported_facts({"id": "x"})).findings == ()


def test_few_tokens_and_batches_say_nothing_about_speed(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    for changes in ({"decode_tokens": 100, "decode_ms": 1e6}, {"n_batch": 4, "decode_ms": 1e6}):
        assert reported_facts(row(board, **changes)).measured is None
