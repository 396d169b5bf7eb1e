"""One request on one board, and the runs of an engine that generate its answer.

A job has its generation, its state, and the event stream of its consumer. A run has its entries,
received tokens and times; it decides nothing: the runner handles each token. The module knows
neither engines nor queues.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rkserve.board.answer.generation import Generation
from rkserve.board.answer.transcript import Ids, Range
from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.rules.generations import (
    GenerationCounters,
    GenerationEvent,
    VersionSpans,
    advance,
)
from rkserve.board.rules.hang_limits import RunKind, RunShape, Watchdog
from rkserve.board.storage.prompt_cache import CacheHit
from rkserve.core.block_hashes import origin_of
from rkserve.core.board_report import GenerationState
from rkserve.core.errors import RkserveError
from rkserve.core.messages import (
    AdapterRef,
    Bound,
    Delta,
    Finished,
    GenerateRequest,
    PassDelta,
    Paused,
    QueueChange,
)
from rkserve.core.run_params import Pooling
from rkserve.native.engine_frames import StepParams
from rkserve.native.runtime import Perf

_S, _E = GenerationState, GenerationEvent
PAUSE_END = Delta("", ())  # emitted at the end of a pause
# A token this soon after the one before, and the first one, is left to the consumer, which gets it
# in one delta with those behind it: a runtime that is faster than its consumers has many at a time.
MERGE_S = 0.002


def loop_time_s() -> float:
    """Return the event loop's time; only differences mean something."""
    return asyncio.get_running_loop().time()


class ChangeSignal:
    """Tells waiters of the next change."""

    def __init__(self) -> None:
        self._changed: asyncio.Future[None] | None = None

    def changed(self) -> asyncio.Future[None]:
        """Return a future that completes with the next change."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def wake(self) -> None:
        """Complete the future of ``changed``."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class _DirectPath:
    """The way of deltas to a consumer that waits, without a turn of the event loop for each."""

    def __init__(self, pass_on: PassDelta | None) -> None:
        self._pass_on = pass_on
        self._came_s = math.inf  # the latest token; infinite before the first one
        self.is_awaited = False  # the consumer has taken all events, and waits for the next one
        self.fault: Exception | None = None

    def is_open(self, now_s: float) -> bool:
        """Return whether the delta of a token that has just come may be passed on."""
        is_late = now_s - self._came_s >= MERGE_S
        self._came_s = now_s
        return is_late and self._pass_on is not None and self.is_awaited

    def pass_on(self, delta: Delta) -> bool:
        """Pass a delta on; return False after an error, which the consumer raises.

        Tokens are taken in the loop that reads from the engine, which must not end for a consumer.
        """
        assert self._pass_on is not None
        try:
            self._pass_on(delta)
        except Exception as exc:  # noqa: BLE001 - the consumer raises it, whatever it is
            self.fault = exc
            return False
        return True


