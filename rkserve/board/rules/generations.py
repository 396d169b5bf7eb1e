"""Generations on a board: their states as a table, and the counters of them. Pure.

The table says which events and actions each state allows. Counters are per generation, per version
of the weights, and since the board's start; a version is known here by its label alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rkserve.core.board_report import GenerationState, VersionFigures
from rkserve.core.errors import Misuse, StateConflict
from rkserve.core.messages import ControlAction, Timings, Usage, VersionSpan
from rkserve.native.runtime import Perf


class GenerationEvent(Enum):
    """An event of a generation."""

    STARTED = "a run starts"
    ARRIVED = "it arrives paused from another board"
    TOKEN = "a token"
    PAUSE_ASKED = "a call or a hook requests a pause"
    HELD = "the cluster stops it"
    FREED = "it continues before it was paused"
    PAUSED = "it emits no more tokens"
    EDITED = "an edit"
    RESUME_ASKED = "a resumption is requested"
    REWOUND = "a hook changed its context"
    REQUEUED = "it waits for the board"
    ABORT_ASKED = "an abort is requested"
    ENDED = "its last event is settled"


_S, _E = GenerationState, GenerationEvent

TRANSITIONS: dict[tuple[GenerationState, GenerationEvent], GenerationState] = {
    (_S.QUEUED, _E.STARTED): _S.PREFILLING,
    (_S.QUEUED, _E.ARRIVED): _S.PAUSED,
    (_S.QUEUED, _E.ABORT_ASKED): _S.ABORTING,
    (_S.QUEUED, _E.ENDED): _S.ENDED,
    (_S.PREFILLING, _E.TOKEN): _S.GENERATING,
    # Unlike a client the cluster may stop it here; the prefill itself cannot be cut short.
    (_S.PREFILLING, _E.HELD): _S.PAUSING,
    (_S.PREFILLING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.PREFILLING, _E.ENDED): _S.ENDED,
    (_S.GENERATING, _E.TOKEN): _S.GENERATING,
    (_S.GENERATING, _E.PAUSE_ASKED): _S.PAUSING,
    (_S.GENERATING, _E.HELD): _S.PAUSING,
    (_S.GENERATING, _E.REWOUND): _S.RESUMING,
    (_S.GENERATING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.GENERATING, _E.ENDED): _S.ENDED,
    # A pause races the last token: the answer may still end, which is fine.
    (_S.PAUSING, _E.TOKEN): _S.PAUSING,
    (_S.PAUSING, _E.PAUSED): _S.PAUSED,
    # Only its version changed, or the cluster has resumed.
    (_S.PAUSING, _E.FREED): _S.RESUMING,
    (_S.PAUSING, _E.ABORT_ASKED): _S.ABORTING,
    (_S.PAUSING, _E.ENDED): _S.ENDED,
    (_S.PAUSED, _E.EDITED): _S.PAUSED,
    (_S.PAUSED, _E.RESUME_ASKED): _S.RESUMING,
    (_S.PAUSED, _E.ABORT_ASKED): _S.ABORTING,
    # Its pause timed out, or the client is gone.
    (_S.PAUSED, _E.ENDED): _S.ENDED,
    # Kept in the KV cache it starts at once; recomputed it queues first.
    (_S.RESUMING, _E.STARTED): _S.PREFILLING,
    (_S.RESUMING, _E.REQUEUED): _S.QUEUED,
    (_S.RESUMING, _E.ABORT_ASKED): _S.ABORTING,
    # An edit may have completed the answer: then no run follows.
    (_S.RESUMING, _E.ENDED): _S.ENDED,
    # An abort is asynchronous; a second one has no effect.
    (_S.ABORTING, _E.TOKEN): _S.ABORTING,
    (_S.ABORTING, _E.ABORT_ASKED): _S.ABORTING,
    # The runtime had paused before the abort: the run is drained, and the abort continues.
    (_S.ABORTING, _E.PAUSED): _S.ABORTING,
    (_S.ABORTING, _E.ENDED): _S.ENDED,
}

_ASKED = {
    ControlAction.PAUSE: GenerationEvent.PAUSE_ASKED,
    ControlAction.EDIT: GenerationEvent.EDITED,
    ControlAction.RESUME: GenerationEvent.RESUME_ASKED,
    ControlAction.ABORT: GenerationEvent.ABORT_ASKED,
}

_NOT_YET = "It can be paused after its first token."
_PAUSE_FIRST = "Pause it first."
_GOING_ON = "It is not paused."
_SOON = "Wait until it is paused."

_HINTS: dict[tuple[ControlAction, GenerationState], str] = {
    (ControlAction.PAUSE, _S.QUEUED): _NOT_YET,
    (ControlAction.PAUSE, _S.PREFILLING): _NOT_YET,
    (ControlAction.PAUSE, _S.RESUMING): "It can be paused again after its next token.",
    (ControlAction.PAUSE, _S.PAUSING): "It is being paused already.",
    (ControlAction.PAUSE, _S.PAUSED): "Edit, resume or abort it.",
    (ControlAction.EDIT, _S.GENERATING): _PAUSE_FIRST,
    (ControlAction.EDIT, _S.PAUSING): _SOON,
    (ControlAction.RESUME, _S.GENERATING): _GOING_ON,
    (ControlAction.RESUME, _S.RESUMING): _GOING_ON,
    (ControlAction.RESUME, _S.PAUSING): _SOON,
}


def advance(state: GenerationState, event: GenerationEvent) -> GenerationState:
    """Return the state after ``event``.

    Raises:
        Misuse: the table does not list the event in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Misuse(
            f"'{event.value}' cannot happen to a generation that is {state.value}"
        ) from None


