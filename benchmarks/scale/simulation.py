"""The simulation: sessions arrive, ask and pause; boards compute; reports arrive."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.scale.board import PaperBoard
from benchmarks.scale.conversations import Shape, Talk, talk, turns_of
from benchmarks.scale.router import Request, Router
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.reservation import AnswerTiming


@dataclass(slots=True)
class Seen:
    """The results, request by request, in the order of their ends."""

    ttft_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    refused: int = 0
    ended: int = 0
    tokens: int = 0
    end_s: float = 0.0
    by_flow: dict[str, float] = field(default_factory=dict)
    board_ms: float = 0.0
    good: int = 0


class World:
    """One simulation. ``claims`` says what a session may ask of the queue.

    Each run tells ``steps`` times how far it is, and ``says`` hears how many sessions are over.
    """

    def __init__(
        self,
        shape: Shape,
        boards: list[PaperBoard],
        router: Router,
        seed: int,
        *,
        report_s: float = 1.0,
        claims: Callable[[int], QueueTerms] | None = None,
        says: Callable[[int, int], None] | None = None,
        steps: int = 4,
    ) -> None:
        self.seen = Seen()
        self.now_s = 0.0
        self.router = router
        self.boards = boards
        self._shape = shape
        self._seed = seed
        self._report_s = report_s
        self._claims = claims
        self._says = says
        self._steps = steps
        self._rng = Random(f"{seed} arrivals")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrived = self._over = 0
        self._wake_s = float("inf")

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        """Do something at that time."""
        heapq.heappush(self._events, (when_s, next(self._numbers), do))

    def run(self, until_s: float = float("inf")) -> Seen:
        """Play it to the end, or for so long."""
        self._arrive()
        step_s = self._report_s / len(self.boards)
        for number, board in enumerate(self.boards):
            self.at(number * step_s, lambda board=board: self._report(board))  # type: ignore[misc] # a lambda with a default
        while self._events and self._over < self._shape.sessions:
            when_s, _, do = heapq.heappop(self._events)
            if when_s > until_s:
                break
            self.now_s = when_s
            do()
        self.seen.end_s = self.now_s
        return self.seen

    def _arrive(self) -> None:
        turns = turns_of(self._shape, self._rng)
        self._speak(talk(self._shape, self._seed, self._arrived, turns))
        self._arrived += 1
        if self._arrived < self._shape.sessions:
            self.at(self.now_s + self._rng.expovariate(self._shape.rate), self._arrive)

    def _report(self, board: PaperBoard) -> None:
        self.router.report(board, self.now_s)
        self.at(self.now_s + self._report_s, lambda: self._report(board))

    def _speak(self, one: Talk) -> None:
        one.note(self._shape)
        claim = self._claims(one.number) if self._claims is not None else QueueTerms()
        request = Request(
            f"{one.number}/{one.turns_left}",
            one.context,
            one.answer,
            claim,
            one,
            self.now_s,
        )
        self.router.offer(request, self.now_s)
        self._pump()

    def _pump(self) -> None:
        for request, board in self.router.starts(self.now_s):
            self._start(request, board)
        for request in self.router.refused():
            self.seen.refused += 1
            self._next(request)
        wake_s = self.router.wakes_s(self.now_s)
        if wake_s is not None and not self.now_s < self._wake_s <= wake_s:
            self._wake_s = wake_s
            self.at(wake_s, self._pump)

    def _start(self, request: Request, board: PaperBoard) -> None:
        course = board.run(request.prompt, request.answer)
        seen, waited_ms = self.seen, (self.now_s - request.asked_s) * 1e3
        seen.ttft_ms.append(waited_ms + course.ttft_ms)
        seen.wait_ms.append(waited_ms)
        seen.prompt += request.prompt.tokens
        seen.cached += course.cached
        seen.board_ms += course.busy_ms
        deadline_s = request.claim.deadline_s
        end_s = self.now_s + course.busy_ms / 1e3
        seen.good += deadline_s is None or end_s <= deadline_s
        flow = request.claim.flow
        seen.by_flow[flow] = seen.by_flow.get(flow, 0.0) + course.busy_ms
        first_s = self.now_s + course.ttft_ms / 1e3
        each = request.answer // self._steps
        for step in range(1, self._steps if each else 1):
            when_s = first_s + course.decode_ms / 1e3 * step / self._steps
            self.at(when_s, lambda: self.router.progress(request, each))
        fresh = request.prompt.tokens - course.cached
        took = AnswerTiming(
            fresh,
            course.prefill_ms,
            request.answer - 1,
            course.decode_ms,
            request.answer,
            course.busy_ms,
        )
        self.at(end_s, lambda: self._end(request, board, took))

    def _end(self, request: Request, board: PaperBoard, took: AnswerTiming) -> None:
        told = (self._steps - 1) * (request.answer // self._steps)
        self.router.progress(request, request.answer - told)
        self.router.ended(request, board, took, self.now_s)
        self.seen.ended += 1
        self.seen.tokens += request.answer
        request.talk.context = request.prompt.cut(request.prompt.tokens + request.answer)
        self._next(request)
        self._pump()

    def _next(self, request: Request) -> None:
        one = request.talk
        if one.over(self._shape) or request.error is not None:
            self._over += 1
            if self._says is not None:
                self._says(self._over, self._shape.sessions)
        else:
            self.at(self.now_s + one.pause_s(self._shape), lambda: self._speak(one))
