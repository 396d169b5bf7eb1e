"""Sleep and wake of one board: its engine is ended, or loaded again.

A sleep is a hold, carried out by ``adopt``: once it holds, no token is emitted, and this module
handles the engine and its KV contexts. One change is made at a time, following the latest desired
state: a load is never cut short, and an outdated unload is not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rkserve.board.answer.transcript import Ids
from rkserve.board.engine.protocol import EngineFacts
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.rules.obligations import adapter_name
from rkserve.board.run.job import ChangeSignal, Job
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.paused import PausedRequests
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.core.block_hashes import common_prefix
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import PauseMode, SleepLevel
from rkserve.core.errors import BoardOutOfOrder, EngineDied, EngineHung, RkserveError
from rkserve.core.files import JsonRecord

log = logging.getLogger(__name__)

# Waiting does not help here: the replica has to be replaced.
_OUT_OF_ORDER = (BoardState.HUNG, BoardState.FAILED, BoardState.STOPPED)
# Number of tries after engines that died while being put to sleep.
TRIES = 3


@dataclass(frozen=True, slots=True)
class SleptContext:
    """A KV context that existed when the board was put to sleep."""

    ids: Ids
    origin: str | None


@dataclass(frozen=True, slots=True)
class SleepResult:
    """The level of the sleep, and the numbers of kept and dropped tokens; see ``Adoption``."""

    level: SleepLevel | None = None
    kept_tokens: int = 0
    dropped_tokens: int = 0


class BoardSleep:
    """Sleep and wake of one board. Use it from the board's loop."""

    def __init__(
        self,
        books: BoardBooks,
        slot: EngineSlot,
        queue: RunQueue,
        *,
        caching: PromptCaching,
        embedding: EmbeddingService,
        pauses: PausedRequests,
    ) -> None:
        self._settings, self._books, self._slot, self._queue = books.settings, books, slot, queue
        self._caching, self._embedding, self._pauses = caching, embedding, pauses
        self._supervisor = slot.supervisor
        self._mark = JsonRecord(
            books.settings.asleep_file
        )  # of a sleeping board, for its next replica
        # The contexts in memory when it was put to sleep.
        self._contexts: tuple[SleptContext, ...] = ()
        # Jobs stopped by the last desired state; None: noted already.
        self._stopped: list[Job] | None = None
        self._dropped = False  # parked conversations were removed
        self._failed = False  # a wake or a sleep failed
        self._ending = False  # the engine task that ends the engine has the board
        self._moving: asyncio.Future[None] | None = None
        self._new_state = ChangeSignal()  # of the desired state

    # -- state ------------------------------------------------------------------------------------

    @property
    def level(self) -> SleepLevel | None:
        """The level of the current sleep; None where the board is awake, or about to be."""
        wanted = self._wanted
        if self._supervisor.asleep:
            return wanted if self._due and wanted is not None else SleepLevel.UNLOADED
        return wanted if wanted is SleepLevel.PAUSED else None

    async def unloaded_facts(self) -> EngineFacts | None:
        """Return the facts of the unloaded engine where the previous replica was asleep.

        Only for a governed board, which is woken by the desired state.
        """
        if not self._settings.governed:
            return None
        facts = await asyncio.to_thread(self._mark.read, read_facts)
        # The configuration may have changed since.
        if facts is None:
            return None
        n_batch = self._settings.n_batch
        return replace(facts, n_batch=n_batch, entries=n_batch if facts.entries > 1 else 1)

    # -- desired state ----------------------------------------------------------------------------

    def update(self, stopped: Iterable[Job]) -> None:
        """Take a new desired state, which stopped these jobs."""
        self._stopped = [*(self._stopped or ()), *stopped]
        self._new_state.wake()
        if self._supervisor.asleep and self._awaits_jobs:
            self._start()  # these jobs have to end first, and need an engine

    async def settle(self) -> None:
        """Wait until the engine is loaded, or unloaded, as desired.

        Raises:
            BoardFailed: the board is out of order, or its model cannot be loaded.
        """
        if self._moving is None or self._moving.done():
            self._note_contexts()
            if self._is_settled():
                self._check()
                return
        await asyncio.shield(self._start())

    def _start(self) -> asyncio.Future[None]:
        """Start the change; the future completes when it is done, or has failed."""
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_future()
            # The caller may be gone: an unread error is in the board's state.
            self._moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._supervisor.spawn(self._move(self._moving))
        return self._moving

    def _check(self) -> None:
        """Raise the board's failure where it could not be woken.

        A held board need not be awake: it emits nothing, and must not keep others from a pause.
        """
        target = self._books.obligations.target
        held = (
            target is not None and target.hold is not None and not self._books.obligations.unloads
        )
        if self._failed and self._supervisor.state is BoardState.FAILED and not held:
            raise self._supervisor.failed()

    @property
    def _wanted(self) -> SleepLevel | None:
        target = self._books.obligations.target
        return None if target is None else target.level

    @property
    def _due(self) -> bool:
        """True where it must have no engine now: under ``wait`` once its generations ended."""
        return self._books.obligations.unloads and not self._awaits_jobs

    @property
    def _awaits_jobs(self) -> bool:
        obligations, jobs = self._books.obligations, self._books.jobs.values()
        if any(self._embedding.awaited()):
            return True
        return any(
            hold.mode is PauseMode.WAIT
            for job in jobs
            if not (job.frozen or job.over)
            and (hold := obligations.hold(adapter_name(job.request))) is not None
        )

    def _is_settled(self) -> bool:
        if self._supervisor.asleep is not self._due:
            return False
        return self._dropped or self._wanted is not SleepLevel.DROPPED

    # -- changes ----------------------------------------------------------------------------------

    async def _move(self, done: asyncio.Future[None]) -> None:
        try:
            tries = TRIES
            while not self._is_settled():
                try:
                    await self._step()
                except (EngineDied, EngineHung) as exc:
                    tries -= 1  # it is loaded again, with nothing in it
                    log.warning("board %s: not asleep yet: %s", self._settings.board_id, exc.reason)
                    if tries == 0:
                        raise
                except BoardOutOfOrder as exc:
                    await self._supervisor.gave_up()
                    tries -= 1  # after a quarantine or a hang the next try finds no engine
                    if tries == 0 or self._supervisor.state in _OUT_OF_ORDER:
                        raise
                    log.warning("board %s: not asleep yet: %s", self._settings.board_id, exc.reason)
        except RkserveError as exc:
            self._failed = True
            done.set_exception(exc)
        else:
            done.set_result(None)
        finally:
            if not done.done():  # the replica shuts down, or this is a bug of rkserve
                done.set_exception(self._supervisor.failed())

    async def _step(self) -> None:
        if self._supervisor.asleep is self._due:
            await self._caching.drop_parked()
            self._dropped = True
        elif self._due:
            await self._unload()
        else:
            await asyncio.to_thread(self._mark.remove)
            self._dropped = False
            await self._supervisor.wake()

    async def _unload(self) -> None:
        """End the engine once the board is free, unless it crashed or the desired state changed."""
        supervisor = self._supervisor
        if supervisor.state in (BoardState.FAILED, BoardState.STOPPED):
            raise supervisor.failed()
        if supervisor.recovering:
            await self._end_recovery()
            return
        self._pauses.release_board()  # a paused run must not keep the board
        if await self._queue.run_first(
            self._end_engine, self._new_state, lambda: not self._due and not self._ending
        ):
            await self._caching.settled()  # a parked conversation counts once it is published

    async def _end_engine(self) -> None:
        if not self._due:
            return
        live = self._slot.live
        self._ending = True
        try:
            if self._wanted is SleepLevel.UNLOADED and live.alive:
                await self._caching.park(live, renewing=True)
                if not self._due:
                    return  # it was woken meanwhile
            await self._write_mark(live.facts)
            await self._supervisor.sleep("it was put to sleep")
            self._queue.reject_tasks()
        finally:
            self._ending = False

    async def _write_mark(self, facts: EngineFacts) -> None:
        content = asdict(replace(facts, quirks=dict(facts.quirks)))
        if (path := self._settings.asleep_file) is not None:
            with contextlib.suppress(OSError):  # the folder may have been cleaned up
                await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(self._mark.write, content)

    async def _end_recovery(self) -> None:
        """End the recovery from a crash, in which nothing runs and nothing can be parked."""
        supervisor = self._supervisor
        await self._write_mark(self._slot.live.facts)
        if supervisor.recovering and self._due:
            await supervisor.sleep("it was put to sleep")
            self._queue.reject_tasks()
        elif not self._due:  # a restarted replica would read it
            await asyncio.to_thread(self._mark.remove)

    # -- kept contexts ----------------------------------------------------------------------------

    def _note_contexts(self) -> None:
        """Note the contexts in memory, which a sleep keeps or drops."""
        stopped, self._stopped = self._stopped, None
        if self._wanted is None:
            self._contexts = ()
        elif stopped is not None and self._slot.live.alive:
            self._contexts = tuple(self._live_contexts(stopped))

    def _live_contexts(self, stopped: Iterable[Job]) -> Iterable[SleptContext]:
        found = [_context_in(live) for live in self._slot.live.per_entry]
        inside = [context for context in found if context is not None]
        yield from inside
        for job in stopped:
            context = SleptContext(job.generation.context, job.origin)
            same = any(_is_same(one.ids, context.ids) for one in inside)
            if job.generation.tokens and not same:
                yield context

    def slept(self) -> SleepResult:
        """Return the level of the sleep, and the fate of its contexts."""
        level = self.level
        if level is None:
            return SleepResult()
        total = sum(len(context.ids) for context in self._contexts)
        kept = sum(self._kept(context, level) for context in self._contexts)
        return SleepResult(level, kept, total - kept)

    def _kept(self, context: SleptContext, level: SleepLevel) -> int:
        """Return how many of its tokens need not be computed again."""
        kept = max(_kept_in(live, context) for live in self._slot.live.per_entry)
        if level is SleepLevel.DROPPED:
            return kept
        return max(kept, self._caching.restorable(context.ids, context.origin))


