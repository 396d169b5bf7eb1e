"""Replacement of a board's base weights, with a fallback to the old ones.

Running requests end first, are interrupted, or are aborted, as the desired state specifies. Then,
with nothing running, the engine is replaced by one with the other file, which has to pass a trial
run before it serves. Meanwhile everything is held as under a pause that keeps requests, which ends
by itself. One change is made at a time, following the latest desired state: a load is never cut
short, and a load of outdated weights is not begun.
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

# Number of tries after engines that died during the swap.
TRIES = 3
# The trial run: ids of every vocabulary, and the number of tokens for a success.
TRIAL_IDS = (33, 34, 35)
TRIAL_TOKENS = 4
KEPT = EffectivePause(PauseMode.KEEP)

# No engine until the board wakes, or its quarantine ends.
_WITHOUT_ENGINE = (BoardState.ASLEEP, BoardState.QUARANTINED)
_OUT_OF_ORDER = (BoardState.FAILED, BoardState.STOPPED)
_S = GenerationState


class WeightSwap:
    """The base weights' changes. Use it from the board's loop."""

    def __init__(
        self,
        settings: BoardSettings,
        slot: EngineSlot,
        books: BoardBooks,
        queue: RunQueue,
        *,
        supervisor: EngineSupervisor,
        runner: RequestRunner,
        weights: BaseWeights,
        reapply_holds: Callable[[], None],
    ) -> None:
        """``reapply_holds`` applies ``hold`` to every generation."""
        self._settings, self._slot, self._books, self._queue = settings, slot, books, queue
        self._supervisor = supervisor
        self._runner = runner
        self._weights = weights
        self._reapply_holds = reapply_holds
        self._in_flight = InFlight.PIN
        self._active = False  # other weights are due, or being loaded
        self._all = False  # everything is held for the load
        self._loading = False  # the engine task that loads them has the board
        self._moving: asyncio.Future[None] | None = None
        self._told: asyncio.Future[None] | None = None  # completes with the next desired state

    # -- state ------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """The number of refusals."""
        return self._weights.failures

    @property
    def refused(self) -> str:
        """The reason why the desired weights are not loaded, or an empty string."""
        target = self._board_target
        if target is None or same(target.base, self._weights.base):
            return ""
        refusal = self._weights.refused(target.base)
        return "" if refusal is None else refusal.reason

    def verify(self, failures: int) -> None:
        """Raise ``RebaseFailed`` where the desired weights were refused since ``failures``."""
        if self._weights.failures != failures and self.refused:
            raise RebaseFailed(self._settings.board_id, self.refused)

    def hold(self, job: Job) -> EffectivePause | None:
        """Return the hold on the job while other weights are due."""
        if self._all or (self._active and not self._may_end(job)):
            return KEPT
        return None

    # -- without waiting --------------------------------------------------------------------------

    def update(self) -> tuple[int, int] | None:
        """Take a new desired state, or new files on the disk.

        Return how many generations will continue with other weights, and how many were aborted;
        None where nothing changes for them.
        """
        if self._told is not None and not self._told.done():
            self._told.set_result(None)
        target = self._board_target
        assert target is not None
        self._weights.forgive(but=target.base)
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
        # Interrupted generations lose their KV cache with the engine.
        doomed = self._all or (self._active and target.rebase is not InFlight.PIN)
        self._slot.live.doomed = doomed
        stops = [job for job in begun if self.hold(job) and not job.over]
        return len(stops) if self._active else 0, aborted

    # -- the change -------------------------------------------------------------------------------

    async def settled(self, failures: int) -> None:
        """Wait until the board has the desired weights, or some were refused.

        ``failures`` is the earlier number of refusals. A sleeping board only notes them for its
        next load.

        Raises:
            BoardFailed: the board is out of order.
        """
        while self._weights.failures == failures:
            if self._moving is not None and not self._moving.done():
                await asyncio.shield(self._moving)
            elif not self._is_due(asleep=self._supervisor.state is BoardState.ASLEEP):
                return
            elif self._supervisor.state in _WITHOUT_ENGINE:
                await self._weights.note(self._base)
            else:
                self._start()

    def _start(self) -> None:
        """Start the change in the background."""
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_future()
            # The caller may be gone: an unread error must not be reported by the event loop.
            self._moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._supervisor.spawn(self._move(self._moving))

    async def _move(self, done: asyncio.Future[None]) -> None:
        try:
            tries, failures = TRIES, self._weights.failures
            while self._is_due() and self._weights.failures == failures:
                await self._until_ended()
                if not self._is_due():
                    break
                self._hold_all()
                try:
                    await self._replace()
                except (EngineDied, EngineHung) as exc:
                    tries -= 1  # it is loaded again
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
        """Wait for the generations that end with their current weights."""
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
        self._reapply_holds()
        self._runner.pauses.release_board()  # a paused run must not keep the board

    def _release(self) -> None:
        self._active = self._all = False
        if not self._supervisor.stopped:
            self._slot.live.doomed = False
            self._reapply_holds()

    async def _replace(self) -> None:
        """Replace the engine once the board is free, unless the desired state changes first."""
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
        """Load the other weights and try them, while the caller has the board."""
        if not self._is_due():
            return
        base, weights = self._base, self._weights
        self._loading = True
        weights.try_next(base)
        try:
            await self._supervisor.renew("its base weights are replaced")
            if weights.on_trial:
                await self._try(base)
        except (EngineDied, EngineHung) as exc:
            if weights.on_trial:  # the supervisor loads the previous weights
                weights.refuse(base, f"their trial failed: {exc.reason}")
            raise
        finally:
            weights.give_up()
            weights.rest(base)
            self._loading = False

    async def _try(self, base: BaseVersion | None) -> None:
        ids = () if self._settings.text_mode else TRIAL_IDS
        try:
            await try_out(self._settings, self._slot.live, None, ids, TRIAL_TOKENS)
        except (RunFailed, NativeError) as exc:
            self._weights.refuse(base, f"their trial failed: {exc}")
            await self._supervisor.renew("the base weights of before")
        else:
            await self._weights.prove()

    # -- desired state ----------------------------------------------------------------------------

    @property
    def _board_target(self) -> BoardTarget | None:
        return self._books.obligations.target

    @property
    def _base(self) -> BaseVersion | None:
        return None if self._board_target is None else self._board_target.base

    def _is_due(self, *, asleep: bool = False) -> bool:
        """Return whether other weights are desired, on the disk, and may be tried now.

        A board that is about to lose its engine takes them with the next one.
        """
        target, weights = self._board_target, self._weights
        if target is None or same(target.base, weights.base) or not weights.here(target.base):
            return False
        if self._books.obligations.unloads and not asleep:
            return False
        refusal = weights.refused(target.base)
        return refusal is None or refusal.until_s <= loop_time_s()

    def _may_end(self, job: Job) -> bool:
        """Return whether the job ends with the weights that it began with."""
        pinned = self._in_flight is InFlight.PIN or job.request.keep_version
        return pinned and job.begun

    def _is_awaited(self, job: Job) -> bool:
        """Return whether the job's end is waited for: not while it is paused or held."""
        at_rest = job.frozen or job.state in (_S.PAUSED, _S.ENDED)
        return self._may_end(job) and not job.over and not at_rest
