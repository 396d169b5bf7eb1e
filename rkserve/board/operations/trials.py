"""Trial runs on one board: of an adapter or other weights, and of the board's speed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from statistics import median
from typing import TypeVar

from rkserve.board.answer.transcript import Ids
from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.run.job import EngineRun, RunSpec, loop_time_s
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import AdapterTrial, TrialVerdict
from rkserve.core.desired_state import Probe
from rkserve.core.errors import (
    AdapterBroken,
    BoardOutOfOrder,
    EngineDied,
    EngineHung,
    OperationConflict,
    RkserveError,
    RunFailed,
)
from rkserve.core.errors.requests import without_folders
from rkserve.core.messages import AdapterRef
from rkserve.core.run_params import (
    FEWEST_SPEED_TOKENS,
    SPEED_TEXT,
    SPEED_TOKENS,
    EncoderStates,
    Sampling,
)
from rkserve.models.adapters import Adapter
from rkserve.native.runtime import Perf, RunEnd

T = TypeVar("T")
log = logging.getLogger(__name__)

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
PROBE_TEXT = "Hello"  # in text mode
SPEED_PROMPT = 128  # tokens, as in the vendor's table
FIRST_ID, STRIDE = 100, 7919  # ids below are often special; the stride spreads the others
SMALL_VOCABULARY = 1000  # where the size is not known


class AdapterProbes:
    """Loads and tries adapters on one board, whatever else it is doing."""

    def __init__(
        self,
        settings: BoardSettings,
        slot: EngineSlot,
        queue: RunQueue,
        caching: PromptCaching,
        runner: RequestRunner,
    ) -> None:
        self._settings, self._slot, self._queue = settings, slot, queue
        self._caching = caching
        self._runner = runner
        self.trying = ""  # the key of the adapter whose trial has the engine

    async def load(self, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> Probe:
        """Load ``ref`` ahead of other work, and generate up to ``tokens`` tokens with it.

        An adapter that this engine has loaded and tried before is answered at once, with
        ``load_ms`` of 0. A paused run releases the board; a running one has ``load_patience_s`` to
        end, then it is interrupted at a token and continues by itself later. Cancelling withdraws
        the trial.

        Raises:
            AdapterBroken: the file is not valid, or the runtime refuses it or its run.
            BoardFailed: the board is out of order, or the engine failed.
            BoardAsleep: its model is unloaded.
        """
        self._queue.require_awake()
        known = _known(self._slot.live, ref)
        if known is not None:
            return known
        return await self._ahead(lambda: self._load_and_probe(ref, prompt_ids, tokens))

    async def _ahead(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work ahead of others, and have a run release the board for it."""
        done = self._queue.schedule(work, first=True)
        self._runner.pauses.release_board()
        try:
            # Work queued before it may begin meanwhile, and has to release the board as well.
            while not (await asyncio.wait({done}, timeout=self._settings.load_patience_s))[0]:
                self._runner.vacate()
            return done.result()
        finally:
            done.cancel()

    async def try_fresh(self, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> AdapterTrial:
        """Load ``ref`` into a fresh engine, which takes the place of the board's own only if it
        generates up to ``tokens`` tokens with it.

        The model is loaded once at any time: the board's own engine ends before, so that requests
        wait meanwhile, and it is replaced by another one where the trial fails.

        Raises:
            AdapterBroken: the file is missing or changed; nothing was tried.
            BoardFailed: the board is out of order.
            BoardAsleep: its model is unloaded.
        """
        self._queue.require_awake()
        found = await self._slot.find(ref)
        results: list[tuple[TrialVerdict, str]] = []

        async def passes(live: LoadedEngine) -> bool:
            results.append(await self._verdict(live, ref, found, prompt_ids, tokens))
            return results[0][0] is TrialVerdict.PASSED

        async def tried() -> None:
            self.trying = ref.key
            try:
                await self._slot.try_fresh(f"adapter {found.label} is tried", passes)
            finally:
                self.trying = ""

        board, release = self._settings.board_id, self._slot.live.facts.release
        try:
            await self._ahead(tried)
        except BoardOutOfOrder as exc:
            if not results:
                raise
            # The result must not be lost with the board: another one would try it again.
            log.warning("board %s did not come back after a trial: %s", board, exc)
        ((verdict, reason),) = results
        if verdict is not TrialVerdict.PASSED:
            log.warning("adapter %s failed its trial (%s): %s", found.label, verdict.value, reason)
        # The log has the whole reason; clients need no folders of the board.
        reason = without_folders(reason)
        return AdapterTrial(
            self._settings.model,
            ref.digest,
            verdict,
            found.label,
            board,
            reason,
            scale=ref.scale,
            release=release,
        )

    async def _verdict(
        self, live: LoadedEngine, ref: AdapterRef, found: Adapter, prompt_ids: Ids, tokens: int
    ) -> tuple[TrialVerdict, str]:
        try:
            live.adapters.need(ref, found.size_bytes)  # it may exceed the whole budget
            await self._slot.load(live, ref, found)
            await self._probe(live, ref, prompt_ids, tokens)
        except EngineDied as exc:
            return TrialVerdict.CRASHED, exc.reason
        except EngineHung as exc:
            return TrialVerdict.HUNG, exc.reason
        except AdapterBroken as exc:
            return TrialVerdict.REFUSED, exc.reason
        except RkserveError as exc:
            return TrialVerdict.REFUSED, str(exc)
        return TrialVerdict.PASSED, ""

    async def _load_and_probe(self, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> Probe:
        """Load ``ref`` and generate up to ``tokens`` tokens, while the caller has the board.

        Raises:
            AdapterBroken: the file is not valid, or the runtime refuses it or its run.
            BoardFailed: the engine failed.
        """
        known = _known(self._slot.live, ref)
        if known is not None:  # another call did the same meanwhile
            return known
        await self._caching.park(self._slot.live)
        started_s = loop_time_s()
        live = await self._slot.with_adapter(ref)
        load_ms = (loop_time_s() - started_s) * 1e3
        return await self._probe(live, ref, prompt_ids, tokens, load_ms)

    async def _probe(
        self,
        live: LoadedEngine,
        ref: AdapterRef,
        prompt_ids: Ids,
        tokens: int,
        load_ms: float = 0.0,
    ) -> Probe:
        """Generate with a loaded adapter. Raises as ``_load_and_probe``."""
        try:
            run, ended_ms, given = await try_out(self._settings, live, ref.key, prompt_ids, tokens)
        except RunFailed as exc:
            raise AdapterBroken(ref.label, exc.reason) from None
        decode_ms = ended_ms or run.clocked(0, loop_time_s()).decode_ms
        speed = given * 1e3 / decode_ms if decode_ms > 0 else 0.0
        found = live.tried[ref.key] = Probe(self._settings.board_id, ref.key, load_ms, given, speed)
        return found


class SpeedTrials:
    """Measures the speed of one board with its base model."""

    def __init__(
        self,
        books: BoardBooks,
        slot: EngineSlot,
        queue: RunQueue,
        caching: PromptCaching,
        runner: RequestRunner,
    ) -> None:
        self._settings, self._books = books.settings, books
        self._slot, self._queue, self._caching, self._runner = slot, queue, caching, runner

    async def measure(self, seconds: float, wait: bool) -> Probe:
        """Generate for about ``seconds``, and return the speeds of prefill and decoding.

        Requests that come meanwhile wait. With ``wait`` a run that goes on ends first, and the
        measurement comes before those that wait behind it.

        Raises:
            OperationConflict: the board has requests, or is paused.
            BoardFailed: the board is out of order, or a run failed.
            BoardAsleep: its model is unloaded.
        """
        board = self._settings.board_id
        self._queue.require_awake()
        if self._books.obligations.holds:
            raise OperationConflict(f"Board {board} is paused; resume it, and measure then.")
        count = len(self._books.jobs)
        if not wait and (count or not self._queue.free):
            busy = f"has {count} request{'s' * (count != 1)}" if count else "is busy"
            raise OperationConflict(
                f"Board {board} {busy}; measure when it is idle, or with 'wait': true after its "
                "present run."
            )
        done = self._queue.schedule(lambda: self._measured(seconds), first=True)
        self._runner.pauses.release_board()
        try:
            return await done
        finally:
            done.cancel()

    async def _measured(self, seconds: float) -> Probe:
        settings, live = self._settings, self._slot.live
        await self._caching.park(live)
        end_s = loop_time_s() + seconds
        prefill: list[float] = []
        decode: list[float] = []
        tokens, longest_s = 0, 0.0
        while not decode or loop_time_s() + longest_s <= end_s:
            began_s = loop_time_s()
            perfs = await self._at_once(live, len(decode), end_s)
            fewest = min(perf.decode_tokens for perf in perfs)
            if fewest < FEWEST_SPEED_TOKENS or min(perf.decode_ms for perf in perfs) <= 0:
                reason = f"a trial answer ended after {fewest} tokens"
                raise RunFailed(settings.board_id, reason)
            width = live.facts.width
            decode.append(width * sum(1e3 * one.decode_tokens / one.decode_ms for one in perfs))
            slowest_ms = max(perf.prefill_ms for perf in perfs)
            if slowest_ms > 0 and (computed := sum(perf.prefill_tokens for perf in perfs)):
                prefill.append(width * 1e3 * computed / slowest_ms)
            tokens += width * sum(perf.decode_tokens for perf in perfs)
            longest_s = max(longest_s, loop_time_s() - began_s)
        speed = median(prefill) if prefill else 0.0
        return Probe(settings.board_id, "", 0.0, tokens, median(decode), speed)

    async def _at_once(self, live: LoadedEngine, number: int, end_s: float) -> list[Perf]:
        """Make a run in each entry that has runs of its own; return their figures."""
        every = live.per_entry
        numbers = itertools.count(number * len(every))
        made = await asyncio.gather(
            *(self._one(one, next(numbers), end_s) for one in every), return_exceptions=True
        )
        perfs: list[Perf] = []
        for one in made:
            if isinstance(one, BaseException):
                raise one
            run, ended = one
            perfs.append(run.perf(ended))
        return perfs

    async def _one(
        self, live: LoadedEngine, number: int, end_s: float
    ) -> tuple[EngineRun, RunEnded]:
        """Make a run; it is cut at the end of the time, once it has enough tokens for a figure."""

        def end_in_time(run: EngineRun, *_: object) -> None:
            given = len(run.given[0])
            if given >= SPEED_TOKENS or (given > FEWEST_SPEED_TOKENS and loop_time_s() >= end_s):
                live.abort(run)

        settings = self._settings
        entry = speed_entry(settings, number)
        begin = RunSpec(
            entries=(entry,) * live.facts.width,
            base=entry.ids,
            clear=live.context.ids != (),
            limit=min(SPEED_TOKENS, settings.context_len // 4),
        )
        run, ended = await live.run([None] * live.facts.width, begin, end_in_time, GREEDY)
        if ended.end is RunEnd.FAILED:
            raise RunFailed(settings.board_id, f"a trial run failed: {ended.reason}")
        return run, ended


def speed_entry(settings: BoardSettings, number: int) -> EntryCommand:
    """Return the prompt of a run that measures speed.

    Each number has another prompt from its first token on, so that no cached prefix is measured.
    """
    if settings.text_mode:
        entry = EntryCommand(prompt_text=f"Part {number + 1}. {SPEED_TEXT}")
    else:
        size = (settings.vocab_size or SMALL_VOCABULARY) - FIRST_ID
        length = min(SPEED_PROMPT, settings.context_len // 2)
        ids = [FIRST_ID + (number + 1) * (at + 1) * STRIDE % size for at in range(length)]
        entry = EntryCommand(tuple(one for one in ids if one not in settings.eos_ids))
    if settings.encoder is not None:
        entry = replace(entry, encoder=EncoderStates.zeros(settings.encoder))
    return entry


def _known(live: LoadedEngine, ref: AdapterRef) -> Probe | None:
    """Return the result of an earlier trial in this engine, if it still has the adapter."""
    if not live.alive or ref.key not in live.adapters.keys or ref.key not in live.tried:
        return None
    return replace(live.tried[ref.key], load_ms=0.0)


async def try_out(
    settings: BoardSettings, live: LoadedEngine, adapter: str | None, prompt_ids: Ids, tokens: int
) -> tuple[EngineRun, float, int]:
    """Make a trial run of up to ``tokens`` tokens, without ids in text mode, while the board is
    free.

    Return the run, the runtime's decoding time in ms, and the number of generated tokens.

    Raises:
        RunFailed: the runtime refused it, or generated nothing.
        EngineHung, EngineDied: as any run.
    """
    entry = EntryCommand(prompt_ids) if prompt_ids else EntryCommand(prompt_text=PROBE_TEXT)
    if settings.encoder is not None:
        entry = replace(entry, encoder=EncoderStates.zeros(settings.encoder))
    begin = RunSpec(
        entries=(entry,) * live.facts.width,
        base=prompt_ids,
        clear=live.context.ids != (),
        origin=adapter,
        limit=tokens,
    )

    def end_in_time(run: EngineRun, *_: object) -> None:
        if not live.facts.per_run_sampling and len(run.given[0]) >= tokens:
            live.abort(run)  # this runtime takes no limit

    run, ended = await live.run([None] * live.facts.width, begin, end_in_time, GREEDY)
    if ended.end is RunEnd.FAILED:
        raise RunFailed(settings.board_id, f"a trial run failed: {ended.reason}")
    given = min(tokens, len(run.given[0]))
    if given == 0:
        raise RunFailed(settings.board_id, "a trial run gave no token")
    return run, ended.perf.decode_ms, given
