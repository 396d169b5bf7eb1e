"""Failover of one generation: the circuit breakers that keep its requests off failing boards, its
progress over all boards that work on it, and its continuation after a loss. Pure.

The clock is passed in. A board is identified by its key; the replacement of a replica has a new
key, and starts with a closed circuit. A generation's progress processes events and losses, and
builds the request for the next board; the choice of that board and the wait for it are made
elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

from rkserve.core.errors import (
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
    Delta,
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
    Usage,
    VersionSpan,
)


class Circuit(str, Enum):
    """The state of a board's circuit."""

    CLOSED = "closed"  # all requests pass
    OPEN = "open"  # no requests for a while
    HALF_OPEN = "half_open"  # one probe, which closes or opens the circuit


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """``failures`` within ``window_s`` open the circuit for ``open_s``.

    Each failed probe doubles that time, up to ``longest_s``. A probe without a result for
    ``probe_s`` is abandoned, and another one may be sent.
    """

    failures: int = 3
    window_s: float = 30.0
    open_s: float = 2.0
    longest_s: float = 60.0
    probe_s: float = 30.0


@dataclass(slots=True)
class _Board:
    failed_s: deque[float] = field(default_factory=deque)
    reason: str = ""
    until_s: float | None = None  # None: closed
    lasts_s: float = 0.0  # the duration of the last opening
    probe_s: float | None = None  # the time at which the probe was sent


