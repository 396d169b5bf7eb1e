"""Usage that outlives its Router, on the disk of a node, and the usage of all Routers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rkserve.core.answer_metrics import (
    DAY_S,
    DAYS_KEPT,
    DayUsage,
    RouterUsage,
    UsageByDay,
    UsageReport,
)
from rkserve.router import usage_records
from rkserve.router.usage_records import FILE, UsageFile, UsageRecords
from tests.support.boards.fake_boards import eventually
from tests.support.paths import PROJECT

TODAY = 20_000
T = TypeVar("T")


@dataclass
class Node:
    """A node whose Routers may end and be started again."""

    folder: Path | None
    today: int = TODAY
    open: list[UsageRecords] = field(default_factory=list)

    def router(self, name: str = "0", peers: Any = None) -> tuple[UsageByDay, UsageRecords]:
        """Start a Router."""
        counted = UsageByDay(lambda: self.today * DAY_S + 1.0)
        self.open.append(UsageRecords(counted, name, self.folder, peers))
        return counted, self.open[-1]


def done(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60.0))


def call(counted: UsageByDay, key: str = "alice", completion: int = 3) -> None:
    """Count one call."""
    counts = counted.of(key)
    counts.requests += 1
    counts.completion_tokens += completion


@dataclass
class Peers:
    """The other Routers."""

    routers: Sequence[UsageRecords] = ()
    silent: Sequence[str] = ()
    asked: list[int] = field(default_factory=list)

    async def usage(
        self, first_day: int, timeout_s: float
    ) -> tuple[Sequence[RouterUsage], Sequence[str]]:
        assert timeout_s > 0
        self.asked.append(first_day)
        return [await one.own(first_day) for one in self.routers], self.silent


def test_a_successor_has_the_days_of_a_router_that_has_ended(tmp_path: Path) -> None:
    async def ends() -> UsageReport:
        node = Node(tmp_path / "usage", TODAY - 1)
        counted, records = node.router()
        call(counted)
        node.today = TODAY
        call(counted)
        await records.close()
        counted, records = node.router()
        call(counted)
        call(counted, "bob")
        report = await records.report(2)
        await records.close()
        return report

    report = done(ends())
    assert set(report.days) == {
        DayUsage(TODAY - 1, "alice", 1, 0, 3),
        DayUsage(TODAY, "alice", 2, 0, 6),
        DayUsage(TODAY, "bob", 1, 0, 3),
    }
    assert (report.up, report.silent, report.unstored) == (("0",), (), ())


def test_routers_of_one_node_and_of_others_are_added_once(tmp_path: Path) -> None:
    async def ask() -> tuple[UsageReport, list[int]]:
        here, there = Node(tmp_path / "here"), Node(tmp_path / "there")
        peers = Peers(silent=("7",))
        counted, records = here.router("0", peers)
        neighbour, distant = here.router("1"), there.router("0@rock")
        peers.routers = neighbour[1], distant[1]
        for one in (counted, neighbour[0], distant[0], distant[0]):
            call(one)
        for _ in range(2):
            report = await records.report(8)
        for each in (*here.open, *there.open):
            await each.close()
        return report, peers.asked

    report, asked = done(ask())
    assert report.days == [DayUsage(TODAY, "alice", 4, 0, 12)]
    assert (set(report.up), report.silent) == ({"0", "1", "0@rock"}, ("7",))
    assert set(asked) == {TODAY - 7}


def test_only_the_days_that_are_asked_for_are_in_the_report(tmp_path: Path) -> None:
    async def ask() -> list[list[int]]:
        node = Node(tmp_path / "usage")
        counted, records = node.router()
        for day in (TODAY + 1, TODAY - 2, TODAY - 1, TODAY):
            node.today = day
            call(counted)
        found = [sorted(row.day for row in (await records.report(days)).days) for days in (1, 2, 9)]
        await records.close()
        return found

    expected = [[TODAY], [TODAY - 1, TODAY], [TODAY - 2, TODAY - 1, TODAY]]
    assert done(ask()) == expected


def test_without_a_folder_usage_is_that_since_the_start() -> None:
    async def ask() -> UsageReport:
        counted, records = Node(None).router("2")
        call(counted)
        await records.report(8)
        report = await records.report(8)
        await records.close()
        return report

    report = done(ask())
    assert report.days == [DayUsage(TODAY, "alice", 1, 0, 3)]
    assert report.unstored == ("2",)


@pytest.mark.parametrize("spoil", ["damaged", "no folder"])
def test_a_disk_that_fails_loses_nothing_and_is_used_again_once_it_works(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "usage"

    def break_it() -> None:
        if spoil == "damaged":
            UsageFile(folder).close()
            (folder / FILE).write_bytes(b"x" * 8192)
        else:
            folder.write_text("a file in its place")

    def mend_it() -> None:
        if spoil == "damaged":
            for path in folder.iterdir():
                path.unlink()
        else:
            folder.unlink()

    async def go_on() -> list[UsageReport]:
        counted, records = Node(folder).router()
        found = []
        break_it()
        for _ in range(2):
            call(counted)
            found.append(await records.report(8))
        mend_it()
        found.append(await records.report(8))
        await records.close()
        return found

    reports = done(go_on())
    assert [one.days[0].requests for one in reports] == [1, 2, 2]
    assert [one.unstored for one in reports] == [("0",), ("0",), ()]
    assert len([one for one in caplog.records if "usage cannot be stored" in one.message]) == 1
    stored = UsageFile(folder)
    assert [row.requests for row in stored.rows(0)] == [2]
    stored.close()


def test_a_file_that_fails_after_it_was_open_loses_nothing(tmp_path: Path) -> None:
    async def go_on() -> list[UsageReport]:
        counted, records = Node(tmp_path / "usage").router()
        call(counted)
        found = [await records.report(8)]
        assert records._file is not None
        records._file._database.execute("PRAGMA query_only = ON")
        call(counted)
        found += [await records.report(8), await records.report(8)]
        await records.close()
        return found

    first, failed, again = done(go_on())
    assert first.days[0].requests == 1
    assert failed.unstored == ("0",)
    assert again.days == [DayUsage(TODAY, "alice", 2, 0, 6)]
    assert again.unstored == ()


def test_the_oldest_days_go_by_their_number_whatever_the_clock_is(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "usage")
    days = [0, *range(TODAY, TODAY + DAYS_KEPT), 99_999]
    for day in days:
        file.add([DayUsage(day, "a", 1)])
    assert [row.day for row in file.rows(0)] == days[2:]
    file.close()


def test_a_cancelled_question_loses_nothing(tmp_path: Path) -> None:
    async def hang_up() -> UsageReport:
        counted, records = Node(tmp_path / "usage").router()
        call(counted)
        asking = asyncio.ensure_future(records.own(TODAY))
        await eventually(lambda: not counted.rows())
        asking.cancel()
        report = await records.report(1)
        await records.close()
        return report

    assert done(hang_up()).days == [DayUsage(TODAY, "alice", 1, 0, 3)]


def test_usage_is_stored_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_records, "SAVE_S", 0.001)

    async def follow() -> tuple[DayUsage, ...]:
        counted, records = Node(tmp_path / "usage").router()
        following = asyncio.ensure_future(records.follow())
        call(counted)
        await eventually(lambda: not counted.rows())
        following.cancel()
        await records.close()
        file = UsageFile(tmp_path / "usage")
        rows = file.rows(0)
        file.close()
        return rows

    assert done(follow()) == (DayUsage(TODAY, "alice", 1, 0, 3),)


CRASH = """
import os, sys
from pathlib import Path
from rkserve.core.answer_metrics import DayUsage
from rkserve.router.usage_records import UsageFile
file = UsageFile(Path(sys.argv[1]))
file.add([DayUsage(1, "alice", 1)])
file._database.execute("BEGIN IMMEDIATE")
file._database.execute("UPDATE usage SET requests = 9")
os._exit(9)
"""


@pytest.mark.slow
def test_a_router_that_is_killed_leaves_what_it_had_stored(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    words = [sys.executable, "-c", CRASH, str(tmp_path / "usage")]
    assert subprocess.run(words, check=False, env=env).returncode == 9
    file = UsageFile(tmp_path / "usage")
    assert file.rows(0) == (DayUsage(1, "alice", 1),)
    file.close()
