"""After a crash at any change of its files rkserve finds the state before it or after it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.cluster.crash_points import Disk, Loss, Record, Replay, disks, recorded
from tests.support.cluster.crash_work import WORKS
from tests.support.sampler import Sampler

pytestmark = pytest.mark.slow


# Of ``make test``; the other formats are tried by ``make test-long``.
QUICK = ("ledger", "artifacts", "probe's report")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in WORKS],
)
def test_nothing_confirmed_is_lost_and_nothing_is_there_by_half(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], sampled: Sampler
) -> None:
    records = recorded(tmp_path, "tests.support.cluster.crash_work", name)
    tried, wrong = Counter[Loss](), list[str]()
    every = list(disks(records))
    for number, disk in sampled(enumerate(every)):
        place = tmp_path / f"disk-{number}"
        disk.write(place)
        tried[disk.loss] += 1
        try:
            WORKS[name].check(place, disk.acks)
        except Exception as exc:  # noqa: BLE001 - all of them are shown together
            last = records[disk.at]
            wrong.append(f"after {last.kind} {last.path} {last.offset}, {disk.loss.value}: {exc!r}")
    with capsys.disabled():
        print(f"\n{name}: {len(records)} changes, {sum(tried.values())} disks")  # noqa: T201
    assert not wrong, f"{len(wrong)} of {sum(tried.values())}:\n" + "\n".join(wrong[:20])
    assert len(records) > 30
    assert {Loss.NOTHING, Loss.NAMES, Loss.HALF} <= {disk.loss for disk in every}


def log(*changes: tuple[str, int, str, str, bytes]) -> list[Record]:
    return [Record(kind, inode, 0, path, other, data) for kind, inode, path, other, data in changes]


WRITTEN = [("c", 1, "f.new", "", b""), ("w", 1, "f.new", "", b"content")]
MOVED = ("r", 0, "f.new", "f", b"")


@pytest.mark.parametrize(
    ("changes", "loss", "left"),
    [
        pytest.param([*WRITTEN, MOVED], Loss.NOTHING, {"f": b"content"}, id="killed"),
        pytest.param([*WRITTEN, MOVED], Loss.DATA, {"f": b""}, id="a name without its data"),
        pytest.param([*WRITTEN, MOVED], Loss.NAMES, {}, id="a name that was not flushed"),
        pytest.param(
            [*WRITTEN, ("s", 1, "f.new", "", b""), MOVED],
            Loss.DATA,
            {"f": b"content"},
            id="flushed data",
        ),
        pytest.param(
            [*WRITTEN, ("s", 9, "", "", b""), MOVED],
            Loss.BOTH,
            {"f.new": b""},
            id="a flushed name",
        ),
        pytest.param(WRITTEN, Loss.HALF, {"f.new": b"con"}, id="half of a write"),
        pytest.param(
            [
                *WRITTEN,
                ("d", 0, "d", "", b""),
                ("r", 0, "f.new", "d/f", b""),
                ("s", 9, "d", "", b""),
            ],
            Loss.NAMES,
            {},
            id="a folder that was not flushed",
        ),
    ],
)
def test_a_disk_has_what_the_crash_leaves(
    changes: list[tuple[str, int, str, str, bytes]], loss: Loss, left: dict[str, bytes]
) -> None:
    replay = Replay()
    for one in log(*changes):
        replay.apply(one)
    assert replay.disk(0, loss).files == left


def test_every_change_of_a_file_is_recorded(tmp_path: Path) -> None:
    records = recorded(tmp_path, "tests.support.cluster.crash_work", "staged files")
    kinds = {one.kind for one in records}
    assert kinds >= {"c", "w", "s", "r", "u", "d"}
    there = {
        str(file.relative_to(tmp_path / "root")): file.read_bytes()
        for file in (tmp_path / "root").rglob("*")
        if file.is_file() and file.name != "acks"
    }
    assert replayed(records).files == there


def replayed(records: list[Record]) -> Disk:
    replay = Replay()
    for one in records:
        replay.apply(one)
    return replay.disk(len(records), Loss.NOTHING)
