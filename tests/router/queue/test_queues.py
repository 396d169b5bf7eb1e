"""The Router's queue in front of boards: who gets which place, and who is told of none."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import (
    BoardFailed,
    CacheNotFound,
    DeadlineUnreachable,
    EnginePaused,
    ModelNotFound,
    NoBoard,
    QueueFull,
    QueueTimeout,
    RkserveError,
)
from rkserve.core.messages import (
    AdapterRef,
    Delta,
    FailoverState,
    GenerateRequest,
    Kv,
    Paused,
    Timings,
)
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.load import ModelBoards
from rkserve.fleet.requests import RoutingRequest
from rkserve.router.policies import Decision, LeastLoadPolicy, RoutingPolicy, SendTo, WaitFor
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.model_queue import LOOKED_AT
from rkserve.router.queue.queues import ModelQueues, QueueRules, TriedBoards
from rkserve.router.queue.reservation import Reservation
from tests.support.boards.fake_boards import FakeBoards, finished, report

pytestmark = pytest.mark.virtual_time

MODEL = "sim-chat"


@dataclass
class Counted:
    """What the queue counts."""

    waits_s: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)

    def waited(self, model: str, waited_s: float) -> None:
        assert model == MODEL
        self.waits_s.append(waited_s)

    def refused(self, model: str, reason: str) -> None:
        assert model == MODEL
        self.reasons.append(reason)

    def held(self, model: str, by: str, held_s: float) -> None:
        assert model == MODEL
        assert held_s >= 0
        self.holds.append(by)


@dataclass
class Avoided:
    """Boards that are left alone."""

    keys: set[str] = field(default_factory=set)
    until_s: float | None = None

    def blocked(self, now_s: float) -> Collection[str]:
        return self.keys if self.until_s is None or now_s < self.until_s else ()

    def soonest_s(self, _now_s: float) -> float | None:
        return self.until_s

    def reason(self, key: str, _now_s: float) -> str:
        return f"{key} failed three times"


class Hall:
    """A queue in front of boards that only report; requests are numbered as they come."""

    def __init__(self, *boards: Any, policy: RoutingPolicy | None = None, **rules: Any) -> None:
        self.boards = FakeBoards([report(b) if isinstance(b, str) else b for b in boards])
        self.fleet = Fleet({"only": self.boards}, {"only": MODEL})
        self.counted, self.avoided = Counted(), Avoided()
        self.places = ModelQueues(
            self.fleet,
            policy or LeastLoadPolicy(random.Random(1)),
            QueueRules(**{"catch_up_s": 0.0, **rules}),
            self.avoided,
            self.counted,
        )
        self.taken: list[int] = []  # numbers in the order in which they got a place
        self.number = 0

    def ask(
        self,
        claim: QueueTerms | None = None,
        tried: dict[str, RkserveError] | None = None,
        **request: Any,
    ) -> asyncio.Task[Reservation]:
        """One more request wants a place."""
        self.number += 1
        number = self.number
        made = GenerateRequest(f"r{number}/0", MODEL, (1, 2, 3), 10)
        made = replace(made, **request)

        async def take() -> Reservation:
            place = await self.places.take(made, TriedBoards(tried or {}), claim or QueueTerms())
            self.taken.append(number)
            return place

        return asyncio.create_task(take())

    async def busy(self, count: int, **request: Any) -> list[Reservation]:
        """Requests that get a place each at once."""
        return [await self.ask(**request) for _ in range(count)]

    @property
    def depth(self) -> int:
        return sum(self.places.depths()[MODEL].values())

    async def settle(self) -> None:
        """Let everybody do what there is to do."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def hear(self, *reports: Any) -> None:
        """A round of reports."""
        if reports:
            self.boards.reported = list(reports)
        await self.fleet.refresh()


async def hall(*boards: Any, **rest: Any) -> Hall:
    made = Hall(*boards, **rest)
    await made.fleet.refresh()
    return made


def board_of(place: Reservation) -> str:
    return place.replica.removeprefix("replica of ")


# -- the next one ---------------------------------------------------------------------------------


async def test_the_first_board_that_is_free_takes_the_next_request() -> None:
    of = await hall("a", "b", limit=9)
    places = {board_of(place): place for place in await of.busy(2)}
    assert set(places) == {"a", "b"}
    waiting = [of.ask() for _ in range(3)]
    await of.settle()
    assert of.depth == 3
    places["b"].ended(left=False)
    assert board_of(await waiting[0]) == "b"
    places["a"].heard(finished())
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
    place.heard(finished())
    second = await waiting
    # Time goes on by itself only where everybody waits for a timer.
    assert asyncio.get_running_loop().time() - before_s < 0.001
    assert second.waited_ms == pytest.approx(5000.0, abs=1.0)
    assert of.counted.waits_s == [pytest.approx(0.0, abs=0.001), pytest.approx(5.0, abs=0.001)]


