"""Storage of responses in one SQLite file per node, shared by all Routers there.

Every call blocks; ``Responses`` uses a thread of its own. A response is written once, after its
end, in one transaction, so that a crash before that leaves nothing.
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
from rkserve.core.errors import BodyTooLarge, ResponsesFailed
from rkserve.core.files import UnsafeFolder, open_private, private_folder

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
    """The open file of a folder. Use from one thread at a time."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        keep_s: float,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the folder's file. ``clock`` returns the time of day.

        Raises:
            ResponsesFailed: the folder has another owner or cannot be used, the file is damaged, or
                it is of a newer release.
        """
        self._file, self._max_bytes, self._keep_s = folder / FILE, max_bytes, keep_s
        self._clock = clock
        with self._store_errors():
            self._database = self._open(folder)
        try:
            self.sweep()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def write(self, owner: str, kept: StoredResponse) -> None:
        """Store a response for its owner, and remove expired and excess ones.

        Raises ``ResponsesFailed``; then it is not stored.
        """
        items, response = _text(list(kept.items)), _text(kept.response)
        # A few hundred bytes of IDs and overhead do not count towards the limit.
        size = len(items.encode()) + len(response.encode())
        with self._transaction() as database:
            database.execute(
                "INSERT INTO responses (id, owner, previous, used_s, bytes, items, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (kept.id, owner, kept.previous, self._clock(), size, items, response),
            )
            self._forget(database, spared=kept.id)

    def read(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, None if its owner has none of that ID. Raises ``ResponsesFailed``."""
        with self._store_errors():
            row = self._database.execute(
                f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ? AND used_s > ?",
                (response_id, owner, self._oldest_s),
            ).fetchone()
            return None if row is None else _kept(row)

    def chain(self, owner: str, response_id: str, most_bytes: int | None) -> list[StoredResponse]:
        """Return a response and those it continues, itself first, as far as stored here.

        They count as used now, so that an active conversation is kept as a whole. Without
        ``most_bytes`` only the response itself is returned, and does not count as used.

        Raises:
            BodyTooLarge: together they are longer than ``most_bytes``.
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
        """Remove a response; False if its owner has none of that ID. Raises ``ResponsesFailed``."""
        with self._transaction() as database:
            done = database.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ? AND used_s > ?",
                (response_id, owner, self._oldest_s),
            )
            return done.rowcount > 0

    def sweep(self) -> None:
        """Remove expired responses. Raises ``ResponsesFailed``."""
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
        # Of a conversation last used at one time, the later part is kept longer.
        newest_first = "SELECT id, sum(bytes) OVER (ORDER BY used_s DESC, number DESC) AS total"
        database.execute(
            "DELETE FROM responses WHERE id != ? AND id IN "
            f"(SELECT id FROM ({newest_first} FROM responses) WHERE total > ?)",
            (spared, int(self._max_bytes * ROOM)),
        )

    # -- the file -------------------------------------------------------------------------------

    def _open(self, folder: Path) -> sqlite3.Connection:
        # Conversations are private. A Router may start before a board has created state_dir.
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # several Routers may create it at once
            # Reopening uses a new thread; one at a time uses the connection.
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
        # A power cut may lose the last few responses; answers do not wait for the disk's cache.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA secure_delete = ON")  # deleted content is overwritten on disk
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
        with self._store_errors():
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
    def _store_errors(self) -> Iterator[None]:
        """Return a sentence about what is wrong with the file."""
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, RecursionError) as exc:  # also a damaged row
            # Without the folder, which the client need not know; the log has it.
            log.warning("the stored responses in %s cannot be used: %s", self._file, exc)
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise ResponsesFailed(f"The stored responses cannot be used now: {reason}.") from exc


def remove_all(folder: Path) -> None:
    """Remove all responses in a folder, and log what cannot be removed."""
    for end in ("", "-wal", "-shm"):
        file = folder / f"{FILE}{end}"
        try:
            file.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("unused file %s cannot be removed: %s", file, exc)


def too_long(most_bytes: int) -> str:
    """Return the error for a conversation that exceeds one request."""
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
