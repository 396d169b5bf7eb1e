"""The head's files on boards: copies of its ledger, and the return of files that its store lacks.

Both serve a head whose disk died. A copy of the ledger's newest backup goes to boards on other
nodes; after the ledger was restored, adapters and weights that boards still have come back. Parts
are short enough for Ray to send them within the call: they take no place in any object store.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rkserve.control.calls import DeclaredArtifact
from rkserve.coordinator.boards.roster import Roster
from rkserve.coordinator.boards.transfer import TransferLimits, stage
from rkserve.coordinator.state.ledger_files import LedgerBackup
from rkserve.core.board_report import BoardReport, BoardState, LedgerCopy
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.desired_state import AdapterVersion, Artifact, Desired
from rkserve.core.errors import BoardGone, LedgerFailed, RkserveError

log = logging.getLogger(__name__)

PART_BYTES = 64 << 10  # Ray sends arguments and answers of up to 100 KiB within the call
# Between two copies to one board: SD cards wear.
COPY_S = 600.0
REST_S = 600.0  # of a board that failed
ASK_S = 5.0
AGAIN_S = 60.0  # after a file that did not come back: it may have gigabytes
# A board that fails is not tried again before its rest: another one is.
LIMITS = TransferLimits(chunk_bytes=PART_BYTES, tries=1, patience_s=10.0, limit_s=120.0)
READ_BYTES = 1 << 20
GZIP = 31  # zlib's number for the largest window and a header of gzip
# Boards that fetch their model, or have failed, answer no such calls.
UNFIT = frozenset({BoardState.LOST, BoardState.FETCHING, BoardState.FAILED})


async def ask_board(
    roster: Roster, board_id: str, method: str, *args: Any, timeout_s: float
) -> Any:
    """Call a method of a board's current replica once. Raises ``RkserveError``."""
    address = roster.address(board_id)
    if address is None:
        raise BoardGone(board_id, "it has no replica now")
    return await roster.ask_one(address, method, *args, timeout_s=timeout_s)


class BoardRest:
    """Boards that failed, and are left alone for a while; each reason is logged once."""

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._until_s: dict[str, float] = {}
        self._logged: dict[str, str] = {}

    def add(self, board_id: str, what: str, exc: RkserveError) -> None:
        """Leave a board alone after its failure."""
        self._until_s[board_id] = time.monotonic() + self._rest_s
        if self._logged.get(board_id) != exc.message:
            self._logged[board_id] = exc.message
            log.warning("%s: %s; another board is tried", what, exc.message)

    def over(self, board_id: str) -> None:
        """Note a success: a later failure is logged again."""
        self._until_s.pop(board_id, None)
        self._logged.pop(board_id, None)

    def __contains__(self, board_id: str) -> bool:
        return time.monotonic() < self._until_s.get(board_id, float("-inf"))


@dataclass(frozen=True)
class _Known:
    """The copies that a board's replica has named, and has got since; the newest first."""

    replica: str
    copies: tuple[LedgerCopy, ...]
    sent_s: float = float("-inf")  # when this process sent the last one