async def test_the_end_of_an_answer_frees_its_place_once() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    place.heard(finished())
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
    places[1].heard(finished())
    places[2].heard(finished())
    await asyncio.gather(*waiting)


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
        boards = self.of.fleet.listing.boards[MODEL]
        return sum(max(0, board.n_batch - board.load) for board in boards if board.ready)

    def one(self, some: list[Any]) -> Any:
        return some.pop(self.rng.randrange(len(some)))

    async def come(self) -> None:
        claim = QueueTerms(self.rng.choice("xyz"), priority=self.rng.randint(-1, 1))
        self.waiting.append(self.of.ask(claim))

    async def finish(self) -> None:
        if self.there:
            self.one(self.there).heard(finished())

    async def leave(self) -> None:
        if self.there:
            self.one(self.there).ended(left=True)

    async def give_up(self) -> None:
        if self.waiting:
            self.one(self.waiting).cancel()

    async def pause(self) -> None:
        if self.there:
            self.resting.append(self.one(self.there))
            self.resting[-1].heard(Paused(None, 1, Kv.RECOMPUTED))

    async def resume(self) -> None:
        if self.resting:
            self.there.append(self.one(self.resting))
            self.there[-1].heard(Delta("go", (5,)))

    async def lose(self) -> None:
        if self.there:
            place = self.one(self.there)
            place.lost(BoardFailed("a", "gone"))
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
                assert not any(board.ready for board in self.of.fleet.listing.boards[MODEL])
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
    assert all(board.in_flight == 0 for board in of.fleet.listing.boards[MODEL])


# -- who goes first -------------------------------------------------------------------------------


async def test_the_urgent_go_first_owners_in_turn_and_what_is_continued_before_all() -> None:
    of = await hall("a", limit=99)
    (place,) = await of.busy(1)
    waiting = [of.ask(QueueTerms(*claim)) for claim in (("x",), ("x",), ("y",), ("x", 1.0, -1))]
    waiting.append(of.ask(continued=FailoverState()))
    waiting.append(of.ask(tried={"replica of z": BoardFailed("z", "gone")}))
    await of.settle()
    while waiting:
        place.heard(finished())
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
    place.heard(finished())
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
    place.heard(finished())
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


# -- time -----------------------------------------------------------------------------------------


async def test_a_wait_ends_by_itself() -> None:
    of = await hall("a", timeout_s=30.0, limit=9)
    await of.busy(1)
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(QueueTimeout):
        await of.ask()
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(30.0, abs=0.1)
    assert of.depth == 0


async def test_what_was_learned_of_answers_refuses_what_would_be_late() -> None:
    loop = asyncio.get_running_loop()
    of = await hall("a", limit=9)
    for _ in range(30):
        (place,) = await of.busy(1)
        await asyncio.sleep(2.0)
        timings = Timings(0.0, 100.0, 3, 1900.0, 2, 100.0)
        place.heard(replace(finished(), timings=timings))
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


# -- who leaves -----------------------------------------------------------------------------------


async def test_a_client_that_leaves_the_queue_leaves_no_trace() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    leaves, stays = of.ask(), of.ask()
    await of.settle()
    leaves.cancel()
    await of.settle()
    assert of.depth == 1
    place.heard(finished())
    await stays
    assert of.taken == [1, 3]


async def test_a_client_that_leaves_in_the_moment_that_it_gets_a_place_gives_it_on() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    leaves, stays = of.ask(), of.ask()
    await of.settle()
    place.heard(finished())  # it has the place, and does not know it yet
    leaves.cancel()
    await stays
    assert of.taken == [1, 3]


# -- boards ---------------------------------------------------------------------------------------


async def test_a_request_that_was_refused_by_the_free_board_waits_for_the_other_one() -> None:
    of = await hall("a", "b", limit=9)
    places = {board_of(place): place for place in await of.busy(2)}
    refused = of.ask(tried={"replica of a": CacheNotFound("doc")})
    await of.settle()
    places["a"].heard(finished())
    other = await of.ask()
    assert board_of(other) == "a"
    places["b"].heard(finished())
    assert board_of(await refused) == "b"


async def test_many_that_wait_for_one_board_leave_no_other_idle() -> None:
    of = await hall("a", "b", limit=99)
    places = {board_of(place): place for place in await of.busy(2)}
    picky = [of.ask(tried={"replica of a": CacheNotFound("doc")}) for _ in range(40)]
    late = of.ask()
    await of.settle()
    places["a"].heard(finished())
    assert board_of(await late) == "a"
    for task in picky:
        task.cancel()


