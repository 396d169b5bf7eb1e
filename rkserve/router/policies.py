"""Routing policies: their interface and decisions, the registry by name, and the policies.

A policy decides from figures that it is given, and the caller acts on the decision. It chooses only
boards that are ready, have a free place and have not been tried for this request, or decides that
waiting for one busy board costs less time than any free one.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from rkserve.core.block_hashes import BlockHashes, origin_of, seed_of
from rkserve.core.messages import EmbedRequest, GenerateRequest
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import NOTHING, Reuse

CHARS_OF_A_TOKEN = 4  # an estimate for prompts without a token count
SOON_S = 0.02  # the shortest time before a decision to wait is reconsidered
AGAIN_S = 1.0  # and the longest


@dataclass(slots=True, eq=False)
class RoutingRequest:
    """A request in the terms of board selection; reused while the request waits.

    ``chain`` is the block hash chain of the prompt under its adapter and ``salt``; None if the
    token IDs are unknown or not needed. ``tried`` are the keys of boards to skip, ``most`` the
    worst acceptable pause effect. ``overtaken`` counts later requests that were sent first. Until
    ``until_s`` it waits for the board that was chosen.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    chain: BlockHashes | None = None
    session: str = ""
    salt: str = ""
    tried: Collection[str] = ()
    most: PauseEffect = PauseEffect.REFUSES
    since_s: float | None = None
    overtaken: int = 0
    until_s: float = 0.0
    _board: Candidate | None = None

    def waited_ms(self, now_s: float) -> float:
        """Return the time since the first call of this method."""
        if self.since_s is None:
            self.since_s = now_s
        return (now_s - self.since_s) * 1e3

    def wait_for(self, board: Candidate, until_ms: float, now_s: float) -> None:
        """Record the decision to wait for a board."""
        self._board = board
        self.until_s = now_s + max(SOON_S, min(until_ms / 1e3, AGAIN_S))

    def waits(self, now_s: float) -> bool:
        """Return whether the last decision to wait still holds.

        It saves deciding again for every waiting request on each event, most of which concern other
        boards.
        """
        board = self._board
        if board is None or now_s >= self.until_s or board.key in self.tried:
            return False
        return board.ready and board.held is PauseEffect.NOT and not board.has_place

    @classmethod
    def of(
        cls, request: GenerateRequest, adapter: str | None = None, *, hashed: bool = True
    ) -> RoutingRequest:
        """Return the features of a request; ``adapter`` is the key of its adapter.

        Without ``hashed`` no block hashes are computed. Tokens generated before a failover count as
        prompt.
        """
        if isinstance(request, EmbedRequest):
            # Embedding requests neither use nor leave cached prefixes.
            tokens = (
                sum(map(len, request.inputs)) or sum(map(len, request.texts)) // CHARS_OF_A_TOKEN
            )
            return cls(request.request_id, request.model, tokens, 0, None, request.session)
        ids, spoken = request.prompt_ids, ""
        before = request.continued
        if before is not None:
            ids = before.prompt_ids or ids
            ids += tuple(slot.token_id for slot in before.slots if not slot.cleared)
            spoken = before.text
        if request.prompt_text is not None or not ids:
            text = f"{request.prompt_text or ''}{spoken}"
            tokens, chain = request.counted or len(text) // CHARS_OF_A_TOKEN, None
        else:
            tokens = len(ids)
            chain = BlockHashes(ids, seed_of(origin_of(adapter, request.salt))) if hashed else None
        return cls(
            request.request_id,
            request.model,
            tokens,
            request.max_tokens,
            chain,
            request.session,
            request.salt,
        )


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


