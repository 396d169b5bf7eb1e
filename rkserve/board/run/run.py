"""One run of an engine as its board sees it: who sits in which entry, what came, and when.

It knows no policy: what a token leads to is the conductor's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from rkserve.board.answer.kv_plan import Ids, Range
from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.run.job import Job
from rkserve.board.storage.prompt_cache import CacheHit
from rkserve.core.run_params import Pooling
from rkserve.native.runtime import Perf
from rkserve.native.step_params import StepParams


def loop_time_s() -> float:
    """Return the event loop's time; only differences mean something."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How a run begins.

    ``base`` is what the KV cache of entry 0 holds once ``entries`` are prefilled, and ``reused`` of
    it are not sent; in text mode it is not known. With ``history`` the context outlives the run.
    ``limit`` in tokens is kept by the runtime where that can. ``hit`` is the prompt cache to begin
    from, and ``save`` the reserved file that the KV cache is written to at the end. With ``steps``
    the run is made of them. ``pooling`` asks for a vector of entry 0 in the place of tokens. What
    is asked ``once`` leaves a context that is not worth a file.
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


class EngineRun:
    """A run from its start to its return. ``pausable`` says that the runtime itself may pause it.

    A seat is empty (None) from the moment that its job has left: late tokens of it are nobody's.
    """

    def __init__(
        self,
        number: int,
        seats: Sequence[Job | None],
        beginning: RunSpec,
        watchdog: Watchdog,
        *,
        pausable: bool = False,
    ) -> None:
        self.number = number
        self.seats = list(seats)
        self.beginning = beginning
        self.watchdog = watchdog
        self.pausable = pausable
        self.stopping = False  # an abort was asked for
        self.pausing = False  # a pause inside the runtime was asked for
        self.muted = False  # everybody has left it: what it still brings is nobody's
        self.given: list[list[int]] = [[] for _ in self.seats]  # every token, also nobody's
        self.left_s: list[float] = []  # when each job that did not stay to the end left
        self.started_s = self.token_s = asyncio.get_running_loop().time()
        self.first_s: float | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._nearer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def jobs(self) -> list[Job]:
        """Those who still sit."""
        return [job for job in self.seats if job is not None]

    @property
    def unheard(self) -> bool:
        """Whether everybody left it in its prefill, which went on for nobody."""
        return self.muted and self.first_s is None

    @property
    def transcript(self) -> Ids:
        """Everything that entry 0 of the KV cache may hold."""
        return (*self.beginning.base, *self.given[0])

    def came(self, entry: int, token_id: int, now_s: float) -> None:
        """Note a token."""
        if self.watchdog.token(now_s):
            self.hurry()
        self.given[entry].append(token_id)
        self.token_s = now_s
        if self.first_s is None:
            self.first_s = now_s

    def end(self) -> None:
        """It has returned, or is given up."""
        if not self.over.done():
            self.over.set_result(None)

    def leave(self, entry: int, now_s: float) -> None:
        """The job of this entry is not concerned any more."""
        self.seats[entry] = None
        self.left_s.append(now_s)

    def tail_s(self, now_s: float) -> float:
        """How long the entries that were finished sat there while the run went on."""
        return sum(now_s - left_s for left_s in self.left_s)

    def clocked(self, entry: int, now_s: float, restored: int = 0) -> Perf:
        """What an entry has taken so far by the board's clock.

        ``restored`` ids of what was sent came from a prompt cache and were not computed.
        """
        first_s = now_s if self.first_s is None else self.first_s
        given = len(self.given[entry])
        return Perf(
            prefill_ms=(first_s - self.started_s) * 1e3,
            prefill_tokens=len(self.beginning.entries[entry].ids) - restored,
            decode_ms=max(0.0, self.token_s - first_s) * 1e3 if given else 0.0,
            decode_tokens=given,
        )

    def perf(self, ended: RunEnded) -> Perf:
        """Return the runtime's figures of entry 0, or the board's own where it gave none."""
        if ended.in_order:
            return ended.perf
        begin = self.beginning
        restored = begin.reused if begin.hit is not None and ended.cache_refused is None else 0
        return self.clocked(0, loop_time_s(), restored)

    def nearer_deadline(self) -> asyncio.Future[None]:
        """Return a future that completes when the watchdog's deadline comes nearer."""
        if self._nearer.done():
            self._nearer = asyncio.get_running_loop().create_future()
        return self._nearer

    def hurry(self) -> None:
        """Wake whoever supervises the run: the deadline has come nearer."""
        if not self._nearer.done():
            self._nearer.set_result(None)


