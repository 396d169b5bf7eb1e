"""Adoption of the desired state on one board: holds, releases, switches of versions, sleep.

``rules.obligations`` derives the desired state of this board; the runner interrupts and resumes
generations. An adoption is answered once held generations emit no more tokens, neither from the
engine nor from their streams. It waits for no run, unless the runtime keeps its KV cache: a run is
muted, and the board is busy with it for a step, or for the rest of a prefill. Only a sleep has to
wait for it; that comes last, in ``sleep``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rkserve.board.operations.base_weights import BaseWeights, WeightSwap
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.rules.obligations import adapter_name
from rkserve.board.run.job import ChangeSignal, EngineRun, Job, emitted, loop_time_s
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.start import kv_outlook
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
from rkserve.core.errors import BoardBehind, BoardDrained, BoardFailed, NativeError
from rkserve.core.messages import Kv

log = logging.getLogger(__name__)

# A consumer reads available events at the next turn of the loop. Events not read in this time are
# withheld until the release, so that a slow reader delays no pause.
GIVE_OUT_S = 1.0

_S = GenerationState
_AT_WORK = (_S.PREFILLING, _S.GENERATING)
_LEAVING = (_S.PAUSING, _S.ABORTING)


@dataclass(slots=True)
class AdoptionEffects:
    """The effects of one call."""

    stopped: list[Job] = field(default_factory=list)
    aborted: int = 0
    switched: int = 0


class StateAdopter:
    """Adopts the desired state. Use it from the board's loop."""

    def __init__(
        self,
        books: BoardBooks,
        slot: EngineSlot,
        queue: RunQueue,
        *,
        embedding: EmbeddingService,
        runner: RequestRunner,
        sleep: BoardSleep,
        weights: BaseWeights,
        drained: Callable[[], None],
    ) -> None:
        """``drained`` is called at the beginning of a drain."""
        self._drained = drained
        self._board_id = books.settings.board_id
        self._books, self._slot, self._queue = books, slot, queue
        self._embedding = embedding
        self._runner = runner
        self._sleep = sleep
        self.weight_swap = WeightSwap(
            books, slot, queue, runner=runner, weights=weights, reapply_holds=self.reapply_holds
        )
        self._stopped: set[EngineRun] = set()  # runs with held jobs
        self._clears = False  # the hold requires a clear of the KV cache
        self._clearing: asyncio.Future[None] | None = None  # the last engine task for that
        self._new_state = ChangeSignal()  # of the desired state
        # Pauses of mode ``wait`` whose generations have ended: of adapters, and None of the board.
        self._waited: set[str | None] = set()

    def admit(self, job: Job) -> None:
        """Hold a new request where its part of the board is held.

        A request that began elsewhere follows its adapter line, which may have changed meanwhile.
        """
        hold = self._hold(job)
        job.frozen = hold is not None and self._stops(hold, job)
        if job.begun:
            self._follow_line(job, AdoptionEffects())

    async def adopt(self, desired: Desired) -> Adoption:
        """Adopt the desired state; return when held generations are paused. Reentrant.

        A call with an outdated epoch changes nothing and waits for the adopted state. A call under
        ``wait`` returns when the last accepted generation has ended; cancelled, it leaves the hold
        for a later epoch to undo.

        Raises ``BoardFailed`` where the board cannot be put to sleep, or be woken; ``RebaseFailed``
        where the desired base weights failed to load during this call.
        """
        started_s, done = loop_time_s(), AdoptionEffects()
        obligations = self._books.obligations
        before, label = obligations.target, obligations.label(None)
        failures = self.weight_swap.failures
        taken = obligations.take(desired)
        rebased = self.weight_swap.update()
        if rebased is not None:
            done.switched, done.aborted = rebased
        if taken:
            self._carry_out(before, done, label)
        elif rebased is not None:  # missing files have arrived
            self._carry_out(obligations.target, done, label)
        took_ms = 0.0
        settled: int | None = None
        while settled != obligations.epoch:  # a newer state adopted meanwhile is awaited as well
            settled = obligations.epoch
            await self._rest()
            await self._give_out()
            took_ms = (loop_time_s() - started_s) * 1e3
            await self._clear()
            await self.weight_swap.settled(failures)
            await self._sleep.settle()
            await self.weight_swap.settled(failures)  # a sleeping board only notes them
        self.weight_swap.verify(failures)
        slept, target = self._sleep.slept(), obligations.target
        assert target is not None
        return Adoption(
            self._board_id,
            target.epoch,
            missing=obligations.missing,
            missing_base=obligations.missing_base,
            refused=self.weight_swap.refused,
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

    async def follow(self, desired: Desired) -> Adoption:
        """Adopt a later desired state than the present one; see ``adopt``.

        Broadcasts also reach boards that are not on the Coordinator's list yet. The first state
        comes from a call to this board alone, so that none serves without being on it: what it
        serves could not be changed while its connection to the head is lost.

        Raises ``BoardBehind`` without a present state.
        """
        if self._books.obligations.epoch is None:
            raise BoardBehind(self._board_id, "it has no desired state yet")
        return await self.adopt(desired)

    # -- without waiting --------------------------------------------------------------------------

    def reapply_holds(self) -> None:
        """Apply holds again after a change on the board itself."""
        obligations = self._books.obligations
        self._carry_out(obligations.target, AdoptionEffects(), obligations.label(None))

    def _carry_out(self, before: BoardTarget | None, done: AdoptionEffects, label: str) -> None:
        """Apply the desired state without a turn of the loop, so that nothing starts in between."""
        target = self._books.obligations.target
        assert target is not None
        self._waited &= _held_parts(target)
        jobs = list(self._books.jobs.values())
        thawed = [job for job in jobs if self._mark(job)]
        self._note_run()
        self._embedding.update()
        self._queue.admission.bar(self._queue.is_barred, loop_time_s())
        for job in jobs:
            if not job.over:
                self._follow_line(job, done)
        self._relabel(label, jobs)
        self._hand_over(jobs)
        for job in jobs:
            if not job.over:
                self._settle(job, done, thawed=job in thawed)
        self._plan_clear(before)
        self._sleep.update(done.stopped)
        if target.drained and not (before is not None and before.drained):
            self._drained()
        self._new_state.wake()
        self._queue.pump()

    def _hand_over(self, jobs: list[Job]) -> None:
        """End the requests that other boards continue, where a drain moves them.

        A begun answer that token IDs cannot continue stays to its end, and so do embeddings, which
        are short.
        """
        target = self._books.obligations.target
        if target is None or not target.moves:
            return
        for job in jobs:
            if not job.over and not (job.request.in_one_go and job.generation.tokens):
                self._runner.hand_over(
                    job, BoardDrained(self._board_id, "its requests continue on other boards")
                )

    def _mark(self, job: Job) -> bool:
        """Set whether runs of the job may begin; return whether that was just allowed again."""
        hold, before = self._hold(job), job.frozen
        if hold is None or hold.mode is PauseMode.ABORT:
            job.frozen = False
        elif self._stops(hold, job):
            job.frozen = True
        else:  # wait: jobs stopped by a stricter mode stay stopped, and so do paused ones
            job.frozen = before or job.state is _S.PAUSED
        if job.muted and not job.frozen:
            job.mute(muted=False)
        return before and not job.frozen

    def _stops(self, hold: EffectivePause, job: Job) -> bool:
        """Return whether a hold that does not abort lets no run of the job begin.

        Under ``wait`` a request that comes from a lost board runs to its end, as it would have done
        there, but not after the pause was confirmed: from then on nothing runs.
        """
        if hold.stops:
            return hold.mode is not PauseMode.ABORT
        return not self._waited.isdisjoint({None, adapter_name(job.request)})

    def _note_run(self) -> None:
        """Remember runs with held jobs; they may continue after these left them."""
        self._stopped = {run for run in self._stopped if not run.over.done()}
        for run in self._slot.live.runs:
            if not run.jobs:
                continue
            if any(self._hold(job) is not None for job in run.jobs):
                self._stopped.add(run)
            else:
                self._stopped.discard(run)  # it continues without held jobs

    def _follow_line(self, job: Job, done: AdoptionEffects) -> None:
        """Bind the job to another version where its line has changed and applies to it."""
        obligations, request = self._books.obligations, job.request
        line = obligations.line(request)
        if line is None or (job.begun and line.epoch <= job.line_epoch):
            return
        ref = obligations.serves(line, request)
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
            self._runner.pauses.release_board()  # its KV cache is invalid now

    def _relabel(self, before: str, jobs: list[Job]) -> None:
        """Start a span with the new label of the base model in each of its answers."""
        label = self._books.obligations.label(None)
        if label == before:
            return
        for job in jobs:
            if job.ref is None and job.begun and not job.over:
                job.spans.begin(label, job.generation.tokens)

    def _settle(self, job: Job, done: AdoptionEffects, *, thawed: bool) -> None:
        """Stop, abort or release the job, as its hold requires."""
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
        """Schedule clears of the KV cache for new holds only."""
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
            # These clears were left to a hold of everything, which ended before its own.
            cleared.clear()
        named = {name for name, hold in target.adapter_holds if hold.clear_cache}
        if named - cleared and not whole and not self._slot.supervisor.asleep:
            # Other jobs may continue, with their context in the same cache: clear before the next
            # run.
            self._runner.pauses.release_board()
            self._queue.schedule(self._empty, first=True)

    # -- waiting ----------------------------------------------------------------------------------

    async def _rest(self) -> None:
        while waits_for := set(self._unrested()):
            await self._wait(waits_for)
        target = self._books.obligations.target
        assert target is not None
        self._waited |= _held_parts(target, PauseMode.WAIT)

    def _unrested(self) -> Iterator[asyncio.Future[None]]:
        """Yield futures that complete with changes of held jobs that still run."""
        yield from self._embedding.awaited()
        self._note_run()
        held = [(job, hold) for job in self._books.jobs.values() if (hold := self._hold(job))]
        for job, hold in held:
            if hold.mode is PauseMode.WAIT and job.state is _S.PAUSED:
                job.frozen = True  # if resumed, it waits for the release
                self._runner.pauses.watch(job)
            elif job.state in (*_AT_WORK, *_LEAVING) or self._is_awaited(job, hold):
                yield job.changed()
        if self._books.obligations.holds:
            yield from (run.over for run in self._stopped if not run.muted and not run.over.done())

    def _is_awaited(self, job: Job, hold: EffectivePause) -> bool:
        return hold.mode is PauseMode.WAIT and not job.frozen and job.state is not _S.ENDED

    async def _give_out(self) -> None:
        """Wait until consumers of held jobs have read their events, or withhold these."""
        deadline_s = loop_time_s() + GIVE_OUT_S
        while pending := [j for j in self._books.jobs.values() if self._hold(j) and j.pending]:
            left_s = deadline_s - loop_time_s()
            if left_s > 0:
                await self._wait({job.changed() for job in pending}, left_s)
                continue
            for job in pending:
                log.info("the rest of %s is withheld until the release", job.request.request_id)
                job.mute(muted=True)

    async def _wait(self, changes: set[asyncio.Future[None]], limit_s: float | None = None) -> None:
        """Wait for one of the changes, or for a new desired state."""
        waits_for = {*changes, self._new_state.changed()}
        await asyncio.wait(waits_for, timeout=limit_s, return_when="FIRST_COMPLETED")

    async def _clear(self) -> None:
        """Empty the KV cache where the hold requires it, as soon as nothing runs.

        Concurrent calls wait for it, too.
        """
        # A fresh engine's is empty.
        due, self._clears = self._clears and self._slot.live.alive, False
        try:
            if due:
                self._runner.pauses.release_board()
                self._slot.supervisor.open()
                self._clearing = self._queue.schedule(self._empty, first=True)
            clearing, target = self._clearing, self._books.obligations.target
            held = target is not None and target.hold is not None
            if held and clearing is not None and not clearing.done():
                await asyncio.shield(clearing)
        except (BoardFailed, NativeError) as exc:
            # It is not used: the next run clears it first, or has a fresh engine.
            log.warning("board %s: not cleared: %s", self._board_id, exc)

    async def _empty(self) -> None:
        await self._slot.live.clear(keep_system_prompt=False)

    # -- helpers ----------------------------------------------------------------------------------

    def _hold(self, job: Job) -> EffectivePause | None:
        own = self._books.obligations.hold(adapter_name(job.request))
        if own is not None and own.mode is not PauseMode.WAIT:
            return own
        return self.weight_swap.hold(job) or own

    def _keeps(self, job: Job) -> bool:
        if job.state is not _S.PAUSED:
            return False
        holds = self._runner.pauses.holds(job)
        return kv_outlook(self._slot.of(job), job, holds=holds)[0] is Kv.KEPT


def _held_parts(target: BoardTarget, mode: PauseMode | None = None) -> set[str | None]:
    """Return the adapters that are held, in that mode, and None where the board is."""
    holds: list[tuple[str | None, EffectivePause | None]] = [(None, target.hold)]
    holds += target.adapter_holds
    return {name for name, hold in holds if hold is not None and mode in (None, hold.mode)}


def _follows(job: Job, line: AdapterVersions) -> bool:
    """Return whether a job that has begun follows a change of its line."""
    return line.in_flight is not InFlight.PIN and not job.request.keep_version
