"""Reservations at boards: their ends, pauses and board time, and the service times learned."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rkserve.core.errors import (
    DeadlineUnreachable,
)
from rkserve.core.messages import (
    Accepted,
    Delta,
    Kv,
    Paused,
    QueueChange,
    Timings,
)
from rkserve.router.queue.admission import QueueTerms
from tests.support.boards.fake_boards import finished, report
from tests.support.boards.queue_hall import hall

pytestmark = pytest.mark.virtual_time


async def test_the_end_of_an_answer_frees_its_place_once() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    place.observe(finished())
    second = await of.ask()
    place.ended(left=False)
    third = of.ask()
    await of.settle()
    assert not third.done(), "the second one is there still"
    second.ended(left=True)
    await third


async def test_a_board_of_batches_has_several_places() -> None:
    of = await hall(report("a", n_batch=3), limit=9)
    places = await of.busy(3)
    waiting = [of.ask() for _ in range(2)]
    await of.settle()
    assert of.depth == 2
    places[1].observe(finished())
    places[2].observe(finished())
    await asyncio.gather(*waiting)


async def test_what_was_learned_of_answers_refuses_what_would_be_late() -> None:
    loop = asyncio.get_running_loop()
    of = await hall("a", limit=9)
    for _ in range(30):
        (place,) = await of.busy(1)
        await asyncio.sleep(2.0)
        timings = Timings(0.0, 100.0, 3, 1900.0, 2, 100.0)
        place.observe(replace(finished(), timings=timings))
    running = of.ask()
    await of.settle()
    with pytest.raises(DeadlineUnreachable) as caught:
        await of.ask(QueueTerms(deadline_s=loop.time() + 3.0, timeout_s=3.0))
    assert caught.value.retry_after_s in {1, 2}
    in_time = of.ask(QueueTerms(deadline_s=loop.time() + 4.9, timeout_s=4.9))
    await asyncio.sleep(1.0)
    assert not in_time.done()
    with pytest.raises(DeadlineUnreachable):  # the board is not free when it was thought to be
        await in_time
    assert of.counted.reasons == ["deadline_unreachable"] * 2
    running.cancel()


async def test_a_client_that_leaves_in_the_moment_that_it_gets_a_place_gives_it_on() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    leaves, stays = of.ask(), of.ask()
    await of.settle()
    place.observe(finished())  # it has the place, and does not know it yet
    leaves.cancel()
    await stays
    assert of.taken == [1, 3]


async def test_a_generation_that_is_paused_leaves_its_place_to_others() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    place.observe(Paused(None, 1, Kv.RECOMPUTED))
    second = await waiting
    place.observe(Delta("", (), paused=True))  # an edit while it is paused
    place.observe(Delta("on", (1,)))
    third = of.ask()
    second.observe(finished())
    await of.settle()
    assert not third.done(), "the first one goes on"
    place.observe(finished())
    await third


async def test_a_generation_that_keeps_the_board_in_its_pause_is_let_go_of_for_others() -> None:
    """The board lets go of it once somebody waits there."""
    of = await hall(report("a", queue_limit=4), limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    place.observe(Paused(None, 1, Kv.KEPT))
    await waiting


async def test_board_time_is_told_as_it_passes_also_in_pauses_that_keep_the_board() -> None:
    of = await hall("a", limit=9)
    told: list[tuple[str, float]] = []
    place = await of.ask(QueueTerms(flow="x", use=lambda *used: told.append(used)))

    def total() -> float:
        assert {name for name, _ in told} == {"r1/0"}
        return sum(seconds for _, seconds in told)

    await asyncio.sleep(20)
    await of.hear()
    assert total() == pytest.approx(20, abs=0.1)
    place.observe(Paused(None, 1, Kv.KEPT))
    await asyncio.sleep(100)
    await of.hear()
    assert total() == pytest.approx(120, abs=0.1)
    place.observe(Delta("x", (1,)))
    await asyncio.sleep(10)
    place.observe(Paused(None, 2, Kv.RECOMPUTED))
    await asyncio.sleep(200)  # the board is others' meanwhile
    await of.hear()
    assert total() == pytest.approx(130, abs=0.1)
    place.observe(Delta("y", (2,)))
    await asyncio.sleep(7)
    place.ended(left=False)
    await asyncio.sleep(50)
    await of.hear()
    assert total() == pytest.approx(137, abs=0.1)


async def test_time_in_the_queue_of_a_board_is_no_board_time() -> None:
    of = await hall("a", limit=9)
    told: list[float] = []
    place = await of.ask(QueueTerms(flow="x", use=lambda _, seconds: told.append(seconds)))
    place.observe(Accepted("a", "1.3.0", 1, waits=True))
    await asyncio.sleep(100)
    await of.hear()
    assert sum(told) == pytest.approx(0, abs=0.1)
    place.observe(QueueChange(waits=False))
    await asyncio.sleep(20)  # the prefill
    place.observe(Delta("x", (1,)))
    await asyncio.sleep(5)
    place.observe(Paused(None, 1, Kv.KEPT))
    await asyncio.sleep(3)
    place.observe(Delta("", ()))
    place.observe(QueueChange(waits=True))
    await asyncio.sleep(50)
    await of.hear()
    assert sum(told) == pytest.approx(28, abs=0.1)
    place.observe(Paused(None, 1, Kv.KEPT))  # in the queue, so it does not occupy the board
    await asyncio.sleep(50)
    place.observe(Delta("", ()))
    place.observe(QueueChange(waits=False))
    await asyncio.sleep(2)
    place.observe(finished())
    assert sum(told) == pytest.approx(30, abs=0.1)


async def test_of_one_key_half_of_the_boards_are_kept_in_pauses_at_most() -> None:
    of = await hall("a", "b", "c", "d", limit=9)
    first, second, third = [await of.ask(QueueTerms(flow="x"), native_pause=True) for _ in range(3)]
    assert [one.request.native_pause for one in (first, second, third)] == [True, True, False]
    other = await of.ask(QueueTerms(flow="y"), native_pause=True)
    assert other.request.native_pause
    for one in (first, third):
        one.ended(left=False)
    again = [await of.ask(QueueTerms(flow="x"), native_pause=True) for _ in range(2)]
    assert [one.request.native_pause for one in again] == [True, False]


async def test_without_keys_and_on_one_board_a_pause_may_keep_it() -> None:
    of = await hall("a", "b")
    pair = await of.busy(2, native_pause=True)
    assert all(one.request.native_pause for one in pair)
    alone = await hall("a")
    place = await alone.ask(QueueTerms(flow="x"), native_pause=True)
    assert place.request.native_pause
