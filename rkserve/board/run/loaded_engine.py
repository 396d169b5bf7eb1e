"""A loaded engine with all that it holds: KV cache, adapters, prompt cache, perhaps a paused run.

It makes one run or call at a time and watches over it. It ends no engine and starts none, and what
a run's end means for the requests in it is not its business.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rkserve.board.answer.kv_plan import CachedContext, Ids, Range, ResumePlan, held, plan_resume
from rkserve.board.engine.protocol import Engine, RunCommand, RunEnded
from rkserve.board.rules.loaded_adapters import AdapterTable
from rkserve.board.run.job import Job
from rkserve.board.run.run import (
    EngineRun,
    RunSpec,
    RunTimeouts,
    Watchdog,
    loop_time_s,
    patience_for,
)
from rkserve.core.block_hashes import adapter_of
from rkserve.core.desired_state import Probe
from rkserve.core.errors import EngineDied, EngineHung
from rkserve.core.run_params import Sampling, Scored
from rkserve.native.runtime import RunEnd

log = logging.getLogger(__name__)

# Before a silence counts, the event loop gets this long to read what has arrived: it may have been
# the loop that slept, and not the engine.
SECOND_LOOK_S = 0.1

# What a token leads to: the run, the entry, the token's id and text, and whether text is held back.
Receiver = Callable[[EngineRun, int, int, bytes, bool], None]


@dataclass(frozen=True, slots=True)
class PausedRun:
    """A run that the runtime itself has paused.

    ``ids`` of None: what the KV cache holds is not known. ``spliced``: something was cut out before
    its end, so that what is behind was computed with it in view. ``origin``: see ``origins``.
    """

    ids: Ids | None
    history: bool
    spliced: bool = False
    origin: str | None = None


class LoadedEngine:
    """One engine from its load to its end."""

    def __init__(
        self, board_id: str, engine: Engine, patience: RunTimeouts, adapters: AdapterTable
    ) -> None:
        self.engine = engine
        self.facts = engine.facts
        self.adapters = adapters
        self.context = CachedContext(append=self.quirk("append_tokens_with_history"))
        self.paused: PausedRun | None = None
        self.positions: tuple[int, ...] = (0,) * engine.facts.n_batch  # by the runtime's last word
        self.doomed = False  # it is about to be ended: nothing in its KV cache will be kept
        self.aborted = False  # some run of this handle was; see quirk prompt_cache_after_abort
        self.tried: dict[str, Probe] = {}  # what trial runs of its adapters found, by their keys
        self.running: EngineRun | None = None
        self._cache_loaded = False
        self._board_id = board_id
        self._patience = patience
        self._numbers = itertools.count(1)

    def quirk(self, name: str) -> bool:
        """Whether this release may be trusted so far; see ``native.quirks``."""
        return self.facts.quirks.get(name, False)

    @property
    def alive(self) -> bool:
        """False from the moment that the process has ended."""
        return not self.engine.died.done()

    def require(self) -> None:
        """Raise ``EngineDied`` where the process has ended."""
        if not self.alive:
            raise EngineDied(self._board_id, self.engine.died.result())

    @property
    def entries(self) -> tuple[int, ...]:
        """Positions that each entry of the KV cache holds, as far as that is known now."""
        run = self.running
        if run is None:
            return self.positions
        if len(run.given) == 1:
            return (len(run.transcript),)
        sent = (len(entry.ids) for entry in run.beginning.entries)
        return tuple(n + len(given) for n, given in zip(sent, run.given, strict=True))

    def may_pause(self, *, history: bool) -> bool:
        """Whether the runtime itself may pause such a run and keep its KV cache."""
        return self.facts.n_batch == 1 and (not history or self.quirk("pause_with_history"))

    def resumption(
        self, wanted: Ids, cuts: Sequence[Range], origin: str | None
    ) -> ResumePlan | None:
        """Return how the paused run goes on with ``wanted``, see ``plan_resume``; None: it cannot.

        Under another ``origin`` its positions are worth nothing. Of a conversation
        nothing is cut out where the runtime is not trusted with that.
        """
        paused = self.paused
        if paused is not None and paused.origin != origin:
            return None
        resume = plan_resume(paused.ids, wanted, cuts) if paused is not None else None
        if paused is None or resume is None or not resume.cut or not paused.history:
            return resume
        return resume if self.quirk("clear_range_with_history") else None

    # -- runs ---------------------------------------------------------------------------------

    async def run(
        self,
        seats: Sequence[Job | None],
        beginning: RunSpec,
        receive: Receiver,
        sampling: Sampling | None = None,
    ) -> tuple[EngineRun, RunEnded]:
        """Make a run, and note what it left in the KV cache.

        Raises:
            EngineHung: the watchdog's deadline has passed; the run may still be going on.
            EngineDied: the process ended before the run did.
        """
        run = self._seat(seats, beginning)
        self.running = run
        if not beginning.resume:
            self.context.forget()  # known again once this run has ended in order
        # Where that fails the run may still be going on, and stays the running one.
        try:
            ended = await self._supervise(run, self._command(run, sampling), receive)
        finally:
            run.end()
        self.running = None
        self._settle(run, ended)
        return run, ended

    def abort(self, run: EngineRun) -> None:
        """Ask the runtime to end the run; once is enough."""
        if run.stopping:
            return
        run.stopping = True
        if run.beginning.steps is None:
            self.aborted = True  # else it is left between two steps
        if run.watchdog.aborted(loop_time_s()):
            run.hurry()
        self.engine.abort(run.number)

    def plead(self) -> bool:
        """A last abort for a run that hangs; False where there is none, or it was asked for."""
        if self.running is None or self.running.stopping:
            return False
        self.abort(self.running)
        return True

    def pause(self, run: EngineRun) -> None:
        """Ask the runtime to pause the run; an abort outweighs it."""
        if run.stopping or run.pausing:
            return
        run.pausing = True
        if run.watchdog.paused(loop_time_s()):
            run.hurry()
        self.engine.pause(run.number)

    def _seat(self, seats: Sequence[Job | None], beginning: RunSpec) -> EngineRun:
        patience = patience_for(beginning, self._patience)
        prefill = sum(
            len(entry.ids) if entry.embeds is None else entry.embeds.rows
            for entry in beginning.entries
        )
        watchdog = Watchdog(patience, prefill, loop_time_s())
        # Nobody can go on with a paused run in text mode: which ids it consists of is not known.
        in_text_mode = beginning.entries[0].prompt_text is not None
        pausable = (
            beginning.steps is None
            and not in_text_mode
            and self.may_pause(history=beginning.history)
        )
        return EngineRun(next(self._numbers), seats, beginning, watchdog, pausable=pausable)

    def _command(self, run: EngineRun, sampling: Sampling | None) -> RunCommand:
        begin, per_run = run.beginning, self.facts.per_run_sampling
        # A loaded cache would serve any later run that begins like it, under any adapter.
        release = self._cache_loaded and begin.hit is None and not begin.resume
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
        )

    async def _supervise(self, run: EngineRun, command: RunCommand, receive: Receiver) -> RunEnded:
        """Wait for the run's end, within what the watchdog grants."""

        now_s = asyncio.get_running_loop().time  # looked up once: this is the path of every token

        def on_token(entry: int, token_id: int, data: bytes, waiting: bool) -> None:
            run.came(entry, token_id, now_s())
            receive(run, entry, token_id, data, waiting)

        def on_scores(prompt: bool, found: tuple[Scored, ...]) -> None:
            job = run.seats[0]
            if job is not None:
                job.generation.score(found, prompt=prompt)

        ended = self.engine.run(command, on_token, on_scores)
        try:
            while not ended.done():
                patience_s = run.watchdog.deadline_s - now_s()
                if patience_s > 0:
                    waits_for = (ended, run.nearer_deadline())
                    await asyncio.wait(waits_for, timeout=patience_s, return_when="FIRST_COMPLETED")
                    continue
                await asyncio.wait({ended}, timeout=SECOND_LOOK_S)
                if not ended.done() and run.watchdog.deadline_s <= now_s():
                    raise EngineHung(self._board_id, run.watchdog.verdict(now_s()))
            return ended.result()
        finally:
            ended.cancel()  # the engine may settle it later, when nobody asks any more

    def _settle(self, run: EngineRun, ended: RunEnded) -> None:
        """Note what the run left."""
        if ended.cache_refused is not None:
            refused = ended.cache_refused
            log.warning("board %s: a prompt cache was refused: %s", self._board_id, refused)
        self.positions = ended.kv_positions or self.positions
        self.aborted |= ended.aborted
        began = run.beginning
        if not began.resume:
            # One that never ran may have loaded its cache, and may not have let go of the last one.
            ran = ended.end not in (None, RunEnd.FAILED)
            self._cache_loaded = began.hit is not None or (self._cache_loaded and not ran)
        if began.resume and ended.end in (None, RunEnd.FAILED):
            return  # aborted before it began, or refused: for ``drain`` to find out what it is
        spliced = self._spliced(began)
        self.paused = None
        if ended.end is RunEnd.PAUSED:
            found = held(run.transcript, ended.kv_positions[0]) if ended.kv_positions else None
            self.paused = PausedRun(found, began.history, spliced, began.origin)
        self._settle_context(run, ended, spliced=spliced)

    def _spliced(self, began: RunSpec) -> bool:
        """Whether this resumption, or one before it, has cut out more than the end."""
        if self.paused is None or not began.resume:
            return False
        size, inside = len(self.paused.ids or ()), self.paused.spliced
        for start, end in began.cut:
            inside = inside or end < size
            size -= end - start
        return inside

    def _settle_context(self, run: EngineRun, ended: RunEnded, *, spliced: bool) -> None:
        began = run.beginning
        if began.steps is not None:
            stopped = run.stopping and run.first_s is None  # perhaps within the prompt
        else:
            stopped = run.stopping and (run.unheard or not self.quirk("kv_valid_after_abort"))
        in_text_mode = began.entries[0].prompt_text is not None and began.pooling is None
        # FINISH may not come after hidden states, so what follows from it is not taken for granted.
        left = began.pooling is not None and self.positions[0] > 0
        if not ended.in_order or in_text_mode or stopped or left:
            self.context.forget()
        elif not began.history:
            self.context.reset()  # without history the runtime drops the context by itself
        elif spliced:
            self.context.forget()  # a whole prefill of the same ids would give other positions
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
            self.context = CachedContext(append=False)
            self.context.forget()

    # -- calls --------------------------------------------------------------------------------

    async def call(self, method: str, *, extra_s: float = 0.0, **args: Any) -> Any:
        """Make one call of the runtime between two runs.

        Raises:
            EngineHung: it did not return in time.
            EngineDied: the process ended before it did.
            NativeError: the runtime refused it.
        """
        limit_s = self._patience.abort_s + self._patience.token_s + extra_s
        result = self.engine.call(method, **args)
        try:
            await asyncio.wait({result}, timeout=limit_s)
            if not result.done():
                await asyncio.wait({result}, timeout=SECOND_LOOK_S)
            if not result.done():
                raise EngineHung(self._board_id, f"{method} did not return within {limit_s:g} s")
            return result.result()
        finally:
            result.cancel()

    async def drain(self) -> None:
        """End the paused run without going on with it. Raises as ``call``."""
        self.context.forget()
        if not (self.quirk("drain_by_limit") and self.facts.per_run_sampling):
            self.aborted = True  # one token more, then an abort: so it counts as one
        history = self.paused is not None and self.paused.history
        await self.call("drain")
        self.paused = None
        # A single turn is forgotten with its end; a conversation has grown by what was drained.
        kept = await self.call("kv_sizes") if history else (0,) * self.facts.n_batch
        self.positions = tuple(kept)

    async def clear(self, *, keep_system_prompt: bool) -> None:
        """Empty the KV cache. Raises as ``call``."""
        try:
            await self.call("clear_kv", keep_system_prompt=keep_system_prompt)
            self.positions = tuple(await self.call("kv_sizes"))
        except BaseException:
            self.context.forget()
            raise
        if self.positions[0] or not keep_system_prompt:
            self.context.cleared(self.positions[0])
        else:
            # It was to spare what was not there: the engine takes it for partly filled, under the
            # adapter of before, until a whole clear.
            self.context.forget()
