"""A loaded engine with its state: KV cache, adapters, prompt cache, perhaps a paused run.

It makes and supervises one run or call at a time. Starting and ending engines, and the effects of a
run's end on its requests, belong to other modules.

RKLLM loads adapters side by side and unloads none: memory is freed only by a fresh engine. The
runtime does not report an adapter's memory, so its file's size is the estimate.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from rkserve.board.answer.transcript import CachedContext, Ids, Range, ResumePlan, held, plan_resume
from rkserve.board.engine.protocol import Engine, RunCommand, RunEnded
from rkserve.board.rules.hang_limits import (
    EngineSpeeds,
    RunShape,
    StoppedTime,
    Watchdog,
)
from rkserve.board.run.job import EngineRun, Job, RunSpec, loop_time_s
from rkserve.core.block_hashes import BLOCK, adapter_of, common_prefix
from rkserve.core.desired_state import Probe
from rkserve.core.errors import AdapterBroken, EngineDied, EngineHung
from rkserve.core.messages import AdapterRef
from rkserve.core.run_params import Sampling, Scored
from rkserve.native.runtime import RunEnd

log = logging.getLogger(__name__)

# Before silence counts, the event loop gets this long to read what has arrived: the loop may have
# been blocked, and not the engine.
SECOND_LOOK_S = 0.1
# A wait for the engine is looked at so often: a look that comes late shows that this process was
# stopped, and perhaps the whole machine, so that the engine had no time either.
LOOK_S = 0.5
LOAD_ADAPTER = "load_adapter"
# After this many runs in a row without any reuse of a known prefix, the model or the runtime does
# not reuse prefixes in RAM.
RECOMPUTED_LIMIT = 3

# Handles a token: the run, the entry, the token's id and text, and whether text is held back.
Receiver = Callable[[EngineRun, int, int, bytes, bool], None]


@dataclass(frozen=True, slots=True)
class PausedRun:
    """A run that the runtime itself has paused.

    ``ids`` of None: the content of the KV cache is not known. ``spliced``: a range before the end
    was cut out, so that the positions behind it were computed with it in view. ``origin``: see
    ``core.block_hashes``.
    """

    ids: Ids | None
    history: bool
    spliced: bool = False
    origin: str | None = None


@dataclass(slots=True)
class _WholeEngine:
    """The state that the entries of one engine share."""

    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of runs
    doomed: bool = False


class LoadedEngine:
    """One engine from its load to its end, or one of its entries that has runs of its own.

    ``per_entry`` are all of these, the first of which stands for the whole engine: it makes calls
    between runs while no entry has one.
    """

    def __init__(
        self,
        board_id: str,
        engine: Engine,
        speeds: EngineSpeeds,
        adapters: AdapterTable,
        *,
        whole: _WholeEngine | None = None,
        entry: int = 0,
    ) -> None:
        """``whole`` is given to the other entries of an engine."""
        self.per_entry: tuple[LoadedEngine, ...] = (self,)
        self._whole = _WholeEngine() if whole is None else whole
        self._entry = entry
        self.engine = engine
        self.facts = engine.facts
        self.adapters = adapters
        self.context = CachedContext(
            append=self.quirk("append_tokens_with_history"),
            prefix=self.quirk("prefix_reuse_in_ram") and engine.facts.width == 1,
        )
        self.paused: PausedRun | None = None
        self.positions: tuple[int, ...] = (0,) * engine.facts.width  # the runtime's last count
        self.aborted = False  # a run of this handle was aborted; see quirk prompt_cache_after_abort
        self.tried: dict[str, Probe] = {}  # results of its adapters' trial runs, by key
        self.running: EngineRun | None = None
        self.cache_loaded = False  # the last run began from a prompt cache
        self.used_s = loop_time_s()  # the start of the last run
        self._board_id = board_id
        self._speeds = speeds
        self._cold = True  # the next run is the first one after a load
        self._recomputed = 0  # runs in a row that computed a long known prefix again
        if whole is None:
            self.per_entry += tuple(
                LoadedEngine(board_id, engine, speeds, adapters, whole=self._whole, entry=number)
                for number in range(1, engine.facts.entries)
            )

    @property
    def doomed(self) -> bool:
        """True where the engine is about to be ended, and its KV cache lost."""
        return self._whole.doomed

    @doomed.setter
    def doomed(self, doomed: bool) -> None:
        self._whole.doomed = doomed

    @property
    def runs(self) -> list[EngineRun]:
        """The runs of all entries that go on."""
        return [one.running for one in self.per_entry if one.running is not None]

    def quirk(self, name: str) -> bool:
        """Return whether this release has the named ability; see ``native.quirks``."""
        return self.facts.quirks.get(name, False)

    @property
    def alive(self) -> bool:
        """False from the moment that the process ended."""
        return not self.engine.died.done()

    def require(self) -> None:
        """Raise ``EngineDied`` where the process ended."""
        if not self.alive:
            raise EngineDied(self._board_id, self.engine.died.result())

    @property
    def entries(self) -> tuple[int, ...]:
        """Positions in each entry of a run, or in this one, as far as they are known now."""
        run = self.running
        if run is None:
            return self.positions
        if len(run.given) == 1:
            return (len(run.transcript),)
        sent = (len(entry.ids) for entry in run.spec.entries)
        return tuple(n + len(given) for n, given in zip(sent, run.given, strict=True))

    def fitting(self, wanted: Ids, origin: str | None, taken: Collection[int]) -> int:
        """Return the entry for a job's runs: with most of its context, else the least used one.

        A short common beginning, as of a system prompt, is not worth the rest of another
        conversation.
        """
        if len(self.per_entry) == 1:
            return 0

        def shared(one: LoadedEngine) -> int:
            ids = one.context.ids
            if not ids or one.context.origin != origin:
                return 0
            common = common_prefix(ids, wanted)
            return common if 2 * common >= min(len(ids), len(wanted)) else 0

        free = [number for number in range(len(self.per_entry)) if number not in taken]
        return max(free, key=lambda at: (shared(self.per_entry[at]), -self.per_entry[at].used_s))

    @property
    def all_entries(self) -> tuple[int, ...]:
        """Positions in each entry of the whole KV cache."""
        return tuple(count for one in self.per_entry for count in one.entries)

    def may_pause(self, *, history: bool) -> bool:
        """Return whether the runtime can pause such a run and keep its KV cache."""
        return self.facts.n_batch == 1 and (not history or self.quirk("pause_with_history"))

    def resumption(
        self, wanted: Ids, cuts: Sequence[Range], origin: str | None
    ) -> ResumePlan | None:
        """Return how the paused run resumes with ``wanted`` (see ``plan_resume``); None: it cannot.

        Under another ``origin`` its positions are invalid. Nothing is cut out of a conversation
        where the release is not trusted with that.
        """
        paused = self.paused
        if paused is not None and paused.origin != origin:
            return None
        resume = plan_resume(paused.ids, wanted, cuts) if paused is not None else None
        if paused is None or resume is None or not resume.cut or not paused.history:
            return resume
        return resume if self.quirk("clear_range_with_history") else None

    # -- runs -------------------------------------------------------------------------------------

    async def run(
        self,
        entry_jobs: Sequence[Job | None],
        spec: RunSpec,
        receive: Receiver | None = None,
        sampling: Sampling | None = None,
    ) -> tuple[EngineRun, RunEnded]:
        """Make a run, and note the KV cache that it left; without ``receive`` tokens are dropped.

        Raises:
            EngineHung: the watchdog's deadline has passed; the run may still be going on.
            EngineDied: the process ended before the run did.
        """
        run = self._seat(entry_jobs, spec)
        self.running, self.used_s = run, run.started_s
        if not spec.resume:
            self.context.forget()  # known again once this run has ended in order
        # Where this fails the run may still be going on, and stays the running one.
        try:
            ended = await self._supervise(run, self._command(run, sampling), receive)
        finally:
            run.end()
        self.running = None
        self._settle(run, ended)
        return run, ended

    def abort(self, run: EngineRun) -> None:
        """Abort the run; repeated calls have no effect."""
        if run.stopping:
            return
        run.stopping = True
        if run.spec.steps is None:
            self.aborted = True  # a run of steps is left between two of them
        if run.watchdog.aborted(loop_time_s()):
            run.nearer.wake()
        self.engine.abort(run.number)

    def last_abort(self) -> bool:
        """Abort all runs as a last try; False where there is none, or all were aborted before."""
        going = [one for one in self.per_entry if one.running and not one.running.stopping]
        for one in going:
            one.abort_running()
        return bool(going)

    def abort_running(self) -> None:
        """Abort the run of this entry, if there is one."""
        if self.running is not None:
            self.abort(self.running)

    def pause(self, run: EngineRun) -> None:
        """Have the runtime pause the run; an abort has priority."""
        if run.stopping or run.pausing:
            return
        run.pausing = True
        if run.watchdog.paused(loop_time_s()):
            run.nearer.wake()
        self.engine.pause(run.number)

    def _seat(self, entry_jobs: Sequence[Job | None], spec: RunSpec) -> EngineRun:
        shape = replace(spec.shape(cold=self._cold), entries=self.facts.entries)
        watchdog = Watchdog(self._speeds, shape, loop_time_s())
        # A paused run cannot be resumed in text mode, where its token ids are not known.
        in_text_mode = spec.entries[0].prompt_text is not None
        pausable = spec.steps is None and not in_text_mode and self.may_pause(history=spec.history)
        return EngineRun(next(self._whole.numbers), entry_jobs, spec, watchdog, pausable=pausable)

    def _command(self, run: EngineRun, sampling: Sampling | None) -> RunCommand:
        begin, per_run = run.spec, self.facts.per_run_sampling
        # A loaded cache would be used by any later run with the same prefix, under any adapter.
        release = self.cache_loaded and begin.hit is None and not begin.resume
        return RunCommand(
            run_id=run.number,
            entries=begin.entries,
            keep_history=begin.history,
            clear=begin.clear,
            resume=begin.resume,
            cut=begin.cut,
            sampling=asdict(sampling) if per_run and sampling is not None else None,
            max_new_tokens=begin.limit if per_run else None,
            adapter=adapter_of(begin.origin),
            load_cache=str(begin.hit.path) if begin.hit is not None else None,
            release_cache=release,
            save_cache=str(begin.save) if begin.save is not None else None,
            steps=begin.steps,
            pooling=begin.pooling,
            entry=self._entry,
        )

    async def _supervise(
        self, run: EngineRun, command: RunCommand, receive: Receiver | None
    ) -> RunEnded:
        """Wait for the run's end, within the watchdog's deadlines."""

        # Looked up once, because it is called for every token.
        now_s = asyncio.get_running_loop().time

        def on_token(entry: int, token_id: int, data: bytes, waiting: bool) -> None:
            run.came(entry, token_id, now_s())
            if receive is not None:
                receive(run, entry, token_id, data, waiting)

        def on_scores(prompt: bool, found: tuple[Scored, ...]) -> None:
            job = run.entry_jobs[0]
            if job is not None:
                job.generation.score(found, prompt=prompt)

        ended = self.engine.run(command, on_token, on_scores)
        try:
            while not ended.done():
                left_s = run.watchdog.deadline_s - now_s()
                if left_s > 0:
                    changed = run.nearer.changed()
                    lost_s = await waited((ended, changed), min(left_s, LOOK_S))
                    if lost_s and not ended.done():
                        run.watchdog.excuse(lost_s, now_s())
                    continue
                lost_s = await waited({ended}, SECOND_LOOK_S)
                run.watchdog.excuse(lost_s, now_s())
                if not ended.done() and run.watchdog.deadline_s <= now_s():
                    raise EngineHung(self._board_id, run.watchdog.verdict(now_s()))
            return ended.result()
        finally:
            ended.cancel()  # the engine may settle it later; that result is not used

    def _settle(self, run: EngineRun, ended: RunEnded) -> None:
        """Note the state that the run left."""
        if ended.cache_refused is not None:
            refused = ended.cache_refused
            log.warning("board %s: a prompt cache was refused: %s", self._board_id, refused)
        self.positions = ended.kv_positions or self.positions
        self.aborted |= ended.aborted
        began = run.spec
        self._measure(run, ended)
        if not began.resume:
            # A run that never began may have loaded its cache, and may not have released the last
            # one.
            ran = ended.end not in (None, RunEnd.FAILED)
            self.cache_loaded = began.hit is not None or (self.cache_loaded and not ran)
        if began.resume and ended.end in (None, RunEnd.FAILED):
            return  # aborted before it began, or refused: ``drain`` finds out which
        spliced = self._spliced(began)
        self.paused = None
        if ended.end is RunEnd.PAUSED:
            found = held(run.transcript, ended.kv_positions[0]) if ended.kv_positions else None
            self.paused = PausedRun(found, began.history, spliced, began.origin)
        self._settle_context(run, ended, spliced=spliced)

    def _measure(self, run: EngineRun, ended: RunEnded) -> None:
        """Note the time of the run's prompt, where it was an ordinary one."""
        began, shape = run.spec, run.spec.shape(cold=self._cold)
        if ended.end in (None, RunEnd.FAILED):
            return
        self._cold = False
        if not shape.usual or shape.loads_cache or began.resume:
            return
        if began.pooling is not None:
            self._speeds.prompt(shape.kind, shape.prompt, loop_time_s() - run.started_s)
        elif run.first_s is not None:
            alone = len(began.entries) == 1
            computed = run.perf(ended).prefill_tokens if alone else shape.prompt
            self._speeds.prompt(shape.kind, computed, run.first_s - run.started_s)

    def _spliced(self, began: RunSpec) -> bool:
        """Return whether this resumption, or one before it, cut out more than the end."""
        if self.paused is None or not began.resume:
            return False
        size, inside = len(self.paused.ids or ()), self.paused.spliced
        for start, end in began.cut:
            inside = inside or end < size
            size -= end - start
        return inside

    def _settle_context(self, run: EngineRun, ended: RunEnded, *, spliced: bool) -> None:
        began = run.spec
        if began.steps is not None:
            stopped = run.stopping and run.first_s is None  # perhaps within the prompt
        else:
            stopped = run.stopping and (
                run.left_in_prefill or not self.quirk("kv_valid_after_abort")
            )
        in_text_mode = began.entries[0].prompt_text is not None and began.pooling is None
        # After a splice a full prefill of the same ids would give other positions.
        if not ended.in_order or in_text_mode or stopped or spliced:
            self.context.forget()
        elif not began.history:
            self._settle_single_turn(run, ended)
        elif not self.context.settle(
            run.transcript, self.positions[0], began.origin, once=began.once
        ):
            log.error(
                "board %s: the runtime holds %d positions after a transcript of %d tokens; KV "
                "reuse is off until its engine restarts",
                self._board_id,
                self.positions[0],
                len(run.transcript),
            )
            self.context = CachedContext(append=False, prefix=self.context.prefix)
            self.context.forget()

    def _settle_single_turn(self, run: EngineRun, ended: RunEnded) -> None:
        """Note the context of a run without history.

        The manual has the runtime drop it. Where it may be left it is cleared before another
        origin's prompt, whose time to the first token would tell what the last one was.
        """
        began = run.spec
        if not self.context.prefix or began.steps is not None or began.pooling is not None:
            self.context.forget()
            return
        if began.hit is None and began.spared >= BLOCK:
            again = ended.perf.prefill_tokens >= len(began.base)
            self._recomputed = self._recomputed + 1 if again else 0
        if self._recomputed >= RECOMPUTED_LIMIT:
            log.warning(
                "board %s: the runtime computed %d prompts in a row again although it held their "
                "prefix (the last one %d tokens); prefix_reuse_in_ram is off until its engine "
                "restarts",
                self._board_id,
                self._recomputed,
                began.spared,
            )
            self.context = CachedContext(append=self.context.append)
            self.context.forget()
            return
        # The last token was delivered and not computed. What the runtime's own count says of such a
        # context is not known.
        ids = run.transcript[:-1] if run.given[0] else run.transcript
        self.context.keep(ids, began.origin, once=began.once)
        self.positions = (len(ids),)

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, method: str, *, extra_s: float = 0.0, **args: Any) -> Any:
        """Make one call of the runtime between two runs.

        Raises:
            EngineHung: it did not return in time.
            EngineDied: the process ended first.
            NativeError: the runtime refused it.
        """
        limits = self._speeds.limits(RunShape(usual=False))
        limit_s = limits.abort_s + limits.token_s + extra_s
        if self._entry:
            args["entry"] = self._entry
        result = self.engine.call(method, **args)
        self._cold |= method == LOAD_ADAPTER
        try:
            left_s = limit_s
            while left_s > 0 and not result.done():
                look_s = min(left_s, LOOK_S)
                await waited({result}, look_s)
                left_s -= look_s  # what was lost of this process's time does not count
            if not result.done():
                await waited({result}, SECOND_LOOK_S)
            if not result.done():
                raise EngineHung(self._board_id, f"{method} did not return within {limit_s:g} s")
            return result.result()
        finally:
            result.cancel()

    async def drain(self) -> None:
        """End the paused run without resuming it. Raises as ``call``."""
        self.context.forget()
        if not (self.quirk("drain_by_limit") and self.facts.per_run_sampling):
            self.aborted = True  # the drain is one more token and an abort
        history = self.paused is not None and self.paused.history
        await self.call("drain")
        self.paused = None
        # The context of a single turn is dropped at its end; a conversation keeps the drained
        # token.
        kept = await self.call("kv_sizes") if history else (0,) * self.facts.width
        self.positions = tuple(kept)

    async def clear(self, *, keep_system_prompt: bool) -> None:
        """Empty the KV cache of all entries. Raises as ``call``."""
        for one in self.per_entry:
            await one.clear_entry(keep_system_prompt=keep_system_prompt)

    async def clear_entry(self, *, keep_system_prompt: bool) -> None:
        """Empty the KV cache of this entry. Raises as ``call``."""
        try:
            await self.call("clear_kv", keep_system_prompt=keep_system_prompt)
            self.positions = tuple(await self.call("kv_sizes"))
        except BaseException:
            self.context.forget()
            raise
        if self.positions[0] or not keep_system_prompt:
            self.context.cleared(self.positions[0])
        else:
            # There was no system prompt to spare: the engine treats the cache as partly filled,
            # under the previous adapter, until a full clear.
            self.context.forget()


