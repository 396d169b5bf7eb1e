"""Routers to compare with: they send a request to a board at once, where it waits in its queue."""

from __future__ import annotations

import time
from collections import deque
from random import Random
from typing import Any

from benchmarks.scale.board import PaperBoard
from benchmarks.scale.router import Request, Spent
from rkserve.router.queue.reservation import AnswerTiming


class TwoChoices:
    """Ray Serve's default: of two boards by chance the one with the shorter queue."""

    def __init__(self, boards: list[PaperBoard], rng: Random) -> None:
        self.spent = Spent()
        self._rng = rng
        self._paper = boards
        self._queues: dict[str, deque[Request]] = {board.name: deque() for board in boards}
        self._busy = dict.fromkeys(self._queues, False)

    def choose(self, _request: Request, _now_s: float, /) -> PaperBoard:
        """Return the board."""
        return min(self._rng.sample(self._paper, min(2, len(self._paper))), key=self.length)

    def length(self, board: PaperBoard) -> int:
        """Requests that wait or run there."""
        return len(self._queues[board.name]) + self._busy[board.name]

    def offer(self, request: Request, now_s: float, /) -> None:
        """See ``Router``."""
        began = time.thread_time()
        board = self.choose(request, now_s)
        self.spent.decide_us.append((time.thread_time() - began) * 1e6)
        self._queues[board.name].append(request)

    def starts(self, _now_s: float, /) -> list[tuple[Request, PaperBoard]]:
        """See ``Router``."""
        found = []
        for board in self._paper:
            queue = self._queues[board.name]
            if queue and not self._busy[board.name]:
                self._busy[board.name] = True
                found.append((queue.popleft(), board))
        return found

    def progress(self, _request: Request, _tokens: int, /) -> None:
        """See ``Router``."""

    def ended(
        self, _request: Request, board: PaperBoard, _took: AnswerTiming, _now_s: float, /
    ) -> None:
        """See ``Router``."""
        self._busy[board.name] = False

    def report(self, _board: PaperBoard, _now_s: float, /) -> None:
        """See ``Router``."""

    def wakes_s(self, _now_s: float, /) -> float | None:
        """See ``Router``."""
        return None

    def refused(self) -> list[Request]:
        """See ``Router``."""
        return []


class RayPrefix(TwoChoices):
    """Ray's ``PrefixCacheAffinityRouter`` with its defaults, over Ray's own prefix tree.

    What it does is in ``_prefix_match_best_replicas``: the boards that share the longest prefix,
    where that is a tenth of the text; else those with the least text; of them the shortest queue.
    """

    MATCH = 0.1

    def __init__(self, boards: list[PaperBoard], rng: Random) -> None:
        super().__init__(boards, rng)
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._tree: Any = PrefixTree()
        self._by_name = {board.name: board for board in boards}
        self._tree.add_tenants(list(self._by_name), 0.0)

    def choose(self, request: Request, now_s: float, /) -> PaperBoard:
        """See ``TwoChoices``."""
        text = "".join(map(_char, request.prompt.ids()))
        matched, tenants = self._tree.prefix_match(text, list(self._by_name))
        if len(matched) / len(text) < self.MATCH:
            tenants = self._tree.get_smallest_tenants()
        found = [self._by_name[name] for name in tenants or self._by_name]
        self._rng.shuffle(found)
        chosen = min(found, key=self.length)
        self._tree.insert(text, chosen.name, now_s)
        return chosen


def _char(number: int) -> str:
    """One character for an id; those of one trace hardly ever meet."""
    return chr((number * 2_654_435_761 >> 7) % 0xF0000 + 0x10000)
