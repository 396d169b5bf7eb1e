"""The report of one board; its caches, the calls for them, and the prefixes of contexts in them.

Prefixes are reported as a few block hashes instead of their ids. A call that needs the engine waits
until the board is free.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import asdict, replace

from rkserve.board.answer.transcript import Ids
from rkserve.board.operations.base_weights import BaseWeights, ModelFileDigest
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.rules.admission import Admission
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.paused import PausedRequests
from rkserve.board.run.ports import BoardBooks, EngineSlot, RunQueue
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
from rkserve.core.board_report import BoardReport, BoardState, CacheEntry, GenerationState, KvReport
from rkserve.core.errors import BoardAsleep, CacheUnsupported, ContextOverflow
from rkserve.core.files import check_cache_name
from rkserve.core.messages import AdapterRef

log = logging.getLogger(__name__)


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
        last_recovery=supervisor.last_recovery,
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


class CacheCalls:
    """The KV cache and the prompt caches of one board."""

    def __init__(
        self,
        settings: BoardSettings,
        slot: EngineSlot,
        queue: RunQueue,
        caching: PromptCaching,
        pauses: PausedRequests,
    ) -> None:
        self._settings, self._slot, self._queue = settings, slot, queue
        self._caching = caching
        self._pauses = pauses
        self._clears: dict[bool, asyncio.Future[None]] = {}  # the last clear of each kind

    def kv(self) -> KvReport:
        """Return the content of the KV cache, by the runtime's last count and the ids sent since.

        Edits of a run that is paused in it are applied when that is resumed, and reported apart.
        """
        entries = self._slot.live.entries
        capacity = self._settings.context_len * len(entries)
        return KvReport(
            self._settings.board_id,
            self._settings.model,
            entries,
            capacity,
            self._settings.kv_position_bytes,
            at_resume=self._pauses.at_resume(),
        )

    async def clear_kv(self, *, keep_system_prompt: bool) -> KvReport:
        """Empty the KV cache: now where the board is free, else before the next run.

        Raises:
            BoardFailed: the board is out of order, or fails meanwhile.
            NativeError: the runtime refused it.
        """
        free = self._slot.free
        if self._slot.asleep:
            return replace(self.kv(), status="cleared")  # a sleeping board has no KV cache

        async def clear() -> None:
            await self._slot.live.clear(keep_system_prompt=keep_system_prompt)

        done = self._clears.get(keep_system_prompt)
        if done is None or done.done():  # a waiting clear serves all calls
            done = self._clears[keep_system_prompt] = self._queue.schedule(clear, first=True)
        if not free:
            return replace(self.kv(), status="pending")
        try:
            await asyncio.shield(done)  # other calls wait for it, too
        except BoardAsleep:
            log.info("board %s: its KV cache is gone with its engine", self._settings.board_id)
        return replace(self.kv(), status="cleared")

    async def build_cache(self, name: str, ids: Ids, adapter: AdapterRef | None) -> CacheEntry:
        """Compute ``ids`` and keep their KV cache as a file called ``name``.

        Cancelling withdraws it: it does not begin, or its file is not kept.

        Raises:
            RequestError: the name is invalid, the ids do not fit, or the adapter is broken.
            CacheUnsupported: this board keeps no caches, or the file does not fit the budget.
            QueueFull, QueueTimeout, BoardFailed: as a generation.
            BoardAsleep: the board's model is unloaded.
        """
        caching = self._caching
        self._slot.require_open()
        self._slot.require_awake()
        caching.require()
        check_cache_name(name)
        if self._settings.n_batch > 1:
            raise CacheUnsupported("A board that serves batches (n_batch > 1) has no prompt cache.")
        if not ids:
            raise CacheUnsupported("A prompt cache needs the prompt's token ids; there are none.")
        if len(ids) >= self._settings.context_len:
            raise ContextOverflow(len(ids), self._settings.context_len, "prompt")

        async def build() -> CacheEntry:
            live, key = self._slot.live, adapter.key if adapter is not None else None
            await caching.park(live)
            if adapter is not None:
                live = await self._slot.with_adapter(adapter)
            entry = await caching.build(live, name, ids, key, wanted=lambda: not done.cancelled())
            if not live.facts.per_run_sampling and not caching.usable(live):
                # 1.2.x has no token limit: the run was aborted, after which no cache can be loaded.
                await self._slot.renew("prompt caches need a handle without an aborted run")
            return entry

        done = self._queue.schedule(build, first=False)
        return await done

    def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk."""
        return self._caching.entries(time.time())

    async def delete_cache(self, name: str) -> bool:
        """Remove the cache of that name; False where there is none."""
        store = self._caching.store
        return store is not None and await asyncio.to_thread(store.delete, name)
