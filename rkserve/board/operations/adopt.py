"""Carries out what the cluster shall be on one board: holds, releases, switches of versions, sleep.

What that is for this board, ``duty`` says; how a generation leaves its run and goes on is the
runner's. An answer is given once nothing that is held emits any more: neither from the engine
nor from what a stream has still to give out. No run is waited for, unless the runtime is to keep
its KV cache: it is muted, and the board is busy with it for a step, or for the rest of a prefill.
Only a sleep has to wait for it: that comes last, and is ``sleeping``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.operations.swap_weights import WeightSwap
from rkserve.board.rules.obligations import adapter_name
from rkserve.board.run.job import Job, emitted
from rkserve.board.run.ports import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.run import EngineRun, loop_time_s
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.start import outlook
from rkserve.core.board_report import GenerationState
from rkserve.core.desired_state import (
    AdapterVersions,
    Adoption,
    BoardTarget,
    Desired,
    EffectivePause,
    InFlight,
    PauseMode,
)
from rkserve.core.errors import BoardFailed, NativeError
from rkserve.core.messages import Kv

log = logging.getLogger(__name__)

# Whoever reads a stream takes what is there at the next turn of the loop. What was not taken in
# this time is kept back until the release, so that a slow reader holds up no pause.
GIVE_OUT_S = 1.0

_S = GenerationState
_AT_WORK = (_S.PREFILLING, _S.GENERATING)
_LEAVING = (_S.PAUSING, _S.ABORTING)


@dataclass(slots=True)
class AdoptionEffects:
    """What one call did."""

    stopped: list[Job] = field(default_factory=list)
    aborted: int = 0
    switched: int = 0


class StateAdopter:
    """Use it from the board's loop."""

    def __init__(
        self,
        board_id: str,
        slot: EngineSlot,
        books: BoardBooks,
        queue: RunQueue,
        *,
        embedding: EmbeddingService,
        runner: RequestRunner,
        sleeping: BoardSleep,
        rebasing: WeightSwap,
    ) -> None:
        self._board_id, self._slot, self._books, self._queue = board_id, slot, books, queue
        self._embedding = embedding
        self._runner = runner
        self._sleeping = sleeping
        self._rebasing = rebasing
        self._stopped: EngineRun | None = None  # the last run that held ones were in
        self._clears = False  # the KV cache is still to be emptied for the hold
        self._clearing: asyncio.Future[None] | None = None  # by the last errand for that
        self._told: asyncio.Future[None] | None = None  # completes when it is told anew

    def admit(self, job: Job) -> None:
        """A new request: it waits where its part of the board is held.

        One that has begun elsewhere follows its line, which may have changed meanwhile.
        """
        hold = self._hold(job)
        job.frozen = hold is not None and hold.mode is PauseMode.KEEP
        if job.begun:
            self._follow_line(job, AdoptionEffects())

    async def adopt(self, desired: Desired) -> Adoption:
        """Obey, at once; return when what is held rests. Safe to be called many times at once.

        A call that comes too late, by its epoch, changes nothing and waits for what is obeyed.
        One under ``wait`` returns when the last accepted generation has ended: cancelled, it leaves
        the hold as it is, for a later epoch to undo.

        Raises ``BoardFailed`` where the board cannot be put to sleep, or be woken; ``RebaseFailed``
        where this call has seen that it cannot have the base weights that it shall have.
        """
        started_s, done = loop_time_s(), AdoptionEffects()
        charge = self._books.obligations
        before, label, failures = charge.target, charge.label(None), self._rebasing.failures
        taken = charge.take(desired)
        rebased = self._rebasing.told()
        if rebased is not None:
            done.switched, done.aborted = rebased
        if taken:
            self._carry_out(before, done, label)
        elif rebased is not None:  # what it lacked has come
            self._carry_out(charge.target, done, label)
        took_ms = 0.0
        settled: int | None = None
        while settled != charge.epoch:  # told anew meanwhile, it answers for that as well
            settled = charge.epoch
            await self._rest()
            await self._give_out()
            took_ms = (loop_time_s() - started_s) * 1e3
            await self._clear()
            await self._rebasing.settled(failures)
            await self._sleeping.settle()
            await self._rebasing.settled(failures)  # without an engine it is a note
        self._rebasing.verify(failures)
        slept, target = self._sleeping.slept(), charge.target
        assert target is not None
        return Adoption(
            self._board_id,
            target.epoch,
            missing=charge.missing,
            missing_base=charge.missing_base,
            refused=self._rebasing.refused,
            held=target.hold is not None,
            stopped=len(done.stopped),
            kept=sum(self._keeps(job) for job in done.stopped),
            aborted=done.aborted,
            switched=done.switched,
            latency_ms=took_ms,
            emitted=emitted(self._books.jobs.values()),
            level=slept.level,
            kept_tokens=slept.kept_tokens,
            dropped_tokens=slept.dropped_tokens,
        )

    # -- at once ------------------------------------------------------------------------------

    def look_again(self) -> None:
        """What holds generations has changed on the board itself."""
        charge = self._books.obligations
        self._carry_out(charge.target, AdoptionEffects(), charge.label(None))

    def _carry_out(self, before: BoardTarget | None, done: AdoptionEffects, label: str) -> None:
        """Do all of it without a turn of the loop: nothing starts in between."""
        jobs = list(self._books.jobs.values())
        thawed = [job for job in jobs if self._mark(job)]
        self._note_run()
        self._embedding.told()
        self._queue.admission.bar(self._is_barred, loop_time_s())
        for job in jobs:
            if not job.over:
                self._follow_line(job, done)
        self._relabel(label, jobs)
        for job in jobs:
            if not job.over:
                self._settle(job, done, thawed=job in thawed)
        self._plan_clear(before)
        self._sleeping.told(done.stopped)
        if self._told is not None and not self._told.done():
            self._told.set_result(None)
        self._queue.pump()

    def _mark(self, job: Job) -> bool:
        """Say whether runs of the job may begin; return whether they may again."""
        hold, before = self._hold(job), job.frozen
        if hold is None or hold.mode is PauseMode.ABORT:
            job.frozen = False
        elif hold.mode is PauseMode.KEEP:
            job.frozen = True
        else:  # wait: what a stricter reading has stopped before stays so, and so does a pause
            job.frozen = before or job.state is _S.PAUSED
        if job.muted and not job.frozen:
            job.mute(muted=False)
        return before and not job.frozen

    def _is_barred(self, ticket: int) -> bool:
        job = self._books.jobs.get(ticket)
        return self._queue.is_barred(ticket) if job is None else job.frozen

    def _note_run(self) -> None:
        """Remember a run of those that are held: it may go on when they have left it."""
        run = self._running
        if run is None or not run.jobs:
            return
        if any(self._hold(job) is not None for job in run.jobs):
            self._stopped = run
        elif self._stopped is run:
            self._stopped = None  # it was, and goes on

    def _follow_line(self, job: Job, done: AdoptionEffects) -> None:
        """Let the job have another version where its line has changed and it is due to that."""
        charge, request = self._books.obligations, job.request
        line = charge.line(request)
        if line is None or (job.begun and line.epoch <= job.line_epoch):
            return
        ref = charge.serves(line, request)
        if ref is None or ref == job.ref or (job.begun and not _follows(job, line)):
            job.line_epoch = line.epoch
        elif job.begun and line.in_flight is InFlight.ABORT:
            job.line_epoch = line.epoch
            self._runner.abort(job)
            done.aborted += 1
        else:
            job.bind(ref, line.epoch)
            self._queue.admission.rekey(job.ticket, job.key)
            if job.begun:
                done.switched += 1
                self._leave_version(job, done)

    def _leave_version(self, job: Job, done: AdoptionEffects) -> None:
        if job.state in _AT_WORK:
            self._runner.stop(job)
            if job.frozen:
                done.stopped.append(job)
        elif self._runner.pauses.holds(job):
            self._runner.pauses.let_go()  # its KV cache is worth nothing now

    def _relabel(self, before: str, jobs: list[Job]) -> None:
        """What the base model says from now on has its new label."""
        label = self._books.obligations.label(None)
        if label == before:
            return
        for job in jobs:
            if job.ref is None and job.begun and not job.over:
                job.spans.begin(label, job.generation.tokens)

    def _settle(self, job: Job, done: AdoptionEffects, *, thawed: bool) -> None:
        """Stop, end or release the job, as its hold says."""
        hold, runner = self._hold(job), self._runner
        if hold is not None and hold.mode is PauseMode.ABORT:
            runner.abort(job, mute=True)
            done.aborted += 1
        elif job.frozen:
            if job.state in _AT_WORK:
                runner.stop(job)
                done.stopped.append(job)
            runner.pauses.watch(job)
        elif thawed and job.goes_on:
            runner.resume(job)
        elif thawed:
            runner.pauses.watch(job)

    def _plan_clear(self, before: BoardTarget | None) -> None:
        """Have caches cleared for holds that are new, and not again for those that were there."""
        target = self._books.obligations.target
        assert target is not None
        had = before or BoardTarget(epoch=0)
        due = self._clears
        whole = target.hold is not None and target.hold.clear_cache
        if target.hold is None:
            self._clears = False
        elif whole:
            self._clears = due or had.hold is None or not had.hold.clear_cache
        cleared = {name for name, hold in had.adapter_holds if hold.clear_cache}
        if due and not self._clears:
            cleared.clear()  # they left it to a hold of all, which has ended before it was done
        named = {name for name, hold in target.adapter_holds if hold.clear_cache}
        if named - cleared and not whole and not self._slot.asleep:
            # Others may run on, and their context is in the same cache: before the next run.
            self._runner.pauses.let_go()
            self._queue.schedule(self._empty, first=True)

    # -- until it rests -----------------------------------------------------------------------

    async def _rest(self) -> None:
        while waits_for := set(self._unrested()):
            await self._wait(waits_for)

    def _unrested(self) -> Iterator[asyncio.Future[None]]:
        """Yield what may change with those that are held and do not rest yet."""
        yield from self._embedding.awaited()
        self._note_run()
        held = [(job, hold) for job in self._books.jobs.values() if (hold := self._hold(job))]
        for job, hold in held:
            if hold.mode is PauseMode.WAIT and job.state is _S.PAUSED:
                job.frozen = True  # resumed, it waits for the release
                self._runner.pauses.watch(job)
            elif job.state in (*_AT_WORK, *_LEAVING) or self._is_awaited(job, hold):
                yield job.changed()
        run, target = self._stopped, self._books.obligations.target
        holds = target is not None and (target.hold is not None or target.adapter_holds)
        if holds and run is not None and not run.muted and not run.over.done():
            yield run.over

    def _is_awaited(self, job: Job, hold: EffectivePause) -> bool:
        return hold.mode is PauseMode.WAIT and not job.frozen and job.state is not _S.ENDED

    async def _give_out(self) -> None:
        """Wait until those who listen to what is held have all of it, or keep it back."""
        deadline_s = loop_time_s() + GIVE_OUT_S
        while pending := [j for j in self._books.jobs.values() if self._hold(j) and j.pending]:
            left_s = deadline_s - loop_time_s()
            if left_s > 0:
                await self._wait({job.changed() for job in pending}, left_s)
                continue
            for job in pending:
                log.info("what is left of %s is given out later", job.request.request_id)
                job.mute(muted=True)

    async def _wait(self, changes: set[asyncio.Future[None]], limit_s: float | None = None) -> None:
        """Wait for one of the changes, or for being told anew, which may have made them void."""
        if self._told is None or self._told.done():
            self._told = asyncio.get_running_loop().create_future()
        waits_for = {*changes, self._told}
        await asyncio.wait(waits_for, timeout=limit_s, return_when="FIRST_COMPLETED")

    async def _clear(self) -> None:
        """Empty the KV cache where the hold asks for that, as soon as nothing runs.

        Whoever asks while that is under way waits for it, too.
        """
        due, self._clears = self._clears and self._slot.live.alive, False  # a fresh one is empty
        try:
            if due:
                self._runner.pauses.let_go()
                self._slot.require_open()
                self._clearing = self._queue.schedule(self._empty, first=True)
            clearing, target = self._clearing, self._books.obligations.target
            held = target is not None and target.hold is not None
            if held and clearing is not None and not clearing.done():
                await asyncio.shield(clearing)
        except (BoardFailed, NativeError) as exc:
            # Nothing of it is used: the next run clears it first, or has a fresh engine.
            log.warning("board %s: not cleared: %s", self._board_id, exc)

    async def _empty(self) -> None:
        await self._slot.live.clear(keep_system_prompt=False)

    # -- looking ------------------------------------------------------------------------------

    @property
    def _running(self) -> EngineRun | None:
        return self._slot.live.running

    def _hold(self, job: Job) -> EffectivePause | None:
        own = self._books.obligations.hold(adapter_name(job.request))
        if own is not None and own.mode is not PauseMode.WAIT:
            return own
        return self._rebasing.hold(job) or own

    def _keeps(self, job: Job) -> bool:
        if job.state is not _S.PAUSED:
            return False
        holds = self._runner.pauses.holds(job)
        return outlook(self._slot.live, job, holds=holds)[0] is Kv.KEPT


def _follows(job: Job, line: AdapterVersions) -> bool:
    """Whether one that has begun is concerned by a change of its line."""
    return line.in_flight is not InFlight.PIN and not job.request.keep_version
