"""The record of a request: its parts and their times."""

from __future__ import annotations

import asyncio
import time

import pytest

from rkserve.core.errors import QueueFull, RequestError
from rkserve.core.messages import Delta, Embedded, QueueChange
from rkserve.core.request_record import (
    MAX_VISITS,
    NS,
    BoardVisit,
    GenerationRecord,
    RequestRecord,
    code_of,
    log_for,
    record_generation,
    record_of_request,
)
from tests.support.boards.fake_boards import accepted, finished

pytestmark = pytest.mark.virtual_time


async def test_a_visit_has_the_times_of_its_events() -> None:
    visit = BoardVisit("replica of a", time.monotonic())
    times = []
    for event in (accepted("a", waits=True), QueueChange(waits=False), Delta("x", (1,))):
        await asyncio.sleep(1)
        times.append(time.monotonic())
        visit.observe(event)
    assert (visit.board, visit.accepted_s, visit.running_s, visit.first_s) == ("a", *times)
    await asyncio.sleep(1)
    end = finished()
    visit.observe(end)
    assert (visit.finished, visit.ended_s) == (end, time.monotonic())


async def test_text_without_a_token_is_no_first_token_and_a_vector_is() -> None:
    visit = BoardVisit("a", 0.0)
    visit.observe(accepted("a"))
    visit.observe(Delta("an edit", ()))
    assert visit.first_s is None
    visit.observe(Embedded((b"",)))
    assert visit.first_s == time.monotonic()


async def test_a_board_without_a_word_on_its_queue_runs_from_the_first_token_on() -> None:
    visit = BoardVisit("a", 0.0)
    visit.observe(accepted("a", waits=True))
    visit.observe(Delta("x", (1,)))
    assert visit.running_s == visit.first_s is not None


async def test_generations_belong_to_the_request_of_their_task() -> None:
    record = RequestRecord("r")

    async def generate(name: str) -> GenerationRecord:
        return record_generation(name)

    log_for(record)
    made = await asyncio.gather(*(asyncio.create_task(generate(f"r/{at}")) for at in range(2)))
    assert record.generations == list(made)
    log_for("another")
    assert record_of_request() is not record
    record_generation("x")
    assert len(record.generations) == 2


async def test_a_request_with_very_many_generations_keeps_some() -> None:
    record = RequestRecord("r")
    log_for(record)
    one = record_generation("r/0")
    for _ in range(2 * MAX_VISITS):
        record_generation("r/1").wait()
        one.wait()
        one.visit("a", 0, 0, embeds=False)
    assert [len(kept) for kept in (record.generations, one.waits, one.visits)] == [MAX_VISITS] * 3


async def test_boards_are_in_the_order_of_their_first_visits() -> None:
    record = RequestRecord("r")
    for name, boards in (("r/0", "ab"), ("r/1", "ba")):
        made = GenerationRecord(name, visits=[BoardVisit(b, ord(b) - 90.0) for b in boards])
        record.generations.append(made)
    record.generations[1].visits[0].begun_s = 1.0
    assert record.boards == ["b", "a"]


async def test_moments_are_on_the_clock_of_the_wall() -> None:
    record = RequestRecord("r")
    assert record.at_ns(record.begun_s) == record.begun_ns
    assert record.at_ns(record.begun_s + 1.5) == record.begun_ns + NS * 3 // 2


async def test_the_text_of_an_answer_is_that_of_its_deltas() -> None:
    record = RequestRecord("r", output=["", ""])
    for delta in (Delta("hello", (1,)), Delta("p", (2,), retract=2)):
        record.answered(1, delta)
    assert record.output == ["", "help"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(QueueFull(1, 1), "queue_full", id="its code"),
        pytest.param(RequestError("x"), "invalid_request_error", id="its kind without a code"),
        pytest.param(ZeroDivisionError(), "internal_error", id="a bug"),
        pytest.param(asyncio.CancelledError(), "cancelled", id="a hang-up"),
    ],
)
async def test_the_code_of_an_error(error: BaseException, code: str) -> None:
    assert code_of(error) == code
    record = RequestRecord("r")

    async def check() -> None:
        with record.checks_grammar():
            await asyncio.sleep(2)
            raise error

    with pytest.raises(type(error)):
        await check()
    assert record.grammar is not None
    assert record.grammar.failure == code
    assert record.grammar.ended_s == pytest.approx(record.grammar.begun_s + 2, abs=0.1)
