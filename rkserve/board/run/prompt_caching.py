"""The prompt caches of one board: which run begins from one, what is parked, what is built.

The files are the store's business, and whether a run may use one the runtime's quirks decide. A
cache is a convenience: whatever goes wrong with one is logged, and the answer is made without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rkserve.board.answer.kv_plan import Ids, common_prefix, held
from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.rules.counters import BoardCounters
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.run import EngineRun, RunSpec
from rkserve.board.storage.prompt_cache import CachedFile, CacheHit, CacheStore
from rkserve.core.block_hashes import adapter_of
from rkserve.core.board_report import CacheEntry
from rkserve.core.errors import (
    BoardFailed,
    CacheNotFound,
    CacheUnsupported,
    ConfigError,
    RequestError,
    RunFailed,
)
from rkserve.core.file_digests import ids_digest
from rkserve.core.messages import GenerateRequest

log = logging.getLogger(__name__)

# So many restores in a row that saved nothing: this runtime or model does not profit from files.
USELESS_LIMIT = 3
NO_STORE = (
    "This board keeps no prompt caches: its model's family is known not to support them, they are "
    "switched off (prompt_cache in rkserve.yaml or serve_config.yaml), or their folder cannot be "
    "used, as the board's log says."
)


@dataclass(frozen=True, slots=True, eq=False)
class PendingFile:
    """A file that the runtime has written, while it is hashed and published."""

    ids: Ids
    origin: str | None
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What a board may do with prompt caches. ``park`` is the automatic tier."""

    board_id: str
    model: str
    context_len: int
    park: bool
    park_min_tokens: int
    position_bytes: int | None


