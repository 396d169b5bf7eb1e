"""Requests sent to scripted boards one after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import aclosing

from prometheus_client import CollectorRegistry

from rkserve.core.messages import (
    Delta,
    Event,
    GenerateRequest,
)
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.measurements import CircuitBreaker
from rkserve.router.dispatch.dispatch import Dispatch, FailoverLimits
from tests.support.boards.continued_house import InTurn
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    finished,
    report,
)

REQUEST = GenerateRequest("r/0", "sim-chat", (1, 2, 3), 10)

PATIENCE = FailoverLimits(accept_timeout_s=0.2, continuations=3, restart_wait_s=30.0)


class Counted(RouterMetrics):
    """What would be in the metrics."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.words: list[str] = []
        self.took_s: list[float] = []

    def continued(self, word: str) -> None:
        self.words.append(word)

    def back(self, took_s: float) -> None:
        self.took_s.append(took_s)

    def opened(self) -> None:
        self.words.append("opened")

    def held(self, model: str, by: str, held_s: float) -> None:
        assert model == "sim-chat"
        assert held_s >= 0
        self.words.append(f"held by {by}")


class Talk:
    """A Router's dispatch on scripted boards a, b, ..., which it asks in turn."""

    def __init__(self, *scripts: Sequence[Step], rules: FailoverLimits = PATIENCE) -> None:
        names = "abcdef"[: len(scripts)]
        replicas = {f"replica of {n}": [one] for n, one in zip(names, scripts, strict=True)}
        says = {("", "forgive"): lambda: None}
        self.boards = FakeBoards([report(n) for n in names], replicas, says=says)
        self.usher = InTurn(list(replicas))
        self.counted = Counted()
        fleet = Fleet({"g": self.boards}, {"g": "sim-chat"})
        rng, breaker = random.Random(3), CircuitBreaker()
        self.dispatch = Dispatch(
            fleet, self.usher, rng, rules, breaker=breaker, metrics=self.counted
        )
        self.events: list[Event] = []

    async def __call__(self) -> list[Event]:
        await self.dispatch.fleet.refresh()
        async with aclosing(self.dispatch.generate(REQUEST)) as events:
            async for event in events:
                self.events.append(event)
        assert all(len(seat.ends) == 1 for seat in self.usher.seats)
        return self.events

    @property
    def asked(self) -> list[str]:
        return [replica[-1] for replica, _ in self.boards.opened]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))


def half(board: str, *after: Step) -> list[Step]:
    """A board says a first word, and then this."""
    return [accepted(board), Delta("Hel", (100,)), *after]


def rest(board: str) -> list[Step]:
    """A board goes on with it."""
    return [accepted(board), Delta("lo", (101,)), finished(2)]
