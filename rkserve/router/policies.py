"""Routing policies: their interface and decisions, the registry by name, and the policies.

A policy decides from figures that it is given, and the caller acts on the decision. It chooses only
boards that are ready, have a free place and have not been tried for this request, or decides that
waiting for one busy board costs less time than any free one.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import NOTHING, Reuse
from rkserve.fleet.requests import RoutingRequest


@dataclass(frozen=True, slots=True)
class SendTo:
    """The decision to send a request to a board now.

    ``reuse`` is the cached prefix expected there, ``spared_ms`` the prefill time it saves, and
    ``ttft_ms`` the expected time to the first token.
    """

    board: Candidate
    reuse: Reuse = NOTHING
    ttft_ms: float = 0.0
    spared_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The decision to wait for a busy board, which is cheaper than any free one for ``until_ms``.

    The caller books the board's time, ``boards.book(request_id, board, work_ms)``, so that other
    requests take it into account, and decides again once ``RoutingRequest.waits`` is false. The
    next booking of the request replaces this one; ``unbook`` or its start on a board ends it.
    """

    board: Candidate
    until_ms: float
    work_ms: float
    reuse: Reuse = NOTHING


Decision = SendTo | WaitFor | None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The configuration of policies.

    ``max_wait_s`` bounds how long a request waits for one board while others are free. Restoring a
    token's KV cache from a file takes ``restore_ms``, writing it ``park_ms``.
    """

    max_wait_s: float = 20.0
    restore_ms: float = 0.15
    park_ms: float = 0.15


class RoutingPolicy(Protocol):
    """The choice of a board for each request."""

    name: str
    uses_prefixes: bool

    def satisfied(self, take: SendTo, /) -> bool:
        """Return whether no request further back in the queue could make better use of the board.

        If not, the offers of several requests are compared by ``first``.
        """

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """Return the index of the request to send first, of those with a free board each.

        The offers are in queue order. The policy increments ``overtaken`` of skipped requests.
        """

    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """Return the board to send the request to or to wait for; None without a free board."""


class QueueOrderPolicy(ABC):
    """Base of the policies: requests are sent in queue order, and a subclass chooses the board."""

    name: str
    uses_prefixes = False

    def __init__(
        self, rng: random.Random | None = None, settings: PolicySettings | None = None
    ) -> None:
        self.rng = rng or random.Random()
        self.settings = settings or PolicySettings()

    def satisfied(self, _take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return True

    def first(self, _offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """See ``RoutingPolicy``."""
        return 0

    @abstractmethod
    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""


POLICIES: dict[str, type[QueueOrderPolicy]] = {}
_P = TypeVar("_P", bound=type[QueueOrderPolicy])


def register(policy: _P) -> _P:
    """Make a policy available in the configuration under its ``name``."""
    POLICIES[policy.name] = policy
    return policy


@register
class LeastLoadPolicy(QueueOrderPolicy):
    """Choose the board with the fewest requests; ties are broken at random."""

    name = "least_load"

    def choose(self, request: RoutingRequest, boards: ModelBoards, _now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(request.tried, request.most)
        if not free:
            return None
        least = min(board.load for board in free)
        return SendTo(self.rng.choice([board for board in free if board.load == least]))


@register
class RoundRobinPolicy(QueueOrderPolicy):
    """Choose the board that was used the longest time ago.

    With many boards, only those of the sample that ``ModelBoards.free`` returns are compared.
    """

    name = "round_robin"

    def choose(self, request: RoutingRequest, boards: ModelBoards, _now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(request.tried, request.most)
        if not free:
            return None
        return SendTo(min(free, key=lambda board: (board.used_s, board.slot)))


@register
class SessionPolicy(QueueOrderPolicy):
    """Send a session's requests to one board, which changes only when boards join or leave.

    A request waits for that board up to ``max_wait_s``. Requests without a session go to the board
    with the least load.
    """

    name = "session"

    def __init__(
        self, rng: random.Random | None = None, settings: PolicySettings | None = None
    ) -> None:
        super().__init__(rng, settings)
        self._least_load = LeastLoadPolicy(self.rng, settings)

    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        mine = self._mine(request, boards) if request.session else None
        if mine is None:
            return self._least_load.choose(request, boards, now_s)
        if mine.has_place:
            return SendTo(mine)
        left_ms = self.settings.max_wait_s * 1e3 - request.waited_ms(now_s)
        if mine.wait_ms(now_s) <= left_ms:
            return WaitFor(mine, left_ms, boards.typical_ms(mine))
        return self._least_load.choose(request, boards, now_s)

    def _mine(self, request: RoutingRequest, boards: ModelBoards) -> Candidate | None:
        """Return the first board on the hash ring that may serve the session, free or busy."""
        tier = boards.tier(request.tried)
        for name in boards.ring.of(request.session):
            board = boards.named(name)
            if board is None or not board.ready or board.key in request.tried:
                continue
            if board.held == tier and board.held <= request.most:
                return board
        return None


class _Estimate(NamedTuple):
    """The estimated costs of sending a request to one board, in milliseconds.

    ``ttft_ms`` is the time to the first token and ``cold_ms`` the same without a cached prefix.
    ``score`` adds the decoding time and the expected loss of the context displaced there.
    """

    board: Candidate
    reuse: Reuse
    wait_ms: float
    ttft_ms: float
    cold_ms: float
    score: float


RETURNS = 0.5  # the probability that a conversation continues, right after its last request
FORGOTTEN_S = 120.0  # idle time after which that probability is half as high
HINT_MS = 50.0  # the assumed saving on a session's last board where no cached prefix is known
DECODED = 64.0  # tokens of an answer whose decoding time counts


@register
class PrefixPolicy(QueueOrderPolicy):
    """Choose the board with the earliest first token, by cached prefix, queue and speed.

    Where no cached prefix is known, the session's last board is preferred over equal ones.
    """

    name = "prefix"
    uses_prefixes = True
    OVERTAKEN = 4
    GAIN_MS = 100.0

    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(request.tried, request.most)
        if not free:
            return None
        index, chain = boards.index, request.chain
        looked = {board.slot: board for board in free}
        known: dict[int, Reuse] = {}
        if index is not None and chain is not None:
            known = index.holders(chain, also=looked)
        busy: list[Candidate] = []
        for board in filter(None, map(boards.at, known)):
            if _may(board, request, free[0].held):
                if board.has_place:
                    looked[board.slot] = board
                else:
                    busy.append(board)
        last = None if known else boards.last(request.session)
        if last is not None and last.has_place and _may(last, request, free[0].held):
            looked[last.slot] = last
        weighed = [self._weigh(request, boards, one, known, now_s) for one in looked.values()]
        best = self._best([_hinted(one) if one.board is last else one for one in weighed])
        waits = [self._weigh(request, boards, one, known, now_s) for one in busy]
        return self._patient(request, best, waits, now_s)

    def satisfied(self, take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return take.reuse.tokens > 0

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """Prefer the request whose board saves the most prefill time; see ``RoutingPolicy``.

        A request is overtaken at most ``OVERTAKEN`` times.
        """
        chosen = 0
        for number, (request, take) in enumerate(offers):
            if take.spared_ms > offers[chosen][1].spared_ms + self.GAIN_MS:
                chosen = number
            if request.overtaken >= self.OVERTAKEN:
                break
        for request, _ in offers[:chosen]:
            request.overtaken += 1
        return chosen

    def _best(self, weighed: list[_Estimate]) -> _Estimate:
        """Return the best score among boards whose hit is no slower than a miss elsewhere."""
        soonest = sorted(weighed, key=lambda one: one.cold_ms)[:2]

        def other_ms(one: _Estimate) -> float:
            others = (each.cold_ms for each in soonest if each.board is not one.board)
            return next(others, float("inf"))

        allowed = [one for one in weighed if not one.reuse.tokens or one.ttft_ms <= other_ms(one)]
        return min(allowed or weighed, key=lambda one: one.score)

    def _patient(
        self, request: RoutingRequest, best: _Estimate, waits: list[_Estimate], now_s: float
    ) -> Decision:
        take = SendTo(best.board, best.reuse, best.ttft_ms, best.cold_ms - best.ttft_ms)
        if not waits:
            return take
        chosen = min(waits, key=lambda one: one.ttft_ms)
        left_ms = self.settings.max_wait_s * 1e3 - request.waited_ms(now_s)
        after_ms = chosen.ttft_ms - chosen.wait_ms
        until_ms = min(best.ttft_ms - after_ms, left_ms)
        if chosen.wait_ms > until_ms:
            return take
        return WaitFor(chosen.board, until_ms, self._kept_ms(request, chosen), chosen.reuse)

    def _kept_ms(self, request: RoutingRequest, one: _Estimate) -> float:
        """Return how long the request would occupy the board."""
        return (
            one.ttft_ms - one.wait_ms + min(DECODED, request.max_tokens) * one.board.speed.decode_ms
        )

    def _weigh(
        self,
        request: RoutingRequest,
        boards: ModelBoards,
        board: Candidate,
        known: dict[int, Reuse],
        now_s: float,
    ) -> _Estimate:
        index, speed = boards.index, board.speed
        reuse = known.get(board.slot, NOTHING)
        live = index.live_tokens(board.slot) if index is not None else 0
        wait_ms = 0.0 if board.has_place else board.wait_ms(now_s)
        wait_ms += boards.booked_ms(board, request.request_id) if board.has_place else 0.0
        parking_ms = lost_ms = 0.0
        if live and not reuse.live:
            again_ms = live * speed.prefill_ms
            if index is not None and index.parks(board.slot, live):
                parking_ms = speed.decode_ms + live * self.settings.park_ms
                again_ms = live * self.settings.restore_ms
            idle_s = max(0.0, now_s - board.used_s)
            lost_ms = again_ms * RETURNS / (1.0 + idle_s / FORGOTTEN_S)
        cold_ms = wait_ms + parking_ms + request.prompt_tokens * speed.prefill_ms
        spared_ms = reuse.tokens * speed.prefill_ms
        if reuse.tokens and not reuse.live:
            spared_ms -= reuse.tokens * self.settings.restore_ms
        ttft_ms = cold_ms - spared_ms
        decode_ms = min(DECODED, request.max_tokens) * speed.decode_ms
        return _Estimate(board, reuse, wait_ms, ttft_ms, cold_ms, ttft_ms + decode_ms + lost_ms)


def _may(board: Candidate, request: RoutingRequest, held: PauseEffect) -> bool:
    """Return whether the request may go to the board, apart from its load."""
    return board.ready and board.held == held and board.key not in request.tried


def _hinted(one: _Estimate) -> _Estimate:
    return one._replace(score=one.score - HINT_MS)


class InstrumentedPolicy:
    """A routing policy with metrics of another one's decisions."""

    def __init__(self, policy: RoutingPolicy, seen: RouterMetrics) -> None:
        self.name = policy.name
        self.uses_prefixes = policy.uses_prefixes
        self._policy = policy
        self._seen = seen

    def watch(self, model: str, boards: ModelBoards) -> None:
        """Count expected and actual cached prefixes of those boards, too."""
        boards.listeners.append(partial(self._found, model))

    def satisfied(self, take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return self._policy.satisfied(take)

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """See ``RoutingPolicy``. The result is the decision that is carried out."""
        chosen = self._policy.first(offers)
        request, take = offers[chosen]
        self._seen.decisions.labels(request.model, _word(take.reuse)).inc()
        return chosen

    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        began_s = time.perf_counter()
        verdict = self._policy.choose(request, boards, now_s)
        self._seen.decision.observe(time.perf_counter() - began_s)
        if isinstance(verdict, WaitFor):
            self._seen.decisions.labels(request.model, "wait").inc()
        return verdict

    def _found(self, model: str, expected: Reuse, cached: int) -> None:
        self._seen.prefix_tokens.labels(model, "expected").inc(expected.tokens)
        self._seen.prefix_tokens.labels(model, "found").inc(cached)


def _word(reuse: Reuse) -> str:
    if not reuse.tokens:
        return "none"
    return "live" if reuse.live else "file"
