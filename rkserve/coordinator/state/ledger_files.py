"""The files of a ledger: its lock, its reserve, its backups, and the restoration of one.

A backup is a whole database in one file, checked and on the disk before it has its name. Its number
orders it: the clock of a board without a battery begins in 1970.
"""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import json
import logging
import os
import re
import shutil
import sqlite3
import time
import zlib
from calendar import timegm
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rkserve.control.codec import SCHEMA
from rkserve.core.errors import LedgerFailed
from rkserve.core.files import FULL, open_private, private_folder, sync

log = logging.getLogger(__name__)

FILE, LOCK, RESERVE, BACKUPS = "ledger.sqlite3", "lock", "reserve", "backups"
# Reserved while there is room, and released to open the ledger on a full disk: SQLite needs some
# pages beside the file before it reads it.
RESERVE_BYTES = 1 << 20
BUSY_S = 5.0  # a backup or an operator's sqlite3 shell may hold it for a moment
# The newest backups are kept, and of those before them the last one of each hour.
KEPT, NEWEST = 10, 4
BACKUP_S = 60.0  # between two of them
# SQLite applies these to any file of that name.
LOGS = ("-wal", "-shm", "-journal")
LOOK_S = 5.0
GZIP_MAGIC = b"\x1f\x8b"
# The header of a SQLite file, and the place of `PRAGMA user_version` in it.
_HEADER_BYTES, _USER_VERSION = 100, slice(60, 64)
HOUR_S = 3600
_STAMP = "%Y%m%dT%H%M%SZ"
_NAME = re.compile(r"ledger-(\d{6,})-(\d{8}T\d{6}Z)\.sqlite3")
_ANOTHER_FOLDER = "Each application needs a coordinator.data_dir of its own."
_END_FIRST = "End the application first."
_WAYS_ON = (
    "Restore it from a backup; or move it away, and the cluster begins with nothing paused and no "
    "adapters of its own."
)