async def test_an_unknown_model_has_no_queue() -> None:
    of = await hall("a")
    with pytest.raises(ModelNotFound):
        await of.ask(model="another")


async def test_requests_that_wait_are_told_when_the_last_board_is_gone() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    waiting = [of.ask() for _ in range(2)]
    await of.settle()
    place.lost(BoardFailed("a", "its replica died"))
    place.ended(left=False)
    for task in waiting:
        with pytest.raises(NoBoard):
            await task


async def test_requests_that_wait_are_patient_with_boards_that_come_back() -> None:
    of = await hall("a", limit=9, catch_up_s=5.0)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    place.lost(BoardFailed("a", "its engine died"))
    place.ended(left=False)
    of.boards.reported = []
    newcomer = of.ask()
    await asyncio.sleep(1.0)
    assert not waiting.done()
    assert isinstance(newcomer.exception(), NoBoard), "of it nobody had promised anything"
    of.boards.reported = [report("a", state=BoardState.RECOVERING)]
    await waiting


async def test_a_board_that_failed_a_moment_ago_is_waited_for_until_it_has_said_what_it_is() -> (
    None
):
    of = await hall("a", limit=9, catch_up_s=5.0)
    (place,) = await of.busy(1)
    place.lost(BoardFailed("a", "its engine died"))
    place.ended(left=False)
    newcomer = of.ask()
    of.boards.reported = [report("a", state=BoardState.RECOVERING)]
    await newcomer


async def test_a_board_that_joins_takes_what_waits() -> None:
    of = await hall("a", limit=9)
    await of.busy(1)
    waiting = of.ask()
    await of.settle()
    await of.hear(report("a", running=1), report("b"))
    assert board_of(await waiting) == "b"


async def test_boards_that_are_left_alone_get_nothing_and_are_waited_for() -> None:
    """For a while only, so that nobody is turned away because of it."""
    of = await hall("a", "b", limit=9)
    of.avoided.keys = {"replica of a"}
    assert board_of(await of.ask()) == "b"
    waiting = of.ask()
    await of.settle()
    assert not waiting.done()
    of.avoided.keys = {"replica of a", "replica of b"}
    fresh = of.ask()
    await of.hear(report("a"), report("b", running=1))
    await of.settle()
    assert not fresh.done()
    of.avoided.keys = {"replica of b"}
    await of.hear(report("a"), report("b", running=1))
    (place, other) = (await waiting, fresh)
    assert board_of(place) == "a"
    place.ended(left=False)
    assert board_of(await other) == "a"


async def test_who_waits_for_boards_that_are_left_alone_waits_no_longer_than_that() -> None:
    """Also where no report comes that would wake it."""
    loop = asyncio.get_running_loop()
    of = await hall("a", limit=9)
    of.avoided.keys, of.avoided.until_s = {"replica of a"}, loop.time() + 2.0
    assert board_of(await of.ask()) == "a"
    assert loop.time() == pytest.approx(of.avoided.until_s, abs=0.01)


async def test_where_no_board_is_there_but_one_that_is_left_alone_is_down_the_reason_is_told() -> (
    None
):
    of = await hall("a", report("b", state=BoardState.FAILED), limit=9)
    of.avoided.keys = {"replica of a"}
    of.boards.reported = [report("b", state=BoardState.FAILED)]
    tried = TriedBoards({"replica of a": BoardFailed("a", "cut")})
    with pytest.raises(NoBoard, match="replica of a failed three times"):
        await of.ask(tried=tried)


# -- what other Routers do ------------------------------------------------------------------------


async def test_one_request_waits_at_a_board_that_others_keep_busy_and_no_more() -> None:
    """That may be over for long, and only the board knows."""
    of = await hall(report("a", running=1, queue_limit=4), limit=9)
    first, second = of.ask(), of.ask()
    await of.settle()
    assert (first.done(), second.done()) == (True, False)
    first.result().heard(finished())
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


# -- pauses ---------------------------------------------------------------------------------------


def paused(mode: PauseMode, *boards: str, adapter: str | None = None) -> Desired:
    return Desired(2, pauses=(ActivePause("op", Scope((), boards, adapter), mode),))


async def test_a_generation_that_is_paused_leaves_its_place_to_others() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    place.heard(Paused(None, 1, Kv.RECOMPUTED))
    second = await waiting
    place.heard(Delta("", (), paused=True))  # an edit while it is paused
    place.heard(Delta("on", (1,)))
    third = of.ask()
    second.heard(finished())
    await of.settle()
    assert not third.done(), "the first one goes on"
    place.heard(finished())
    await third


