"""One run of an engine as its board sees it: who sits in which entry, what came, and when.

It knows no policy: what a token leads to is the conductor's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rkserve.board.answer.kv_plan import Ids, Range
from rkserve.board.engine.protocol import EntryCommand
from rkserve.board.engine.watchdog import Watchdog
from rkserve.board.run.job import Job
from rkserve.board.storage.prompt_cache import CacheHit
from rkserve.core.run_params import Pooling
from rkserve.native.runtime import Perf
from rkserve.native.step_params import StepParams


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

    def nearer_deadline(self) -> asyncio.Future[None]:
        """Return a future that completes when the watchdog's deadline comes nearer."""
        if self._nearer.done():
            self._nearer = asyncio.get_running_loop().create_future()
        return self._nearer

    def hurry(self) -> None:
        """Wake whoever supervises the run: the deadline has come nearer."""
        if not self._nearer.done():
            self._nearer.set_result(None)
