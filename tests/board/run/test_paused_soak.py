"""Many clients pause, edit, resume, abort and leave on one board at once: each gets its own answer.

A real engine process over the simulated runtime in strict mode, where a misuse of the library ends
the engine. ``--soak-seconds`` says how long.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rkserve.board.board import Board
from rkserve.core.board_report import GenerationState
from rkserve.core.errors import StateConflict
from rkserve.core.messages import AdapterRef, ControlAction
from tests.support.boards.board_bench import until
from tests.support.boards.fakes import run_loop
from tests.support.boards.interrupt_bench import Asking, Talk
from tests.support.sim.sim_board import CALM, GREEDY, TOKENIZER, Belongings, Sim, released

CLIENTS = 16
OPERATION_S, ANSWER_S = 60.0, 120.0
PACE = 0.01  # a token in 0.6 ms
GROWTH_KB = 5 * 1024
PAUSE, EDIT, RESUME, ABORT = ControlAction
PAUSED = GenerationState.PAUSED


@dataclass
class Crowd:
    """The clients of one board, and what they have done."""

    board: Board
    adapter: AdapterRef
    until_s: float
    counts: Counter[str] = field(default_factory=Counter)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    slowest_s: float = 0.0

    async def client(self, rolls: random.Random) -> None:
        """Ask again and again, and disturb one's own answers."""
        while time.monotonic() < self.until_s:
            await asyncio.wait_for(self._answer(rolls), ANSWER_S)

    async def _answer(self, rolls: random.Random) -> None:
        kind = rolls.choice(("plain", "plain", "stop", "multi_byte", "pause_on"))
        asking = Asking(
            native=rolls.random() < 0.5,
            limit=rolls.choice((None, None, 9, 30)) if kind == "plain" else None,
            adapter=self.adapter if rolls.random() < 0.3 else None,
            stop=kind == "stop",
            multi_byte=kind == "multi_byte",
            pause_on=kind == "pause_on",
        )
        talk = asking.talk(self.board, next(self.numbers), rolls)
        self.counts["requests"] += 1
        leaves = rolls.randrange(40) if rolls.random() < 0.2 else None
        for step in itertools.count():
            await asyncio.sleep(rolls.choice((0.0, 0.001, 0.005, 0.02)))
            if talk.over:
                break
            if step == leaves:
                await talk.hang_up()
                self.counts["hang-ups"] += talk.hung_up
                break
            await self._disturb(talk, rolls)
        await talk.check()
        self.counts["edited to the end"] += talk.ledger is not None and not talk.hung_up

    async def _disturb(self, talk: Talk, rolls: random.Random) -> None:
        """Do something that may make sense now, or now and then something that may not."""
        state = talk.state if rolls.random() < 0.9 else rolls.choice(list(GenerationState))
        if state is not PAUSED:
            if state is GenerationState.GENERATING:
                await self._control(talk, PAUSE)
            return
        action = rolls.choices((RESUME, EDIT, ABORT), (5, 3, 1))[0]
        if action is not EDIT:
            talk.aborted |= await self._control(talk, action) and action is ABORT
        elif talk.editable:
            outcome = await talk.edit(rolls, bad=rolls.random() < 0.2)
            self.counts[outcome or "edit refused"] += 1

    async def _control(self, talk: Talk, action: ControlAction) -> bool:
        started_s = time.monotonic()
        asked = self.board.control(talk.id, action)
        try:
            await asyncio.wait_for(asked, OPERATION_S)
        except StateConflict:
            self.counts[f"{action.value} refused"] += 1
            return False
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
        self.counts[action.value] += 1
        return True


@pytest.mark.long
@pytest.mark.parametrize("n_batch", [1, 4])
def test_sixteen_clients_that_interrupt_each_get_their_own_answer(
    tmp_path: Path,
    n_batch: int,
    pytestconfig: pytest.Config,
    figures: Callable[[str], None],
) -> None:
    seconds = pytestconfig.getoption("--soak-seconds")
    rolls = random.Random(pytestconfig.getoption("--machine-seed"))

    async def crowd(board: Board, for_s: float) -> Crowd:
        crowd = Crowd(board, adapter, time.monotonic() + for_s)
        clients = [crowd.client(random.Random(rolls.random())) for _ in range(CLIENTS)]
        await asyncio.gather(*clients)
        await until(lambda: board.report().running + board.report().queued == 0)
        return crowd

    async def main() -> None:
        async with sim.board(
            patience=CALM,
            n_batch=n_batch,
            batch_window_s=0.005,
            queue_limit=4 * CLIENTS,
            pause_hold_s=0.02,
            vocab_size=TOKENIZER.get_vocab_size(),
        ) as board:
            sim.pace(PACE)
            await crowd(board, 1 + seconds / 10)  # until what is made once was made
            engine = board.report().engine_pid
            before = [released(), Belongings.of(engine)]
            sat = await crowd(board, seconds)
            after = [released(), Belongings.of(engine)]
            report = board.report()
            grown = [now.resident_kb - b.resident_kb for now, b in zip(after, before, strict=True)]
            figures(
                f"n_batch {n_batch}, {CLIENTS} clients, {seconds} s: {dict(sat.counts)}; slowest "
                f"operation {sat.slowest_s:.2f} s; grown by {grown} kB (tests, engine); "
                f"{report.engine_starts} engine"
            )
        assert report.engine_starts == 1, "a violation has ended the engine"
        assert (report.paused, report.running, report.queued) == (0, 0, 0)
        for now, then in zip(after, before, strict=True):
            assert now.resident_kb - then.resident_kb < GROWTH_KB
        assert after[1].threads == before[1].threads
        assert after[1].files == before[1].files

    sim = Sim(tmp_path, sampling=GREEDY, noted=0)
    adapter = sim.adapter("Pirate")
    run_loop(main(), 2 * seconds + 4 * ANSWER_S)
