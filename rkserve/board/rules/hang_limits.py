"""The time limits of engine calls: from the settings, and nearer by the measured speed.

Before a board's speed is known the settings are the limits. Afterwards a run counts as hung once it
is silent for many times its usual time: a fast board is given up in seconds, and a slow one keeps
its time. Measured limits follow a slow-down within a few tokens and a speed-up slowly. Time in
which this process did not run itself is not counted. No processes, no clocks: time is an argument.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

# The limit is this multiple of the usual time. A throttled board takes three times as long.
TOKENS = 20.0  # of the time between two tokens
PREFILLS = 10.0  # of the time of a prompt, besides ``least_s``
# Prompts of several entries take turns. Their parts are shorter than those of a prompt alone, and
# computed between tokens of others: a token of them takes up to so many times as long.
SHARED_PREFILLS = 3.0
ABORTED_TOKENS = 4.0  # an abort takes effect at the next token
# A prompt's time is proportional to its length from here on; shorter ones take about as long.
SHORT_PROMPT = 64
CHANGE = 0.05  # limits follow a change of the usual time that is larger


@dataclass(frozen=True, slots=True)
class RunTimeouts:
    """Time limits of a run, in seconds; see the configuration reference for the reasons.

    Limits from measured speeds are never shorter than ``least_s``.
    """

    first_token_s: float = 30.0
    prefill_per_token_s: float = 0.1
    token_s: float = 10.0
    abort_s: float = 2.5
    image_s: float = 30.0
    least_s: float = 3.0


class RunKind(Enum):
    """Runs of one kind take similar times."""

    GENERATION = "tokens of the library"
    STEPS = "single steps, each a call of its own"
    POOLING = "a vector instead of tokens"


@dataclass(frozen=True, slots=True)
class RunShape:
    """The properties of a run that determine its time limits.

    ``prompt`` tokens are sent, and each step sends ``again`` tokens once more. ``usual`` runs have
    a prompt like any other: not those with images, embeddings, an encoder's output or a prompt
    cache, those whose prompt is a text of unknown length, and the first one after a load. Runs of
    so many ``entries`` may go on at the same time.
    """

    kind: RunKind = RunKind.GENERATION
    prompt: int = 0
    again: int = 0
    images: int = 0
    loads_cache: bool = False
    saves_cache: bool = False
    optimistic: bool = False
    usual: bool = True
    entries: int = 1


class RecentTimes:
    """The usual one of recent times: the median of many, or of the latest few if that is larger.

    So one odd value changes nothing, three slow ones in a row count at once, and fast ones only
    once they are the majority of many. A larger value never makes the result smaller.
    """

    FEW, MANY = 5, 63

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value_s: float) -> None:
        """Add the latest value."""
        self._values.append(value_s)
        insort(self._ordered, value_s)
        if len(self._values) > self.MANY:
            self._ordered.remove(self._values.popleft())

    @property
    def usual_s(self) -> float | None:
        """The usual value; None until there are a few."""
        count = len(self._values)
        if count < self.FEW:
            return None
        latest = sorted(self._values[-at] for at in range(1, self.FEW + 1))
        return max(self._ordered[count // 2], latest[self.FEW // 2])


@dataclass(slots=True)
class _KindTimes:
    """The times of one kind of run."""

    token: RecentTimes = field(default_factory=RecentTimes)
    short_prompt: RecentTimes = field(default_factory=RecentTimes)
    prompt_token: RecentTimes = field(default_factory=RecentTimes)  # of longer prompts


class EngineSpeeds:
    """The measured speed of one board, over all of its engines, and the limits of its next runs."""

    def __init__(self, timeouts: RunTimeouts) -> None:
        self._timeouts = timeouts
        self._kinds: Mapping[RunKind, _KindTimes] = {kind: _KindTimes() for kind in RunKind}

    def token(self, kind: RunKind, took_s: float) -> float | None:
        """Note the time between two tokens; return the usual one, if it is known."""
        times = self._kinds[kind].token
        times.add(took_s)
        return times.usual_s

    def prompt(self, kind: RunKind, computed: int, took_s: float) -> None:
        """Note the time to the first token, of which ``computed`` tokens of the prompt were the
        reason.
        """
        times = self._kinds[kind]
        if computed >= SHORT_PROMPT:
            times.prompt_token.add(took_s / computed)
        elif computed > 0:
            times.short_prompt.add(took_s)

    def limits(self, shape: RunShape) -> RunTimeouts:
        """Return the limits of a run that begins or continues now; none is beyond its setting.

        An abort gets the time of some tokens more than its setting: it takes effect at one.
        """
        given, times = _in_turns(self._timeouts, shape.entries), self._kinds[shape.kind]
        measured = given
        token_s = times.token.usual_s
        if token_s is not None and shape.again == 0:
            measured = replace(
                measured,
                token_s=min(given.token_s, max(given.least_s, TOKENS * token_s)),
                abort_s=given.abort_s + min(given.token_s, ABORTED_TOKENS * token_s),
            )
        if shape.usual:
            measured = self._with_prompt(measured, times, shape)
        return limits_of(shape, measured, given)

    def _with_prompt(self, base: RunTimeouts, times: _KindTimes, shape: RunShape) -> RunTimeouts:
        rate_s, short_s = times.prompt_token.usual_s, times.short_prompt.usual_s
        prefills = PREFILLS if shape.entries == 1 else PREFILLS * SHARED_PREFILLS * shape.entries
        if shape.prompt < SHORT_PROMPT:
            known = [one for one in (short_s, _times(rate_s, SHORT_PROMPT)) if one is not None]
            if not known:
                return base
            first_s, each_s = base.least_s + prefills * max(known), 0.0
        elif rate_s is None:
            return base
        else:
            first_s, each_s = base.least_s, prefills * rate_s
        return replace(
            base,
            first_token_s=min(base.first_token_s, first_s),
            prefill_per_token_s=min(base.prefill_per_token_s, each_s),
        )


def _times(value: float | None, count: int) -> float | None:
    return None if value is None else value * count


def _in_turns(given: RunTimeouts, entries: int) -> RunTimeouts:
    """Return the settings with the time for prompts of other entries before the run's own."""
    return replace(
        given,
        first_token_s=given.first_token_s * entries,
        prefill_per_token_s=given.prefill_per_token_s * entries,
    )


