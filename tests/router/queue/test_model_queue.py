"""The queue of one model: the order of requests, the policy's waits, and pauses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rkserve.core.desired_state import Desired, PauseMode
from rkserve.core.errors import (
    BoardFailed,
    CacheNotFound,
    DeadlineUnreachable,
    NoBoard,
    QueueFull,
    QueueTimeout,
)
from rkserve.core.messages import (
    Accepted,
    AdapterRef,
    Delta,
    Event,
    FailoverState,
    Kv,
    Paused,
    QueueChange,
)
from rkserve.fleet.load import ModelBoards
from rkserve.fleet.prefix_index import Reuse
from rkserve.router.policies import Decision, LeastLoadPolicy, RoutingRequest, SendTo, WaitFor
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.model_queue import LOOKED_AT, MOST_RECALLS
from rkserve.router.queue.reservation import Recalled, Reservation
from tests.support.boards.fake_boards import finished, report
from tests.support.boards.queue_hall import MODEL, Hall, board_of, hall, paused

pytestmark = pytest.mark.virtual_time


async def test_the_first_board_that_is_free_takes_the_next_request() -> None:
    of = await hall("a", "b", limit=9)
    places = {board_of(place): place for place in await of.busy(2)}
    assert set(places) == {"a", "b"}
    waiting = [of.ask() for _ in range(3)]
    await of.settle()
    assert of.depth == 3
    places["b"].ended(left=False)
    assert board_of(await waiting[0]) == "b"
    places["a"].observe(finished())
    assert board_of(await waiting[1]) == "a"
    assert not waiting[2].done()
    assert of.taken == [1, 2, 3, 4]
    waiting[2].cancel()


async def test_between_two_requests_a_board_is_free_for_no_time() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await asyncio.sleep(5.0)
    before_s = asyncio.get_running_loop().time()
    place.observe(finished())
    second = await waiting
    # Time goes on by itself only where everybody waits for a timer.
    assert asyncio.get_running_loop().time() - before_s < 0.001
    assert second.waited_ms == pytest.approx(5000.0, abs=1.0)
    figures, labels = of.counted.registry, {"model": MODEL}
    assert figures.get_sample_value("rkserve_queue_wait_seconds_count", labels) == 2
    waited_s = figures.get_sample_value("rkserve_queue_wait_seconds_sum", labels)
    assert waited_s == pytest.approx(5.0, abs=0.001)


class Bustle:
    """What may happen to requests and boards, in any order."""

    NAMES = "abcd"

    def __init__(self, of: Hall, rng: random.Random, n_batch: int) -> None:
        self.of, self.rng, self.n_batch = of, rng, n_batch
        self.there: list[Reservation] = []
        self.resting: list[Reservation] = []
        self.waiting: list[asyncio.Task[Reservation]] = []

    @property
    def free(self) -> int:
        """Places that nobody has."""
        boards = self.of.fleet.boards[MODEL]
        return sum(max(0, board.n_batch - board.load) for board in boards if board.ready)

    def one(self, some: list[Any]) -> Any:
        return some.pop(self.rng.randrange(len(some)))

    async def come(self) -> None:
        claim = QueueTerms(self.rng.choice("xyz"), priority=self.rng.randint(-1, 1))
        self.waiting.append(self.of.ask(claim))

    async def finish(self) -> None:
        if self.there:
            self.one(self.there).observe(finished())

    async def leave(self) -> None:
        if self.there:
            self.one(self.there).ended(left=True)

    async def give_up(self) -> None:
        if self.waiting:
            self.one(self.waiting).cancel()

    async def pause(self) -> None:
        if self.there:
            self.resting.append(self.one(self.there))
            self.resting[-1].observe(Paused(None, 1, Kv.RECOMPUTED))

    async def resume(self) -> None:
        if self.resting:
            self.there.append(self.one(self.resting))
            self.there[-1].observe(Delta("go", (5,)))

    async def lose(self) -> None:
        if self.there:
            place = self.one(self.there)
            place.lost()
            place.ended(left=False)

    async def report(self) -> None:
        """What is there, as boards count: those that do not rest."""
        load = Counter(board_of(place) for place in self.there)
        await self.of.hear(
            *(report(name, n_batch=self.n_batch, running=load[name]) for name in self.NAMES)
        )

    async def step(self) -> None:
        does = [self.come, self.finish, self.leave, self.give_up]
        does += [self.pause, self.resume, self.lose, self.report]
        (work,) = self.rng.choices(does, [45, 28, 5, 5, 5, 3, 2, 7])
        await work()
        await self.of.settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if isinstance(task.exception(), NoBoard):
                assert not any(board.ready for board in self.of.fleet.boards[MODEL])
            else:
                self.there.append(task.result())

    async def end(self) -> None:
        for task in self.waiting:
            task.cancel()
        for place in [*self.there, *self.resting]:
            place.ended(left=False)
        await self.of.settle()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_batch", [1, 3])
async def test_no_board_is_idle_while_requests_wait(seed: int, n_batch: int) -> None:
    """Whatever happens: pauses, clients that leave, boards that are lost and come back."""
    of = await hall(*(report(name, n_batch=n_batch) for name in Bustle.NAMES), limit=1000)
    bustle = Bustle(of, random.Random(seed), n_batch)
    waited = 0
    for _ in range(400):
        await bustle.step()
        assert of.depth == len(bustle.waiting)
        assert not bustle.waiting or not bustle.free
        waited += bool(bustle.waiting)
    assert waited > 40, "it has seen requests wait"
    await bustle.end()
    assert of.depth == 0
    assert all(board.in_flight == 0 for board in of.fleet.boards[MODEL])


async def test_the_urgent_go_first_owners_in_turn_and_what_is_continued_before_all() -> None:
    of = await hall("a", limit=99)
    (place,) = await of.busy(1)
    waiting = [of.ask(QueueTerms(*claim)) for claim in (("x",), ("x",), ("y",), ("x", 1.0, -1))]
    waiting.append(of.ask(continued=FailoverState()))
    waiting.append(of.ask(tried={"replica of z": BoardFailed("z", "gone")}))
    await of.settle()
    while waiting:
        place.observe(finished())
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        waiting.remove(task)
        place = task.result()
    # x has had service with its urgent one: y comes before it.
    assert of.taken == [1, 6, 7, 5, 4, 2, 3]


async def test_what_is_continued_waits_where_the_queue_is_full() -> None:
    of = await hall("a", limit=0)
    (place,) = await of.busy(1)
    with pytest.raises(QueueFull):
        await of.ask()
    goes_on = of.ask(QueueTerms(deadline_s=0.0), continued=FailoverState())
    await of.settle()
    place.observe(finished())
    await goes_on
    assert of.counted.reasons == ["queue_full"]


async def test_where_the_queue_is_full_the_least_urgent_is_told_to_come_back() -> None:
    of = await hall("a", limit=1)
    (place,) = await of.busy(1)
    later = of.ask(QueueTerms(priority=3))
    await of.settle()
    urgent = of.ask()
    with pytest.raises(QueueFull) as caught:
        await later
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    assert of.counted.reasons == ["shed"]
    place.observe(finished())
    await urgent


async def test_without_a_limit_as_many_wait_as_the_boards_own_queues_hold() -> None:
    of = await hall(report("a", queue_limit=2), report("b", queue_limit=3), routers=2)
    await of.busy(2)
    waiting = [of.ask() for _ in range(3)]  # its half of five
    await of.settle()
    with pytest.raises(QueueFull) as caught:
        await of.ask()
    assert caught.value.queued == 3
    for task in waiting:
        task.cancel()
    await of.settle()
    assert of.depth == 0


async def test_a_wait_ends_by_itself() -> None:
    of = await hall("a", timeout_s=30.0, limit=9)
    await of.busy(1)
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(QueueTimeout):
        await of.ask()
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.0, abs=0.1)
    assert of.depth == 0


async def test_a_client_that_leaves_the_queue_leaves_no_trace() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    leaves, stays = of.ask(), of.ask()
    await of.settle()
    leaves.cancel()
    await of.settle()
    assert of.depth == 1
    place.observe(finished())
    await stays
    assert of.taken == [1, 3]


async def test_many_that_wait_for_one_board_leave_no_other_idle() -> None:
    of = await hall("a", "b", limit=99)
    places = {board_of(place): place for place in await of.busy(2)}
    picky = [of.ask(tried={"replica of a": CacheNotFound("doc")}) for _ in range(40)]
    late = of.ask()
    await of.settle()
    places["a"].observe(finished())
    assert board_of(await late) == "a"
    for task in picky:
        task.cancel()


async def test_one_request_waits_at_a_board_that_others_keep_busy_and_no_more() -> None:
    """That may be over for long, and only the board knows."""
    of = await hall(report("a", running=1, queue_limit=4), limit=9)
    first, second = of.ask(), of.ask()
    await of.settle()
    assert (first.done(), second.done()) == (True, False)
    first.result().observe(finished())
    await second


async def test_a_board_without_others_goes_before_one_that_they_keep_busy() -> None:
    of = await hall(report("a", running=1, queue_limit=4), "b", limit=9)
    assert board_of(await of.ask()) == "b"
    assert board_of(await of.ask()) == "a"


async def test_a_board_whose_own_queue_is_full_of_others_is_not_asked() -> None:
    of = await hall(report("a", running=1, queued=4, queue_limit=4), limit=9)
    waiting = of.ask()
    await of.settle()
    assert not waiting.done()
    await of.hear(report("a", queue_limit=4))
    await waiting


async def test_requests_for_an_adapter_that_is_paused_keep_no_board_from_others() -> None:
    of = await hall("a", limit=9)
    of.fleet.obey(paused(PauseMode.KEEP, adapter="kind"))
    ref = AdapterRef("kind", "v1", "f" * 64)
    asides = [of.ask(adapter=ref), of.ask(line="kind")]
    await of.settle()
    assert of.depth == 2
    (place,) = await of.busy(1)
    place.observe(finished())
    of.fleet.obey(Desired(3))
    assert of.counted.holds == []
    first = await asides[0]
    first.observe(finished())
    await asides[1]
    assert of.counted.holds == ["pause", "pause"]


async def test_the_wait_for_the_end_of_a_pause_has_bounds_too() -> None:
    of = await hall("a", limit=1, timeout_s=30.0)
    of.fleet.obey(paused(PauseMode.KEEP, adapter="kind"))
    now_s = asyncio.get_running_loop().time()
    waiting = of.ask(line="kind")
    await of.settle()
    with pytest.raises(QueueFull):
        await of.ask(line="kind")
    with pytest.raises(QueueTimeout):
        await waiting
    with pytest.raises(DeadlineUnreachable):
        await of.ask(QueueTerms(deadline_s=now_s + 40.0, timeout_s=5.0), line="kind")
    assert of.depth == 0


class Waits(LeastLoadPolicy):
    """So many requests, from the second one on, wait for board a, for three seconds at most."""

    def __init__(self, rng: random.Random, many: int = 1) -> None:
        super().__init__(rng)
        self.asked = 0
        self._picky = {f"r{number}/0" for number in range(2, 2 + many)}

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        self.asked += 1
        if ask.request_id in self._picky and ask.waited_ms(now_s) < 3000.0:
            wanted = boards.get("replica of a")
            assert wanted is not None
            if wanted.has_place:
                return SendTo(wanted)
            return WaitFor(wanted, 3000.0 - ask.waited_ms(now_s), 500.0)
        return super().choose(ask, boards, now_s)


@pytest.mark.parametrize("soon", [True, False])
async def test_one_that_waits_for_its_board_lets_others_pass_and_does_not_wait_for_ever(
    soon: bool,
) -> None:
    of = await hall("a", limit=9, policy=Waits(random.Random(1)))
    (place,) = await of.busy(1)
    await of.hear(report("a", running=1), report("b"))
    picky, other = of.ask(), of.ask()
    assert board_of(await other) == "b"
    other.result().observe(finished())
    await of.settle()
    assert not picky.done()
    began_s = asyncio.get_running_loop().time()
    if soon:
        place.observe(finished())
    assert board_of(await picky) == ("a" if soon else "b")
    took_s = asyncio.get_running_loop().time() - began_s
    assert took_s == pytest.approx(0.0 if soon else 3.0, abs=0.1)
    assert all(board.booked_ms == 0 for board in of.fleet.boards[MODEL])


async def test_many_that_wait_for_their_board_keep_nobody_behind_them() -> None:
    many = 3 * LOOKED_AT
    policy = Waits(random.Random(1), many)
    of = await hall("a", limit=99, policy=policy)
    (place,) = await of.busy(1)
    picky = [of.ask() for _ in range(many)]
    await of.settle()
    await of.hear(report("a", running=1), report("b"))
    asked = policy.asked
    for _ in range(20):
        other = of.ask()
        assert board_of(await other) == "b"
        other.result().observe(finished())
    assert policy.asked - asked < 3 * many, "each time that something happened"
    assert not any(task.done() for task in picky)
    place.observe(finished())
    assert board_of(await picky[0]) == "a"
    for task in picky[1:]:
        task.cancel()


@pytest.mark.parametrize("paused", [False, True], ids=["stepped", "paused"])
async def test_fair_shares_hold_against_a_request_that_does_not_end(paused: bool) -> None:
    of = await hall("a", "b", limit=9)
    endless = await of.ask(QueueTerms(flow="greedy"))
    if paused:
        endless.observe(Paused("x", 1, Kv.KEPT))
    other = await of.ask(QueueTerms(flow="modest"))
    await asyncio.sleep(100)
    other.ended(left=False)
    (held,) = await of.busy(1)
    if paused:  # the first board is thought to have a place, too
        await of.busy(1)
    of.taken.clear()
    await asyncio.sleep(300)
    await of.hear(report("a"), report("b"))
    # Without the time that passes the greedy one has had the least: one estimate.
    waits = [of.ask(QueueTerms(flow=flow)) for flow in ("greedy", "modest")]
    await of.settle()
    assert of.taken == []
    held.ended(left=False)
    await of.settle()
    assert of.taken == [of.number], "the modest one"
    for one in waits:
        one.cancel()


class Expects(LeastLoadPolicy):
    """Each request goes to a free board, of which so much is expected."""

    def __init__(self, *expected: Reuse) -> None:
        super().__init__(random.Random(1))
        self._expected = list(expected)

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        found = super().choose(ask, boards, now_s)
        assert isinstance(found, SendTo)
        return replace(found, reuse=self._expected.pop(0))


async def test_decisions_are_counted_by_what_was_expected_of_their_board() -> None:
    expected = (Reuse(0, live=False), Reuse(8, live=False), Reuse(8, live=True))
    of = await hall("a", policy=Expects(*expected))
    for _ in expected:
        (place,) = await of.busy(1)
        place.observe(finished(cached=64))

    def counted(name: str, **labels: str) -> float | None:
        return of.counted.registry.get_sample_value(name, {"model": MODEL, **labels})

    found = {
        reuse: counted("rkserve_routing_decisions_total", reuse=reuse)
        for reuse in ("none", "file", "live", "wait")
    }
    assert found == {"none": 1, "file": 1, "live": 1, "wait": None}
    taken = of.counted.registry.get_sample_value("rkserve_routing_decision_seconds_count")
    assert taken == len(expected)
    assert counted("rkserve_prefix_tokens_total", what="expected") == 0
    assert counted("rkserve_prefix_tokens_total", what="found") == 3 * 64


def behind(place: Reservation, ahead: int = 1) -> Accepted:
    """The acceptance of a board that has requests of another Router."""
    return Accepted(board_of(place), "1.3.0", ahead, waits=True)


def recalled(place: Reservation) -> bool:
    """Return whether the request leaves the board's queue; it does so then."""
    try:
        place.leave_if_recalled()
    except Recalled:
        return True
    return False


