"""A request's reservation at one board, and the service times learned from ended ones.

A reservation lasts from the assignment until the board is free for others. It keeps the board's
load and the queue's accounts consistent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rkserve.core.block_hashes import BlockHashes, origin_of, seed_of
from rkserve.core.messages import (
    Accepted,
    Delta,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    Kv,
    Paused,
    QueueChange,
    UpstreamDelta,
)
from rkserve.fleet.load import MIN_REST, Candidate, ModelBoards
from rkserve.fleet.prefix_index import NOTHING, Reuse
from rkserve.router.policies import RoutingRequest

T = TypeVar("T")
LATEST = 0.1  # the weight of one answer in the averages
FEW = 4  # answers that an estimate needs at least
SAFE = 2.0  # mean deviations above the mean; few answers exceed that
MOST_RATIO = 8.0  # the cap for outliers, such as disturbed runs


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The size of a request before it runs. ``prompt_tokens`` is at least 1."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """The measured times of one answer. ``held_ms`` is its time on a board, without pauses
    and without the wait in the board's queue.
    """

    prefill_tokens: int
    prefill_ms: float
    decode_tokens: int
    decode_ms: float
    tokens: int
    held_ms: float


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """The expected time on a board: the mean, and a bound that most requests keep."""

    likely_ms: float
    safe_ms: float


@dataclass(slots=True)
class _Mean:
    """An exponential moving average; the first few values have equal weight."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(LATEST, 1 / self.count)


@dataclass(slots=True)
class ServiceTimeModel:
    """Statistics of the answers of one model, over all boards.

    Lengths are kept by the client's token limit, in powers of two: answers with a limit of 4,000
    tokens are no measure of those with a limit of 100.
    """

    _prefill_ms: _Mean = field(default_factory=_Mean)  # of one token
    _decode_ms: _Mean = field(default_factory=_Mean)
    _fresh: _Mean = field(default_factory=_Mean)  # the share of a prompt that is not cached
    _lengths: dict[int, _Mean] = field(default_factory=dict)
    # The time on a board, relative to the estimate from token counts.
    _ratio: _Mean = field(default_factory=_Mean)
    _spread: _Mean = field(default_factory=_Mean)

    def of(self, asked: RequestSize) -> ServiceTime | None:
        """Return the expected service time; None before enough answers have ended."""
        plain_ms = self._plain_ms(asked)
        if plain_ms is None or self._ratio.count < FEW:
            return None
        ratio = self._ratio.value
        return ServiceTime(plain_ms * ratio, plain_ms * (ratio + SAFE * self._spread.value))

    def observe(self, asked: RequestSize, took: AnswerTiming) -> None:
        """Learn from a completed answer."""
        plain_ms = self._plain_ms(asked)
        if plain_ms:
            ratio = min(MOST_RATIO, took.held_ms / plain_ms)
            self._spread.add(abs(ratio - self._ratio.value) if self._ratio.count else ratio / 2)
            self._ratio.add(ratio)
        if took.prefill_tokens > 0 and took.prefill_ms > 0:
            self._prefill_ms.add(took.prefill_ms / took.prefill_tokens)
        if took.decode_tokens > 0 and took.decode_ms > 0:
            self._decode_ms.add(took.decode_ms / took.decode_tokens)
        self._fresh.add(min(1.0, took.prefill_tokens / asked.prompt_tokens))
        self._lengths.setdefault(asked.max_tokens.bit_length(), _Mean()).add(took.tokens)

    @property
    def typical_ms(self) -> float | None:
        """The mean service time of any answer; None before the first one."""
        lengths = [mean.value for mean in self._lengths.values()]
        if not lengths or not self._decode_ms.count:
            return None
        return self._decode_ms.value * sum(lengths) / len(lengths)

    def _plain_ms(self, asked: RequestSize) -> float | None:
        if not self._decode_ms.count and not self._prefill_ms.count:
            return None
        mean = self._lengths.get(asked.max_tokens.bit_length())
        tokens = asked.max_tokens if mean is None else min(asked.max_tokens, mean.value)
        fresh = self._fresh.value * asked.prompt_tokens
        return fresh * self._prefill_ms.value + tokens * self._decode_ms.value


