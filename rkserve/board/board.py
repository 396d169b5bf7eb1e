"""One board: requests in, events out, one engine kept alive behind them.

It only connects its parts. Pure policy is in ``rules`` and ``answer``, a request's runs are in
``run``, and changes of the desired state, sleep, caches and adapters in ``operations``. It imports
neither Ray nor cffi nor HTTP.
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
from rkserve.board.operations.adapters import AdapterLoader, AdapterProbes
from rkserve.board.operations.adopt import StateAdopter
from rkserve.board.operations.base_weights import BaseWeights, ModelFileDigest, StartEngine
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.report import CacheCalls, PrefixReport
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.operations.swap_weights import WeightSwap
from rkserve.board.rules.admission import Admission, Decision, Expire, Start
from rkserve.board.rules.generation_states import GenerationEvent
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.job import EngineTask, Job
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.ports import BoardBooks
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.request_control import RequestControl
from rkserve.board.run.run import loop_time_s
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.board.storage.staged_artifacts import Intake, StagedAdapters, StagedWeights
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

# After this many failed runs in a row the engine is replaced.
RUNS_FAILED_LIMIT = 3
# The states without a loaded model.
UNLOADED = (BoardState.ASLEEP, BoardState.LOADING)


class Board:
    """One NPU behind a bounded queue, as ``EngineSlot`` and ``RunQueue`` of its parts.

    Use it from one event loop.
    """

    def __init__(self, settings: BoardSettings, start_engine: StartEngine) -> None:
        """``start_engine`` takes a model file; None is the configured one."""
        self.settings = settings
        self.board_id = settings.board_id
        self.admission = Admission(
            settings.queue_limit,
            settings.queue_timeout_s,
            batch=settings.n_batch,
            window_s=settings.batch_window_s if settings.n_batch > 1 else 0.0,
            hold_s=settings.pause_hold_s,
        )
        self.staged = StagedAdapters(settings.staged_dir, settings.board_id, settings.model)
        self.books = books = BoardBooks(
            Obligations(
                settings.board_id, settings.model, self.staged.present, governed=settings.governed
            )
        )
        self.caching = caching = PromptCaching(
            settings.cache_rules, settings.caches, books.counters
        )
        self._prefixes = PrefixReport(caching)
        self._adapters = AdapterLoader(settings.model_dir, self.staged.shelf)
        weights = StagedWeights(settings.weights_dir, settings.board_id, settings.model)
        self._weights = BaseWeights(
            weights,
            books.obligations,
            caching,
            start_engine,
            marker=settings.base_file,
            rest_s=settings.base_rest_s,
        )
        self._model_file = ModelFileDigest(settings.own_file, settings.own_digest_file)
        self.intake = Intake(self.staged, weights, self._weights.uses)
        self._tasks: dict[int, EngineTask] = {}  # by ticket
        self._at_work: list[Job | EngineTask] = []  # the work of the current run
        self._tickets = itertools.count(1)
        self._failed_in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None
        self._supervisor = supervisor = EngineSupervisor(settings, self._weights.load, self)
        self._runner = runner = RequestRunner(settings, self, books, self, caching)
        self._control = RequestControl(settings, self, books, runner)
        self._cache_calls = CacheCalls(settings, self, self, caching, runner.pauses)
        self._embedding = EmbeddingService(settings, self, books, self, caching)
        self._probes = AdapterProbes(settings, self, self, caching, runner)
        self._sleep = BoardSleep(
            settings,
            self,
            books,
            self,
            caching=caching,
            embedding=self._embedding,
            supervisor=supervisor,
            pauses=runner.pauses,
        )
        self._weight_swap = WeightSwap(
            settings,
            self,
            books,
            self,
            supervisor=supervisor,
            runner=runner,
            weights=self._weights,
            reapply_holds=self._reapply_holds,
        )
        self._adopter = StateAdopter(
            settings.board_id,
            self,
            books,
            self,
            embedding=self._embedding,
            runner=runner,
            sleep=self._sleep,
            weight_swap=self._weight_swap,
        )

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ``RkserveError`` or ``OSError``; the board is then ``failed``.

        A board that was asleep when its replica ended stays asleep until it is woken.
        """
        await asyncio.to_thread(self.staged.open)
        await self._weights.open()  # before the caches, which depend on the loaded weights
        await self.caching.open()
        await self._supervisor.start(await self._sleep.unloaded_facts())
        # After the load, which has brought the file into the page cache and has priority.
        self._supervisor.spawn(self._model_file.look())

    async def stop(self) -> None:
        """End the engine and all queued and paused requests."""
        self._model_file.stop()
        if self._timer is not None:
            self._timer.cancel()
        await self._supervisor.stop()
        await self.caching.close()

    def check(self) -> None:
        """Raise ``BoardFailed`` with the reason where the board cannot recover by itself."""
        self._supervisor.check()

    def forgive(self) -> None:
        """Discount the last loss of the engine, which a request caused."""
        self._supervisor.forgive()

    def report(self) -> BoardReport:
        """Return the board's state and counters."""
        return reporting.report(
            self.settings,
            self._supervisor,
            self._sleep,
            self._weights,
            books=self.books,
            admission=self.admission,
            embedding=self._embedding,
            own=self._model_file,
            holdings=self._prefixes.packed(self._supervisor.live),
        )

    # -- requests ---------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, hooks: Sequence[HookFactory] = ()
    ) -> AsyncGenerator[Event, None]:
        """Yield ``Accepted``, deltas, changes of queue or pause, and ``Finished``.

        Closing the generator aborts the run.

        Raises:
            QueueFull, QueueTimeout: the queue is full, or the wait was too long.
            RequestError: the board cannot serve this request.
            HookFailed: a hook raised.
            PauseExpired: the generation was not resumed in time.
            BoardFailed: the board is out of order, or lost its engine during the answer.
            BoardBehind, EnginePaused, BoardAsleep: the board accepts no such request now.
        """
        live = self._open_for(request)
        ignored = () if live.facts.per_run_sampling else self.settings.ignored(request)
        if ignored and request.strict_sampling:
            raise SamplingFixed(live.facts.release, ignored)
        if len(request.prompt_ids) + request.max_tokens > self.settings.context_len:
            raise ContextOverflow(len(request.prompt_ids), self.settings.context_len)
        self.caching.check(request)
        self.settings.check_steps(request)
        self.settings.check_images(request)
        self.settings.check_embeds(request)
        self.settings.check_encoder(request)
        job = self._job(request, live.facts, hooks)
        self.books.jobs[job.ticket] = job
        self.books.asked_s = loop_time_s()
        try:
            ahead = self._line_up(job)
        except QueueFull:
            del self.books.jobs[job.ticket]
            raise
        self.books.counters.requests += 1
        try:
            self.pump()
            job.waits = job.ticket not in self.admission.running
            event: Event = Accepted(
                self.board_id,
                live.facts.release,
                ahead,
                ignored,
                self.books.obligations.label(job.ref),
                self.books.obligations.epoch or 0,
                job.ref,
                job.line_epoch,
                job.waits,
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
        if self.settings.n_batch > 1:
            raise EmbeddingUnsupported(
                "The model's boards serve batches (n_batch > 1), and the runtime computes no "
                "hidden states then."
            )
        longest = max(map(len, request.inputs), default=0)
        if longest > self.settings.context_len:
            raise InputTooLong(longest, self.settings.context_len, "input")
        async with aclosing(self._embedding.events(request)) as events:
            async for event in events:
                yield event

    def _open_for(self, request: GenerateRequest) -> LoadedEngine:
        """Return the engine, where the board accepts the request. Raises as ``generate``."""
        live = self._supervisor.open()
        self.books.obligations.check(request, time.time())
        if self._supervisor.state in UNLOADED and not request.patient:
            raise BoardAsleep(self.board_id, "its model is being loaded again")
        return live

    def generations(self) -> list[GenerationInfo]:
        """Return the generations that have not ended, with the text of each so far."""
        return self._control.generations() if self._supervisor.live is not None else []

    def emitted(self) -> Emitted:
        """Return the token counts of the generations that have not ended."""
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
        """Wait until the streams have emitted the action's effect; see
        ``RequestControl.given_out``.
        """
        await self._control.given_out(done, action)

    def abort_all(self, request_ids: Sequence[str] | None) -> int:
        """Abort these generations, or all; return their number."""
        return self._control.abort_all(request_ids)

    async def adopt(self, desired: Desired) -> Adoption:
        """Adopt the desired state; see ``StateAdopter.adopt``."""
        return await self._adopter.adopt(desired)

    async def load_adapter(
        self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int
    ) -> Probe:
        """Load an adapter and make a trial run; see ``AdapterProbes.load``."""
        return await self._probes.load(ref, prompt_ids, tokens)

    async def refresh(self, reason: str) -> None:
        """Replace the engine by a fresh one between runs, without loaded adapters."""
        self._supervisor.open()
        if self.asleep:
            return  # waking loads a fresh engine
        done = self.schedule(lambda: self.renew(reason), first=True)
        self._runner.pauses.release_board()  # a paused run must not keep the board
        try:
            await done
        except BoardAsleep:
            log.info("board %s was put to sleep and wakes with a fresh engine", self.board_id)

    async def kv(self) -> KvReport:
        """Return the content of the KV cache. Raises ``BoardFailed`` without an engine."""
        self._supervisor.open()
        return self._cache_calls.kv()

    async def clear_kv(self, keep_system_prompt: bool) -> KvReport:
        """Empty the KV cache; see ``CacheCalls.clear_kv``."""
        return await self._cache_calls.clear_kv(keep_system_prompt=keep_system_prompt)

    async def build_cache(
        self, name: str, ids: tuple[int, ...], adapter: AdapterRef | None = None
    ) -> CacheEntry:
        """Build a named prompt cache; see ``CacheCalls.build_cache``."""
        return await self._cache_calls.build_cache(name, ids, adapter)

    def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk."""
        return self._cache_calls.caches()

    async def delete_cache(self, name: str) -> bool:
        """Remove a named prompt cache; False where there is none."""
        return await self._cache_calls.delete_cache(name)

    def _job(
        self, request: GenerateRequest, facts: EngineFacts, hooks: Sequence[HookFactory]
    ) -> Job:
        generation = Generation(
            request,
            self.settings.eos_ids,
            runtime_counts=facts.per_run_sampling,
            hooks=(*self.settings.hooks, *hooks),
            vocab_size=self.settings.vocab_size,
            context_len=self.settings.context_len,
        )
        sampling = request.sampling if facts.per_run_sampling else None
        job = Job(next(self._tickets), generation, loop_time_s(), sampling)
        bound = None if request.continued is None else request.continued.bound
        if bound is not None:
            job.take_over(bound)
        else:
            line = self.books.obligations.line(request)
            job.bind(self.books.obligations.bind(request), line.epoch if line is not None else 0)
            job.set_reported(self.books.obligations.label(job.ref))
        self._adopter.admit(job)
        return job

    def _line_up(self, job: Job) -> int:
        """Queue a job, and return how many are ahead of it. Raises ``QueueFull``.

        A continued job had a board before and goes first; a complete one needs no run.
        """
        if job.request.continued is None and not job.generation.complete:
            return self.admission.offer(job.ticket, loop_time_s(), job.key)
        if not self._runner.arrive(job):
            self.admission.readmit(job.ticket, loop_time_s(), job.key)
        return len(self.admission.running)

    def _leave(self, job: Job) -> None:
        """Remove a job whose consumer is gone, after the last event or before it."""
        del self.books.jobs[job.ticket]
        self.books.asked_s = loop_time_s()
        self._control.remember(job)
        job.abandon()
        waited = self.admission.withdraw(job.ticket)
        if job.outcome is None:
            self.books.counters.aborted += not waited
            self._runner.leave(job)

    # -- the run queue and the engine slot --------------------------------------------------------

    def pump(self) -> None:
        """Carry out what admission decides now, and set a timer for its next decision."""
        for decision in self.admission.decide(ready=self._supervisor.ready, now_s=loop_time_s()):
            self._carry_out(decision)
        if self._timer is not None:
            self._timer.cancel()
        event_s = self.admission.next_event_s()
        if event_s is not None and self._supervisor.state is not BoardState.STOPPED:
            self._timer = asyncio.get_running_loop().call_at(event_s, self.pump)

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Start):
            self._at_work = [self._work(ticket) for ticket in decision.tickets]
            self._supervisor.spawn(self._conduct(self._at_work))
        elif isinstance(decision, Expire):
            retry_after_s = self.admission.retry_after_s()
            error = QueueTimeout(decision.waited_s, retry_after_s)
            self._work(decision.ticket).end(error)
            self._tasks.pop(decision.ticket, None)
        else:
            self._runner.pauses.release_board()

    def _work(self, ticket: int) -> Job | EngineTask:
        return self._tasks.get(ticket) or self.books.jobs[ticket]

    async def _conduct(self, work: Sequence[Job | EngineTask]) -> None:
        """Run the started work, then admit the next."""
        started_s = loop_time_s()
        try:
            if isinstance(work[0], EngineTask):
                await work[0].perform()
            else:
                await self._runner.perform([job for job in work if isinstance(job, Job)])
            self._failed_in_a_row = 0
        except EngineHung as exc:
            self._failed_in_a_row = 0
            await self._supervisor.give_up(exc.reason)
        except RunFailed as exc:
            log.warning("board %s: a run failed: %s", self.board_id, exc.reason)
            self.lose(exc)
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= RUNS_FAILED_LIMIT:
                await self._supervisor.give_up(
                    f"{self._failed_in_a_row} runs in a row failed: {exc.reason}"
                )
        except RkserveError as exc:
            self.lose(exc)
        except Exception as exc:
            # The run may still be going on in the engine, without a receiver for its end.
            log.exception("board %s: a run ended by an internal error", self.board_id)
            reason = f"internal error: {exc!r}"
            self.lose(BoardFailed(self.board_id, reason))
            await self._supervisor.give_up(reason)
        finally:
            self._at_work = []
            self._tasks.pop(work[0].ticket, None)
            self.books.free_since_s = loop_time_s()
            self.admission.finished(self.books.free_since_s - started_s)
            self.pump()

    def lose(self, error: RkserveError) -> None:
        """Fail the work that has the board. A paused job does not have it."""
        for work in self._at_work:
            if isinstance(work, EngineTask):
                work.end(error)
            elif work.has_board:
                work.has_board = False
                unbegun = work.state in (GenerationState.QUEUED, GenerationState.RESUMING)
                lost = isinstance(error, EngineDied | EngineHung | BoardOutOfOrder)
                rests = self._supervisor.state is BoardState.QUARANTINED
                if unbegun and lost and not rests and not work.retried and not work.over:
                    work.retried = True  # its own run did not kill the engine
                    self.requeue(work)
                else:
                    self._runner.fail(work, error)

    def requeue(self, job: Job) -> None:
        """Queue the job again, ahead of requests that have not had a run yet."""
        if job.state is GenerationState.RESUMING:
            job.advance(GenerationEvent.REQUEUED)
        if job.ticket not in self.books.jobs:
            return  # its consumer is gone
        job.queued_s = loop_time_s()
        job.announce_queue(waits=True)
        # Not ahead of the requests that it released the board for, if they have not started yet.
        yields = job.released and job.ticket in self.admission.running
        self.admission.readmit(job.ticket, job.queued_s, job.key, yields=yields)
        self.pump()

    def schedule(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        first: bool,
        barred: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[T]:
        """Run ``work`` between two runs: ``first`` ahead of others, or in turn (QueueFull).

        It does not begin while ``barred`` returns True. Cancelling the future withdraws work that
        has not begun.
        """
        task = EngineTask(next(self._tickets), work, barred)
        key = ("errand", task.ticket)  # it shares no run
        self._tasks[task.ticket] = task
        try:
            if first:
                self.admission.readmit(task.ticket, loop_time_s(), key)
            else:
                self.admission.offer(task.ticket, loop_time_s(), key)
        except QueueFull:
            del self._tasks[task.ticket]
            raise
        task.done.add_done_callback(lambda _: self._withdraw(task))
        self.pump()
        return task.done

    def is_barred(self, ticket: int) -> bool:
        """Return whether the engine task with this ticket must not begin."""
        task = self._tasks.get(ticket)
        return task is not None and task.barred()

    def _withdraw(self, task: EngineTask) -> None:
        if task.done.cancelled() and self.admission.withdraw(task.ticket):
            del self._tasks[task.ticket]
            self.pump()

    def require_open(self) -> None:
        """Raise ``BoardFailed`` where the board is out of order."""
        self._supervisor.open()

    def require_awake(self) -> None:
        """Raise ``BoardAsleep`` where the model is unloaded, or about to be."""
        self._sleep.require_awake()

    @property
    def asleep(self) -> bool:
        """True while the model is unloaded."""
        return self._sleep.asleep

    def _reapply_holds(self) -> None:
        self._adopter.reapply_holds()

    def reject_tasks(self) -> None:
        """End the queued engine tasks: there is no engine any more."""
        for ticket, task in list(self._tasks.items()):
            if self.admission.withdraw(ticket):
                del self._tasks[ticket]
                task.end(BoardAsleep(self.board_id, "the board was put to sleep meanwhile"))

    @property
    def free(self) -> bool:
        """True where a run could start now. Raises ``BoardFailed`` on a board out of order."""
        self._supervisor.open()
        return self._supervisor.ready and not self.admission.running

    @property
    def live(self) -> LoadedEngine:
        """The engine that is loaded now, or the last one."""
        live = self._supervisor.live
        if live is None:
            raise self._supervisor.failed()
        return live

    async def with_adapter(self, ref: AdapterRef | None) -> LoadedEngine:
        """Return the engine with this adapter loaded; see ``AdapterLoader.ready``."""
        return self.live if ref is None else await self._adapters.ready(self, ref)

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one, in order, after its conversation was parked.

        Raises what a failing load raises.
        """
        await self.caching.park(self.live, renewing=True)
        await self._supervisor.renew(reason)

    def fail_all(self, *, spare_paused: bool = False) -> None:
        """Fail all waiting work now, while another board may still serve it."""
        for ticket, job in self.books.jobs.items():
            self.admission.withdraw(ticket)
            # Jobs that have the board get the error of their own run; see ``lose``.
            spared = job.has_board or job.state is GenerationState.PAUSED
            if not (spare_paused and spared):
                job.end(self._supervisor.failed())
        for ticket, task in self._tasks.items():
            self.admission.withdraw(ticket)
            task.end(self._supervisor.failed())
