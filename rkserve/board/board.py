"""One board: requests in, events out, one engine kept alive behind them.

It only connects its parts. Pure policy is in ``rules`` and ``answer``, a request's runs are in
``run``, and changes of the desired state, sleep, caches and adapters in ``operations``. It imports
neither Ray nor cffi nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from rkserve.board.answer.generation import Generation
from rkserve.board.answer.hooks import HookFactory
from rkserve.board.engine.protocol import EngineFacts
from rkserve.board.engine.telemetry import read_engine_use
from rkserve.board.operations.adopt import StateAdopter
from rkserve.board.operations.base_weights import BaseWeights, StartEngine
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.report import CacheCalls, ModelFileDigest, PrefixReport
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.operations.trials import AdapterProbes, SpeedTrials
from rkserve.board.rules.engine_growth import EngineGrowth
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.cache_exchange import CacheExchange
from rkserve.board.run.job import Job, loop_time_s
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import BoardBooks, EngineSlot, EngineTask, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.request_control import RequestControl
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.board.storage.ledger_copies import LedgerCopies
from rkserve.board.storage.staged_artifacts import Intake, StagedAdapters, StagedWeights
from rkserve.core.board_report import BoardReport, BoardState, GenerationState
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
    RkserveError,
    RunFailed,
    SamplingFixed,
)
from rkserve.core.messages import (
    Accepted,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    PassDelta,
)
from rkserve.core.request_record import log_for

__all__ = ["Board", "BoardSettings"]

log = logging.getLogger(__name__)

# After this many failed runs in a row the engine is replaced.
RUNS_FAILED_LIMIT = 3
# The states without a loaded model.
UNLOADED = (BoardState.ASLEEP, BoardState.LOADING)


class Board:
    """One NPU behind a bounded queue. Use it from one event loop."""

    def __init__(self, settings: BoardSettings, start_engine: StartEngine) -> None:
        """``start_engine`` takes a model file; None is the configured one."""
        self.settings = settings
        self.board_id = settings.board_id
        self.staged = StagedAdapters(settings.staged_dir, settings.board_id, settings.model)
        obligations = Obligations(
            settings.board_id, settings.model, self.staged.present, governed=settings.governed
        )
        self.books = books = BoardBooks(settings, obligations)
        self.caching = caching = PromptCaching(settings, books.counters)
        weights = StagedWeights(settings.weights_dir, settings.board_id, settings.model)
        self._weights = BaseWeights(settings, weights, obligations, caching, start_engine)
        self._model_file = ModelFileDigest(settings.own_file, settings.own_digest_file)
        ledgers = LedgerCopies(settings.ledgers_dir, settings.board_id)
        self.intake = Intake(self.staged, weights, self._weights.uses, ledgers)
        self.ledger_copies = ledgers.of
        self._failed_in_a_row = 0
        self.supervisor = supervisor = EngineSupervisor(settings, self._weights.load, self)
        self.slot = slot = EngineSlot(settings, supervisor, caching, self.staged.shelf)
        self.queue = queue = RunQueue(books, supervisor, self._conduct, self._release_board)
        self._runner = runner = RequestRunner(books, slot, queue, caching)
        self._embedding = embedding = EmbeddingService(books, slot, queue, caching)
        self._sleep = BoardSleep(
            books, slot, queue, caching=caching, embedding=embedding, pauses=runner.pauses
        )
        self._adopter = StateAdopter(
            books,
            slot,
            queue,
            embedding=embedding,
            runner=runner,
            sleep=self._sleep,
            weights=self._weights,
            drained=self._begin_drain,
        )
        self._exchange = CacheExchange(settings, caching, books.counters)
        self._prefixes = PrefixReport(caching, self._exchange)
        control = RequestControl(books, slot, runner)
        self._cache_calls = CacheCalls(books, slot, queue, caching, runner.pauses)
        # The calls that one part answers by itself.
        self.check, self.forgive = supervisor.check, supervisor.forgive
        self.generations, self.emitted = control.generations, control.emitted
        self.control, self.given_out = control.control, control.given_out
        self.abort_all = control.abort_all
        self.adopt, self.follow = self._adopter.adopt, self._adopter.follow
        self._probes = probes = AdapterProbes(settings, slot, queue, caching, runner)
        self.load_adapter, self.try_adapter = probes.load, probes.try_fresh
        self.measure = SpeedTrials(books, slot, queue, caching, runner).measure
        calls = self._cache_calls
        self.kv, self.clear_kv, self.caches = calls.kv, calls.clear_kv, calls.caches
        self.build_cache, self.delete_cache = calls.build_cache, calls.delete_cache
        self.send_cache = self._exchange.send
        self.pump = queue.pump

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ``RkserveError`` or ``OSError``; the board is then ``failed``.

        A board that was asleep when its replica ended stays asleep until it is woken.
        """
        await asyncio.to_thread(self.staged.open)
        await self._weights.open()  # before the caches, which depend on the loaded weights
        await self.caching.open()
        await self.supervisor.start(await self._sleep.unloaded_facts())
        # After the load, which has brought the file into the page cache and has priority.
        self.supervisor.spawn(self._model_file.look())
        if self.settings.engine_growth_bytes:
            self.supervisor.spawn(self._watch_growth())

    async def stop(self) -> None:
        """End the engine and all queued and paused requests."""
        self.queue.stop_timer()
        self._cache_calls.stop()
        await self.supervisor.stop()
        await self._model_file.stop()
        await self.caching.close()

    def report(self) -> BoardReport:
        """Return the board's state and counters."""
        settings, supervisor, obligations = self.settings, self.supervisor, self.books.obligations
        live, admission = supervisor.live, self.queue.admission
        state, reason = supervisor.state, supervisor.reason
        if state in (BoardState.READY, BoardState.ASLEEP) and obligations.joining:
            state, reason = BoardState.JOINING, obligations.joining
        hold = obligations.target.hold if obligations.target is not None else None
        return BoardReport(
            board_id=self.board_id,
            model=settings.model,
            state=state,
            reason=reason,
            last_recovery=supervisor.last_recovery,
            release=live.facts.release if live is not None else "",
            platform=settings.platform,
            node=settings.node,
            pid=os.getpid(),
            engine_pid=live.engine.pid if live is not None else 0,
            context_len=settings.context_len,
            kv_positions=sum(one.context.positions for one in live.per_entry) if live else 0,
            running=len(admission.running),
            queued=admission.queued,
            queue_limit=settings.queue_limit,
            library=settings.library,
            paused=sum(job.state is GenerationState.PAUSED for job in self.books.jobs.values()),
            n_batch=settings.n_batch,
            joins=admission.joins,
            adapters=live.adapters.keys if live is not None else (),
            adapter_bytes=live.adapters.used_bytes if live is not None else 0,
            engine_starts=supervisor.starts,
            engine_renewals=supervisor.renewals,
            epoch=obligations.epoch,
            hold=hold.mode.value if hold is not None else "",
            missing=len(obligations.missing) + (obligations.missing_base is not None),
            staged=(*(version.ref.key for version in obligations.staged), *self._weights.staged),
            versions=self.books.versions.figures,
            level=self._sleep.level,
            drained=obligations.target is not None and obligations.target.drained,
            base=self._weights.digest,
            own_digest=self._model_file.digest,
            own_bytes=self._model_file.size_bytes,
            serving=obligations.serving,
            holdings=self._prefixes.packed(live),
            idle_s=self._idle_s(),
            confined=live.facts.confined if live is not None else "",
            trying=self._probes.trying,
            crashes=tuple(sorted(supervisor.crashes.items())),
            cache_bytes=self.caching.store.used_bytes if self.caching.store is not None else 0,
            cache_write_rate=self.caching.costs.writing.bytes_per_s,
            cache_read_rate=self.caching.costs.reading.bytes_per_s,
            **asdict(self.books.counters),
        )

    def _idle_s(self) -> float:
        """Return the time since the last use; a load counts as one."""
        if self.books.jobs or self._embedding.busy:
            return 0.0
        return loop_time_s() - max(self.books.asked_s, self.supervisor.loaded_s)

    # -- requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        request: GenerateRequest,
        hooks: Sequence[HookFactory] = (),
        pass_on: PassDelta | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield ``Accepted``, deltas, changes of queue or pause, and ``Finished``.

        Closing the generator aborts the run. Deltas that ``pass_on`` gets, while all events before
        them have been taken, are not yielded.

        Raises:
            QueueFull, QueueTimeout: the queue is full, or the wait was too long.
            RequestError: the board cannot serve this request.
            HookFailed: a hook raised.
            PauseExpired: the generation was not resumed in time.
            BoardFailed: the board is out of order, or lost its engine during the answer.
            BoardBehind, EnginePaused, BoardAsleep, BoardDrained: the board accepts no such request
                now.
        """
        log_for(request.request_id)
        live = self._open_for(request)
        ignored = () if live.facts.per_run_sampling else self.settings.ignored(request)
        if ignored and request.strict_sampling:
            raise SamplingFixed(live.facts.release, ignored)
        if len(request.prompt_ids) + request.max_tokens > self.settings.context_len:
            raise ContextOverflow(len(request.prompt_ids), self.settings.context_len)
        if request.use_cache is not None:
            self.caching.check(request.use_cache)
        self.settings.check_steps(request, apart=live.facts.entries > 1)
        self.settings.check_images(request)
        self.settings.check_embeds(request)
        self.settings.check_encoder(request)
        job = self._job(request, live.facts, hooks, pass_on)
        self.books.jobs[job.ticket] = job
        self.books.asked_s = loop_time_s()
        try:
            ahead = self._line_up(job)
        except QueueFull:
            del self.books.jobs[job.ticket]
            raise
        self.books.counters.requests += 1
        if request.source is not None and request.prompt_text is None:
            self._exchange.fetch(live, request.source, job.generation.context, job.origin)
        try:
            self.pump()
            job.waits = job.ticket not in self.queue.admission.running
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
        log_for(request.request_id)
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
        live = self.supervisor.open()
        self.books.obligations.check(request, time.time())
        if self.supervisor.state in UNLOADED and not request.patient:
            raise BoardAsleep(self.board_id, "its model is being loaded again")
        return live

    async def refresh(self, reason: str) -> None:
        """Replace the engine by a fresh one between runs, without loaded adapters."""
        self.supervisor.open()
        if self.supervisor.asleep:
            return  # waking loads a fresh engine
        done = self.queue.schedule(lambda: self.slot.renew(reason), first=True)
        self._runner.pauses.release_board()  # a paused run must not keep the board
        try:
            await done
        except BoardAsleep:
            log.info("board %s was put to sleep and wakes with a fresh engine", self.board_id)

    async def _watch_growth(self) -> None:
        """Replace engines that have grown too large, between two runs."""
        growth = EngineGrowth(self.board_id, self.settings.engine_growth_bytes)
        while True:
            await asyncio.sleep(self.settings.engine_growth_period_s)
            live = self.supervisor.live
            if live is None or not self.supervisor.ready:
                continue
            use = await asyncio.to_thread(read_engine_use, Path("/"), live.engine.pid)
            reason = growth.excess(live.engine.pid, use, loop_time_s()) if use is not None else ""
            if not reason:
                continue
            log.warning("board %s: %s: it is replaced", self.board_id, reason)
            try:
                await self.refresh(reason)
            except RkserveError as exc:  # the board's state and health have it, too
                log.warning("board %s: its engine was not replaced: %s", self.board_id, exc)

    async def restart(self, reason: str) -> None:
        """Replace the engine at once; what runs continues on the fresh one, recomputed.

        It ends a quarantine. Raises ``BoardFailed`` where the board cannot recover by itself.
        """
        if self.supervisor.state is BoardState.QUARANTINED:
            await self.supervisor.end_quarantine()
            return
        renewing = asyncio.get_running_loop().create_task(self.refresh(reason))
        try:
            # Work queued before it may begin meanwhile, and has to release the board as well.
            while not renewing.done():
                if self.supervisor.ready:
                    self._runner.vacate()
                await asyncio.wait({renewing}, timeout=self.settings.load_patience_s)
            renewing.result()
        finally:
            renewing.cancel()

    def _job(
        self,
        request: GenerateRequest,
        facts: EngineFacts,
        hooks: Sequence[HookFactory],
        pass_on: PassDelta | None,
    ) -> Job:
        generation = Generation(
            request,
            self.settings.eos_ids,
            runtime_counts=facts.per_run_sampling,
            hooks=(*self.settings.hooks, *hooks),
            vocab_size=self.settings.vocab_size,
            context_len=self.settings.context_len,
        )
        apart = facts.entries > 1
        mates = request.sampling if facts.per_run_sampling and not apart else None
        ticket = next(self.queue.tickets)
        job = Job(ticket, generation, loop_time_s(), mates, apart=apart, pass_on=pass_on)
        bound = None if request.continued is None else request.continued.bound
        if bound is not None:
            job.take_over(bound)
        else:
            line = self.books.obligations.line(request)
            job.bind(self.books.obligations.bind(request), line.epoch if line is not None else 0)
            job.set_reported(self.books.obligations.label(job.ref))
        if job.begun or self.books.obligations.holds or self._adopter.weight_swap.active:
            self._adopter.admit(job)
        return job

    def _line_up(self, job: Job) -> int:
        """Queue a job, and return how many are ahead of it. Raises ``QueueFull``.

        A continued job had a board before and goes first; a complete one needs no run.
        """
        if job.request.continued is None and not job.generation.complete:
            return self.queue.admission.offer(job.ticket, loop_time_s(), job.key)
        if not self._runner.arrive(job):
            self.queue.admission.readmit(job.ticket, loop_time_s(), job.key)
        return len(self.queue.admission.running)

    def _leave(self, job: Job) -> None:
        """Remove a job whose consumer is gone, after the last event or before it."""
        self.books.leave(job)
        job.abandon()
        waited = self.queue.admission.withdraw(job.ticket)
        if job.outcome is None:
            self.books.counters.aborted += not waited
            self._runner.leave(job)

    # -- runs and the engine's failures -----------------------------------------------------------

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
            await self.supervisor.give_up(exc.reason)
        except RunFailed as exc:
            log.warning("board %s: a run failed: %s", self.board_id, exc.reason)
            self.lose(exc, work)
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= RUNS_FAILED_LIMIT:
                await self.supervisor.give_up(
                    f"{self._failed_in_a_row} runs in a row failed: {exc.reason}", "runs_failed"
                )
        except RkserveError as exc:
            self.lose(exc, work)
        except Exception as exc:
            # The run may still be going on in the engine, without a receiver for its end.
            log.exception("board %s: a run ended by an internal error", self.board_id)
            reason = f"internal error: {exc!r}"
            self.lose(BoardFailed(self.board_id, reason))
            await self.supervisor.give_up(reason, "internal")
        finally:
            self.books.free_since_s = loop_time_s()
            self.queue.finished(work, self.books.free_since_s - started_s)
            self._cache_calls.freed()

    def lose(self, error: RkserveError, only: Sequence[Job | EngineTask] | None = None) -> None:
        """Fail this work, or all that has the board. A paused job does not have it."""
        for work in self.queue.at_work if only is None else only:
            if isinstance(work, EngineTask):
                work.end(error)
            elif work.has_board:
                work.has_board = False
                unbegun = work.state in (GenerationState.QUEUED, GenerationState.RESUMING)
                lost = isinstance(error, EngineDied | EngineHung | BoardOutOfOrder)
                rests = self.supervisor.state is BoardState.QUARANTINED
                if unbegun and lost and not rests and not work.retried and not work.over:
                    work.retried = True  # its own run did not kill the engine
                    self.queue.requeue(work)
                else:
                    self._runner.fail(work, error)

    def fail_all(self, *, spare_paused: bool = False) -> None:
        """Fail all waiting work now, while another board may still serve it."""
        for ticket, job in self.books.jobs.items():
            self.queue.admission.withdraw(ticket)
            # Jobs that have the board get the error of their own run; see ``lose``.
            spared = job.has_board or job.state is GenerationState.PAUSED
            if not (spare_paused and spared):
                job.end(self.supervisor.failed())
        self.queue.fail_tasks()

    def _begin_drain(self) -> None:
        self._cache_calls.freed()

    def _release_board(self) -> None:
        self._runner.pauses.release_board()
