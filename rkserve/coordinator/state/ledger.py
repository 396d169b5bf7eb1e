"""The Coordinator's durable records on the head's disk: desired state, API keys, the highest signed
versions, operations with their idempotency keys, and the audit log.

One SQLite file with one writer. Every call returns after the data is on the disk: nothing may be
sent to a board that a power cut could undo. Calls block for one synchronous write; the Coordinator
could do nothing meanwhile anyway.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rkserve.control.calls import OperationKind
from rkserve.control.codec import (
    SCHEMA,
    read_cache,
    read_desired,
    read_operation,
    write_cache,
    write_desired,
    write_operation,
)
from rkserve.control.operations import ControlOperation, OperationState
from rkserve.coordinator.state.ledger_files import (
    BUSY_S,
    FILE,
    LOGS,
    backups_of,
    copy_ledger,
    desired_row,
    lock_folder,
    provide_reserve,
    way_back,
)
from rkserve.core.desired_state import Desired, DesiredCache
from rkserve.core.errors import LedgerFailed
from rkserve.core.files import free_bytes, open_private, sync
from rkserve.core.node_database import atomic

log = logging.getLogger(__name__)

DAMAGED = "damaged"  # the kind of an entry of the audit log that cannot be read

# Each entry migrates the schema by one version. Entries are never edited: existing ledgers have
# applied them.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE desired (id INTEGER PRIMARY KEY CHECK (id = 1), value TEXT NOT NULL)",
        "CREATE TABLE operations (number INTEGER PRIMARY KEY AUTOINCREMENT, "
        "id TEXT NOT NULL UNIQUE, state TEXT NOT NULL, value TEXT NOT NULL)",
    ),
    (
        "ALTER TABLE operations ADD COLUMN key TEXT",
        "UPDATE operations SET key = json_extract(value, '$.key')",
        "CREATE UNIQUE INDEX operations_by_key ON operations (key) WHERE key IS NOT NULL",
        "CREATE INDEX operations_by_state ON operations (state)",
        "CREATE TABLE audit (number INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT NOT NULL)",
    ),
    (
        "CREATE TABLE caches (model TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, "
        "PRIMARY KEY (model, name))",
    ),
    (
        "CREATE TABLE api_keys (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, "
        "value TEXT NOT NULL, used_s REAL)",
        "CREATE TABLE api_key_table (id INTEGER PRIMARY KEY CHECK (id = 1), "
        "revision INTEGER NOT NULL)",
        "CREATE TABLE api_key_calls (number INTEGER PRIMARY KEY AUTOINCREMENT, "
        "key TEXT NOT NULL UNIQUE, fingerprint TEXT NOT NULL, value TEXT NOT NULL)",
    ),
    (
        "CREATE TABLE signed_versions (model TEXT NOT NULL, name TEXT NOT NULL, "
        "kind TEXT NOT NULL, key_id TEXT NOT NULL, version INTEGER NOT NULL, "
        "digest TEXT NOT NULL, PRIMARY KEY (model, name, kind, key_id))",
    ),
    (
        # Copies of two clusters' ledgers on one board must not be mistaken for each other.
        "CREATE TABLE identity (id INTEGER PRIMARY KEY CHECK (id = 1), cluster TEXT NOT NULL)",
        "INSERT INTO identity VALUES (1, lower(hex(randomblob(8))))",
    ),
)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One entry of the audit log: caller, time and result, without keys or prompts.

    ``at_s`` is in seconds since 1970. ``status`` is the HTTP status of the answer, ``outcome`` the
    operation's state or the error's code.
    """

    at_s: float
    who: str
    kind: str
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    outcome: str = ""
    status: int = 200
    operation: str | None = None
    epoch: int = 0

    @classmethod
    def of(cls, ended: ControlOperation, at_s: float, who: str) -> AuditEntry:
        """Return the entry of an ended operation."""
        outcome = ended.state.value if ended.error is None else ended.error.code
        return cls(
            at_s, who, ended.kind.value, ended.params, outcome, ended.status, ended.id, ended.epoch
        )