async def test_a_generation_that_keeps_the_board_in_its_pause_is_let_go_of_for_others() -> None:
    """The board lets go of it once somebody waits there."""
    of = await hall(report("a", queue_limit=4), limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    place.heard(Paused(None, 1, Kv.KEPT))
    await waiting


async def test_under_a_pause_that_keeps_requests_they_wait_and_go_on_when_it_is_over() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(paused(PauseMode.KEEP))
    places = await of.busy(2)  # they wait at the boards
    waiting = of.ask()
    await of.settle()
    assert not waiting.done()
    of.fleet.obey(Desired(3))
    places[0].heard(finished())
    await waiting


async def test_what_is_paused_is_left_for_what_is_not() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(paused(PauseMode.KEEP, "a"))
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    assert (board_of(place), waiting.done()) == ("b", False)
    of.fleet.obey(Desired(3))
    assert board_of(await waiting) == "a"


@pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.ABORT])
@pytest.mark.parametrize("adapter", [None, "kind"])
async def test_under_a_pause_that_refuses_a_board_says_so_at_once_busy_or_not(
    mode: PauseMode, adapter: str | None
) -> None:
    of = await hall("a", "b", limit=9)
    await of.busy(2)
    ref = AdapterRef("kind", "v1", "f" * 64)
    waiting = of.ask(adapter=ref)
    await of.settle()
    of.fleet.obey(paused(mode, adapter=adapter))
    asked = [await waiting, await of.ask(adapter=ref)]
    assert all(board_of(place) in "ab" for place in asked)
    told = {f"replica of {name}": EnginePaused(f"board {name}", 7) for name in "ab"}
    with pytest.raises(EnginePaused):
        await of.ask(adapter=ref, tried=dict(told))


async def test_requests_for_an_adapter_that_is_paused_keep_no_board_from_others() -> None:
    of = await hall("a", limit=9)
    of.fleet.obey(paused(PauseMode.KEEP, adapter="kind"))
    ref = AdapterRef("kind", "v1", "f" * 64)
    asides = [of.ask(adapter=ref), of.ask(line="kind")]
    await of.settle()
    assert of.depth == 2
    (place,) = await of.busy(1)
    place.heard(finished())
    of.fleet.obey(Desired(3))
    assert of.counted.holds == []
    first = await asides[0]
    first.heard(finished())
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


async def test_a_loading_board_takes_what_it_can_start_and_no_more() -> None:
    of = await hall(report("a", state=BoardState.RECOVERING), limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    assert (place.request.patient, waiting.done()) == (True, False)
    waiting.cancel()


# -- the policy -----------------------------------------------------------------------------------


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
    other.result().heard(finished())
    await of.settle()
    assert not picky.done()
    began_s = asyncio.get_running_loop().time()
    if soon:
        place.heard(finished())
    assert board_of(await picky) == ("a" if soon else "b")
    took_s = asyncio.get_running_loop().time() - began_s
    assert took_s == pytest.approx(0.0 if soon else 3.0, abs=0.1)
    assert all(board.booked_ms == 0 for board in of.fleet.listing.boards[MODEL])


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
        other.result().heard(finished())
    assert policy.asked - asked < 3 * many, "each time that something happened"
    assert not any(task.done() for task in picky)
    place.heard(finished())
    assert board_of(await picky[0]) == "a"
    for task in picky[1:]:
        task.cancel()


# -- board time -----------------------------------------------------------------------------------


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
    place.heard(Paused(None, 1, Kv.KEPT))
    await asyncio.sleep(100)
    await of.hear()
    assert total() == pytest.approx(120, abs=0.1)
    place.heard(Delta("x", (1,)))
    await asyncio.sleep(10)
    place.heard(Paused(None, 2, Kv.RECOMPUTED))
    await asyncio.sleep(200)  # the board is others' meanwhile
    await of.hear()
    assert total() == pytest.approx(130, abs=0.1)
    place.heard(Delta("y", (2,)))
    await asyncio.sleep(7)
    place.ended(left=False)
    await asyncio.sleep(50)
    await of.hear()
    assert total() == pytest.approx(137, abs=0.1)


@pytest.mark.parametrize("paused", [False, True], ids=["stepped", "paused"])
async def test_fair_shares_hold_against_a_request_that_does_not_end(paused: bool) -> None:
    of = await hall("a", "b", limit=9)
    endless = await of.ask(QueueTerms(flow="greedy"))
    if paused:
        endless.heard(Paused("x", 1, Kv.KEPT))
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
