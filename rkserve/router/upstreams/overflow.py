"""The routing policy of models with boards and upstreams: boards first, then upstreams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.router.policies import Decision, RoutingPolicy, RoutingRequest, SendTo, WaitFor


class OverflowPolicy(RoutingPolicy):
    """Choose as another policy does; where no board is free, an upstream, or the wait for a board.

    A request waits while its time in the queue and the expected rest of it are within the
    ``overflow_wait_s`` of the upstream that has the shortest.
    """

    name = "overflow"

    def __init__(self, inner: RoutingPolicy, waits_s: Mapping[str, float]) -> None:
        """``waits_s`` are the waits of the upstreams, by their keys in the fleet."""
        super().__init__(inner.rng, inner.settings)
        self._inner, self._waits_s = inner, waits_s
        self.uses_prefixes = inner.uses_prefixes

    def satisfied(self, take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return take.board.upstream or self._inner.satisfied(take)

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """See ``RoutingPolicy``."""
        return self._inner.first(offers)

    def choose(self, request: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        chosen = self._inner.choose(request, boards, now_s)
        if chosen is not None or boards.tier(request.tried) is not PauseEffect.NOT:
            return chosen
        spare = boards.spare(request.tried)
        if not spare:
            return None
        best = min(spare, key=lambda one: (self._wait_ms(one), one.load, one.slot))
        return self._patient(request, boards, best, now_s) or SendTo(best)

    def _wait_ms(self, upstream: Candidate) -> float:
        return self._waits_s.get(upstream.key, 0.0) * 1e3

    def _patient(
        self, request: RoutingRequest, boards: ModelBoards, upstream: Candidate, now_s: float
    ) -> WaitFor | None:
        """Return the wait for the board that should be free first, if it is short enough."""
        left_ms = self._wait_ms(upstream) - request.waited_ms(now_s)
        if left_ms <= 0:
            return None
        usable = (
            one
            for one in boards
            if one.ready and one.held is PauseEffect.NOT and one.key not in request.tried
        )

        def wait_ms(board: Candidate) -> float:
            own_ms = board.booked_ms - boards.booked_ms(board, request.request_id)
            return board.wait_ms(now_s) - own_ms

        soonest = min(usable, key=wait_ms)
        if wait_ms(soonest) > left_ms:
            return None
        return WaitFor(soonest, left_ms, boards.typical_ms(soonest))
