"""Parts of a board's report, and the calls for its caches.

Prefixes of the contexts in the caches are reported as a few block hashes instead of their ids. A
call that needs the engine waits until the board is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rkserve.board.answer.transcript import Ids
from rkserve.board.run.cache_exchange import CacheExchange
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.paused import PausedRequests
from rkserve.board.run.prompt_caching import PromptCaching
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
from rkserve.core.board_report import (
    HASHING,
    UNREADABLE,
    CacheEntry,
    KvReport,
)
from rkserve.core.errors import (
    BoardAsleep,
    BoardFailed,
    CacheUnsupported,
    ContextOverflow,
    QueueFull,
)
from rkserve.core.files import CachedDigest, check_cache_name
from rkserve.core.messages import AdapterRef

log = logging.getLogger(__name__)

IDLE_S = 1.0  # without a run, until a board counts as idle


class ModelFileDigest:
    """Size and sha256 of the base model in the model folder, computed in the background."""

    def __init__(self, file: Path | None, record: Path | None) -> None:
        self._kept = None if file is None else CachedDigest(file, record)
        self._computing: asyncio.Future[str] | None = None
        self.digest = "" if file is None else HASHING
        self.size_bytes = 0

    async def look(self) -> None:
        """Compute the digest in a thread: it takes half a minute for gigabytes."""
        if self._kept is None:
            return
        try:
            self.size_bytes = (await asyncio.to_thread(self._kept.file.stat)).st_size
            self._computing = asyncio.get_running_loop().run_in_executor(None, self._kept.get)
            self.digest = await asyncio.shield(self._computing)  # ``stop`` waits for the thread
        except OSError as exc:
            self.digest = UNREADABLE
            log.warning("the sha256 of %s cannot be computed: %s", self._kept.file, exc)

    async def stop(self) -> None:
        """Cancel the computation, and return once its thread writes no record any more."""
        if self._kept is not None:
            self._kept.stop()
        if self._computing is not None:
            await asyncio.gather(self._computing, return_exceptions=True)


def _worth(live: LoadedEngine) -> tuple[bool, float]:
    return bool(live.context.ids), live.used_s


class PrefixReport:
    """The cached prefixes of one board. Computed hashes are kept."""

    def __init__(self, caching: PromptCaching, exchange: CacheExchange) -> None:
        self._caching, self._exchange = caching, exchange
        self._files: dict[str, FilePrefix] = {}
        self._live: tuple[Ids, str | None, LivePrefix] | None = None
        self._park_min = 0  # with the last engine
        self._packed: tuple[CachedPrefixes, bytes] = (CachedPrefixes(), pack(CachedPrefixes()))

    def packed(self, live: LoadedEngine | None) -> bytes:
        """Return the cached prefixes with that engine; empty without one."""
        holdings = self._without_engine() if live is None else self._of(live)
        if holdings != self._packed[0]:
            self._packed = (holdings, pack(holdings))
        return self._packed[1]

    def _of(self, live: LoadedEngine) -> CachedPrefixes:
        if live.facts.width > 1:
            return CachedPrefixes()  # a batch keeps no context
        live = max(live.per_entry, key=_worth)  # Routers know one context of a board
        park_min = self._park_min = self._caching.worth_from(live)
        compatibility = self._exchange.compatibility(live)
        return CachedPrefixes(
            appends=live.context.reuses,
            prefix=live.context.prefix,
            park_min=park_min,
            live=self._live_held(live),
            files=self._filed() if park_min else (),
            compatibility=compatibility,
            fetch_ms=self._fetch_ms() if compatibility else 0.0,
        )

    def _without_engine(self) -> CachedPrefixes:
        """Return the files that other boards may fetch while this one sleeps, or starts anew."""
        compatibility = self._exchange.compatibility(None)
        if not compatibility or not self._park_min:
            return CachedPrefixes()
        return CachedPrefixes(
            park_min=self._park_min,
            files=self._filed(),
            compatibility=compatibility,
            fetch_ms=self._fetch_ms(),
        )

    def _fetch_ms(self) -> float:
        """Return the time of a fetched token in two digits: each change is packed anew."""
        return float(f"{self._exchange.fetch_ms:.2g}")

    def _live_held(self, live: LoadedEngine) -> LivePrefix | None:
        ids, origin = live.context.ids, live.context.origin
        if not ids or not live.context.reuses or not live.alive:
            return None
        known = self._live
        if known is None or known[0] is not ids or known[1] != origin:
            chain = BlockHashes(ids, seed_of(origin))
            known = (ids, origin, LivePrefix.of(chain, dense=live.context.prefix))
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
        books: BoardBooks,
        slot: EngineSlot,
        queue: RunQueue,
        caching: PromptCaching,
        pauses: PausedRequests,
    ) -> None:
        self._settings, self._slot, self._queue = books.settings, slot, queue
        self._obligations = books.obligations
        self._caching = caching
        self._pauses = pauses
        self._clears: dict[bool, asyncio.Future[None]] = {}  # the last clear of each kind
        self._idles: asyncio.TimerHandle | None = None  # ends when the board has idled for a while

    def kv(self) -> KvReport:
        """Return the content of the KV cache, by the runtime's last count and the ids sent since.

        Edits of a run that is paused in it are applied when that is resumed, and reported apart.
        Raises ``BoardFailed`` without an engine.
        """
        self._slot.supervisor.open()
        entries = self._slot.live.all_entries
        capacity = self._settings.context_len * len(entries)
        return KvReport(
            self._settings.board_id,
            self._settings.model,
            entries,
            capacity,
            self._settings.kv_position_bytes,
            at_resume=self._pauses.at_resume(),
        )

    async def clear_kv(self, keep_system_prompt: bool) -> KvReport:
        """Empty the KV cache: now where the board is free, else before the next run.

        Raises:
            BoardFailed: the board is out of order, or fails meanwhile.
            NativeError: the runtime refused it.
        """
        free = self._queue.free
        if self._slot.supervisor.asleep:
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

    async def build_cache(
        self, name: str, ids: Ids, adapter: AdapterRef | None = None
    ) -> CacheEntry:
        """Compute ``ids`` and keep their KV cache as a file called ``name``.

        Cancelling withdraws it: it does not begin, or its file is not kept.

        Raises:
            RequestError: the name is invalid, the ids do not fit, or the adapter is broken.
            CacheUnsupported: this board keeps no caches, or the file does not fit the budget.
            QueueFull, QueueTimeout, BoardFailed: as a generation.
            BoardAsleep: the board's model is unloaded.
        """
        caching = self._caching
        self._queue.require_awake()
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

    def freed(self) -> None:
        """Park the live context later, if the board idles until then."""
        self.stop()
        if self._caching.parks:
            self._idles = asyncio.get_running_loop().call_later(IDLE_S, self._idle)

    def stop(self) -> None:
        """Cancel what ``freed`` has begun."""
        if self._idles is not None:
            self._idles.cancel()

    def _idle(self) -> None:
        """Park the live context where that pays, and for other boards where this one is drained."""

        def pays() -> bool:
            target = self._obligations.target
            drained = target is not None and target.drained
            return self._caching.parks_when_idle(self._slot.live, drained=drained)

        async def park() -> None:
            if pays():
                await self._caching.park(self._slot.live, idle=True)

        with suppress(BoardFailed, QueueFull):
            if self._queue.free and pays():
                done = self._queue.schedule(park, first=False)
                # Its failure is the board's, which reports it.
                done.add_done_callback(lambda it: it.cancelled() or it.exception())

    def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk."""
        return self._caching.entries(time.time())

    async def delete_cache(self, name: str) -> bool:
        """Remove the cache of that name; False where there is none."""
        store = self._caching.store
        return store is not None and await asyncio.to_thread(store.delete, name)
