"""One board: requests in, events out, one engine kept alive behind them.

The only glue of this room. Policy is elsewhere (admission, kv, watchdog, lifecycle, generation),
and so is what a request goes through once it has the board (conduct, opening), what others ask of
it meanwhile (control), of the caches (upkeep), what the cluster shall be (holding), and whether it
has an engine at all (sleeping). It knows neither Ray nor cffi nor HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from rkserve.board.answer.generation import Generation
from rkserve.board.answer.hooks import HookFactory
from rkserve.board.engine.protocol import EngineFacts
from rkserve.board.operations import report as reporting
from rkserve.board.operations.adopt import StateAdopter
from rkserve.board.operations.base_weights import BaseWeights, ModelFileDigest, StartEngine
from rkserve.board.operations.cache_calls import CacheCalls
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.probe_adapter import AdapterProbes
from rkserve.board.operations.report import PrefixReport
from rkserve.board.operations.sleep import BoardSleep, SleepMarker
from rkserve.board.operations.swap_weights import WeightSwap
from rkserve.board.rules.admission import Admission, Decision, Expire, Start
from rkserve.board.rules.counters import BoardCounters, VersionCounters
from rkserve.board.rules.generation_states import GenerationEvent
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.adapter_loading import AdapterLoader
from rkserve.board.run.board_protocol import EmbeddingCalls
from rkserve.board.run.job import EngineTask, Job
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.request_control import RequestControl
from rkserve.board.run.run import loop_time_s
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.board.storage.adapters import StagedAdapters
from rkserve.board.storage.base_weights import Intake, StagedWeights
from rkserve.core.board_report import (
    BoardReport,
    BoardState,
    CacheEntry,
    Emitted,
    GenerationInfo,
    GenerationState,
    KvReport,
)
from rkserve.core.desired_state import Adoption, Desired, Probe
from rkserve.core.errors import (
    BoardAsleep,
    BoardFailed,
    BoardOutOfOrder,
    ContextOverflow,
    EmbeddingUnsupported,
    EngineDied,
    EngineHung,
    InputTooLong,
    QueueFull,
    QueueTimeout,
    RkserveError,
    RunFailed,
    SamplingFixed,
)
from rkserve.core.messages import (
    Accepted,
    AdapterRef,
    ControlAction,
    Edit,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
)

__all__ = ["Board", "BoardSettings"]

T = TypeVar("T")
log = logging.getLogger(__name__)

# A handle that fails this many runs in a row is not trusted to heal by itself.
RUNS_FAILED_LIMIT = 3
# A model that is not there, and one that is on its way.
UNLOADED = (BoardState.ASLEEP, BoardState.LOADING)


class Board:
    """One NPU behind a bounded queue. Use it from one event loop.

    Its attributes without underscore are what it lends to its parts; see ``Stage``.
    """

    def __init__(self, settings: BoardSettings, start_engine: StartEngine) -> None:
        """``start_engine`` takes the model's file; None is the one that was configured."""
        self._settings = settings
        self.board_id, self.model = settings.board_id, settings.model
        self.context_len, self.n_batch = settings.context_len, settings.n_batch
        self.text_mode = settings.text_mode
        self.eos_ids, self.tokenizer_file = settings.eos_ids, settings.tokenizer_file
        self.encoder = settings.encoder
        self.sampling, self.guided = settings.sampling, settings.guided
        self.position_bytes = settings.kv_position_bytes
        self.pause_timeout_s, self.max_paused = settings.pause_timeout_s, settings.max_paused
        self.batch_window_s = settings.batch_window_s
        self.free_since_s = self.asked_s = 0.0
        self.figures = BoardCounters()
        self.admission = Admission(
            settings.queue_limit,
            settings.queue_timeout_s,
            batch=settings.n_batch,
            window_s=settings.batch_window_s if settings.n_batch > 1 else 0.0,
            hold_s=settings.pause_hold_s,
        )
        self.caching = PromptCaching(settings.cache_rules, settings.caches, self.figures)
        self._holdings = PrefixReport(self.caching)
        self.staged = StagedAdapters(settings.staged_dir, settings.board_id, settings.model)
        self.adapting = AdapterLoader(settings.model_dir, self.staged.shelf)
        self.charge = Obligations(
            settings.board_id, settings.model, self.staged.present, governed=settings.governed
        )
        weights = StagedWeights(settings.weights_dir, settings.board_id, settings.model)
        self._bases = BaseWeights(
            weights,
            self.charge,
            self.caching,
            start_engine,
            marker=settings.base_file,
            rest_s=settings.base_rest_s,
        )
        self._own = ModelFileDigest(settings.own_file, settings.own_digest_file)
        self.intake = Intake(self.staged, weights, self._bases.uses)
        self.versions = VersionCounters()
        self.jobs: dict[int, Job] = {}  # by ticket, as long as someone listens
        self._errands: dict[int, EngineTask] = {}
        self._at_work: list[Job | EngineTask] = []  # whose the board is now
        self._conductor = RequestRunner(self)
        self._control = RequestControl(self, self._conductor)
        self._upkeep = CacheCalls(self, self._conductor.pauses)
        self.embedding: EmbeddingCalls = EmbeddingService(self)
        self._probing = AdapterProbes(self, self._conductor, settings.load_patience_s)
        self._tickets = itertools.count(1)
        self._failed_in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None
        self._keeper = EngineSupervisor(settings, self._bases.load, self)
        mark, governed = SleepMarker(settings.asleep_file), settings.governed
        self._sleeping = BoardSleep(self, self._keeper, self._conductor, mark, governed=governed)
        self._rebasing = WeightSwap(
            self, self._keeper, self._conductor, self._bases, self._look_again
        )
        self._holding = StateAdopter(self, self._conductor, self._sleeping, self._rebasing)

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ``RkserveError`` or ``OSError``; the board is then ``failed``.

        One that slept when its replica ended sleeps on until it is told otherwise.
        """
        await asyncio.to_thread(self.staged.open)
        await self._bases.open()  # before the caches: they are of what is loaded
        await self.caching.open()
        await self._keeper.start(await self._sleeping.left_asleep())
        # Not before: the load has brought the file into the page cache, and comes first.
        self._keeper.spawn(self._own.look())

    async def stop(self) -> None:
        """End the engine and everything that waits or is paused."""
        self._own.stop()
        if self._timer is not None:
            self._timer.cancel()
        await self._keeper.stop()
        await self.caching.close()

    def check(self) -> None:
        """Raise ``BoardFailed`` with the reason while the board cannot help itself."""
        self._keeper.check()

    def forgive(self) -> None:
        """The last loss of the engine was a request's fault, and does not count."""
        self._keeper.forgive()

    def report(self) -> BoardReport:
        """Return what the board is doing and what it has done."""
        return reporting.report(
            self._settings,
            self._keeper,
            self._sleeping,
            self._bases,
            self,
            own=self._own,
            holdings=self._holdings.packed(self._keeper.live),
        )

    # -- requests -----------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, hooks: Sequence[HookFactory] = ()
    ) -> AsyncGenerator[Event, None]:
        """Yield ``Accepted``, deltas and ``Finished``. Closing the generator aborts the run.

        Raises:
            QueueFull, QueueTimeout: the board has no place, or had none in time.
            RequestError: the board cannot serve this request as it stands.
            HookFailed: a hook raised. PauseExpired: nobody resumed it.
            BoardFailed: the board is out of order, or its engine was lost during the answer.
            BoardBehind, EnginePaused, BoardAsleep: it takes no such request now.
        """
        live = self._open_for(request)
        ignored = () if live.facts.per_run_sampling else self._settings.ignored(request)
        if ignored and request.strict_sampling:
            raise SamplingFixed(live.facts.release, ignored)
        if len(request.prompt_ids) + request.max_tokens > self.context_len:
            raise ContextOverflow(len(request.prompt_ids), self.context_len)
        self.caching.check(request)
        self._settings.check_steps(request)
        self._settings.check_images(request)
        self._settings.check_embeds(request)
        self._settings.check_encoder(request)
        job = self._job(request, live.facts, hooks)
        self.jobs[job.ticket] = job
        self.asked_s = loop_time_s()
        try:
            ahead = self._line_up(job)
        except QueueFull:
            del self.jobs[job.ticket]
            raise
        self.figures.requests += 1
        try:
            self.pump()
            event: Event = Accepted(
                self.board_id,
                live.facts.release,
                ahead,
                ignored,
                self.charge.label(job.ref),
                self.charge.epoch or 0,
                job.ref,
                job.line_epoch,
            )
            yield event
            while not isinstance(event, Finished):
                event = await job.next_event()
                yield event
        finally:
            self._leave(job)

    async def embed(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        """Yield ``Accepted``, ``Embedded`` and ``Finished``; see ``EmbeddingService.events``."""
        self._open_for(request)
        if self.n_batch > 1:
            raise EmbeddingUnsupported(
                "The model's boards serve batches (n_batch > 1), and the runtime computes no "
                "hidden states then."
            )
        longest = max(map(len, request.inputs), default=0)
        if longest > self.context_len:
            raise InputTooLong(longest, self.context_len, "input")
        async with aclosing(self.embedding.events(request)) as events:
            async for event in events:
                yield event

    def _open_for(self, request: GenerateRequest) -> LoadedEngine:
        """Return the engine, where the board takes such a request. Raises as ``generate``."""
        live = self._keeper.open()
        self.charge.check(request, time.time())
        if self._keeper.state in UNLOADED and not request.patient:
            raise BoardAsleep(self.board_id, "its model is being loaded again")
        return live

    def generations(self) -> list[GenerationInfo]:
        """Return the generations that have not ended, with the text of each so far."""
        return self._control.generations() if self._keeper.live is not None else []

    def emitted(self) -> Emitted:
        """Return how many tokens each generation that has not ended has so far."""
        return self._control.emitted()

    async def control(
        self,
        generation: str,
        action: ControlAction,
        edit: Edit | None = None,
        choice: int | None = None,
    ) -> list[GenerationInfo]:
        """Pause, edit, resume or abort; see ``RequestControl.control``."""
        return await self._control.control(generation, action, edit, choice)

    async def given_out(self, done: Sequence[GenerationInfo], action: ControlAction) -> None:
        """Wait until the streams tell of what was just done; see ``RequestControl.given_out``."""
        await self._control.given_out(done, action)

    def abort_all(self, request_ids: Sequence[str] | None) -> int:
        """Abort these generations, or all there are; return how many that were."""
        return self._control.abort_all(request_ids)

    async def adopt(self, desired: Desired) -> Adoption:
        """Be what the cluster shall be; see ``StateAdopter.adopt``."""
        return await self._holding.adopt(desired)

    async def load_adapter(
        self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int
    ) -> Probe:
        """Load an adapter and try it; see ``AdapterProbes.load``."""
        return await self._probing.load(ref, prompt_ids, tokens)

    async def refresh(self, reason: str) -> None:
        """Replace the engine by a fresh one between runs: nothing is loaded in it."""
        self._keeper.open()
        if self.asleep:
            return  # the one that is loaded when it wakes is as fresh
        done = self.errand(lambda: self.renew(reason), first=True)
        self._conductor.pauses.let_go()  # nobody who is paused keeps the board
        try:
            await done
        except BoardAsleep:
            log.info("board %s: it was put to sleep, and wakes with a fresh engine", self.board_id)

    async def kv(self) -> KvReport:
        """Return what the KV cache holds. Raises ``BoardFailed`` while there is no engine."""
        self._keeper.open()
        return self._upkeep.kv()

    async def clear_kv(self, keep_system_prompt: bool) -> KvReport:
        """Empty the KV cache; see ``CacheCalls.clear_kv``."""
        return await self._upkeep.clear_kv(keep_system_prompt=keep_system_prompt)

    async def build_cache(
        self, name: str, ids: tuple[int, ...], adapter: AdapterRef | None = None
    ) -> CacheEntry:
        """Build a named prompt cache; see ``CacheCalls.build_cache``."""
        return await self._upkeep.build_cache(name, ids, adapter)

    def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk."""
        return self._upkeep.caches()

    async def delete_cache(self, name: str) -> bool:
        """Remove a named prompt cache; False where there is none."""
        return await self._upkeep.delete_cache(name)

    def _job(
        self, request: GenerateRequest, facts: EngineFacts, hooks: Sequence[HookFactory]
    ) -> Job:
        generation = Generation(
            request,
            self._settings.eos_ids,
            runtime_counts=facts.per_run_sampling,
            hooks=(*self._settings.hooks, *hooks),
            vocab_size=self._settings.vocab_size,
            context_len=self.context_len,
        )
        sampling = request.sampling if facts.per_run_sampling else None
        job = Job(next(self._tickets), generation, loop_time_s(), sampling)
        bound = None if request.continued is None else request.continued.bound
        if bound is not None:
            job.take_over(bound)
        else:
            line = self.charge.line(request)
            job.bind(self.charge.bind(request), line.epoch if line is not None else 0)
            job.introduce(self.charge.label(job.ref))
        self._holding.admit(job)
        return job

    def _line_up(self, job: Job) -> int:
        """Queue a job, and return how many are ahead of it. Raises ``QueueFull``.

        One that goes on had a board before, and goes first. One that is complete needs no run.
        """
        if job.request.continued is None and not job.generation.complete:
            return self.admission.offer(job.ticket, loop_time_s(), job.key)
        if not self._conductor.arrive(job):
            self.admission.readmit(job.ticket, loop_time_s(), job.key)
        return len(self.admission.running)

    def _leave(self, job: Job) -> None:
        """The consumer is gone, after the last event or before it."""
        del self.jobs[job.ticket]
        self.asked_s = loop_time_s()
        self._control.remember(job)
        job.abandon()
        waited = self.admission.withdraw(job.ticket)
        if job.outcome is None:
            self.figures.aborted += not waited
            self._conductor.leave(job)

    # -- who has the board --------------------------------------------------------------------

    def pump(self) -> None:
        """Do what admission decides now, and come back when it has something to do by itself."""
        for decision in self.admission.decide(ready=self._keeper.ready, now_s=loop_time_s()):
            self._carry_out(decision)
        if self._timer is not None:
            self._timer.cancel()
        event_s = self.admission.next_event_s()
        if event_s is not None and self._keeper.state is not BoardState.STOPPED:
            self._timer = asyncio.get_running_loop().call_at(event_s, self.pump)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Start):
            self._at_work = [self._work(ticket) for ticket in decision.tickets]
            self._keeper.spawn(self._conduct(self._at_work))
        elif isinstance(decision, Expire):
            retry_after_s = self.admission.retry_after_s()
            error = QueueTimeout(decision.waited_s, retry_after_s)
            self._work(decision.ticket).end(error)
            self._errands.pop(decision.ticket, None)
        else:
            self._conductor.pauses.let_go()

    def _work(self, ticket: int) -> Job | EngineTask:
        return self._errands.get(ticket) or self.jobs[ticket]

    async def _conduct(self, work: Sequence[Job | EngineTask]) -> None:
        """Let those that were started have the board, whoever still listens, then the next."""
        started_s = loop_time_s()
        try:
            if isinstance(work[0], EngineTask):
                await work[0].perform()
            else:
                await self._conductor.perform([job for job in work if isinstance(job, Job)])
            self._failed_in_a_row = 0
        except EngineHung as exc:
            self._failed_in_a_row = 0
            await self._keeper.give_up(exc.reason)
        except RunFailed as exc:
            log.warning("board %s: a run failed: %s", self.board_id, exc.reason)
            self.lose(exc)
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= RUNS_FAILED_LIMIT:
                await self._keeper.give_up(
                    f"{self._failed_in_a_row} runs in a row failed: {exc.reason}"
                )
        except RkserveError as exc:
            self.lose(exc)
        except Exception as exc:
            # The run may still be going on in the engine, and nobody would hear of its end.
            log.exception("board %s: a run ended by an internal error", self.board_id)
            reason = f"internal error: {exc!r}"
            self.lose(BoardFailed(self.board_id, reason))
            await self._keeper.give_up(reason)
        finally:
            self._at_work = []
            self._errands.pop(work[0].ticket, None)
            self.free_since_s = loop_time_s()
            self.admission.finished(self.free_since_s - started_s)
            self.pump()

    def lose(self, error: RkserveError) -> None:
        """Those who have the board cannot go on. A paused one does not have it."""
        for work in self._at_work:
            if isinstance(work, EngineTask):
                work.end(error)
            elif work.seated:
                work.seated = False
                unbegun = work.state in (GenerationState.QUEUED, GenerationState.RESUMING)
                lost = isinstance(error, EngineDied | EngineHung | BoardOutOfOrder)
                rests = self._keeper.state is BoardState.QUARANTINED
                if unbegun and lost and not rests and not work.retried and not work.over:
                    work.retried = True  # what killed the engine was not its own run
                    self.requeue(work)
                else:
                    self._conductor.fail(work, error)

    def requeue(self, job: Job) -> None:
        """Let the job wait for the board again, in front of those that never had it."""
        if job.state is GenerationState.RESUMING:
            job.advance(GenerationEvent.REQUEUED)
        if job.ticket not in self.jobs:
            return  # nobody listens any more
        job.queued_s = loop_time_s()
        # Not ahead of those that it was to let go for, if it has not even done so yet.
        yields = job.released and job.ticket in self.admission.running
        self.admission.readmit(job.ticket, job.queued_s, job.key, yields=yields)
        self.pump()

    def errand(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        first: bool,
        barred: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[T]:
        """Do ``work`` when the board is free: ``first`` before others, or in turn (QueueFull).

        It does not begin while it is ``barred``. Cancelling the future withdraws what waits.
        """
        errand = EngineTask(next(self._tickets), work, barred)
        key = ("errand", errand.ticket)  # it shares no run
        self._errands[errand.ticket] = errand
        try:
            if first:
                self.admission.readmit(errand.ticket, loop_time_s(), key)
            else:
                self.admission.offer(errand.ticket, loop_time_s(), key)
        except QueueFull:
            del self._errands[errand.ticket]
            raise
        errand.done.add_done_callback(lambda _: self._withdraw(errand))
        self.pump()
        return errand.done

    def is_barred(self, ticket: int) -> bool:
        """Whether that errand may not begin now."""
        errand = self._errands.get(ticket)
        return errand is not None and errand.barred()

    def _withdraw(self, errand: EngineTask) -> None:
        if errand.done.cancelled() and self.admission.withdraw(errand.ticket):
            del self._errands[errand.ticket]
            self.pump()

    def require_open(self) -> None:
        """Raise ``BoardFailed`` where the board is out of order."""
        self._keeper.open()

    def require_awake(self) -> None:
        """Raise ``BoardAsleep`` where the model is unloaded, or about to be."""
        self._sleeping.require_awake()

    @property
    def asleep(self) -> bool:
        """Whether the model is unloaded."""
        return self._sleeping.asleep

    def _look_again(self) -> None:
        self._holding.look_again()

    def turn_away(self) -> None:
        """There is no engine any more: end the errands that wait for it."""
        for ticket, errand in list(self._errands.items()):
            if self.admission.withdraw(ticket):
                del self._errands[ticket]
                errand.end(BoardAsleep(self.board_id, "it was put to sleep meanwhile"))

    @property
    def free(self) -> bool:
        """Whether it could start something now. Raises ``BoardFailed`` where it is out of order."""
        self._keeper.open()
        return self._keeper.ready and not self.admission.running

    @property
    def live(self) -> LoadedEngine:
        """The engine that is loaded now, or the last one."""
        live = self._keeper.live
        if live is None:
            raise self._keeper.failed()
        return live

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one, in order, after its conversation was parked.

        Raises what a failing load raises.
        """
        await self.caching.park(self.live, renewing=True)
        await self._keeper.renew(reason)

    def fail_all(self, *, spare_paused: bool = False) -> None:
        """Nobody who waits is served here: say so now, while another board may still do it."""
        for ticket, job in self.jobs.items():
            self.admission.withdraw(ticket)
            # Those who have the board are told what became of their own run; see ``lose``.
            spared = job.seated or job.state is GenerationState.PAUSED
            if not (spare_paused and spared):
                job.end(self._keeper.failed())
        for ticket, errand in self._errands.items():
            self.admission.withdraw(ticket)
            errand.end(self._keeper.failed())
