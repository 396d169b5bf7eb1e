"""Failover of one generation: its progress over all boards that work on it, its continuation after
a loss, and its location, which control calls change while no board has it.

A generation's progress processes events and losses, and builds the request for the next board; the
choice of that board and the wait for it are made elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.desired_state import ServedWeights
from rkserve.core.errors import (
    BoardDrained,
    BoardFailed,
    BoardGone,
    BoardOutOfOrder,
    BoardSilent,
    EngineDied,
    EngineHung,
    PoisonRequest,
    QueueTimeout,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import (
    Accepted,
    Bound,
    ControlAction,
    Delta,
    EmbedRequest,
    Event,
    FailoverState,
    Finished,
    FinishReason,
    GenerateRequest,
    Kv,
    Paused,
    QueueChange,
    Splice,
    Timings,
    TokenOrigin,
    TranscriptToken,
    UpstreamDelta,
    Usage,
    VersionSpan,
)
from rkserve.fleet.fleet import Fleet
from rkserve.router.queue.admission import QueueTerms

BY_CLUSTER = "cluster"  # the origin of a pause that ends with the cluster's
# Deltas kept one by one take many times the memory of their text.
MERGE_AFTER = 128
# A request whose own run ends this many boards, without a new token in between, is not retried.
STRIKES = 2

_WHY: tuple[tuple[type[RkserveError], str], ...] = (
    (EngineDied, "crashed"),
    (EngineHung, "hung"),
    (RunFailed, "run_failed"),
    (BoardGone, "gone"),
    (BoardSilent, "silent"),
    (BoardOutOfOrder, "out_of_order"),
    (BoardDrained, "drained"),
    (BoardFailed, "unreachable"),
    (QueueTimeout, "busy"),
)
# The board reported that this request's own run ended so. The loss of a replica or a node does not
# show its cause: a library that crashes ends its engine only.
_OWN_RUN = (EngineDied, EngineHung, RunFailed)


def why(exc: RkserveError) -> str:
    """Return the reason of a loss as one of a few words, for a metric's label."""
    return next((word for kind, word in _WHY if isinstance(exc, kind)), "lacking")


@dataclass(frozen=True, slots=True)
class LostBoard:
    """The loss of a board during a run of this request."""

    board: str
    tokens: int  # of the answer then