class Job(ChangeSignal):
    """A request between admission and its last event, over all of its runs and pauses.

    ``ticket`` is the board's number for it: unlike a request id it never repeats. Jobs with equal
    ``mates`` and origin may share a run. It signals changes of its state, and its consumer's leave.
    """

    def __init__(
        self,
        ticket: int,
        generation: Generation,
        arrived_s: float,
        mates: Hashable = None,
        *,
        apart: bool = False,
        pass_on: PassDelta | None = None,
    ) -> None:
        """``apart``: it has runs of its own, beside those of others with the same adapter.

        ``pass_on`` gets a delta in the turn of the loop in which its token arrived, while the
        consumer waits for it; the consumer does not get it again.
        """
        super().__init__()
        self._apart = apart
        self.entry = 0  # of the engine, where it has a run, or had the last one
        self.ticket = ticket
        self.generation = generation
        self.ref: AdapterRef | None = self.request.adapter
        self.line_epoch = 0  # epoch of the line that chose ``ref``
        self.spans = VersionSpans()
        self.begun = False  # a run of it was started
        self._reported: Bound | None = None  # the weights last reported to the consumer
        self._reported_begun = 0  # ``spans.begun`` at that time
        continued = self.request.continued
        # A request that may have crashed its last board runs alone, so that a crash identifies it.
        self._mates = ("alone", ticket) if continued is not None and continued.suspect else mates
        self.frozen = False  # a pause of the cluster keeps its runs from starting
        self.goes_on = False  # it is paused by the cluster alone and resumes with it
        self.yields = False  # it leaves its run for an engine task and continues after it
        self.pause_asked = False  # by its client, while its run continues
        self.muted = False  # its output is withheld until the cluster resumes
        self.arrived_s = arrived_s
        self.queued_s: float | None = (
            arrived_s  # since when it waits for the board; None: it has it
        )
        self.waits = False  # the consumer knows that it waits in the board's queue
        self.paused_s: float | None = None  # since when it is paused
        self.paused_by: str | None = None
        self.expiry: asyncio.TimerHandle | None = None  # of the pause's timeout
        self.held_s = 0.0  # time that others waited while it held the board, paused
        self.released = False  # it was made to release the board for them
        self.tally = GenerationCounters(len(self.request.prompt_ids))
        if continued is not None:
            self.tally.continued, self.tally.begun_tokens = continued.times, continued.tokens
        self.state = _S.QUEUED
        self.has_board = False  # it has the board: from its start by admission until it releases it
        self.retried = False  # the engine failed before its run began, and it was requeued
        self.abandoned = False  # the consumer closed the stream
        self.outcome: Finished | RkserveError | None = None
        # Events not consumed yet, up to the last pause or end of one.
        self._events: deque[Paused | Delta | QueueChange] = deque()
        self._consumed = 0  # number of consumed events
        self._direct = _DirectPath(pass_on)
        self._paused: Paused | None = None  # the last announced pause
        self._news = asyncio.Event()

    @property
    def request(self) -> GenerateRequest:
        """The request."""
        return self.generation.request

    @property
    def adapter(self) -> str | None:
        """The key of its adapter; None is the base model."""
        return self.ref.key if self.ref is not None else None

    @property
    def origin(self) -> str | None:
        """The origin of its context's KV positions; see ``core.block_hashes``."""
        return origin_of(self.adapter, self.request.salt)

    @property
    def key(self) -> Hashable:
        """The key that jobs must share to share a run, or to run at the same time."""
        return (self.adapter if self._apart else self.origin, self._mates)

    def bind(self, ref: AdapterRef | None, line_epoch: int) -> None:
        """Use this adapter version from the next run on."""
        self.ref, self.line_epoch = ref, line_epoch

    def set_reported(self, label: str) -> None:
        """Note the weights that ``Accepted`` announces to the consumer."""
        self._reported = Bound(((0, label),), self.ref, self.line_epoch)

    def take_over(self, bound: Bound) -> None:
        """Set the weights that it began with on another board."""
        self.bind(bound.adapter, bound.line_epoch)
        self.spans, self._reported = VersionSpans(list(bound.marks)), bound
        self.begun = True

    @property
    def over(self) -> bool:
        """True where no further token is wanted."""
        return self.abandoned or self.outcome is not None or self.state is _S.ABORTING

    def token(self, token_id: int, data: bytes, waiting: bool) -> None:
        """Take one token of the runtime."""
        if self.state is _S.PREFILLING:
            self.advance(_E.TOKEN)
        if self.generation.accept(token_id, data, waiting) and not self._passed_on():
            self._news.set()

    def _passed_on(self) -> bool:
        """Pass the current delta on; return False where it is left to the consumer."""
        if not self._direct.is_open(loop_time_s()):
            return False
        if self._news.is_set() or self.muted or self._events or self.outcome is not None:
            return False
        delta = self.generation.take()
        if delta is None:
            return True
        self._consumed += 1
        self.wake()
        return self._direct.pass_on(self._with_changes(delta))

    def advance(self, event: GenerationEvent) -> None:
        """Go to the next state; see ``rules.generations``."""
        before, self.state = self.state, advance(self.state, event)
        if self.state is not before:
            self.wake()

    def waited(self, now_s: float) -> None:
        """End its wait for the board."""
        if self.queued_s is not None:
            self.tally.queue_s += now_s - self.queued_s
        self.queued_s, self.released = None, False

    def announce_queue(self, *, waits: bool) -> None:
        """Emit that it waits in the board's queue, or has the board, where that is new."""
        if self.waits is not waits:
            self.waits = waits
            self._events.append(QueueChange(waits))
            self._news.set()

    def start(self) -> None:
        """Note that a run of it starts; again, if the run before never began."""
        if self.state is not _S.PREFILLING:
            self.advance(_E.STARTED)
        self.begun = True

    def interrupted(self) -> None:
        """Note that its run was left before the answer's end."""
        self.generation.interrupted(self.tally.prompt_tokens)
        self.notify()

    def announce(self, paused: Paused) -> None:
        """Emit a pause, after the text before it."""
        self._queue_delta()
        self._paused = paused
        self._events.append(paused)
        self._news.set()

    def announce_by(self, by: str | None) -> None:
        """Emit a new originator of the current pause."""
        if self._paused is not None and self._paused.by != by:
            self.announce(replace(self._paused, by=by))

    def unpause(self, now_s: float) -> None:
        """End the pause, by a resumption or with the generation."""
        if self.paused_s is not None:
            self.tally.paused_s += now_s - self.paused_s
        if self.expiry is not None:
            self.expiry.cancel()
        self.paused_s = self.expiry = self.paused_by = None
        self.goes_on = False
        if self._paused is not None:
            self._queue_delta()
            self._paused = None
            self._events.append(PAUSE_END)
            self._news.set()

    def end(self, outcome: Finished | RkserveError) -> None:
        """Set the outcome of the request; the first one counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.expiry is not None:
            self.expiry.cancel()
        self.advance(_E.ENDED)
        self._news.set()

    def abandon(self) -> None:
        """Note that the consumer closed the stream."""
        self.abandoned = True
        self.wake()

    async def next_event(self) -> Delta | Paused | QueueChange | Finished:
        """Return the next event: one delta between two pauses, and last ``Finished``.

        Raises the ``RkserveError`` that ended the request, after the text before it; text withheld
        by a hold is dropped then.
        """
        while True:
            self._news.clear()
            if self._direct.fault is not None:
                raise self._direct.fault
            if self.muted and isinstance(self.outcome, RkserveError):
                raise self.outcome
            if self.muted:
                await self._news.wait()
                continue
            if not self._events:
                self._queue_delta()
            if self._events:
                self._consumed += 1
                self.wake()
                return self._events.popleft()
            if isinstance(self.outcome, RkserveError):
                raise self.outcome
            if self.outcome is not None:
                return self.outcome
            self._direct.is_awaited = True
            try:
                await self._news.wait()
            finally:
                self._direct.is_awaited = False

    async def consumed_all(self, limit_s: float) -> bool:
        """Wait until the consumer took all events so far; False where it left before that.

        A consumer that does not read, or is muted, gets them later and is not waited for.
        """
        self._queue_delta()
        self._news.set()
        loop, due = asyncio.get_running_loop(), self._consumed + len(self._events)
        until_s = loop.time() + limit_s
        while self._consumed < due and not self.muted and (left_s := until_s - loop.time()) > 0:
            if self.abandoned:
                return False
            await asyncio.wait({self.changed()}, timeout=left_s)
        return True

    def _queue_delta(self) -> None:
        """Queue the current delta behind the events before it, so that a later pause follows it."""
        delta = self.generation.take()
        if delta is not None:
            self._events.append(self._with_changes(delta))

    def _with_changes(self, delta: Delta) -> Delta:
        """Return the delta with changes of the generation's weights and pause."""
        if self._reported_begun != self.spans.begun:
            self._reported_begun = self.spans.begun
            bound = Bound(self.spans.marks, self.ref, self.line_epoch)
            if bound != self._reported:
                self._reported = bound
                delta = replace(delta, bound=bound)
        if self._paused is not None:
            delta = replace(delta, paused=True)
        return delta

    @property
    def pending(self) -> bool:
        """True where a part of the answer is still to be emitted."""
        if self.abandoned or self.muted:
            return False
        emitted = any(isinstance(event, Delta) and event != PAUSE_END for event in self._events)
        return emitted or self.generation.pending

    def mute(self, *, muted: bool) -> None:
        """Withhold or release the output of a consumer that did not read in time."""
        self.muted = muted
        self._news.set()

    def notify(self) -> None:
        """Wake the consumer: an edit or a rewind may have new output."""
        self._news.set()