async def test_a_request_that_meets_another_routers_at_its_board_goes_to_one_that_is_free() -> None:
    of = await hall("a", "b", limit=9)
    (first,) = await of.busy(1)
    first.observe(behind(first))
    assert recalled(first)
    first.ended(left=True)
    waiting = of.ask(recalled=1)
    assert board_of(await waiting) == ({"a", "b"} - {board_of(first)}).pop()
    labels = {"model": MODEL, "reuse": "recalled"}
    figure = of.counted.registry.get_sample_value("rkserve_routing_decisions_total", labels)
    assert figure == 1


async def test_it_waits_there_while_no_board_is_free_and_goes_to_the_first_that_is() -> None:
    of = await hall("a", "b", "c", limit=9)
    places = await of.busy(3)
    for place in places[:2]:
        place.observe(behind(place))
    assert not any(map(recalled, places))
    places[2].observe(finished())
    assert [recalled(place) for place in places] == [True, False, False]
    places[0].ended(left=True)
    assert board_of(await of.ask(recalled=1)) == board_of(places[2])
    assert not recalled(places[1])
    # What another Router had at the first board has ended, as the next report tells.
    free = board_of(places[0])
    await of.hear(report(free), *(report(n, running=1) for n in "abc" if n != free))
    assert recalled(places[1])


