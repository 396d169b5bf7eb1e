"""One run of an engine: its entries, received tokens, times, and the watchdog's deadline.

It decides nothing: the runner handles each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from rkserve.board.answer.transcript import Ids, Range
from rkserve.board.engine.protocol import EntryCommand, RunEnded
from rkserve.board.run.job import Job
from rkserve.board.storage.prompt_cache import CacheHit
from rkserve.core.run_params import Pooling
from rkserve.native.engine_frames import StepParams
from rkserve.native.runtime import Perf


def loop_time_s() -> float:
    """Return the event loop's time; only differences mean something."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The start of a run.

    ``base`` is the content of entry 0 of the KV cache once ``entries`` are prefilled, of which
    ``reused`` ids are not sent; in text mode it is not known. With ``history`` the context outlives
    the run. ``limit`` in tokens is enforced by the runtime where it can. ``hit`` is the prompt
    cache to load, and ``save`` the reserved file that the KV cache is written to at the end. With
    ``steps`` the run is made of single steps. ``pooling`` requests a vector of entry 0 instead of
    tokens. A context that is used ``once`` is not worth a file.
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
    """A run from its start to its return. The runtime can pause it if it is ``pausable``.

    A seat is None from the moment that its job has left: late tokens of that entry are dropped.
    """

    def __init__(
        self,
        number: int,
        entry_jobs: Sequence[Job | None],
        spec: RunSpec,
        watchdog: Watchdog,
        *,
        pausable: bool = False,
    ) -> None:
        self.number = number
        self.entry_jobs = list(entry_jobs)
        self.spec = spec
        self.watchdog = watchdog
        self.pausable = pausable
        self.stopping = False  # an abort was requested
        self.pausing = False  # a pause inside the runtime was requested
        self.muted = False  # all jobs have left it; its output is dropped
        # Every token of each entry, also dropped ones.
        self.given: list[list[int]] = [[] for _ in self.entry_jobs]
        self.left_s: list[float] = []  # when each job left that did not stay to the end
        self.started_s = self.token_s = asyncio.get_running_loop().time()
        self.first_s: float | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._nearer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def jobs(self) -> list[Job]:
        """The jobs that are still in the run."""
        return [job for job in self.entry_jobs if job is not None]

    @property
    def left_in_prefill(self) -> bool:
        """True where all jobs left it during its prefill."""
        return self.muted and self.first_s is None

    @property
    def transcript(self) -> Ids:
        """All ids that entry 0 of the KV cache may hold."""
        return (*self.spec.base, *self.given[0])

    def came(self, entry: int, token_id: int, now_s: float) -> None:
        """Note a token."""
        if self.watchdog.token(now_s):
            self.hurry()
        self.given[entry].append(token_id)
        self.token_s = now_s
        if self.first_s is None:
            self.first_s = now_s

    def end(self) -> None:
        """Note that it returned, or was given up."""
        if not self.over.done():
            self.over.set_result(None)

    def leave(self, entry: int, now_s: float) -> None:
        """Take the job of this entry out of the run."""
        self.entry_jobs[entry] = None
        self.left_s.append(now_s)

    def tail_s(self, now_s: float) -> float:
        """Return the summed time that finished entries waited for the run's end."""
        return sum(now_s - left_s for left_s in self.left_s)

    def clocked(self, entry: int, now_s: float, restored: int = 0) -> Perf:
        """Return the figures of an entry so far by the board's clock.

        ``restored`` ids of those sent came from a prompt cache and were not computed.
        """
        first_s = now_s if self.first_s is None else self.first_s
        given = len(self.given[entry])
        return Perf(
            prefill_ms=(first_s - self.started_s) * 1e3,
            prefill_tokens=len(self.spec.entries[entry].ids) - restored,
            decode_ms=max(0.0, self.token_s - first_s) * 1e3 if given else 0.0,
            decode_tokens=given,
        )

    def perf(self, ended: RunEnded) -> Perf:
        """Return the runtime's figures of entry 0, or the board's own where it gave none."""
        if ended.in_order:
            return ended.perf
        begin = self.spec
        restored = begin.reused if begin.hit is not None and ended.cache_refused is None else 0
        return self.clocked(0, loop_time_s(), restored)

    def nearer_deadline(self) -> asyncio.Future[None]:
        """Return a future that completes when the watchdog's deadline moves nearer."""
        if self._nearer.done():
            self._nearer = asyncio.get_running_loop().create_future()
        return self._nearer

    def hurry(self) -> None:
        """Wake the run's supervision: the deadline has moved nearer."""
        if not self._nearer.done():
            self._nearer.set_result(None)


def patience_for(spec: RunSpec, patience: RunTimeouts) -> RunTimeouts:
    """Return the timeouts of such a run."""
    if spec.save is not None:
        # The file is written between the last token and the return of the call.
        return replace(
            patience,
            token_s=patience.token_s + patience.first_token_s,
            abort_s=patience.abort_s + patience.first_token_s,
        )
    if images := sum(len(entry.images) for entry in spec.entries):
        first_s = patience.first_token_s + patience.image_s * images
        return replace(patience, first_token_s=first_s)
    if spec.steps is None:
        return patience
    # A step is never cut short, and one that sends the whole context again takes its prefill.
    again = 0 if spec.history else len(spec.base) + (spec.limit or 0)
    step_s = patience.token_s + patience.prefill_per_token_s * again
    if spec.steps.optimistic:
        # A run that leaves the grammar is ended, its logits are read, and it is restarted before
        # the next token.
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
    """The event that the run has to deliver next."""

    PREFILL = "the first token"
    DECODE = "the next token"
    PAUSE = "the pause"
    RETURN = "the end of the run after the abort"


class Watchdog:
    """The deadline of one run. It moves with every token and tightens with a pause or an abort."""

    def __init__(self, patience: RunTimeouts, prefill_tokens: int, now_s: float) -> None:
        self._patience = patience
        self.phase = RunPhase.PREFILL
        self._aborting = self._pausing = False
        self._since_s = now_s
        self._limit_s = patience.first_token_s + patience.prefill_per_token_s * prefill_tokens

    @property
    def deadline_s(self) -> float:
        """The time at which the run counts as hung."""
        return self._since_s + self._limit_s

    def token(self, now_s: float) -> bool:
        """Note a token. Late tokens after a pause or an abort do not move the deadline.

        Like ``aborted``, it returns True where the deadline moved nearer, so that a sleeper must
        check it again.
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
        """Note the request for a pause; it takes effect at the next token with text."""
        before_s = self.deadline_s
        self._pausing = True
        if self.phase is RunPhase.DECODE:
            self._expect(RunPhase.PAUSE, self._patience.token_s, now_s)
        return self.deadline_s < before_s

    def aborted(self, now_s: float) -> bool:
        """Note the request for an abort. It does not cut prefill, which keeps its own limit."""
        before_s = self.deadline_s
        self._aborting = True
        if self.phase in (RunPhase.DECODE, RunPhase.PAUSE):
            self._expect(RunPhase.RETURN, self._patience.abort_s, now_s)
        return self.deadline_s < before_s

    def verdict(self, now_s: float) -> str:
        """Return the missed event, for the log and the health check."""
        return f"{self.phase.value} did not come within {now_s - self._since_s:.1f} s"

    def _expect(self, phase: RunPhase, limit_s: float, now_s: float) -> None:
        self.phase, self._since_s, self._limit_s = phase, now_s, limit_s