class LedgerCopier:
    """Sends the newest backup to boards. Use it from one event loop.

    Boards that have copies are preferred, so that a cluster's copies stay where they are; each is
    on a node of its own, and none on the head's, with whose disk it would be lost.
    """

    def __init__(
        self,
        roster: Roster,
        metrics: CoordinatorMetrics,
        cluster: str,
        wanted: int,
        *,
        now_s: Callable[[], float],
    ) -> None:
        """``now_s`` reads seconds since 1970; ``wanted`` is the number of boards."""
        self._roster, self._metrics = roster, metrics
        self._cluster, self._wanted = cluster, wanted
        self._now_s = now_s
        self._backup: LedgerBackup | None = None
        self._packed: tuple[LedgerBackup, LedgerCopy] | None = None
        self._known: dict[str, _Known] = {}
        self._chosen: tuple[str, ...] = ()
        self._rests = BoardRest(REST_S)

    def take(self, backup: LedgerBackup) -> None:
        """Note the newest backup."""
        self._backup = backup

    async def look(self) -> None:
        """Send the newest backup to the boards that need it and may get one.

        Raises:
            LedgerFailed: the backup cannot be read.
        """
        if self._wanted == 0 or (backup := self._backup) is None:
            return
        there = self._fit()
        await self._ask(there)
        self._show(there)
        self._chosen = self._choose(there)
        due = [board for board in self._chosen if self._is_due(board)]
        if not due:
            return
        content = b""
        if self._packed is None or self._packed[0] != backup:
            content, digest = await _packed(backup)
            self._packed = (backup, self._numbered(backup, digest, len(content)))
        copy = self._packed[1]
        if left := [board for board in due if not self._has(board, copy)]:
            content = content or (await _packed(backup))[0]
            await self._send(copy, content, left)
            self._show(there)

    # -- boards --------------------------------------------------------------------------------

    def _fit(self) -> dict[str, BoardReport]:
        addresses = {one.board_id: one for one in self._roster.addresses()}
        return {
            report.board_id: report
            for report in self._roster.reports()
            if report.state not in UNFIT
            and not report.on_head
            and report.board_id in addresses
            and not addresses[report.board_id].silent
        }

    async def _ask(self, there: dict[str, BoardReport]) -> None:
        """Ask boards for their copies, each replica once."""
        await asyncio.gather(
            *(
                self._ask_one(report)
                for report in there.values()
                if self._named_by(report.board_id) != report.replica
                and report.board_id not in self._rests
            )
        )

    def _named_by(self, board_id: str) -> str:
        return self._known[board_id].replica if board_id in self._known else ""

    async def _ask_one(self, report: BoardReport) -> None:
        board = report.board_id
        try:
            found = await ask_board(
                self._roster, board, "ledger_copies", self._cluster, timeout_s=ASK_S
            )
        except RkserveError as exc:
            self._rests.add(board, f"the copies of the ledger on board {board} are unknown", exc)
            return
        before = self._known.get(board)
        sent_s = float("-inf") if before is None else before.sent_s
        self._known[board] = _Known(report.replica, tuple(found), sent_s)

    def _choose(self, there: dict[str, BoardReport]) -> tuple[str, ...]:
        usable = [board for board in there if board in self._known and board not in self._rests]
        chosen: list[str] = []
        nodes: set[str] = set()
        for board in sorted(usable, key=self._preference):
            node = there[board].node or board
            if node not in nodes and len(chosen) < self._wanted:
                nodes.add(node)
                chosen.append(board)
        return tuple(chosen)

    def _preference(self, board: str) -> tuple[bool, int, str]:
        """Return the place of a board: those of before, those with copies, and all by name."""
        copies = self._known[board].copies
        newest = copies[0].number if copies else 0
        return board not in self._chosen, -newest, board

    def _is_due(self, board: str) -> bool:
        known = self._known[board]
        if time.monotonic() - known.sent_s < COPY_S:
            return False
        # An earlier process may have sent it. A clock that was set back makes no copy wait.
        age_s = self._now_s() - known.copies[0].made_s if known.copies else COPY_S
        return not 0 <= age_s < COPY_S

    def _has(self, board: str, copy: LedgerCopy) -> bool:
        return any(one.digest == copy.digest for one in self._known[board].copies)

    def _show(self, there: dict[str, BoardReport]) -> None:
        found = [self._known[board].copies for board in there if board in self._known]
        held = [copies for copies in found if copies]
        self._metrics.copies.set(len(held))
        self._metrics.copied.set(max((copies[0].made_s for copies in held), default=0))

    # -- sending -------------------------------------------------------------------------------

    def _numbered(self, backup: LedgerBackup, digest: str, size_bytes: int) -> LedgerCopy:
        """Return the copy of a backup: one that a board has, or the next one.

        It does not have the backup's own number: those of a restored head begin anew.
        """
        copies = [one for known in self._known.values() for one in known.copies]
        same = next((one for one in copies if one.digest == digest), None)
        number = 1 + max((one.number for one in copies), default=0)
        return same or LedgerCopy(self._cluster, number, backup.made_s, digest, size_bytes)

    async def _send(self, copy: LedgerCopy, content: bytes, boards: Iterable[str]) -> None:
        async def ask(board_id: str, method: str, /, *args: Any, timeout_s: float) -> Any:
            return await ask_board(self._roster, board_id, method, *args, timeout_s=timeout_s)

        results = await stage(
            copy,
            boards,
            lambda offset, size: content[offset : offset + size],
            lambda part: part,
            ask,
            pace=LIMITS,
        )
        for board, result in results.items():
            known = self._known[board]
            if result.error is not None:
                what = f"board {board} got no copy of the ledger"
                self._rests.add(board, what, result.error)
                self._metrics.board_failures.labels("ledger_copy", _code(result.error)).inc()
                continue
            self._rests.over(board)
            copies = (copy, *known.copies)
            self._known[board] = _Known(known.replica, copies, time.monotonic())
            log.info("board %s has %s (%d bytes)", board, copy.title, copy.size_bytes)