class PromptCaching:
    """What one board does with its store. Use it while the board is one's own."""

    def __init__(self, rules: CacheRules, store: CacheStore | None, figures: BoardCounters) -> None:
        self._rules = rules
        self.store = store
        self._figures = figures
        self._parks = rules.park and store is not None
        self._useless = 0
        self._writing: set[PendingFile] = set()
        self._base: str | None = None  # that the caches shall be of; None: never told
        self._resealing = asyncio.Lock()
        self._reseals: set[asyncio.Task[None]] = set()

    # -- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Look at what the disk holds. A folder that cannot be used costs the caches only."""
        if self.store is None:
            return
        try:
            await asyncio.to_thread(self.store.open)
        except (ConfigError, OSError) as exc:
            log.warning("board %s serves without prompt caches: %s", self._rules.board_id, exc)
            self.store, self._parks = None, False

    async def reseal(self, base: str) -> None:
        """From now on the caches are of these base weights; see ``CacheStore.reseal``.

        Use it while no engine is there that could read or write one. Of calls that meet the last
        one counts; whoever is cancelled leaves it to be done.
        """
        self._base = base
        task = asyncio.create_task(self._reseal(), name="reseal the prompt caches")
        self._reseals.add(task)
        task.add_done_callback(self._reseals.discard)
        await asyncio.shield(task)

    async def _reseal(self) -> None:
        async with self._resealing:
            await self.settled()
            if self.store is None or self._base is None:
                return
            try:
                await asyncio.to_thread(self.store.reseal, self._base)
            except (ConfigError, OSError) as exc:
                log.warning("board %s goes on without prompt caches: %s", self._rules.board_id, exc)
                self.store.close()
                self.store, self._parks = None, False

    async def close(self) -> None:
        """Let go of the folder, when what was written is published."""
        async with self._resealing:
            await self.settled()
            if self.store is not None:
                self.store.close()

    # -- what is asked from outside -----------------------------------------------------------

    def files(self) -> list[CachedFile]:
        """Return the files that there are, the oldest first."""
        return self.store.entries() if self.store is not None else []

    def check(self, request: GenerateRequest) -> None:
        """Raise ``CacheUnsupported`` or ``CacheNotFound`` where ``use_cache`` cannot be served."""
        name = request.use_cache
        if name is None:
            return
        store = self.require()
        if all(entry.name != name for entry in store.entries()):
            raise CacheNotFound(name)

    def require(self) -> CacheStore:
        """Return the store. Raises ``CacheUnsupported`` where there is none."""
        if self.store is None:
            raise CacheUnsupported(NO_STORE)
        return self.store

    def entries(self, now_s: float) -> list[CacheEntry]:
        """Return what the store holds."""
        return [self._told(entry, now_s) for entry in self.files()]

    def _told(self, entry: CachedFile, now_s: float) -> CacheEntry:
        return CacheEntry(
            board_id=self._rules.board_id,
            model=self._rules.model,
            name=entry.name,
            tokens=entry.tokens,
            file_bytes=entry.file_bytes,
            adapter=adapter_of(entry.origin),
            age_s=max(0.0, now_s - entry.created_s),
            idle_s=max(0.0, now_s - entry.used_s),
            digest="" if entry.name is None else ids_digest(entry.ids),
        )

    # -- restoring ----------------------------------------------------------------------------

    def usable(self, live: LoadedEngine) -> bool:
        """Whether this handle may load a prompt cache: an aborted run may forbid it for good."""
        return not live.aborted or live.quirk("prompt_cache_after_abort")

    def worth_renewing(self, live: LoadedEngine, saved: int) -> bool:
        """Whether a fresh handle is loaded in less time than ``saved`` tokens are computed.

        By what this board has measured, so never before its first run.
        """
        figures = self._figures
        if figures.prefill_tokens == 0:
            return False
        return saved * figures.prefill_ms / figures.prefill_tokens > live.facts.load_s * 1e3

    def worth_from(self, live: LoadedEngine) -> int:
        """Return from how many tokens on a displaced context is parked, and restored later, with
        this handle; 0: never.
        """
        if not self._parks or not live.quirk("prompt_cache_save_with_history"):
            return 0
        if not (live.context.append and live.facts.per_run_sampling):
            return 0
        least, figures = self._rules.park_min_tokens, self._figures
        if self.usable(live):
            return least
        if figures.prefill_tokens == 0 or figures.prefill_ms <= 0:
            return 0
        # Then each restore costs a load of the model.
        paid = live.facts.load_s * 1e3 * figures.prefill_tokens / figures.prefill_ms
        return max(least, int(paid) + 1)

    async def choose(
        self, live: LoadedEngine, wanted: Ids, origin: str | None, name: str | None, reused: int
    ) -> CacheHit | None:
        """Return the entry to begin from, where that saves enough over ``reused`` live positions.

        Where the handle is not ``usable``, it saves more than a fresh one takes.

        Raises ``RequestError`` where the named one belongs to another adapter.
        """
        store = self.store
        if store is None:
            return None
        await self._await_own(wanted, origin)
        while True:
            hit = store.find(wanted, origin, name=name)
            if hit is None or not self._pays(live, hit, name, reused):
                store.pin(None)  # the runtime lets go of the last one before its next run
                return None
            if await asyncio.to_thread(store.verify, hit.entry):
                store.pin(hit.entry)
                return hit
            log.warning("board %s: a prompt cache was damaged and is gone", self._rules.board_id)

    def _pays(self, live: LoadedEngine, hit: CacheHit, name: str | None, reused: int) -> bool:
        saved = hit.tokens - reused
        if not (self.usable(live) or self.worth_renewing(live, saved)):
            return False
        if name is not None:
            return saved > 0
        return self._parks and saved >= self._rules.park_min_tokens

    def used(self, hit: CacheHit, prefilled: int | None, sent: int, refused: str | None) -> None:
        """Judge a run that began from ``hit``, by what the runtime prefilled of what was sent."""
        if refused is None and prefilled is None:
            return  # the run was paused, and the runtime says nothing
        if refused is None and prefilled is not None and prefilled < sent:
            self._useless = 0
            self._figures.restored += 1
            return
        self._useless += 1
        if self._useless >= USELESS_LIMIT and self._parks:
            self._parks = False
            log.warning(
                "board %s: %d prompt caches in a row saved nothing (the last one %d tokens); "
                "conversations are not parked until the board restarts",
                self._rules.board_id,
                self._useless,
                hit.tokens,
            )

    # -- writing ------------------------------------------------------------------------------

    async def reserve_again(self, hit: CacheHit | None, *, history: bool) -> Path | None:
        """Return where a run that restored a parked conversation writes its longer self."""
        if hit is None or hit.entry.name is not None or history or not self._parks:
            return None
        return await self._reserve(hit.tokens)

    def keep(self, path: Path, ids: Ids, origin: str | None) -> None:
        """Keep what a run wrote, as a parked conversation.

        Hashing and syncing a hundred megabytes takes a slow disk seconds: the board serves others
        meanwhile, and only the same conversation waits for it.
        """
        task = asyncio.create_task(self._commit(path, ids, origin), name="publish a prompt cache")
        writing = PendingFile(ids, origin, task)
        self._writing.add(writing)
        task.add_done_callback(lambda _: self._writing.discard(writing))

    def restorable(self, ids: Ids, origin: str | None) -> int:
        """How many of ``ids`` a later run of theirs under ``origin`` would begin from on disk."""
        if self.store is None or not self._parks:
            return 0
        files = [entry.ids for entry in self.store.entries() if entry.origin == origin]
        most = max((common_prefix(kept, ids) for kept in files), default=0)
        return most if most >= self._rules.park_min_tokens else 0

    async def drop_parked(self) -> None:
        """Remove the conversations that the board has parked; named caches are somebody's.

        Use it while the board sleeps: nothing is parked then.
        """
        await self.settled()
        if self.store is not None:
            gone = await asyncio.to_thread(self.store.delete_parked)
            log.info("board %s: %d parked conversations are removed", self._rules.board_id, gone)

    async def settled(self) -> None:
        """Wait until everything that was written is published."""
        await asyncio.gather(*(writing.task for writing in self._writing))

    async def _commit(self, path: Path, ids: Ids, origin: str | None) -> None:
        store = self.require()
        try:
            await asyncio.to_thread(store.commit, path, ids, None, origin)
            self._figures.parked += 1
        except (RequestError, OSError) as exc:
            log.warning("board %s: a conversation was not parked: %s", self._rules.board_id, exc)

    async def _await_own(self, wanted: Ids, origin: str | None) -> None:
        """Wait for the files that the conversation ``wanted`` may begin from."""
        own = {
            writing.task
            for writing in self._writing
            if writing.origin == origin
            and common_prefix(writing.ids, wanted) >= self._rules.park_min_tokens
        }
        if own:
            await asyncio.wait(own)

    async def after_run(self, live: LoadedEngine, run: EngineRun, ended: RunEnded) -> None:
        """Rate the restored file of a run, and publish or discard the file it was to write."""
        begin = run.beginning
        if begin.hit is not None:
            prefilled = ended.perf.prefill_tokens if ended.in_order else None
            self.used(begin.hit, prefilled, len(begin.base), ended.cache_refused)
        if begin.save is None:
            return
        trusted = not run.stopping or live.quirk("kv_valid_after_abort")
        # The last token was never computed, so the file does not contain it. The KV cache is
        # mostly empty when its size is read: a run without history is dropped at its end.
        left = ended.kv_positions[0] if ended.kv_positions else 0
        ids = run.transcript[:-1] if left == 0 else held(run.transcript, left)
        if ended.in_order and trusted and ids:
            self.keep(begin.save, ids, begin.origin)
        else:
            await self.abandon(begin.save)

    async def abandon(self, path: Path | None) -> None:
        """Discard a reserved file, if there is one."""
        if path is not None:
            await asyncio.to_thread(self.require().abandon, path)

    async def park(self, live: LoadedEngine, *, renewing: bool = False) -> None:
        """Write the live context to a file before another conversation takes the handle.

        ``renewing`` says that the handle itself is going to be replaced.

        One run of one token writes the whole KV cache; its last id is sent once more for that, so
        the file ends with it twice and is the same up to there. Afterwards the context is unknown.

        Raises:
            EngineHung, EngineDied: as any run; parking is off then until the board restarts.
        """
        ids, origin = live.context.ids, live.context.origin
        if ids is None or not self._may_park(live, ids, origin):
            return
        # What no later restore could pay for is not worth its writing.
        if not (renewing or self.usable(live) or self.worth_renewing(live, len(ids))):
            return
        path = await self._reserve(len(ids))
        if path is None:
            return
        begin = RunSpec(
            entries=(EntryCommand(ids[-1:]),),
            base=(*ids, ids[-1]),
            history=True,
            origin=origin,
            limit=1,
            save=path,
        )
        try:
            _, ended = await live.run([None], begin, _ignore)
        except BaseException as exc:
            if isinstance(exc, BoardFailed):
                self._parks = False
                log.warning("board %s: parking is off: %s", self._rules.board_id, exc)
            await self.abandon(path)
            raise
        live.context.forget()
        if ended.in_order:
            self.keep(path, ids, origin)
        else:
            log.warning("board %s: parking failed: %s", self._rules.board_id, ended.error)
            await self.abandon(path)

    def _may_park(self, live: LoadedEngine, ids: Ids, origin: str | None) -> bool:
        rules, store = self._rules, self.store
        return (
            self._parks
            and store is not None
            and live.context.append
            and not live.context.once
            and live.facts.per_run_sampling  # else nothing ends that run after its one token
            and live.quirk("prompt_cache_save_with_history")
            and rules.park_min_tokens <= len(ids) <= rules.context_len - 2
            and not store.holds(ids, origin)
            and not any(w.ids[: len(ids)] == ids and w.origin == origin for w in self._writing)
        )

    async def build(
        self,
        live: LoadedEngine,
        name: str,
        ids: Ids,
        origin: str | None,
        *,
        wanted: Callable[[], bool],
    ) -> CacheEntry:
        """Compute ``ids`` and keep their KV cache under ``name``, if it is ``wanted`` still.

        Raises:
            CacheUnsupported: it does not fit, nothing was written, or nobody wants it any more.
            RunFailed: the runtime refused the run.
        """
        store = self.require()
        rules = self._rules
        expected = len(ids) * (rules.position_bytes or 0)
        path = await asyncio.to_thread(store.reserve, expected, name)
        begin = RunSpec(
            entries=(EntryCommand(ids),), base=ids, clear=True, origin=origin, limit=1, save=path
        )

        def end_at_first(run: EngineRun, *_: object) -> None:
            live.abort(run)  # what the limit does where the runtime takes one

        receive = _ignore if live.facts.per_run_sampling else end_at_first
        try:
            _, ended = await live.run([None], begin, receive)
        except BaseException:
            await self.abandon(path)
            raise
        if not ended.in_order:
            await self.abandon(path)
            reason = ended.error or f"the runtime returned {ended.return_code}"
            raise RunFailed(rules.board_id, reason)
        if not wanted():
            await self.abandon(path)
            raise CacheUnsupported("Whoever asked for this prompt cache has withdrawn the call.")
        entry = await asyncio.to_thread(store.commit, path, ids, name, origin)
        return self._told(entry, entry.created_s)

    async def _reserve(self, tokens: int) -> Path | None:
        store = self.require()
        try:
            return await asyncio.to_thread(
                store.reserve, tokens * (self._rules.position_bytes or 0)
            )
        except (RequestError, OSError) as exc:
            log.warning("board %s: nothing was parked: %s", self._rules.board_id, exc)
            return None


def _ignore(run: EngineRun, entry: int, token_id: int, data: bytes, waiting: bool) -> None:
    """Take the token of a run that is nobody's answer."""
