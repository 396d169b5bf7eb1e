"""A request's reservation at one board, and the service times learned from ended ones.

A reservation lasts from the assignment until the board is free for others. It keeps the board's
load and the queue's accounts consistent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rkserve.core.errors import RkserveError
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
)
from rkserve.fleet.load import Candidate, ModelBoards
from rkserve.fleet.requests import InFlightRequest, RoutingRequest

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
    tokens say nothing about those with a limit of 100.
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

    def heard(self, asked: RequestSize, took: AnswerTiming) -> None:
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


# The time of use in ms, or None if the board is only free during a pause; and the answer's timing.
Freed = Callable[[float | None, AnswerTiming | None], None]


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
        freed: Freed,
    ) -> None:
        """``freed`` is called when the board is free for others."""
        self.group, self.replica = board.group, board.key
        self.request = request
        self.waited_ms = waited_ms
        self._since_s = time.monotonic()
        self._in_flight = InFlightRequest(boards, board, routing, self._since_s)
        self._freed = freed
        self._over = self._paused = self._interrupted = False
        self._held_s = 0.0
        self._kept = False  # paused inside the runtime, which occupies the board
        self._kept_s = 0.0  # total time of such pauses
        self._waits = False  # it is in the board's own queue

    def heard(self, event: Event) -> None:
        """Process an event of the answer; the last one frees the board."""
        self._in_flight.heard(event)
        if isinstance(event, Accepted | QueueChange):
            self._wait(waits=event.waits)
        elif isinstance(event, Finished):
            self._end(event, left=False)
        elif isinstance(event, Paused) if not self._paused else _goes_on(event):
            self._turn(kept=isinstance(event, Paused) and event.kv is Kv.KEPT)

    @property
    def keeps(self) -> bool:
        """Return whether the request would occupy the board while paused."""
        return (
            not self._over
            and isinstance(self.request, GenerateRequest)
            and (self.request.native_pause)
        )

    def used_s(self, now_s: float) -> tuple[float, float]:
        """Return the time it has run on its board, and has occupied it while paused.

        Its time in the board's own queue is neither.
        """
        worked_s, kept_s = self._held_s, self._kept_s
        if self._over or self._waits:
            return worked_s, kept_s
        if not self._paused:
            worked_s += now_s - self._since_s
        elif self._kept:
            kept_s += now_s - self._since_s
        return worked_s, kept_s

    def lost(self, exc: RkserveError) -> None:  # noqa: ARG002 - the board's own report says why
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

    def _turn(self, *, kept: bool) -> None:
        """Switch between running and paused."""
        now_s = time.monotonic()
        self._held_s, self._kept_s = self.used_s(now_s)
        self._paused, self._interrupted, self._kept = not self._paused, True, kept
        self._since_s = now_s
        if self._paused:
            self._freed(None, None)

    def _end(self, finished: Finished | None, *, left: bool) -> None:
        if self._over:
            return
        now_s = time.monotonic()
        self._held_s, self._kept_s = self.used_s(now_s)
        self._over = True
        self._in_flight.ended(now_s, left=left)
        held_ms = self._held_s * 1e3
        self._freed(held_ms, None if finished is None else self._took(finished, held_ms))

    def _took(self, finished: Finished, held_ms: float) -> AnswerTiming | None:
        # An interrupted or continued answer is not representative.
        if self._interrupted or self.request.continued is not None:
            return None
        if isinstance(self.request, EmbedRequest):
            return None  # an embedding is not an answer
        timings = finished.timings
        return AnswerTiming(
            timings.prefill_tokens,
            timings.prefill_ms,
            timings.decode_tokens,
            timings.decode_ms,
            finished.usage.completion_tokens,
            held_ms,
        )


def _goes_on(event: Event) -> bool:
    """Return whether the event ends a pause; edits while paused are sent as deltas, too."""
    return isinstance(event, Delta) and not event.paused
