"""Several generations in one run: each has its own text, end, pause and hang-up."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.answer.hooks import Action, Continue, Decoded, Replace
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.errors import EngineDied, LoadFailed, RunFailed
from rkserve.core.messages import ControlAction, Delta, FinishReason, GenerateRequest, Kv
from rkserve.core.run_params import Sampling
from rkserve.native.runtime import RunEnd
from tests.support.boards.board_bench import (
    SETTINGS,
    SPOKEN,
    Bench,
    Listener,
    spoken,
    talker,
    until,
)
from tests.support.boards.fakes import EOS, Script

pytestmark = pytest.mark.virtual_time

LENGTH = 8
TALK = Script([], model=talker(LENGTH), pace_s=0.002)
STOP = FinishReason.STOP
FOUR = replace(SETTINGS, n_batch=4, batch_window_s=0.01, eos_ids=frozenset({EOS}))


def asked(number: int, **extra: Any) -> GenerateRequest:
    given = {"max_tokens": 20, **extra}
    return GenerateRequest(f"c{number}/0", "m", (number, 7), **given)


def whole(number: int, length: int = LENGTH) -> str:
    return spoken((number, 7), length)


def words(number: int, count: int) -> str:
    return "".join(f"{word} " for word in whole(number).split()[:count])


class BatchBench(Bench):
    """Its farewell would need a batch of its own: what it asks of a well board is done here."""

    async def __aenter__(self) -> BatchBench:
        await self.board.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.scripts = [TALK]
        await until(lambda: self.state is BoardState.READY)
        assert await Listener(self.board, asked(99)).end() == (whole(99), STOP)
        await until(lambda: self.board.report().running == 0)
        assert self.board.report().queued == 0
        await self.board.stop()


async def test_requests_that_come_together_share_one_run_and_nothing_else() -> None:
    async with BatchBench(TALK, settings=FOUR) as bench:
        clients = [Listener(bench.board, asked(n)) for n in range(3)]
        for number, client in enumerate(clients):
            assert await client.end() == (whole(number), STOP)
            assert client.finished is not None
            assert client.finished.usage.prompt_tokens == 2
            assert client.finished.timings.batch == 3
            assert client.finished.timings.batch_wait_ms >= 5
        await until(lambda: bench.board.report().running == 0)
        (command,) = bench.engine.commands
        assert [entry.ids for entry in command.entries] == [(0, 7), (1, 7), (2, 7), (0,)]
        assert not command.keep_history
        report = bench.board.report()
        assert (report.batch_runs, report.batch_entries, report.n_batch) == (1, 3, 4)


async def test_a_full_batch_does_not_wait_for_the_window() -> None:
    settings = replace(FOUR, batch_window_s=20.0)
    bench = Bench(TALK, settings=settings)
    await bench.board.start()
    clients = [Listener(bench.board, asked(n)) for n in range(4)]
    for number, client in enumerate(clients):
        assert await client.end() == (whole(number), STOP)
    await bench.board.stop()


@pytest.mark.parametrize("per_run", [True, False], ids=["1.3.0", "1.2.3"])
async def test_each_has_its_own_limit_and_stop_and_is_told_at_once(per_run: bool) -> None:
    async with BatchBench(replace(TALK, pace_s=0.01), settings=FOUR, per_run=per_run) as bench:
        short = Listener(bench.board, asked(0, max_tokens=2))
        stopped = Listener(bench.board, asked(1, stop=(whole(1).split()[4],)))
        long = Listener(bench.board, asked(2, max_tokens=7))
        assert await short.end() == (words(0, 2), FinishReason.LENGTH)
        assert not stopped.task.done()
        assert await stopped.end() == (words(1, 4), STOP)
        assert not long.task.done()
        assert await long.end() == (words(2, 7), FinishReason.LENGTH)
        await until(lambda: bench.board.report().running == 0)
        assert bench.engine.commands[0].max_new_tokens == (20 if per_run else None)
        assert bench.engine.aborts == [1]  # nobody was left
        assert bench.board.report().batch_tail_ms >= 40


async def test_requests_whose_sampling_differs_share_no_run() -> None:
    async with BatchBench(TALK, TALK, settings=FOUR) as bench:
        cold = Sampling(temperature=0.0)
        mixed = [asked(0), asked(1, sampling=cold), asked(2)]
        clients = [Listener(bench.board, one) for one in mixed]
        for number, client in enumerate(clients):
            assert await client.end() == (whole(number), STOP)
        firsts = [c.entries[0].ids for c in bench.engine.commands]
        assert firsts == [(0, 7), (1, 7)]


async def test_one_who_hangs_up_leaves_and_the_others_go_on() -> None:
    async with BatchBench(TALK, settings=FOUR) as bench:
        leaver, other = (Listener(bench.board, asked(n)) for n in range(2))
        await until(lambda: len(leaver.ids) >= 2)
        await leaver.hang_up()
        assert bench.engine.aborts == []
        assert await other.end() == (whole(1), STOP)
        assert bench.board.report().aborted == 1


async def test_the_run_is_aborted_when_everybody_has_hung_up() -> None:
    async with BatchBench(replace(TALK, model=talker(9999)), settings=FOUR) as bench:
        clients = [Listener(bench.board, asked(n)) for n in range(2)]
        await until(lambda: all(len(client.ids) >= 2 for client in clients))
        for client in clients:
            await client.hang_up()
        await until(lambda: bench.board.report().running == 0)
        assert bench.engine.aborts == [1]


async def test_one_is_paused_at_once_and_goes_on_in_a_later_run() -> None:
    async with BatchBench(TALK, TALK, settings=FOUR) as bench:
        paused, other = (Listener(bench.board, asked(n, native_pause=True)) for n in range(2))
        await until(lambda: len(paused.ids) >= 3)
        (info,) = await bench.board.control("c0", ControlAction.PAUSE)
        assert (info.state, info.kv) == (GenerationState.PAUSED, Kv.RECOMPUTED)
        assert bench.engine.pauses == []
        assert await other.end() == (whole(1), STOP)
        assert paused.text == info.partial_output
        await bench.board.control("c0", ControlAction.RESUME)
        assert await paused.end() == (whole(0), STOP)


class Rewriter:
    """Puts its own word in place of the second one."""

    def on_piece(self, piece: Decoded) -> Action:
        replaces = piece.index == 1 and not piece.replayed and (piece.token_id or 0) >= SPOKEN
        return Replace((77,), "seven ") if replaces else Continue()

    def on_end(self) -> str:
        return ""


async def test_a_hook_that_rewinds_one_entry_leaves_the_others_alone() -> None:
    async with BatchBench(TALK, TALK, TALK, settings=FOUR) as bench:
        first = whole(0).split()[0]
        guided = Listener(bench.board, asked(0), lambda _: Rewriter())
        plain = Listener(bench.board, asked(1))
        assert await plain.end() == (whole(1), STOP)
        rest = spoken((0, 7, int(first), 77), LENGTH)
        assert await guided.end() == (f"{first} seven {rest}", STOP)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(replace(TALK, end=RunEnd.FAILED), RunFailed, id="the run fails"),
        pytest.param(replace(TALK, die_at=3), EngineDied, id="the engine dies"),
    ],
)
async def test_a_failure_is_told_to_those_who_still_sit_in_the_run(
    script: Script, error: type[Exception]
) -> None:
    async with BatchBench(script, settings=FOUR) as bench:
        done = Listener(bench.board, asked(0, max_tokens=2))
        # It ends by a token that only the runtime knows: so it sits until the end.
        struck = Listener(bench.board, asked(1))
        assert (await done.end())[1] is FinishReason.LENGTH
        if error is RunFailed:
            await until(lambda: struck.finished is not None)
        else:
            with pytest.raises(error):
                await struck.end()


async def test_a_run_that_the_runtime_refuses_fails_all_of_it() -> None:
    refused = replace(TALK, model=None, end=RunEnd.FAILED)
    async with BatchBench(refused, settings=FOUR) as bench:
        clients = [Listener(bench.board, asked(n)) for n in range(3)]
        for client in clients:
            with pytest.raises(RunFailed):
                await client.end()
        assert bench.board.report().failed == 3


async def test_an_engine_of_another_batch_size_is_not_taken() -> None:
    class Wrong(Bench):
        async def _start(self, weights: Path | None) -> Any:
            self._n_batch = 2
            return await super()._start(weights)

    bench = Wrong(settings=FOUR)
    with pytest.raises(LoadFailed, match="2 inputs at once, not 4"):
        await bench.board.start()
    await bench.board.stop()


async def test_deltas_of_a_batch_reach_their_own_streams_only() -> None:
    async with BatchBench(*[TALK] * 4, settings=FOUR) as bench:

        async def read(number: int) -> list[int]:
            ids: list[int] = []
            async with aclosing(bench.board.generate(asked(number))) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        ids += event.token_ids
            return ids

        read_ids = await asyncio.gather(*(read(n) for n in range(10)))
        for number, ids in enumerate(read_ids):
            assert ids == [*map(int, whole(number).split()), EOS]
