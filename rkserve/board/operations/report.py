"""The report of one board, and the prefixes of contexts in it.

Prefixes are reported as a few block hashes instead of their ids.
"""

from __future__ import annotations

import os
from dataclasses import asdict

from rkserve.board.answer.kv_plan import Ids
from rkserve.board.operations.base_weights import BaseWeights, ModelFileDigest
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.rules.admission import Admission
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.ports import BoardBooks
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.run import loop_time_s
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.core.block_hashes import (
    BLOCK,
    FILES,
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
    pack,
    seed_of,
)
from rkserve.core.board_report import BoardReport, BoardState, GenerationState


def report(
    settings: BoardSettings,
    supervisor: EngineSupervisor,
    sleep: BoardSleep,
    weights: BaseWeights,
    *,
    books: BoardBooks,
    admission: Admission,
    embedding: EmbeddingService,
    own: ModelFileDigest,
    holdings: bytes,
) -> BoardReport:
    """Return the board's state and counters."""
    live, obligations = supervisor.live, books.obligations
    state, reason = supervisor.state, supervisor.reason
    if state in (BoardState.READY, BoardState.ASLEEP) and obligations.joining:
        state, reason = BoardState.JOINING, obligations.joining
    hold = obligations.target.hold if obligations.target is not None else None
    return BoardReport(
        board_id=settings.board_id,
        model=settings.model,
        state=state,
        reason=reason,
        release=live.facts.release if live is not None else "",
        platform=settings.platform,
        node=settings.node,
        pid=os.getpid(),
        engine_pid=live.engine.pid if live is not None else 0,
        context_len=settings.context_len,
        kv_positions=live.context.positions if live is not None else 0,
        running=len(admission.running),
        queued=admission.queued,
        queue_limit=settings.queue_limit,
        library=settings.library,
        paused=sum(job.state is GenerationState.PAUSED for job in books.jobs.values()),
        n_batch=settings.n_batch,
        adapters=live.adapters.keys if live is not None else (),
        adapter_bytes=live.adapters.used_bytes if live is not None else 0,
        engine_starts=supervisor.starts,
        engine_renewals=supervisor.renewals,
        epoch=obligations.epoch,
        hold=hold.mode.value if hold is not None else "",
        missing=len(obligations.missing) + (obligations.missing_base is not None),
        staged=(*(version.ref.key for version in obligations.staged), *weights.staged),
        versions=books.versions.figures,
        level=sleep.level,
        base=weights.digest,
        own_digest=own.digest,
        own_bytes=own.size_bytes,
        serving=_serving(settings.board_id, books),
        holdings=holdings,
        idle_s=_idle_s(supervisor, books, embedding),
        **asdict(books.counters),
    )


def _serving(board_id: str, books: BoardBooks) -> tuple[tuple[str, str], ...]:
    """Return name and sha256 of each adapter that a new session gets."""
    target = books.obligations.target
    refs = [] if target is None else [line.serves(board_id, "") for line in target.lines]
    return tuple((ref.name, ref.digest) for ref in refs if ref is not None)


def _idle_s(supervisor: EngineSupervisor, books: BoardBooks, embedding: EmbeddingService) -> float:
    """Return the time since the last use; a load counts as one."""
    if books.jobs or embedding.busy:
        return 0.0
    return loop_time_s() - max(books.asked_s, supervisor.loaded_s)


class PrefixReport:
    """The cached prefixes of one board. Computed hashes are kept."""

    def __init__(self, caching: PromptCaching) -> None:
        self._caching = caching
        self._files: dict[str, FilePrefix] = {}
        self._live: tuple[Ids, str | None, LivePrefix] | None = None
        self._packed: tuple[CachedPrefixes, bytes] = (CachedPrefixes(), pack(CachedPrefixes()))

    def packed(self, live: LoadedEngine | None) -> bytes:
        """Return the cached prefixes with that engine; empty without one."""
        holdings = CachedPrefixes() if live is None else self._of(live)
        if holdings != self._packed[0]:
            self._packed = (holdings, pack(holdings))
        return self._packed[1]

    def _of(self, live: LoadedEngine) -> CachedPrefixes:
        if live.facts.n_batch > 1:
            return CachedPrefixes()  # a batch keeps no context
        park_min = self._caching.worth_from(live)
        return CachedPrefixes(
            appends=live.context.append,
            park_min=park_min,
            live=self._live_held(live),
            files=self._filed() if park_min else (),
        )

    def _live_held(self, live: LoadedEngine) -> LivePrefix | None:
        ids, origin = live.context.ids, live.context.origin
        if not ids or not live.context.append or not live.alive:
            return None
        known = self._live
        if known is None or known[0] is not ids or known[1] != origin:
            known = (ids, origin, LivePrefix.of(BlockHashes(ids, seed_of(origin))))
            self._live = known
        return known[2]

    def _filed(self) -> tuple[FilePrefix, ...]:
        """Return the files that a run could begin from, the last used one last."""
        entries = [entry for entry in self._caching.files() if len(entry.ids) >= BLOCK]
        entries = sorted(entries, key=lambda entry: (entry.used_s, entry.id))[-FILES:]
        files: dict[str, FilePrefix] = {}
        for entry in entries:
            known = self._files.get(entry.id)
            if known is None:
                chain = BlockHashes(tuple(entry.ids), seed_of(entry.origin))
                known = FilePrefix(len(chain), chain.marks)
            files[entry.id] = known
        self._files = files
        return tuple(files.values())
