"""The usage of API keys over all Routers: each adds its counts to a file of its node, so that they
outlive it, and asks the others for theirs.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from rkserve.core.answer_metrics import (
    DAYS_KEPT,
    DayUsage,
    RouterUsage,
    UsageByDay,
    UsageReport,
    together,
)
from rkserve.core.files import boot_id
from rkserve.core.node_database import NewerFile, atomic, open_shared

log = logging.getLogger(__name__)

FILE = "usage.sqlite3"
SCHEMA = 1
SAVE_S = 10.0  # a Router that is killed loses no more than this
PEERS_S = 2.0
UNUSABLE = (sqlite3.Error, OSError, NewerFile)
_CREATE = (
    "CREATE TABLE usage (day INTEGER, key TEXT, requests INTEGER NOT NULL, "
    "prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, board_s REAL NOT NULL, "
    "PRIMARY KEY (day, key)) WITHOUT ROWID",
)


class UsagePeers(Protocol):
    """The other Routers of one application."""

    async def usage(
        self, first_day: int, timeout_s: float
    ) -> tuple[Sequence[RouterUsage], Sequence[str]]:
        """Return the usage at those that answered in time, since a day, and the names of the silent
        ones.
        """


class UsageFile:
    """The open file of a node's usage. Use from one thread at a time. Calls block, and raise
    ``UNUSABLE``.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / FILE
        self._database = open_shared(file, SCHEMA, _CREATE)
        found = file.stat()
        # Not the path: boards of one image have the same one, and two Routers of a machine may
        # have mounted the folder at different ones.
        boot = boot_id()
        if not boot:
            self.close()
            raise OSError("this machine has no boot id, which names the file")
        self.name = f"{boot}/{found.st_dev}/{found.st_ino}"

    def add(self, rows: Iterable[DayUsage]) -> None:
        """Add usage to the stored one, and remove the oldest days beyond ``DAYS_KEPT``."""
        with atomic(self._database):
            for row in rows:
                tokens = row.prompt_tokens, row.completion_tokens
                self._database.execute(
                    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (day, key) DO UPDATE "
                    "SET requests = requests + excluded.requests, "
                    "prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                    "completion_tokens = completion_tokens + excluded.completion_tokens, "
                    "board_s = board_s + excluded.board_s",
                    (row.day, row.key, row.requests, *tokens, row.board_s),
                )
            # By their number, not by the clock: boards may start with a wrong time.
            self._database.execute(
                "DELETE FROM usage WHERE day NOT IN "
                "(SELECT DISTINCT day FROM usage ORDER BY day DESC LIMIT ?)",
                (DAYS_KEPT,),
            )

    def rows(self, first_day: int) -> tuple[DayUsage, ...]:
        """Return the usage since a day."""
        found = self._database.execute(
            "SELECT day, key, requests, prompt_tokens, completion_tokens, board_s FROM usage "
            "WHERE day >= ?",
            (first_day,),
        )
        return tuple(DayUsage(*row) for row in found)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


class UsageRecords:
    """The usage at one Router, and over all. Use from one event loop."""

    def __init__(
        self,
        counted: UsageByDay,
        router: str = "0",
        folder: Path | None = None,
        peers: UsagePeers | None = None,
    ) -> None:
        """``folder`` is one of the node; without it usage is counted in memory alone."""
        self._counted, self._router, self._folder, self._peers = counted, router, folder, peers
        self._file: UsageFile | None = None
        # SQLite blocks, and one connection is used by one thread at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")
        self._one_stores = asyncio.Lock()
        self._failure = ""

    async def follow(self) -> None:
        """Store what is counted, periodically and forever."""
        while True:
            await asyncio.sleep(SAVE_S)
            if self._counted.rows():
                await self.own(self._counted.today)

    async def own(self, first_day: int) -> RouterUsage:
        """Store what is counted; return the usage of this node's Routers since a day."""
        # A caller that is cancelled must not leave counts that are neither here nor stored.
        return await asyncio.shield(self._own(first_day))

    async def report(self, days: int) -> UsageReport:
        """Return the usage of all keys on the last ``days`` days (UTC), including today."""
        today = self._counted.today
        first_day = today - days + 1
        others: Sequence[RouterUsage] = ()
        silent: Sequence[str] = ()
        if self._peers is not None:
            others, silent = await self._peers.usage(first_day, PEERS_S)
        routers = (*others, await self.own(first_day))
        return UsageReport(
            [row for row in together(routers) if first_day <= row.day <= today],
            tuple(one.router for one in routers),
            silent,
            tuple(one.router for one in routers if not one.file),
        )

    async def close(self) -> None:
        """Store what is counted, and close the file."""
        await self.own(self._counted.today)
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    async def _own(self, first_day: int) -> RouterUsage:
        async with self._one_stores:
            folder = self._folder
            if folder is None:
                return RouterUsage(self._router, unstored=tuple(self._counted.rows()))
            taken = self._counted.take()
            added, name, rows = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._exchange, folder, taken, first_day
            )
            if not added:
                self._counted.put_back(taken)
        left = () if name else tuple(self._counted.rows())
        return RouterUsage(self._router, name, rows, left)

    def _exchange(
        self, folder: Path, taken: Sequence[DayUsage], first_day: int
    ) -> tuple[bool, str, tuple[DayUsage, ...]]:
        """Return whether the usage was added, and the file's name and rows; empty if it failed."""
        added = False
        try:
            if self._file is None:
                self._file = UsageFile(folder)
            if taken:
                self._file.add(taken)
            added = True
            found = self._file.name, self._file.rows(first_day)
        except UNUSABLE as exc:
            # A full disk is logged once. The file is opened again: it may be another one by then.
            if str(exc) != self._failure:
                log.warning("usage cannot be stored in %s, only counted: %s", folder, exc)
            self._failure = str(exc)
            self._close()
            return added, "", ()
        self._failure = ""
        return (True, *found)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
