"""One board: requests in, events out, one engine kept alive behind them.

The only glue of this room. Policy is elsewhere (admission, kv, watchdog, lifecycle, generation),
and so is a run on a loaded engine (live). It knows neither Ray nor cffi nor HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, field

from rkserve.board.admission import Admission, Expire, Start
from rkserve.board.engine import Engine, EngineFacts, RunEnded
from rkserve.board.figures import Figures, measure
from rkserve.board.generation import Generation
from rkserve.board.job import Job
from rkserve.board.lifecycle import OPEN, SICK, BoardEvent, CrashLog, advance
from rkserve.board.live import SECOND_LOOK_S, LiveEngine
from rkserve.board.watchdog import Patience
from rkserve.errors import (
    BoardFailed,
    BoardOutOfOrder,
    ContextOverflow,
    EngineHung,
    QueueTimeout,
    RkserveError,
    RunFailed,
    SamplingFixed,
)
from rkserve.messages import (
    Accepted,
    BoardReport,
    BoardState,
    Event,
    Finished,
    GenerateRequest,
    Sampling,
)

log = logging.getLogger(__name__)

# A handle that fails this many runs in a row is not trusted to heal by itself.
RUNS_FAILED_LIMIT = 3


@dataclass(frozen=True, slots=True)
class BoardSettings:
    """What one board is. Times in seconds, lengths in tokens.

    ``sampling`` is what the model is loaded with: on 1.2.x every request gets it.
    """

    board_id: str
    model: str
    context_len: int
    eos_ids: frozenset[int]
    sampling: Sampling = field(default_factory=Sampling)
    platform: str = ""
    node: str = ""
    library: str = ""
    queue_limit: int = 16
    queue_timeout_s: float = 300.0
    patience: Patience = field(default_factory=Patience)
    crash_limit: int = 3
    crash_window_s: float = 60.0
    quarantine_s: float = 60.0
    silence_timeout_s: float = 10.0


class Board:
    """One NPU behind a bounded queue. Use it from one event loop."""

    def __init__(
        self, settings: BoardSettings, start_engine: Callable[[], Awaitable[Engine]]
    ) -> None:
        self._settings = settings
        self._start_engine = start_engine
        self._state = BoardState.LOADING
        self._reason = ""
        self._live: LiveEngine | None = None  # the last one that was loaded, also when it ended
        self._admission = Admission(settings.queue_limit, settings.queue_timeout_s)
        self._crashes = CrashLog(settings.crash_limit, settings.crash_window_s)
        self._jobs: dict[int, Job] = {}  # by ticket, as long as someone listens
        self._tickets = itertools.count(1)
        self._figures = Figures()
        self._failed_in_a_row = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ``RkserveError`` or ``OSError``; the board is then ``failed``."""
        try:
            await self._load()
        except Exception as exc:
            if self._state is BoardState.LOADING:
                self._advance(BoardEvent.LOAD_FAILED, str(exc))
            raise
        self._spawn(self._watch_silence())

    async def stop(self) -> None:
        """End the engine and everything that waits."""
        hung, live = self._state is BoardState.HUNG, self._live
        self._advance(BoardEvent.STOP, "the replica shuts down")
        self._fail_all()
        if self._expiry is not None:
            self._expiry.cancel()
        if live is not None and self._admission.running is not None:
            live.engine.abort(self._admission.running)  # in a run it could not end in order
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if live is None or not live.alive:
            return
        if hung:
            await live.engine.kill()
        else:
            await live.engine.stop()

    def check(self) -> None:
        """Raise ``BoardFailed`` with the reason while the board cannot help itself."""
        if self._state in SICK:
            raise self._failed()

    def report(self) -> BoardReport:
        """Return what the board is doing and what it has done."""
        settings, live = self._settings, self._live
        return BoardReport(
            board_id=settings.board_id,
            model=settings.model,
            state=self._state,
            reason=self._reason,
            release=live.facts.release if live is not None else "",
            platform=settings.platform,
            node=settings.node,
            pid=os.getpid(),
            engine_pid=live.engine.pid if live is not None else 0,
            context_len=settings.context_len,
            kv_positions=live.kv_positions if live is not None else 0,
            running=int(self._admission.running is not None),
            queued=self._admission.queued,
            queue_limit=settings.queue_limit,
            library=settings.library,
            **asdict(self._figures),
        )

    # -- requests -----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield ``Accepted``, deltas and ``Finished``. Closing the generator aborts the run.

        Raises:
            QueueFull, QueueTimeout: the board has no place, or had none in time.
            SamplingFixed, ContextOverflow: the board cannot serve this request as it stands.
            BoardFailed: the board is out of order, or its engine was lost during the answer.
        """
        live = self._live
        if self._state not in OPEN or live is None:
            raise self._failed()
        ignored = self._ignored_sampling(request, live.facts)
        if len(request.prompt_ids) + request.max_tokens > self._settings.context_len:
            raise ContextOverflow(len(request.prompt_ids), self._settings.context_len)
        generation = Generation(
            request, self._settings.eos_ids, runtime_counts=live.facts.per_run_sampling
        )
        job = Job(next(self._tickets), generation, _now_s())
        ahead = self._admission.offer(job.ticket, _now_s())
        self._jobs[job.ticket] = job
        self._figures.requests += 1
        try:
            self._pump()
            event: Event = Accepted(self._settings.board_id, live.facts.release, ahead, ignored)
            yield event
            while not isinstance(event, Finished):
                event = await job.next_event()
                yield event
        finally:
            self._leave(job)

    def _ignored_sampling(self, request: GenerateRequest, facts: EngineFacts) -> tuple[str, ...]:
        if facts.per_run_sampling:
            return ()
        loaded = self._settings.sampling
        ignored = tuple(
            name
            for name in request.sampling_asked
            if getattr(request.sampling, name) != getattr(loaded, name)
        )
        if ignored and request.strict_sampling:
            raise SamplingFixed(facts.release, ignored)
        return ignored

    def _leave(self, job: Job) -> None:
        """The consumer is gone, after the last event or before it."""
        del self._jobs[job.ticket]
        job.abandoned = True
        if job.outcome is None and not self._admission.withdraw(job.ticket):
            self._figures.aborted += 1
            if self._live is not None:
                self._live.abort(job)

    def _pump(self) -> None:
        """Do what admission decides now, and come back when the next request expires."""
        # The news of an engine's end takes a turn of the loop: until then nothing starts on it.
        alive = self._live is not None and self._live.alive
        ready = self._state is BoardState.READY and alive
        for decision in self._admission.decide(ready=ready, now_s=_now_s()):
            match decision:
                case Start(ticket):
                    self._spawn(self._conduct(self._jobs[ticket]))
                case Expire(ticket, waited_s):
                    retry_after_s = self._admission.retry_after_s()
                    self._jobs[ticket].end(QueueTimeout(waited_s, retry_after_s))
        if self._expiry is not None:
            self._expiry.cancel()
        expiry_s = self._admission.next_expiry_s()
        if expiry_s is not None:
            self._expiry = asyncio.get_running_loop().call_at(expiry_s, self._pump)

    # -- one run ------------------------------------------------------------------------------

    async def _conduct(self, job: Job) -> None:
        """Run one job to its end, whoever still listens, then let the next one start."""
        job.started_s = _now_s()
        try:
            if not job.abandoned:  # the client may leave between the decision and this task
                await self._run(job)
        except EngineHung as exc:
            self._fail(job, exc)
            await self._give_up(exc.reason, job)
        except RunFailed as exc:
            self._fail(job, exc)
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= RUNS_FAILED_LIMIT:
                await self._give_up(
                    f"{self._failed_in_a_row} runs in a row failed: {exc.reason}", None
                )
        except RkserveError as exc:
            self._fail(job, exc)
        except Exception as exc:
            # The run may still be going on in the engine, and nobody would hear of its end.
            log.exception("board %s: a run ended by an internal error", self._settings.board_id)
            reason = f"internal error: {exc!r}"
            self._fail(job, BoardFailed(self._settings.board_id, reason))
            await self._give_up(reason, job)
        finally:
            self._admission.finished(_now_s() - job.started_s)
            self._pump()

    async def _run(self, job: Job) -> None:
        assert self._live is not None  # only a ready board starts a job
        ended = await self._live.run(job)
        if ended.end is not None or not job.abandoned:  # else the abort overtook the run
            job.end(self._finish(job, ended))
            self._failed_in_a_row = 0

    def _fail(self, job: Job, error: RkserveError) -> None:
        self._figures.failed += 1
        job.end(error)

    def _finish(self, job: Job, ended: RunEnded) -> Finished:
        """Settle the figures of a run that returned. Raises ``RunFailed``."""
        if not ended.in_order:
            reason = ended.error or f"the runtime returned {ended.return_code}"
            raise RunFailed(self._settings.board_id, reason)
        usage, timings = measure(job, ended)
        self._figures.count(usage, timings)
        used = usage.prompt_tokens + usage.completion_tokens
        reason = job.generation.ended(context_full=used >= self._settings.context_len)
        return Finished(reason, usage, timings)

    # -- when the engine fails ----------------------------------------------------------------

    async def _load(self) -> None:
        engine = await self._start_engine()
        if self._state is BoardState.STOPPED:  # stop() came while the model was being loaded
            await engine.stop()
            raise self._failed()
        self._figures.engine_starts += 1
        self._live = LiveEngine(self._settings.board_id, engine, self._settings.patience)
        engine.died.add_done_callback(self._died)
        self._advance(BoardEvent.LOADED, self._reason)
        log.info(
            "board %s serves %s on RKLLM %s, loaded in %.1f s",
            self._settings.board_id,
            self._settings.model,
            engine.facts.release,
            engine.facts.load_s,
        )

    def _died(self, died: asyncio.Future[str]) -> None:
        if self._state is BoardState.READY:
            self._advance(BoardEvent.ENGINE_DIED, died.result())
            self._spawn(self._recover())

    async def _give_up(self, reason: str, job: Job | None) -> None:
        """The engine cannot be used any more: tell the client, try an abort, then end it."""
        if self._state is not BoardState.READY or self._live is None:
            return  # it is being ended already, or has ended by itself
        self._advance(BoardEvent.WATCHDOG, reason)
        engine = self._live.engine
        if job is not None:
            job.end(EngineHung(self._settings.board_id, reason))
            if not job.stopping:
                engine.abort(job.ticket)
                await asyncio.wait({engine.died}, timeout=self._settings.patience.abort_s)
        if await engine.kill():
            self._failed_in_a_row = 0
            self._advance(BoardEvent.ENGINE_ENDED, reason)
            self._spawn(self._recover())
        else:
            self._fail_all()

    async def _recover(self) -> None:
        """Start a fresh engine, after a quarantine where the last ones died too quickly."""
        if self._crashes.crashed(_now_s()):
            self._advance(BoardEvent.TOO_MANY_CRASHES, self._reason)
            self._fail_all()
            await asyncio.sleep(self._settings.quarantine_s)
            self._advance(BoardEvent.COOLED, self._reason)
        try:
            await self._load()
        except (RkserveError, OSError) as exc:
            self._advance(BoardEvent.LOAD_FAILED, str(exc))
            self._fail_all()
        else:
            self._pump()

    async def _watch_silence(self) -> None:
        """An engine that sends no sign of life is hung, also without a run."""
        limit_s = self._settings.silence_timeout_s
        while True:
            await asyncio.sleep(limit_s / 4)
            suspect = self._live
            if not self._silent(suspect):
                continue
            await asyncio.sleep(SECOND_LOOK_S)
            if self._live is suspect and self._silent(suspect):
                running = self._jobs.get(self._admission.running or 0)
                reason = f"the engine gave no sign of life for {limit_s:g} s"
                await self._give_up(reason, running)

    def _silent(self, live: LiveEngine | None) -> bool:
        if self._state is not BoardState.READY or live is None:
            return False
        return live.engine.silent_s() >= self._settings.silence_timeout_s

    def _failed(self) -> BoardOutOfOrder:
        return BoardOutOfOrder(self._settings.board_id, f"{self._state.value}: {self._reason}")

    def _fail_all(self) -> None:
        """Nobody who waits is served here: say so now, while another board may still do it."""
        for ticket, job in self._jobs.items():
            self._admission.withdraw(ticket)
            job.end(self._failed())

    def _advance(self, event: BoardEvent, reason: str) -> None:
        before, self._state = self._state, advance(self._state, event)
        self._reason = reason
        if self._state in SICK or event in (BoardEvent.ENGINE_DIED, BoardEvent.TOO_MANY_CRASHES):
            log.error("board %s: %s (%s)", self._settings.board_id, event.value, reason)
        elif before is not self._state:
            log.info("board %s is %s", self._settings.board_id, self._state.value)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (exc := task.exception()) is None:
            return
        log.critical("board %s: an internal error", self._settings.board_id, exc_info=exc)
        self._advance(BoardEvent.BROKE, f"internal error: {exc!r}")
        self._fail_all()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
