"""The parts of a board that its modules share: its records, the engine slot and the run queue."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rkserve.board.rules.admission import Admission, Expire, Start
from rkserve.board.rules.generations import BoardCounters, GenerationEvent, VersionCounters
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.job import ChangeSignal, Job, loop_time_s
from rkserve.board.run.loaded_engine import LOAD_ADAPTER, AdapterNeed, LoadedEngine
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.errors import (
    AdapterBroken,
    BoardAsleep,
    NativeError,
    QueueFull,
    QueueTimeout,
    RkserveError,
)
from rkserve.core.messages import AdapterRef
from rkserve.core.request_record import current_request, log_for
from rkserve.models.adapters import Adapter, AdapterFolder, open_adapter

T = TypeVar("T")
log = logging.getLogger(__name__)

ENDED_REMEMBERED = 256


@dataclass(slots=True)
class BoardBooks:
    """The records of one board: settings, requests, counters, and the desired state.

    ``jobs`` are the requests with a consumer, by ticket. ``free_since_s`` is when the last run
    ended, ``asked_s`` when the last request came or left, both on the event loop's clock.
    """

    settings: BoardSettings
    obligations: Obligations
    counters: BoardCounters = field(default_factory=BoardCounters)
    versions: VersionCounters = field(default_factory=VersionCounters)
    jobs: dict[int, Job] = field(default_factory=dict)
    # Request ids of ended generations, the oldest first, for later actions on them.
    ended: dict[str, None] = field(default_factory=dict)
    free_since_s: float = 0.0
    asked_s: float = 0.0

    def leave(self, job: Job) -> None:
        """Take out a job whose consumer is gone, and remember its request id."""
        del self.jobs[job.ticket]
        self.asked_s = loop_time_s()
        self.ended[job.request.request_id] = None
        if len(self.ended) > ENDED_REMEMBERED:
            del self.ended[next(iter(self.ended))]


class EngineSlot:
    """The place of the board's engine, with its adapters. One engine follows another in it.

    Adapters are loaded from the board's folder of transferred ones, which have priority, and from
    the model folder.
    """

    def __init__(
        self,
        settings: BoardSettings,
        supervisor: EngineSupervisor,
        caching: PromptCaching,
        staged: AdapterFolder | None,
    ) -> None:
        self.supervisor, self._caching = supervisor, caching
        self._loading = asyncio.Lock()  # of adapters
        self._load_s = settings.adapter_load_s
        folder = settings.model_dir
        folders = (staged, None if folder is None else AdapterFolder.of_model(folder))
        self._folders = tuple(folder for folder in folders if folder is not None)

    @property
    def live(self) -> LoadedEngine:
        """The engine that is loaded now, or the last one."""
        live = self.supervisor.live
        if live is None:
            raise self.supervisor.failed()
        return live

    def of(self, job: Job) -> LoadedEngine:
        """The engine's entry in which the job has a run, or had the last one."""
        every = self.live.per_entry
        return every[job.entry if job.entry < len(every) else 0]

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one, in order, after its conversation was parked.

        Raises what a failing load raises.
        """
        await self._caching.park(self.live, renewing=True)
        await self.supervisor.renew(reason)

    async def find(self, ref: AdapterRef) -> Adapter:
        """Return the file of an adapter. Raises ``AdapterBroken``: it is missing or changed."""
        return await asyncio.to_thread(open_adapter, self._folders, ref)

    async def try_fresh(
        self, reason: str, trial: Callable[[LoadedEngine], Awaitable[bool]]
    ) -> None:
        """Replace the engine by one that passes a trial; see ``EngineSupervisor.try_fresh``."""
        await self._caching.park(self.live, renewing=True)
        await self.supervisor.try_fresh(reason, trial)

    async def with_adapter(self, ref: AdapterRef | None) -> LoadedEngine:
        """Return the engine with ``ref`` loaded under its key; None is the base model.

        Raises:
            AdapterBroken: the file is missing, changed, or refused by the runtime.
            EngineHung, EngineDied: as any call.
        """
        if ref is None:
            return self.live
        async with self._loading:  # another entry may be about to begin a run with it
            return await self._with_adapter(ref)

    async def _with_adapter(self, ref: AdapterRef) -> LoadedEngine:
        found = await self.find(ref)
        need = self.live.adapters.need(ref, found.size_bytes)
        if need is AdapterNeed.NOTHING:
            return self.live
        if need is AdapterNeed.ENGINE:
            await self.renew("the memory of adapters is reclaimed")
        engine = self.live
        await self.load(engine, ref, found)
        return engine

    async def load(self, engine: LoadedEngine, ref: AdapterRef, found: Adapter) -> None:
        """Load a file into an engine. Raises as ``with_adapter``."""
        assert found.path is not None  # on a board an adapter without a file is broken
        limit_s = self._load_s
        try:
            await engine.call(
                LOAD_ADAPTER,
                extra_s=limit_s,
                path=str(found.path),
                name=ref.key,
                scale=ref.scale,
            )
        except NativeError as exc:
            log.warning("adapter %s was refused (%s): %s", found.label, found.path, exc)
            engine.adapters.refused(ref, str(exc))
            raise AdapterBroken(found.label, f"the runtime refused it: {exc}") from None
        engine.adapters.loaded(ref, found.size_bytes)
        log.info("adapter %s is loaded (%d bytes)", found.label, found.size_bytes)


class EngineTask:
    """Work for the engine between runs that is no generation; it is queued like one.

    It must not begin while ``barred`` returns True.
    """

    def __init__(
        self, ticket: int, work: Callable[[], Awaitable[Any]], barred: Callable[[], bool]
    ) -> None:
        self.ticket = ticket
        self.barred = barred
        self._work = work
        self._request = current_request()  # the runs of all requests have a context of their own
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # The caller may be gone: an unread error must not be reported by the event loop.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def perform(self) -> None:
        """Do the work, unless it was withdrawn. Raises what the work raises."""
        if self.done.cancelled():
            return
        if self._request is not None:
            log_for(self._request)
        result = await self._work()
        if not self.done.done():
            self.done.set_result(result)

    def end(self, error: RkserveError) -> None:
        """Fail the task with this error."""
        if not self.done.done():
            self.done.set_exception(error)


class RunQueue:
    """The queue for the board's next run: requests, and engine tasks between them."""

    def __init__(
        self,
        books: BoardBooks,
        supervisor: EngineSupervisor,
        conduct: Callable[[Sequence[Job | EngineTask]], Coroutine[Any, Any, None]],
        release_board: Callable[[], None],
    ) -> None:
        """``conduct`` runs the work that admission starts; ``release_board`` makes a paused run
        release the board.
        """
        settings = books.settings
        self.admission = Admission(
            settings.queue_limit,
            settings.queue_timeout_s,
            batch=settings.n_batch,
            window_s=settings.batch_window_s if settings.n_batch > 1 else 0.0,
            hold_s=settings.pause_hold_s,
        )
        self.tickets = itertools.count(1)
        self.at_work: list[Job | EngineTask] = []  # the work of the current runs
        self._books, self._supervisor = books, supervisor
        self._conduct, self._release_board = conduct, release_board
        self._tasks: dict[int, EngineTask] = {}  # by ticket
        self._timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> bool:
        """True where a run could start now. Raises ``BoardFailed`` on a board out of order."""
        self._supervisor.open()
        return self._supervisor.ready and not self.admission.running

    def pump(self) -> None:
        """Carry out what admission decides now, and set a timer for its next decision."""
        if (live := self._supervisor.live) is not None:
            self.admission.joins = live.facts.entries > 1
        for decision in self.admission.decide(ready=self._supervisor.ready, now_s=loop_time_s()):
            if isinstance(decision, Start):
                work = [self._work(ticket) for ticket in decision.tickets]
                self.at_work += work
                self._supervisor.spawn(self._conduct(work))
            elif isinstance(decision, Expire):
                retry_after_s = self.admission.retry_after_s()
                self._work(decision.ticket).end(QueueTimeout(decision.waited_s, retry_after_s))
                self._tasks.pop(decision.ticket, None)
            else:
                self._release_board()
        self.stop_timer()
        event_s = self.admission.next_event_s()
        if event_s is not None and self._supervisor.state is not BoardState.STOPPED:
            self._timer = asyncio.get_running_loop().call_at(event_s, self.pump)

    def stop_timer(self) -> None:
        """Cancel the timer of the next decision."""
        if self._timer is not None:
            self._timer.cancel()

    def _work(self, ticket: int) -> Job | EngineTask:
        return self._tasks.get(ticket) or self._books.jobs[ticket]

    def finished(self, work: Sequence[Job | EngineTask], took_s: float) -> None:
        """Note that the run of ``work`` has ended, and start the next one."""
        self.at_work = [one for one in self.at_work if one not in work]
        self._tasks.pop(work[0].ticket, None)
        self.admission.finished(took_s, work[0].ticket)
        self.pump()

    def requeue(self, job: Job) -> None:
        """Queue the job again, ahead of requests that have not had a run yet."""
        if job.state is GenerationState.RESUMING:
            job.advance(GenerationEvent.REQUEUED)
        if job.ticket not in self._books.jobs:
            return  # its consumer is gone
        job.queued_s = loop_time_s()
        job.announce_queue(waits=True)
        # Not ahead of the requests that it released the board for, if they have not started yet.
        yields = job.released and job.ticket in self.admission.running
        self.admission.readmit(job.ticket, job.queued_s, job.key, yields=yields)
        self.pump()

    def schedule(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        first: bool,
        barred: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[T]:
        """Run ``work`` between two runs: ``first`` ahead of others, or in turn (QueueFull).

        It does not begin while ``barred`` returns True. Cancelling the future withdraws work that
        has not begun.
        """
        task = EngineTask(next(self.tickets), work, barred)
        key = ("errand", task.ticket)  # it shares no run
        self._tasks[task.ticket] = task
        try:
            if first:
                self.admission.readmit(task.ticket, loop_time_s(), key)
            else:
                self.admission.offer(task.ticket, loop_time_s(), key)
        except QueueFull:
            del self._tasks[task.ticket]
            raise
        task.done.add_done_callback(lambda _: self._withdraw(task))
        self.pump()
        return task.done

    async def run_first(
        self, work: Callable[[], Awaitable[None]], changes: ChangeSignal, undue: Callable[[], bool]
    ) -> bool:
        """Run ``work`` ahead of others, unless it is ``undue`` after one of the ``changes``.

        Return whether it ran, and raise what it raises.
        """
        done = self.schedule(work, first=True)
        try:
            while not done.done():
                await asyncio.wait({done, changes.changed()}, return_when="FIRST_COMPLETED")
                if undue():
                    return False
            done.result()
        finally:
            done.cancel()
        return True

    def _withdraw(self, task: EngineTask) -> None:
        if task.done.cancelled() and self.admission.withdraw(task.ticket):
            del self._tasks[task.ticket]
            self.pump()

    def is_barred(self, ticket: int) -> bool:
        """Return whether the work with this ticket must not begin."""
        job = self._books.jobs.get(ticket)
        if job is not None:
            return job.frozen
        task = self._tasks.get(ticket)
        return task is not None and task.barred()

    def require_awake(self) -> None:
        """Raise ``BoardFailed`` where the board is out of order, ``BoardAsleep`` where the model is
        unloaded, or about to be.
        """
        self._supervisor.open()
        if self._supervisor.asleep or self._books.obligations.unloads:
            reason = "its model is unloaded until it is woken up"
            raise BoardAsleep(self._books.settings.board_id, reason)

    def reject_tasks(self) -> None:
        """End the queued engine tasks with ``BoardAsleep``: there is no engine any more."""
        for ticket, task in list(self._tasks.items()):
            if self.admission.withdraw(ticket):
                del self._tasks[ticket]
                reason = "the board was put to sleep meanwhile"
                task.end(BoardAsleep(self._books.settings.board_id, reason))

    def fail_tasks(self) -> None:
        """End all engine tasks with the failure of the board."""
        for ticket, task in self._tasks.items():
            self.admission.withdraw(ticket)
            task.end(self._supervisor.failed())
