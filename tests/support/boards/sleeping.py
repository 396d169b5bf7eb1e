"""Boards that are put to sleep and woken, and what their clients must get all the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rkserve.board.answer.hooks import HookFactory
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import ActivePause, Adoption, PauseMode, Scope, SleepLevel
from rkserve.core.messages import ControlAction, Edit, GenerateRequest
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.fakes import run_loop
from tests.support.boards.holding import SAYING, Governed, governed, rest, undisturbed
from tests.support.sim.sim_board import FOLDER, GREEDY, TOKENIZER

LEVELS = tuple(SleepLevel)
UNLOADED, DROPPED = SleepLevel.UNLOADED, SleepLevel.DROPPED
LIMIT_S = 100.0
LONG = " ".join([SAYING] * 60)
SLOW = 0.3  # the prefill of a long prompt takes a while
SLOWLY = 1.0  # an answer of 200 tokens takes many seconds

Body = Callable[[Governed, Governed], Coroutine[Any, Any, None]]


def play(place: Path, body: Body, release: str = "1.3.0", n_batch: int = 1, **extra: Any) -> None:
    """Run ``body`` with a board, and with another one that nobody puts to sleep."""

    async def main() -> None:
        (place / "calm").mkdir()
        if n_batch == 1:
            extra.setdefault("caches", store(place, release))
            extra.setdefault("park_min_tokens", 10)
        async with AsyncExitStack() as stack:
            told, calm = await asyncio.gather(
                stack.enter_async_context(governed(place, release, n_batch, **extra)),
                stack.enter_async_context(undisturbed(place / "calm")),
            )
            for board in (told, calm):
                for version, seed in (("v1", 1), ("v2", 2)):
                    board.stage(version, seed)
                await board.serve("v1")
            await body(told, calm)

    run_loop(main(), LIMIT_S)


def store(place: Path, release: str) -> CacheStore:
    return CacheStore(place / "cache", CacheFingerprint("m", release), 1 << 30)


async def nap(
    told: Governed, level: SleepLevel = UNLOADED, mode: PauseMode = PauseMode.KEEP
) -> Adoption:
    return await told.tell(pauses=(ActivePause("nap", Scope(), mode, level=level),))


async def wake(told: Governed) -> Adoption:
    return await told.tell(pauses=())


async def sleeps(told: Governed, pid: int, adoption: Adoption, level: SleepLevel) -> None:
    """The board sleeps that deep, and nothing is left of the engine that it had."""
    report = told.board.report()
    assert (adoption.held, adoption.level, report.level) == (True, level, level)
    if level is SleepLevel.PAUSED:
        assert (report.state, report.engine_pid) == (BoardState.READY, pid)
        return
    assert report.state is BoardState.ASLEEP
    assert (report.engine_pid, report.kv_positions, report.adapters) == (0, 0, ())
    assert (report.running, told.board.slot.live.paused, told.board.slot.live.running) == (
        0,
        None,
        None,
    )
    assert set((told.board.kv()).entries) == {0}
    assert not os.access(f"/proc/{pid}", os.F_OK)


async def still(clients: Sequence[Listener]) -> None:
    """Nothing comes for any of them."""
    there = [(list(client.ids), client.text) for client in clients]
    await rest()
    assert [(client.ids, client.text) for client in clients] == there


async def whole(calm: Governed, client: Listener, *hooks: HookFactory) -> None:
    """The answer is what the board says that nobody disturbs, and was counted once."""
    got = await client.end()
    other = Listener(calm.board, client.asked, *hooks)
    expected_answer = await other.end()
    assert got == expected_answer, (client.asked.request_id, got, expected_answer)
    assert client.ids == other.ids, (client.asked.request_id, client.ids, other.ids)
    assert client.finished is not None
    assert other.finished is not None
    usage, expected = client.finished.usage, other.finished.usage
    asked, answered = len(client.asked.prompt_ids), len(client.ids)
    told = (client.asked.request_id, usage, expected, asked, answered)
    assert usage.prompt_tokens == expected.prompt_tokens == asked, told
    assert usage.completion_tokens == expected.completion_tokens == answered, told


def listen(
    told: Governed, prompt: tuple[int, ...], count: int, *hooks: HookFactory, **extra: Any
) -> Listener:
    """Ask for what goes on after these ids."""
    told.number += 1
    asked = GenerateRequest(f"g{told.number}/0", FOLDER.id, prompt, count, sampling=GREEDY, **extra)
    return Listener(told.board, asked, *hooks)


async def held_at(told: Governed, tokens: int) -> asyncio.Future[None]:
    """Let the next request be heard no further than so many tokens; the future says that it is."""
    await told.board.clear_kv(keep_system_prompt=False)  # else a run that parks comes before its
    return told.sim.tap.hold(tokens)


async def control(
    told: Governed, client: Listener, action: ControlAction, edit: Edit | None = None
) -> None:
    """Ask for something to be done to it."""
    await told.board.control(client.asked.request_id.partition("/")[0], action, edit)


async def is_over(told: Governed) -> None:
    await until(lambda: told.board.report().running == 0)
    report = told.board.report()
    assert (report.queued, report.paused, told.board.generations()) == (0, 0, [])


async def in_state(told: Governed, client: Listener, state: GenerationState) -> None:
    await until(lambda: told.state(client) is state or client.task.done())


def said(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))
