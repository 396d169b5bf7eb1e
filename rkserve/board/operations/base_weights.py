"""The base weights of a board: the file to load, its marker, refused ones, and their replacement.

Every load goes through ``BaseWeights``: it takes the current or the next weights, and where these
cannot be loaded the last good ones.

For a replacement, running requests end first, are interrupted, or are aborted, as the desired state
specifies. Then, with nothing running, the engine is replaced by one with the other file, which has
to pass a trial run before it serves. Meanwhile everything is held as under a pause that keeps
requests, which ends by itself. One change is made at a time, following the latest desired state: a
load is never cut short, and a load of outdated weights is not begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkserve.board.engine.protocol import Engine
from rkserve.board.operations.trials import try_out
from rkserve.board.rules.obligations import Obligations, digest_of, same
from rkserve.board.run.job import ChangeSignal, Job, loop_time_s
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.board.storage.staged_artifacts import StagedWeights
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
from rkserve.core.files import JsonRecord

log = logging.getLogger(__name__)

# Weights that could not be loaded are tried again on request after a rest, then after one twice as
# long, and so on up to this limit. Each try ends a working engine.
LONGEST_REST_S = 600.0

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

# Starts an engine from a model file; None is the one in the model folder.
StartEngine = Callable[[Path | None], Awaitable[Engine]]


@dataclass(slots=True)
class Refusal:
    """Weights that could not be loaded: reason, count, and the earliest time of the next try."""

    reason: str
    count: int
    rest_s: float
    until_s: float


class BaseWeights:
    """The base weights of one board, from load to load. Use it from the board's loop."""

    def __init__(
        self,
        settings: BoardSettings,
        staged: StagedWeights,
        obligations: Obligations,
        caching: PromptCaching,
        start_engine: StartEngine,
    ) -> None:
        """``start_engine`` takes a file, or None for that of the model folder."""
        self._rest_s = settings.base_rest_s  # the first rest after a failed load
        self._staged = staged
        self._obligations = obligations
        self._caching = caching
        self._start_engine = start_engine
        # Names the weights to load first after a restart; losing it costs only a load.
        self._marker = JsonRecord(settings.base_file)
        self._good: BaseVersion | None = None
        self._trial: list[BaseVersion | None] = []  # one element, or none
        self._on_trial = False  # the trial's weights are, or were, loaded
        self._marked: tuple[BaseVersion | None] | None = None  # the content of the marker
        self._refusals: dict[str, Refusal] = {}
        self.failures = 0  # number of refusals
        self.base: BaseVersion | None = None
        obligations.weights_here(self.here)

    @property
    def digest(self) -> str:
        """Digest of the weights of the current or next engine; empty is the model folder's file."""
        return digest_of(self.base)

    @property
    def staged(self) -> tuple[str, ...]:
        """Keys of the complete files on the disk; see ``BaseVersion.key``."""
        return self._staged.keys

    def here(self, base: BaseVersion | None) -> bool:
        """Return whether the file is on the disk."""
        return base is None or self._staged.path(base) is not None

    def uses(self, base: BaseVersion) -> bool:
        """Return whether a load may need the file."""
        target = self._obligations.target
        wanted = [self.base, self._good, *self._trial, target.base if target is not None else None]
        return any(same(base, one) for one in wanted)

    async def open(self) -> None:
        """Read the staged files and the marker. Raises ``ConfigError``."""
        await asyncio.to_thread(self._staged.open)
        record = await asyncio.to_thread(self._marker.read, _base)
        if record is not None and self.here(record):
            # Until it is loaded, only the folder's file is known to be good.
            await self.note(record)

    async def load(self) -> Engine:
        """Start an engine. Raises the error of the last choice."""
        if self._trial and self._on_trial:
            self.refuse(self._trial[0], "the engine ended in its trial run")
        choices: list[BaseVersion | None] = []
        for one in (*self._trial, self.base, self._good):
            if not any(same(one, other) for other in choices):
                choices.append(one)
        for one in choices[:-1]:
            try:
                return await self._load(one)
            except (RkserveError, OSError) as exc:
                self.refuse(one, f"they cannot be loaded: {exc}")
        return await self._load(choices[-1])

    async def _load(self, base: BaseVersion | None) -> Engine:
        path = None
        if base is not None:
            path = self._staged.path(base)
            if path is None:
                raise FileNotFoundError(f"the staged file of {base.title} is missing")
        self._on_trial = any(same(base, one) for one in self._trial)
        engine = await self._start_engine(path)
        if self._on_trial:
            return engine  # it is not noted before it has passed
        try:
            await self._settle(base, good=True)
        except BaseException:
            await engine.stop()
            raise
        return engine

    # -- trial and refusal ------------------------------------------------------------------------

    def try_next(self, base: BaseVersion | None) -> None:
        """Use these weights for the next load, as a trial: ``prove`` or ``refuse`` them then."""
        self._trial, self._on_trial = [base], False

    @property
    def on_trial(self) -> bool:
        """True where the engine has weights on trial."""
        return bool(self._trial) and self._on_trial

    async def prove(self) -> None:
        """Note that the weights on trial are good."""
        (base,) = self._trial
        self._trial = []
        await self._settle(base, good=True)

    def give_up(self) -> None:
        """Cancel the trial."""
        self._trial = []

    def refuse(self, base: BaseVersion | None, reason: str) -> None:
        """Mark these weights as unusable: the next load takes the last good ones."""
        self._trial = [one for one in self._trial if not same(one, base)]
        if same(self.base, base):
            self.base = self._good
        before = self._refusals.get(digest_of(base))
        count = 1 if before is None else before.count + 1
        rest_s = min(self._rest_s * 2.0 ** (count - 1), LONGEST_REST_S)
        self._refusals[digest_of(base)] = Refusal(reason, count, rest_s, loop_time_s() + rest_s)
        self.failures += 1
        self._obligations.refused(f"its weights are not loaded: {reason}")
        log.error("the weights %s are refused: %s", _words(base), reason)

    def rest(self, base: BaseVersion | None) -> None:
        """Start the rest before the next try, if these were refused."""
        refusal = self._refusals.get(digest_of(base))
        if refusal is not None:
            refusal.until_s = loop_time_s() + refusal.rest_s

    def refused(self, base: BaseVersion | None) -> Refusal | None:
        """Return the refusal of these weights, if any."""
        return self._refusals.get(digest_of(base))

    def forgive(self, *, but: BaseVersion | None) -> None:
        """Drop the refusals of all weights but these, so that they are tried when requested."""
        kept = {d: one for d, one in self._refusals.items() if d == digest_of(but)}
        if self._refusals and not kept:
            self._obligations.refused("")
        self._refusals = kept

    async def note(self, base: BaseVersion | None) -> None:
        """Use these weights for the next load of a board without an engine."""
        await self._settle(base, good=False)

    async def _settle(self, base: BaseVersion | None, *, good: bool) -> None:
        """Note the board's current weights; ``good`` after they were loaded."""
        self._refusals.pop(digest_of(base), None)
        self.base = base
        if good:
            self._good = base
        self._obligations.loaded(base)
        await self._caching.reseal(digest_of(base))
        if self._marked is None or not same(base, self._marked[0]):
            self._marked = (base,)
            if base is None:
                await asyncio.to_thread(self._marker.remove)
            else:
                await asyncio.to_thread(self._marker.write, asdict(base))


