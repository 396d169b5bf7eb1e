"""The records and the run queue that a board's modules share."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from rkserve.board.answer.generation import Generation
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.job import Job
from rkserve.board.run.parts import ENDED_REMEMBERED, BoardBooks
from rkserve.core.errors import BoardAsleep
from rkserve.core.messages import GenerateRequest
from tests.support.boards.board_bench import SETTINGS, Bench
from tests.support.boards.own_time import run_loop


def test_the_books_remember_the_last_ended_generations_only() -> None:
    async def main() -> None:
        books = BoardBooks(SETTINGS, Obligations("b", "m", tuple, governed=False))
        for number in range(ENDED_REMEMBERED + 1):
            asked = GenerateRequest(f"r{number}", "m", (1,), 8)
            job = Job(number, Generation(asked, frozenset(), runtime_counts=True), 0.0)
            books.jobs[number] = job
            books.leave(job)
        assert not books.jobs
        assert [*books.ended] == [f"r{number}" for number in range(1, ENDED_REMEMBERED + 1)]

    run_loop(main())


def test_engine_tasks_run_one_at_a_time_and_a_withdrawn_one_never_begins() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.running():
            queue, begun = bench.board.queue, []
            gate = asyncio.Event()

            async def work(name: str) -> str:
                begun.append(name)
                await gate.wait()
                return name

            tasks = [queue.schedule(partial(work, name), first=False) for name in "abc"]
            tasks.append(queue.schedule(partial(work, "first"), first=True))
            tasks[1].cancel()
            await asyncio.sleep(0.01)
            assert (begun, queue.free) == (["a"], False)
            gate.set()
            assert [await tasks[at] for at in (0, 2, 3)] == ["a", "c", "first"]
            assert begun == ["a", "first", "c"]

    run_loop(main())


def test_rejected_tasks_fail_as_on_a_sleeping_board() -> None:
    async def main() -> None:
        bench = Bench()
        async with bench.running():
            queue, gate = bench.board.queue, asyncio.Event()
            running = queue.schedule(gate.wait, first=False)
            waiting = queue.schedule(gate.wait, first=False)
            queue.reject_tasks()
            with pytest.raises(BoardAsleep):
                await waiting
            gate.set()
            assert await running

    run_loop(main())