@pytest.mark.parametrize(
    "had",
    [
        pytest.param([QueueChange(waits=False), QueueChange(waits=True)], id="the board"),
        pytest.param([Paused(None, 0, Kv.RECOMPUTED)], id="a pause"),
        pytest.param([Delta("", (), paused=True)], id="an edit"),
    ],
)
async def test_a_request_with_a_state_of_its_own_at_the_board_stays_there(had: list[Event]) -> None:
    of = await hall("a", "b", limit=9)
    places = await of.busy(2)
    places[0].observe(behind(places[0]))
    for event in had:
        places[0].observe(event)
    places[1].observe(finished())
    assert not recalled(places[0])


async def test_a_request_is_recalled_so_often_and_no_more() -> None:
    of = await hall("a", "b", limit=9)
    place = await of.ask(recalled=MOST_RECALLS)
    place.observe(behind(place))
    assert not recalled(place)


async def test_a_board_that_refuses_or_pauses_is_no_better_place() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(paused(PauseMode.KEEP, "b"))
    (place,) = await of.busy(1)
    assert board_of(place) == "a"
    place.observe(behind(place))
    assert not recalled(place)
    of.fleet.obey(Desired(3))
    assert recalled(place)


async def test_a_board_that_a_paused_request_of_ours_may_keep_is_no_better_place() -> None:
    of = await hall("a", "b", limit=9)
    places = await of.busy(2)
    places[0].observe(behind(places[0]))
    places[1].observe(Paused(None, 1, Kv.KEPT))
    busy, kept = (board_of(place) for place in places)
    await of.hear(report(busy, running=1), report(kept))  # as it was before the pause
    assert not recalled(places[0])
    places[1].observe(Delta("x", (1,)))
    places[1].observe(finished())
    assert recalled(places[0])