def _context_in(live: LoadedEngine) -> SleptContext | None:
    """Return the context in an entry that has no run."""
    if live.paused is not None:
        return SleptContext(live.paused.ids or (), live.paused.origin)
    if live.context.ids and live.running is None:
        return SleptContext(live.context.ids, live.context.origin)
    return None


def _kept_in(live: LoadedEngine, context: SleptContext) -> int:
    """Return how many of its tokens are in the memory of an entry."""
    held = live.context.ids if live.context.origin == context.origin else None
    if live.paused is not None and live.paused.origin == context.origin:
        held = live.paused.ids
    return common_prefix(held or (), context.ids) if live.alive else 0


def _is_same(inside: Ids, context: Ids) -> bool:
    """Return whether both are one conversation: others share only a system prompt.

    The last token may or may not have been computed by the runtime.
    """
    shared = common_prefix(inside, context)
    return shared > 0 and shared >= min(len(inside), len(context)) - 1


def read_facts(found: Any) -> EngineFacts:
    """Parse the mark of a sleeping board.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a foreign one.
    """
    quirks = {str(name): bool(value) for name, value in dict(found["quirks"]).items()}
    if not isinstance(found["per_run_sampling"], bool) or not isinstance(found["release"], str):
        raise TypeError("unexpected types")
    return EngineFacts(
        release=found["release"],
        per_run_sampling=found["per_run_sampling"],
        quirks=quirks,
        load_s=float(found["load_s"]),
        n_batch=int(found["n_batch"]),
        entries=int(found.get("entries", 1)),  # 1: written by a release without it
    )