def emitted(jobs: Iterable[Job]) -> tuple[tuple[str, int], ...]:
    """Return request id and token count of every job that has not ended."""
    return tuple(
        (job.request.request_id, job.generation.tokens) for job in jobs if job.state is not _S.ENDED
    )


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The start of a run.

    ``base`` is the content of entry 0 of the KV cache once ``entries`` are prefilled, of which
    ``reused`` ids are not computed; in text mode it is not known. With ``history`` the run extends
    the context, and the reused ids are not sent. ``limit`` in tokens is enforced by the runtime
    where it can. ``hit`` is the prompt cache to load, and ``save`` the reserved file that the KV
    cache is written to at the end. With ``steps`` the run is made of single steps. ``pooling``
    requests a vector of entry 0 instead of tokens. A context that is used ``once`` is not worth a
    file.
    """

    entries: tuple[EntryCommand, ...]
    base: Ids = ()
    reused: int = 0
    clear: bool = False
    history: bool = False
    resume: bool = False
    cut: tuple[Range, ...] = ()
    origin: str | None = None
    limit: int | None = None
    hit: CacheHit | None = None
    save: Path | None = None
    steps: StepParams | None = None
    pooling: Pooling | None = None
    once: bool = False

    @property
    def spared(self) -> int:
        """Ids that are sent but need not be computed: from a file, or from the runtime's cache."""
        return self.reused if len(self.entries[0].ids) == len(self.base) else 0

    def shape(self, *, cold: bool = False) -> RunShape:
        """Return what determines its time limits; ``cold`` is the first run after a load."""
        kind = RunKind.GENERATION if self.steps is None else RunKind.STEPS
        again = 0 if self.steps is None or self.history else len(self.base) + (self.limit or 0)
        plain = all(
            one.prompt_text is None and one.embeds is None and one.encoder is None
            for one in self.entries
        )
        return RunShape(
            kind if self.pooling is None else RunKind.POOLING,
            prompt=sum(
                len(one.ids) if one.embeds is None else one.embeds.rows for one in self.entries
            ),
            again=again,
            images=sum(len(one.images) for one in self.entries),
            loads_cache=self.hit is not None,
            saves_cache=self.save is not None,
            optimistic=self.steps is not None and self.steps.optimistic,
            usual=plain and not cold,
        )