def lock_folder(folder: Path, remedy: str = _ANOTHER_FOLDER) -> int:
    """Lock the folder; return the descriptor, which the kernel releases when this process ends.

    ``remedy`` is the advice where another process has it. Raises ``LedgerFailed``.
    """
    try:
        private_folder(folder)  # it contains params of operations and uploaded weights
        lock = open_private(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as exc:
        raise LedgerFailed(
            f"The folder {folder} (coordinator.data_dir) cannot be used: {exc.strerror or exc}."
        ) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise LedgerFailed(
            f"The folder {folder} is in use by another Coordinator (process {owner}). {remedy}"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as exc:
        if exc.errno not in FULL:
            os.close(lock)
            raise LedgerFailed(f"The folder {folder} cannot be written: {exc.strerror}.") from exc
        log.warning("%s does not name its process: %s", folder / LOCK, exc.strerror)
    return lock


def provide_reserve(folder: Path, free: Callable[[Path], int]) -> None:
    """Create the reserve if there is room for it, and release it if the disk is full."""
    reserve = folder / RESERVE
    try:
        if free(folder) < RESERVE_BYTES:
            reserve.unlink(missing_ok=True)
            log.warning("the disk of %s is full: the ledger's reserve is given back", folder)
        elif not reserve.exists() and free(folder) >= 4 * RESERVE_BYTES:
            descriptor = open_private(reserve, os.O_WRONLY | os.O_CREAT)
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(RESERVE_BYTES))
    except OSError as exc:
        log.warning("the ledger's reserve in %s cannot be seen to: %s", folder, exc)


# -- backups ------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class LedgerBackup:
    """A backup by its number; ``made_s`` is in seconds since 1970 by the head's clock then."""

    number: int
    made_s: int
    path: Path

    @property
    def when(self) -> str:
        """The time at which it was made."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.made_s))


def backups_of(folder: Path) -> list[LedgerBackup]:
    """Return the backups of a ledger's folder, the newest first. Raises ``OSError``."""
    found = []
    with suppress(FileNotFoundError):
        for path in (folder / BACKUPS).iterdir():
            if (match := _NAME.fullmatch(path.name)) is None:
                continue
            with suppress(ValueError):  # a name with no time in it is none of a backup
                made_s = timegm(time.strptime(match[2], _STAMP))
                found.append(LedgerBackup(int(match[1]), made_s, path))
    return sorted(found, reverse=True)


def surplus(backups: Sequence[LedgerBackup]) -> list[LedgerBackup]:
    """Return the backups to remove; ``backups`` has the newest first."""
    kept = list(backups[:NEWEST])
    hours = {one.made_s // HOUR_S for one in kept[-1:]}
    for one in backups[NEWEST:]:
        if len(kept) < KEPT and one.made_s // HOUR_S not in hours:
            hours.add(one.made_s // HOUR_S)
            kept.append(one)
    return [one for one in backups if one not in kept]


def defect_of(file: Path) -> str:
    """Return why a file that no process uses is no intact ledger; empty if it is one."""
    try:
        # Immutable: nothing beside it is looked at or made.
        address = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            query = "SELECT name FROM sqlite_master WHERE name IN ('desired', 'operations')"
            tables = {name for (name,) in database.execute(query)}
    except sqlite3.Error as exc:
        return str(exc)
    if tables != {"desired", "operations"}:
        return "it has other tables"
    return "" if found == "ok" else str(found)


def newest_intact(folder: Path) -> LedgerBackup | None:
    """Return the newest backup that can be restored. Raises ``OSError``."""
    return next((one for one in backups_of(folder) if not defect_of(one.path)), None)


def way_back(folder: Path) -> str:
    """Return the remedy for a ledger that is damaged or gone."""
    try:
        found = newest_intact(folder)
    except OSError as exc:
        return f"Its backups cannot be read: {exc}. {_WAYS_ON}"
    if found is None:
        return _WAYS_ON
    return (
        f"Its newest intact backup was made at {found.when}. To return to that: "
        f"rkserve restore {found.path} --data-dir {folder}. To begin with nothing instead, move "
        f"{folder / BACKUPS} away, and the ledger."
    )


def copy_ledger(file: Path, target: Path) -> None:
    """Copy a ledger, which may be in use, to a file that is checked and on the disk before it has
    its name.

    Raises:
        LedgerFailed: it cannot be copied; an earlier ``target`` stays.
    """
    fresh = target.with_name(f"{target.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        os.close(open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        address = f"{file.absolute().as_uri()}?mode=rw"  # it creates nothing
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S)) as database:
            database.execute("VACUUM INTO ?", (str(fresh),))
        if problem := defect_of(fresh):
            raise sqlite3.DatabaseError(f"the copy is damaged: {problem}")
        sync(fresh)
        fresh.replace(target)
        sync(target.parent)
    except (OSError, sqlite3.Error) as exc:
        with suppress(OSError):
            fresh.unlink()
        raise LedgerFailed(
            f"The ledger {file} cannot be copied to {target}: {exc}. Check the space on the disk."
        ) from exc


def back_up(folder: Path, now_s: float) -> LedgerBackup:
    """Add a backup, and remove those that are too many. Raises ``LedgerFailed``."""
    made = add_backup(folder, now_s)
    remove_surplus(folder)
    return made


def add_backup(folder: Path, now_s: float) -> LedgerBackup:
    """Add a backup. Raises ``LedgerFailed``."""
    try:
        private_folder(folder / BACKUPS)
        before = backups_of(folder)
    except OSError as exc:
        raise LedgerFailed(f"Backups cannot be made in {folder / BACKUPS}: {exc}.") from exc
    number = before[0].number + 1 if before else 1
    stamp = time.strftime(_STAMP, time.gmtime(now_s))
    path = folder / BACKUPS / f"ledger-{number:06}-{stamp}.sqlite3"
    copy_ledger(folder / FILE, path)
    return LedgerBackup(number, int(now_s), path)


def remove_surplus(folder: Path) -> None:
    """Remove the backups that are too many. Raises ``LedgerFailed``."""
    try:
        for one in surplus(backups_of(folder)):
            one.path.unlink(missing_ok=True)
    except OSError as exc:
        raise LedgerFailed(f"Old backups of the ledger cannot be removed: {exc}.") from exc


class ChangingLedger(Protocol):
    """The part of an open ledger that its backups need."""

    @property
    def file(self) -> Path:
        """The path of the database."""

    @property
    def changes(self) -> int:
        """The number of stored changes since it was opened, without those of ``uses``."""

    @property
    def uses(self) -> int:
        """The number of times that uses of keys were stored since it was opened."""


_NEVER = (-1, -1)


class BackupKeeper:
    """Backs a ledger up after changes, not more often than every ``BACKUP_S``; where only uses of
    keys were stored, every hour.
    """

    def __init__(
        self,
        ledger: ChangingLedger,
        now_s: Callable[[], float],
        newest: Callable[[LedgerBackup], None],
    ) -> None:
        """``now_s`` reads seconds since 1970; ``newest`` gets the newest backup, also one of an
        earlier process.
        """
        self._ledger, self._now_s, self._newest = ledger, now_s, newest
        self._stored = _NEVER  # changes and uses of the last backup
        self._failure = ""

    async def follow(self) -> None:
        """Make backups, forever."""
        while True:
            try:
                await self.look()
                self._failure = ""
            except Exception as exc:
                # If this loop ended, there would be no backups any more.
                failure = str(exc) if isinstance(exc, LedgerFailed) else repr(exc)
                if failure != self._failure:  # a full disk is logged once
                    known = isinstance(exc, LedgerFailed)
                    log.warning("no backup was made: %s", failure, exc_info=None if known else exc)
                self._failure = failure
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Make a backup if one is due. Raises ``LedgerFailed``."""
        stored, folder, now_s = self._now_stored, self._ledger.file.parent, self._now_s()
        if stored == self._stored:
            return
        try:
            newest = (await asyncio.to_thread(backups_of, folder))[:1]
        except OSError as exc:
            raise LedgerFailed(f"Backups of {self._ledger.file} cannot be made: {exc}.") from exc
        if newest and self._stored == _NEVER:
            self._newest(newest[0])
        wait_s = HOUR_S if stored[0] == self._stored[0] else BACKUP_S
        # A clock that was set back makes no backup wait.
        if newest and 0 <= now_s - newest[0].made_s < wait_s:
            return
        self._newest(await asyncio.to_thread(add_backup, folder, now_s))
        self._stored = stored
        await asyncio.to_thread(remove_surplus, folder)

    @property
    def _now_stored(self) -> tuple[int, int]:
        return self._ledger.changes, self._ledger.uses


# -- restoration --------------------------------------------------------------------------------


def restore_ledger(backup: Path, folder: Path, schema: int, now_s: float) -> Path | None:
    """Replace the ledger of a folder by a backup; return the new place of the earlier one, None
    without one.

    ``schema`` is the newest that this release reads. ``backup`` may be compressed by ``gzip``, as
    the copies on boards are. A crash leaves the earlier ledger or the backup.

    Raises:
        LedgerFailed: the application runs, the backup is damaged or of a newer release, or the disk
            is full; the ledger is as before.
    """
    with _unpacked(backup, folder) as plain:
        _check_backup(backup, plain, schema)
        return _put_in_place(backup, plain, folder, now_s)


@contextmanager
def _unpacked(backup: Path, folder: Path) -> Iterator[Path]:
    """Yield the backup, or an uncompressed one beside the ledger. Raises ``LedgerFailed``."""
    plain = folder / f"{FILE}.unpacked"
    try:
        with backup.open("rb") as file:
            is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    except OSError as exc:
        raise LedgerFailed(f"{backup} is no intact ledger: {exc}.") from exc
    if not is_packed:
        yield backup
        return
    try:
        _unpack(backup, plain)
        yield plain
    finally:
        with suppress(OSError):  # the next restoration removes it
            plain.unlink(missing_ok=True)


def _unpack(backup: Path, plain: Path) -> None:
    try:
        private_folder(plain.parent)
        plain.unlink(missing_ok=True)
        descriptor = open_private(plain, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as target, gzip.open(backup) as source:
            shutil.copyfileobj(source, target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
        raise LedgerFailed(f"{backup} is no intact ledger: {exc}.") from exc
    except OSError as exc:
        raise LedgerFailed(f"{backup} cannot be unpacked to {plain}: {exc}.") from exc


def schema_of_copy(copy: Path) -> int:
    """Return the schema of the tables in a compressed backup, from the head of the file.

    Raises:
        LedgerFailed: it is damaged, or no backup.
    """
    try:
        with gzip.open(copy) as file:
            header = file.read(_HEADER_BYTES)
    except (OSError, EOFError, zlib.error) as exc:
        raise LedgerFailed(f"{copy} cannot be read: {exc}.") from exc
    if len(header) < _HEADER_BYTES or not header.startswith(b"SQLite format 3\0"):
        raise LedgerFailed(f"{copy} is no backup of a ledger.")
    return int.from_bytes(header[_USER_VERSION], "big")


def _check_backup(backup: Path, plain: Path, schema: int) -> None:
    if problem := defect_of(plain):
        raise LedgerFailed(f"{backup} is no intact ledger: {problem}.")
    tables, values = _schemas_of(plain)
    for what, found, known in (("", tables, schema), (" of its values", values, SCHEMA)):
        if found > known:
            raise LedgerFailed(
                f"{backup} has schema {found}{what}, and this release knows {known}: a newer "
                "rkserve wrote it. Restore it with that one."
            )


def _put_in_place(backup: Path, plain: Path, folder: Path, now_s: float) -> Path | None:
    with _locked(folder):
        file, fresh = folder / FILE, folder / f"{FILE}.new"
        aside = folder / f"{FILE}.aside-{time.strftime(_STAMP, time.gmtime(now_s))}"
        try:
            fresh.unlink(missing_ok=True)
            descriptor = open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(descriptor, "wb") as target, plain.open("rb") as source:
                shutil.copyfileobj(source, target)
            sync(fresh)
            kept = _set_aside(file, aside)
            fresh.replace(file)
            sync(folder)
        except OSError as exc:
            raise LedgerFailed(f"{backup} cannot be restored to {file}: {exc}.") from exc
        return aside if kept else None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = lock_folder(folder, _END_FIRST)
    try:
        yield
    finally:
        os.close(lock)


def _set_aside(file: Path, aside: Path) -> bool:
    """Give a ledger a second name; return whether there was one.

    Its log is merged into it first: without the log it would not be whole where a crash follows. A
    log that is left is of a ledger that is damaged or gone, and gets that second name; on the disk
    before the backup comes in its place, so that it is never applied to that.
    """
    there = file.exists()
    if there:
        _merge_log(file)
        os.link(file, aside)
    for part in LOGS:
        with suppress(FileNotFoundError):
            file.with_name(file.name + part).replace(aside.with_name(aside.name + part))
    sync(file.parent)
    return there


def _merge_log(file: Path) -> None:
    try:
        address = f"{file.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S)) as database:
            (busy, *_) = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as exc:
        log.warning("the log of the ledger %s stays apart from it: %s", file, exc)
        return
    if busy:
        raise LedgerFailed(f"The ledger {file} is in use by another process. {_END_FIRST}")


def _schemas_of(file: Path) -> tuple[int, int]:
    """Return the schema of the tables in a ledger, and that of its values, 0 without any."""
    address = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True)) as database:
        (tables,) = database.execute("PRAGMA user_version").fetchone()
        row = desired_row(database)
    return int(tables), 0 if row is None else row[1]


def desired_row(database: sqlite3.Connection) -> tuple[str, int] | None:
    """Return the desired state as it is stored, and its schema; None where there is none."""
    query = "SELECT value FROM desired WHERE json_valid(value)"
    for (text,) in database.execute(query):
        found = json.loads(text).get("schema")
        if type(found) is int:
            return text, found
    return None
