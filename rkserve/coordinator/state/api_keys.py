"""The cluster's API keys at the Coordinator: on disk first, then at all Routers.

Each Router has a long poll here. A change is answered once every Router that polls has it, or after
a second, with the number of those that do not have it yet. A Router that was silent for longer than
``SILENT_S`` is not known any more, nor is one that has not polled since the Coordinator's start.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rkserve.control.codec import read_api_key, write_api_key
from rkserve.control.keys import KeyOutcome, KeyRequest, RevokeKey, changed
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.coordinator.state.ledger_files import BUSY_S, FILE
from rkserve.core.api_keys import ApiKey, KeyTable
from rkserve.core.errors import LedgerFailed, RequestError, RkserveError

log = logging.getLogger(__name__)

SETTLE_S = 1.0
# A Router that sends nothing for so long has ended, or cannot be reached.
SILENT_S = 30.0
SAVE_USED_S = 60.0  # flash wears out by writes, and minutes are exact enough
CALLS_KEPT = 10_000


class KeyStore:
    """The tables of keys in the ledger. Calls raise ``LedgerFailed``."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def table(self) -> KeyTable:
        """Return all keys, the oldest first."""
        rows = self._ledger.rows("SELECT value FROM api_keys ORDER BY number")
        revisions = self._ledger.rows("SELECT revision FROM api_key_table")
        keys = tuple(read_api_key(value) for (value,) in rows)
        return KeyTable(revisions[0][0] if revisions else 0, keys)

    def used(self) -> dict[str, float]:
        """Return the time of each key's last use, by ID."""
        rows = self._ledger.rows("SELECT id, used_s FROM api_keys WHERE used_s IS NOT NULL")
        return dict(rows)

    def call(self, key: str) -> tuple[str, ApiKey] | None:
        """Return the fingerprint and the result of the call with that idempotency key."""
        rows = self._ledger.rows("SELECT fingerprint, value FROM api_key_calls WHERE key = ?", key)
        return (rows[0][0], read_api_key(rows[0][1])) if rows else None

    def write(self, table: KeyTable, key: ApiKey, call: KeyRequest, audit: AuditEntry) -> None:
        """Store a change of one key: it was added, changed or removed."""
        with self._ledger.transaction() as database:
            if table.key(key.id) is None:
                database.execute("DELETE FROM api_keys WHERE id = ?", (key.id,))
            else:
                database.execute(
                    "INSERT INTO api_keys (id, value) VALUES (?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET value = excluded.value",
                    (key.id, write_api_key(key)),
                )
            database.execute(
                "INSERT INTO api_key_table VALUES (1, ?) "
                "ON CONFLICT (id) DO UPDATE SET revision = excluded.revision",
                (table.revision,),
            )
            if call.key is not None:
                database.execute(
                    "INSERT INTO api_key_calls (key, fingerprint, value) VALUES (?, ?, ?)",
                    (call.key, call.fingerprint, write_api_key(key)),
                )
                database.execute(
                    "DELETE FROM api_key_calls WHERE number <= "
                    "(SELECT max(number) FROM api_key_calls) - ?",
                    (CALLS_KEPT,),
                )
            self._ledger.append(database, audit)

    def write_used(self, used: Mapping[str, float]) -> None:
        """Store the times of keys' last use."""
        with self._ledger.transaction(of_uses=True) as database:
            database.executemany(
                "UPDATE api_keys SET used_s = ? WHERE id = ?",
                [(used_s, key_id) for key_id, used_s in used.items()],
            )


