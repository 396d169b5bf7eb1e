"""Gives a board's model other base weights, and the old ones back where these are no good.

What runs ends first, or stops and goes on, or is aborted, as the duty says; then, with nothing
running, the engine is replaced by one with the other file, which has to give a few tokens before
it serves. Meanwhile everything is held as under a pause that keeps requests, only that nobody has
to release it. It makes one change at a time and follows what the board was told last: a load is
never cut short, and one that has not begun for weights that nobody wants any more is not begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rkserve.board.operations.adapters import try_out
from rkserve.board.operations.base_weights import BaseWeights, same
from rkserve.board.run.job import Job
from rkserve.board.run.ports import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.run import loop_time_s
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import BaseVersion, BoardTarget, EffectivePause, InFlight, PauseMode
from rkserve.core.errors import (
    BoardAsleep,
    EngineDied,
    EngineHung,
    NativeError,
    RebaseFailed,
    RkserveError,
    RunFailed,
)

log = logging.getLogger(__name__)

# An engine that is lost while the board waits for its turn is not worth more than so many tries.
TRIES = 3
# Of the trial: ids that every vocabulary has, and how many tokens make it a success.
TRIAL_IDS = (33, 34, 35)
TRIAL_TOKENS = 4
KEPT = EffectivePause(PauseMode.KEEP)

# There is no engine, nor will there be before the board wakes, or its quarantine is over.
_WITHOUT_ENGINE = (BoardState.ASLEEP, BoardState.QUARANTINED)
_OUT_OF_ORDER = (BoardState.FAILED, BoardState.STOPPED)
_S = GenerationState


class WeightSwap:
    """Use it from the board's loop."""

    def __init__(
        self,
        settings: BoardSettings,
        slot: EngineSlot,
        books: BoardBooks,
        queue: RunQueue,
        *,
        supervisor: EngineSupervisor,
        runner: RequestRunner,
        bases: BaseWeights,
        look_again: Callable[[], None],
    ) -> None:
        """``look_again`` has every generation stopped or released as ``hold`` says then."""
        self._settings, self._slot, self._books, self._queue = settings, slot, books, queue
        self._supervisor = supervisor
        self._runner = runner
        self._bases = bases
        self._look_again = look_again
        self._in_flight = InFlight.PIN
        self._active = False  # other weights are due, or being loaded
        self._all = False  # nothing is waited for any more: everything is held
        self._loading = False  # the errand that does it has the board
        self._moving: asyncio.Future[None] | None = None
        self._told: asyncio.Future[None] | None = None  # completes when it is told anew

    # -- what is so ---------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """How often weights were refused."""
        return self._bases.failures

    @property
    def refused(self) -> str:
        """Why the weights that it shall have are not loaded, or nothing."""
        target = self._board_target
        if target is None or same(target.base, self._bases.base):
            return ""
        refusal = self._bases.refused(target.base)
        return "" if refusal is None else refusal.reason

    def verify(self, failures: int) -> None:
        """Raise ``RebaseFailed`` where what is wanted was refused since there were so many."""
        if self._bases.failures != failures and self.refused:
            raise RebaseFailed(self._settings.board_id, self.refused)

    def hold(self, job: Job) -> EffectivePause | None:
        """Return what holds the job for as long as other weights are on their way."""
        if self._all or (self._active and not self._may_end(job)):
            return KEPT
        return None

    # -- at once ------------------------------------------------------------------------------

    def told(self) -> tuple[int, int] | None:
        """The board was told something new, or what it lacked may have come.

        Return how many generations will go on with other weights, and how many were aborted: None
        where nothing is different for any of them.
        """
        if self._told is not None and not self._told.done():
            self._told.set_result(None)
        target = self._board_target
        assert target is not None
        self._bases.forgive(but=target.base)
        was = self._active, self._in_flight
        if not self._loading:
            self._active = self._is_due() and self._supervisor.state not in _WITHOUT_ENGINE
            self._all = self._all and self._active
        if self._active:
            self._start()
        self._in_flight = target.rebase
        if was == (self._active, self._in_flight):
            return None
        begun = [job for job in self._books.jobs.values() if job.begun and not job.over]
        aborted = 0
        if self._active and target.rebase is InFlight.ABORT:
            aborted = len(begun)
            for job in begun:
                self._runner.abort(job, mute=True)
        # Those that stop for it lose their KV cache with the engine.
        doomed = self._all or (self._active and target.rebase is not InFlight.PIN)
        self._slot.live.doomed = doomed
        stops = [job for job in begun if self.hold(job) and not job.over]
        return len(stops) if self._active else 0, aborted

    # -- until it is done ---------------------------------------------------------------------

    async def settled(self, failures: int) -> None:
        """Return when the board has the weights that it shall have, or some have been refused.

        ``failures`` is how often that was so before. Without an engine they are those of the next
        load. Whoever asks while they are being loaded waits for that.

        Raises:
            BoardFailed: the board is out of order.
        """
        while self._bases.failures == failures:
            if self._moving is not None and not self._moving.done():
                await asyncio.shield(self._moving)
            elif not self._is_due(asleep=self._supervisor.state is BoardState.ASLEEP):
                return
            elif self._supervisor.state in _WITHOUT_ENGINE:
                await self._bases.note(self._base)
            else:
                self._start()

    def _start(self) -> None:
        """Let it be done, whether or not anybody waits for it."""
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_future()
            # Whoever sent it may have left: an error that nobody hears of is no event.
            self._moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._supervisor.spawn(self._move(self._moving))

    async def _move(self, done: asyncio.Future[None]) -> None:
        try:
            tries, failures = TRIES, self._bases.failures
            while self._is_due() and self._bases.failures == failures:
                await self._until_ended()
                if not self._is_due():
                    break
                self._hold_all()
                try:
                    await self._replace()
                except (EngineDied, EngineHung) as exc:
                    tries -= 1  # it is loaded anew
                    log.warning("board %s: not loaded yet: %s", self._settings.board_id, exc.reason)
                    if tries == 0:
                        raise
        except BoardAsleep:
            log.info("board %s: it loads its weights when it wakes", self._settings.board_id)
        except RkserveError as exc:
            done.set_exception(exc)
        finally:
            self._release()
            if not done.done():
                done.set_result(None)

    async def _until_ended(self) -> None:
        """Wait for the generations that end with the weights that they have."""
        while self._is_due() and not self._all:
            jobs = self._books.jobs.values()
            waits_for = {job.changed() for job in jobs if self._is_awaited(job)}
            if not waits_for:
                return
            self._told = told = asyncio.get_running_loop().create_future()
            await asyncio.wait({*waits_for, told}, return_when="FIRST_COMPLETED")

    def _hold_all(self) -> None:
        self._active = self._all = True
        self._slot.live.doomed = True
        self._look_again()
        self._runner.pauses.let_go()  # nobody who is paused keeps the board

    def _release(self) -> None:
        self._active = self._all = False
        if not self._supervisor.stopped:
            self._slot.live.doomed = False
            self._look_again()

    async def _replace(self) -> None:
        """Have the engine replaced once the board is free, unless it is told otherwise first."""
        if self._supervisor.state in _OUT_OF_ORDER:
            raise self._supervisor.failed()
        replaced = self._queue.schedule(self._exchange, first=True)
        try:
            while not replaced.done():
                self._told = told = asyncio.get_running_loop().create_future()
                await asyncio.wait({replaced, told}, return_when="FIRST_COMPLETED")
                if not self._loading and not self._is_due():
                    return
            replaced.result()
        finally:
            replaced.cancel()

    async def _exchange(self) -> None:
        """Load the other weights and try them; the board is one's own."""
        if not self._is_due():
            return
        base, bases = self._base, self._bases
        self._loading = True
        bases.try_next(base)
        try:
            await self._supervisor.renew("its base weights are replaced")
            if bases.on_trial:
                await self._try(base)
        except (EngineDied, EngineHung) as exc:
            if bases.on_trial:  # the supervisor loads those of before
                bases.refuse(base, f"their trial failed: {exc.reason}")
            raise
        finally:
            bases.give_up()
            bases.rest(base)
            self._loading = False

    async def _try(self, base: BaseVersion | None) -> None:
        ids = () if self._settings.text_mode else TRIAL_IDS
        try:
            await try_out(self._settings, self._slot.live, None, ids, TRIAL_TOKENS)
        except (RunFailed, NativeError) as exc:
            self._bases.refuse(base, f"their trial failed: {exc}")
            await self._supervisor.renew("the base weights of before")
        else:
            await self._bases.prove()

    # -- what is wanted -----------------------------------------------------------------------

    @property
    def _board_target(self) -> BoardTarget | None:
        return self._books.obligations.target

    @property
    def _base(self) -> BaseVersion | None:
        return None if self._board_target is None else self._board_target.base

    def _is_due(self, *, asleep: bool = False) -> bool:
        """Whether other weights are wanted, are there, and may be tried now.

        A board that is about to lose its engine takes them with the next one.
        """
        target, bases = self._board_target, self._bases
        if target is None or same(target.base, bases.base) or not bases.here(target.base):
            return False
        if self._books.obligations.unloads and not asleep:
            return False
        refusal = bases.refused(target.base)
        return refusal is None or refusal.until_s <= loop_time_s()

    def _may_end(self, job: Job) -> bool:
        """Whether the job goes on to its end with the weights that it has begun with."""
        pinned = self._in_flight is InFlight.PIN or job.request.keep_version
        return pinned and job.begun

    def _is_awaited(self, job: Job) -> bool:
        """Not one that is paused or held: it goes on with the others, as nobody knows when."""
        at_rest = job.frozen or job.state in (_S.PAUSED, _S.ENDED)
        return self._may_end(job) and not job.over and not at_rest
