"""Storage of responses in one SQLite file per node, shared by all Routers there.

Every call blocks; ``Responses`` uses a thread of its own. A response is written once, after its
end, in one transaction, so that a crash before that leaves nothing.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rkserve.api.responses.stored import StoredResponse
from rkserve.core.errors import BodyTooLarge, ResponsesFailed
from rkserve.core.files import UnsafeFolder
from rkserve.core.node_database import NewerFile, atomic, open_shared

log = logging.getLogger(__name__)

FILE = "responses.sqlite3"
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
            self._database = self._open()
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
                f"SELECT {_COLUMNS} FROM responses "  # noqa: S608 - a constant
                "WHERE id = ? AND owner = ? AND used_s > ?",
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
            "DELETE FROM responses WHERE id != ? AND id IN "  # noqa: S608 - a constant
            f"(SELECT id FROM ({newest_first} FROM responses) WHERE total > ?)",
            (spared, int(self._max_bytes * ROOM)),
        )

    # -- the file -------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return open_shared(self._file, SCHEMA, _CREATE, secure_delete=True)
        except UnsafeFolder as exc:
            log.error("stored responses are off: %s", exc)  # noqa: TRY400 - one sentence is enough
            raise ResponsesFailed(
                "The folder for stored responses is not Ray's user's alone; the Router's log has "
                "the reason. Set state_dir to a folder of Ray's user."
            ) from exc
        except NewerFile as exc:
            raise ResponsesFailed(
                "The stored responses were made by a newer rkserve. Start that one, or move their "
                "file away."
            ) from exc

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._store_errors(), atomic(self._database):
            yield self._database

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
