"""Puts one board to sleep and wakes it: its engine is ended, or loaded again, as it was told.

A sleep is a hold, and that is ``holding``'s business: once that holds, nothing emits, and this
module sees to the engine and to what is kept of the KV caches. It makes one change at a time. Told
otherwise meanwhile, it goes on to what is wanted now: a load is never cut short, and an unloading
that has not begun is not begun.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rkserve.board.answer.kv_plan import Ids, common_prefix
from rkserve.board.engine.protocol import EngineFacts
from rkserve.board.operations.embedding import EmbeddingService
from rkserve.board.rules.obligations import adapter_name
from rkserve.board.run.job import Job
from rkserve.board.run.paused import PausedRequests
from rkserve.board.run.ports import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import PauseMode, SleepLevel
from rkserve.core.durable_files import write_private
from rkserve.core.errors import BoardAsleep, BoardOutOfOrder, EngineDied, EngineHung, RkserveError

log = logging.getLogger(__name__)

# Nothing comes of waiting here: the replica has to be replaced.
_OUT_OF_ORDER = (BoardState.HUNG, BoardState.FAILED, BoardState.STOPPED)
# An engine that is lost while it is put to sleep is not worth more than so many tries.
TRIES = 3


@dataclass(frozen=True, slots=True)
class SleptContext:
    """What a KV cache held when the board was put to sleep."""

    ids: Ids
    origin: str | None


@dataclass(frozen=True, slots=True)
class SleepResult:
    """How deep the board sleeps, and what becomes of the contexts that it had; see ``Adoption``."""

    level: SleepLevel | None = None
    kept_tokens: int = 0
    dropped_tokens: int = 0


class BoardSleep:
    """Use it from the board's loop."""

    def __init__(
        self,
        settings: BoardSettings,
        slot: EngineSlot,
        books: BoardBooks,
        queue: RunQueue,
        *,
        caching: PromptCaching,
        embedding: EmbeddingService,
        supervisor: EngineSupervisor,
        pauses: PausedRequests,
    ) -> None:
        self._settings, self._slot, self._books, self._queue = settings, slot, books, queue
        self._caching, self._embedding, self._pauses = caching, embedding, pauses
        self._supervisor = supervisor
        self._mark = SleepMarker(settings.asleep_file)
        self._contexts: tuple[SleptContext, ...] = ()  # that were live when it was put to sleep
        self._stopped: list[Job] | None = None  # by what it was told last; None: those are noted
        self._dropped = False  # nothing is parked any more
        self._failed = False  # a wake or a sleep was not possible
        self._ending = False  # the errand that ends the engine has the board
        self._moving: asyncio.Future[None] | None = None
        self._told: asyncio.Future[None] | None = None  # completes when it is told anew

    # -- what is so ---------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether the model is unloaded."""
        return self._supervisor.state is BoardState.ASLEEP

    @property
    def level(self) -> SleepLevel | None:
        """How deep the board sleeps now; None where it is awake, or on its way."""
        wanted = self._wanted
        if self._supervisor.state is BoardState.ASLEEP:
            return wanted if self._due and wanted is not None else SleepLevel.UNLOADED
        return wanted if wanted is SleepLevel.PAUSED else None

    def require_awake(self) -> None:
        """Raise ``BoardAsleep`` where the model is unloaded, or about to be."""
        if self.asleep or self._books.obligations.unloads:
            raise BoardAsleep(self._settings.board_id, "its model is unloaded until it is woken up")

    async def left_asleep(self) -> EngineFacts | None:
        """Return what the engine was like where the replica before this one was asleep.

        Only for a board that will be told when to wake.
        """
        if not self._settings.governed:
            return None
        return await asyncio.to_thread(self._mark.read, self._settings.n_batch)

    # -- what is wanted -----------------------------------------------------------------------

    def told(self, stopped: Iterable[Job]) -> None:
        """The board was told something new, which has stopped these; at once."""
        self._stopped = [*(self._stopped or ()), *stopped]
        if self._told is not None and not self._told.done():
            self._told.set_result(None)
        if self.asleep and self._awaits_jobs:
            self._start()  # they end before anybody settles here, and need an engine for that

    async def settle(self) -> None:
        """Return when the engine is loaded, or not, as is wanted.

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
        """Let the board become what is wanted; the future says when it is, or cannot be."""
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_future()
            # Whoever sent it may have left: an error that nobody hears of is in the board's state.
            self._moving.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._supervisor.spawn(self._move(self._moving))
        return self._moving

    def _check(self) -> None:
        """A board that could not be woken is not awake, whatever it is told after that.

        Where it is held it need not be: it emits nothing, and must not keep others from a pause.
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
        """Whether it shall have no engine now: under ``wait`` not before everybody has ended."""
        return self._books.obligations.unloads and not self._awaits_jobs

    @property
    def _awaits_jobs(self) -> bool:
        charge, jobs = self._books.obligations, self._books.jobs.values()
        if any(self._embedding.awaited()):
            return True
        return any(
            hold.mode is PauseMode.WAIT
            for job in jobs
            if not (job.frozen or job.over)
            and (hold := charge.hold(adapter_name(job.request))) is not None
        )

    def _is_settled(self) -> bool:
        if self.asleep is not self._due:
            return False
        return self._dropped or self._wanted is not SleepLevel.DROPPED

    # -- moving -------------------------------------------------------------------------------

    async def _move(self, done: asyncio.Future[None]) -> None:
        try:
            tries = TRIES
            while not self._is_settled():
                try:
                    await self._step()
                except (EngineDied, EngineHung) as exc:
                    tries -= 1  # it is loaded anew, with nothing in it
                    log.warning("board %s: not asleep yet: %s", self._settings.board_id, exc.reason)
                    if tries == 0:
                        raise
                except BoardOutOfOrder as exc:
                    await self._supervisor.gave_up()
                    tries -= 1  # a quarantine, or one that hung: another try meets no engine
                    if tries == 0 or self._supervisor.state in _OUT_OF_ORDER:
                        raise
                    log.warning("board %s: not asleep yet: %s", self._settings.board_id, exc.reason)
        except RkserveError as exc:
            self._failed = True
            done.set_exception(exc)
        else:
            done.set_result(None)
        finally:
            if not done.done():  # the replica shuts down, or this is a bug of ours
                done.set_exception(self._supervisor.failed())

    async def _step(self) -> None:
        if self.asleep is self._due:
            await self._caching.drop_parked()
            self._dropped = True
        elif self._due:
            await self._unload()
        else:
            await asyncio.to_thread(self._mark.remove)
            self._dropped = False
            await self._supervisor.wake()

    async def _unload(self) -> None:
        """End the engine once the board is free; none where it crashed or was told otherwise."""
        supervisor = self._supervisor
        if supervisor.state in (BoardState.FAILED, BoardState.STOPPED):
            raise supervisor.failed()
        if supervisor.recovering:
            await self._end_recovery()
            return
        ending = self._queue.schedule(self._end_engine, first=True)
        self._pauses.let_go()  # nobody who is paused keeps the board
        try:
            while not ending.done():
                told = self._told = asyncio.get_running_loop().create_future()
                await asyncio.wait({ending, told}, return_when="FIRST_COMPLETED")
                if not self._due and not self._ending:
                    return
            ending.result()
        finally:
            ending.cancel()
        await self._caching.settled()  # what was parked counts once it is published

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
            await asyncio.to_thread(self._mark.write, live.facts)
            await self._supervisor.sleep("it was put to sleep")
            self._queue.turn_away()
        finally:
            self._ending = False

    async def _end_recovery(self) -> None:
        """Nobody has the board, and there is nothing to park; but the next engine may come."""
        supervisor = self._supervisor
        await asyncio.to_thread(self._mark.write, self._slot.live.facts)
        if supervisor.recovering and self._due:
            await supervisor.sleep("it was put to sleep")
            self._queue.turn_away()
        elif not self._due:  # a restarted replica would believe it
            await asyncio.to_thread(self._mark.remove)

    # -- what is kept -------------------------------------------------------------------------

    def _note_contexts(self) -> None:
        """What is live now, when all rests, is what a sleep keeps or drops."""
        stopped, self._stopped = self._stopped, None
        if self._wanted is None:
            self._contexts = ()
        elif stopped is not None and self._slot.live.alive:
            self._contexts = tuple(self._live_contexts(stopped))

    def _live_contexts(self, stopped: Iterable[Job]) -> Iterable[SleptContext]:
        live = self._slot.live
        inside = None
        if live.paused is not None:
            inside = SleptContext(live.paused.ids or (), live.paused.origin)
        elif live.context.ids and live.running is None:
            inside = SleptContext(live.context.ids, live.context.origin)
        if inside is not None:
            yield inside
        for job in stopped:
            context = SleptContext(job.generation.context, job.origin)
            if job.generation.tokens and not (inside and _is_same(inside.ids, context.ids)):
                yield context

    def slept(self) -> SleepResult:
        """Return how it sleeps now, and what became of the contexts that it had."""
        level = self.level
        if level is None:
            return SleepResult()
        total = sum(len(context.ids) for context in self._contexts)
        kept = sum(self._kept(context, level) for context in self._contexts)
        return SleepResult(level, kept, total - kept)

    def _kept(self, context: SleptContext, level: SleepLevel) -> int:
        """How much of it need not be computed again."""
        live = self._slot.live
        held = live.context.ids if live.context.origin == context.origin else None
        if live.paused is not None and live.paused.origin == context.origin:
            held = live.paused.ids
        kept = common_prefix(held or (), context.ids) if live.alive else 0
        if level is SleepLevel.DROPPED:
            return kept
        return max(kept, self._caching.restorable(context.ids, context.origin))


