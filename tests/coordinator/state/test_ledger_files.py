"""Backups of a ledger: when they are made, which are kept, and the way back to one."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rkserve.control import state_changes
from rkserve.control.codec import read_desired
from rkserve.coordinator.state.ledger import MIGRATIONS, Ledger
from rkserve.coordinator.state.ledger_files import (
    BACKUP_S,
    BACKUPS,
    FILE,
    KEPT,
    NEWEST,
    BackupKeeper,
    LedgerBackup,
    back_up,
    backups_of,
    copy_ledger,
    newest_intact,
    restore_ledger,
    surplus,
    way_back,
)
from rkserve.core.desired_state import Desired
from rkserve.core.errors import LedgerFailed

NOW_S = 1.7e9
KNOWN = len(MIGRATIONS)


def labelled(label: str, before: Desired | None = None) -> Desired:
    return state_changes.set_label(before or Desired(), "m", label)


def label_in(file: Path) -> str:
    """The label in a ledger that nothing uses."""
    with closing(sqlite3.connect(file)) as database:
        (value,) = database.execute("SELECT value FROM desired").fetchone()
    return read_desired(value).weights_of("m").label


def test_a_backup_of_an_open_ledger_is_whole_and_for_its_account_only(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=labelled("one"))  # it is in the log still
        made = back_up(tmp_path, NOW_S)
        ledger.write(desired=labelled("two", labelled("one")))
    assert made.path == tmp_path / BACKUPS / "ledger-000001-20231114T221320Z.sqlite3"
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert [*made.path.parent.iterdir()] == [made.path]
    assert label_in(made.path) == "one"
    assert backups_of(tmp_path) == [made]


@pytest.mark.parametrize(
    ("ages_s", "kept"),
    [
        pytest.param([60 * n for n in range(8)], 4, id="a busy minute after another"),
        pytest.param([3600 * n for n in range(30)], KEPT, id="hour after hour"),
        pytest.param([0] * 30, NEWEST, id="a clock that stands"),
        pytest.param([0, *[7 * 86400 + 3600 * n for n in range(5)]], 6, id="few of long ago"),
    ],
)
def test_the_newest_backups_are_kept_and_one_of_each_hour_before(
    ages_s: list[int], kept: int
) -> None:
    now_s = 3600 * 470_000 + 3599
    backups = [
        LedgerBackup(len(ages_s) - at, now_s - age_s, Path(str(at)))
        for at, age_s in enumerate(ages_s)
    ]
    left = [one for one in backups if one not in surplus(backups)]
    assert left[:NEWEST] == backups[:NEWEST]
    assert len(left) == kept
    hours = [one.made_s // 3600 for one in left[NEWEST - 1 :]]
    assert len(hours) == len(set(hours))


def test_no_more_than_ten_are_kept_whatever_the_clock_says(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    for number in range(15):
        # It is set back in between: the newest by its number is never the one that goes.
        made = back_up(tmp_path, NOW_S + number * 7200 * (-1) ** number)
        assert backups_of(tmp_path)[0] == made
    assert len(backups_of(tmp_path)) <= KEPT


class FixedClock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


async def test_a_backup_is_made_after_a_change_and_not_more_often_than_once_a_minute(
    tmp_path: Path,
) -> None:
    clock, made = FixedClock(), list[LedgerBackup]()
    with closing(Ledger.open(tmp_path)) as ledger:
        keeper = BackupKeeper(ledger, clock, made.append)
        await keeper.look()
        assert len(made) == 1
        ledger.write(desired=labelled("one"))
        clock.now_s += BACKUP_S - 1
        await keeper.look()
        assert len(made) == 1
        clock.now_s += 1
        await keeper.look()
        assert [label_in(one.path) for one in made[1:]] == ["one"]
        clock.now_s += 1e6
        await keeper.look()
        assert len(made) == 2, "nothing has changed"
        ledger.write(desired=labelled("two", labelled("one")))
        clock.now_s -= 1e8  # a clock that was set back
        await keeper.look()
        assert len(made) == 3
        # A successor makes none in the same minute.
        await BackupKeeper(ledger, clock, made.append).look()
        assert len(made) == 3


async def test_a_backup_that_failed_is_tried_again(tmp_path: Path) -> None:
    made = list[LedgerBackup]()
    with closing(Ledger.open(tmp_path)) as ledger:
        (tmp_path / BACKUPS).write_text("in the way", encoding="utf-8")
        keeper = BackupKeeper(ledger, FixedClock(), made.append)
        with pytest.raises(LedgerFailed, match="Backups"):
            await keeper.look()
        (tmp_path / BACKUPS).unlink()
        await keeper.look()
    assert len(made) == 1


def test_a_damaged_backup_is_passed_over(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        good = back_up(tmp_path, NOW_S)
        ledger.write(desired=labelled("one"))
        bad = back_up(tmp_path, NOW_S + 60)
    content = bytearray(bad.path.read_bytes())
    content[4096:8192] = b"\xa5" * 4096
    bad.path.write_bytes(content)
    assert newest_intact(tmp_path) == good
    assert f"rkserve restore {good.path}" in way_back(tmp_path)


def test_a_copy_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    Ledger.open(tmp_path).close()
    target = tmp_path / "copy"
    copy_ledger(tmp_path / FILE, target)
    before = target.read_bytes()
    with pytest.raises(LedgerFailed, match="cannot be copied"):
        copy_ledger(tmp_path / "no ledger", target)
    assert target.read_bytes() == before
    assert not (tmp_path / "no ledger").exists()


def test_a_restored_ledger_is_that_of_the_backup_and_the_earlier_one_is_kept(
    tmp_path: Path,
) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=labelled("one"))
        backup = back_up(tmp_path, NOW_S)
        ledger.write(desired=labelled("two", labelled("one")))
        log = (tmp_path / f"{FILE}-wal").read_bytes()
        with pytest.raises(LedgerFailed, match=rf"process {os.getpid()}\). End the application"):
            restore_ledger(backup.path, tmp_path, KNOWN, NOW_S)
    (tmp_path / f"{FILE}-wal").write_bytes(log)  # as after a kill
    aside = restore_ledger(backup.path, tmp_path, KNOWN, NOW_S)
    assert aside is not None
    assert (tmp_path / f"{aside.name}-wal").read_bytes() == log
    assert label_in(aside) == "two"
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == labelled("one")
        ledger.write(desired=labelled("three", labelled("one")))


def test_a_backup_is_restored_to_a_new_disk(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path / "old")) as ledger:
        ledger.write(desired=labelled("one"))
        backup = back_up(tmp_path / "old", NOW_S)
    assert restore_ledger(backup.path, tmp_path / "new", KNOWN, NOW_S) is None
    with closing(Ledger.open(tmp_path / "new")) as ledger:
        assert ledger.desired() == labelled("one")


def test_nothing_but_an_intact_ledger_that_can_be_read_is_restored(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.write(desired=labelled("one"))
    backup = back_up(tmp_path, NOW_S).path
    (other := tmp_path / "other").write_bytes(b"no ledger, but long enough to be looked at" * 20)
    with closing(sqlite3.connect(foreign := tmp_path / "foreign")) as database:
        database.execute("CREATE TABLE desire (id INTEGER)")
    for file in (other, foreign, tmp_path / "nothing"):
        with pytest.raises(LedgerFailed, match="no intact ledger"):
            restore_ledger(file, tmp_path, KNOWN, NOW_S)
    with pytest.raises(LedgerFailed, match="newer rkserve"):
        restore_ledger(backup, tmp_path, KNOWN - 1, NOW_S)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == labelled("one")
