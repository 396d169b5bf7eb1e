"""Embeddings of texts on one board, computed between its generations.

Each request is queued like a generation, and then has the board for all of its texts. It leaves
nothing in the KV cache and displaces its content: a conversation is parked first. Such a run can
neither be paused nor cut short. Under a pause that keeps requests, vectors are withheld, and queued
requests wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

from rkserve.board.engine.protocol import EntryCommand
from rkserve.board.rules.obligations import adapter_name
from rkserve.board.run.job import ChangeSignal, RunSpec, loop_time_s
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import BoardBooks, EngineSlot, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.core.desired_state import EffectivePause, PauseMode
from rkserve.core.errors import CallAborted, RkserveError, RunFailed
from rkserve.core.messages import (
    Accepted,
    Embedded,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    QueueChange,
    Timings,
    Usage,
    VersionSpan,
)
from rkserve.native.runtime import RunEnd


class EmbeddingJob(ChangeSignal):
    """One request from its acceptance to its end. It signals changes of its state."""

    def __init__(self, request: EmbedRequest) -> None:
        super().__init__()
        self.request = request
        self.vectors: list[bytes] = []
        self.tokens = 0
        self.prefill_s = 0.0
        self.queued_s = loop_time_s()
        self.begun_s: float | None = None
        self.label = ""
        self.held = False  # a hold keeps it from starting and its vectors from being emitted
        self.over = False  # its client is gone
        self.live: LoadedEngine | None = None  # the engine of its current run
        self.done: asyncio.Future[None] | None = None  # the future of its engine task
        self._error: RkserveError | None = None

    @property
    def entries(self) -> Iterator[EntryCommand]:
        """The inputs of the engine, one run each."""
        if self.request.texts:
            return (EntryCommand(prompt_text=text) for text in self.request.texts)
        return (EntryCommand(ids) for ids in self.request.inputs)

    def hold(self, *, held: bool) -> None:
        """Withhold its vectors, or release them."""
        self.held = held
        self.wake()

    def fail(self, error: RkserveError) -> None:
        """End it with this error, whatever its run does."""
        self._error = self._error or error
        self.stop()
        self.wake()

    def stop(self) -> None:
        """Compute nothing more for it."""
        self.over = True
        if self.live is not None and self.live.running is not None:
            self.live.abort(self.live.running)

    async def begun(self) -> None:
        """Wait until it has the board, or has ended without it."""
        assert self.done is not None
        while self.begun_s is None and self._error is None and not self.done.done():
            await self.changed()

    async def settled(self) -> None:
        """Wait until all vectors may be emitted. Raises the error that ended it."""
        assert self.done is not None
        while True:
            if self._error is not None:
                raise self._error
            if self.done.done() and (not self.held or self.done.exception() is not None):
                self.done.result()
                return
            await self.changed()


class EmbeddingService:
    """The embedding requests of one board. Use it from the board's loop."""

    def __init__(
        self, books: BoardBooks, slot: EngineSlot, queue: RunQueue, caching: PromptCaching
    ) -> None:
        self._settings, self._books, self._slot, self._queue = books.settings, books, slot, queue
        self._caching = caching
        self._orders: list[EmbeddingJob] = []

    @property
    def busy(self) -> bool:
        """True while there is a request."""
        return bool(self._orders)

    async def events(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        """Yield ``Accepted``, a ``QueueChange`` after a wait in the queue, ``Embedded`` and
        ``Finished``. Closing the generator withdraws it.

        Raises:
            QueueFull, QueueTimeout: the queue is full, or the wait was too long.
            CallAborted: a pause with mode ``abort`` ended it.
            RunFailed, BoardFailed, BoardAsleep: as a generation.
        """
        obligations = self._books.obligations
        ref = obligations.bind(request)
        line = obligations.line(request)
        order = EmbeddingJob(request)
        order.held = self._keeps(order)
        ahead = self._queue.admission.ahead
        waits = order.held or ahead > 0 or not self._queue.free
        order.done = self._queue.schedule(
            lambda: self._perform(order), first=False, barred=lambda: order.held
        )
        order.done.add_done_callback(lambda _: order.wake())
        self._orders.append(order)
        self._books.counters.requests += 1
        self._books.asked_s = loop_time_s()
        try:
            label, epoch = obligations.label(ref), obligations.epoch or 0
            line_epoch = 0 if line is None else line.epoch
            release = self._slot.live.facts.release
            yield Accepted(
                self._settings.board_id, release, ahead, (), label, epoch, ref, line_epoch, waits
            )
            if waits:
                await order.begun()
                yield QueueChange(waits=False)
            await order.settled()
            yield Embedded(tuple(order.vectors))
            yield self._finished(order)
        except RkserveError:
            self._books.counters.failed += 1
            raise
        except BaseException:  # the client left
            self._books.counters.aborted += not order.done.done()
            raise
        finally:
            self._orders.remove(order)
            order.stop()
            order.done.cancel()
            self._books.asked_s = loop_time_s()

    # -- desired state ----------------------------------------------------------------------------

    def update(self) -> None:
        """Hold, abort or release requests after a change of the desired state."""
        for order in list(self._orders):
            hold = self._hold(order)
            if hold is not None and hold.mode is PauseMode.ABORT:
                order.fail(CallAborted(f"board {self._settings.board_id}"))
            elif hold is None or hold.stops:
                order.hold(held=hold is not None)

    def awaited(self) -> Iterable[asyncio.Future[None]]:
        """Yield futures that complete with changes of requests that a pause waits for."""
        for order in self._orders:
            hold = self._hold(order)
            if hold is not None and hold.mode is PauseMode.WAIT and not (order.held or order.over):
                yield order.changed()

    def _hold(self, order: EmbeddingJob) -> EffectivePause | None:
        return self._books.obligations.hold(adapter_name(order.request))

    def _keeps(self, order: EmbeddingJob) -> bool:
        hold = self._hold(order)
        return hold is not None and hold.stops

    # -- runs -------------------------------------------------------------------------------------

    async def _perform(self, order: EmbeddingJob) -> None:
        """Compute all vectors of the job. Raises ``RkserveError``."""
        if order.over:
            return
        order.begun_s = loop_time_s()
        order.wake()
        ref = self._books.obligations.bind(order.request)
        order.label = self._books.obligations.label(ref)
        self._books.versions.add(order.label, requests=1)
        await self._caching.park(self._slot.live)
        live = await self._slot.with_adapter(ref)
        key = None if ref is None else ref.key
        for entry in order.entries:
            if order.over:
                return
            await self._run(live, order, entry, key)

    async def _run(
        self, live: LoadedEngine, order: EmbeddingJob, entry: EntryCommand, adapter: str | None
    ) -> None:
        live.require()
        begin = RunSpec(
            entries=(entry,),
            base=entry.ids,
            clear=live.context.ids != (),
            origin=adapter,
            pooling=order.request.pooling,
        )
        started_s = loop_time_s()
        order.live = live
        try:
            _, ended = await live.run([None], begin)
        finally:
            order.live = None
        if order.over:
            return  # its result is not wanted any more
        if ended.end is not RunEnd.FINISHED or not ended.vector:
            reason = ended.error or f"{ended.reason} and no vector"
            raise RunFailed(self._settings.board_id, reason)
        order.prefill_s += loop_time_s() - started_s
        order.vectors.append(ended.vector)
        order.tokens += ended.tokens

    def _finished(self, order: EmbeddingJob) -> Finished:
        usage = Usage(order.tokens, 0)
        begun_s = order.queued_s if order.begun_s is None else order.begun_s
        timings = Timings(
            queue_ms=(begun_s - order.queued_s) * 1e3,
            prefill_ms=order.prefill_s * 1e3,
            prefill_tokens=order.tokens,
            decode_ms=0.0,
            decode_tokens=0,
            memory_mb=0.0,
        )
        self._books.counters.count(usage, timings)
        span = VersionSpan(order.label, 0, order.tokens)
        return Finished(FinishReason.STOP, usage, timings, (span,))