class WeightSwap:
    """The base weights' changes. Use it from the board's loop."""

    def __init__(
        self,
        books: BoardBooks,
        slot: EngineSlot,
        queue: RunQueue,
        *,
        runner: RequestRunner,
        weights: BaseWeights,
        reapply_holds: Callable[[], None],
    ) -> None:
        """``reapply_holds`` applies ``hold`` to every generation."""
        self._settings, self._books, self._slot, self._queue = books.settings, books, slot, queue
        self._supervisor = slot.supervisor
        self._runner = runner
        self._weights = weights
        self._reapply_holds = reapply_holds
        self._in_flight = InFlight.PIN
        self.active = False  # other weights are due, or being loaded
        self._all = False  # everything is held for the load
        self._loading = False  # the engine task that loads them has the board
        self._moving: asyncio.Future[None] | None = None
        self._new_state = ChangeSignal()  # of the desired state

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
        if self._all or (self.active and not self._may_end(job)):
            return KEPT
        return None

    # -- without waiting --------------------------------------------------------------------------

    def update(self) -> tuple[int, int] | None:
        """Take a new desired state, or new files on the disk.

        Return how many generations will continue with other weights, and how many were aborted;
        None where nothing changes for them.
        """
        self._new_state.wake()
        target = self._board_target
        assert target is not None
        self._weights.forgive(but=target.base)
        was = self.active, self._in_flight
        if not self._loading:
            self.active = self._is_due() and self._supervisor.state not in _WITHOUT_ENGINE
            self._all = self._all and self.active
        if self.active:
            self._start()
        self._in_flight = target.rebase
        if was == (self.active, self._in_flight):
            return None
        begun = [job for job in self._books.jobs.values() if job.begun and not job.over]
        aborted = 0
        if self.active and target.rebase is InFlight.ABORT:
            aborted = len(begun)
            for job in begun:
                self._runner.abort(job, mute=True)
        # Interrupted generations lose their KV cache with the engine.
        doomed = self._all or (self.active and target.rebase is not InFlight.PIN)
        self._slot.live.doomed = doomed
        stops = [job for job in begun if self.hold(job) and not job.over]
        return len(stops) if self.active else 0, aborted

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
            elif not self._is_due(asleep=self._supervisor.asleep):
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
            waits_for.add(self._new_state.changed())
            await asyncio.wait(waits_for, return_when="FIRST_COMPLETED")

    def _hold_all(self) -> None:
        self.active = self._all = True
        self._slot.live.doomed = True
        self._reapply_holds()
        self._runner.pauses.release_board()  # a paused run must not keep the board

    def _release(self) -> None:
        self.active = self._all = False
        if self._supervisor.state is not BoardState.STOPPED:
            self._slot.live.doomed = False
            self._reapply_holds()

    async def _replace(self) -> None:
        """Replace the engine once the board is free, unless the desired state changes first."""
        if self._supervisor.state in _OUT_OF_ORDER:
            raise self._supervisor.failed()
        await self._queue.run_first(
            self._exchange, self._new_state, lambda: not self._loading and not self._is_due()
        )

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


def _base(record: Any) -> BaseVersion:
    """Parse a marker. Raises ``TypeError`` for a foreign one."""
    found = BaseVersion(**record)
    texts = (found.model, found.version, found.digest)
    if not all(isinstance(text, str) for text in texts) or not isinstance(found.size_bytes, int):
        raise TypeError("it has values of other types")
    return found


def _words(base: BaseVersion | None) -> str:
    return "of the model folder" if base is None else f"{base.title} ({base.digest[:12]})"
