"""Policies that do not look at KV caches: least load, round robin, session affinity. Pure."""

from __future__ import annotations

import random

from rkserve.fleet.load import Candidate, ModelBoards
from rkserve.fleet.requests import RoutingRequest
from rkserve.router.policies.base import (
    Decision,
    PolicySettings,
    QueueOrderPolicy,
    SendTo,
    WaitFor,
    register,
)


@register
class LeastLoadPolicy(QueueOrderPolicy):
    """Choose the board with the fewest requests; ties are broken at random."""

    name = "least_load"

    def choose(self, ask: RoutingRequest, boards: ModelBoards, _now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(ask.tried, ask.most)
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

    def choose(self, ask: RoutingRequest, boards: ModelBoards, _now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        free = boards.free(ask.tried, ask.most)
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

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        mine = self._mine(ask, boards) if ask.session else None
        if mine is None:
            return self._least_load.choose(ask, boards, now_s)
        if mine.has_place:
            return SendTo(mine)
        left_ms = self.settings.max_wait_s * 1e3 - ask.waited_ms(now_s)
        if mine.wait_ms(now_s) <= left_ms:
            return WaitFor(mine, left_ms, boards.typical_ms(mine))
        return self._least_load.choose(ask, boards, now_s)

    def _mine(self, ask: RoutingRequest, boards: ModelBoards) -> Candidate | None:
        """Return the first board on the hash ring that may serve the session, free or busy."""
        tier = boards.tier(ask.tried)
        for name in boards.ring.of(ask.session):
            board = boards.named(name)
            if board is None or not board.ready or board.key in ask.tried:
                continue
            if board.held == tier and board.held <= ask.most:
                return board
        return None
