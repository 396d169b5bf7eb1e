"""The engine behind a board: load, supervision, shutdown and recovery.

It owns the state of the board, whose transitions are a table. The effects on requests are the
board's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from enum import Enum
from typing import Any, Protocol

from rkserve.board.engine.protocol import Engine, EngineFacts, UnloadedEngine, end_kind
from rkserve.board.rules.hang_limits import EngineSpeeds, StoppedTime
from rkserve.board.run.job import loop_time_s
from rkserve.board.run.loaded_engine import SECOND_LOOK_S, AdapterTable, LoadedEngine
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import BoardState
from rkserve.core.errors import (
    BoardOutOfOrder,
    EngineDied,
    EngineHung,
    LoadFailed,
    Misuse,
    RkserveError,
)
from rkserve.core.request_record import apart

log = logging.getLogger(__name__)


class BoardEvent(Enum):
    """An event of a board."""

    LOADED = "the model is loaded"
    LOAD_FAILED = "the model cannot be loaded"
    ENGINE_DIED = "the engine process ended by itself"
    WATCHDOG = "the engine cannot be used any more"
    ENGINE_ENDED = "that engine was ended"
    RENEW = "the engine is replaced in order"
    SLEEP = "its model is unloaded"
    WAKE = "its model is wanted again"
    TOO_MANY_CRASHES = "too many crashes in a short time"
    COOLED = "the quarantine is over"
    BROKE = "a part of the board ended by an internal error"
    STOP = "the replica shuts down"


_S, _E = BoardState, BoardEvent

TRANSITIONS: dict[tuple[BoardState, BoardEvent], BoardState] = {
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.LOADING, _E.LOAD_FAILED): _S.FAILED,
    (_S.LOADING, _E.STOP): _S.STOPPED,
    # It was asleep when its replica ended, and was not woken since.
    (_S.LOADING, _E.SLEEP): _S.ASLEEP,
    (_S.READY, _E.ENGINE_DIED): _S.RECOVERING,
    (_S.READY, _E.WATCHDOG): _S.HUNG,
    # Only a new handle forgets adapters: planned, between two runs, and no crash.
    (_S.READY, _E.RENEW): _S.RECOVERING,
    (_S.READY, _E.SLEEP): _S.ASLEEP,
    (_S.READY, _E.STOP): _S.STOPPED,
    # Health fails while hung; an engine that not even SIGKILL ends keeps the board here until
    # the replica is replaced.
    (_S.HUNG, _E.ENGINE_ENDED): _S.RECOVERING,
    (_S.HUNG, _E.STOP): _S.STOPPED,
    (_S.RECOVERING, _E.LOADED): _S.READY,
    (_S.RECOVERING, _E.LOAD_FAILED): _S.FAILED,
    (_S.RECOVERING, _E.TOO_MANY_CRASHES): _S.QUARANTINED,
    # Without an engine there is nothing to unload.
    (_S.RECOVERING, _E.SLEEP): _S.ASLEEP,
    # An engine on trial that not even SIGKILL ends.
    (_S.RECOVERING, _E.WATCHDOG): _S.HUNG,
    (_S.RECOVERING, _E.STOP): _S.STOPPED,
    (_S.QUARANTINED, _E.COOLED): _S.RECOVERING,
    (_S.QUARANTINED, _E.SLEEP): _S.ASLEEP,
    (_S.QUARANTINED, _E.STOP): _S.STOPPED,
    (_S.ASLEEP, _E.WAKE): _S.LOADING,
    (_S.ASLEEP, _E.STOP): _S.STOPPED,
    (_S.FAILED, _E.STOP): _S.STOPPED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,
    # A bug of rkserve must not leave a board that looks healthy and never answers: health fails,
    # and the replica is replaced.
    (_S.LOADING, _E.BROKE): _S.FAILED,
    (_S.ASLEEP, _E.BROKE): _S.FAILED,
    (_S.READY, _E.BROKE): _S.FAILED,
    (_S.HUNG, _E.BROKE): _S.FAILED,
    (_S.RECOVERING, _E.BROKE): _S.FAILED,
    (_S.QUARANTINED, _E.BROKE): _S.FAILED,
    (_S.FAILED, _E.BROKE): _S.FAILED,
    (_S.STOPPED, _E.BROKE): _S.STOPPED,
}

# Health fails here: a fresh replica may help where the board cannot help itself. Not so in
# quarantine, which ends by itself: a fresh replica would forget why the board rests.
SICK = frozenset({BoardState.HUNG, BoardState.FAILED})
# Requests are accepted here, and wait where it is not ready. The desired state decides whether a
# sleeping board accepts any; one that loads for the first time has no engine facts yet, see
# ``EngineSupervisor.open``.
OPEN = frozenset({BoardState.READY, BoardState.RECOVERING, BoardState.ASLEEP, BoardState.LOADING})


def advance(state: BoardState, event: BoardEvent) -> BoardState:
    """Return the state after ``event``.

    Raises:
        Misuse: the table does not list the event in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Misuse(f"'{event.value}' cannot happen to a board that is {state.value}") from None


