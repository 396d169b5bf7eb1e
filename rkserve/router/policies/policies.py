"""Which board takes a request: the policies that can be chosen, each a small class. Pure.

All figures are passed in; what a policy says is done by others. A policy never names a board that
has no place now, is not ready, or was tried: it says who takes the request, or that waiting for one
board costs less time than any other choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import NOTHING, Reuse
from rkserve.fleet.requests import RoutingRequest


@dataclass(frozen=True, slots=True)
class SendTo:
    """That board takes the request now. ``reuse`` is what it should spare of the prompt, which is
    work of ``spared_ms``.
    """

    board: Candidate
    reuse: Reuse = NOTHING
    ttft_ms: float = 0.0
    spared_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The decision to wait for a busy board, which is cheaper than any free one until ``until_ms``.

    The caller books the board's time, ``boards.book(ask.request_id, board, work_ms)``, so that
    other requests take it into account, and decides again once ``RoutingRequest.waits`` is false.
    The next booking of the request replaces this one; ``unbook`` or its start on a board ends it.
    """

    board: Candidate
    until_ms: float
    work_ms: float
    reuse: Reuse = NOTHING


Decision = SendTo | WaitFor | None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What the configuration says.

    ``max_wait_s`` bounds how long a request waits for one board while others are free. Reading what
    a token has in a cache file takes ``restore_ms``, writing it ``park_ms``.
    """

    max_wait_s: float = 20.0
    restore_ms: float = 0.15
    park_ms: float = 0.15


class RoutingPolicy(Protocol):
    """How a Router chooses."""

    name: str
    uses_prefixes: bool

    def satisfied(self, take: SendTo, /) -> bool:
        """Whether nobody who waits behind the request could make better use of that board."""

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """Return which of requests goes first, of those who could take a board each now.

        They are in the order of the queue. Who is overtaken remembers it.
        """

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """Return who takes the request now, or whom it waits for; None: nobody has a place."""


class _InOrder:
    """Who has waited the longest goes first, whatever the others would gain."""

    def satisfied(self, _take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return True

    def first(self, _offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """See ``RoutingPolicy``."""
        return 0


class LeastLoadPolicy(_InOrder):
    """The board with the least work in front takes the request; among equals chance decides."""

    name = "least_load"
    uses_prefixes = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, ask: RoutingRequest, boards: ModelBoards, _now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(ask.tried, ask.most)
        if not free:
            return None
        least = min(board.load for board in free)
        return SendTo(self._rng.choice([board for board in free if board.load == least]))


class RoundRobinPolicy(_InOrder):
    """The board whose turn is the longest past takes the request."""

    name = "round_robin"
    uses_prefixes = False

    def choose(self, ask: RoutingRequest, boards: ModelBoards, _now_s: float, /) -> Decision:
        """See ``RoutingPolicy``. With more boards than are looked at, the oldest turn of those."""
        free = boards.free(ask.tried, ask.most)
        if not free:
            return None
        return SendTo(min(free, key=lambda board: (board.used_s, board.slot)))


class SessionPolicy(_InOrder):
    """A session's requests go to one board, which changes only when boards come or go.

    They wait for it as long as ``max_wait_s``. Requests without a session go to the least load.
    """

    name = "session"
    uses_prefixes = False

    def __init__(self, rng: random.Random, settings: PolicySettings | None = None) -> None:
        self._others = LeastLoadPolicy(rng)
        self._wait_ms = (settings or PolicySettings()).max_wait_s * 1e3

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        mine = self._mine(ask, boards) if ask.session else None
        if mine is None:
            return self._others.choose(ask, boards, now_s)
        if mine.has_place:
            return SendTo(mine)
        wait_ms = mine.wait_ms(now_s)
        left_ms = self._wait_ms - ask.waited_ms(now_s)
        if wait_ms <= left_ms:
            return WaitFor(mine, left_ms, boards.typical_ms(mine))
        return self._others.choose(ask, boards, now_s)

    def _mine(self, ask: RoutingRequest, boards: ModelBoards) -> Candidate | None:
        """Return the first board of the session that could take it, were it free."""
        tier = boards.tier(ask.tried)
        for name in boards.ring.of(ask.session):
            board = boards.named(name)
            if board is None or not board.ready or board.key in ask.tried:
                continue
            if board.held == tier and board.held <= ask.most:
                return board
        return None


class _Estimate(NamedTuple):
    """What one board would cost a request, in milliseconds.

    ``ttft_ms`` until its first token, ``cold_ms`` the same if the board held nothing of it;
    ``score`` adds what decoding takes there and what others lose.
    """

    board: Candidate
    reuse: Reuse
    wait_ms: float
    ttft_ms: float
    cold_ms: float
    score: float


RETURNS = 0.5  # how likely a conversation that has just ended goes on
FORGOTTEN_S = 120.0  # and after how long that has fallen to a third
HINT_MS = 50.0  # what a session's last board is thought to spare where nobody knows
DECODED = 64.0  # tokens of an answer whose speed counts


class PrefixPolicy:
    """The board that gives the first token soonest: what it holds, against its queue and speed.

    A session's last board is a hint where nothing is known of what boards hold: it wins where the
    others are no better.
    """

    name = "prefix"
    uses_prefixes = True
    OVERTAKEN = 4
    GAIN_MS = 100.0

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._settings = settings or PolicySettings()

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(ask.tried, ask.most)
        if not free:
            return None
        index, chain = boards.index, ask.chain
        looked = {board.slot: board for board in free}
        known: dict[int, Reuse] = {}
        if index is not None and chain is not None:
            known = index.holders(chain, also=looked)
        busy: list[Candidate] = []
        for board in filter(None, map(boards.at, known)):
            if _may(board, ask, free[0].held):
                if board.has_place:
                    looked[board.slot] = board
                else:
                    busy.append(board)
        last = None if known else boards.last(ask.session)
        if last is not None and last.has_place and _may(last, ask, free[0].held):
            looked[last.slot] = last
        weighed = [self._weigh(ask, boards, one, known, now_s) for one in looked.values()]
        best = self._best([_hinted(one) if one.board is last else one for one in weighed])
        waits = [self._weigh(ask, boards, one, known, now_s) for one in busy]
        return self._patient(ask, best, waits, now_s)

    def satisfied(self, take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return take.reuse.tokens > 0

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """Prefer the request whose board spares the most work; see ``RoutingPolicy``.

        A request is overtaken at most ``OVERTAKEN`` times.
        """
        chosen = 0
        for number, (ask, take) in enumerate(offers):
            if take.spared_ms > offers[chosen][1].spared_ms + self.GAIN_MS:
                chosen = number
            if ask.overtaken >= self.OVERTAKEN:
                break
        for ask, _ in offers[:chosen]:
            ask.overtaken += 1
        return chosen

    def _best(self, weighed: list[_Estimate]) -> _Estimate:
        """Return the least score of those whose hit makes nobody wait longer than a miss would."""
        soonest = sorted(weighed, key=lambda one: one.cold_ms)[:2]

        def other_ms(one: _Estimate) -> float:
            others = (each.cold_ms for each in soonest if each.board is not one.board)
            return next(others, float("inf"))

        allowed = [one for one in weighed if not one.reuse.tokens or one.ttft_ms <= other_ms(one)]
        return min(allowed or weighed, key=lambda one: one.score)

    def _patient(
        self, ask: RoutingRequest, best: _Estimate, waits: list[_Estimate], now_s: float
    ) -> Decision:
        take = SendTo(best.board, best.reuse, best.ttft_ms, best.cold_ms - best.ttft_ms)
        if not waits:
            return take
        chosen = min(waits, key=lambda one: one.ttft_ms)
        left_ms = self._settings.max_wait_s * 1e3 - ask.waited_ms(now_s)
        after_ms = chosen.ttft_ms - chosen.wait_ms
        until_ms = min(best.ttft_ms - after_ms, left_ms)
        if chosen.wait_ms > until_ms:
            return take
        return WaitFor(chosen.board, until_ms, self._kept_ms(ask, chosen), chosen.reuse)

    def _kept_ms(self, ask: RoutingRequest, one: _Estimate) -> float:
        """How long the request will keep that board."""
        return one.ttft_ms - one.wait_ms + min(DECODED, ask.max_tokens) * one.board.speed.decode_ms

    def _weigh(
        self,
        ask: RoutingRequest,
        boards: ModelBoards,
        board: Candidate,
        known: dict[int, Reuse],
        now_s: float,
    ) -> _Estimate:
        index, speed = boards.index, board.speed
        reuse = known.get(board.slot, NOTHING)
        live = index.live_tokens(board.slot) if index is not None else 0
        wait_ms = 0.0 if board.has_place else board.wait_ms(now_s)
        wait_ms += boards.booked_ms(board, ask.request_id) if board.has_place else 0.0
        parking_ms = lost_ms = 0.0
        if live and not reuse.live:
            again_ms = live * speed.prefill_ms
            if index is not None and index.parks(board.slot, live):
                parking_ms = speed.decode_ms + live * self._settings.park_ms
                again_ms = live * self._settings.restore_ms
            idle_s = max(0.0, now_s - board.used_s)
            lost_ms = again_ms * RETURNS / (1.0 + idle_s / FORGOTTEN_S)
        cold_ms = wait_ms + parking_ms + ask.prompt_tokens * speed.prefill_ms
        spared_ms = reuse.tokens * speed.prefill_ms
        if reuse.tokens and not reuse.live:
            spared_ms -= reuse.tokens * self._settings.restore_ms
        ttft_ms = cold_ms - spared_ms
        decode_ms = min(DECODED, ask.max_tokens) * speed.decode_ms
        return _Estimate(board, reuse, wait_ms, ttft_ms, cold_ms, ttft_ms + decode_ms + lost_ms)


def _may(board: Candidate, ask: RoutingRequest, held: PauseEffect) -> bool:
    """Whether the request may go there, were there a place."""
    return board.ready and board.held == held and board.key not in ask.tried


def _hinted(one: _Estimate) -> _Estimate:
    return one._replace(score=one.score - HINT_MS)


POLICIES = ("least_load", "prefix", "round_robin", "session")


def policy(name: str, rng: random.Random, settings: PolicySettings | None = None) -> RoutingPolicy:
    """Return the policy of that name; it must be one of ``POLICIES``."""
    made: dict[str, Callable[[], RoutingPolicy]] = {
        "least_load": lambda: LeastLoadPolicy(rng),
        "prefix": lambda: PrefixPolicy(settings),
        "round_robin": RoundRobinPolicy,
        "session": lambda: SessionPolicy(rng, settings),
    }
    return made[name]()
