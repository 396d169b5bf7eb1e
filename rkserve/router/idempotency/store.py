"""Storage of the answers to requests with an ``Idempotency-Key``, in one SQLite file of a node.

A row is written before a board gets the request, and completed by the whole answer. The Router that
makes an answer holds a lock of the kernel's for its key, which ends with the process: a row without
an answer whose lock is free has no owner, and the next request with the key takes it over.
Every call blocks; use it from one thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from rkserve.config.router import IdempotencyConfig
from rkserve.core.errors import IdempotencyFailed
from rkserve.core.files import UnsafeFolder, open_private
from rkserve.core.node_database import NewerFile, atomic, open_shared

log = logging.getLogger(__name__)

FILE, LOCKS = "answers.sqlite3", "locks"
SCHEMA = 1
ROOM = 0.9  # of a limit is left where it was exceeded, so that the next few remove nothing
WANTED_S = 3.0  # a request that waits for another Router's answer says so more often
WANTED_AGAIN_S = 1.0  # but not at each look: each is a write to the disk
_CREATE = (
    "CREATE TABLE answers (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, "
    "digest TEXT NOT NULL, state INTEGER NOT NULL, changed_s REAL NOT NULL, "
    "wanted_s REAL NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0, headers TEXT, body BLOB)",
    "CREATE INDEX answers_by_age ON answers (changed_s, bytes)",
)


class KeyState(IntEnum):
    """The state of a key: its answer is being made, stored, or was made and is too long to store;
    ``REUSED`` is that of another request's key.
    """

    RUNNING = 0
    DONE = 1
    TOO_LONG = 2
    OWN = 3  # the caller makes it
    REUSED = 4


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """The result of a claim, with the answer if it is ``DONE``."""

    state: KeyState
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)
    body: bytes = b""


def name_of(owner: str, key: str) -> str:
    """Return the name of a caller's key; equal keys of two callers have two."""
    return hashlib.sha256(f"{owner}\n{key}".encode()).hexdigest()