def limits_of(shape: RunShape, base: RunTimeouts, given: RunTimeouts) -> RunTimeouts:
    """Return ``base`` with the time for the extraordinary parts of a run, from the settings."""
    if shape.loads_cache:
        base = replace(base, first_token_s=given.first_token_s)
    if shape.saves_cache:
        # The file is written between the last token and the return of the call.
        return replace(
            base,
            token_s=base.token_s + given.first_token_s,
            abort_s=base.abort_s + given.first_token_s,
        )
    if shape.images:
        first_s = base.first_token_s + given.image_s * shape.images
        return replace(base, first_token_s=first_s)
    if shape.kind is not RunKind.STEPS:
        return base
    # A step is never cut short, and one that sends the whole context again takes its prefill.
    step_s = base.token_s + given.prefill_per_token_s * shape.again
    if shape.optimistic:
        # A run that leaves the grammar is ended, its logits are read, and it is restarted before
        # the next token.
        first_s = base.first_token_s + 2 * step_s
        base, step_s = replace(base, first_token_s=first_s), 3 * step_s
    return replace(base, token_s=step_s, abort_s=base.abort_s + step_s)


class RunPhase(Enum):
    """The event that the run has to deliver next."""

    PREFILL = "the first token"
    DECODE = "the next token"
    PAUSE = "the pause"
    RETURN = "the end of the run after the abort"