class GenerationProgress:
    """A Router's state of one generation. It may be continued ``limit`` times."""

    def __init__(self, request: GenerateRequest, limit: int) -> None:
        self.asked = request
        self._limit = limit
        self._prompt_ids: tuple[int, ...] | None = None
        self._slots: list[TranscriptToken] = []  # without those of ``_news``
        self._text: list[str] = []
        self.tokens = 0  # of the answer, those of ``_news`` included
        self._news: list[Delta] = []  # deltas that only append to the answer
        self._bound: Bound | None = None
        self.rests: Paused | None = None  # the pause in force, which the next board takes over
        self._scored = False  # the client has the logprobs of the prompt
        self._over = False  # the pause at the last token has ended
        self._arrived = False  # the current board has sent its acceptance and nothing else
        self._lost_s: float | None = None  # the time of its board's loss; None: a board has it
        self._lost_ms = 0.0
        self.accepted = False  # by any board
        self._boards: list[tuple[str, int]] = []  # that accepted it, and its tokens then
        self.queued_ms = 0.0  # its time in this Router's queue
        self.times = 0
        self.cause: RkserveError | None = (
            None  # of the last loss of a board, apart from time limits
        )
        self.strikes: list[LostBoard] = []
        self._upstream = False  # the client has a part of an upstream's answer

    # -- events of boards ---------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Return whether any part of the answer has arrived."""
        return bool(self._slots or self._news or self._upstream)

    def observe(self, event: Event) -> Event | None:
        """Process an event; return it as the client gets it, None if it gets nothing."""
        if isinstance(event, Delta):
            self._grow(event)
        elif isinstance(event, Paused):
            return self._rested(event)
        elif isinstance(event, Accepted):
            return self._taken(event)
        elif isinstance(event, QueueChange):
            return None
        elif isinstance(event, Finished):
            timings = replace(
                event.timings,
                queue_ms=event.timings.queue_ms + self.queued_ms,
                continued=self.times,
                lost_ms=self._lost_ms,
                boards=self._written_by(),
            )
            return replace(event, timings=timings)
        return event

    def _written_by(self) -> tuple[str, ...]:
        """Return the boards that generated tokens; of an empty answer the last to accept it."""
        ends = [*(start for _, start in self._boards[1:]), self.tokens]
        pairs = zip(self._boards, ends, strict=False)
        found = tuple(dict.fromkeys(name for (name, start), end in pairs if start < end))
        return found or tuple(name for name, _ in self._boards[-1:])

    def pause(self) -> None:
        """Pause it while no board has it; the next board keeps it paused."""
        self.rests, self._over = Paused(None, self.tokens, Kv.RECOMPUTED), False

    def resume(self) -> None:
        """End its pause while no board has it."""
        self.rests, self._over = None, True

    def aborted(self, waited_ms: float) -> list[Event]:
        """Return the events that end it while no board has it.

        ``waited_ms`` is the time since it last had a board, or since its arrival.
        """
        found: list[Event] = [] if self.accepted else [Accepted("", "", 0, version="")]
        prompt, marks = self.asked, () if self._bound is None else self._bound.marks
        ends = [*(start for start, _ in marks[1:]), self.tokens]
        spans = (
            VersionSpan(label, start, end)
            for (start, label), end in zip(marks, ends, strict=False)
            if start < end
        )
        timings = Timings(
            queue_ms=self.queued_ms + waited_ms,
            prefill_ms=0.0,
            prefill_tokens=0,
            decode_ms=0.0,
            decode_tokens=0,
            memory_mb=0.0,
            continued=self.times,
            lost_ms=self._lost_ms,
            boards=self._written_by(),
        )
        usage = Usage(len(prompt.prompt_ids) or prompt.counted, self.tokens)
        return [*found, Finished(FinishReason.ABORT, usage, timings, tuple(spans))]

    def back(self, event: Event, now_s: float) -> float | None:
        """Return the time from a loss to this event, the first of the next board.

        Call it before ``observe``, while ``waits``.
        """
        goes_on = isinstance(event, Finished) or (isinstance(event, Delta) and event.token_ids)
        if self._lost_s is None or not goes_on:
            return None
        took_s, self._lost_s = now_s - self._lost_s, None
        self._lost_ms += took_s * 1e3
        return took_s

    @property
    def waits(self) -> bool:
        """Return whether it has lost its board, and the next one has sent nothing."""
        return self._lost_s is not None

    def _taken(self, accepted: Accepted) -> Accepted | None:
        known, self.accepted, self._arrived = self.accepted, True, True
        self._boards.append((accepted.board_id, self.tokens))
        if not self.begun:
            mark = (0, accepted.version)
            self._bound = Bound((mark,), accepted.adapter, accepted.line_epoch)
        return None if known else accepted

    def _rested(self, paused: Paused) -> Paused | None:
        """Drop the next board's report of a pause that the client knows."""
        known = self._arrived and self.rests is not None
        self._arrived = False
        if paused.by == BY_CLUSTER:
            self.rests, self._over = None, True
        else:
            self.rests = paused
        return None if known else paused

    def _grow(self, delta: Delta) -> None:
        self._arrived = False
        self.tokens += len(delta.token_ids)
        if isinstance(delta, UpstreamDelta):
            self._upstream = True
            self.tokens += delta.counted
            return
        if delta.plain:
            self.rests, self._over = None, not delta.token_ids
            if delta.token_ids:
                self._news.append(delta)
                if len(self._news) >= MERGE_AFTER:
                    self._merge()
            return
        if delta.bound is not None:
            self._bound = delta.bound
        self._scored = self._scored or bool(delta.prompt)
        self._settle()
        if delta.splice is None:
            self._slots += _slots(delta)
            grown = bool(delta.token_ids)
        else:
            grown = self._splice(delta.splice)
        self.tokens = sum(slot.kind is not TokenOrigin.INJECTED for slot in self._slots)
        if delta.retract:
            self._text = ["".join(self._text)[: -delta.retract]]
        self._text.append(delta.text)
        if not delta.paused:
            self._over = not grown and (self._over or self.rests is not None)
            self.rests = None

    def _splice(self, splice: Splice) -> bool:
        """Apply an edit to the transcript; return whether new tokens were added."""
        self._slots[splice.keep :] = splice.slots
        if splice.prompt_ids is not None:
            self._prompt_ids = splice.prompt_ids
        return any(slot.kind is TokenOrigin.GENERATED for slot in splice.slots)

    def _merge(self) -> None:
        """Merge deltas: one large delta takes a fraction of the memory."""
        text = "".join([delta.text for delta in self._news])
        ids = tuple([token_id for delta in self._news for token_id in delta.token_ids])
        lengths = tuple([length for delta in self._news for length in delta.parts])
        self._news = [Delta(text, ids, lengths=lengths)]

    def _settle(self) -> None:
        for delta in self._news:
            self._slots += _slots(delta)
            self._text.append(delta.text)
        self._news = []

    # -- when a board is lost -----------------------------------------------------------------

    def lost(self, board: str, exc: RkserveError, now_s: float) -> RkserveError | None:
        """Handle the loss of a board; return the final error, or None to continue.

        A board that is lost while the request is paused or waiting was not lost because of it.
        """
        self.times += 1
        if not isinstance(exc, QueueTimeout):
            self.cause = exc
        self._arrived = False
        if self._lost_s is None:
            self._lost_s = now_s
        if self._upstream:
            return exc  # its tokens are unknown, without which no board continues the answer
        if isinstance(exc, _OWN_RUN) and self.rests is None:
            if self.strikes and self.strikes[-1].tokens != self.tokens:
                self.strikes = []  # it has new tokens since then, so that failure was another one
            self.strikes.append(LostBoard(board, self.tokens))
            if len(self.strikes) >= STRIKES:
                return exc if isinstance(exc, RunFailed) else PoisonRequest(STRIKES, exc.reason)
        return exc if self.times > self._limit else None

    @property
    def request(self) -> GenerateRequest:
        """Return the request for the next board."""
        if self.times == 0:
            return self.asked
        self._settle()
        text = "".join(self._text)
        self._text = [text]
        continued = FailoverState(
            slots=tuple(self._slots),
            text=text,
            prompt_ids=self._prompt_ids,
            bound=self._bound if self.begun else None,
            paused=self.rests,
            pause_over=self._over,
            times=self.times,
            suspect=bool(self.strikes),
            scored=self._scored,
        )
        # A named prompt cache has saved its prefill already, or is lost with the board.
        cache = None if self.begun else self.asked.use_cache
        return replace(self.asked, continued=continued, use_cache=cache)