class CrashLog:
    """Counts crashes within a sliding window."""

    def __init__(self, limit: int, window_s: float) -> None:
        self._limit, self._window_s = limit, window_s
        self._times: deque[float] = deque()

    def crashed(self, now_s: float) -> bool:
        """Record a crash; True where the limit is reached within the window."""
        self._times.append(now_s)
        while self._times[0] <= now_s - self._window_s:
            self._times.popleft()
        return len(self._times) >= self._limit

    def forgive(self) -> None:
        """Discount the last crash."""
        if self._times:
            self._times.pop()


class EngineUsers(Protocol):
    """The user of the engine: the board with its requests."""

    def lose(self, error: RkserveError) -> None:
        """Fail the work that has the engine."""

    def fail_all(self, *, spare_paused: bool = False) -> None:
        """Fail all waiting work; a paused request may be spared."""

    def pump(self) -> None:
        """Start work: the engine is ready again."""


class EngineSupervisor:
    """One board's engine, from the first to the last of its processes."""

    def __init__(
        self,
        settings: BoardSettings,
        start_engine: Callable[[], Awaitable[Engine]],
        tenants: EngineUsers,
    ) -> None:
        self._settings = settings
        self._board_id = settings.board_id
        self._start_engine = start_engine
        self._tenants = tenants
        self.state = BoardState.LOADING
        self.reason = ""  # why the board is not ready
        self.last_recovery = ""  # why its engine was last replaced
        self.starts = 0
        self.crashes: Counter[str] = Counter()  # engines that ended out of order, by kind
        self.renewals = 0  # the part of them that replaced a healthy engine
        self.live: LoadedEngine | None = None  # the last loaded engine, even after its end
        self.loaded_s = 0.0  # the time of that load
        # Of all engines: a fresh one is as fast as the last, and is given up as quickly.
        self._speeds = EngineSpeeds(settings.patience)
        self._reason_awake = ""  # ``reason`` before the board slept
        self._recovery: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Future[None] | None = None
        self._crashes = CrashLog(settings.crash_limit, settings.crash_window_s)
        self._forgiven = asyncio.Event()  # set where the current or next loss does not count
        self._tasks: set[asyncio.Task[None]] = set()

    # -- state ------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """True where a run may start. An engine's end is noticed one turn of the loop later."""
        return self.state is BoardState.READY and self.live is not None and self.live.alive

    @property
    def asleep(self) -> bool:
        """True while the model is unloaded."""
        return self.state is BoardState.ASLEEP

    def open(self) -> LoadedEngine:
        """Return the engine of a board that accepts requests. Raises ``BoardOutOfOrder``."""
        if self.state not in OPEN or self.live is None:
            raise self.failed()
        return self.live

    def failed(self) -> BoardOutOfOrder:
        """Return the error of requests that cannot be served."""
        return BoardOutOfOrder(self._board_id, f"{self.state.value}: {self.reason}")

    # -- start, renew, sleep, stop ----------------------------------------------------------------

    async def start(self, asleep: EngineFacts | None = None) -> None:
        """Load the model. Raises ``RkserveError`` or ``OSError``; the board is then ``failed``.

        With the facts of an unloaded engine the board stays asleep instead.
        """
        if asleep is not None:
            self._advance(BoardEvent.SLEEP, "it was asleep when its replica ended")
            self.live, self.loaded_s = self._unloaded(asleep), loop_time_s()
        else:
            try:
                await self._load()
            except Exception as exc:
                if self.state is BoardState.LOADING:
                    self._advance(BoardEvent.LOAD_FAILED, str(exc))
                raise
        self.spawn(self._watch_silence())

    async def stop(self) -> None:
        """End the engine, in order where possible."""
        hung, live = self.state is BoardState.HUNG, self.live
        self._advance(BoardEvent.STOP, "the replica shuts down")
        self._tenants.fail_all()
        for one in () if live is None else live.per_entry:
            one.abort_running()  # an engine in a run cannot be stopped in order
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if live is not None and live.alive:
            await (live.engine.kill() if hung else live.engine.stop())

    def check(self) -> None:
        """Raise ``BoardFailed`` with the reason where the board cannot recover by itself."""
        if self.state in SICK:
            raise self.failed()

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one, in order. Raises the errors of a failing load."""
        await self._let_go(reason)
        await self._load_again()
        self.renewals += 1

    async def _let_go(self, reason: str) -> None:
        """End the engine of a ready board in order."""
        engine = self.open().engine
        if engine.died.done():
            raise EngineDied(self._board_id, engine.died.result())
        if self.state is not BoardState.READY:
            raise self.failed()
        self._advance(BoardEvent.RENEW, reason)
        await engine.stop()

    async def try_fresh(
        self, reason: str, trial: Callable[[LoadedEngine], Awaitable[bool]]
    ) -> None:
        """Replace the engine by a fresh one that passes a trial before it serves.

        One that does not is ended, and another one replaces it. Only one has its model loaded at
        any time, so that no more memory is needed than for serving. Raises as ``renew`` does; the
        trial must not raise ``RkserveError``.
        """
        await self._let_go(reason)
        engine = await self._start_engine_again()
        tried = self._with_engine(engine)
        passed = False
        try:
            passed = await trial(tried)
        finally:
            if not passed or engine.died.done():
                passed = False
                ended = await engine.kill()
                if not ended:
                    self._survived("the engine of a trial cannot be ended")
                elif self._awaits_engine:
                    await self._load_again()
        if passed:
            await self._install_again(engine, tried)
        self.renewals += 1

    def _survived(self, reason: str) -> None:
        """Wait for another replica: there is no memory for a second engine beside one that cannot
        be ended. Raises ``BoardOutOfOrder``.
        """
        if self._awaits_engine:
            self._advance(BoardEvent.WATCHDOG, reason)
            self._tenants.fail_all()
        raise self.failed()

    @property
    def recovering(self) -> bool:
        """True during the recovery from a crash, while there is no engine."""
        return self._recovery is not None and not self._recovery.done()

    async def sleep(self, reason: str) -> None:
        """End the engine in order, or cancel a load.

        Call it while the caller has the board, or ``recovering``. Raises ``BoardOutOfOrder``.
        """
        if self._recovery is not None and not self._recovery.done():
            self._recovery.cancel()
            await asyncio.wait({self._recovery})
        live = self.live
        if live is None or self.state in (BoardState.HUNG, BoardState.FAILED, BoardState.STOPPED):
            raise self.failed()
        self._reason_awake = self.reason
        self._advance(BoardEvent.SLEEP, reason)
        if live.alive:
            await live.engine.stop()
        self.live = self._unloaded(live.facts)

    async def wake(self) -> None:
        """Load the model again. Raises the errors of a failing load."""
        self._advance(BoardEvent.WAKE, self._reason_awake)
        await self._load_again()
        self._tenants.pump()

    def _unloaded(self, facts: EngineFacts) -> LoadedEngine:
        return self._with_engine(UnloadedEngine(self._board_id, facts))

    def _with_engine(self, engine: Engine) -> LoadedEngine:
        settings = self._settings
        adapters = AdapterTable(settings.max_adapters, settings.max_adapter_bytes)
        return LoadedEngine(self._board_id, engine, self._speeds, adapters)

    async def _load_again(self) -> None:
        """Load the model. Where that fails, all waiting work fails; raises ``BoardOutOfOrder``."""
        engine = await self._start_engine_again()
        await self._install_again(engine, self._with_engine(engine))

    async def _start_engine_again(self) -> Engine:
        try:
            return await self._start_engine()
        except (RkserveError, OSError) as exc:
            raise self._not_loaded(exc) from exc

    async def _install_again(self, engine: Engine, live: LoadedEngine) -> None:
        try:
            await self._install(engine, live)
        except (RkserveError, OSError) as exc:
            raise self._not_loaded(exc) from exc

    def _not_loaded(self, exc: Exception) -> BoardOutOfOrder:
        if self._awaits_engine:
            self._advance(BoardEvent.LOAD_FAILED, str(exc))
            self._tenants.fail_all()
        return self.failed()

    @property
    def _awaits_engine(self) -> bool:
        return self.state in (BoardState.LOADING, BoardState.RECOVERING)

    async def _load(self) -> None:
        engine = await self._start_engine()
        await self._install(engine, self._with_engine(engine))

    async def _install(self, engine: Engine, live: LoadedEngine) -> None:
        """Serve with a loaded engine."""
        if not self._awaits_engine:  # it was stopped, put to sleep or failed during the load
            await engine.stop()
            raise self.failed()
        settings = self._settings
        if engine.facts.n_batch != settings.n_batch:
            await engine.stop()
            raise LoadFailed(
                f"the engine takes {engine.facts.n_batch} inputs at once, not {settings.n_batch}"
            )
        self.starts += 1
        self.live = live
        if self.live.quirk("eos_uint32_misread") and not settings.eos_ids:
            log.warning(
                "board %s: RKLLM %s may read a wrong end token from the model, and its folder "
                "names none: where answers run to their limit, set eos_token_ids in rkserve.yaml",
                self._board_id,
                engine.facts.release,
            )
        self.loaded_s = loop_time_s()
        engine.died.add_done_callback(self._died)
        self.last_recovery = self.reason or self.last_recovery
        self._advance(BoardEvent.LOADED, "")
        log.info(
            "board %s serves %s on RKLLM %s, loaded in %.1f s",
            self._board_id,
            self._settings.model,
            engine.facts.release,
            engine.facts.load_s,
        )

    # -- failures and recovery --------------------------------------------------------------------

    def _died(self, died: asyncio.Future[str]) -> None:
        # An engine that was renewed does not count: another may be ready in its place.
        current = self.live is not None and self.live.engine.died is died
        if self.state is BoardState.READY and current:
            self.crashes[end_kind(died.result())] += 1
            self._advance(BoardEvent.ENGINE_DIED, died.result())
            self._recovery = self.spawn(self._recover())

    async def give_up(self, reason: str, kind: str = "hung") -> None:
        """Give up a hung engine: fail its work, try an abort, then end it.

        ``kind`` is the word under which it is counted.
        """
        self._tenants.lose(EngineHung(self._board_id, reason))
        if self.state is not BoardState.READY or self.live is None:
            return  # it is being ended already, or has ended
        self.crashes[kind] += 1
        self._advance(BoardEvent.WATCHDOG, reason)
        self._giving_up = asyncio.get_running_loop().create_future()
        try:
            await self._kill(self.live, reason)
        finally:
            self._giving_up.set_result(None)

    async def _kill(self, live: LoadedEngine, reason: str) -> None:
        engine = live.engine
        if live.last_abort():
            await asyncio.wait({engine.died}, timeout=self._settings.patience.abort_s)
        if await engine.kill():
            self._advance(BoardEvent.ENGINE_ENDED, reason)
            self._recovery = self.spawn(self._recover())
        else:
            self._tenants.fail_all()

    def forgive(self) -> None:
        """Discount the last loss of an engine, which a request caused; a quarantine for it ends."""
        if self.state is BoardState.HUNG:
            self._forgiven.set()  # the loss is not counted yet
            return
        self._crashes.forgive()
        if self.state is BoardState.QUARANTINED:
            self._forgiven.set()

    async def end_quarantine(self) -> None:
        """Load the model now, although engines died too quickly. Raises ``BoardOutOfOrder``."""
        self.forgive()
        if self._recovery is not None:
            await asyncio.wait({self._recovery})
        if self.state is not BoardState.READY:
            raise self.failed()

    async def gave_up(self) -> None:
        """Return once an engine that is being given up has ended, or cannot be ended."""
        if self._giving_up is not None:
            await asyncio.shield(self._giving_up)

    async def _recover(self) -> None:
        """Start a fresh engine, after a quarantine where engines died too quickly."""
        if not self._forgiven.is_set() and self._crashes.crashed(loop_time_s()):
            self._advance(BoardEvent.TOO_MANY_CRASHES, self.reason)
            self._tenants.fail_all(spare_paused=True)
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._forgiven.wait(), self._settings.quarantine_s)
            self._advance(BoardEvent.COOLED, self.reason)
        self._forgiven.clear()
        try:
            await self._load_again()
        except BoardOutOfOrder:
            return  # all waiting work has failed
        self._tenants.pump()

    async def _watch_silence(self) -> None:
        """Give up an engine without a sign of life, also between runs."""
        limit_s, stopped = self._settings.silence_timeout_s, StoppedTime()
        while True:
            stopped.due(loop_time_s() + limit_s / 4)
            await asyncio.sleep(limit_s / 4)
            suspect = self.live
            # With this process the engine may have stood still, too.
            if not self._silent(suspect, stopped.look(loop_time_s())):
                continue
            await asyncio.sleep(SECOND_LOOK_S)
            if self.live is suspect and self._silent(suspect):
                reason = f"the engine gave no sign of life for {limit_s:g} s"
                await self.give_up(reason, "silent")

    def _silent(self, live: LoadedEngine | None, lost_s: float = 0.0) -> bool:
        if self.state is not BoardState.READY or live is None:
            return False
        return live.engine.silent_s() - lost_s >= self._settings.silence_timeout_s

    def _advance(self, event: BoardEvent, reason: str) -> None:
        before, self.state = self.state, advance(self.state, event)
        self.reason = reason
        if self.state in SICK or event in (BoardEvent.ENGINE_DIED, BoardEvent.TOO_MANY_CRASHES):
            log.error("board %s: %s (%s)", self._board_id, event.value, reason)
        elif before is not self.state:
            log.info("board %s is %s", self._board_id, self.state.value)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task until the board stops; an exception in it is a bug of rkserve."""
        task = apart(asyncio.create_task, work)  # it may outlive the request that needs it
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (exc := task.exception()) is None:
            return
        log.critical("board %s: an internal error", self._board_id, exc_info=exc)
        self._advance(BoardEvent.BROKE, f"internal error: {exc!r}")
        self._tenants.fail_all()
