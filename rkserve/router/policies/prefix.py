"""The policy that routes by cached prefixes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import NOTHING, Reuse
from rkserve.fleet.requests import RoutingRequest
from rkserve.router.policies.base import Decision, QueueOrderPolicy, SendTo, WaitFor, register


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
        """Prefer the request whose board saves the most prefill time; see ``RoutingPolicy``.

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
        """Return the best score among boards whose hit is no slower than a miss elsewhere."""
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
        left_ms = self.settings.max_wait_s * 1e3 - ask.waited_ms(now_s)
        after_ms = chosen.ttft_ms - chosen.wait_ms
        until_ms = min(best.ttft_ms - after_ms, left_ms)
        if chosen.wait_ms > until_ms:
            return take
        return WaitFor(chosen.board, until_ms, self._kept_ms(ask, chosen), chosen.reuse)

    def _kept_ms(self, ask: RoutingRequest, one: _Estimate) -> float:
        """Return how long the request would occupy the board."""
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
                parking_ms = speed.decode_ms + live * self.settings.park_ms
                again_ms = live * self.settings.restore_ms
            idle_s = max(0.0, now_s - board.used_s)
            lost_ms = again_ms * RETURNS / (1.0 + idle_s / FORGOTTEN_S)
        cold_ms = wait_ms + parking_ms + ask.prompt_tokens * speed.prefill_ms
        spared_ms = reuse.tokens * speed.prefill_ms
        if reuse.tokens and not reuse.live:
            spared_ms -= reuse.tokens * self.settings.restore_ms
        ttft_ms = cold_ms - spared_ms
        decode_ms = min(DECODED, ask.max_tokens) * speed.decode_ms
        return _Estimate(board, reuse, wait_ms, ttft_ms, cold_ms, ttft_ms + decode_ms + lost_ms)


def _may(board: Candidate, ask: RoutingRequest, held: PauseEffect) -> bool:
    """Return whether the request may go to the board, apart from its load."""
    return board.ready and board.held == held and board.key not in ask.tried


def _hinted(one: _Estimate) -> _Estimate:
    return one._replace(score=one.score - HINT_MS)