async def waited(futures: Collection[asyncio.Future[Any]], timeout_s: float) -> float:
    """Wait for the first of ``futures``; return the time in which this process did not run."""
    stopped, loop = StoppedTime(), asyncio.get_running_loop()
    stopped.due(loop.time() + timeout_s)
    await asyncio.wait(futures, timeout=timeout_s, return_when="FIRST_COMPLETED")
    return stopped.look(loop.time())


class AdapterNeed(Enum):
    """The work before a run with an adapter."""

    NOTHING = "it is loaded"
    LOAD = "load it under its key, then call `loaded` or `refused`"
    # The other adapters are loaded again when a request needs them; otherwise they would fill the
    # fresh engine at once.
    ENGINE = "no room is left: start a fresh engine and load the adapter into it"


class AdapterTable:
    """The adapters of one engine: at most ``limit`` adapters and ``budget_bytes`` in total."""

    def __init__(self, limit: int, budget_bytes: int | None = None) -> None:
        self._limit = limit
        self._budget_bytes = budget_bytes
        self._loaded: dict[str, int] = {}  # key to bytes, the most recently used last
        self._refused: dict[str, str] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the loaded adapters, the most recently used last."""
        return tuple(self._loaded)

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the loaded adapters: the sizes of their files."""
        return sum(self._loaded.values())

    def need(self, ref: AdapterRef, size_bytes: int) -> AdapterNeed:
        """Return the step due before a run with ``ref``, whose file has ``size_bytes``.

        Raises:
            AdapterBroken: this engine refused it before, or it exceeds the whole budget.
        """
        key = ref.key
        if key in self._loaded:
            self._loaded[key] = self._loaded.pop(key)
            return AdapterNeed.NOTHING
        if key in self._refused:
            raise AdapterBroken(ref.label, self._refused[key])
        if not self._fits(1, size_bytes):
            raise AdapterBroken(
                ref.label,
                f"its file has {size_bytes} bytes; the limit for adapters on this board is "
                f"{self._budget_bytes} bytes",
            )
        if self._fits(len(self._loaded) + 1, self.used_bytes + size_bytes):
            return AdapterNeed.LOAD
        return AdapterNeed.ENGINE

    def loaded(self, ref: AdapterRef, size_bytes: int) -> None:
        """Record that the runtime loaded the adapter."""
        self._loaded[ref.key] = size_bytes

    def refused(self, ref: AdapterRef, reason: str) -> None:
        """Record that the runtime refused the file, so that this engine is not given it again."""
        self._refused[ref.key] = reason

    def _fits(self, count: int, total_bytes: int) -> bool:
        roomy = self._budget_bytes is None or total_bytes <= self._budget_bytes
        return count <= self._limit and roomy
