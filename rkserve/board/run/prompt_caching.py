"""The prompt caches of one board: restoring, parking and building them.

The files belong to the store, and the release's quirks decide whether a run may use one. A cache is
a convenience: a failure is logged, and the answer is made without it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rkserve.board.answer.transcript import Ids, held
from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.rules.cache_costs import LEAST_BYTES, CacheCosts
from rkserve.board.rules.generations import BoardCounters
from rkserve.board.run.job import EngineRun, RunSpec
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.settings import BoardSettings
from rkserve.board.storage.prompt_cache import CachedFile, CacheHit, CacheStore
from rkserve.core.block_hashes import BlockHashes, adapter_of, common_prefix, seed_of
from rkserve.core.board_report import CacheEntry
from rkserve.core.errors import (
    BoardFailed,
    CacheNotFound,
    CacheUnsupported,
    ConfigError,
    RequestError,
    RunFailed,
)
from rkserve.core.files import ids_digest

log = logging.getLogger(__name__)

# After this many restores in a row that saved nothing, the runtime or model does not profit from
# files.
USELESS_LIMIT = 3
NO_TIME_MS = 0.05  # of prefill for a token: no board has so little
CONTENDED_S = 600.0  # since the latest displacement of a conversation: a board that idles parks
IDLE_WRITE_MS = 2000.0  # a request that arrives meanwhile waits no longer than that
NO_STORE = (
    "This board keeps no prompt caches: its model family does not support them, they are "
    "switched off (prompt_cache in rkserve.yaml or serve_config.yaml), or their folder cannot be "
    "used, as the board's log says."
)


class PromptCaching:
    """Use of the cache store by one board. Call it while the caller has the board."""

    def __init__(self, settings: BoardSettings, figures: BoardCounters) -> None:
        self._settings = settings
        self.store = settings.caches
        self._figures = figures
        self.costs = CacheCosts(settings.kv_position_bytes or 0, time.monotonic)
        self._displaced_s = -math.inf  # the time of the latest displacement of a conversation
        self._parks = settings.park and settings.n_batch == 1 and self.store is not None
        self._useless = 0
        # Tasks that publish files written by the runtime, with ids and origin of each file.
        self._writing: dict[asyncio.Task[None], tuple[Ids, str | None]] = {}
        # Tasks that fetch files from other boards, with the ids and origin of each file.
        self._expected: dict[asyncio.Task[None], tuple[Ids, str | None]] = {}
        self._base: str | None = None  # digest of the base weights of the caches; None: not set yet
        self._resealing = asyncio.Lock()
        self._reseals: set[asyncio.Task[None]] = set()

    # -- life -------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the files on the disk. Without a usable folder the board serves without caches."""
        if self.store is None:
            return
        try:
            await asyncio.to_thread(self.store.open)
            known = self._settings.disk_bytes_per_s
            written, read = known or 0.0, known or 0.0
            if known is None:
                written, read = await asyncio.to_thread(self.store.measure)
                log.info(
                    "board %s: the folder of prompt caches takes %.0f MB/s and gives %.0f MB/s",
                    self._settings.board_id,
                    written / 1e6,
                    read / 1e6,
                )
            self.costs.writing.set(written)
            self.costs.reading.set(read)
            if self._settings.share_bytes_per_s:
                self.costs.network.set(self._settings.share_bytes_per_s)
        except (ConfigError, OSError) as exc:
            log.warning("board %s serves without prompt caches: %s", self._settings.board_id, exc)
            self.store, self._parks = None, False

    async def reseal(self, base: str) -> None:
        """Use caches of these base weights from now on; see ``CacheStore.reseal``.

        Call it while no engine can read or write one. Of concurrent calls the last one counts; a
        cancelled call is still carried out.
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
                log.warning(
                    "board %s goes on without prompt caches: %s", self._settings.board_id, exc
                )
                self.store.close()
                self.store, self._parks = None, False

    async def close(self) -> None:
        """Release the folder once all written files are published."""
        for task in self._expected:
            task.cancel()
        async with self._resealing:
            await self.settled()
            if self.store is not None:
                self.store.close()

    @property
    def parks(self) -> bool:
        """True where conversations are parked."""
        return self._parks

    # -- queries ----------------------------------------------------------------------------------

    def files(self) -> list[CachedFile]:
        """Return the files, the oldest first."""
        return self.store.entries() if self.store is not None else []

    def check(self, name: str) -> None:
        """Raise ``CacheUnsupported`` or ``CacheNotFound`` where there is no cache of that name."""
        store = self.require()
        if all(entry.name != name for entry in store.entries()):
            raise CacheNotFound(name)

    def require(self) -> CacheStore:
        """Return the store. Raises ``CacheUnsupported`` where there is none."""
        if self.store is None:
            raise CacheUnsupported(NO_STORE)
        return self.store

    def entries(self, now_s: float) -> list[CacheEntry]:
        """Return a report of each file."""
        return [self._entry_of(entry, now_s) for entry in self.files()]

    def _entry_of(self, entry: CachedFile, now_s: float) -> CacheEntry:
        return CacheEntry(
            board_id=self._settings.board_id,
            model=self._settings.model,
            name=entry.name,
            tokens=entry.tokens,
            file_bytes=entry.file_bytes,
            adapter=adapter_of(entry.origin),
            age_s=max(0.0, now_s - entry.created_s),
            idle_s=max(0.0, now_s - entry.used_s),
            digest="" if entry.name is None else ids_digest(entry.ids),
        )

    # -- restoring --------------------------------------------------------------------------------

    @property
    def prefill_ms(self) -> float | None:
        """The board's measured prefill time of a token; None before its first answer, and for a
        simulated board that takes no time.
        """
        figures = self._figures
        if figures.prefill_ms <= figures.prefill_tokens * NO_TIME_MS:
            return None
        return figures.prefill_ms / figures.prefill_tokens

    def asked(self, live: LoadedEngine, wanted: Ids, origin: str | None) -> None:
        """Note a prompt, for the chance that conversations come back."""
        if self._parks:
            ids = live.context.ids if live.context.origin == origin else None
            links = BlockHashes(wanted, seed_of(origin)).links
            self.costs.returns.asked(links, _links(ids, origin))

    def usable(self, live: LoadedEngine) -> bool:
        """Return whether this engine may load a prompt cache: an aborted run may forbid it."""
        return not live.aborted or live.quirk("prompt_cache_after_abort")

    def worth_renewing(self, live: LoadedEngine, saved: int) -> bool:
        """Return whether a fresh engine loads faster than ``saved`` tokens are computed.

        It uses the board's measured speed, so it is False before the first run.
        """
        figures = self._figures
        if figures.prefill_tokens == 0:
            return False
        return saved * figures.prefill_ms / figures.prefill_tokens > live.facts.load_s * 1e3

    def worth_from(self, live: LoadedEngine) -> int:
        """Return the number of tokens from which a displaced context is parked; 0: never."""
        if not self._parks or not _saves(live) or not live.facts.per_run_sampling:
            return 0
        figures = self._figures
        least = self.costs.least_tokens(self._settings.park_min_tokens, self.prefill_ms)
        if not least:
            return 0
        if self.usable(live):
            return least
        if figures.prefill_tokens == 0 or figures.prefill_ms <= 0:
            return 0
        # Then each restore costs a load of the model, which must take less time than the prefill.
        paid = live.facts.load_s * 1e3 * figures.prefill_tokens / figures.prefill_ms
        return max(least, int(paid) + 1)

    async def choose(
        self, live: LoadedEngine, wanted: Ids, origin: str | None, name: str | None, reused: int
    ) -> CacheHit | None:
        """Return the file to begin from, where it saves enough over ``reused`` live positions.

        Where the engine is not ``usable``, the file must save more than a fresh engine costs.

        Raises ``RequestError`` where the named one belongs to another adapter.
        """
        store = self.store
        if store is None:
            return None
        await self._await_own(wanted, origin)
        while True:
            hit = store.find(wanted, origin, name=name)
            if hit is None or not self._pays(live, hit, name, reused):
                store.pin(None)  # the runtime releases the last one before its next run
                return None
            if await asyncio.to_thread(store.verify, hit.entry):
                store.pin(hit.entry)
                return hit
            log.warning("board %s: a prompt cache was damaged and is gone", self._settings.board_id)

    def _pays(self, live: LoadedEngine, hit: CacheHit, name: str | None, reused: int) -> bool:
        saved = hit.tokens - reused
        if not (self.usable(live) or self.worth_renewing(live, saved)):
            return False
        if name is not None:
            return saved > 0
        if not self._parks or saved < self._settings.park_min_tokens:
            return False
        return self.costs.restoring_pays(saved, hit.entry.file_bytes, self.prefill_ms)

    def used(self, hit: CacheHit, prefilled: int | None, sent: int, refused: str | None) -> None:
        """Rate a run that began from ``hit`` by the tokens that the runtime prefilled."""
        if refused is None and prefilled is None:
            return  # the run was paused, and the runtime gives no figures
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
                self._settings.board_id,
                self._useless,
                hit.tokens,
            )

    # -- writing ----------------------------------------------------------------------------------

    async def reserve_again(self, hit: CacheHit, *, history: bool) -> Path | None:
        """Return the file for the longer context of a run that restored a parked conversation."""
        if hit.entry.name is not None or history or not self._parks:
            return None
        links = _links(hit.entry.ids, hit.entry.origin)
        if not self.costs.parking_pays(links, hit.tokens, self.prefill_ms, idle=False):
            return None
        return await self._reserve(hit.tokens)

    def keep(self, path: Path, ids: Ids, origin: str | None) -> None:
        """Publish a written file as a parked conversation, in the background.

        Hashing and syncing a hundred megabytes takes seconds on a slow disk: only a request of the
        same conversation waits for it.
        """
        task = asyncio.create_task(self._commit(path, ids, origin), name="publish a prompt cache")
        self._writing[task] = (ids, origin)
        task.add_done_callback(self._writing.pop)

    def expect(self, task: asyncio.Task[None], ids: Ids, origin: str | None) -> None:
        """Have the runs of prompts that begin with ``ids`` wait for ``task``, which fetches a file
        for them.
        """
        self._expected[task] = (ids, origin)
        task.add_done_callback(self._expected.pop)

    def expects(self, ids: Ids, origin: str | None) -> bool:
        """Return whether a file for these ids is being fetched."""
        return (ids, origin) in self._expected.values()

    def restorable(self, ids: Ids, origin: str | None) -> int:
        """Return how many of ``ids`` a later run could restore from disk."""
        if self.store is None or not self._parks:
            return 0
        files = [entry.ids for entry in self.store.entries() if entry.origin == origin]
        most = max((common_prefix(kept, ids) for kept in files), default=0)
        pays = self.costs.restoring_pays(most, most * self.costs.position_bytes, self.prefill_ms)
        return most if pays and most >= self._settings.park_min_tokens else 0

    async def drop_parked(self) -> None:
        """Remove the parked conversations; named caches stay.

        Call it while the board sleeps, when nothing is parked.
        """
        await self.settled()
        if self.store is not None:
            gone = await asyncio.to_thread(self.store.delete_parked)
            log.info("board %s: %d parked conversations are removed", self._settings.board_id, gone)

    async def settled(self) -> None:
        """Wait until all written files are published, and all that are fetched are there."""
        await asyncio.gather(*self._writing)
        await asyncio.gather(*self._expected, return_exceptions=True)

    async def _commit(self, path: Path, ids: Ids, origin: str | None) -> None:
        store = self.require()
        try:
            await asyncio.to_thread(store.commit, path, ids, None, origin)
            self._figures.parked += 1
        except (RequestError, OSError) as exc:
            log.warning("board %s: a conversation was not parked: %s", self._settings.board_id, exc)

    async def _await_own(self, wanted: Ids, origin: str | None) -> None:
        """Wait for the files of the conversation ``wanted`` that are being published or fetched."""
        own = {
            task
            for task, (ids, made) in (*self._writing.items(), *self._expected.items())
            if made == origin and common_prefix(ids, wanted) >= self._settings.park_min_tokens
        }
        if own:
            await asyncio.wait(own)

    async def after_run(self, live: LoadedEngine, run: EngineRun, ended: RunEnded) -> None:
        """Rate the restored file of a run, and publish or discard the file it was to write."""
        begin = run.spec
        if begin.hit is not None:
            prefilled = ended.perf.prefill_tokens if ended.in_order else None
            self.used(begin.hit, prefilled, len(begin.base), ended.cache_refused)
            if ended.in_order and run.first_s is not None:
                took_s = run.first_s - run.started_s - ended.perf.prefill_ms / 1e3
                self._read(begin.hit.entry.file_bytes, max(0.0, took_s))
                _charge(run, max(0.0, took_s))
        if begin.save is None:
            return
        _charge(run, self._wrote(begin.save, run))
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

    async def park(self, live: LoadedEngine, *, renewing: bool = False, idle: bool = False) -> None:
        """Write the live context to a file before another conversation uses the engine.

        It is written if that pays on this board's disk (``rules.cache_costs``). With ``renewing``
        the engine itself is about to be replaced, with ``idle`` no request waits. A run of one
        token writes the whole KV cache. One with history gets the last id once more for that, so
        the file ends with it twice and is the same up to there, and afterwards the context is
        unknown.

        Raises:
            EngineHung, EngineDied: as any run; parking is off then until the board restarts.
        """
        ids, origin = live.context.ids, live.context.origin
        if ids is None or not self._worth_parking(live, ids, renewing=renewing, idle=idle):
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
        if not live.context.history:
            whole = (EntryCommand(ids),)
            begin = replace(begin, entries=whole, base=ids, reused=len(ids), history=False)
        try:
            run, ended = await live.run([None], begin)
        except BaseException as exc:
            if isinstance(exc, BoardFailed):
                self._parks = False
                log.warning("board %s: parking is off: %s", self._settings.board_id, exc)
            await self.abandon(path)
            raise
        if begin.history:
            live.context.forget()
        self._wrote(path, run)
        if ended.in_order:
            self.keep(path, ids, origin)
        else:
            log.warning("board %s: parking failed: %s", self._settings.board_id, ended.error)
            await self.abandon(path)

    def _worth_parking(self, live: LoadedEngine, ids: Ids, *, renewing: bool, idle: bool) -> bool:
        """Return whether to write the live context; note that it is displaced unless ``idle``."""
        origin = live.context.origin
        links = _links(ids, origin)
        if not idle and len(ids) >= self._settings.park_min_tokens and not live.context.once:
            self._displaced_s = time.monotonic()
            self.costs.returns.displaced(links)
        if not self._may_park(live, ids, origin):
            return False
        # A file that no later restore could use is not worth writing.
        if not (renewing or self.usable(live) or self.worth_renewing(live, len(ids))):
            return False
        return self.costs.parking_pays(links, len(ids), self.prefill_ms, idle=idle or renewing)

    def parks_when_idle(self, live: LoadedEngine, *, drained: bool = False) -> bool:
        """Return whether to write the live context now, while no request waits for the board.

        Only where conversations displace each other, as a disk has so many writes, or where the
        board is ``drained`` and others may fetch it. And only a context that stays in memory
        meanwhile, except on a drained board, which does not need it.
        """
        ids, origin = live.context.ids, live.context.origin
        lost = live.context.history and not drained
        if ids is None or lost or live.paused is not None or not live.alive:
            return False
        if not self.usable(live):
            return False
        contended = drained or time.monotonic() - self._displaced_s < CONTENDED_S
        return (
            contended
            and self._may_park(live, ids, origin)
            and self.costs.write_ms(len(ids)) <= IDLE_WRITE_MS
            and self.costs.parking_pays(_links(ids, origin), len(ids), self.prefill_ms, idle=True)
        )

    def _wrote(self, path: Path, run: EngineRun) -> float:
        """Measure the writing of a file, from a run's last token to its end; return the seconds."""
        if run.first_s is None:
            return 0.0
        try:
            size_bytes = path.stat().st_size
        except OSError:  # the runtime wrote nothing
            return 0.0
        took_s = asyncio.get_running_loop().time() - run.token_s
        self.costs.writing.observe(size_bytes, took_s, time.monotonic())
        if size_bytes >= LEAST_BYTES:
            self.costs.position_bytes = size_bytes // len(run.transcript)
        self._figures.cache_written_bytes += size_bytes
        self._figures.cache_write_ms += took_s * 1e3
        return took_s

    def _read(self, size_bytes: int, took_s: float) -> None:
        self.costs.reading.observe(size_bytes, took_s, time.monotonic())
        self._figures.cache_read_bytes += size_bytes
        self._figures.cache_read_ms += took_s * 1e3

    def _may_park(self, live: LoadedEngine, ids: Ids, origin: str | None) -> bool:
        settings, store = self._settings, self.store
        return (
            self._parks
            and store is not None
            and not live.context.once
            and live.facts.per_run_sampling  # else the run would not end after its one token
            and _saves(live)
            and settings.park_min_tokens <= len(ids) <= settings.context_len - 2
            and not store.holds(ids, origin)
            and not any(w[: len(ids)] == ids and o == origin for w, o in self._writing.values())
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
        """Compute ``ids`` and keep their KV cache under ``name``, while ``wanted`` returns True.

        Raises:
            CacheUnsupported: it does not fit, nothing was written, or the call was withdrawn.
            RunFailed: the runtime refused the run.
        """
        store = self.require()
        settings = self._settings
        expected = len(ids) * (settings.kv_position_bytes or 0)
        path = await asyncio.to_thread(store.reserve, expected, name)
        begin = RunSpec(
            entries=(EntryCommand(ids),), base=ids, clear=True, origin=origin, limit=1, save=path
        )

        def end_at_first(run: EngineRun, *_: object) -> None:
            live.abort(run)  # for a runtime without a token limit

        receive = None if live.facts.per_run_sampling else end_at_first
        try:
            _, ended = await live.run([None], begin, receive)
        except BaseException:
            await self.abandon(path)
            raise
        if not ended.in_order:
            await self.abandon(path)
            raise RunFailed(settings.board_id, ended.reason)
        if not wanted():
            await self.abandon(path)
            raise CacheUnsupported("The call for this prompt cache was withdrawn.")
        entry = await asyncio.to_thread(store.commit, path, ids, name, origin)
        return self._entry_of(entry, entry.created_s)

    async def _reserve(self, tokens: int) -> Path | None:
        store = self.require()
        try:
            return await asyncio.to_thread(
                store.reserve, tokens * (self._settings.kv_position_bytes or 0)
            )
        except (RequestError, OSError) as exc:
            log.warning("board %s: nothing was parked: %s", self._settings.board_id, exc)
            return None


def _charge(run: EngineRun, took_s: float) -> None:
    for job in run.jobs:
        job.tally.cache_s += took_s


def _links(ids: Ids | None, origin: str | None) -> tuple[int, ...]:
    return () if ids is None else BlockHashes(tuple(ids), seed_of(origin)).links


def _saves(live: LoadedEngine) -> bool:
    """Return whether a run can write the whole live context to a file."""
    if live.context.prefix:
        return True
    return live.context.append and live.quirk("prompt_cache_save_with_history")
