"""The paused generations of one board: their limit, their timeouts, and the one holding the board.

It makes no runs: the runner resumes and drains them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rkserve.board.rules.generations import GenerationEvent
from rkserve.board.run.job import Job
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.start import kv_outlook
from rkserve.core.block_hashes import common_prefix
from rkserve.core.board_report import GenerationState
from rkserve.core.errors import PauseExpired, RkserveError, TooManyPaused
from rkserve.core.messages import Kv, Paused

_S, _E = GenerationState, GenerationEvent
BY_REQUEST = "request"
BY_CLUSTER = "cluster"


class PausedRequests:
    """The paused requests of one board. ``fail`` ends a job with an error."""

    def __init__(
        self,
        books: BoardBooks,
        slot: EngineSlot,
        queue: RunQueue,
        fail: Callable[[Job, RkserveError], None],
    ) -> None:
        self._settings, self._books, self._slot, self._queue = books.settings, books, slot, queue
        self._fail = fail
        self._holding: Job | None = None  # paused inside the runtime, so that it keeps the board
        self._release: asyncio.Future[None] | None = None

    def holds(self, job: Job) -> bool:
        """Return whether the job is paused inside the runtime and keeps the board."""
        return job is self._holding

    def at_resume(self) -> int | None:
        """Return how many positions remain when the run that holds the board is resumed.

        None where no run holds it, or no edit cuts anything out.
        """
        job, live = self._holding, self._slot.live
        if job is None or live.paused is None or live.paused.ids is None:
            return None
        ids, generation = live.paused.ids, job.generation
        if not generation.cuts and common_prefix(ids, generation.context) == len(ids):
            return None
        resume = live.resumption(generation.context, generation.cuts, job.origin)
        if resume is None:
            return 0  # all of it is recomputed
        return len(ids) - sum(end - start for start, end in resume.cut)

    def holdable(self, job: Job) -> bool:
        """Return whether the job may hold the board while others wait."""
        doomed = self._books.obligations.unloads or self._slot.live.doomed
        return not doomed and self._queue.admission.holdable(job.held_s)

    def check(self, asked: int) -> None:
        """Raise ``TooManyPaused`` where ``asked`` more generations exceed the limit."""
        if self._full(asked, beside=None):
            raise self._too_many()

    def _full(self, asked: int, *, beside: Job | None) -> bool:
        jobs = self._books.jobs.values()
        kept = sum(_is_its_clients(job) and job is not beside for job in jobs)
        return kept + asked > self._settings.max_paused

    def _too_many(self) -> TooManyPaused:
        return TooManyPaused(self._settings.board_id, self._settings.max_paused)

    def rest(self, job: Job) -> None:
        """Pause the job: no further output until it is resumed.

        A pause by a hook ends with ``TooManyPaused`` where the limit is reached.
        """
        if job.generation.paused_by is not None and self._full(1, beside=job):
            self._fail(job, self._too_many())
            return
        if job.state is _S.GENERATING:
            job.advance(_E.PAUSE_ASKED)
        job.advance(_E.PAUSED)
        job.goes_on = job.frozen and not job.pause_asked and job.generation.paused_by is None
        job.pause_asked = job.yields = False
        loop, live = asyncio.get_running_loop(), self._slot.of(job)
        job.paused_s = loop.time()
        # A run that continues without it, muted, is about to replace the context in the engine.
        kept = live.paused is not None and live.running is None and self.holdable(job)
        kv, _ = kv_outlook(live, job, holds=kept)
        if self._books.obligations.unloads:
            kv = Kv.RECOMPUTED  # the part restorable from a file is not known yet
        by = BY_CLUSTER if job.goes_on else job.generation.paused_by
        job.paused_by = by or BY_REQUEST
        job.announce(Paused(by, job.generation.tokens, kv))
        job.has_board = False
        self._books.counters.pauses += 1
        self.watch(job)

    def arrive(self, job: Job) -> None:
        """Take a job that was paused on another board, and keep it paused here."""
        now_s = asyncio.get_running_loop().time()
        job.waited(now_s)
        job.advance(_E.ARRIVED)
        job.paused_s = now_s
        by = job.generation.paused_by
        job.paused_by = by or BY_REQUEST
        job.announce(Paused(by, job.generation.tokens, Kv.RECOMPUTED))
        self.watch(job)

    def watch(self, job: Job) -> None:
        """Start the timeout of a client's pause; none under a hold."""
        if job.expiry is not None:
            job.expiry.cancel()
            job.expiry = None
        if job.state is _S.PAUSED and not job.goes_on and not job.frozen:
            loop = asyncio.get_running_loop()
            job.expiry = loop.call_later(self._settings.pause_timeout_s, self._expire, job)

    def _expire(self, job: Job) -> None:
        before_s = job.tally.paused_s
        job.unpause(asyncio.get_running_loop().time())
        self._fail(job, PauseExpired(job.tally.paused_s - before_s))

    async def hold(self, job: Job) -> None:
        """Keep the board for a run that the runtime has paused.

        It ends with the pause, with the engine, or when others waited long enough: the job is
        ``released`` then, and may stay paused.
        """
        live, loop = self._slot.live, asyncio.get_running_loop()
        self._holding = job
        release_board = self._release = loop.create_future()
        self._queue.admission.hold(loop.time(), job.held_s)
        if live.doomed or self._books.obligations.unloads:
            self.release_board()
        self._queue.pump()
        while job.state is _S.PAUSED and not job.over and live.alive and not release_board.done():
            waits_for = (job.changed(), live.engine.died, release_board)
            await asyncio.wait(waits_for, return_when="FIRST_COMPLETED")
        job.held_s += self._queue.admission.unhold(loop.time())
        job.released = release_board.done()
        self._holding = self._release = None

    def release_board(self) -> None:
        """Make the paused job release the board."""
        if self._release is not None and not self._release.done():
            self._release.set_result(None)


def _is_its_clients(job: Job) -> bool:
    """Return whether the client, and not only the board, keeps the job paused."""
    if job.state is _S.PAUSED:
        return not job.goes_on
    return job.state is _S.PAUSING and (job.pause_asked or not (job.frozen or job.yields))