async def _packed(backup: LedgerBackup) -> tuple[bytes, str]:
    try:
        return await asyncio.to_thread(pack, backup.path)
    except OSError as exc:
        raise LedgerFailed(f"The backup {backup.path} cannot be copied to boards: {exc}.") from exc


def pack(backup: Path) -> tuple[bytes, str]:
    """Return a backup compressed as a ``gzip`` file, and the sha256 of that. Raises ``OSError``."""
    packer = zlib.compressobj(wbits=GZIP)
    parts = []
    with backup.open("rb") as file:
        while block := file.read(READ_BYTES):
            parts.append(packer.compress(block))
    content = b"".join((*parts, packer.flush()))
    return content, hashlib.sha256(content).hexdigest()


def _code(exc: RkserveError) -> str:
    return exc.code or "internal_error"


# -- the way back -------------------------------------------------------------------------------


class ReturnedFiles(Protocol):
    """The part of the head's store that gets files back; its calls block."""

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all stored files."""

    def upload_begin(self, declared: DeclaredArtifact) -> str:
        """Return the ID of a new upload."""

    def upload_part(self, upload: str, offset: int, data: bytes) -> int:
        """Write the next bytes of an upload."""

    def upload_end(self, upload: str) -> Artifact:
        """Keep the file if it matches its declaration."""

    def upload_abort(self, upload: str) -> bool:
        """Remove an upload; False if there is none."""


class ArtifactRetriever:
    """Brings files of the desired versions, which the store lacks, back from boards that have them.

    Use it from one event loop. One file comes at a time, from one board.
    """

    def __init__(
        self,
        roster: Roster,
        store: ReturnedFiles,
        desired: Callable[[], Desired],
        metrics: CoordinatorMetrics,
    ) -> None:
        self._roster, self._store, self._desired = roster, store, desired
        self._metrics = metrics
        self._rests = BoardRest(AGAIN_S)
        self._missed: set[str] = set()  # digests that are logged as missing

    async def look(self) -> None:
        """Bring back what is missing, once every board has reported."""
        if not self._roster.is_known:
            return
        there = set(await asyncio.to_thread(self._store.digests))
        for model, version in _wanted(self._desired()):
            if version.digest not in there and await self._bring(model, version):
                there.add(version.digest)
        self._missed &= {version.digest for _, version in _wanted(self._desired())} - there

    async def _bring(self, model: str, version: Artifact) -> bool:
        holders = sorted(
            report.board_id
            for report in self._roster.reports()
            if version.key in report.staged and report.state not in UNFIT
        )
        for board in holders:
            if board in self._rests:
                continue
            try:
                await self._fetch(model, version, board)
            except RkserveError as exc:
                self._metrics.retrieved.labels("failed").inc()
                self._rests.add(board, f"{version.title} did not come back from board {board}", exc)
            else:
                self._metrics.retrieved.labels("succeeded").inc()
                log.info("%s is in the head's store again, from board %s", version.title, board)
                return True
        if not holders and version.digest not in self._missed:
            self._missed.add(version.digest)
            log.error(
                "the head has no file of %s (sha256 %s...), and no board that is there has it: "
                "boards that have it serve it, others cannot get it; send the same file anew",
                version.title,
                version.digest[:12],
            )
        return False

    async def _fetch(self, model: str, version: Artifact, board: str) -> None:
        """Bring a file back from one board. Raises ``RkserveError``."""
        upload = await asyncio.to_thread(self._store.upload_begin, _declared(model, version))
        try:
            have = 0
            while have < version.size_bytes:
                size = min(PART_BYTES, version.size_bytes - have)
                part: bytes = await ask_board(
                    self._roster, board, "staged_part", version, have, size, timeout_s=ASK_S
                )
                if not part:
                    break  # the end finds that the file is too short
                have = await asyncio.to_thread(self._store.upload_part, upload, have, part)
            await asyncio.to_thread(self._store.upload_end, upload)
        finally:
            await asyncio.to_thread(self._store.upload_abort, upload)


def _wanted(desired: Desired) -> list[tuple[str, Artifact]]:
    found: list[tuple[str, Artifact]] = [
        (line.model, version) for line in desired.lines for version in line.versions
    ]
    for weights in desired.weights:
        coming = None if weights.rebase is None else weights.rebase.to
        found += [(base.model, base) for base in (weights.base, coming) if base is not None]
    return found


def _declared(model: str, version: Artifact) -> DeclaredArtifact:
    if isinstance(version, AdapterVersion):
        name, named = version.ref.name, version.ref.version
    else:
        name, named = version.model, version.version
    base = not isinstance(version, AdapterVersion)
    return DeclaredArtifact(name, named, model, version.size_bytes, version.digest, base)
