"""One board over a scripted engine: who gets what, and who is turned away."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.answer.generation import Generation
from rkserve.board.engine.protocol import EntryCommand
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.job import Job
from rkserve.core.block_hashes import seed_of
from rkserve.core.board_report import EngineUse
from rkserve.core.errors import (
    ContextOverflow,
    EngineDied,
    EngineHung,
    HookFailed,
    QueueFull,
    QueueTimeout,
    SamplingFixed,
)
from rkserve.core.messages import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    QueueChange,
    Usage,
)
from rkserve.core.run_params import Sampling
from rkserve.native.runtime import RunEnd
from tests.support.boards.board_bench import (
    PLAIN,
    SETTINGS,
    Bench,
    answer,
    board_test,
    collect,
    request,
    text_of,
    until,
)
from tests.support.boards.fakes import EOS, Script, tokens_of

pytestmark = pytest.mark.virtual_time

# -- an answer --------------------------------------------------------------------------------


@board_test(Bench)
async def test_an_answer_is_accepted_then_streamed_then_finished(bench: Bench) -> None:
    events = await collect(bench.board.generate(request()))
    assert events[0] == Accepted("b", "1.3.0", queued_ahead=0)
    assert all(isinstance(event, Delta) for event in events[1:-1])
    assert text_of(events) == "Hello"
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (3, 3)
    report = bench.board.report()
    assert (report.requests, report.completion_tokens, report.failed) == (1, 3, 0)


async def test_of_two_ends_of_a_request_the_first_counts() -> None:
    generation = Generation(request(), frozenset(), runtime_counts=True)
    job = Job(1, generation, arrived_s=0.0)
    job.end(EngineHung("b", "silent"))
    job.end(EngineDied("b", "killed for it"))
    job.token(100, b"late, but before the end was read", waiting=False)
    assert await job.next_event() == Delta("late, but before the end was read", (100,))
    with pytest.raises(EngineHung):
        await job.next_event()


@pytest.mark.parametrize("per_run", [True, False], ids=["1.3.0", "1.2.3"])
async def test_a_token_limit_is_kept_by_the_runtime_or_by_an_abort(per_run: bool) -> None:
    script = Script(tokens_of(*"abcdef"), late=1)
    async with Bench(script, per_run=per_run).running() as bench:
        limited = await answer(bench.board, max_tokens=3)
        assert limited == ("abc", FinishReason.LENGTH)
        assert bench.engine.commands[0].max_new_tokens == (3 if per_run else None)
        assert bench.engine.aborts == ([] if per_run else [1])


@board_test(lambda: Bench(Script(tokens_of("a", "bS", "TO", "Pc", "d"))))
async def test_a_stop_string_across_tokens_ends_the_run_by_abort(bench: Bench) -> None:
    assert await answer(bench.board, stop=("STOP",)) == ("ab", FinishReason.STOP)
    assert bench.engine.aborts == [1]


@board_test(lambda: Bench(Script([(EOS, b""), *tokens_of(*"abc")], late=1)))
async def test_a_runtime_that_goes_on_after_the_eos_is_aborted(bench: Bench) -> None:
    assert await answer(bench.board) == ("", FinishReason.STOP)
    assert bench.engine.aborts == [1]


async def test_text_mode_sends_the_text_and_says_when_the_context_was_full() -> None:
    settings = replace(SETTINGS, context_len=15)
    async with Bench(Script(tokens_of(*"abcdefgh")), settings=settings).running() as bench:
        asked = replace(request(), prompt_ids=(), prompt_text="Say it.", max_tokens=15)
        events = await collect(bench.board.generate(asked))
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.LENGTH
        assert events[-1].usage == Usage(prompt_tokens=7, completion_tokens=8)
        command = bench.engine.commands[0]
        assert command.entries == (EntryCommand(prompt_text="Say it.", images_of=seed_of("")),)
        assert (command.clear, command.keep_history) == (True, False)


# -- KV reuse ---------------------------------------------------------------------------------

TURN_2 = (1, 2, 3, 100, 101, EOS, 9)


@board_test(Bench)
async def test_the_next_turn_of_a_conversation_sends_only_what_is_new(bench: Bench) -> None:
    await answer(bench.board, 1, 2, 3)
    assert bench.board.report().kv_positions == 5
    events = await collect(bench.board.generate(request(*TURN_2)))
    first, second = bench.engine.commands
    assert (first.clear, first.entries[0].ids, first.keep_history) == (False, (1, 2, 3), True)
    assert (second.clear, second.entries[0].ids) == (False, (EOS, 9))
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.cached_tokens == 5
    assert bench.board.report().cached_tokens == 5


@pytest.mark.parametrize(
    ("script", "extra"),
    [
        pytest.param(Script(tokens_of("a!", *"bcdef")), {"stop": ("!",)}, id="after an abort"),
        pytest.param(replace(PLAIN, end=RunEnd.FAILED), {}, id="after a failed run"),
    ],
)
async def test_the_context_is_cleared_after_a_run_that_did_not_end_by_itself(
    script: Script, extra: dict[str, Any]
) -> None:
    async with Bench(script).running() as bench:
        await asyncio.gather(answer(bench.board, **extra), return_exceptions=True)
        await answer(bench.board, *TURN_2)
        assert bench.engine.commands[1].clear
        assert bench.engine.commands[1].entries[0].ids == TURN_2


@pytest.mark.parametrize("kv_off", [2, -3], ids=["too many", "too few"])
async def test_kv_reuse_ends_where_the_runtime_counts_otherwise(kv_off: int) -> None:
    async with Bench(replace(PLAIN, kv_off=kv_off)).running() as bench:
        assert await answer(bench.board, 1, 2, 3) == ("Hello", FinishReason.STOP)
        await answer(bench.board, *TURN_2)
        await answer(bench.board, *TURN_2, 100, 101, EOS, 9)
        histories = [(c.clear, c.keep_history) for c in bench.engine.commands]
        assert histories == [(False, True), (True, False), (True, False)]


# -- who is turned away -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        pytest.param(request(*range(60), max_tokens=5), ContextOverflow, id="too long"),
        pytest.param(
            request(
                sampling=Sampling(temperature=0.1),
                sampling_asked=("temperature",),
                strict_sampling=True,
            ),
            SamplingFixed,
            id="strict sampling on 1.2.3",
        ),
        pytest.param(request(stop=("",)), HookFailed, id="a bug of the caller"),
    ],
)
async def test_a_request_that_cannot_be_served_leaves_no_trace(
    asked: GenerateRequest, error: type[Exception]
) -> None:
    async with Bench(per_run=False).running() as bench:
        with pytest.raises(error):
            await collect(bench.board.generate(asked))
        assert bench.board.report().requests == 0


async def test_sampling_that_the_release_cannot_change_is_named() -> None:
    async with Bench(per_run=False).running() as bench:
        sampling = Sampling(temperature=0.1, top_k=40)
        asked = request(sampling=sampling, sampling_asked=("temperature", "top_k"))
        events = await collect(bench.board.generate(asked))
        assert isinstance(events[0], Accepted)
        assert events[0].sampling_ignored == ("temperature",)
        assert bench.engine.commands[0].sampling is None


def held() -> Script:
    """A run that does not get past prefill until its event is set."""
    return Script([*tokens_of("x"), (EOS, b"")], prefill=asyncio.Event())


async def test_a_full_queue_turns_away_and_a_request_id_may_come_twice() -> None:
    first = held()
    async with Bench(first, settings=replace(SETTINGS, queue_limit=2)).running() as bench:
        waiting = [asyncio.create_task(answer(bench.board)) for _ in range(3)]
        await until(lambda: bench.board.report().queued == 2)
        with pytest.raises(QueueFull):
            await answer(bench.board)
        assert first.prefill is not None
        first.prefill.set()
        stop = FinishReason.STOP
        assert await asyncio.gather(*waiting) == [("x", stop), ("Hello", stop), ("Hello", stop)]


async def test_one_who_waits_too_long_is_told_and_the_running_one_is_not_touched() -> None:
    first = held()
    async with Bench(first, settings=replace(SETTINGS, queue_timeout_s=0.05)).running() as b:
        running = asyncio.create_task(answer(b.board))
        await asyncio.sleep(0)
        with pytest.raises(QueueTimeout):
            await answer(b.board)
        assert first.prefill is not None
        first.prefill.set()
        assert await running == ("x", FinishReason.STOP)


# -- hang-ups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(5))
async def test_a_client_may_hang_up_at_every_event(after: int) -> None:
    async with Bench(Script([*tokens_of("H", "el", "lo"), (EOS, b"")])).running() as bench:
        events = bench.board.generate(request())
        for _ in range(after):
            await anext(events)
        await events.aclose()
        await until(lambda: bench.board.report().running == 0)
        assert bench.board.report().failed == 0
        assert bench.board.report().aborted == (1 if after else 0)


async def test_a_client_may_hang_up_while_it_waits() -> None:
    first = held()
    async with Bench(first).running() as bench:
        running = bench.board.generate(request())
        await anext(running)
        await asyncio.sleep(0)
        waiting = bench.board.generate(request())
        assert isinstance(await anext(waiting), Accepted)
        await waiting.aclose()
        assert bench.board.report().queued == 0
        await running.aclose()
        assert bench.engine.aborts == [1]
        assert first.prefill is not None
        first.prefill.set()
        await until(lambda: bench.board.report().running == 0)
        assert len(bench.engine.commands) == 1


async def test_a_request_in_the_queue_is_told_when_it_has_the_board() -> None:
    first = held()
    async with Bench(first, Script([*tokens_of("x"), (EOS, b"")])).running() as bench:
        running = bench.board.generate(request())
        accepted = await anext(running)
        assert isinstance(accepted, Accepted)
        assert not accepted.waits
        await asyncio.sleep(0)
        waiting = bench.board.generate(request())
        queued = await anext(waiting)
        assert isinstance(queued, Accepted)
        assert queued.waits
        await running.aclose()
        assert first.prefill is not None
        first.prefill.set()
        assert await anext(waiting) == QueueChange(waits=False)
        assert isinstance(await anext(waiting), Delta)
        await waiting.aclose()


@board_test(Bench)
async def test_a_hang_up_after_the_last_event_aborts_nothing(bench: Bench) -> None:
    async with aclosing(bench.board.generate(request())) as events:
        async for event in events:
            if isinstance(event, Finished):
                break
    assert bench.engine.aborts == []
    assert bench.board.report().aborted == 0


@board_test(lambda: Bench(Script(tokens_of(*"abcdef"), hang_at=2)))
async def test_a_cancelled_consumer_aborts_its_run(bench: Bench) -> None:
    seen = asyncio.Event()

    async def consume() -> None:
        async with aclosing(bench.board.generate(request())) as events:
            async for event in events:
                if isinstance(event, Delta):
                    seen.set()

    task = asyncio.create_task(consume())
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.engine.aborts == [1]
    await until(lambda: len(bench.engines) == 2)  # the abort is not heeded: watchdog, fresh engine


@board_test(lambda: Bench(Script([], end=None)))
async def test_an_abort_that_overtakes_its_run_is_no_failure(bench: Bench) -> None:
    events = bench.board.generate(request())
    await anext(events)
    await asyncio.sleep(0)
    assert len(bench.engine.commands) == 1
    await events.aclose()
    await until(lambda: bench.board.report().running == 0)
    assert bench.board.report().failed == 0


async def test_an_engine_that_grows_is_replaced_between_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used = {1: 0}  # memory by process; an engine that is not listed has none

    def use(root: Path, pid: int) -> EngineUse:
        return EngineUse(used.get(pid, 0), 10, 1024)

    monkeypatch.setattr("rkserve.board.board.read_engine_use", use)
    monkeypatch.setattr("rkserve.board.rules.engine_growth.REST_S", 1.0)
    gate = asyncio.Event()
    script = Script([*tokens_of("Hel", "lo"), (EOS, b"")], prefill=gate)
    patience = RunTimeouts(first_token_s=60.0)
    settings = replace(
        SETTINGS, engine_growth_bytes=1000, engine_growth_period_s=0.2, patience=patience
    )
    bench = Bench(script, settings=settings)
    async with bench.running():
        bench.engine.pid = 1
        await asyncio.sleep(2)
        used[1] = 2000
        client = asyncio.create_task(answer(bench.board))
        await asyncio.sleep(2)
        assert len(bench.engines) == 1, "not during a run"
        gate.set()
        assert await client == ("Hello", FinishReason.STOP)
        await asyncio.sleep(2)
        assert len(bench.engines) == 2
        assert bench.board.report().engine_renewals == 1
        assert "memory grew" in bench.board.report().last_recovery
        assert not bench.board.report().crashes
        bench.engine.pid = 2
        await asyncio.sleep(3)
        assert len(bench.engines) == 2
    assert "it is replaced" in caplog.text
