"""What pauses may cost the others of a board: how many are kept, who holds it, what fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import BoardState, GenerationInfo, GenerationState
from rkserve.core.errors import RunFailed, TooManyPaused
from rkserve.core.messages import ControlAction, Edit, FinishReason, GenerateRequest, Kv, Paused
from rkserve.native.runtime import RunEnd
from tests.support.boards.board_bench import (
    SETTINGS,
    Bench,
    Listener,
    answer,
    board_test,
    request,
    spoken,
    talker,
    until,
)
from tests.support.boards.fakes import EOS, QUIRKS, Script, tokens_of

pytestmark = pytest.mark.virtual_time

PROMPT = (5, 6, 7)
LENGTH = 10
PAUSE, EDIT, RESUME, ABORT = ControlAction
TALK = Script([], model=talker(LENGTH), pace_s=0.002)
WHOLE = spoken(PROMPT, LENGTH)
NATIVE = pytest.param(True, id="inside the runtime")
STOPPED = pytest.param(False, id="by stopping")
DOT = 200


def asked(number: int = 1, max_tokens: int = 20, **extra: Any) -> GenerateRequest:
    made = request(*PROMPT, max_tokens=max_tokens, **extra)
    return replace(made, request_id=f"c{number}/0")


async def control(
    bench: Bench, action: ControlAction, number: int = 1, **extra: Any
) -> GenerationInfo:
    return (await bench.board.control(f"c{number}", action, **extra))[0]


async def paused(bench: Bench, number: int = 1, **extra: Any) -> Listener:
    """Return a client whose answer is paused after two tokens."""
    client = Listener(bench.board, asked(number, **extra))
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE, number)
    return client


def limited(**limits: Any) -> BoardSettings:
    return replace(SETTINGS, **limits)


# -- a resumption that goes wrong -------------------------------------------------------------


@board_test(lambda: Bench(TALK))
async def test_a_resumption_that_is_aborted_before_it_begins_leaves_a_sound_handle(
    bench: Bench,
) -> None:
    client = await paused(bench, native_pause=True)
    bench.engine.begin_gate = asyncio.Event()
    await control(bench, RESUME)
    await until(lambda: len(bench.engine.commands) == 2)
    await control(bench, ABORT)
    bench.engine.begin_gate.set()
    assert (await client.end())[1] is FinishReason.ABORT
    await until(lambda: bench.board.report().running == 0)
    assert not bench.engine.paused
    assert await answer(bench.board) == ("Hello", FinishReason.STOP)
    assert len(bench.engines) == 1


async def test_a_resumed_run_that_breaks_off_later_is_a_failed_run_like_any_other() -> None:
    breaks = replace(TALK, end=RunEnd.FAILED)
    async with Bench(breaks, breaks, breaks).running() as bench:
        for number in range(3):
            assert len(bench.engines) == 1
            client = await paused(bench, number, native_pause=True)
            said = client.text
            await control(bench, RESUME, number)
            with pytest.raises(RunFailed):
                await client.end()
            assert len(client.text) > len(said)
        await until(lambda: len(bench.engines) == 2 and bench.state is BoardState.READY)


# -- what is told -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("native", "quirks", "kv"),
    [
        pytest.param(True, {}, Kv.KEPT, id="inside the runtime"),
        pytest.param(False, {}, Kv.RECOMPUTED, id="by stopping"),
        pytest.param(
            False, {"kv_valid_after_abort": True}, Kv.KEPT, id="by stopping, with the KV trusted"
        ),
    ],
)
async def test_the_event_and_the_answer_say_the_same_of_the_kv_cache(
    native: bool, quirks: Mapping[str, bool], kv: Kv
) -> None:
    script = replace(TALK, kv_off=0 if native else -1)
    async with Bench(script, quirks=QUIRKS | dict(quirks)).running() as bench:
        told: list[Paused] = []

        async def listen() -> None:
            async with aclosing(bench.board.generate(asked(native_pause=native))) as events:
                async for event in events:
                    if isinstance(event, Paused):
                        told.append(event)

        client = asyncio.create_task(listen())
        await until(lambda: any(g.tokens >= 2 for g in bench.board.generations()))
        said = (await control(bench, PAUSE)).kv
        await until(lambda: bool(told))
        assert (told[0].kv, said) == (kv, kv)
        await control(bench, ABORT)
        await client
        bench.scripts.clear()


# -- who has the board ------------------------------------------------------------------------


async def test_whoever_pauses_and_resumes_in_turns_does_not_keep_the_others_waiting() -> None:
    bench = Bench(Script([(DOT, b".")] * 60), settings=limited(pause_hold_s=0.1))
    async with bench.running():
        asks = asked(max_tokens=60, native_pause=True, pause_on_ids=(DOT,))

        async def nervous() -> None:
            async with aclosing(bench.board.generate(asks)) as events:
                async for event in events:
                    if isinstance(event, Paused):
                        await asyncio.sleep(0.04)
                        await control(bench, RESUME)

        first = asyncio.create_task(nervous())
        await until(lambda: bench.board.report().pauses >= 1)
        assert await answer(bench.board, 9, 9) == ("Hello", FinishReason.STOP)
        assert bench.board.report().pauses < 20
        assert not first.done()
        first.cancel()
        await asyncio.wait({first})


@board_test(lambda: Bench(TALK, settings=limited(pause_hold_s=0.02)))
async def test_one_that_resumes_before_it_has_let_go_comes_behind_the_one_it_lets_go_for(
    bench: Bench,
) -> None:
    client = await paused(bench, native_pause=True)
    bench.engine.call_gate = asyncio.Event()
    other = asyncio.create_task(answer(bench.board, 9, 9))
    await until(lambda: bool(bench.engine.calls))  # it is being drained
    bench.scripts = [Script([*tokens_of("x"), (EOS, b"")]), TALK]
    assert (await control(bench, RESUME)).state is GenerationState.QUEUED
    bench.engine.call_gate.set()
    assert await other == ("x", FinishReason.STOP)
    assert await client.end() == (WHOLE, FinishReason.STOP)


# -- how many are kept ------------------------------------------------------------------------


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@board_test(lambda: Bench(TALK, TALK, TALK, settings=limited(max_paused=1)))
async def test_a_pause_too_many_is_refused_and_costs_nobody_anything(
    bench: Bench, native: bool
) -> None:
    first = await paused(bench, 1)
    second = Listener(bench.board, asked(2, native_pause=native))
    await until(lambda: len(second.ids) >= 2)
    with pytest.raises(TooManyPaused, match="at most 1 paused"):
        await control(bench, PAUSE, 2)
    assert await second.end() == (WHOLE, FinishReason.STOP)
    await control(bench, RESUME, 1)
    assert await first.end() == (WHOLE, FinishReason.STOP)


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@board_test(lambda: Bench(TALK, TALK, TALK, settings=limited(max_paused=1)))
async def test_one_that_would_pause_by_itself_ends_where_there_are_enough(
    bench: Bench, native: bool
) -> None:
    first = await paused(bench, 1)
    word = WHOLE.split()[3]
    second = Listener(bench.board, asked(2, native_pause=native, pause_on_text=(word,)))
    with pytest.raises(TooManyPaused):
        await second.end()
    assert second.text.rstrip().endswith(word)
    await until(lambda: bench.board.report().running == 0)
    assert not bench.engine.paused
    assert (bench.board.report().paused, bench.board.report().failed) == (1, 1)
    await control(bench, RESUME, 1)
    assert await first.end() == (WHOLE, FinishReason.STOP)


async def test_a_batch_keeps_no_more_paused_ones_either() -> None:
    settings = limited(max_paused=1, n_batch=2, batch_window_s=0.0)
    bench = Bench(TALK, TALK, TALK, TALK, settings=settings)
    await bench.board.start()
    try:
        word = WHOLE.split()[3]
        clients = [Listener(bench.board, asked(number, pause_on_text=(word,))) for number in (1, 2)]
        await until(lambda: bench.board.report().failed == 1)
        await until(lambda: bench.board.report().paused == 1)
        [left] = bench.board.generations()
        number = int(left.request_id[1])
        with pytest.raises(TooManyPaused):
            await clients[2 - number].end()
        await control(bench, RESUME, number)
        assert await clients[number - 1].end() == (WHOLE, FinishReason.STOP)
    finally:
        await bench.board.stop()


# -- room in the context ----------------------------------------------------------------------


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@pytest.mark.parametrize("per_run", [True, False], ids=["1.3.0", "1.2.3"])
async def test_what_is_injected_leaves_the_answer_only_the_room_that_is_left(
    native: bool, per_run: bool
) -> None:
    endless = Script([], model=talker(99), pace_s=0.002)
    settings = limited(context_len=24)
    async with Bench(endless, endless, settings=settings, per_run=per_run).running() as bench:
        client = await paused(bench, native_pause=native, max_tokens=21)
        before = await control(bench, EDIT, edit=Edit())
        room = 24 - before.context_tokens
        result = tuple(range(40, 40 + room - 2))
        await control(bench, EDIT, edit=Edit(ids=result, injected=True))
        await control(bench, RESUME)
        assert (await client.end())[1] is FinishReason.LENGTH
        assert len(client.ids) == before.tokens + 2
        bench.scripts.clear()


@pytest.mark.parametrize(
    ("edit", "positions"),
    [
        pytest.param(Edit(clear=((1, 2),)), 0, id="cut out of its middle"),
        pytest.param(
            Edit(replace_last=1),
            len(PROMPT) + LENGTH,
            id="cut at its end",
        ),
    ],
)
async def test_a_context_is_only_extended_later_if_a_whole_prefill_would_give_the_same(
    edit: Edit, positions: int
) -> None:
    quirks = QUIRKS | {"pause_with_history": True, "clear_range_with_history": True}
    async with Bench(TALK, quirks=quirks).running() as bench:
        client = await paused(bench, native_pause=True)
        await control(bench, EDIT, edit=edit)
        await control(bench, RESUME)
        await until(lambda: bench.board.generations()[0].state is GenerationState.GENERATING)
        await control(bench, PAUSE)  # the second pause remembers what the first one led to
        await control(bench, RESUME)
        assert (await client.end())[1] is FinishReason.STOP
        assert [c.resume for c in bench.engine.commands] == [False, True, True]
        assert bench.board.report().kv_positions == positions
        bench.scripts.clear()