def _is_same(inside: Ids, context: Ids) -> bool:
    """Whether it is one conversation: others have a system prompt in common, and no more.

    Of the last token it depends whether the runtime has computed it.
    """
    shared = common_prefix(inside, context)
    return shared > 0 and shared >= min(len(inside), len(context)) - 1


class SleepMarker:
    """The file that says that a board sleeps. All methods touch the disk; none of them raises.

    It is a convenience: where it is missing or damaged, a model is loaded for nothing.
    """

    def __init__(self, path: Path | None) -> None:
        """``path`` of None remembers nothing."""
        self._path = path

    def read(self, n_batch: int) -> EngineFacts | None:
        """Return what the engine was like that was unloaded; None where the board was awake."""
        if self._path is None:
            return None
        try:
            facts = _facts(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.warning("%s is damaged, and the model is loaded: %s", self._path, exc)
            self.remove()
            return None
        return replace(facts, n_batch=n_batch)  # it may have been configured anew since

    def write(self, facts: EngineFacts) -> None:
        """Note that the board sleeps."""
        if self._path is None:
            return
        fresh = self._path.with_suffix(".asleep.new")
        content = json.dumps(asdict(replace(facts, quirks=dict(facts.quirks))))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_private(fresh, content)
            fresh.replace(self._path)
        except OSError as exc:
            log.warning("%s cannot be written; a restart loads the model: %s", self._path, exc)

    def remove(self) -> None:
        """Note that the board is awake, or about to be."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed: %s", self._path, exc)


def _facts(found: Any) -> EngineFacts:
    """Raises ``KeyError``, ``TypeError``, ``ValueError`` for what was not written here."""
    quirks = {str(name): bool(value) for name, value in dict(found["quirks"]).items()}
    if not isinstance(found["per_run_sampling"], bool) or not isinstance(found["release"], str):
        raise TypeError("it is not what was written")
    return EngineFacts(
        release=found["release"],
        per_run_sampling=found["per_run_sampling"],
        quirks=quirks,
        load_s=float(found["load_s"]),
        n_batch=int(found["n_batch"]),
    )