class CircuitBreaker:
    """The circuits of all boards of one Router."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._boards: dict[str, _Board] = {}  # boards with recent failures only

    def circuit(self, key: str, now_s: float) -> Circuit:
        """Return the state of the board's circuit."""
        board = self._boards.get(key)
        if board is None or board.until_s is None:
            return Circuit.CLOSED
        if now_s < board.until_s or self._is_probed(board, now_s):
            return Circuit.OPEN
        return Circuit.HALF_OPEN

    def allows(self, key: str, now_s: float) -> bool:
        """Return whether a request may be sent to the board now."""
        return key not in self._boards or self.circuit(key, now_s) is not Circuit.OPEN

    def blocked(self, now_s: float) -> list[str]:
        """Return the keys of boards with an open circuit."""
        return [key for key in self._boards if self.circuit(key, now_s) is Circuit.OPEN]

    def soonest_s(self, now_s: float) -> float | None:
        """Return the time at which the first of ``blocked`` half-opens; None without any."""
        return min([self._again_s(self._boards[key]) for key in self.blocked(now_s)], default=None)

    def sent(self, key: str, now_s: float) -> None:
        """Note a request to the board; the first one after the open time is the probe."""
        board = self._boards.get(key)
        if board is not None and board.until_s is not None and now_s >= board.until_s:
            board.probe_s = now_s

    def worked(self, key: str) -> None:
        """Close the circuit after a success and forget earlier failures."""
        self._boards.pop(key, None)

    def failed(self, key: str, reason: str, now_s: float) -> bool:
        """Count a request lost by the board's fault; return whether that opens the circuit."""
        board, rules = self._boards.setdefault(key, _Board()), self._rules
        board.reason = reason
        board.failed_s.append(now_s)
        while board.failed_s[0] <= now_s - rules.window_s:
            board.failed_s.popleft()
        if board.until_s is not None and now_s >= board.until_s:
            return self._open(board, now_s, min(2 * board.lasts_s, rules.longest_s))
        if board.until_s is None and len(board.failed_s) >= rules.failures:
            return self._open(board, now_s, rules.open_s)
        return False

    def undecided(self, key: str) -> None:
        """Note a request that ended without showing the board's health; allow another probe."""
        board = self._boards.get(key)
        if board is not None:
            board.probe_s = None

    def forgive(self, key: str) -> None:
        """Remove the last failure, which was not the board's fault."""
        board = self._boards.get(key)
        if board is None:
            return
        board.failed_s.pop()
        board.until_s = board.probe_s = None
        if not board.failed_s:
            del self._boards[key]

    def reason(self, key: str, now_s: float) -> str:
        """Return why the circuit is not closed; empty if it is."""
        board = self._boards.get(key)
        if board is None or board.until_s is None:
            return ""
        left_s = max(0.0, board.until_s - now_s)
        return (
            f"{len(board.failed_s)} requests failed, last: {board.reason}; next in {left_s:.1f} s"
        )

    def keep(self, keys: frozenset[str]) -> None:
        """Forget all boards but these."""
        for key in self._boards.keys() - keys:
            del self._boards[key]

    def _open(self, board: _Board, now_s: float, lasts_s: float) -> bool:
        board.until_s, board.lasts_s, board.probe_s = now_s + lasts_s, lasts_s, None
        return True

    def _is_probed(self, board: _Board, now_s: float) -> bool:
        return board.probe_s is not None and now_s < board.probe_s + self._rules.probe_s

    def _again_s(self, board: _Board) -> float:
        """Return the time at which an open circuit half-opens without news of the board."""
        assert board.until_s is not None
        probed_s = 0.0 if board.probe_s is None else board.probe_s + self._rules.probe_s
        return max(board.until_s, probed_s)


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
        self._tokens = 0  # of the answer, those of ``_news`` included
        self._news: list[Delta] = []  # deltas that only append to the answer
        self._bound: Bound | None = None
        self._rest: Paused | None = None
        self._scored = False  # the client has the logprobs of the prompt
        self._over = False  # the pause at the last token has ended
        self._arrived = False  # the current board has sent its acceptance and nothing else
        self._lost_s: float | None = None  # the time of its board's loss; None: a board has it
        self._lost_ms = 0.0
        self.accepted = False  # by any board
        self.queued_ms = 0.0  # its time in this Router's queue
        self.times = 0
        self.cause: RkserveError | None = (
            None  # of the last loss of a board, apart from time limits
        )
        self.strikes: list[LostBoard] = []

    # -- events of boards ---------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return self._tokens

    @property
    def begun(self) -> bool:
        """Return whether any part of the answer has arrived."""
        return bool(self._slots or self._news)

    def heard(self, event: Event) -> Event | None:
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
            )
            return replace(event, timings=timings)
        return event

    @property
    def rests(self) -> Paused | None:
        """The pause in force, which the next board takes over; None if not paused."""
        return self._rest

    def pause(self) -> None:
        """Pause it while no board has it; the next board keeps it paused."""
        self._rest, self._over = Paused(None, self.tokens, Kv.RECOMPUTED), False

    def resume(self) -> None:
        """End its pause while no board has it."""
        self._rest, self._over = None, True

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
        )
        usage = Usage(len(prompt.prompt_ids) or prompt.counted, self.tokens)
        return [*found, Finished(FinishReason.ABORT, usage, timings, tuple(spans))]

    def back(self, event: Event, now_s: float) -> float | None:
        """Return the time from a loss to this event, the first of the next board.

        Call it before ``heard``, while ``waits``.
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
        if not self.begun:
            mark = (0, accepted.version)
            self._bound = Bound((mark,), accepted.adapter, accepted.line_epoch)
        return None if known else accepted

    def _rested(self, paused: Paused) -> Paused | None:
        """Drop the next board's report of a pause that the client knows."""
        known = self._arrived and self._rest is not None
        self._arrived = False
        if paused.by == BY_CLUSTER:
            self._rest, self._over = None, True
        else:
            self._rest = paused
        return None if known else paused

    def _grow(self, delta: Delta) -> None:
        self._arrived = False
        self._tokens += len(delta.token_ids)
        if delta.plain:
            self._rest, self._over = None, not delta.token_ids
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
        self._tokens = sum(slot.kind is not TokenOrigin.INJECTED for slot in self._slots)
        if delta.retract:
            self._text = ["".join(self._text)[: -delta.retract]]
        self._text.append(delta.text)
        if not delta.paused:
            self._over = not grown and (self._over or self._rest is not None)
            self._rest = None

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
        if isinstance(exc, _OWN_RUN) and self._rest is None:
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
            paused=self._rest,
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