def patience_for(beginning: RunSpec, patience: RunTimeouts) -> RunTimeouts:
    """Return how long such a run may be silent."""
    if beginning.save is not None:
        # The file is written between the last token and the return of the call.
        return replace(
            patience,
            token_s=patience.token_s + patience.first_token_s,
            abort_s=patience.abort_s + patience.first_token_s,
        )
    if images := sum(len(entry.images) for entry in beginning.entries):
        first_s = patience.first_token_s + patience.image_s * images
        return replace(patience, first_token_s=first_s)
    if beginning.steps is None:
        return patience
    # A step is never cut, and one that sends the whole context again takes a prefill of it.
    again = 0 if beginning.history else len(beginning.base) + (beginning.limit or 0)
    step_s = patience.token_s + patience.prefill_per_token_s * again
    if beginning.steps.optimistic:
        # One that strays is ended, asked for its logits, and begun anew before the next token.
        first_s = patience.first_token_s + 2 * step_s
        patience, step_s = replace(patience, first_token_s=first_s), 3 * step_s
    return replace(patience, token_s=step_s, abort_s=patience.abort_s + step_s)


@dataclass(frozen=True, slots=True)
class RunTimeouts:
    """Time limits of a run, in seconds; see the configuration reference for the reasons."""

    first_token_s: float = 30.0
    prefill_per_token_s: float = 0.1
    token_s: float = 10.0
    abort_s: float = 2.0
    image_s: float = 30.0


class RunPhase(Enum):
    """What the run owes us next."""

    PREFILL = "the first token"
    DECODE = "the next token"
    PAUSE = "the pause"
    RETURN = "the end of the run after the abort"


class Watchdog:
    """The deadline of one run: moves with every token, tightens with a pause wish or an abort."""

    def __init__(self, patience: RunTimeouts, prefill_tokens: int, now_s: float) -> None:
        self._patience = patience
        self.phase = RunPhase.PREFILL
        self._aborting = self._pausing = False
        self._since_s = now_s
        self._limit_s = patience.first_token_s + patience.prefill_per_token_s * prefill_tokens

    @property
    def deadline_s(self) -> float:
        """When the run counts as hung."""
        return self._since_s + self._limit_s

    def token(self, now_s: float) -> bool:
        """A token came. After a pause wish or an abort, stragglers do not move the deadline.

        Like ``aborted``, it returns True where the deadline is nearer than before, so that whoever
        sleeps until then must look again.
        """
        before_s = self.deadline_s
        if self._aborting:
            if self.phase is not RunPhase.RETURN:
                self._expect(RunPhase.RETURN, self._patience.abort_s, now_s)
        elif self._pausing:
            if self.phase is not RunPhase.PAUSE:
                self._expect(RunPhase.PAUSE, self._patience.token_s, now_s)
        else:
            self._expect(RunPhase.DECODE, self._patience.token_s, now_s)
        return self.deadline_s < before_s

    def paused(self, now_s: float) -> bool:
        """A pause was asked for; it is granted at the next token that carries text."""
        before_s = self.deadline_s
        self._pausing = True
        if self.phase is RunPhase.DECODE:
            self._expect(RunPhase.PAUSE, self._patience.token_s, now_s)
        return self.deadline_s < before_s

    def aborted(self, now_s: float) -> bool:
        """An abort was asked for. It does not cut prefill, so that keeps its own limit."""
        before_s = self.deadline_s
        self._aborting = True
        if self.phase in (RunPhase.DECODE, RunPhase.PAUSE):
            self._expect(RunPhase.RETURN, self._patience.abort_s, now_s)
        return self.deadline_s < before_s

    def verdict(self, now_s: float) -> str:
        """Say what did not happen, for the log and the health check."""
        return f"{self.phase.value} did not come within {now_s - self._since_s:.1f} s"

    def _expect(self, phase: RunPhase, limit_s: float, now_s: float) -> None:
        self.phase, self._since_s, self._limit_s = phase, now_s, limit_s
