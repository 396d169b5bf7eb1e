"""What a job gives to whoever streams it, and what it keeps back under a hold."""

from __future__ import annotations

import asyncio

import pytest

from rkserve.board.answer.generation import Generation
from rkserve.board.rules.generations import GenerationEvent
from rkserve.board.run.job import MERGE_S, Job
from rkserve.core.errors import EngineDied
from rkserve.core.messages import (
    Delta,
    Edit,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Kv,
    PassDelta,
    Paused,
    Splice,
    Timings,
    TokenOrigin,
    TranscriptToken,
    Usage,
)

pytestmark = pytest.mark.virtual_time

FAILED = EngineDied("b", "it was killed")
ENDED = Finished(FinishReason.STOP, Usage(1, 1, 0), Timings(0.0, 0.0, 1, 0.0, 1, 0.0))


def job(pass_on: PassDelta | None = None) -> Job:
    """A job that has said a word nobody has taken."""
    generation = Generation(GenerateRequest("r", "m", (1,), 9), frozenset(), runtime_counts=True)
    made = Job(1, generation, 0.0, pass_on=pass_on)
    made.start()
    made.token(7, b"word", waiting=False)
    return made


async def test_what_is_muted_is_kept_back_until_it_is_not() -> None:
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


@pytest.mark.parametrize("before", [True, False], ids=["failed before it is read", "while it is"])
async def test_a_failure_is_told_at_once_also_where_the_text_is_kept_back(before: bool) -> None:
    made = job()
    made.mute(muted=True)
    if before:
        made.end(FAILED)
    told = asyncio.create_task(made.next_event())
    await asyncio.sleep(0)
    made.end(FAILED)
    with pytest.raises(EngineDied):
        await told


async def test_a_failure_that_nothing_holds_is_told_after_the_text_before_it() -> None:
    made = job()
    made.end(FAILED)
    assert isinstance(await made.next_event(), Delta)
    with pytest.raises(EngineDied):
        await made.next_event()


def pause(made: Job) -> Paused:
    """Let it rest now; nobody has read what was said before."""
    made.advance(GenerationEvent.PAUSE_ASKED)
    made.interrupted()
    made.advance(GenerationEvent.PAUSED)
    paused = Paused(None, made.generation.tokens, Kv.RECOMPUTED)
    made.announce(paused)
    return paused


def resume(made: Job) -> None:
    made.unpause(0.0)
    made.advance(GenerationEvent.RESUME_ASKED)
    made.start()


async def test_who_reads_late_hears_of_each_pause_where_it_was() -> None:
    """Else the end of an old pause would be taken for that of the one that goes on."""
    made = job()
    first = pause(made)
    made.generation.apply(Edit(ids=(9,), text="!"), kv_positions=0, context_len=16)
    resume(made)
    made.token(8, b" more", waiting=False)
    second = pause(made)
    edit = Splice(1, (TranscriptToken(9, b"!", TokenOrigin.APPENDED),))
    expected: list[Event] = [
        Delta("word", (7,)),
        first,
        Delta("!", (9,), splice=edit, paused=True),
        Delta("", ()),
        Delta(" more", (8,)),
        second,
    ]
    assert made.pending  # who waits until all is given out waits for what nobody has read
    assert [await made.next_event() for _ in expected] == expected
    assert not made.pending


async def test_a_delta_is_passed_on_while_the_consumer_waits_for_it() -> None:
    passed: list[Delta] = []
    made = job(passed.append)
    assert passed == [], "the consumer had not asked for an event yet"
    assert await made.next_event() == Delta("word", (7,))
    waiting = asyncio.create_task(made.next_event())
    await asyncio.sleep(MERGE_S)
    made.token(8, b" more", waiting=False)
    assert passed == [Delta(" more", (8,))]
    made.token(9, b" at", waiting=False)
    made.token(10, b" once", waiting=False)
    assert len(passed) == 1, "too soon after the last one: the consumer gets both in one delta"
    assert await waiting == Delta(" at once", (9, 10), lengths=(3, 5))
    waiting = asyncio.create_task(made.next_event())
    await asyncio.sleep(MERGE_S)
    made.token(11, b"\xe2", waiting=True)
    await asyncio.sleep(MERGE_S)
    made.token(12, b"\x82\xac", waiting=False)
    made.end(ENDED)
    assert [one.text for one in passed] == [" more", "\u20ac"]
    assert await waiting == ENDED


async def test_a_delta_that_cannot_be_passed_on_ends_the_stream_and_not_the_reader() -> None:
    def refuse(_: Delta) -> None:
        raise OSError("it has no connection")

    made = job(refuse)
    await made.next_event()
    waiting = asyncio.create_task(made.next_event())
    await asyncio.sleep(MERGE_S)
    made.token(8, b" more", waiting=False)
    with pytest.raises(OSError, match="no connection"):
        await waiting


@pytest.mark.parametrize("muted", [True, False], ids=["muted", "gone"])
async def test_a_consumer_that_does_not_read_gets_no_delta_passed_on(muted: bool) -> None:
    passed: list[Delta] = []
    made = job(passed.append)
    await made.next_event()
    waiting = asyncio.create_task(made.next_event())
    await asyncio.sleep(0)
    if muted:
        made.mute(muted=True)
    else:
        waiting.cancel()
    await asyncio.sleep(MERGE_S)
    made.token(8, b" more", waiting=False)
    await asyncio.sleep(0)
    assert passed == []
    waiting.cancel()
