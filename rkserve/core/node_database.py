"""SQLite files of a private folder, shared by the Routers of a node; and their transactions."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rkserve.core.files import open_private, private_folder

LOCK = "lock"
BUSY_S = 5.0  # other Routers of the node write, too


class NewerFile(ValueError):
    """A file with the schema of a newer release."""


def open_shared(
    file: Path, schema: int, create: Sequence[str], *, secure_delete: bool = False
) -> sqlite3.Connection:
    """Open a file, created by the statements ``create`` if it is new.

    One thread at a time may use the connection. A power cut may lose the last transactions: none
    waits for the disk's cache. With ``secure_delete`` deleted content is overwritten on disk.

    Raises:
        UnsafeFolder: the file or its folder is not this account's alone.
        NewerFile: its schema is newer than ``schema``.
        OSError, sqlite3.Error: it cannot be used.
    """
    # A Router may start before a board has created state_dir.
    private_folder(file.parent.parent)
    private_folder(file.parent)
    lock = open_private(file.parent / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        os.close(open_private(file, os.O_RDWR | os.O_CREAT))
        fcntl.flock(lock, fcntl.LOCK_EX)  # several Routers may create it at once
        database = sqlite3.connect(
            file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(f"PRAGMA secure_delete = {'ON' if secure_delete else 'OFF'}")
            _prepare(database, schema, create)
        except BaseException:
            database.close()
            raise
        return database
    finally:
        os.close(lock)


def _prepare(database: sqlite3.Connection, schema: int, create: Sequence[str]) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > schema:
        raise NewerFile(f"its schema is {version}, and this release reads up to {schema}")
    if version == 0:
        with atomic(database):
            for statement in create:
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {schema}")


@contextmanager
def atomic(database: sqlite3.Connection) -> Iterator[None]:
    """Run statements as one transaction, undone by any error."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # Some failures, such as a full disk, end the transaction by themselves.
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