class InFlightRequest:
    """A request at a board, from sending until its end there.

    ``expected`` is the cached prefix expected there. Generated token IDs are collected for the
    prediction of the context that is left.
    """

    def __init__(
        self, boards: ModelBoards, candidate: Candidate, routing: RoutingRequest, now_s: float
    ) -> None:
        self.candidate = candidate
        self.expected: Reuse = NOTHING
        self._boards = boards
        self._routing = routing
        self._resting = False
        self._over = False
        self._tokens = 0
        self._answer: list[int] = []
        self._unknown = False
        self._finished = False
        boards.unbook(routing.request_id)
        boards.visited(routing.session, candidate)
        # Caches of upstreams are their own affair.
        self._index = None if candidate.upstream else boards.index
        if self._index is not None:
            self.expected = self._index.began(candidate.slot, routing.chain, now_s)
        self.source = self._find_source(boards, candidate, routing)
        prefill_ms = (
            max(0, routing.prompt_tokens - self.expected.tokens) * candidate.speed.prefill_ms
        )
        self._first_s = now_s + prefill_ms / 1e3  # when its first token is expected
        candidate.began(self, now_s)

    def _find_source(
        self, boards: ModelBoards, candidate: Candidate, routing: RoutingRequest
    ) -> Candidate | None:
        """Return the board from which this one is to fetch a file for the prompt, if that pays."""
        index, chain = self._index, routing.chain
        if index is None or chain is None:
            return None
        prefill_ms = candidate.speed.prefill_ms
        found = index.fetched(candidate.slot, self.expected, index.sources(chain), prefill_ms)
        board = None if found.source is None else boards.at(found.source)
        if board is not None:
            self.expected = found
        return board

    def rest_ms(self, now_s: float) -> float:
        """Return the estimated time until the request leaves the board."""
        if self._resting:
            return 0.0
        typical = self._boards.typical_tokens
        limit = self._routing.max_tokens - self._tokens
        rest = min(max(typical - self._tokens, MIN_REST * typical), max(0, limit))
        prefill_ms = 0.0 if self._tokens else max(0.0, (self._first_s - now_s) * 1e3)
        return prefill_ms + rest * self.candidate.speed.decode_ms

    def observe(self, event: Event) -> None:
        """Process an event of the answer."""
        if isinstance(event, Delta):
            self._tokens += len(event.token_ids)
            self._answer += event.token_ids
            if isinstance(event, UpstreamDelta):
                self._tokens += event.counted
            if event.retract or event.splice or event.bound:
                self._unknown = True  # only the board knows the context after an edit
            if not self._resting:
                return
        elif isinstance(event, Accepted):
            self._accepted(event)
        elif isinstance(event, Finished):
            self._finished = True
        self._pause(event)

    def _accepted(self, event: Accepted) -> None:
        """Take over the board's load, and compare the adapter version chosen by it with the assumed
        one.
        """
        if event.waits:
            self.candidate.met(event.queued_ahead)
        chain, adapter = self._routing.chain, event.adapter
        if chain is None:
            return
        key = None if adapter is None else adapter.key
        if chain.seed != seed_of(origin_of(key, self._routing.salt)):
            self._unknown = True

    def _pause(self, event: Event) -> None:
        """Count the request as running or paused at the board."""
        if isinstance(event, Paused):
            if not self._resting:
                self._resting = True
                self.candidate.rested(held=event.kv is Kv.KEPT)
        elif self._resting and (isinstance(event, Finished) or _goes_on(event)):
            self._resting = False
            self.candidate.went_on()

    def ended(self, now_s: float, *, left: bool, withdrawn: bool = False) -> None:
        """Remove the request; ``left``: its client disconnected before the board was done;
        ``withdrawn``: it only waited there.

        Only the first call counts.
        """
        if self._over:
            return
        self._over = True
        if self._resting:
            self._resting = False
            self.candidate.went_on()
        if withdrawn:
            self.candidate.withdrawn(self)
        else:
            self.candidate.ended(self, left=left)
        if self._finished and self._routing.max_tokens:  # an embedding request has no answer length
            self._boards.answered(self._tokens)
        if self._index is not None:
            file = self.expected.tokens > 0 and not self.expected.live
            self._index.ended(self.candidate.slot, self._left(), now_s, from_file=file)

    def _left(self) -> BlockHashes | None:
        """Return the reusable context left at the board, unless the run was aborted."""
        chain = self._routing.chain
        if chain is None or not self._finished or self._unknown:
            return None
        # The last token was emitted but not yet evaluated; the next run would do that.
        return chain.extended(tuple(self._answer[:-1]))


