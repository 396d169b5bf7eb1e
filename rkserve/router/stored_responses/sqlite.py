"""Responses that can be read again, on the disk of one node, for all Routers there.

One SQLite file. It knows how they are kept, whose they are and when they go, and nothing of HTTP or
of what is in them. Every call blocks; ``Responses`` makes them in a thread of its own. A response
is written once, when it is over, in one transaction: a crash before that leaves none.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rkserve.api.responses.stored import StoredResponse
from rkserve.core.durable_files import UnsafeFolder, open_private, private_folder
from rkserve.core.errors import BodyTooLarge, ResponsesFailed

log = logging.getLogger(__name__)

FILE, LOCK = "responses.sqlite3", "lock"
BUSY_S = 5.0  # other Routers of the node write, too
SCHEMA = 1
# Made at once where the file is over its limit: the next few need not look for what has to go.
ROOM = 0.9
_CREATE = (
    "CREATE TABLE responses (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, "
    "owner TEXT NOT NULL, previous TEXT, used_s REAL NOT NULL, bytes INTEGER NOT NULL, "
    "items TEXT NOT NULL, response TEXT NOT NULL)",
    "CREATE INDEX responses_by_use ON responses (used_s, bytes)",
)
_COLUMNS = "id, previous, items, response, bytes"


class ResponseStore:
    """The open file of a folder. Use it from one thread at a time."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        keep_s: float,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder's file, or make one. ``clock`` tells the time of day.

        Raises:
            ResponsesFailed: the folder is somebody else's or cannot be used, the file is damaged,
                or a newer release made it.
        """
        self._file, self._max_bytes, self._keep_s = folder / FILE, max_bytes, keep_s
        self._clock = clock
        with self._told():
            self._database = self._open(folder)
        try:
            self.sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file. What was written stays."""
        self._database.close()

    def write(self, owner: str, kept: StoredResponse) -> None:
        """Keep a response for its owner, and let go of what is too old or too much.

        Raises ``ResponsesFailed``; then it is not kept.
        """
        items, response = _text(list(kept.items)), _text(kept.response)
        # What does not count towards the limit is a few hundred bytes of ids and overhead.
        size = len(items.encode()) + len(response.encode())
        with self._transaction() as database:
            database.execute(
                "INSERT INTO responses (id, owner, previous, used_s, bytes, items, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (kept.id, owner, kept.previous, self._clock(), size, items, response),
            )
            self._forget(database, spared=kept.id)

    def read(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return one, None where its owner has none of that id. Raises ``ResponsesFailed``."""
        with self._told():
            row = self._database.execute(
                f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ? AND used_s > ?",
                (response_id, owner, self._oldest_s),
            ).fetchone()
            return None if row is None else _kept(row)

    def chain(self, owner: str, response_id: str, most_bytes: int | None) -> list[StoredResponse]:
        """Return one and those that it goes on from, itself first, as far as they are here.

        They count as used now: a conversation that goes on is kept as a whole. Without
        ``most_bytes`` it is that one only, and reading it is no use of it.

        Raises:
            BodyTooLarge: they are longer than ``most_bytes`` together.
            ResponsesFailed: the file cannot be used.
        """
        if most_bytes is None:
            one = self.read(owner, response_id)
            return [] if one is None else [one]
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        size = 0
        while wanted is not None and (kept := self.read(owner, wanted)) is not None:
            found.append(kept)
            size += kept.size
            if size > most_bytes:
                raise BodyTooLarge(too_long(most_bytes))
            wanted = kept.previous
        if found:
            with self._transaction() as database:
                database.executemany(
                    "UPDATE responses SET used_s = ? WHERE id = ?",
                    [(self._clock(), kept.id) for kept in found],
                )
        return found

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove one; False where its owner has none of that id. Raises ``ResponsesFailed``."""
        with self._transaction() as database:
            done = database.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ? AND used_s > ?",
                (response_id, owner, self._oldest_s),
            )
            return done.rowcount > 0

    def sweep(self) -> None:
        """Remove what is too old. Raises ``ResponsesFailed``."""
        with self._transaction() as database:
            self._forget(database)

    @property
    def _oldest_s(self) -> float:
        return self._clock() - self._keep_s

    def _forget(self, database: sqlite3.Connection, spared: str = "") -> None:
        database.execute("DELETE FROM responses WHERE used_s <= ?", (self._oldest_s,))
        (total,) = database.execute("SELECT coalesce(sum(bytes), 0) FROM responses").fetchone()
        if total <= self._max_bytes:
            return
        # Of a conversation that was used at one time the later part stays longer.
        newest_first = "SELECT id, sum(bytes) OVER (ORDER BY used_s DESC, number DESC) AS total"
        database.execute(
            "DELETE FROM responses WHERE id != ? AND id IN "
            f"(SELECT id FROM ({newest_first} FROM responses) WHERE total > ?)",
            (spared, int(self._max_bytes * ROOM)),
        )

    # -- the file -------------------------------------------------------------------------------

    def _open(self, folder: Path) -> sqlite3.Connection:
        # What people talk about is private. A Router may start before a board looks at state_dir.
        try:
            private_folder(folder.parent)
            private_folder(folder)
            lock = open_private(folder / LOCK, os.O_RDWR | os.O_CREAT)
            os.close(open_private(self._file, os.O_RDWR | os.O_CREAT))
        except UnsafeFolder as exc:
            log.error("stored responses are off: %s", exc)  # noqa: TRY400 - one sentence is enough
            raise ResponsesFailed(
                "The folder for stored responses is not Ray's user's alone; the Router's log has "
                "the reason. Set state_dir to a folder of Ray's user."
            ) from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several Routers one makes it
            # A new thread each time it is opened again; one at a time uses it.
            database = sqlite3.connect(
                self._file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(database)
            except BaseException:
                database.close()
                raise
            return database
        finally:
            os.close(lock)

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA journal_mode = WAL")
        # A power cut may cost the last few; an answer does not wait for the disk's cache.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA secure_delete = ON")  # what is deleted is not on the disk any more
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA:
            raise ResponsesFailed(
                "The stored responses were made by a newer rkserve. Start that one, or move their "
                "file away."
            )
        if version == 0:
            database.execute("BEGIN IMMEDIATE")
            for statement in _CREATE:
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {SCHEMA}")
            database.execute("COMMIT")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = self._database
        with self._told():
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                # Some failures, such as a full disk, end the transaction by themselves.
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in a sentence what is wrong with the file."""
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, RecursionError) as exc:  # also a damaged row
            # Not the folder: whoever asks need not know it, and the log has it.
            log.warning("the stored responses in %s cannot be used: %s", self._file, exc)
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise ResponsesFailed(f"The stored responses cannot be used now: {reason}.") from exc


def remove_all(folder: Path) -> None:
    """Remove what was kept in a folder. What cannot be removed is told in the log."""
    for end in ("", "-wal", "-shm"):
        file = folder / f"{FILE}{end}"
        try:
            file.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s, which nobody reads any more, cannot be removed: %s", file, exc)


def too_long(most_bytes: int) -> str:
    """Say that more is to be read again than one request may bring."""
    return (
        "What the request takes from earlier responses is longer than the limit of "
        f"{most_bytes} bytes."
    )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _kept(row: tuple[str, str | None, str, str, int]) -> StoredResponse:
    response_id, previous, items, response, size = row
    return StoredResponse(
        response_id, previous, tuple(json.loads(items)), json.loads(response), size
    )
