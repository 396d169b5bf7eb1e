"""What a Router does with what boards report that they hold, without Ray."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from rkserve.core.block_hashes import (
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
    pack,
    seed_of,
)
from rkserve.core.desired_state import (
    ActivePause,
    BaseVersion,
    BaseWeightsChange,
    Desired,
    PauseMode,
    Scope,
    SleepLevel,
    Weights,
)
from rkserve.core.messages import AdapterRef, Finished, GenerateRequest
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.measurements import CircuitBreaker
from rkserve.router.dispatch.dispatch import Dispatch, FailoverLimits
from rkserve.router.policies import PrefixPolicy
from rkserve.router.queue.queues import ModelQueues, QueueRules
from tests.support.boards.fake_boards import FakeBoards, Step, accepted, answer, report

MODEL = "sim-chat"
TALK = tuple(range(1000))
EMPTY = pack(CachedPrefixes(appends=True, park_min=256))


class House:
    """Boards a, b and c that keep contexts, and what sends requests to them."""

    def __init__(self, script: Callable[[str], list[Step]] | None = None) -> None:
        self.boards = FakeBoards.answering("a", "b", "c")
        if script is not None:
            self.boards.scripts = {f"replica of {b}": [script(b)] for b in "abc"}
        self.hold(a=EMPTY, b=EMPTY, c=EMPTY)
        self.fleet = Fleet({"only": self.boards}, {"only": MODEL}, files_per_board=16)
        breaker = CircuitBreaker()
        metrics = RouterMetrics(CollectorRegistry())
        places = ModelQueues(self.fleet, PrefixPolicy(), QueueRules(), breaker, metrics)
        rng = random.Random(3)
        self.dispatch = Dispatch(
            self.fleet, places, rng, FailoverLimits(), breaker=breaker, metrics=metrics
        )

    def hold(self, **held: bytes) -> None:
        """What boards report from now on."""
        self.boards.reported = [
            replace(one, holdings=held.get(one.board_id, one.holdings))
            for one in self.boards.reported
        ]

    async def talk(self, prompt: tuple[int, ...], adapter: AdapterRef | None = None) -> str:
        """Return the board that answered."""
        turn = GenerateRequest("r", MODEL, prompt, 10, adapter=adapter)
        async with aclosing(self.dispatch.generate(turn)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    break
        return self.boards.opened[-1][0]


async def test_a_conversation_keeps_its_board_although_its_calls_end_before_their_streams() -> None:
    house = House(lambda b: [*answer(b, "hello"), asyncio.Event()])
    await house.fleet.refresh()
    said = (100,)  # the token of the answer, of which the board has yet to compute
    prompt = TALK[:50]
    where = set()
    for turn in range(8):
        where.add(await house.talk(prompt))
        prompt = (*prompt, *said, 7000 + turn)
    assert len(where) == 1


async def test_an_adapter_goes_where_its_conversation_is() -> None:
    refs = [AdapterRef("kind", version, version * 64) for version in ("1", "2")]
    where: dict[str, set[str]] = {ref.version: set() for ref in refs}

    def script(board: str) -> list[Step]:
        return answer(board, "hello")

    house = House(script)
    for ref in refs:  # a board says which version it has bound
        for b in "abc":
            house.boards.scripts[f"replica of {b}"] = [
                [replace(accepted(b), adapter=ref), *script(b)[1:]]
            ]
        await house.fleet.refresh()
        for length in range(50, 56):
            where[ref.version].add(await house.talk(TALK[:length], ref))
    assert [len(boards) for boards in where.values()] == [1, 1]


async def test_a_new_router_finds_conversations_by_reports_alone() -> None:
    chain = BlockHashes(TALK[:600], seed_of(None))
    files = (FilePrefix(len(chain), chain.marks),)
    house = House()
    house.hold(b=pack(CachedPrefixes(True, 256, None, files)))
    await house.fleet.refresh()
    assert await house.talk(TALK) == "replica of b"


async def test_what_is_cleared_is_forgotten_at_once_and_believed_again_when_it_is_reported() -> (
    None
):
    chain = BlockHashes(TALK[:600], seed_of(None))
    held = pack(CachedPrefixes(True, 256, None, (FilePrefix(len(chain), chain.marks),)))
    house = House()
    house.hold(b=held)
    await house.fleet.refresh()
    index = house.fleet.boards[MODEL].index
    assert index is not None
    assert len(index) == 1
    house.fleet.forget_prompts(lambda board, _: board == "a")
    assert len(index) == 1
    house.fleet.forget_prompts(lambda board, model: (board, model) == ("b", MODEL))
    assert len(index) == 0
    await house.fleet.refresh()
    assert len(index) == 1


ELSEWHERE = BaseVersion(MODEL, "2", "2" * 64, 1)


@pytest.mark.parametrize(
    ("desired", "left"),
    [
        pytest.param(Desired(pauses=(ActivePause("p", Scope(), PauseMode.KEEP),)), 4, id="a pause"),
        pytest.param(
            Desired(pauses=(ActivePause("p", Scope(), PauseMode.WAIT, clear_cache=True),)),
            2,
            id="one with clear_cache",
        ),
        pytest.param(
            Desired(
                pauses=(ActivePause("p", Scope(boards=("a",)), PauseMode.KEEP, clear_cache=True),)
            ),
            3,
            id="one of a single board",
        ),
        pytest.param(
            Desired(
                pauses=(ActivePause("p", Scope(adapter="kind"), PauseMode.KEEP, clear_cache=True),)
            ),
            2,
            id="one of an adapter, which empties the board as well",
        ),
        pytest.param(
            Desired(pauses=(ActivePause("p", Scope(), PauseMode.KEEP, level=SleepLevel.PAUSED),)),
            4,
            id="the lightest sleep",
        ),
        pytest.param(
            Desired(pauses=(ActivePause("p", Scope(), PauseMode.KEEP, level=SleepLevel.UNLOADED),)),
            2,
            id="sleep",
        ),
        pytest.param(
            Desired(pauses=(ActivePause("p", Scope(), PauseMode.KEEP, level=SleepLevel.DROPPED),)),
            0,
            id="deep sleep, which empties the disk as well",
        ),
        pytest.param(Desired(weights=(Weights(MODEL, base=ELSEWHERE),)), 0, id="other weights"),
        pytest.param(
            Desired(weights=(Weights(MODEL, rebase=BaseWeightsChange(ELSEWHERE, "new", ("b",))),)),
            2,
            id="other weights on a board that has its turn",
        ),
        pytest.param(Desired(weights=(Weights(MODEL, label="new"),)), 4, id="another label only"),
    ],
)
async def test_what_boards_shall_lose_is_forgotten_in_the_same_step(
    desired: Desired, left: int
) -> None:
    live, filed = (BlockHashes(ids, seed_of(None)) for ids in (TALK[:300], TALK[:600]))
    files = (FilePrefix(len(filed), filed.marks),)
    house = House()
    held = pack(CachedPrefixes(True, 256, LivePrefix.of(live), files))
    house.hold(a=held, b=held)
    await house.fleet.refresh()
    index = house.fleet.boards[MODEL].index
    assert index is not None
    house.fleet.obey(desired)
    assert len(index) == left
    await house.fleet.refresh()  # the boards have not done it yet, or have computed anew
    house.fleet.obey(replace(desired, epoch=2))
    asleep = any((pause.level or 0) > SleepLevel.PAUSED for pause in desired.pauses)
    assert len(index) == (left if asleep else 4), "what holds on is not lost again"


async def test_a_board_that_falls_silent_holds_nothing() -> None:
    chain = BlockHashes(TALK[:600], seed_of(None))
    house = House()
    house.hold(b=pack(CachedPrefixes(True, 256, None, (FilePrefix(len(chain), chain.marks),))))
    await house.fleet.refresh()
    house.boards.reported = [report("a", holdings=EMPTY)]
    await house.fleet.refresh()
    boards = house.fleet.boards[MODEL]
    assert [board.board_id for board in boards] == ["a"]
    assert boards.index is not None
    assert boards.index.links == 0