def judge(state: GenerationState, action: ControlAction) -> GenerationState:
    """Return the state after ``action``.

    Raises:
        StateConflict: the state does not allow it; the generation is not affected.
    """
    after = TRANSITIONS.get((state, _ASKED[action]))
    if after is None:
        raise StateConflict(action.value, state.value, _HINTS.get((action, state), ""))
    return after


@dataclass(slots=True)
class BoardCounters:
    """Counters since the replica's start; their names are those of ``BoardReport``."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    memory_mb: float = 0.0
    pauses: int = 0
    parked: int = 0
    restored: int = 0
    cache_written_bytes: int = 0
    cache_write_ms: float = 0.0
    cache_read_bytes: int = 0
    cache_read_ms: float = 0.0
    cache_fetched: int = 0
    cache_fetched_bytes: int = 0
    cache_fetch_ms: float = 0.0
    cache_sent: int = 0
    cache_sent_bytes: int = 0
    batch_runs: int = 0
    batch_entries: int = 0
    batch_tail_ms: float = 0.0

    def count(self, usage: Usage, timings: Timings) -> None:
        """Add a generation that ended in order."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.prefill_tokens += timings.prefill_tokens
        self.prefill_ms += timings.prefill_ms
        self.decode_tokens += timings.decode_tokens
        self.decode_ms += timings.decode_ms
        self.memory_mb = timings.memory_mb or self.memory_mb


