"""rkserve's Router in the simulation: its real policy, index and queue."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from random import Random

from benchmarks.scale.board import PaperBoard
from benchmarks.scale.router import Request, Spent
from rkserve.core.block_hashes import BlockHashes, seed_of
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.errors import RkserveError
from rkserve.core.messages import Delta, Finished, FinishReason, Timings, Usage
from rkserve.fleet.load import ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import PrefixIndex
from rkserve.router.policies import (
    POLICIES,
    PolicySettings,
    RoutingPolicy,
    RoutingRequest,
    SendTo,
    WaitFor,
)
from rkserve.router.queue.admission import AdmissionQueue, Capacity, QueueEntry
from rkserve.router.queue.reservation import (
    AnswerTiming,
    InFlightRequest,
    RequestSize,
    ServiceTimeModel,
)

MODEL = "paper"
LOOKED_AT = 16  # as ``modelqueue`` does
NO_LIMIT = 1_000_000


@dataclass(eq=False, slots=True)
class _Entry:
    request: Request
    ask: RoutingRequest
    tokens: int = 0


class OwnRouter:
    """One Router. ``limit`` may wait, each for ``timeout_s`` at most."""

    def __init__(
        self,
        name: str,
        boards: list[PaperBoard],
        rng: Random,
        settings: PolicySettings | None = None,
        *,
        limit: int = NO_LIMIT,
        timeout_s: float = 1e9,
    ) -> None:
        self.policy: RoutingPolicy = POLICIES[name](rng, settings)
        self.boards = ModelBoards(rng, PrefixIndex() if self.policy.uses_prefixes else None)
        self.spent = Spent()
        self._paper = {board.name: board for board in boards}
        self._busy = dict.fromkeys(self._paper, 0)
        self._queue: AdmissionQueue[_Entry] = AdmissionQueue(timeout_s)
        self._expects = ServiceTimeModel()
        self._limit = limit
        self._refused: list[Request] = []
        self._again_s = math.inf  # when one that waits for a certain board asks again
        self._running: dict[str, tuple[_Entry, QueueEntry[_Entry], InFlightRequest]] = {}
        for board in boards:
            self.report(board, 0.0)

    def offer(self, request: Request, now_s: float, /) -> None:
        """See ``Router``."""
        tokens, chain = request.prompt.tokens, None
        if self.policy.uses_prefixes:
            ids = request.prompt.ids()
            began = time.thread_time()
            chain = BlockHashes(ids, seed_of(None))
            self.spent.hash_us.append((time.thread_time() - began) * 1e6)
        ask = RoutingRequest(request.name, MODEL, tokens, request.answer, chain, request.session)
        entry, expected = (
            _Entry(request, ask),
            self._expects.of(RequestSize(tokens, request.answer)),
        )
        supply = Capacity(self.boards.places, self._free(), self._limit)
        try:
            _, leaves = self._queue.offer(entry, request.claim, expected, supply, now_s)
        except RkserveError as exc:
            self._leave(entry, exc)
            return
        if leaves is not None:
            self._leave(leaves.what, self._queue.full(leaves.terms, supply, now_s))

    def starts(self, now_s: float, /) -> list[tuple[Request, PaperBoard]]:
        """See ``Router``."""
        for ticket, exc in self._queue.expire(now_s):
            self._leave(ticket.what, exc)
        started: list[tuple[Request, PaperBoard]] = []
        while len(self._queue) and self.boards.any_open:
            found = self._next(now_s)
            if found is None and self._again_s > now_s:
                break
            if found is None:
                continue  # who is behind those that wait for certain boards comes next
            ticket, take = found
            entry, board = ticket.what, self._paper[take.board.key]
            self._queue.start(ticket, now_s)
            stay = InFlightRequest(self.boards, take.board, entry.ask, now_s)
            self._running[entry.request.name] = (entry, ticket, stay)
            self._busy[board.name] += 1
            started.append((entry.request, board))
        return started

    def _next(self, now_s: float) -> tuple[QueueEntry[_Entry], SendTo] | None:
        offers: list[tuple[QueueEntry[_Entry], SendTo]] = []
        self._again_s, patient = math.inf, 0
        for ticket in self._queue.order():
            if offers and ticket.priority != offers[0][0].priority:
                break
            ask = ticket.what.ask
            if ask.waits(now_s):
                self._again_s = min(self._again_s, ask.until_s)
                continue
            if len(offers) + patient == LOOKED_AT:
                if not offers:
                    self._again_s = now_s
                break
            began = time.thread_time()
            verdict = self.policy.choose(ask, self.boards, now_s)
            self.spent.decide_us.append((time.thread_time() - began) * 1e6)
            if isinstance(verdict, WaitFor):
                self.spent.waits += 1
                patient += 1
                self.boards.book(ask.request_id, verdict.board, verdict.work_ms)
                ask.wait_for(verdict.board, verdict.until_ms, now_s)
                self._again_s = min(self._again_s, ask.until_s)
            elif isinstance(verdict, SendTo):
                offers.append((ticket, verdict))
                if self.policy.satisfied(verdict):
                    break
        if not offers:
            return None
        return offers[self.policy.first([(ticket.what.ask, take) for ticket, take in offers])]

    def progress(self, request: Request, tokens: int, /) -> None:
        """See ``Router``."""
        entry, _, stay = self._running[request.name]
        begin = request.prompt.tokens + entry.tokens
        entry.tokens += tokens
        stay.observe(Delta("", request.prompt.cut(begin + tokens).ids()[begin:]))

    def ended(
        self, request: Request, board: PaperBoard, took: AnswerTiming, now_s: float, /
    ) -> None:
        """See ``Router``."""
        _, ticket, stay = self._running.pop(request.name)
        prompt = request.prompt.tokens
        usage = Usage(prompt, request.answer, prompt - took.prefill_tokens)
        timings = Timings(0, took.prefill_ms, took.prefill_tokens, took.decode_ms, took.tokens, 0)
        stay.observe(Finished(FinishReason.STOP, usage, timings))
        stay.ended(now_s, left=False)
        self._queue.ended(ticket, took.held_ms)
        self._expects.observe(RequestSize(prompt, request.answer), took)
        self._busy[board.name] -= 1

    def report(self, board: PaperBoard, now_s: float, /) -> None:
        """See ``Router``."""
        holdings = board.holdings() if self.policy.uses_prefixes else b""
        began = time.thread_time()
        known = self.boards.get(board.name)
        if known is not None:
            known.asked(now_s)
        report = BoardReport(
            board.name,
            MODEL,
            BoardState.READY,
            replica=board.name,
            running=self._busy[board.name],
            platform=board.profile.platform,
            prefill_tokens=board.prefill_tokens,
            prefill_ms=board.prefill_ms,
            decode_tokens=board.decode_tokens,
            decode_ms=board.decode_ms,
            holdings=holdings,
        )
        self.boards.update(MODEL, report, ready=True, held=PauseEffect.NOT)
        self.spent.report_us.append((time.thread_time() - began) * 1e6)

    def wakes_s(self, now_s: float, /) -> float | None:
        """See ``Router``."""
        ends = (self._queue.next_event_s(), self._again_s)
        return min(
            (end for end in ends if end is not None and now_s < end < math.inf), default=None
        )

    def refused(self) -> list[Request]:
        """See ``Router``."""
        gone, self._refused = self._refused, []
        return gone

    def _free(self) -> int:
        return max(0, self.boards.places - len(self._running))

    def _leave(self, entry: _Entry, exc: RkserveError) -> None:
        entry.request.error = exc
        self.boards.unbook(entry.request.name)
        self._refused.append(entry.request)