class Ledger:
    """The one open ledger of a folder. Use it from one event loop; long reads may run in any
    thread, and do not delay writes.
    """

    def __init__(
        self,
        folder: Path,
        lock: int,
        database: sqlite3.Connection,
        reading: sqlite3.Connection,
        limit: int,
    ) -> None:
        """Use ``open``."""
        self._folder = folder
        self._reading = reading
        self._one_reads = threading.Lock()
        self._lock = lock
        self._database = database
        self._limit = limit
        self._changes = self._uses = 0
        self._place = _place(self.file)

    @classmethod
    def open(
        cls,
        folder: Path,
        max_operations: int = 10_000,
        migrations: Sequence[Sequence[str]] = MIGRATIONS,
        free: Callable[[Path], int] = free_bytes,
    ) -> Ledger:
        """Open the folder's ledger, or create one; older schemas are migrated.

        Raises:
            LedgerFailed: another process uses the folder, the disk is full or not writable, the
                file is damaged, or a newer release wrote it.

        ``free`` returns the free bytes of the disk. On a full disk the reserve is released.
        """
        lock = lock_folder(folder)
        try:
            provide_reserve(folder, free)
            _create(folder / FILE, migrations)
            database = _connect(folder / FILE, migrations)
            reading = _connect_to_read(folder / FILE, database)
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock, database, reading, max_operations)

    @classmethod
    def check(cls, folder: Path) -> None:
        """Open and close the ledger of a folder that has one or its backups, as ``open`` does.

        Raises:
            LedgerFailed: as ``open``.
        """
        if (folder / FILE).exists() or backups_of(folder):
            cls.open(folder).close()

    def close(self) -> None:
        """Release the folder. Written data stays."""
        with self._one_reads:
            self._reading.close()
        self._database.close()
        os.close(self._lock)

    @property
    def file(self) -> Path:
        """The path of the database."""
        return self._folder / FILE

    @property
    def changes(self) -> int:
        """The number of stored changes since it was opened, without those of ``uses``."""
        return self._changes

    @property
    def uses(self) -> int:
        """The number of times that uses of keys were stored since it was opened."""
        return self._uses

    @property
    def cluster(self) -> str:
        """The random name of the cluster, which a restored ledger keeps."""
        ((cluster,),) = self.rows("SELECT cluster FROM identity")
        return str(cluster)

    # -- desired state -------------------------------------------------------------------------

    def desired(self) -> Desired:
        """Return the desired state; in a new ledger it is empty at epoch 0."""
        rows = self.rows("SELECT value FROM desired")
        return read_desired(rows[0][0]) if rows else Desired()

    def write(
        self,
        *,
        desired: Desired | None = None,
        operations: Iterable[ControlOperation] = (),
        audit: Iterable[AuditEntry] = (),
    ) -> None:
        """Write all of it in one transaction.

        Raises:
            LedgerFailed: the disk is full, for example; nothing was written.
        """
        with self.transaction() as database:
            if desired is not None:
                database.execute(
                    "INSERT INTO desired VALUES (1, ?) "
                    "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                    (write_desired(desired),),
                )
            for one in operations:
                database.execute(
                    "INSERT INTO operations (id, state, key, value) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET state = excluded.state, value = excluded.value",
                    (one.id, one.state.value, one.key, write_operation(one)),
                )
            for line in audit:
                self.append(database, line)

    def append(self, database: sqlite3.Connection, line: AuditEntry) -> None:
        """Add an entry to the audit log in a transaction."""
        database.execute("INSERT INTO audit (value) VALUES (?)", (_write_line(line),))
        self._forget(database)

    def _forget(self, database: sqlite3.Connection) -> None:
        """Delete the oldest audit entries, and the oldest ended operations with their keys."""
        database.execute(
            "DELETE FROM operations WHERE state != ? AND number <= "
            "(SELECT max(number) FROM operations) - ?",
            (OperationState.RUNNING.value, self._limit),
        )
        database.execute(
            "DELETE FROM audit WHERE number <= (SELECT max(number) FROM audit) - ?", (self._limit,)
        )

    def caches(self) -> list[DesiredCache]:
        """Return the desired named prompt caches, and the deleted ones."""
        rows = self.rows("SELECT value FROM caches ORDER BY model, name")
        return [read_cache(value) for (value,) in rows]

    def write_caches(
        self, kept: Iterable[DesiredCache], forgotten: Iterable[DesiredCache] = ()
    ) -> None:
        """Store named prompt caches, and delete others. Raises ``LedgerFailed``."""
        with self.transaction() as database:
            for one in kept:
                database.execute(
                    "INSERT INTO caches VALUES (?, ?, ?) "
                    "ON CONFLICT (model, name) DO UPDATE SET value = excluded.value",
                    (one.model, one.name, write_cache(one)),
                )
            for one in forgotten:
                database.execute(
                    "DELETE FROM caches WHERE model = ? AND name = ?", (one.model, one.name)
                )

    # -- what was asked of it ------------------------------------------------------------------

    def operations(self, limit: int = 100) -> list[ControlOperation]:
        """Return the latest operations, the last one first. Call it in any thread."""
        return self._many("ORDER BY number DESC LIMIT ?", limit)

    def of_kind(self, kind: OperationKind) -> list[ControlOperation]:
        """Return all operations of a kind, in the order of their beginning. Call it in any
        thread.
        """
        return self._many(
            "WHERE json_extract(value, '$.operation.kind') = ? ORDER BY number", kind.value
        )

    def running(self) -> list[ControlOperation]:
        """Return the operations that are not over, in the order of their beginning."""
        return self._operations("WHERE state = ? ORDER BY number", OperationState.RUNNING.value)

    def partial(self) -> list[ControlOperation]:
        """Return the operations that some boards have yet to follow, in the order of their
        beginning.
        """
        return self._operations("WHERE state = ? ORDER BY number", OperationState.PARTIAL.value)

    def operation(self, name: str) -> ControlOperation | None:
        """Return the operation of that ID."""
        return next(iter(self._operations("WHERE id = ?", name)), None)

    def by_key(self, key: str) -> ControlOperation | None:
        """Return the operation with that idempotency key."""
        return next(iter(self._operations("WHERE key = ?", key)), None)

    def audit(self, limit: int = 100) -> list[AuditEntry]:
        """Return the latest entries, the last one first. Call it in any thread."""
        rows = self._read("SELECT value FROM audit ORDER BY number DESC LIMIT ?", limit)
        return [_read_line(value) for (value,) in rows]

    def _operations(self, which: str, *values: Any) -> list[ControlOperation]:
        rows = self.rows(f"SELECT value FROM operations {which}", *values)  # noqa: S608 - constants
        return [read_operation(value) for (value,) in rows]

    def _many(self, which: str, *values: Any) -> list[ControlOperation]:
        rows = self._read(f"SELECT value FROM operations {which}", *values)  # noqa: S608 - constants
        return [read_operation(value) for (value,) in rows]

    # -- the file ------------------------------------------------------------------------------

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._one_reads:
            return self._fetch(self._reading, query, values)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises ``LedgerFailed``."""
        return self._fetch(self._database, query, values)

    def _fetch(
        self, database: sqlite3.Connection, query: str, values: Sequence[Any]
    ) -> list[tuple[Any, ...]]:
        try:
            return database.execute(query, values).fetchall()
        except sqlite3.Error as exc:
            raise LedgerFailed(f"The ledger {self.file} cannot be read: {exc}.") from exc

    @contextmanager
    def transaction(self, *, of_uses: bool = False) -> Iterator[sqlite3.Connection]:
        """Have everything in a block written, or nothing. Raises ``LedgerFailed``.

        With ``of_uses`` only uses of keys are written, which alone are worth no backup soon.
        """
        try:
            with atomic(self._database):
                yield self._database
                self._require_place()
            self._changes += not of_uses
            self._uses += of_uses
        except sqlite3.Error as exc:
            raise LedgerFailed(
                f"The ledger {self.file} cannot be written, so nothing was changed: {exc}. "
                "Free space on the head node's disk, or mend it, and repeat the call."
            ) from exc

    def _require_place(self) -> None:
        """Raise ``LedgerFailed`` if the file is no longer the one that is open.

        SQLite would go on with a file that has no name, and a restart would lose its changes.
        """
        if _place(self.file) != self._place:
            raise LedgerFailed(
                f"The ledger {self.file} or its log was moved, removed or replaced while it is in "
                "use, so nothing was changed. Put it back; or end the application, restore a "
                "backup, and start it again."
            )


def _create(file: Path, migrations: Sequence[Sequence[str]]) -> None:
    """Create a new ledger, completely or not at all; refuse an empty one.

    SQLite would take an empty file for a new database: a cluster that lost its ledger would begin
    anew without a word.
    """
    try:
        if file.exists():
            if file.stat().st_size:
                return
            raise LedgerFailed(
                f"The ledger {file} is damaged: it is empty. {way_back(file.parent)}"
            )
        if backups_of(file.parent):
            raise LedgerFailed(f"The ledger {file} is gone. {way_back(file.parent)}")
        fresh = file.with_name(f"{file.name}.new")
        # SQLite would apply the log of a file that was moved away to the new one.
        for one in (fresh, file):
            for part in LOGS:
                one.with_name(one.name + part).unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)
        os.close(open_private(fresh, os.O_WRONLY | os.O_CREAT))
        _connect(fresh, migrations).close()
        sync(fresh)
        fresh.replace(file)
        sync(file.parent)
    except OSError as exc:
        raise LedgerFailed(
            f"The ledger {file} cannot be made: {exc.strerror or exc}. Check the space on the head "
            "node's disk."
        ) from exc


def _connect(file: Path, migrations: Sequence[Sequence[str]]) -> sqlite3.Connection:
    try:
        # Transactions are begun by hand, and all of them in the thread of one event loop.
        database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None)
    except sqlite3.Error as exc:
        raise LedgerFailed(f"The ledger {file} cannot be opened: {exc}.") from exc
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # WAL's default loses the last at a power cut
        _check(database)
        _back_up(file, database, len(migrations))
        _migrate(file, database, migrations)
    except sqlite3.OperationalError as exc:
        database.close()
        raise LedgerFailed(
            f"The ledger {file} cannot be opened: {exc}. Check the space on the head node's disk."
        ) from exc
    except sqlite3.DatabaseError as exc:
        database.close()
        raise LedgerFailed(f"The ledger {file} is damaged: {exc}. {way_back(file.parent)}") from exc
    except BaseException:
        database.close()
        raise
    return database


def _connect_to_read(file: Path, database: sqlite3.Connection) -> sqlite3.Connection:
    try:
        # Any thread may read, one at a time.
        reading = sqlite3.connect(
            file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        reading.execute("PRAGMA query_only = ON")
    except sqlite3.Error as exc:
        database.close()
        raise LedgerFailed(f"The ledger {file} cannot be opened: {exc}.") from exc
    return reading


def _place(file: Path) -> list[tuple[int, int] | None]:
    """Return device and inode of a ledger and of its log."""
    found: list[tuple[int, int] | None] = []
    for path in (file, file.with_name(f"{file.name}-wal")):
        try:
            at = path.stat()
        except FileNotFoundError:
            found.append(None)
        else:
            found.append((at.st_dev, at.st_ino))
    return found


def _check(database: sqlite3.Connection) -> None:
    (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _back_up(file: Path, database: sqlite3.Connection, known: int) -> None:
    """Copy a ledger of an earlier release before anything in it is changed.

    The copy is named after its schema: that of the tables, and that of the values. Raises
    ``LedgerFailed``.
    """
    (tables,) = database.execute("PRAGMA user_version").fetchone()
    if tables == 0:
        return  # it is new
    row = desired_row(database) if tables <= known else None
    values = SCHEMA if row is None else row[1]
    if tables >= known and values >= SCHEMA:
        return
    # An earlier copy of that name is replaced: nothing has changed yet.
    copy = file.with_name(f"{file.name}.bak-{tables}.{values}")
    copy_ledger(file, copy)
    log.info("the ledger of an earlier release was copied to %s", copy)


def _or_the_backup(file: Path) -> str:
    """Return the remedy with the latest backup, empty without one."""
    found = sorted(file.parent.glob(f"{file.name}.bak-*"), key=lambda one: one.stat().st_mtime)
    if not found:
        return ""
    wal = " ".join(f"{file}-{part}" for part in ("wal", "shm"))
    return f", or go back to the state before that release: rm -f {wal} && cp {found[-1]} {file}"


def _migrate(file: Path, database: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise LedgerFailed(
            f"The ledger {file} has schema {version}, and this release knows {len(migrations)}: a "
            f"newer rkserve wrote it. Start that one{_or_the_backup(file)}."
        )
    for number, statements in enumerate(migrations[version:], version + 1):
        with atomic(database):
            for statement in statements:
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {number}")
    row = desired_row(database)
    if row is not None and row[1] > SCHEMA:
        raise LedgerFailed(
            f"The ledger {file} has schema {row[1]} of its values, and this release knows "
            f"{SCHEMA}: a newer rkserve wrote it. Start that one{_or_the_backup(file)}."
        )
    if row is not None and row[1] < SCHEMA:
        # At once, so that the copy is of a time before any later change.
        with atomic(database):
            value = write_desired(read_desired(row[0]))
            database.execute("UPDATE desired SET value = ?", (value,))


def _read_line(value: str) -> AuditEntry:
    """Return an entry; one that the disk has damaged is shown as such, among the others."""
    try:
        return AuditEntry(**json.loads(value))
    except (ValueError, TypeError):
        log.warning("an entry of the audit log is damaged: %.200r", value)
        return AuditEntry(0.0, "", DAMAGED)


def _write_line(line: AuditEntry) -> str:
    return json.dumps(asdict(line), separators=(",", ":"), allow_nan=False)