@dataclass(slots=True)
class GenerationCounters:
    """The cost of one generation over all of its runs and pauses."""

    prompt_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    paused_s: float = 0.0
    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    decode_ms: float = 0.0
    decode_tokens: int = 0
    memory_mb: float = 0.0
    batch: int = 1
    batch_wait_s: float = 0.0
    encode_ms: float = 0.0
    cache_s: float = 0.0  # spent on prompt cache files before its runs and after them
    runs: int = 0
    continued: int = 0
    begun_tokens: int = 0  # tokens of the answer that came with a continued request

    def add(self, perf: Perf, reused: int) -> None:
        """Add a run. ``reused`` ids of its context were planned to be in the KV cache."""
        if self.runs == 0:
            # In text mode only the runtime knows the prompt's token count.
            sent = max(0, perf.prefill_tokens - self.begun_tokens)
            self.prompt_tokens = self.prompt_tokens or sent
            # The runtime's count wins where it is less than planned: ids that it prefilled again
            # were not reused. A run without figures (no FINISH) keeps the plan.
            unread = self.prompt_tokens + self.begun_tokens - perf.prefill_tokens
            self.cached_tokens = max(0, min(reused, unread, self.prompt_tokens))
        self.runs += 1
        self.prefill_ms += perf.prefill_ms
        self.prefill_tokens += perf.prefill_tokens
        self.decode_ms += perf.decode_ms
        self.decode_tokens += perf.decode_tokens
        self.memory_mb = perf.memory_mb or self.memory_mb
        self.encode_ms += perf.encode_ms

    def usage(self, completion_tokens: int, reasoning_tokens: int = 0) -> Usage:
        """Return the token counts of the whole generation."""
        return Usage(self.prompt_tokens, completion_tokens, self.cached_tokens, reasoning_tokens)

    def timings(self) -> Timings:
        """Return the times of the whole generation."""
        return Timings(
            queue_ms=self.queue_s * 1e3,
            prefill_ms=self.prefill_ms,
            prefill_tokens=self.prefill_tokens,
            decode_ms=self.decode_ms,
            decode_tokens=self.decode_tokens,
            memory_mb=self.memory_mb,
            paused_ms=self.paused_s * 1e3,
            batch=self.batch,
            batch_wait_ms=self.batch_wait_s * 1e3,
            continued=self.continued,
            encode_ms=self.encode_ms,
            cache_ms=self.cache_s * 1e3,
        )


# Each update of a trainer makes a new version, so only the most recent ones are kept.
VERSIONS_REMEMBERED = 32


@dataclass(slots=True)
class VersionSpans:
    """The versions that generated one answer's tokens; edits may take tokens back."""

    _marks: list[tuple[int, str]] = field(default_factory=list)  # (first token, label)
    begun: int = 0  # number of calls of ``begin``

    @property
    def marks(self) -> tuple[tuple[int, str], ...]:
        """The first token and the label of each span."""
        return tuple(self._marks)

    @property
    def label(self) -> str | None:
        """The version of the last run; None before the first."""
        return self._marks[-1][1] if self._marks else None

    def begin(self, label: str, tokens: int) -> None:
        """Start a span of ``label`` at token ``tokens``, the current length of the answer."""
        self.begun += 1
        while self._marks and self._marks[-1][0] >= tokens:
            self._marks.pop()
        if self.label != label:
            # Tokens inserted by an edit count for the run that follows.
            self._marks.append((tokens if self._marks else 0, label))

    def of(self, tokens: int) -> tuple[VersionSpan, ...]:
        """Return the spans of an answer of ``tokens`` tokens."""
        ends = [*[start for start, _ in self._marks], tokens][1:]
        spans = (
            VersionSpan(label, start, min(end, tokens))
            for (start, label), end in zip(self._marks, ends, strict=True)
        )
        return tuple(span for span in spans if span.start < span.end)


class VersionCounters:
    """Counters of each version that one board served since its replica's start."""

    def __init__(self) -> None:
        self._figures: dict[str, VersionFigures] = {}  # least recently used first

    @property
    def figures(self) -> tuple[VersionFigures, ...]:
        """The counters of each version, the most recently used last."""
        return tuple(self._figures.values())

    def add(
        self,
        label: str,
        *,
        requests: int = 0,
        failed: int = 0,
        tokens: int = 0,
        decode_ms: float = 0.0,
    ) -> None:
        """Count requests that began with this version or failed by a fault of the board or of this
        version, and generated tokens.
        """
        before = self._figures.pop(label, VersionFigures(label))
        self._figures[label] = VersionFigures(
            label,
            before.requests + requests,
            before.failed + failed,
            before.tokens + tokens,
            before.decode_ms + decode_ms,
        )
        while len(self._figures) > VERSIONS_REMEMBERED:
            del self._figures[next(iter(self._figures))]
