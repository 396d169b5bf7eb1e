"""What holds do to KV caches, and to streams that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.board_report import GenerationState
from rkserve.core.desired_state import ActivePause, PauseMode, Scope
from rkserve.core.messages import ControlAction, Delta, Finished, GenerateRequest, Kv
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.fakes import run_loop
from tests.support.boards.holding import (
    LINE,
    SAYING,
    Governed,
    Oracle,
    governed,
    rest,
)
from tests.support.sim.sim_board import FOLDER, GREEDY, words

WHOLE = ActivePause("whole", Scope(), PauseMode.KEEP)
NAMED = ActivePause("named", Scope(adapter=LINE), PauseMode.KEEP, clear_cache=True, expires_s=10.0)
RENEWED = replace(NAMED, operation="renewed", expires_s=99.0)
CLEARS = replace(WHOLE, operation="clears", clear_cache=True)


def play(place: Path, body: Callable[[Governed], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with governed(place) as told:
            told.stage("v1", 1)
            await told.serve("v1")
            await body(told)

    run_loop(main(), 120.0)


async def paused_by_itself(told: Governed) -> Listener:
    """Return a client of the base model that holds the board inside the runtime."""
    client = told.ask(max_tokens=400, native_pause=True)
    await told.said(client, 4)
    await told.board.control("g1", ControlAction.PAUSE)
    assert kv(told) is Kv.KEPT
    return client


def kv(told: Governed) -> Kv | None:
    [info] = told.board.generations()
    assert info.state is GenerationState.PAUSED
    return info.kv


async def cleared(told: Governed) -> None:
    """Let the errands that wait be done."""
    await told.board.clear_kv(keep_system_prompt=False)


def test_a_lease_that_is_renewed_clears_no_cache_again(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        await told.tell(pauses=(NAMED,))
        await cleared(told)
        client = await paused_by_itself(told)
        await told.tell(pauses=(RENEWED,))
        await told.board.control("g1", ControlAction.RESUME)
        await client.end()
        assert client.finished is not None
        assert client.finished.timings.prefill_tokens <= len(client.asked.prompt_ids) + 1

    play(tmp_path, body)


def test_another_hold_that_clears_does_so_again(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        await told.tell(pauses=(NAMED,))
        await cleared(told)
        client = await paused_by_itself(told)
        await told.tell(pauses=())
        await told.tell(pauses=(NAMED,))
        await until(lambda: kv(told) is Kv.RECOMPUTED)
        await told.board.control("g1", ControlAction.RESUME)
        await client.end()
        assert client.finished is not None
        assert client.finished.timings.prefill_tokens > 2 * len(client.asked.prompt_ids)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((WHOLE,), (WHOLE, NAMED), id="an adapter's under one of all"),
        pytest.param((WHOLE,), (CLEARS, NAMED), id="both at once"),
        pytest.param(
            (WHOLE, replace(NAMED, clear_cache=False)), (WHOLE, NAMED), id="it clears now"
        ),
    ],
)
def test_a_hold_that_clears_does_so_under_another_one(
    tmp_path: Path, before: tuple[ActivePause, ...], after: tuple[ActivePause, ...]
) -> None:
    async def body(told: Governed) -> None:
        client = await paused_by_itself(told)
        await told.tell(pauses=before)
        assert kv(told) is Kv.KEPT
        await told.tell(pauses=after)
        await until(lambda: kv(told) is Kv.RECOMPUTED)
        await client.hang_up()

    play(tmp_path, body)


async def continued(told: Governed, client: Listener) -> int:
    """Return how many tokens a request that goes on where one ended finds in the cache."""
    await client.end()
    number, told.number = told.number, told.number + 1
    ids = (*client.asked.prompt_ids, *client.ids, *words(f"and {number}"))
    again = Listener(told.board, replace(client.asked, request_id=f"again{number}", prompt_ids=ids))
    await again.end()
    assert again.finished is not None
    return again.finished.usage.cached_tokens


def test_what_was_left_to_a_hold_of_all_is_cleared_where_that_ends_before_it_was_done(
    tmp_path: Path,
) -> None:
    async def body(told: Governed) -> None:
        assert await continued(told, told.ask(max_tokens=9)) > 0
        running = told.ask(max_tokens=400)
        await told.said(running, 3)  # and there it stays
        waits = replace(CLEARS, mode=PauseMode.WAIT)
        told.desired = replace(told.desired, epoch=told.desired.epoch + 1, pauses=(waits, NAMED))
        telling = asyncio.create_task(told.board.adopt(told.desired))
        await rest(0.0)
        await told.tell(pauses=(NAMED,))
        await telling
        told.pace()
        assert await continued(told, running) == 0

    play(tmp_path, body)


def test_a_release_does_not_wait_for_what_goes_on_where_another_adapter_stays_held(
    tmp_path: Path,
) -> None:
    async def body(told: Governed) -> None:
        running = told.ask(max_tokens=400)
        await told.said(running, 3)  # and there it stays
        telling = asyncio.create_task(told.hold(PauseMode.WAIT))
        await rest(0.0)
        assert not telling.done()
        await asyncio.wait_for(told.tell(pauses=(NAMED,)), 20)
        await asyncio.wait_for(telling, 20)
        assert not running.task.done()
        told.pace()
        await running.end()

    play(tmp_path, body)


async def test_what_a_stream_was_not_read_of_comes_after_the_release(tmp_path: Path) -> None:
    async with governed(tmp_path) as told:
        asked = GenerateRequest("slow", FOLDER.id, words(SAYING), 200, sampling=GREEDY)
        ids: list[int] = []
        told.stand(3)
        told.stand(3)
        async with aclosing(told.board.generate(asked)) as events:
            async for event in events:
                ids += event.token_ids if isinstance(event, Delta) else ()
                if len(ids) >= 3:
                    break
            told.stand(20)  # nobody reads, and the board goes on
            await until(lambda: told.board.generations()[0].tokens >= 20)
            adoption = await told.hold()
            assert adoption.held
            reading = asyncio.ensure_future(anext(events))
            await rest()
            assert not reading.done()
            await told.release()
            event = await reading
            while not isinstance(event, Finished):
                ids += event.token_ids if isinstance(event, Delta) else ()
                event = await anext(events)
        assert ids == Oracle().says(words(SAYING), 200)