class EngineRun:
    """A run from its start to its return. The runtime can pause it if it is ``pausable``.

    An entry's job is None from the moment that it has left: late tokens are dropped.
    """

    def __init__(
        self,
        number: int,
        entry_jobs: Sequence[Job | None],
        spec: RunSpec,
        watchdog: Watchdog,
        *,
        pausable: bool = False,
    ) -> None:
        self.number = number
        self.entry_jobs = list(entry_jobs)
        self.spec = spec
        self.watchdog = watchdog
        self.pausable = pausable
        self.stopping = False  # an abort was requested
        self.pausing = False  # a pause inside the runtime was requested
        self.muted = False  # all jobs have left it; its output is dropped
        # Every token of each entry, also dropped ones.
        self.given: list[list[int]] = [[] for _ in self.entry_jobs]
        self.left_s: list[float] = []  # when each job left that did not stay to the end
        self.started_s = self.token_s = asyncio.get_running_loop().time()
        self.first_s: float | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.nearer = ChangeSignal()  # the watchdog's deadline has moved nearer

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are still in the run."""
        return [job for job in self.entry_jobs if job is not None]

    @property
    def alone(self) -> bool:
        """True for a run of one entry: its end is the job's."""
        return len(self.entry_jobs) == 1

    @property
    def left_in_prefill(self) -> bool:
        """True where all jobs left it during its prefill."""
        return self.muted and self.first_s is None

    @property
    def transcript(self) -> Ids:
        """All ids that entry 0 of the KV cache may hold."""
        return (*self.spec.base, *self.given[0])

    def came(self, entry: int, token_id: int, now_s: float) -> None:
        """Note a token."""
        if self.watchdog.token(now_s, entry):
            self.nearer.wake()
        self.given[entry].append(token_id)
        self.token_s = now_s
        if self.first_s is None:
            self.first_s = now_s

    def end(self) -> None:
        """Note that it returned, or was given up."""
        if not self.over.done():
            self.over.set_result(None)

    def leave(self, entry: int, now_s: float) -> None:
        """Take the job of this entry out of the run."""
        self.entry_jobs[entry] = None
        self.left_s.append(now_s)

    def tail_s(self, now_s: float) -> float:
        """Return the summed time that finished entries waited for the run's end."""
        return sum(now_s - left_s for left_s in self.left_s)

    def clocked(self, entry: int, now_s: float, restored: int = 0) -> Perf:
        """Return the figures of an entry so far by the board's clock.

        ``restored`` ids of those sent were not computed.
        """
        first_s = now_s if self.first_s is None else self.first_s
        given = len(self.given[entry])
        return Perf(
            prefill_ms=(first_s - self.started_s) * 1e3,
            prefill_tokens=len(self.spec.entries[entry].ids) - restored,
            decode_ms=max(0.0, self.token_s - first_s) * 1e3 if given else 0.0,
            decode_tokens=given,
        )

    def perf(self, ended: RunEnded) -> Perf:
        """Return the runtime's figures of entry 0, or the board's own where it gave none."""
        if ended.in_order:
            return ended.perf
        restored = self.spec.spared if ended.cache_refused is None else 0
        return self.clocked(0, loop_time_s(), restored)
