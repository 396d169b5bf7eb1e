"""Backups of a ledger: when they are made, which are kept, and the way back to one."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from rkserve.control import state_changes
from rkserve.control.codec import SCHEMA, read_desired
from rkserve.coordinator.boards.head_files import pack
from rkserve.coordinator.state import ledger_files
from rkserve.coordinator.state.api_keys import KeyStore
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
    schema_of_copy,
    surplus,
    way_back,
)
from rkserve.core.desired_state import Desired
from rkserve.core.errors import LedgerFailed
from rkserve.core.files import private_folder, sync
from tests.support.boards.board_bench import until

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
        # A successor makes none in the same minute, and has the time of the last one.
        seen = list[LedgerBackup]()
        await BackupKeeper(ledger, clock, seen.append).look()
        assert seen == made[-1:]


async def test_uses_of_keys_alone_are_backed_up_once_an_hour(tmp_path: Path) -> None:
    clock = FixedClock()
    with closing(Ledger.open(tmp_path)) as ledger:
        keys = KeyStore(ledger)
        keeper = BackupKeeper(ledger, clock, lambda _: None)
        await keeper.look()
        for _ in range(59):
            clock.now_s += 60.0
            keys.write_used({"k": clock.now_s})
            await keeper.look()
        assert len(backups_of(tmp_path)) == 1
        clock.now_s += 60.0
        await keeper.look()
        assert len(backups_of(tmp_path)) == 2
        keys.write_used({"k": clock.now_s})
        ledger.write(desired=labelled("one"))
        clock.now_s += BACKUP_S
        await keeper.look()
        assert len(backups_of(tmp_path)) == 3


async def test_no_failure_ends_the_backups_and_each_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [
        OSError(28, "No space left on device"),
        OSError(28, "No space left on device"),
        ValueError("day is out of range"),
        ValueError("day is out of range"),
    ]
    clock, made = FixedClock(), list[LedgerBackup]()
    with closing(Ledger.open(tmp_path)) as ledger:
        # Of an earlier release's clock, or made by hand.
        private_folder(tmp_path / BACKUPS)
        (tmp_path / BACKUPS / "ledger-000009-99999999T999999Z.sqlite3").write_bytes(b"")
        keeper = BackupKeeper(ledger, clock, made.append)
        monkeypatch.setattr(ledger_files, "LOOK_S", 0.0)

        def listed(folder: Path) -> list[LedgerBackup]:
            if failures:
                raise failures.pop(0)
            return backups_of(folder)

        monkeypatch.setattr(ledger_files, "backups_of", listed)
        following = asyncio.ensure_future(keeper.follow())
        await until(lambda: bool(made))
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    warned = [record.getMessage() for record in caplog.records]
    assert len([one for one in warned if "No space left on device" in one]) == 1
    assert len([one for one in warned if "day is out of range" in one]) == 1


async def test_a_backup_counts_also_where_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[LedgerBackup]()
    with closing(Ledger.open(tmp_path)) as ledger:
        for number in range(NEWEST + 1):
            back_up(tmp_path, NOW_S + number)

        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError(13, "Permission denied", str(path), missing_ok)

        monkeypatch.setattr(ledger_files, "surplus", lambda backups: backups[1:])
        monkeypatch.setattr(Path, "unlink", _only_backups(refuse))
        clock = FixedClock()
        clock.now_s += 1e5
        keeper = BackupKeeper(ledger, clock, made.append)
        with pytest.raises(LedgerFailed, match=r"cannot be removed: .*Permission denied"):
            await keeper.look()
    assert made[-1].made_s == int(clock.now_s)


def _only_backups(refuse: Callable[..., None]) -> Callable[..., None]:
    unlink = Path.unlink

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        done = refuse if path.name.endswith("Z.sqlite3") else unlink
        done(path, missing_ok)

    return unlinked


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
    assert not [*tmp_path.glob("*-wal")], "it is in the ledger that was kept"
    assert label_in(aside) == "two"
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == labelled("one")
        ledger.write(desired=labelled("three", labelled("one")))


def killed(folder: Path) -> LedgerBackup:
    """Make a ledger as after a kill: "one" is in its backup, and "two" in its log alone."""
    with closing(Ledger.open(folder)) as ledger:
        ledger.write(desired=labelled("one"))
        backup = back_up(folder, NOW_S)
        ledger.write(desired=labelled("two", labelled("one")))
        kept = {one: one.read_bytes() for one in (folder / FILE, folder / f"{FILE}-wal")}
    for one, content in kept.items():
        one.write_bytes(content)
    return backup


@pytest.mark.parametrize("damaged", [False, True])
def test_no_log_of_a_ledger_that_is_gone_or_damaged_is_applied_to_the_restored_one(
    tmp_path: Path, damaged: bool
) -> None:
    backup = killed(tmp_path)
    (tmp_path / FILE).unlink()
    if damaged:
        (tmp_path / FILE).write_bytes(b"no ledger, but long enough to be looked at" * 20)
    (tmp_path / f"{FILE}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7")
    log = (tmp_path / f"{FILE}-wal").read_bytes()
    aside = restore_ledger(backup.path, tmp_path, KNOWN, NOW_S)
    assert (aside is not None) is damaged
    left = [one.name for one in tmp_path.iterdir() if one.name.startswith(f"{FILE}-")]
    assert left == []
    if not damaged:
        (kept,) = tmp_path.glob(f"{FILE}.aside-*-wal")
        assert kept.read_bytes() == log
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == labelled("one")


class PowerCut(BaseException):
    """The machine stops here."""


@pytest.mark.parametrize("step", range(10))
def test_a_crash_while_a_ledger_is_restored_leaves_the_earlier_one_or_the_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    backup, left = killed(tmp_path), [step]

    def cut(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise PowerCut
            return work(*args)

        return done

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", cut(Path.replace))
        patched.setattr(os, "link", cut(os.link))
        patched.setattr(ledger_files, "sync", cut(sync))
        patched.setattr(ledger_files, "_merge_log", cut(ledger_files._merge_log))
        try:
            restore_ledger(backup.path, tmp_path, KNOWN, NOW_S)
        except PowerCut:
            restored = False
        else:
            restored = True
    assert restored or step < 9, "the last step is the end of it"
    with closing(Ledger.open(tmp_path)) as ledger:
        found = ledger.desired().weights_of("m").label
    assert found == "one" if restored else found in ("one", "two")
    assert restored or step > 7 or found == "two"


def test_a_ledger_that_another_process_reads_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = killed(tmp_path)
    monkeypatch.setattr(ledger_files, "BUSY_S", 0.05)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM desired").fetchall()
        with pytest.raises(LedgerFailed, match="in use by another process"):
            restore_ledger(backup.path, tmp_path, KNOWN, NOW_S)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == labelled("two", labelled("one"))


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
    newer = rf"schema {KNOWN}, and this release knows {KNOWN - 1}: a newer rkserve"
    with pytest.raises(LedgerFailed, match=newer):
        restore_ledger(backup, tmp_path, KNOWN - 1, NOW_S)
    with closing(sqlite3.connect(backup)) as database, database:
        old, new = f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1}'
        database.execute("UPDATE desired SET value = replace(value, ?, ?)", (old, new))
    newer = rf"schema {SCHEMA + 1} of its values, and this release knows {SCHEMA}: a newer rkserve"
    with pytest.raises(LedgerFailed, match=newer):
        restore_ledger(backup, tmp_path, KNOWN, NOW_S)
    with closing(Ledger.open(tmp_path)) as ledger:
        assert ledger.desired() == labelled("one")


def test_a_compressed_backup_is_restored_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with closing(Ledger.open(old)) as ledger:
        ledger.write(desired=labelled("one"))
        cluster = ledger.cluster
        made = back_up(old, NOW_S)
    packed = tmp_path / "copy.gz"
    content, digest = pack(made.path)
    packed.write_bytes(content)
    assert hashlib.sha256(content).hexdigest() == digest
    assert schema_of_copy(packed) == KNOWN
    assert restore_ledger(packed, new, KNOWN, NOW_S) is None
    assert {one.name for one in new.iterdir()} == {FILE, "lock"}
    with closing(Ledger.open(new)) as ledger:
        assert ledger.cluster == cluster
        assert ledger.desired() == labelled("one")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda content: content[:-20], "Compressed file ended", id="cut"),
        pytest.param(
            lambda content: content[:60] + b"x" * 50 + content[110:],
            "no intact ledger",
            id="damaged",
        ),
        pytest.param(lambda _: gzip.compress(b"a letter"), "no intact ledger", id="another file"),
    ],
)
def test_a_compressed_backup_that_is_damaged_changes_nothing(
    tmp_path: Path, spoil: Callable[[bytes], bytes], words: str
) -> None:
    folder, packed = tmp_path / "data", tmp_path / "copy.gz"
    with closing(Ledger.open(folder)) as ledger:
        ledger.write(desired=labelled("one"))
        packed.write_bytes(spoil(pack(back_up(folder, NOW_S).path)[0]))
    before = (folder / FILE).read_bytes()
    with pytest.raises(LedgerFailed, match=words):
        restore_ledger(packed, folder, KNOWN, NOW_S)
    assert (folder / FILE).read_bytes() == before
    assert not [one for one in folder.iterdir() if "unpacked" in one.name]


def test_each_ledger_has_a_name_of_its_own_that_an_upgrade_adds(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "old", migrations=MIGRATIONS[:5]).close()
    names = set()
    for name in ("old", "new", "old"):
        with closing(Ledger.open(tmp_path / name)) as ledger:
            names.add(ledger.cluster)
    assert len(names) == 2
    assert all(len(one) == 16 for one in names)
