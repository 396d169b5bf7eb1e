"""One request on one board: its generation, its state, and the channel to whoever streams it.

It knows asyncio and nothing of engines or queues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from rkserve.board.answer.generation import Generation
from rkserve.board.rules.counters import GenerationCounters, VersionSpans
from rkserve.board.rules.generation_states import GenerationEvent, advance
from rkserve.core.block_hashes import origin_of
from rkserve.core.board_report import GenerationState
from rkserve.core.errors import RkserveError
from rkserve.core.messages import AdapterRef, Bound, Delta, Finished, GenerateRequest, Paused

_S, _E = GenerationState, GenerationEvent
GOES_ON = Delta("", ())  # the end of a pause


class Job:
    """A request between admission and its last event, over all of its runs and pauses.

    ``ticket`` is the board's number for it: unlike a request id it never comes twice. ``mates``
    says with whom, of those of its origin, it may share a run.
    """

    def __init__(
        self, ticket: int, generation: Generation, arrived_s: float, mates: Hashable = None
    ) -> None:
        self.ticket = ticket
        self.generation = generation
        self.ref: AdapterRef | None = self.request.adapter
        self.line_epoch = 0  # of the line that chose ``ref``
        self.spans = VersionSpans()
        self.begun = False  # some run of it was started
        self._told: Bound | None = None  # what the consumer knows of the weights
        self._told_begun = 0  # with so many beginnings of spans
        continued = self.request.continued
        # Of those that a board was lost with it shall show which one does that.
        self._mates = ("alone", ticket) if continued is not None and continued.suspect else mates
        self.frozen = False  # the cluster is paused: no run of it may begin
        self.goes_on = False  # it is paused by the cluster alone
        self.yields = False  # it leaves its run for an errand, and goes on by itself after that
        self.pause_asked = False  # by its client, while its run goes on
        self.muted = False  # what it has is kept back until the cluster goes on
        self.arrived_s = arrived_s
        self.queued_s: float | None = (
            arrived_s  # since when it waits for the board; None: it has it
        )
        self.paused_s: float | None = None  # since when it is paused
        self.paused_by: str | None = None
        self.expiry: asyncio.TimerHandle | None = None  # of the pause
        self.held_s = 0.0  # how long others have waited while it held the board, paused
        self.released = False  # it was to let go of the board for them
        self.tally = GenerationCounters(len(self.request.prompt_ids))
        if continued is not None:
            self.tally.continued, self.tally.begun_tokens = continued.times, continued.tokens
        self.state = _S.QUEUED
        self.seated = False  # the board is its own: from admission's word until it lets go
        self.retried = False  # the engine failed before its run began, and it was queued again
        self.abandoned = False  # the consumer is gone
        self.outcome: Finished | RkserveError | None = None
        # What the consumer has not heard of, up to the last pause or end of one.
        self._said: deque[Paused | Delta] = deque()
        self._given = 0  # so many events of these it was given
        self._paused: Paused | None = None  # the pause that the consumer is, or will be, told of
        self._news = asyncio.Event()
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def request(self) -> GenerateRequest:
        """What was asked for."""
        return self.generation.request

    @property
    def adapter(self) -> str | None:
        """The key of its adapter; None is the base model."""
        return self.ref.key if self.ref is not None else None

    @property
    def origin(self) -> str | None:
        """What the positions of its context are only of use under; see ``origins``."""
        return origin_of(self.adapter, self.request.salt)

    @property
    def key(self) -> Hashable:
        """Those that have the same one may share a run."""
        return (self.origin, self._mates)

    def bind(self, ref: AdapterRef | None, line_epoch: int) -> None:
        """Let its next run be with this version."""
        self.ref, self.line_epoch = ref, line_epoch

    def introduce(self, label: str) -> None:
        """The consumer is told that it would begin with this version now."""
        self._told = Bound(((0, label),), self.ref, self.line_epoch)

    def take_over(self, bound: Bound) -> None:
        """It has begun on another board, with these weights."""
        self.bind(bound.adapter, bound.line_epoch)
        self.spans, self._told = VersionSpans(list(bound.marks)), bound
        self.begun = True

    @property
    def over(self) -> bool:
        """Nobody wants another token of it."""
        return self.abandoned or self.outcome is not None or self.state is _S.ABORTING

    def token(self, token_id: int, data: bytes, waiting: bool) -> None:
        """Take one token of the runtime."""
        if self.state is _S.PREFILLING:
            self.advance(_E.TOKEN)
        if self.generation.accept(token_id, data, waiting):
            self._news.set()

    def advance(self, event: GenerationEvent) -> None:
        """Go to the next state; see ``interrupt``."""
        before, self.state = self.state, advance(self.state, event)
        if self.state is not before:
            self.wake()

    def waited(self, now_s: float) -> None:
        """Its wait for the board is over."""
        if self.queued_s is not None:
            self.tally.queue_s += now_s - self.queued_s
        self.queued_s, self.released = None, False

    def start(self) -> None:
        """A run of it is started; again, if the one before never was."""
        if self.state is not _S.PREFILLING:
            self.advance(_E.STARTED)
        self.begun = True

    def interrupted(self) -> None:
        """Its run was left before the answer's end."""
        self.generation.interrupted(self.tally.prompt_tokens)
        self.tell()

    def announce(self, paused: Paused) -> None:
        """Let the consumer know of a pause, after the text before it."""
        self._say()
        self._paused = paused
        self._said.append(paused)
        self._news.set()

    def announce_by(self, by: str | None) -> None:
        """Let the consumer know that the pause is another one's now."""
        if self._paused is not None and self._paused.by != by:
            self.announce(replace(self._paused, by=by))

    def unpause(self, now_s: float) -> None:
        """The pause is over, by a resumption or by the end."""
        if self.paused_s is not None:
            self.tally.paused_s += now_s - self.paused_s
        if self.expiry is not None:
            self.expiry.cancel()
        self.paused_s = self.expiry = self.paused_by = None
        self.goes_on = False
        if self._paused is not None:
            self._say()
            self._paused = None
            self._said.append(GOES_ON)
            self._news.set()

    def end(self, outcome: Finished | RkserveError) -> None:
        """Settle how the request ended; the first word counts."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.expiry is not None:
            self.expiry.cancel()
        self.advance(_E.ENDED)
        self._news.set()

    def abandon(self) -> None:
        """The consumer is gone: nobody reads what still comes."""
        self.abandoned = True
        self.wake()

    async def next_event(self) -> Delta | Paused | Finished:
        """Return what came since the last call, as one delta between two pauses; last ``Finished``.

        Raises the ``RkserveError`` that ended the request, after the text before it; what is kept
        back for a hold is lost with it, for nothing is given out that is held.
        """
        while True:
            self._news.clear()
            if self.muted and isinstance(self.outcome, RkserveError):
                raise self.outcome
            if self.muted:
                await self._news.wait()
                continue
            if not self._said:
                self._say()
            if self._said:
                self._given += 1
                self.wake()
                return self._said.popleft()
            if isinstance(self.outcome, RkserveError):
                raise self.outcome
            if self.outcome is not None:
                return self.outcome
            await self._news.wait()

    async def heard(self, limit_s: float) -> bool:
        """Wait until the consumer has all that was said up to now; False where it left before that.

        One that does not read, or is kept from it, is not waited for: it gets that later.
        """
        self._say()
        self._news.set()
        loop, due = asyncio.get_running_loop(), self._given + len(self._said)
        until_s = loop.time() + limit_s
        while self._given < due and not self.muted and (left_s := until_s - loop.time()) > 0:
            if self.abandoned:
                return False
            await asyncio.wait({self.changed()}, timeout=left_s)
        return True

    def _say(self) -> None:
        """Put what came of the answer behind what was said before: a later pause comes after it."""
        delta = self.generation.take()
        if delta is not None:
            self._said.append(self._whole(delta))

    def _whole(self, delta: Delta) -> Delta:
        """Return the delta with what it does not know of the generation's weights and state."""
        if self._told_begun != self.spans.begun:
            self._told_begun = self.spans.begun
            bound = Bound(self.spans.marks, self.ref, self.line_epoch)
            if bound != self._told:
                self._told = bound
                delta = replace(delta, bound=bound)
        if self._paused is not None:
            delta = replace(delta, paused=True)
        return delta

    @property
    def pending(self) -> bool:
        """Whether something of the answer was not given out yet, and still will be."""
        if self.abandoned or self.muted:
            return False
        said = any(isinstance(event, Delta) and event != GOES_ON for event in self._said)
        return said or self.generation.pending

    def mute(self, *, muted: bool) -> None:
        """Keep back, or give out, what there is for a consumer that did not take it in time."""
        self.muted = muted
        self._news.set()

    def tell(self) -> None:
        """There may be something new to give out: an edit, or what a rewind put in."""
        self._news.set()

    def changed(self) -> asyncio.Future[None]:
        """Return a future that completes when the state changes or the consumer leaves."""
        if self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def wake(self) -> None:
        """Let those who wait for a change look again."""
        if not self._changed.done():
            self._changed.set_result(None)


def emitted(jobs: Iterable[Job]) -> tuple[tuple[str, int], ...]:
    """Return the request's id, and how many tokens it has, of every job that has not ended."""
    return tuple(
        (job.request.request_id, job.generation.tokens) for job in jobs if job.state is not _S.ENDED
    )


class EngineTask:
    """Work for the engine between runs that is no generation; it waits its turn as one.

    ``barred`` says whether it may not begin now.
    """

    def __init__(
        self,
        ticket: int,
        work: Callable[[], Awaitable[Any]],
        barred: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ticket = ticket
        self.barred = barred
        self._work = work
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Whoever sent it may have left: an error that nobody hears of is no event of the loop's.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def perform(self) -> None:
        """Do the work, unless it was withdrawn. Raises what it raises."""
        if self.done.cancelled():
            return
        result = await self._work()
        if not self.done.done():
            self.done.set_result(result)

    def end(self, error: RkserveError) -> None:
        """It was not done, and why."""
        if not self.done.done():
            self.done.set_exception(error)
