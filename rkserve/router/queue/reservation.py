"""A request's reservation at one board, from the assignment until the board is free for others.

It keeps the board's load and the queue's accounts consistent.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rkserve.core.errors import RkserveError
from rkserve.core.messages import Delta, EmbedRequest, Event, Finished, GenerateRequest, Kv, Paused
from rkserve.fleet.load import Candidate, ModelBoards
from rkserve.fleet.requests import InFlightRequest, RoutingRequest
from rkserve.router.queue.admission import AnswerTiming

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
        ask: RoutingRequest,
        *,
        waited_ms: float,
        freed: Freed,
    ) -> None:
        """``freed`` is called when the board is free for others."""
        self.group, self.replica = board.group, board.key
        self.request = request
        self.waited_ms = waited_ms
        self._since_s = time.monotonic()
        self._stay = InFlightRequest(boards, board, ask, self._since_s)
        self._freed = freed
        self._over = self._paused = self._interrupted = False
        self._held_s = 0.0
        self._kept = False  # paused inside the runtime, which occupies the board
        self._kept_s = 0.0  # total time of such pauses

    def heard(self, event: Event) -> None:
        """Process an event of the answer; the last one frees the board."""
        self._stay.heard(event)
        if isinstance(event, Finished):
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
        """Return the time it has run on its board, and has occupied it while paused."""
        worked_s, kept_s = self._held_s, self._kept_s
        if not self._over and not self._paused:
            worked_s += now_s - self._since_s
        elif not self._over and self._kept:
            kept_s += now_s - self._since_s
        return worked_s, kept_s

    def lost(self, exc: RkserveError) -> None:  # noqa: ARG002 - the board's own report says why
        """Stop sending requests to the failed board until its next report."""
        self._stay.candidate.lost()

    def ended(self, *, left: bool) -> None:
        """End the reservation; ``left``: the client disconnected before the board was done.

        Only the first end counts.
        """
        self._end(None, left=left)

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
        self._stay.ended(now_s, left=left)
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
