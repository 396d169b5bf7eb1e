"""Delivery of weight files from the head's store to boards' disks.

It owns the boards' locks; the transfer itself is in ``transfer``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from rkserve.control.artifact_metadata import ArtifactMetadata
from rkserve.control.operations import BoardOutcome, ResultStatus
from rkserve.coordinator.boards.roster import Roster, result_of
from rkserve.coordinator.boards.transfer import LockOf, TransferLimits, stage
from rkserve.core.desired_state import Artifact, BaseVersion
from rkserve.core.errors import BoardGone, RkserveError, StageFailed
from rkserve.core.metrics import CoordinatorMetrics

Put = Callable[[bytes], Any]


class FileStore(Protocol):
    """The required part of the head's file store; its calls block."""

    def check(self, version: Artifact) -> None:
        """Raise ``ArtifactNotFound`` or ``ArtifactRefused`` unless the file is complete."""

    def facts(self, digest: str) -> ArtifactMetadata:
        """Return the metadata of a content."""

    def model(self, model: str, version: str) -> BaseVersion:
        """Return the base weights of that name. Raises ``ArtifactNotFound``."""

    def own_digest(self, model: str) -> str | None:
        """Return the sha256 of the file in a model's own folder, None if it is not on this
        machine.
        """

    def known_own_digest(self, model: str) -> str | None:
        """Return the same if it was computed before; it reads nothing."""

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all stored files."""

    def remove(self, digest: str, idle_s: float = 0.0) -> bool:
        """Remove an unneeded file, unless it arrived within ``idle_s``. It does not block for long,
        so the caller need not yield between its check and the removal.
        """

    def read(self, digest: str, offset: int, size: int) -> bytes:
        """Return a part of a file."""


class Stager:
    """Delivers files to boards. Use it from one event loop."""

    def __init__(
        self,
        roster: Roster,
        store: FileStore,
        put: Put,
        metrics: CoordinatorMetrics,
        *,
        timeout_s: float,
        pace: TransferLimits,
    ) -> None:
        """``put`` turns a chunk into the value sent to boards: a reference that each of them
        fetches.
        """
        self._pace = pace
        self._roster = roster
        self._store = store
        self._put = put
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._locks: dict[str, asyncio.Lock] = {}

    def at(self, board_id: str) -> asyncio.Lock:
        """Return the lock of a board: only its holder delivers files or loads there."""
        return self._locks.setdefault(board_id, asyncio.Lock())

    async def bring(self, version: Artifact, board_id: str) -> None:
        """Deliver a version to one board, whose lock the caller holds.

        Raises:
            RkserveError: it was not delivered.
        """
        # The board's own lock is held by the caller.
        held = asyncio.Lock()
        result = (await self._stage(version, [board_id], lambda _: held))[board_id]
        if isinstance(result, RkserveError):
            raise result

    async def spread(
        self, version: Artifact, board_ids: Iterable[str], timeout_s: float | None = None
    ) -> dict[str, BoardOutcome]:
        """Deliver a version to boards, to each as soon as its lock is free; return the results."""
        boards = sorted(set(board_ids))
        began_s = time.monotonic()
        ended = await self._stage(version, boards, self.at, timeout_s)
        results: dict[str, BoardOutcome] = {}
        for board in boards:
            said = ended[board]
            took_ms = (time.monotonic() - began_s) * 1e3
            if isinstance(said, RkserveError):
                results[board] = result_of(said, took_ms)
            else:
                results[board] = BoardOutcome(ResultStatus.OK, said["stage_ms"], details=said)
        return results

    async def _stage(
        self,
        version: Artifact,
        boards: list[str],
        lock_of: LockOf,
        timeout_s: float | None = None,
    ) -> dict[str, RkserveError | dict[str, Any]]:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        digest = version.digest
        try:
            deliveries = await stage(
                version,
                boards,
                lambda offset, size: self._store.read(digest, offset, size),
                self._put,
                self._ask,
                lock_of=lock_of,
                pace=replace(self._pace, limit_s=limit_s),
            )
        except (OSError, RkserveError) as exc:
            why = f"the file cannot be read on the head node: {exc}"
            return {board: StageFailed(board, why) for board in boards}
        ended: dict[str, RkserveError | dict[str, Any]] = {}
        for board, one in deliveries.items():
            self._metrics.staged_bytes.inc(one.sent_bytes)
            if one.error is not None:
                code = one.error.code or "internal_error"
                self._metrics.board_failures.labels("stage", code).inc()
                ended[board] = one.error
                continue
            self._metrics.stage.observe(one.ms / 1e3)
            ended[board] = {
                "stage_ms": round(one.ms, 3),
                "sent_bytes": one.sent_bytes,
                "resumed_bytes": one.resumed_bytes,
                "tries": one.tries,
            }
        return ended

    async def _ask(self, board_id: str, method: str, *args: Any, timeout_s: float) -> Any:
        seat = self._roster.seat(board_id)
        if seat is None:
            raise BoardGone(board_id, "it has no replica now")
        return await self._roster.ask_one(seat, method, *args, timeout_s=timeout_s)