def _slots(delta: Delta) -> list[TranscriptToken]:
    """Return the tokens of a delta without a splice."""
    if len(delta.token_ids) == 1:
        return [TranscriptToken(delta.token_ids[0], delta.text.encode())]
    slots, at = [], 0
    for token_id, length in zip(delta.token_ids, delta.parts, strict=True):
        slots.append(TranscriptToken(token_id, delta.text[at : at + length].encode()))
        at += length
    return slots


BY_REQUEST = "request"  # the origin of the pause
T = TypeVar("T")


class ControlChange(Exception):
    """A control call changed a request that no board has."""


class RequestLocation:
    """The board of one request, or none; registered with its Router while entered.

    While no board has the request, control calls change it here, and end the waits of
    ``unless_changed``.
    """

    def __init__(
        self,
        progress: GenerationProgress,
        fleet: Fleet,
        known: dict[str, RequestLocation],
        terms: QueueTerms | None = None,
    ) -> None:
        self.progress, self.terms = progress, terms or QueueTerms()
        self.id = progress.asked.request_id
        self.ended = False  # aborted, with or without a board
        # Of a pause by the cluster: its begin, and the weights that were served before it.
        self.paused: tuple[float, ServedWeights] | None = None
        self.failures = 0  # the boards that rejected it or were lost
        self.since_s = time.monotonic()  # the time since which it has no board
        self.replica: str | None = None
        self._running, self._known = fleet.running, known
        self._changed = False  # by a control call, since the last wait that it ended
        self._signal: asyncio.Future[None] | None = None  # of the wait that such a call ends

    def __enter__(self) -> RequestLocation:
        self._known[self.id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._running.pop(self.id, None)
        if self._known.get(self.id) is self:
            del self._known[self.id]

    @property
    def controllable(self) -> bool:
        """Return whether no board has the request, and it can be controlled here."""
        return self.replica is None and not isinstance(self.progress.asked, EmbedRequest)

    def enter(self, group: str, replica: str) -> None:
        """Note that a board has accepted the request."""
        self.replica = replica
        self._running[self.id] = (group, replica)

    def leave(self) -> None:
        """Note that no board has the request."""
        self._running.pop(self.id, None)
        self.replica, self.since_s = None, time.monotonic()

    def abort(self) -> None:
        """End the request when no board has it; a board that has it is asked by others."""
        self.ended = True
        if self.replica is None:
            self._change()

    def act(self, action: ControlAction) -> bool:
        """Apply a control action; return False if the request's state does not allow it."""
        progress = self.progress
        if action is ControlAction.ABORT:
            return True  # ``abort`` has done it
        if action is ControlAction.PAUSE and progress.accepted:
            progress.pause()
        elif action is ControlAction.RESUME and progress.rests is not None:
            progress.resume()
        else:
            return False
        self._change()
        return True

    def _change(self) -> None:
        self._changed = True
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

    async def unless_changed(
        self,
        work: Coroutine[Any, Any, T],
        drop: Callable[[T], None] = lambda _: None,
        timeout_s: float | None = None,
    ) -> T:
        """Return the result of ``work``; ``drop`` releases one that comes too late.

        Raises:
            ControlChange: a control call changed the request first.
            TimeoutError: there was none within ``timeout_s``.
        """
        loop = asyncio.get_running_loop()
        task, signal = loop.create_task(work), loop.create_future()
        self._signal = signal
        if self._changed:
            signal.set_result(None)
        pending: set[asyncio.Future[Any]] = {task, signal}
        returned = False
        try:
            await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._changed:
                self._changed = False
                raise ControlChange
            if not task.done():
                raise TimeoutError
            returned = True
            return task.result()
        finally:
            self._signal = None
            if not returned:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled() and task.exception() is None:
                    drop(task.result())

    def info(self) -> GenerationInfo:
        """Return the state of the request while no board has it."""
        progress = self.progress
        request, rests = progress.request, progress.rests
        done, ref = request.continued, request.adapter
        state = GenerationState.QUEUED if rests is None else GenerationState.PAUSED
        return GenerationInfo(
            request_id=request.request_id,
            board_id="",
            model=request.model,
            state=GenerationState.ABORTING if self.ended else state,
            prompt_tokens=len(request.prompt_ids),
            tokens=0 if done is None else done.tokens,
            context_tokens=len(request.prompt_ids) + (0 if done is None else len(done.slots)),
            partial_output="" if done is None else done.text,
            kv=None if rests is None else Kv.RECOMPUTED,
            adapter=request.line if ref is None else ref.name,
            native_pause=request.native_pause,
            paused_by=None if rests is None else rests.by or BY_REQUEST,
            age_s=time.monotonic() - self.since_s,
        )
