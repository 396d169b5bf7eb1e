"""What is asked of a board besides answers: its KV cache and its prompt caches.

Whatever touches the engine is an errand, which waits until the board is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from rkserve.board.answer.kv_plan import Ids
from rkserve.board.run.board_protocol import Stage
from rkserve.board.run.paused import PausedRequests
from rkserve.core.board_report import CacheEntry, KvReport
from rkserve.core.errors import BoardAsleep, CacheUnsupported, ContextOverflow
from rkserve.core.messages import AdapterRef
from rkserve.core.name_rules import check_cache_name

log = logging.getLogger(__name__)


class CacheCalls:
    """The caches of one board, seen from outside."""

    def __init__(self, stage: Stage, pauses: PausedRequests) -> None:
        self._stage = stage
        self._pauses = pauses
        self._clears: dict[bool, asyncio.Future[None]] = {}  # the last of each kind

    def kv(self) -> KvReport:
        """Return what the KV cache holds, by the runtime's last word and what was sent since.

        Edits of a run that is paused in it are applied when that is resumed, and told beside it.
        """
        stage = self._stage
        entries = stage.live.entries
        capacity = stage.context_len * len(entries)
        return KvReport(
            stage.board_id,
            stage.model,
            entries,
            capacity,
            stage.position_bytes,
            at_resume=self._pauses.at_resume(),
        )

    async def clear_kv(self, *, keep_system_prompt: bool) -> KvReport:
        """Empty the KV cache: now where the board is free, else before anything else starts.

        Raises:
            BoardFailed: the board is out of order, or fails while it does so.
            NativeError: the runtime refused it.
        """
        stage = self._stage
        free = stage.free
        if stage.asleep:
            return replace(self.kv(), status="cleared")  # there is nothing

        async def clear() -> None:
            await stage.live.clear(keep_system_prompt=keep_system_prompt)

        done = self._clears.get(keep_system_prompt)
        if done is None or done.done():  # one that waits serves all who ask meanwhile
            done = self._clears[keep_system_prompt] = stage.errand(clear, first=True)
        if not free:
            return replace(self.kv(), status="pending")
        try:
            await asyncio.shield(done)  # it is the others', too
        except BoardAsleep:
            log.info("board %s: its KV cache is gone with its engine", stage.board_id)
        return replace(self.kv(), status="cleared")

    async def build_cache(self, name: str, ids: Ids, adapter: AdapterRef | None) -> CacheEntry:
        """Compute ``ids`` and keep their KV cache as a file called ``name``.

        Cancelled, it is withdrawn: what was not begun is not done, and what was is not kept.

        Raises:
            RequestError: the name cannot be one, the ids do not fit, or the adapter is broken.
            CacheUnsupported: this board keeps none, or it does not fit the budget.
            QueueFull, QueueTimeout, BoardFailed: as a generation.
            BoardAsleep: the board's model is unloaded.
        """
        stage, caching = self._stage, self._stage.caching
        stage.require_open()
        stage.require_awake()
        caching.require()
        check_cache_name(name)
        if stage.n_batch > 1:
            raise CacheUnsupported("A board that serves batches (n_batch > 1) has no prompt cache.")
        if not ids:
            raise CacheUnsupported("A prompt cache needs the prompt's token ids; there are none.")
        if len(ids) >= stage.context_len:
            raise ContextOverflow(len(ids), stage.context_len, "prompt")

        async def build() -> CacheEntry:
            live, key = stage.live, adapter.key if adapter is not None else None
            await caching.park(live)
            if adapter is not None:
                live = await stage.adapting.ready(stage, adapter)
            entry = await caching.build(live, name, ids, key, wanted=lambda: not done.cancelled())
            if not live.facts.per_run_sampling and not caching.usable(live):
                # 1.2.x takes no limit: the run was aborted, and after that no cache is safe.
                await stage.renew("prompt caches need a handle without an aborted run")
            return entry

        done = stage.errand(build, first=False)
        return await done

    def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk."""
        return self._stage.caching.entries(time.time())

    async def delete_cache(self, name: str) -> bool:
        """Remove the cache of that name; False where there is none."""
        store = self._stage.caching.store
        return store is not None and await asyncio.to_thread(store.delete, name)
