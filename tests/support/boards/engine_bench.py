"""What tests of a bare engine process say to it, and what they collect from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import EntryCommand, RunCommand, RunEnded
from rkserve.native.runtime import RunEnd
from tests.support.sim.sim_board import Sim

SLOWLY = 1.0  # 70 ms for a token


class Recorder:
    """Collects the tokens of one run. ``on`` is told how many entry 0 has.

    ``held_back`` are the places, from 1, of tokens whose text was still to come.
    """

    def __init__(self, on: Callable[[int], None] = lambda _: None) -> None:
        self.ids: list[int] = []
        self.texts: list[bytes] = []
        self.held_back: set[int] = set()
        self.entries: dict[int, list[int]] = {}
        self.entry_data: dict[int, bytes] = {}
        self.first = asyncio.Event()
        self._on = on

    def __call__(self, entry: int, token_id: int, data: bytes, waiting: bool) -> None:
        self.entries.setdefault(entry, []).append(token_id)
        self.entry_data[entry] = self.entry_data.get(entry, b"") + data
        if entry == 0:
            self.ids.append(token_id)
            self.texts.append(data)
            if waiting:
                assert data == b""
                self.held_back.add(len(self.ids))
        self.first.set()
        self._on(len(self.ids))

    @property
    def data(self) -> bytes:
        return b"".join(self.texts)


def command(ids: tuple[int, ...], run_id: int = 1, **extra: Any) -> RunCommand:
    """Return a run of one entry."""
    return RunCommand(run_id, (EntryCommand(ids),), **extra)


async def interrupted(
    sim: Sim,
    running: asyncio.Future[RunEnded],
    *interrupts: Callable[[], None],
) -> RunEnded:
    """Interrupt a run that comes to the gate, and let it go on to its end.

    It goes on so slowly that the engine has taken in what is asked of it long before the run ends.
    """
    await sim.at_gate()
    for interrupt in interrupts:
        interrupt()
    sim.pace(SLOWLY)
    ended = await running
    sim.pace(0)
    return ended


async def paused_at(
    sim: Sim, engine: EngineProcess, asked: RunCommand, count: int
) -> tuple[Recorder, RunEnded]:
    """Make a run and ask it to pause at its token number ``count``; it may be a few later."""
    got = Recorder()
    sim.gate(f"token:{count}")
    running = engine.run(asked, got)
    ended = await interrupted(sim, running, lambda: engine.pause(asked.run_id))
    assert ended.end is RunEnd.PAUSED, ended
    return got, ended