class KeyKeeper:
    """The keys of the cluster. Use it from one event loop."""

    def __init__(self, ledger: Ledger, now_s: Callable[[], float] = time.time) -> None:
        """``now_s`` reads seconds since 1970."""
        self._ledger, self._store, self._now_s = ledger, KeyStore(ledger), now_s
        self._table = self._store.table()
        self._used = self._store.used()
        self._unsaved: dict[str, float] = {}
        self._saved_s = now_s()
        self._changed = asyncio.Event()
        self._polled = asyncio.Event()
        self._routers: dict[str, tuple[int, float]] = {}  # the revision that it has, and its time

    @property
    def table(self) -> KeyTable:
        """The keys in force."""
        return self._table

    # -- changes -------------------------------------------------------------------------------

    async def perform(self, call: KeyRequest) -> KeyOutcome:
        """Make a change; return once the Routers have it, or after ``SETTLE_S``. Raises
        ``RkserveError``.
        """
        outcome = self.change(call)
        return replace(outcome, routers_behind=await self._settle(outcome.revision, call.router))

    def change(self, call: KeyRequest) -> KeyOutcome:
        """Store a change; then it is in force, and Routers get it. Raises ``RkserveError``."""
        try:
            repeated = self._repeated(call)
            if repeated is not None:
                return repeated
            table, key = changed(self._table, call, self._now_s())
            self._store.write(table, key, call, self._line(call, key=key))
        except RkserveError as exc:
            self._refused(call, exc)
            raise
        if isinstance(call.change, RevokeKey):
            self._used.pop(key.id, None)
        self._publish(table)
        return KeyOutcome(key, table.revision)

    def _repeated(self, call: KeyRequest) -> KeyOutcome | None:
        if call.key is None:
            return None
        known = self._store.call(call.key)
        if known is None and self._ledger.by_key(call.key) is None:
            return None
        if known is None or known[0] != call.fingerprint:
            raise RequestError(
                "The Idempotency-Key was used for another call: give every call a key of its own.",
                "Idempotency-Key",
            )
        return KeyOutcome(known[1], self._table.revision, applied=False)

    def _line(
        self, call: KeyRequest, outcome: str = "succeeded", status: int = 200, *, key: ApiKey | None
    ) -> AuditEntry:
        named = {} if key is None else {"id": key.id, "name": key.name}
        params = {**call.change.params, **named}
        return AuditEntry(self._now_s(), call.who, call.change.kind, params, outcome, status)

    def _refused(self, call: KeyRequest, exc: RkserveError) -> None:
        line = self._line(call, exc.code or "invalid_request", exc.http_status, key=None)
        try:
            self._ledger.write(audit=[line])
        except LedgerFailed as failed:
            log.warning("a refused call by %s could not be audited: %s", call.who, failed)

    async def _settle(self, revision: int, but: str) -> int:
        """Wait until all Routers that poll, ``but`` one, have a revision; return how many
        lack it.
        """
        until_s = time.monotonic() + SETTLE_S
        while (left_s := until_s - time.monotonic()) > 0 and self._behind(revision, but):
            try:
                await asyncio.wait_for(self._polled.wait(), left_s)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                break
        behind = self._behind(revision, but)
        if behind:
            log.warning(
                "these Routers have not confirmed revision %d of the keys: %s", revision, behind
            )
        return len(behind)

    def _behind(self, revision: int, but: str) -> list[str]:
        now_s = time.monotonic()
        alive = {n: one for n, one in self._routers.items() if now_s - one[1] < SILENT_S}
        self._routers = alive
        return [name for name, (has, _) in alive.items() if has < revision and name != but]

    def _publish(self, table: KeyTable) -> None:
        self._table = table
        self._changed.set()
        self._changed = asyncio.Event()

    # -- questions -----------------------------------------------------------------------------

    async def after(
        self, router: str, revision: int, wait_s: float, used: Mapping[str, float]
    ) -> KeyTable:
        """Return the keys as soon as their revision is not ``revision``, or after ``wait_s``.

        ``router`` names the Router that has that revision, or -1 if none; ``used`` are the times of
        the last use of keys since its previous call.
        """
        for key_id, used_s in used.items():
            if self._table.key(key_id) is not None and used_s > self._used.get(key_id, 0.0):
                self._used[key_id] = self._unsaved[key_id] = used_s
        if revision > self._table.revision:
            # The ledger was lost, or comes from a backup: Routers take later revisions only.
            log.warning("revision %d of the keys is known out there, and lost here", revision)
            self._publish(replace(self._table, revision=revision + 1))
        self._routers[router] = revision, time.monotonic()
        self._polled.set()
        self._polled = asyncio.Event()
        if revision == self._table.revision:
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return self._table
        return self._table

    def listed(self) -> list[tuple[ApiKey, float | None]]:
        """Return the keys with the times of their last use."""
        return [(one, self._used.get(one.id)) for one in self._table.keys]

    def save_used(self) -> None:
        """Store the times of keys' last use, at most once a minute. Raises ``LedgerFailed``."""
        now_s = self._now_s()
        if self._unsaved and not 0 <= now_s - self._saved_s < SAVE_USED_S:
            self._store.write_used(self._unsaved)
            self._unsaved, self._saved_s = {}, now_s


def create_offline(folder: Path, call: KeyRequest) -> KeyOutcome:
    """Make a key in the ledger of a folder, which no Coordinator has open.

    Raises:
        LedgerFailed: a Coordinator has it open, or it cannot be written.
        RkserveError: the key is refused.
    """
    ledger = Ledger.open(folder)
    try:
        return KeyKeeper(ledger).change(call)
    finally:
        ledger.close()


def check_ledger(folder: Path) -> None:
    """Open the ledger of a folder, which no Coordinator has open, and close it.

    Raises ``LedgerFailed``: it is damaged or gone, or a Coordinator has it open.
    """
    Ledger.open(folder).close()


def has_keys(folder: Path) -> bool:
    """Return whether the ledger of a folder has a key, whether or not a Coordinator has it open.

    Raises:
        LedgerFailed: it cannot be read.
    """
    file = folder / FILE
    if not file.exists():
        return False
    try:
        with closing(sqlite3.connect(file, timeout=BUSY_S)) as database:
            database.execute("PRAGMA query_only = ON")
            tables = "SELECT 1 FROM sqlite_master WHERE name = 'api_keys'"
            if not database.execute(tables).fetchall():
                return False  # that of an earlier release
            return bool(database.execute("SELECT 1 FROM api_keys LIMIT 1").fetchall())
    except sqlite3.Error as exc:
        raise LedgerFailed(f"The ledger {file} cannot be read: {exc}.") from exc
