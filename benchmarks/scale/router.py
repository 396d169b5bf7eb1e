"""The simulation's view of a router, and the CPU time of its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.scale.board import PaperBoard
from benchmarks.scale.conversations import Context, Talk
from rkserve.core.errors import RkserveError
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.reservation import AnswerTiming


@dataclass(eq=False, slots=True)
class Request:
    """One turn on its way. ``error`` is why it got no board."""

    name: str
    prompt: Context
    answer: int
    claim: QueueTerms
    talk: Talk
    asked_s: float
    error: RkserveError | None = None

    @property
    def session(self) -> str:
        """The conversation's name."""
        return str(self.talk.number)


@dataclass(slots=True)
class Spent:
    """Microseconds of CPU time that decisions, hashing of prompts and reports have taken.

    ``waits`` are decisions to wait for a certain board.
    """

    decide_us: list[float] = field(default_factory=list)
    hash_us: list[float] = field(default_factory=list)
    report_us: list[float] = field(default_factory=list)
    waits: int = 0


class Router(Protocol):
    """A router: it takes requests and chooses the board of each."""

    spent: Spent

    def offer(self, request: Request, now_s: float, /) -> None:
        """It has come."""

    def starts(self, now_s: float, /) -> list[tuple[Request, PaperBoard]]:
        """Return those that begin now."""

    def progress(self, request: Request, tokens: int, /) -> None:
        """So many more tokens have come."""

    def ended(
        self, request: Request, board: PaperBoard, took: AnswerTiming, now_s: float, /
    ) -> None:
        """It has ended."""

    def report(self, board: PaperBoard, now_s: float, /) -> None:
        """A board reports."""

    def wakes_s(self, now_s: float, /) -> float | None:
        """Return when to look at ``starts`` again, though nothing has happened."""

    def refused(self) -> list[Request]:
        """Return those that were turned away since the last call."""
