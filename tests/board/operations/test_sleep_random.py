"""Random sleeps, wakes, holds, requests, pauses, aborts and deaths: every answer stays its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.board_report import BoardState, GenerationState, KvReport
from rkserve.core.desired_state import Adoption, InFlight, PauseMode
from rkserve.core.errors import (
    BoardAsleep,
    BoardFailed,
    EnginePaused,
    GenerationNotFound,
    RunFailed,
    StateConflict,
)
from rkserve.core.messages import ControlAction, FinishReason
from tests.support.boards.board_bench import Listener
from tests.support.boards.holding import LINE, PACE, SAYING, Governed, seeded
from tests.support.boards.sleeping import (
    DROPPED,
    LEVELS,
    UNLOADED,
    control,
    is_over,
    nap,
    play,
    wake,
    whole,
)

S = GenerationState
STEPS = 40
AT_ONCE = 12


class Nights:
    """Random things done to a board that is told random things, perhaps before it has obeyed."""

    def __init__(self, told: Governed, calm: Governed, seed: int) -> None:
        self.told, self.calm = told, calm
        self.rolls = random.Random(seed)
        self.clients: list[Listener] = []
        self.aborted: set[int] = set()
        self.hung_up: set[int] = set()
        self.refused: set[int] = set()
        self.telling: list[asyncio.Task[Adoption]] = []
        self.rested: dict[int, int] = {}  # tokens that were there when a hold was acknowledged
        self.killed = False
        self.story: list[str] = []

    async def step(self) -> None:
        steps = (
            *(self.ask,) * 3,
            *(self.sleep,) * 3,
            *(self.wake,) * 2,
            *(self.control,) * 3,
            self.hold,
            self.clear,
            self.hang_up,
            self.kill,
            self.pace,
            *(self.wait,) * 2,
        )
        one = self.rolls.choice(steps)
        self.story.append(one.__name__)
        await one()
        for at, tokens in self.rested.items():
            assert len(self.clients[at].ids) == tokens, (at, self.story)

    async def wait(self) -> None:
        await asyncio.sleep(self.rolls.choice((0.0, 0.001, 0.01, 0.05)))

    async def ask(self) -> None:
        if len(self.clients) < AT_ONCE:
            rolls = self.rolls
            extra: dict[str, Any] = rolls.choice(({}, {}, {"line": LINE}, {"patient": False}))
            said = " ".join([SAYING] * rolls.choice((1, 1, 12))) + f" {len(self.clients)}"
            native, most = rolls.random() < 0.4, rolls.choice((5, 40, 100))
            self.clients.append(self.told.ask(said, most, native_pause=native, **extra))

    async def tell(self, call: Coroutine[Any, Any, Adoption]) -> None:
        """Tell it, and wait for its word or not: then the next one may overtake this one."""
        self.rested.clear()
        task = asyncio.create_task(call)
        self.telling.append(task)
        await asyncio.sleep(0)  # it has heard it
        if self.rolls.random() < 0.6:
            epoch = self.told.desired.epoch
            adoption = await task
            assert adoption.epoch == epoch, self.story
            if adoption.held:
                self.rested = {at: len(client.ids) for at, client in enumerate(self.clients)}
            if adoption.level:
                assert self.told.board.report().state is BoardState.ASLEEP, self.story

    async def sleep(self) -> None:
        mode = self.rolls.choice(
            (PauseMode.KEEP,) * 12 + (PauseMode.WAIT,) * 2 + (PauseMode.ABORT,)
        )
        if mode is PauseMode.ABORT:
            self.aborted.update(range(len(self.clients)))
        level = self.rolls.choice(LEVELS)
        self.story.append(f"{level:d} {mode.value}")
        await self.tell(nap(self.told, level, mode))

    async def wake(self) -> None:
        await self.tell(wake(self.told))

    async def hold(self) -> None:
        await self.tell(self.told.hold(clear=self.rolls.random() < 0.3))

    async def clear(self) -> None:
        clearing = self.told.board.clear_kv(keep_system_prompt=False)
        [found] = await asyncio.gather(clearing, return_exceptions=True)
        lost = self.killed and isinstance(found, BoardFailed)
        assert lost or isinstance(found, KvReport), (found, self.story)

    async def pace(self) -> None:
        self.told.sim.pace(self.rolls.choice((PACE, PACE, 0.1)))

    async def control(self) -> None:
        if not self.clients:
            return
        at = self.rolls.randrange(len(self.clients))
        action = self.rolls.choice(
            (ControlAction.PAUSE, ControlAction.PAUSE, ControlAction.RESUME, ControlAction.ABORT)
        )
        if action is ControlAction.ABORT and self.rolls.random() < 0.6:
            return
        try:
            await control(self.told, self.clients[at], action)
        except (StateConflict, GenerationNotFound):  # it has not begun, or has ended
            return
        if action is ControlAction.ABORT:
            self.aborted.add(at)

    async def hang_up(self) -> None:
        if self.clients and self.rolls.random() < 0.3:
            at = self.rolls.randrange(len(self.clients))
            self.hung_up.add(at)
            await self.clients[at].hang_up()

    async def kill(self) -> None:
        """Kill the engine, if there is one; whether it recovers is not waited for."""
        live = self.told.board.slot.live
        if self.rolls.random() < 0.5 and live.alive:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):  # it is being ended just now
                self.told.kill()

    async def settle(self) -> None:
        """It sleeps once more, wakes for good, and everybody gets what is due."""
        self.rested.clear()
        self.told.sim.pace(PACE)
        await nap(self.told, self.rolls.choice((UNLOADED, DROPPED)))
        # Nothing has happened to these but that sleep, whatever the story was.
        last = [self.told.ask(f"{SAYING} last {n}", 30) for n in range(3)]
        final = await wake(self.told)
        assert (final.level, final.held) == (None, False)
        for task in self.telling:
            assert (await task).epoch <= final.epoch
        for at, client in enumerate(self.clients):
            while not client.task.done():
                if self.told.state(client) is S.PAUSED:
                    await control(self.told, client, ControlAction.RESUME)
                await asyncio.sleep(0.002)
            await self.judge(at, client)
        for client in last:
            await whole(self.calm, client)
        await is_over(self.told)
        assert self.told.board.report().state is BoardState.READY

    async def judge(self, at: int, client: Listener) -> None:
        """It is whole, or has a reason not to be."""
        if at in self.hung_up:
            return
        if isinstance(client.error, EnginePaused | BoardAsleep):
            assert not client.ids, self.story
            return
        if client.error is not None:
            assert self.killed, (client.error, self.story)
            assert isinstance(client.error, BoardFailed), client.error
            assert not isinstance(client.error, RunFailed), (client.error, self.story)
            return
        assert client.finished is not None
        if client.finished.reason is FinishReason.ABORT:
            assert at in self.aborted, self.story
            return
        await whole(self.calm, client)


@pytest.mark.promise("Sleep", "In-flight requests survive every level, at any progress")
@seeded(3)
def test_at_random_nothing_is_lost_or_mixed_up_over_sleeps(
    tmp_path: Path, release: str, n_batch: int, seed: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        await told.serve("v1", InFlight.PIN)
        for part in range(2):
            nights = Nights(told, calm, seed * 100 + part)
            for _ in range(STEPS):
                await nights.step()
            await nights.settle()

    play(tmp_path, body, release, n_batch, max_paused=100)
