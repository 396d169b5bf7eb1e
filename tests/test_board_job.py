"""What a job gives to whoever streams it, and what it keeps back under a hold."""

from __future__ import annotations

import asyncio

import pytest
from own_time import run_loop

from rkserve.board.generation import Generation
from rkserve.board.job import Job
from rkserve.errors import EngineDied
from rkserve.messages import Delta, Finished, FinishReason, GenerateRequest, Timings, Usage

FAILED = EngineDied("b", "it was killed")
ENDED = Finished(FinishReason.STOP, Usage(1, 1, 0), Timings(0.0, 0.0, 1, 0.0, 1, 0.0))


def job() -> Job:
    """A job that has said a word nobody has taken."""
    made = Job(
        1, Generation(GenerateRequest("r", "m", (1,), 4), frozenset(), runtime_counts=True), 0.0
    )
    made.start()
    made.token(7, b"word", waiting=False)
    return made


def test_what_is_muted_is_kept_back_until_it_is_not() -> None:
    async def main() -> None:
        made = job()
        made.mute(muted=True)
        made.end(ENDED)
        told = asyncio.create_task(made.next_event())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not told.done()
        assert not made.pending  # a pause waits for nobody who does not read
        made.mute(muted=False)
        said = await told
        assert isinstance(said, Delta)
        assert said.text == "word"
        assert await made.next_event() == ENDED

    run_loop(main())


@pytest.mark.parametrize("before", [True, False], ids=["failed before it is read", "while it is"])
def test_a_failure_is_told_at_once_also_where_the_text_is_kept_back(before: bool) -> None:
    async def main() -> None:
        made = job()
        made.mute(muted=True)
        if before:
            made.end(FAILED)
        told = asyncio.create_task(made.next_event())
        await asyncio.sleep(0)
        made.end(FAILED)
        with pytest.raises(EngineDied):
            await told

    run_loop(main())


def test_a_failure_that_nothing_holds_is_told_after_the_text_before_it() -> None:
    async def main() -> None:
        made = job()
        made.end(FAILED)
        assert isinstance(await made.next_event(), Delta)
        with pytest.raises(EngineDied):
            await made.next_event()

    run_loop(main())