class AnswerStore:
    """The open files of a folder."""

    def __init__(
        self,
        folder: Path,
        config: IdempotencyConfig,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the folder's files. ``clock`` returns the time of day.

        Raises ``IdempotencyFailed``.
        """
        self._config, self._clock = config, clock
        self._held: dict[str, object] = {}  # by the name of the key: its holder
        with self._errors():
            self._database = open_shared(folder / FILE, SCHEMA, _CREATE, secure_delete=True)
            self._locks = open_private(folder / LOCKS, os.O_RDWR | os.O_CREAT)

    def close(self) -> None:
        """Close the files; keys that are held are free then."""
        self._database.close()
        os.close(self._locks)

    def claim(self, name: str, digest: str, holder: object = None) -> KeyClaim:
        """Take a key without an owner, or return its state. Raises ``IdempotencyFailed``.

        An ``OWN`` key is held until ``finish``, or ``release`` by the same ``holder``.
        """
        if name in self._held:  # locks of one open file do not exclude each other
            return KeyClaim(KeyState.RUNNING)
        with self._errors():
            found = self._look(name, digest)
            if found.state is not KeyState.RUNNING and found.state is not KeyState.OWN:
                return found
            if not self._lock(name):
                if not self._wanted_within(WANTED_AGAIN_S, name):
                    self._database.execute(
                        "UPDATE answers SET wanted_s = ? WHERE name = ?", (self._clock(), name)
                    )
                return KeyClaim(KeyState.RUNNING)
            try:
                # The one that held it may have finished since.
                found = self._look(name, digest)
                if found.state in (KeyState.RUNNING, KeyState.OWN):
                    self._database.execute(
                        "INSERT OR REPLACE INTO answers (name, digest, state, changed_s) "
                        "VALUES (?, ?, ?, ?)",
                        (name, digest, KeyState.RUNNING.value, self._clock()),
                    )
                    self._held[name] = holder
                    return KeyClaim(KeyState.OWN)
                return found
            finally:
                if name not in self._held:
                    self._unlock(name)

    def finish(self, name: str, headers: Mapping[str, str], body: bytes | None) -> None:
        """Store the whole answer of a key that is held, and free it. Raises ``IdempotencyFailed``.

        Of one that is too long (None), only that is stored.
        """
        with self._freeing(name), self._errors(), atomic(self._database):
            whole = body is not None and len(body) <= self._config.max_answer_bytes
            packed = zlib.compress(body or b"", 1) if whole else b""
            state = KeyState.DONE if whole else KeyState.TOO_LONG
            self._database.execute(
                "UPDATE answers SET state = ?, changed_s = ?, bytes = ?, headers = ?, body = ? "
                "WHERE name = ?",
                (state.value, self._clock(), len(packed), json.dumps(dict(headers)), packed, name),
            )
            self._forget(spared=name)

    def release(self, name: str, holder: object = None) -> None:
        """Free a key without an answer, if ``holder`` has it. Raises ``IdempotencyFailed``."""
        if name not in self._held or self._held[name] is not holder:
            return
        with self._freeing(name), self._errors():
            self._database.execute(
                "DELETE FROM answers WHERE name = ? AND state = ?", (name, KeyState.RUNNING.value)
            )

    def is_wanted(self, name: str) -> bool:
        """Return whether a request at another Router waits for the answer."""
        with self._errors():
            return self._wanted_within(WANTED_S, name)

    def sweep(self) -> None:
        """Remove expired answers. Raises ``IdempotencyFailed``."""
        with self._errors(), atomic(self._database):
            self._forget()

    def _wanted_within(self, seconds: float, name: str) -> bool:
        query = "SELECT wanted_s FROM answers WHERE name = ?"
        row = self._database.execute(query, (name,)).fetchone()
        return row is not None and abs(self._clock() - row[0]) < seconds

    def _look(self, name: str, digest: str) -> KeyClaim:
        """Return the state of a key; ``OWN`` if it is new or expired."""
        row = self._database.execute(
            "SELECT digest, state, changed_s, headers, body FROM answers WHERE name = ?", (name,)
        ).fetchone()
        if row is None:
            return KeyClaim(KeyState.OWN)
        known, state, changed_s, headers, body = row
        if state != KeyState.RUNNING and changed_s <= self._oldest_s:
            return KeyClaim(KeyState.OWN)
        if known != digest:
            return KeyClaim(KeyState.REUSED)
        if state != KeyState.DONE:
            return KeyClaim(KeyState(state))
        return KeyClaim(KeyState.DONE, json.loads(headers), zlib.decompress(body))

    @property
    def _oldest_s(self) -> float:
        return self._clock() - self._config.keep_s

    def _forget(self, spared: str = "") -> None:
        """Remove expired answers, and the oldest ones beyond the limits.

        Rows of answers in progress stay until twice the time of expired ones.
        """
        self._database.execute(
            "DELETE FROM answers WHERE changed_s <= ? AND (state != ? OR changed_s <= ?)",
            (self._oldest_s, KeyState.RUNNING.value, self._oldest_s - self._config.keep_s),
        )
        query = "SELECT count(*), coalesce(sum(bytes), 0) FROM answers"
        number, total = self._database.execute(query).fetchone()
        if number <= self._config.max_answers and total <= self._config.max_bytes:
            return
        newest_first = (
            "SELECT name, count(*) OVER newest AS rank, sum(bytes) OVER newest AS total "
            "FROM answers WHERE state != ? WINDOW newest AS (ORDER BY changed_s DESC, number DESC)"
        )
        self._database.execute(
            "DELETE FROM answers WHERE name != ? AND name IN "  # noqa: S608 - a constant
            f"(SELECT name FROM ({newest_first}) WHERE rank > ? OR total > ?)",
            (
                spared,
                KeyState.RUNNING.value,
                int(self._config.max_answers * ROOM),
                int(self._config.max_bytes * ROOM),
            ),
        )

    # -- locks and errors ------------------------------------------------------------------------

    def _lock(self, name: str) -> bool:
        """Lock a key; False if another store holds it."""
        try:
            self._set_lock(name, fcntl.F_WRLCK)
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def _unlock(self, name: str) -> None:
        self._set_lock(name, fcntl.F_UNLCK)

    def _set_lock(self, name: str, kind: int) -> None:
        """Lock or unlock one byte of the file of locks, far beyond its end.

        The lock belongs to this open file, not to the process, so that stores of one process
        exclude each other, too.
        """
        at = int(name[:15], 16)
        request = struct.pack("hhqqi0q", kind, os.SEEK_SET, at, 1, 0)
        fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, request)

    @contextmanager
    def _freeing(self, name: str) -> Iterator[None]:
        try:
            yield
        finally:
            self._held.pop(name, None)
            self._unlock(name)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, NewerFile, ValueError, zlib.error) as exc:
            if isinstance(exc, UnsafeFolder):
                log.error("keyed requests fail: %s", exc)  # noqa: TRY400 - one sentence is enough
            else:
                log.warning("answers to keyed requests cannot be stored: %s", exc)
            raise IdempotencyFailed(
                "The answer to a request with an Idempotency-Key cannot be stored now; the "
                "Router's log has the reason. Without the header the request is answered."
            ) from exc