class Recalled(Exception):
    """A request that waited in a board's own queue is to take its turn at the Router again."""


class Reservation:
    """A request's place at a board.

    ``replica`` is the board's address in its ``group``, ``request`` the request to send, and
    ``waited_ms`` its time in the queue.
    """

    def __init__(
        self,
        request: GenerateRequest,
        boards: ModelBoards,
        board: Candidate,
        routing: RoutingRequest,
        *,
        waited_ms: float,
        freed: Callable[[Reservation, Finished | None], None],
        queued: Callable[[Reservation], None],
    ) -> None:
        """``freed`` is called when the board is free for others, with the end of the answer.

        At a pause, and without an end of the answer, it gets None; ``over`` tells the two apart.
        ``queued`` is called when the board has accepted the request into its own queue.
        """
        self.board, self.group, self.replica = board, board.group, board.key
        self.request = request
        self.waited_ms = waited_ms
        self._since_s = time.monotonic()
        self._in_flight = InFlightRequest(boards, board, routing, self._since_s)
        self._freed, self._queued = freed, queued
        self._movable = False
        self._recalled = asyncio.Event()
        self._withdrawn = False
        self.over = self._paused = self._interrupted = False
        self._held_s = 0.0
        self._kept = False  # paused inside the runtime, which occupies the board
        self._kept_s = 0.0  # total time of such pauses
        self._waits = False  # it is in the board's own queue

    def observe(self, event: Event) -> None:
        """Process an event of the answer; the last one frees the board."""
        self._in_flight.observe(event)
        if isinstance(event, Delta) and not self._paused:  # as most are
            self._movable = False
            return
        # Other events are of a state that this board alone has: a pause, an edit, a run.
        self._movable = isinstance(event, Accepted) and event.waits and not self._continues
        if isinstance(event, Accepted | QueueChange):
            self._wait(waits=event.waits)
            if self._movable:
                self._queued(self)
        elif isinstance(event, Finished):
            self._end(event, left=False)
        elif isinstance(event, Paused) if not self._paused else _goes_on(event):
            self._turn(kept=isinstance(event, Paused) and event.kv is Kv.KEPT)

    @property
    def expected(self) -> Reuse:
        """The cached prefix that was expected at the board."""
        return self._in_flight.expected

    @property
    def source(self) -> Candidate | None:
        """The board from which this one is to fetch a file of ``expected_tokens``, if any."""
        return self._in_flight.source

    @property
    def prefill_ms(self) -> float:
        """The expected prefill time of a token at the board."""
        return self.board.speed.prefill_ms

    @property
    def expected_tokens(self) -> int:
        """The tokens of that prefix."""
        return self._in_flight.expected.tokens

    @property
    def keeps(self) -> bool:
        """Return whether the request would occupy the board while paused."""
        return (
            not self.over
            and isinstance(self.request, GenerateRequest)
            and (self.request.native_pause)
        )

    def used_s(self, now_s: float) -> tuple[float, float]:
        """Return the time it has run on its board, and has occupied it while paused.

        Its time in the board's own queue is neither.
        """
        worked_s, kept_s = self._held_s, self._kept_s
        if self.over or self._waits:
            return worked_s, kept_s
        if not self._paused:
            worked_s += now_s - self._since_s
        elif self._kept:
            kept_s += now_s - self._since_s
        return worked_s, kept_s

    def lost(self) -> None:
        """Stop sending requests to the failed board until its next report."""
        self._in_flight.candidate.lost()

    def ended(self, *, left: bool) -> None:
        """End the reservation; ``left``: the client disconnected before the board was done.

        Only the first end counts.
        """
        self._end(None, left=left)

    def _wait(self, *, waits: bool) -> None:
        """Enter the board's queue, or leave it for the board."""
        now_s = time.monotonic()
        self._held_s, self._kept_s = self.used_s(now_s)
        self._waits, self._since_s = waits, now_s

    # -- in the board's own queue ------------------------------------------------------------------

    @property
    def movable(self) -> bool:
        """True while it is in the board's own queue, and nothing has happened to it there."""
        return self._movable and not self.over

    @property
    def runs(self) -> bool:
        """True while the board works for it: it is neither queued there, nor paused, nor over."""
        return not (self._waits or self._paused or self.over)

    def rest_ms(self, now_s: float) -> float:
        """Return the estimated time until the request leaves the board."""
        return self._in_flight.rest_ms(now_s)

    @property
    def queue_ms(self) -> float:
        """The time that a movable request has been in the board's queue."""
        return (time.monotonic() - self._since_s) * 1e3

    @property
    def _continues(self) -> bool:
        """True for an answer that was begun at another board: it goes before others anyway."""
        return self.request.continued is not None

    def recall(self) -> None:
        """Take the request back from the board's queue, if it is movable by then."""
        self._recalled.set()

    def leave_if_recalled(self) -> None:
        """Raise ``Recalled`` if the request is movable and was recalled."""
        if self.movable and self._recalled.is_set():
            self._withdrawn = True
            raise Recalled

    async def unless_recalled(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``, which a recall cancels.

        Raises:
            Recalled: the recall was first.
        """
        task = asyncio.ensure_future(work)
        recalled = asyncio.ensure_future(self._recalled.wait())
        try:
            await asyncio.wait({task, recalled}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.leave_if_recalled()
            return await task
        finally:
            recalled.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _turn(self, *, kept: bool) -> None:
        """Switch between running and paused."""
        now_s = time.monotonic()
        self._held_s, self._kept_s = self.used_s(now_s)
        self._paused, self._interrupted, self._kept = not self._paused, True, kept
        self._since_s = now_s
        if self._paused:
            self._freed(self, None)

    def _end(self, finished: Finished | None, *, left: bool) -> None:
        if self.over:
            return
        now_s = time.monotonic()
        self._held_s, self._kept_s = self.used_s(now_s)
        self.over = True
        self._in_flight.ended(now_s, left=left, withdrawn=self._withdrawn)
        self._freed(self, finished)

    def timing(self, finished: Finished) -> AnswerTiming | None:
        """Return the times of the answer; None if they are no measure of others."""
        # Neither an interrupted or continued answer nor an embedding is representative.
        if self._interrupted or self.request.continued is not None:
            return None
        if isinstance(self.request, EmbedRequest):
            return None
        timings = finished.timings
        return AnswerTiming(
            timings.prefill_tokens,
            timings.prefill_ms,
            timings.decode_tokens,
            timings.decode_ms,
            finished.usage.completion_tokens,
            self._held_s * 1e3,
        )


def _goes_on(event: Event) -> bool:
    """Return whether the event ends a pause; edits while paused are sent as deltas, too."""
    return isinstance(event, Delta) and not event.paused
