"""SQLite files of a private folder, shared by the Routers of a node; and their transactions."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rkserve.core.files import open_private, private_folder

LOCK = "lock"
BUSY_S = 5.0  # other Routers of the node write, too


class ClosedStore(Protocol):
    """A store that can be closed."""

    def close(self) -> None:
        """Close its files."""


class NewerFile(ValueError):
    """A file with the schema of a newer release."""


S = TypeVar("S", bound=ClosedStore)
T = TypeVar("T")


class StoreThread(Generic[S]):
    """A store of a node's file with a thread of its own: SQLite blocks, and one connection is used
    by one thread at a time.
    """

    def __init__(self, name: str, opened: Callable[[], S]) -> None:
        """``opened`` opens the store at the first call, and at later ones as long as it fails."""
        self._opened = opened
        self._store: S | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, ask: Callable[[S], T]) -> T:
        """Return what ``ask`` returns of the store, or raise its error."""

        def asked() -> T:
            if self._store is None:
                self._store = self._opened()
            return ask(self._store)

        return await asyncio.get_running_loop().run_in_executor(self._thread, asked)

    def close(self) -> None:
        """Close the store after the calls that have begun, without waiting for that."""

        def end() -> None:
            if self._store is not None:
                self._store.close()

        self._thread.submit(end)
        self._thread.shutdown(wait=False)


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
