"""A whole Router under more load than its boards can bear, in a time of its own.

Clients come at random and wait for nobody, as an open loop does; boards take a while for an answer,
which nobody knows before. What counts is how many answers are ready in time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rkserve.config.router import RouterConfig
from rkserve.core.messages import Delta, Event, GenerateRequest, Timings
from tests.support.boards.fake_boards import FakeBoards, accepted, finished, report
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat

pytestmark = pytest.mark.slow

BOARDS, MEAN_S, SECONDS, TIMEOUT_S = 4, 1.0, 60.0, 5.0
WARM = 8  # answers after which it is known what they take


@dataclass
class Slow(FakeBoards):
    """Boards that take between half and one and a half times a second, one request at a time."""

    rng: random.Random = field(default_factory=lambda: random.Random(3))
    busy_s: float = 0.0
    at_once: Counter[str] = field(default_factory=Counter)

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        self.running += 1
        self.at_once[replica] += 1
        assert self.at_once[replica] == 1, "it was sent what it could not start"
        began_s = asyncio.get_running_loop().time()
        took_s = MEAN_S * self.rng.uniform(0.5, 1.5)
        try:
            yield accepted(replica.removeprefix("replica of "))
            await asyncio.sleep(took_s)
            yield Delta("hi", (1,))
            self._end(replica)
            yield replace(finished(1), timings=Timings(0.0, 0.0, 0, took_s * 1e3, 1, 100.0))
        finally:
            self.busy_s += asyncio.get_running_loop().time() - began_s
            self._end(replica)
            self.running -= 1

    def _end(self, replica: str) -> None:
        """It is free with the last event, and not when that has been read."""
        self.at_once[replica] = 0


@dataclass
class Outcome:
    """What became of the requests of one run."""

    in_time: int = 0
    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest_refusal_s: float = 0.0
    busy: float = 0.0  # share of the boards' time

    @property
    def asked(self) -> int:
        return self.in_time + self.late + self.refused.total()


async def client(of: House, found: Outcome, body: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    response = await of("POST", CHAT, json=body)
    took_s = loop.time() - began_s
    if response.status_code == 200:
        found.in_time += took_s <= TIMEOUT_S
        found.late += took_s > TIMEOUT_S
    else:
        found.refused[response.json()["error"]["code"]] += 1
        found.slowest_refusal_s = max(found.slowest_refusal_s, took_s)


def run(load: float, **extra: Any) -> Outcome:
    """Return what comes of so many times the capacity."""

    async def main() -> Outcome:
        boards = Slow([report(name) for name in "abcd"])
        of = House(boards, RouterConfig(queue_limit=64, policy="least_load"))
        for _ in range(WARM):
            assert (await of("POST", CHAT, json=chat(**extra))).status_code == 200
        rng, found, clients = random.Random(11), Outcome(), []
        loop = asyncio.get_running_loop()
        began_s, before_s = loop.time(), boards.busy_s
        while loop.time() - began_s < SECONDS:
            body = chat(timeout=TIMEOUT_S, **extra)
            clients.append(asyncio.create_task(client(of, found, body)))
            await asyncio.sleep(rng.expovariate(load * BOARDS / MEAN_S))
        await asyncio.gather(*clients)
        found.busy = (boards.busy_s - before_s) / (loop.time() - began_s) / BOARDS
        of.expect_nothing_left()
        return found

    return run_loop(main())


@pytest.fixture(scope="module")
def at_capacity() -> Outcome:
    return run(1.0)


def test_goodput_at_three_times_the_capacity_is_no_less_than_at_capacity(
    at_capacity: Outcome,
) -> None:
    over = run(3.0)
    told = (at_capacity.in_time, over.in_time, over.late, over.refused, over.busy)
    assert over.in_time >= at_capacity.in_time, told
    assert over.busy > 0.9, told
    assert over.late + over.refused["deadline_exceeded"] <= 0.03 * over.in_time, told
    assert over.refused["deadline_unreachable"] > over.in_time, told


def test_at_capacity_nearly_everything_is_ready_in_time(at_capacity: Outcome) -> None:
    assert at_capacity.in_time >= 0.85 * at_capacity.asked
    assert at_capacity.busy <= 1.0
