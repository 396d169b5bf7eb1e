"""Calls for one board's KV cache and prompt caches.

A call that needs the engine waits until the board is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from rkserve.board.answer.kv_plan import Ids
from rkserve.board.run.paused import PausedRequests
from rkserve.board.run.ports import EngineSlot, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import CacheEntry, KvReport
from rkserve.core.errors import BoardAsleep, CacheUnsupported, ContextOverflow
from rkserve.core.messages import AdapterRef
from rkserve.core.name_rules import check_cache_name

log = logging.getLogger(__name__)


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