async def test_a_board_whose_queue_was_left_is_not_taken_for_free_by_the_next_report() -> None:
    of = await hall("a", "b", limit=9)
    (first,) = await of.busy(1)
    first.observe(behind(first))
    assert recalled(first)
    first.ended(left=True)
    second = await of.ask(recalled=1)
    second.observe(behind(second))
    left, queued = board_of(first), board_of(second)
    assert left != queued
    # Both boards run requests of another Router.
    for _ in range(3):
        await of.hear(report(left, running=1), report(queued, running=1, queued=1))
        assert not recalled(second)


async def test_an_answer_that_goes_on_is_put_before_other_routers_requests_at_once() -> None:
    of = await hall("a", "b", limit=9)
    await of.hear(report("a", running=1), report("b", running=1))
    for place in await of.busy(2):
        place.observe(behind(place))
    plain, goes_on = of.ask(), of.ask(continued=FailoverState())
    first = await goes_on
    await of.settle()
    assert not plain.done()  # one waits at each board already
    # Each board has one that goes first, and no more.
    assert board_of(await of.ask(continued=FailoverState())) != board_of(first)
    third = of.ask(continued=FailoverState())
    await of.settle()
    assert not third.done()
    plain.cancel()
    third.cancel()


async def test_an_answer_goes_on_at_the_board_that_is_free_first_if_others_wait_there() -> None:
    of = await hall("a", "b", "c", limit=9)
    places = {board_of(place): place for place in await of.busy(3)}
    for place in places.values():
        place.observe(Accepted(board_of(place), "1.3.0", 0))
    places["b"].observe(Delta("word " * 60, (5,) * 60))
    places["c"].observe(Delta("word " * 90, (5,) * 90))
    # Without requests of others, the first board that is free is the best one.
    goes_on = of.ask(continued=FailoverState())
    await of.settle()
    assert not goes_on.done()
    await of.hear(
        report("a", running=1, queued=1), report("b", running=1, queued=1), report("c", running=1)
    )
    assert board_of(await goes_on) == "b"


async def test_a_paused_answer_of_ours_makes_no_board_the_one_that_is_free_first() -> None:
    of = await hall("a", "b", limit=9)
    places = {board_of(place): place for place in await of.busy(2, max_tokens=1000)}
    for name, place in places.items():
        place.observe(Accepted(name, "1.3.0", 0))
    places["a"].observe(Paused(None, 1, Kv.RECOMPUTED))
    places["b"].observe(Delta("word " * 200, (5,) * 200))
    await of.hear(report("a", running=1), report("b", running=1, queued=1))
    assert board_of(await of.ask(continued=FailoverState())) == "b"