class RoutingPolicy(ABC):
    """The choice of a board for each request; requests are sent in queue order by default."""

    name: str
    uses_prefixes = False

    def __init__(
        self, rng: random.Random | None = None, settings: PolicySettings | None = None
    ) -> None:
        self.rng = rng or random.Random()
        self.settings = settings or PolicySettings()

    def satisfied(self, _take: SendTo, /) -> bool:
        """Return whether no request further back in the queue could make better use of the board.

        If not, the offers of several requests are compared by ``first``.
        """
        return True

    def first(self, _offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """Return the index of the request to send first, of those with a free board each.

        The offers are in queue order. The policy increments ``overtaken`` of skipped requests.
        """
        return 0

    @abstractmethod
    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """Return the board to send the request to or to wait for; None without a free board."""


POLICIES: dict[str, type[RoutingPolicy]] = {}
_P = TypeVar("_P", bound=type[RoutingPolicy])


def register(policy: _P) -> _P:
    """Make a policy available in the configuration under its ``name``."""
    POLICIES[policy.name] = policy
    return policy


@register
class LeastLoadPolicy(RoutingPolicy):
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
class RoundRobinPolicy(RoutingPolicy):
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
class SessionPolicy(RoutingPolicy):
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

    ``ttft_ms`` is the time to the first token. ``goal_ms`` is the time to be kept short: the same
    among boards of one kind, and the time to the end of the answer among several kinds. ``cold_ms``
    is that without a cached prefix. ``work_ms`` is the time that the board is taken, and ``score``
    all of it with the expected loss of the context displaced there.
    """

    board: Candidate
    reuse: Reuse
    wait_ms: float
    ttft_ms: float
    goal_ms: float
    cold_ms: float
    work_ms: float
    score: float


RETURNS = 0.5  # the probability that a conversation continues, right after its last request
FORGOTTEN_S = 120.0  # idle time after which that probability is half as high
HINT_MS = 50.0  # the assumed saving on a session's last board where no cached prefix is known
DECODED = 64.0  # tokens of an answer whose decoding time counts, among boards of one kind


@register
class PrefixPolicy(RoutingPolicy):
    """Choose the board with the earliest first token, by cached prefix, queue and speed.

    Among boards of several kinds, such as NPUs and CPUs, the end of the answer counts as well: the
    kind with the faster prefill is not always the one with the faster decoding. A request waits for
    a busy board of another kind where its answer ends sooner there. Where no cached prefix is
    known, the session's last board is preferred over equal ones.
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
        for board in boards.soonest_of_others(free, request.tried, now_s):
            if board.has_place:
                looked[board.slot] = board
            else:
                busy.append(board)
        for board in filter(None, map(boards.at, known)):
            if _may(board, request, free[0].held):
                if board.has_place:
                    looked[board.slot] = board
                elif board not in busy:
                    busy.append(board)
        last = None if known else boards.last(request.session)
        if last is not None and last.has_place and _may(last, request, free[0].held):
            looked[last.slot] = last
        sources = index.sources(chain) if index is not None and chain is not None else {}
        found = known, sources
        weighed = [self._weigh(request, boards, one, found, now_s) for one in looked.values()]
        hinted = [
            one._replace(score=one.score - HINT_MS) if one.board is last else one for one in weighed
        ]
        best = self._best(hinted)
        waits = [self._weigh(request, boards, one, found, now_s) for one in busy]
        return self._patient(request, best, waits, now_s)

    def satisfied(self, take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return take.reuse.tokens > 0 and take.reuse.source is None

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

        allowed = [one for one in weighed if not one.reuse.tokens or one.goal_ms <= other_ms(one)]
        return min(allowed or weighed, key=lambda one: one.score)

    def _patient(
        self, request: RoutingRequest, best: _Estimate, waits: list[_Estimate], now_s: float
    ) -> Decision:
        take = SendTo(best.board, best.reuse, best.ttft_ms, best.cold_ms - best.goal_ms)
        if not waits:
            return take
        chosen = min(waits, key=lambda one: one.goal_ms)
        left_ms = self.settings.max_wait_s * 1e3 - request.waited_ms(now_s)
        until_ms = min(best.goal_ms - (chosen.goal_ms - chosen.wait_ms), left_ms)
        if chosen.wait_ms > until_ms:
            return take
        return WaitFor(chosen.board, until_ms, chosen.work_ms, chosen.reuse)

    def _weigh(
        self,
        request: RoutingRequest,
        boards: ModelBoards,
        board: Candidate,
        found: tuple[dict[int, Reuse], dict[int, Reuse]],
        now_s: float,
    ) -> _Estimate:
        """Estimate a board by its own cached prefix, or by a file that it fetches; ``found`` are
        those of boards, by slot, and the files to fetch, by compatibility.
        """
        index, speed = boards.index, board.speed
        known, sources = found
        reuse, fetch_ms = known.get(board.slot, NOTHING), 0.0
        if index is not None and sources:
            fetched = index.fetched(board.slot, reuse, sources, speed.prefill_ms)
            if fetched:
                reuse, fetch_ms = fetched, fetched.tokens * index.fetch_ms(board.slot)
        live = index.live_tokens(board.slot) if index is not None else 0
        wait_ms = 0.0 if board.has_place else board.wait_ms(now_s)
        wait_ms += boards.booked_ms(board, request.request_id) if board.has_place else 0.0
        parking_ms = lost_ms = 0.0
        displaced = live - reuse.tokens if reuse.live else live
        if displaced > 0:
            again_ms = displaced * speed.prefill_ms
            if index is not None and index.parks(board.slot, displaced):
                parking_ms = speed.decode_ms + live * self.settings.park_ms
                again_ms = live * self.settings.restore_ms
            idle_s = max(0.0, now_s - board.used_s)
            lost_ms = again_ms * RETURNS / (1.0 + idle_s / FORGOTTEN_S)
        cold_ms = wait_ms + parking_ms + request.prompt_tokens * speed.prefill_ms
        spared_ms = reuse.tokens * speed.prefill_ms
        if reuse.source is not None:
            spared_ms -= fetch_ms
        elif reuse.tokens and not reuse.live:
            spared_ms -= reuse.tokens * self.settings.restore_ms
        ttft_ms = cold_ms - spared_ms
        tokens = min(boards.typical_tokens if boards.mixed else DECODED, request.max_tokens)
        decode_ms = tokens * speed.decode_ms
        rest_ms = decode_ms if boards.mixed else 0.0
        return _Estimate(
            board,
            reuse,
            wait_ms,
            ttft_ms,
            goal_ms=ttft_ms + rest_ms,
            cold_ms=cold_ms + rest_ms,
            work_ms=ttft_ms - wait_ms + decode_ms,
            score=ttft_ms + decode_ms + lost_ms,
        )


def _may(board: Candidate, request: RoutingRequest, held: PauseEffect) -> bool:
    """Return whether the request may go to the board, apart from its load."""
    return board.ready and board.held == held and board.key not in request.tried
