"""The queues of a Router in front of boards that only report."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import (
    RkserveError,
)
from rkserve.core.messages import (
    GenerateRequest,
)
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.measurements import CircuitBreaker
from rkserve.router.policies import LeastLoadPolicy, RoutingPolicy
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.queues import ModelQueues, QueueRules, TriedBoards
from rkserve.router.queue.reservation import Reservation
from tests.support.boards.fake_boards import FakeBoards, report

MODEL = "sim-chat"


class Counted(RouterMetrics):
    """What the queue counts."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.reasons: list[str] = []
        self.holds: list[str] = []

    def refused(self, model: str, reason: str) -> None:
        assert model == MODEL
        self.reasons.append(reason)

    def held(self, model: str, by: str, held_s: float) -> None:
        assert model == MODEL
        assert held_s >= 0
        self.holds.append(by)


class Avoided(CircuitBreaker):
    """Boards that are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.failed("another board", "it is not there", 0.0)
        self.keys: set[str] = set()
        self.until_s: float | None = None

    def blocked(self, now_s: float) -> list[str]:
        return sorted(self.keys) if self.until_s is None or now_s < self.until_s else []

    def soonest_s(self, _now_s: float) -> float | None:
        return self.until_s

    def reason(self, key: str, _now_s: float) -> str:
        return f"{key} failed three times"


class Hall:
    """A queue in front of boards that only report; requests are numbered as they come."""

    def __init__(self, *boards: Any, policy: RoutingPolicy | None = None, **rules: Any) -> None:
        self.boards = FakeBoards([report(b) if isinstance(b, str) else b for b in boards])
        self.fleet = Fleet({"only": self.boards}, {"only": MODEL})
        self.counted, self.avoided = Counted(), Avoided()
        self.places = ModelQueues(
            self.fleet,
            policy or LeastLoadPolicy(random.Random(1)),
            QueueRules(**{"catch_up_s": 0.0, **rules}),
            self.avoided,
            self.counted,
        )
        self.taken: list[int] = []  # numbers in the order in which they got a place
        self.number = 0

    def ask(
        self,
        claim: QueueTerms | None = None,
        tried: dict[str, RkserveError] | None = None,
        recalled: int = 0,
        **request: Any,
    ) -> asyncio.Task[Reservation]:
        """One more request wants a place."""
        self.number += 1
        number = self.number
        made = GenerateRequest(f"r{number}/0", MODEL, (1, 2, 3), 10)
        made = replace(made, **request)

        async def take() -> Reservation:
            boards = TriedBoards(tried or {})
            boards.recalled = recalled
            place = await self.places.take(made, boards, claim or QueueTerms())
            self.taken.append(number)
            return place

        return asyncio.create_task(take())

    async def busy(self, count: int, **request: Any) -> list[Reservation]:
        """Requests that get a place each at once."""
        return [await self.ask(**request) for _ in range(count)]

    @property
    def depth(self) -> int:
        return sum(self.places.depths()[MODEL].values())

    async def settle(self) -> None:
        """Let everybody do what there is to do."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def hear(self, *reports: Any) -> None:
        """A round of reports."""
        if reports:
            self.boards.reported = list(reports)
        await self.fleet.refresh()


async def hall(*boards: Any, **rest: Any) -> Hall:
    made = Hall(*boards, **rest)
    await made.fleet.refresh()
    return made


def board_of(place: Reservation) -> str:
    return place.replica.removeprefix("replica of ")


def paused(mode: PauseMode, *boards: str, adapter: str | None = None) -> Desired:
    return Desired(2, pauses=(ActivePause("op", Scope((), boards, adapter), mode),))