class Watchdog:
    """The deadline of one run. It moves with every token and tightens with a pause or an abort."""

    def __init__(self, speeds: EngineSpeeds, shape: RunShape, now_s: float) -> None:
        self._speeds, self._shape = speeds, shape
        self._limits = limits = speeds.limits(shape)
        self.phase = RunPhase.PREFILL
        self._aborting = self._pausing = False
        self._since_s = now_s
        self._limit_s = limits.first_token_s + limits.prefill_per_token_s * shape.prompt
        self._token_s: dict[int, float] = {}  # by entry, the time of its latest token
        self._usual_s = 0.0  # between two tokens, at the time of ``_limits``

    @property
    def deadline_s(self) -> float:
        """The time at which the run counts as hung."""
        return self._since_s + self._limit_s

    def token(self, now_s: float, entry: int = 0) -> bool:
        """Note a token. Late tokens after a pause or an abort do not move the deadline.

        Like ``aborted``, it returns True where the deadline moved nearer, so that a sleeper must
        check it again.
        """
        self._measure(now_s, entry)
        before_s = self.deadline_s
        if self._aborting:
            if self.phase is not RunPhase.RETURN:
                self._expect(RunPhase.RETURN, self._limits.abort_s, now_s)
        elif self._pausing:
            if self.phase is not RunPhase.PAUSE:
                self._expect(RunPhase.PAUSE, self._limits.token_s, now_s)
        else:
            self._expect(RunPhase.DECODE, self._limits.token_s, now_s)
        return self.deadline_s < before_s

    def _measure(self, now_s: float, entry: int) -> None:
        """Note the time of a token, except where a step sends the whole context again."""
        before_s, shape = self._token_s.get(entry), self._shape
        self._token_s[entry] = now_s
        if before_s is None or shape.again or shape.optimistic:
            return
        usual_s = self._speeds.token(shape.kind, now_s - before_s)
        # Not for each token, because the limits change little.
        if usual_s is not None and abs(usual_s - self._usual_s) > CHANGE * self._usual_s:
            self._usual_s, self._limits = usual_s, self._speeds.limits(shape)

    def paused(self, now_s: float) -> bool:
        """Note the request for a pause; it takes effect at the next token with text."""
        before_s = self.deadline_s
        self._pausing = True
        if self.phase is RunPhase.DECODE:
            self._expect(RunPhase.PAUSE, self._limits.token_s, now_s)
        return self.deadline_s < before_s

    def aborted(self, now_s: float) -> bool:
        """Note the request for an abort. It does not cut prefill, which keeps its own limit."""
        before_s = self.deadline_s
        self._aborting = True
        if self.phase in (RunPhase.DECODE, RunPhase.PAUSE):
            self._expect(RunPhase.RETURN, self._limits.abort_s, now_s)
        return self.deadline_s < before_s

    def excuse(self, lost_s: float, now_s: float) -> None:
        """Do not count the latest ``lost_s``, in which this process did not run."""
        self._since_s = min(now_s, self._since_s + lost_s)

    def verdict(self, now_s: float) -> str:
        """Return the missed event, for the log and the health check."""
        return (
            f"{self.phase.value} did not come within {now_s - self._since_s:.1f} s; the limit is "
            f"{self._limit_s:.1f} s"
        )

    def _expect(self, phase: RunPhase, limit_s: float, now_s: float) -> None:
        self.phase, self._since_s, self._limit_s = phase, now_s, limit_s


class StoppedTime:
    """Time in which this process did not run, found by looks that are due at known times.

    A process may be stopped, starved, or busy with something else than its event loop, and a whole
    machine may stand still; silence of others in that time proves nothing.
    """

    LATE_S = 0.25  # a look that is later was kept from its time

    def __init__(self) -> None:
        self._due_s: float | None = None

    def due(self, at_s: float) -> None:
        """Note the time at which the next look is due."""
        self._due_s = at_s

    def look(self, now_s: float) -> float:
        """Return how much too late this look is; 0 for the usual delay, or without a due time."""
        late_s = 0.0 if self._due_s is None else now_s - self._due_s
        self._due_s = None
        return late_s if late_s > self.LATE_S else 0.0
