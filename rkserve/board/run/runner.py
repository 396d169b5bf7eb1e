"""A request's time with the board: its runs, pauses and its end.

The runner handles every token and the end of every run. Engine failures pass through it to the
board, which also chooses the next request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rkserve.board.answer.generation import Generation, RunSignal
from rkserve.board.engine.protocol import RunEnded
from rkserve.board.rules.generations import GenerationEvent
from rkserve.board.run.job import EngineRun, Job, RunSpec, loop_time_s
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.paused import BY_CLUSTER, BY_REQUEST, PausedRequests
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.start import RunPlanner
from rkserve.core.board_report import GenerationState
from rkserve.core.errors import (
    AdapterBroken,
    BoardFailed,
    EngineDied,
    HookFailed,
    RequestError,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import Finished
from rkserve.core.request_record import log_for
from rkserve.native.runtime import Perf, RunEnd

log = logging.getLogger(__name__)

_S, _E = GenerationState, GenerationEvent

CANNOT_CONTINUE = (
    "an answer to 'prompt_embeds' or 'cross_attention' was interrupted, and cannot go on: its KV "
    "cache cannot be computed again from token ids"
)


class RequestRunner:
    """Makes the runs of the jobs that have the board; pauses, resumes and ends them."""

    def __init__(
        self, books: BoardBooks, slot: EngineSlot, queue: RunQueue, caching: PromptCaching
    ) -> None:
        self._settings, self._books, self._slot, self._queue = books.settings, books, slot, queue
        self._caching = caching
        self._planner = RunPlanner(books.settings, slot, caching)
        self.pauses = PausedRequests(books, slot, queue, self.fail)
        self._taken: set[int] = set()  # entries in which jobs have runs of their own

    async def perform(self, jobs: Sequence[Job]) -> None:
        """Make the runs of jobs that admission started, until the board is free again.

        Raises ``RkserveError`` for the jobs that still have the board.
        """
        log_for(",".join(job.request.request_id for job in jobs))
        now_s = loop_time_s()
        gathered = self._slot.live.facts.width > 1
        for job in jobs:
            if gathered and job.queued_s is not None:
                wait_s = now_s - max(self._books.free_since_s, job.queued_s)
                job.tally.batch_wait_s += min(wait_s, self._settings.batch_window_s)
            job.waited(now_s)
            job.announce_queue(waits=False)
            job.has_board, job.yields = True, False
        if gathered:
            await self._batch(list(jobs))
            return
        (job,) = jobs
        job.entry = self._slot.live.fitting(job.generation.context, job.origin, self._taken)
        self._taken.add(job.entry)
        if len(self._slot.live.per_entry) > 1:
            job.tally.batch = max(job.tally.batch, len(self._taken))
        try:
            await self._solo(job)
        finally:
            self._taken.discard(job.entry)

    # -- actions on a job -------------------------------------------------------------------------

    def arrive(self, job: Job) -> bool:
        """Settle a job that comes from another board; False where it needs a run now."""
        if self._closed(job):
            return True
        if job.generation.rests:
            self.pauses.arrive(job)
        return job.generation.rests

    def pause(self, job: Job) -> None:
        """Pause a job; its state tells when that is done.

        A job stopped by the cluster is paused by its client from now on.
        """
        if job.state is _S.PAUSED:
            job.goes_on, job.paused_by = False, BY_REQUEST
            job.announce_by(None)
            self.pauses.watch(job)
            return
        job.pause_asked = True
        if job.state is not _S.PAUSING:
            job.advance(_E.PAUSE_ASKED)
            self._leave_run(job)

    def stop(self, job: Job) -> None:
        """Make a job leave its run; it has left on return unless its KV cache is kept."""
        job.advance(_E.HELD)
        if not self._mute(job):
            self._leave_run(job)

    def _mute(self, job: Job) -> bool:
        """Take the job out of its run at once; False where it has none, or one to be paused.

        The library cannot cut a prefill or a decoding step short. So the run continues without a
        consumer, and the board is busy until it returns, while the job is paused or queued. The
        tokens of that last step are computed again.
        """
        live, now_s = self._slot.of(job), loop_time_s()
        run = live.running
        if run is None or job not in run.entry_jobs or self._is_to_be_kept(run, job):
            return False
        entry = run.entry_jobs.index(job)
        if run.first_s is not None:
            begin = run.spec
            self._count(job, run.clocked(entry, now_s, begin.spared), begin.reused)
        run.leave(entry, now_s)
        job.has_board = False
        if self._concluded(job, run, paused=True):
            self._queue.requeue(job)
        if not run.jobs:
            run.muted = True
            live.abort(run)
        return True

    def _leave_run(self, job: Job) -> None:
        run = self._slot.of(job).running
        if run is not None and job in run.entry_jobs:
            self._interrupt(run, job)

    def vacate(self) -> None:
        """Make jobs that have the board, running or paused, leave it for a waiting engine task.

        Those that ran continue by themselves, recomputed, once they have the board again.
        """
        self.pauses.release_board()
        for job in [job for run in self._slot.live.runs for job in run.jobs]:
            if job.state in (_S.PREFILLING, _S.GENERATING):
                job.yields = True
                self.stop(job)

    def resume(self, job: Job) -> None:
        """Resume a paused job: at once where it holds the board, else when it has it again.

        Under a hold it resumes at its end.
        """
        if job.frozen:
            job.goes_on, job.paused_by = True, BY_CLUSTER
            job.announce_by(BY_CLUSTER)
            return
        job.unpause(loop_time_s())
        job.advance(_E.RESUME_ASKED)
        if not self.pauses.holds(job) and not self._closed(job):
            self._queue.requeue(job)

    def abort(self, job: Job, *, mute: bool = False) -> None:
        """End a job in whatever state it is; its answer so far stands.

        ``mute``: it has ended on return, whatever its run does.
        """
        job.advance(_E.ABORT_ASKED)
        job.generation.aborted()
        if not (mute and self._mute(job)):
            self.leave(job)

    def hand_over(self, job: Job, error: RkserveError) -> None:
        """End a job here, with the text so far, so that its Router continues it elsewhere.

        Text that a pause withholds is dropped, and generated again after it.
        """
        job.end(error)
        self.leave(job)

    def leave(self, job: Job) -> None:
        """Take an aborted, abandoned or handed over job off the board."""
        live = self._slot.of(job)
        run = live.running
        if run is not None and job in run.entry_jobs:
            if run.alone:
                live.abort(run)
            else:
                self._depart(run, job)
        elif not job.has_board and not self.pauses.holds(job):
            self._queue.admission.withdraw(job.ticket)
            self._closed(job)
        # Else the runner is between two steps of it, and checks again before the next.

    def fail(self, job: Job, error: RkserveError) -> None:
        """End a job with an error."""
        if job.outcome is None:
            self._books.counters.failed += 1
            if isinstance(error, BoardFailed | AdapterBroken):
                label = job.spans.label or self._books.obligations.label(job.ref)
                self._books.versions.add(label, failed=1)
        job.end(error)

    # -- single runs ------------------------------------------------------------------------------

    async def _solo(self, job: Job) -> None:
        going = not self._closed(job)
        if going and job.request.in_one_go and job.generation.tokens:
            self.fail(job, RunFailed(self._settings.board_id, CANNOT_CONTINUE))
            going = False
        admitted = job.key
        while going:
            if job.key != admitted and len(self._slot.live.per_entry) > 1:
                await self._stand_by(job)  # with another adapter it cannot run beside the others
                break
            live, begin = await self._planner.of_one(job)
            if self._closed(job):  # the client left or aborted it during the preparation
                await self._caching.abandon(begin.save)
                break
            if job.frozen or begin.origin != job.origin:  # or its version changed
                await self._caching.abandon(begin.save)
                if job.frozen:
                    await self._stand_by(job)
                    break
                continue
            going = await self._once(job, live, begin)
            if going and job.yields:
                await self._stand_by(job)
                break
        job.has_board = False

    async def _stand_by(self, job: Job) -> None:
        """Queue a job that is to continue: it was stopped, or released the board."""
        await self._planner.drain()
        if self._closed(job):
            return
        if job.state is _S.PREFILLING:
            job.advance(_E.HELD)
        if job.state is not _S.PAUSING:
            self._queue.requeue(job)
        elif self._is_still_paused(job):  # the resumed run never began
            self.pauses.rest(job)
        else:
            job.advance(_E.FREED)
            self._queue.requeue(job)

    async def _once(self, job: Job, live: LoadedEngine, begin: RunSpec) -> bool:
        """Make one run of the job; return whether it needs another one at once."""
        job.generation.runtime_counts = live.facts.per_run_sampling or begin.steps is not None
        try:
            live.require()
            self._start(job)
            run, ended = await live.run([job], begin, self._receive, job.request.sampling)
        except BaseException:
            await self._caching.abandon(begin.save)
            raise
        if job not in run.entry_jobs:
            return await self._settle_muted(begin, ended)
        if ended.refused:
            self.fail(job, RequestError(ended.reason))
            return False
        if ended.end is RunEnd.FAILED:
            return await self._failed(job, begin, run, ended)
        if ended.cut:
            job.generation.cut()
        if ended.end is not None:
            self._count(job, run.perf(ended), begin.reused)
        # First, because the pause is announced once the board is held.
        if begin.hit is not None or begin.save is not None:
            await self._caching.after_run(live, run, ended)
        paused = ended.end is RunEnd.PAUSED
        going = self._concluded(job, run, paused=paused)
        if job.state is _S.PAUSED and paused:
            return await self._hold(job)
        if not going:
            await self._planner.drain()
        return going

    async def _settle_muted(self, begin: RunSpec, ended: RunEnded) -> bool:
        """Settle a muted run that has returned; its jobs continue by themselves."""
        await self._caching.abandon(begin.save)
        await self._planner.drain()
        if ended.end is RunEnd.FAILED and not begin.resume and not ended.refused:
            raise RunFailed(self._settings.board_id, ended.reason)
        return False

    def _concluded(self, job: Job, run: EngineRun, *, paused: bool) -> bool:
        """Settle the job's part in a run: end it, pause it, or return True to continue it."""
        if not self._is_interrupted(job, run, paused=paused):
            self._finish(job)
            return False
        # The rest continues at once: a hook changed its context, or its reasoning ended.
        rewinds = job.generation.want in (RunSignal.REWIND, None) and job.state is _S.GENERATING
        job.interrupted()
        if rewinds:
            job.advance(_E.REWOUND)
        elif self._is_still_paused(job):
            self.pauses.rest(job)
            return False
        else:
            job.advance(_E.FREED)
        return not self._closed(job)

    def _is_still_paused(self, job: Job) -> bool:
        """Return whether the job is still to be paused: not for a switch of versions alone."""
        if job.frozen or job.pause_asked or job.generation.paused_by is not None:
            return True
        return job.state is not _S.PAUSING

    def _is_interrupted(self, job: Job, run: EngineRun, *, paused: bool) -> bool:
        """Return whether the answer continues after this run, now or later."""
        generation = job.generation
        if job.over or generation.complete:
            return False
        if generation.want in (RunSignal.PAUSE, RunSignal.REWIND):
            return True
        if job.state is _S.PAUSING:
            return paused or run.stopping
        return job.state is _S.GENERATING and self._reasoning_ended_run(generation, run)

    def _reasoning_ended_run(self, generation: Generation, run: EngineRun) -> bool:
        """Return whether the runtime ended the run with the reasoning, before the answer."""
        if run.stopping or run.pausing or not self._slot.live.quirk("thinking_ends_run"):
            return False
        return generation.end_thinking()

    async def _failed(self, job: Job, begin: RunSpec, run: EngineRun, ended: RunEnded) -> bool:
        """Handle a run that the runtime refused or gave up. Raises ``RunFailed``.

        A paused run that was not resumed is drained, and the job continues from its transcript.
        """
        await self._caching.abandon(begin.save)
        if not begin.resume:
            raise RunFailed(self._settings.board_id, ended.reason)
        if run.given[0]:
            await self._planner.drain()
            raise RunFailed(self._settings.board_id, ended.reason)
        log.warning(
            "board %s: a paused run cannot be resumed and is recomputed: %s",
            self._settings.board_id,
            ended.reason,
        )
        await self._planner.drain()
        return not self._closed(job)

    # -- batches ----------------------------------------------------------------------------------

    async def _batch(self, jobs: list[Job]) -> None:
        """Make one run of up to ``n_batch`` jobs; each leaves it when its own part is over."""
        planned: tuple[LoadedEngine, RunSpec] | None = None
        while (here := self._still_here(jobs)) != jobs or not _is_for(planned, jobs):
            if not here:
                return
            jobs = here  # some may leave during the preparation
            planned = await self._planner.of_many(jobs)
        assert planned is not None
        live, begin = planned
        live.require()
        for job in jobs:
            job.generation.runtime_counts = False  # the limit of a batch is that of its longest job
            job.tally.batch = max(job.tally.batch, len(jobs))
            self._start(job)
        entry_jobs = [*jobs, *[None] * (self._settings.n_batch - len(jobs))]
        run, ended = await live.run(entry_jobs, begin, self._receive, jobs[0].request.sampling)
        self._books.counters.batch_runs += 1
        self._books.counters.batch_entries += len(jobs)
        self._books.counters.batch_tail_ms += run.tail_s(loop_time_s()) * 1e3
        if ended.end is RunEnd.FAILED:
            raise RunFailed(self._settings.board_id, ended.reason)
        for job in run.jobs:
            self._depart(run, job)

    def _still_here(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that need a run; the others are settled."""
        for job in jobs:
            job.has_board = not self._closed(job)
        here = [job for job in jobs if job.has_board]
        staying = [job for job in here if not job.frozen]
        # A change of the desired state may have stopped some or given them another version.
        staying = [job for job in staying if job.origin == staying[0].origin]
        for job in here:
            if job not in staying:
                job.has_board = False
                self._queue.requeue(job)
        return staying

    def _depart(self, run: EngineRun, job: Job) -> None:
        """Settle the job's part in a batch, while the run may continue for others."""
        now_s, live = loop_time_s(), self._slot.live
        entry = run.entry_jobs.index(job)
        run.leave(entry, now_s)
        job.has_board = False
        self._count(job, run.clocked(entry, now_s), reused=0)
        if self._concluded(job, run, paused=True):
            self._queue.requeue(job)
        if not run.jobs and live.running is run:
            live.abort(run)

    # -- tokens -----------------------------------------------------------------------------------

    def _receive(
        self, run: EngineRun, entry: int, token_id: int, data: bytes, waiting: bool
    ) -> None:
        """Take one token. Tokens after a stop are dropped."""
        job = run.entry_jobs[entry]
        if job is None or (run.stopping and job.state is not _S.GENERATING):
            return
        batched = not run.alone
        # The callback of a batch has one state for all entries, so empty text may be text held
        # back, and must not count as a complete character.
        job.token(token_id, data, waiting or (batched and not data))
        generation = job.generation
        if batched:
            if generation.complete or generation.want is not None:
                self._depart(run, job)
            return
        want = generation.want
        if want is None:
            return
        if want is RunSignal.STOP:
            self._stop(run, job)
            return
        if want is RunSignal.PAUSE and job.state is _S.GENERATING:
            job.advance(_E.PAUSE_ASKED)
        self._interrupt(run, job)

    def _stop(self, run: EngineRun, job: Job) -> None:
        """Stop the run of a complete answer."""
        live = self._slot.of(job)
        if run.pausable and live.quirk("stop_by_pause"):
            live.pause(run)
        else:
            live.abort(run)

    def _interrupt(self, run: EngineRun, job: Job) -> None:
        """Interrupt the run, with its KV cache kept where requested."""
        live = self._slot.of(job)
        if not run.alone:
            self._depart(run, job)
        elif self._is_pausable(run, job):
            live.pause(run)
        else:
            live.abort(run)

    def _is_to_be_kept(self, run: EngineRun, job: Job) -> bool:
        """Return whether the run is to leave its KV cache: not before the first token."""
        if run.first_s is None:
            return False
        return self._is_pausable(run, job) or self._is_kept_by_abort(run, job)

    def _is_kept_by_abort(self, run: EngineRun, job: Job) -> bool:
        """Return whether an abort leaves the KV cache for the job's next run.

        An entry beside others is left for them by a pause, and chosen again by its content.
        """
        live = self._slot.of(job)
        return (
            live.facts.entries > 1
            and live.quirk("kv_valid_after_abort")
            and not job.yields
            and run.spec.origin == job.origin
        )

    def _is_pausable(self, run: EngineRun, job: Job) -> bool:
        return (
            run.pausable
            and job.request.native_pause
            and not job.yields
            and run.spec.origin == job.origin  # else its version changes, and it is recomputed
            and (job.generation.want is RunSignal.REWIND or self.pauses.holdable(job))
        )

    # -- paused -----------------------------------------------------------------------------------

    async def _hold(self, job: Job) -> bool:
        """Keep the board for a run paused in the runtime; return whether it continues.

        Otherwise the run is drained; the job may stay paused and is recomputed later.
        """
        live = self._slot.live
        await self.pauses.hold(job)
        if job.state is _S.RESUMING and live.alive and not job.released:
            job.has_board = True
            return not self._closed(job) or await self._drained()
        if job.state is _S.RESUMING and not self._closed(job):
            self._queue.requeue(job)
        elif job.over:
            self._closed(job)
        await self._drained()
        return False

    async def _drained(self) -> bool:
        """Drain, unless the engine died; return False."""
        try:
            await self._planner.drain()
        except EngineDied:
            log.info("board %s: the engine died with its paused run", self._settings.board_id)
        return False

    # -- outcome ----------------------------------------------------------------------------------

    def _start(self, job: Job) -> None:
        """Start a run of the job with its current version."""
        label = self._books.obligations.label(job.ref)
        if not job.begun:
            self._books.versions.add(label, requests=1)
        job.spans.begin(label, job.generation.tokens)
        job.start()

    def _count(self, job: Job, perf: Perf, reused: int) -> None:
        """Add the figures of a run to the job's."""
        job.tally.add(perf, reused)
        if job.spans.label is not None:
            self._books.versions.add(
                job.spans.label, tokens=perf.decode_tokens, decode_ms=perf.decode_ms
            )

    def _closed(self, job: Job) -> bool:
        """Settle a job that needs no further run; return whether it did."""
        if not job.over and not job.generation.complete:
            return False
        self._finish(job)
        return True

    def _finish(self, job: Job) -> None:
        """Settle the outcome and the counters of a job."""
        if job.outcome is not None:
            return
        generation = job.generation
        job.unpause(loop_time_s())
        job.waited(loop_time_s())
        used = len(generation.context)
        if job.request.prompt_text is not None:
            used += job.tally.prompt_tokens
        full = used >= self._settings.context_len
        try:
            reason = generation.ended(context_full=full)
        except HookFailed as exc:
            self.fail(job, exc)
            return
        usage = job.tally.usage(generation.tokens, generation.reasoning.tokens)
        timings = job.tally.timings()
        if job.tally.runs > 0:
            self._books.counters.count(usage, timings)
        spans = job.spans.of(generation.tokens)
        job.end(Finished(reason, usage, timings, spans, generation.stopped_by))


def _is_for(planned: tuple[LoadedEngine, RunSpec] | None, jobs: Sequence[Job]) -> bool:
    """Return whether the run was planned for the jobs' current version."""
    return planned is not None and planned[1].origin == jobs[0].origin
