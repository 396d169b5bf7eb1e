"""One request's place at one board: what is heard of it there, and when others may have it.

It keeps the books of the board and of the queue in step, and knows neither links nor HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rkserve.core.errors import RkserveError
from rkserve.core.messages import Delta, EmbedRequest, Event, Finished, GenerateRequest, Kv, Paused
from rkserve.fleet.load import Candidate, ModelBoards
from rkserve.fleet.requests import InFlightRequest, RoutingRequest
from rkserve.router.queue.admission import AnswerTiming

# How long the place was used, or None where it is only left for a while; and what the answer took.
Freed = Callable[[float | None, AnswerTiming | None], None]


class Reservation:
    """From the moment that a request gets a board until it has let go of it.

    ``replica`` is the board's address in its ``group``, and ``request`` what it shall get.
    ``waited_ms`` is how long that waited in the queue.
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
        """``freed`` is called when others may have the place, with how long it was used in ms."""
        self.group, self.replica = board.group, board.key
        self.request = request
        self.waited_ms = waited_ms
        self._since_s = time.monotonic()
        self._stay = InFlightRequest(boards, board, ask, self._since_s)
        self._freed = freed
        self._over = self._paused = self._interrupted = False
        self._held_s = 0.0
        self._kept = False  # paused inside the runtime, which keeps the board
        self._kept_s = 0.0  # in such pauses

    def heard(self, event: Event) -> None:
        """Take over an event of the answer; with the last one the board is free for others."""
        self._stay.heard(event)
        if isinstance(event, Finished):
            self._end(event, left=False)
        elif isinstance(event, Paused) if not self._paused else _goes_on(event):
            self._turn(kept=isinstance(event, Paused) and event.kv is Kv.KEPT)

    @property
    def keeps(self) -> bool:
        """Return whether it may keep the board while it is paused, and is not over."""
        return (
            not self._over
            and isinstance(self.request, GenerateRequest)
            and (self.request.native_pause)
        )

    def used_s(self, now_s: float) -> tuple[float, float]:
        """Return how long it has worked on its board, and kept that while it was paused."""
        worked_s, kept_s = self._held_s, self._kept_s
        if not self._over and not self._paused:
            worked_s += now_s - self._since_s
        elif not self._over and self._kept:
            kept_s += now_s - self._since_s
        return worked_s, kept_s

    def lost(self, exc: RkserveError) -> None:  # noqa: ARG002 - the board's own report says why
        """The board failed: nobody is sent there until its next report."""
        self._stay.candidate.lost()

    def ended(self, *, left: bool) -> None:
        """It is over, in whichever way; ``left``: its client went before the board was done.

        Only the first end counts.
        """
        self._end(None, left=left)

    def _turn(self, *, kept: bool) -> None:
        """It pauses, or goes on."""
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
        # What was interrupted or begun elsewhere tells nothing of one that is not.
        if self._interrupted or self.request.continued is not None:
            return None
        if isinstance(self.request, EmbedRequest):
            return None  # nor do vectors tell anything of answers
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
    """Whether a pause is over with that; edits of what is paused are told of in deltas too."""
    return isinstance(event, Delta) and not event.paused
