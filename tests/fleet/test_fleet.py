"""The boards as one Router sees them: choice, refusal, passing over, and what is listed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import pytest
from prometheus_client import CollectorRegistry

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import (
    AdapterBroken,
    BoardBehind,
    BoardFailed,
    BoardOutOfOrder,
    BoardStartFailed,
    CacheNotFound,
    ContextOverflow,
    EnginePaused,
    ModelNotFound,
    NoBoard,
    QueueFull,
    RkserveError,
)
from rkserve.core.messages import Accepted, Delta, Event, GenerateRequest, Kv, Paused
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.board_table import FORGET_AFTER
from rkserve.fleet.fleet import FAILURES_EVERY, LOOK_AGAIN_S, SETTLES_S, Fleet
from rkserve.fleet.measurements import CircuitBreaker
from rkserve.router.dispatch.dispatch import Dispatch, FailoverLimits
from rkserve.router.policies import POLICIES
from rkserve.router.queue.queues import ModelQueues, QueueRules
from tests.support.boards.fake_boards import FakeBoards, Step, accepted, answer, eventually, report

pytestmark = pytest.mark.virtual_time

MODEL = "sim-chat"
REQUEST = GenerateRequest("r", MODEL, (1, 2, 3), 10)


def fleet(**groups: FakeBoards) -> Fleet:
    """A fleet of groups that all serve one model."""
    return Fleet(groups, dict.fromkeys(groups, MODEL))


_MADE: WeakKeyDictionary[Fleet, Dispatch] = WeakKeyDictionary()


def dispatch(of: Fleet) -> Dispatch:
    """What sends requests to its boards, in no hurry."""
    if of not in _MADE:
        rng, breaker = random.Random(3), CircuitBreaker()
        metrics = RouterMetrics(CollectorRegistry())
        policy = POLICIES["least_load"](rng)
        places = ModelQueues(of, policy, QueueRules(catch_up_s=1.5), breaker, metrics)
        rules = FailoverLimits(accept_timeout_s=0.2, restart_wait_s=0.0)
        _MADE[of] = Dispatch(of, places, rng, rules, breaker=breaker, metrics=metrics)
    return _MADE[of]


async def talk(of: Fleet, request: GenerateRequest = REQUEST) -> list[Event]:
    """Return all events of one generation."""
    async with aclosing(dispatch(of).generate(request)) as events:
        return [event async for event in events]


def text_of(events: list[Event]) -> str:
    """Return the text of an answer."""
    return "".join(event.text for event in events if isinstance(event, Delta))


def boards_with(*scripts: Sequence[Step]) -> FakeBoards:
    """Boards a, b, ... that do what the scripts say, each asked once a turn of the dice."""
    names = "abcdef"[: len(scripts)]
    return FakeBoards(
        [report(name) for name in names],
        {f"replica of {n}": [script] for n, script in zip(names, scripts, strict=True)},
    )


async def test_a_request_goes_to_an_idle_board_and_all_boards_get_their_share() -> None:
    boards = FakeBoards.answering("a", "b", "c")
    it = fleet(only=boards)
    await it.refresh()
    for _ in range(30):
        assert text_of(await talk(it)) == "hello"
    assert len({replica for replica, _ in boards.opened}) == 3


async def test_requests_at_once_go_to_different_boards() -> None:
    gate = asyncio.Event()
    boards = boards_with(*([accepted(b), gate, *answer(b)[1:]] for b in "abc"))
    it = fleet(only=boards)
    await it.refresh()
    talks = [asyncio.create_task(talk(it)) for _ in range(3)]
    await eventually(lambda: boards.running == 3)
    assert len({replica for replica, _ in boards.opened}) == 3
    gate.set()
    await asyncio.gather(*talks)


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(BoardFailed("a", "its replica died"), id="a board that is gone"),
        pytest.param(QueueFull(4, 7), id="a board that is full"),
    ],
)
async def test_a_board_that_refuses_is_passed_over(refusal: RkserveError) -> None:
    # b has more to do, so that a is asked first.
    boards = boards_with([refusal], answer("b", "from b"))
    boards.reported[1] = report("b", running=1)
    it = fleet(only=boards)
    await it.refresh()
    assert text_of(await talk(it)) == "from b"
    assert [replica for replica, _ in boards.opened] == ["replica of a", "replica of b"]
    await talk(it)
    gone = isinstance(refusal, BoardFailed)
    expected = "replica of b" if gone else "replica of a"  # a dead one is not asked again
    assert boards.opened[2][0] == expected


async def test_a_refusal_of_the_request_itself_is_not_tried_elsewhere() -> None:
    boards = boards_with([ContextOverflow(9, 8)], [ContextOverflow(9, 8)])
    it = fleet(only=boards)
    await it.refresh()
    with pytest.raises(ContextOverflow):
        await talk(it)
    assert len(boards.opened) == 1


async def test_leaving_closes_the_board_s_generator_and_forgets_the_load() -> None:
    boards = FakeBoards.answering("a")
    it = fleet(only=boards)
    await it.refresh()
    for _ in range(5):  # more than the board's queue holds
        async with aclosing(dispatch(it).generate(REQUEST)) as events:
            await anext(events)
        assert boards.running == 0
    assert boards.closed == ["replica of a"] * 5


async def test_an_unknown_model_is_not_found() -> None:
    it = fleet(only=FakeBoards.answering("a"))
    await it.refresh()
    with pytest.raises(ModelNotFound):
        await talk(it, GenerateRequest("r", "another", (1,), 1))


@pytest.mark.parametrize(
    ("boards", "words"),
    [
        pytest.param(FakeBoards([]), "no board has joined yet", id="none has joined"),
        pytest.param(
            FakeBoards([report("a", state=BoardState.FAILED, reason="no such library")]),
            "no such library",
            id="the only one has failed",
        ),
        pytest.param(
            FakeBoards([report("a", state=BoardState.QUARANTINED)]), "quarantined", id="quarantine"
        ),
        pytest.param(
            boards_with([BoardFailed("a", "its replica died")]),
            "its replica died",
            id="the last report is older than its death",
        ),
    ],
)
async def test_without_a_usable_board_the_reason_is_said(boards: FakeBoards, words: str) -> None:
    it = fleet(only=boards)
    await it.refresh()
    with pytest.raises(NoBoard, match=words) as caught:
        await talk(it)
    assert caught.value.retry_after_s == 5


async def test_recovering_boards_are_used_only_where_no_board_is_ready() -> None:
    boards = FakeBoards.answering("a", "b")
    boards.reported = [report("a", state=BoardState.RECOVERING), report("b", running=1)]
    it = fleet(only=boards)
    await it.refresh()
    await talk(it)
    assert boards.opened[-1][0] == "replica of b"
    boards.reported = [report("a", state=BoardState.RECOVERING)]
    await it.refresh()
    await talk(it)
    assert boards.opened[-1][0] == "replica of a"


async def test_full_boards_are_not_even_asked() -> None:
    boards = FakeBoards([report("a", running=1, queued=1, requests=4, decode_ms=40_000)])
    it = fleet(only=boards)
    await it.refresh()
    with pytest.raises(QueueFull) as caught:
        await talk(it)
    assert boards.opened == []
    assert (caught.value.queued, caught.value.retry_after_s) == (1, 10)


async def test_when_every_board_says_that_it_is_full_the_soonest_place_counts() -> None:
    it = fleet(only=boards_with([QueueFull(2, 9)], [QueueFull(3, 4)]))
    await it.refresh()
    with pytest.raises(QueueFull) as caught:
        await talk(it)
    assert (caught.value.queued, caught.value.retry_after_s) == (5, 4)


async def test_groups_of_one_model_are_one_pool_and_do_not_age_each_other() -> None:
    it = fleet(x=FakeBoards.answering("x-0"), y=FakeBoards.answering("y-0"))
    for _ in range(3):
        await it.refresh()
    states = {r.board_id: r.state for r in it.reports(MODEL)}
    assert states == {"x-0": BoardState.READY, "y-0": BoardState.READY}


async def test_a_board_that_falls_silent_is_lost_for_a_while_and_then_forgotten() -> None:
    boards = FakeBoards.answering("a", "b")
    it = fleet(only=boards)
    await it.refresh()
    boards.reported = [report("b")]
    await it.refresh()
    lost, kept = it.reports()
    assert (lost.state, kept.state) == (BoardState.LOST, BoardState.READY)
    assert lost.reason
    await talk(it)
    assert boards.opened[-1][0] == "replica of b"
    for _ in range(FORGET_AFTER):
        await it.refresh()
    assert [r.board_id for r in it.reports()] == ["b"]


async def test_a_replaced_replica_keeps_the_board_s_name() -> None:
    boards = FakeBoards.answering("a")
    it = fleet(only=boards)
    await it.refresh()
    boards.reported = [report("a", replica="its successor")]
    boards.scripts["its successor"] = [answer("a", "again")]
    await it.refresh()
    assert text_of(await talk(it)) == "again"
    assert [r.board_id for r in it.reports()] == ["a"]


async def test_a_board_that_cannot_start_is_listed_until_it_starts() -> None:
    boards = FakeBoards([], failure=BoardStartFailed("a", "no such library"))
    it = fleet(only=boards)
    await it.refresh_failures()
    (failed,) = it.reports()
    assert (failed.state, failed.reason) == (BoardState.FAILED, "no such library")
    assert not it.is_ready(MODEL)
    boards.reported = [report("a")]
    await it.refresh()
    await it.refresh_failures()  # Serve's message lags behind
    (started,) = it.reports()
    assert started.state is BoardState.READY
    assert it.is_ready(MODEL)


async def test_one_group_that_does_not_report_leaves_the_others_and_itself_as_they_were() -> None:
    silent, fine = FakeBoards.answering("a"), FakeBoards.answering("b")
    it = fleet(silent=silent, fine=fine)
    await it.refresh()
    silent.trouble = BoardFailed("silent", "no report within the time limit")
    await it.refresh()
    assert [r.state for r in it.reports()] == [BoardState.READY] * 2


async def test_following_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    boards = FakeBoards([], failure=BoardStartFailed("b", "no such library"))
    boards.trouble = OSError("Ray is away")
    it = fleet(only=boards)
    follows = asyncio.create_task(it.follow(0.001))
    await eventually(lambda: "Ray is away" in caplog.text)
    boards.trouble, boards.reported = None, [report("a")]
    # The board, and the failure of another one to start.
    await eventually(lambda: len(it.reports()) == 2)
    follows.cancel()
    await asyncio.wait({follows})


def test_failures_are_asked_for_less_often_than_reports() -> None:
    assert FAILURES_EVERY > 1


NEVER: Sequence[Step] = [asyncio.Event()]


@pytest.mark.parametrize("script", [NEVER, []], ids=["frozen", "ends without a word"])
async def test_a_board_that_does_not_accept_is_passed_over(script: Sequence[Step]) -> None:
    boards = boards_with(script, answer("b", "hello"))
    it = fleet(only=boards)
    await it.refresh()
    for _ in range(24):
        assert text_of(await talk(it)) == "hello"
    assert [replica for replica, _ in boards.opened].count("replica of a") == 1
    assert boards.running == 0


async def test_a_board_that_came_since_the_last_reports_is_found_by_the_first_request() -> None:
    boards = FakeBoards([])
    it = fleet(only=boards)
    await it.refresh()
    with pytest.raises(NoBoard):
        await talk(it)
    late = FakeBoards.answering("a")
    boards.reported, boards.scripts = late.reported, late.scripts
    await asyncio.sleep(LOOK_AGAIN_S)
    answers = await asyncio.gather(talk(it), talk(it))
    assert [text_of(events) for events in answers] == ["hello", "hello"]


async def test_boards_are_looked_for_before_the_first_request_but_not_for_long() -> None:
    boards = FakeBoards([])
    it = fleet(only=boards)
    await it.find_boards(0.0)
    assert it.reports() == []
    looking = asyncio.create_task(it.find_boards(60.0))
    await asyncio.sleep(0.01)
    boards.reported = [report("a")]
    await asyncio.wait_for(looking, 10)
    assert it.is_ready(MODEL)


async def test_boards_that_still_start_are_not_awaited() -> None:
    boards = FakeBoards([], runs=False)
    it = fleet(only=boards)
    looking = asyncio.create_task(it.find_boards(60.0))
    await asyncio.wait_for(looking, 10)
    assert it.reports() == []


async def test_a_board_that_comes_is_asked_at_once_and_until_it_serves() -> None:
    boards = FakeBoards([])
    it = fleet(only=boards)
    loop = asyncio.get_running_loop()
    rounds: list[float] = []
    it.changed.append(lambda: rounds.append(loop.time()))
    follows = asyncio.create_task(it.follow(3600.0))
    await asyncio.sleep(10)
    assert len(rounds) == 1
    boards.new, came_s = True, loop.time()
    await asyncio.sleep(LOOK_AGAIN_S)
    boards.new = False  # as once it was asked
    await asyncio.sleep(60)
    follows.cancel()
    assert rounds[1] <= came_s + LOOK_AGAIN_S
    assert rounds[-1] == pytest.approx(came_s + SETTLES_S, abs=2 * LOOK_AGAIN_S)
    assert len(rounds) == pytest.approx(2 + SETTLES_S / LOOK_AGAIN_S, abs=2)


GIVES_UP: Sequence[Step] = [accepted("a"), BoardOutOfOrder("a", "failed: out of memory")]


async def test_a_request_that_waited_at_a_board_which_gave_up_goes_to_another() -> None:
    boards = boards_with(GIVES_UP, answer("b", "hello"))
    it = fleet(only=boards)
    await it.refresh()
    answers = [await talk(it) for _ in range(24)]
    assert [text_of(events) for events in answers] == ["hello"] * 24
    assert all(sum(isinstance(e, Accepted) for e in events) == 1 for events in answers)
    assert [replica for replica, _ in boards.opened].count("replica of a") == 1


# -- what a board may lack ------------------------------------------------------------------------

LACKS_CACHE: Sequence[Step] = [CacheNotFound("doc")]
LACKS_ADAPTER: Sequence[Step] = [accepted("a"), AdapterBroken("kind@v1", "another file")]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LACKS_CACHE, id="the prompt cache"),
        pytest.param(LACKS_ADAPTER, id="the adapter's file, noticed after it accepted"),
    ],
)
async def test_a_board_that_lacks_something_is_passed_over_and_used_again(
    script: Sequence[Step],
) -> None:
    boards = boards_with(script, answer("b", "hello"))
    it = fleet(only=boards)
    await it.refresh()
    answers = [await talk(it) for _ in range(32)]
    assert {text_of(events) for events in answers} == {"hello"}
    assert all(sum(isinstance(e, Accepted) for e in events) == 1 for events in answers)
    # It is as good as before for whoever does not need that.
    assert [replica for replica, _ in boards.opened].count("replica of a") > 1


@pytest.mark.parametrize(
    ("script", "raised"),
    [(LACKS_CACHE, CacheNotFound), (LACKS_ADAPTER, AdapterBroken)],
    ids=["the prompt cache", "the adapter's file"],
)
async def test_what_every_board_lacks_is_said(
    script: Sequence[Step], raised: type[Exception]
) -> None:
    boards = boards_with(script, script)
    it = fleet(only=boards)
    await it.refresh()
    with pytest.raises(raised):
        await talk(it)
    assert len(boards.opened) == 2


async def test_what_a_busy_board_may_have_is_waited_for_and_not_said_to_be_missing() -> None:
    boards = boards_with(LACKS_CACHE, answer("b", "hello"))
    boards.reported[1] = report("b", running=1, queued=1)
    it = fleet(only=boards)
    await it.refresh()
    talking = asyncio.create_task(talk(it))
    await eventually(lambda: boards.opened)
    await asyncio.sleep(10.0)
    assert not talking.done()
    boards.reported[1] = report("b")
    await it.refresh()
    assert text_of(await talking) == "hello"


async def test_generations_that_are_paused_leave_the_board_to_others() -> None:
    gate = asyncio.Event()
    pause = Paused(None, 1, Kv.RECOMPUTED)
    paused: list[Step] = [accepted("a"), Delta("x", (1,)), pause, pause, gate]
    paused += answer("a", "y")[1:]
    boards = FakeBoards(
        [report("a")], {"replica of a": [paused, paused, paused, answer("a", "hello")]}
    )
    it = fleet(only=boards)
    await it.refresh()
    talks = []
    for _ in range(3):  # more than may run and wait there
        talks.append(asyncio.create_task(talk(it)))
        await asyncio.sleep(0.01)
    assert boards.running == 3
    await it.refresh()
    assert text_of(await talk(it)) == "hello"
    talks.pop().cancel()  # one is left where it is, the others go on
    gate.set()
    assert [text_of(events) for events in await asyncio.gather(*talks)] == ["xy", "xy"]
    await eventually(lambda: boards.running == 0)
    await it.refresh()
    boards.scripts["replica of a"] = [answer("a", "again")]
    assert text_of(await talk(it)) == "again"


async def test_a_board_of_batches_has_room_for_a_batch_and_its_queue() -> None:
    gate = asyncio.Event()
    boards = FakeBoards(
        [report("a", n_batch=4, queue_limit=2)],
        {"replica of a": [[accepted("a"), gate, *answer("a", "x")[1:]]]},
    )
    it = fleet(only=boards)
    await it.refresh()
    talks = [asyncio.create_task(talk(it)) for _ in range(6)]
    await eventually(lambda: boards.running == 4)  # the others wait at the Router
    with pytest.raises(QueueFull):
        await talk(it)
    gate.set()
    await asyncio.gather(*talks)
    assert len(boards.opened) == 6


# -- who holds what -------------------------------------------------------------------------------


async def test_a_fleet_knows_which_board_holds_its_generations_until_they_end() -> None:
    gate = asyncio.Event()
    boards = boards_with(*([accepted(b), gate, *answer(b)[1:]] for b in "ab"))
    it = fleet(only=boards)
    await it.refresh()
    requests = [GenerateRequest(f"chatcmpl-1/{k}", MODEL, (1,), 10) for k in range(2)]
    talks = [asyncio.create_task(talk(it, request)) for request in requests]
    await eventually(lambda: boards.running == 2)
    assert {seat.board_id for seat in it.holders("chatcmpl-1")} == {"a", "b"}
    (first,) = it.holders("chatcmpl-1", 0)
    assert (boards.opened[0][0], first.model) == (first.replica, MODEL)
    assert it.holders("chatcmpl-1", 2) == []
    assert it.holders("chatcmpl-2") == []
    gate.set()
    await asyncio.gather(*talks)
    assert it.holders("chatcmpl-1") == []


async def test_a_generation_that_was_passed_on_is_held_where_it_is() -> None:
    gate = asyncio.Event()
    boards = boards_with([QueueFull(1, 1)], [accepted("b"), gate, *answer("b")[1:]])
    boards.reported[1] = report("b", running=1)  # so that a is asked first
    it = fleet(only=boards)
    await it.refresh()
    request = GenerateRequest("chatcmpl-1/0", MODEL, (1,), 10)
    talking = asyncio.create_task(talk(it, request))
    await eventually(lambda: len(boards.opened) == 2)
    assert [seat.board_id for seat in it.holders("chatcmpl-1")] == ["b"]
    gate.set()
    await talking


# -- asking boards --------------------------------------------------------------------------------


async def test_a_board_that_fails_or_is_silent_hides_nobody_s_answer() -> None:
    boards = FakeBoards([report(b) for b in "abcd"])
    boards.says = {
        ("", "kv"): 7,
        ("replica of b", "kv"): BoardFailed("replica of b", "its replica died"),
        ("replica of d", "kv"): BoardOutOfOrder("d", "quarantined"),
    }
    it = fleet(only=boards)
    await it.refresh()
    boards.reported = [report(b) for b in "abd"]  # c falls silent
    await it.refresh()
    answers = await it.ask(it.addresses(), "kv", timeout_s=1)
    assert answers.found == {"a": 7}
    assert {b: str(exc) for b, exc in answers.failed.items()} == {
        "b": "Board b failed while it answered: its replica died.",
        "c": "Board c failed while it answered: the board's replica does not answer.",
        "d": "Board d is out of order: quarantined.",
    }
    assert answers.partial
    assert answers.took_ms["a"] >= 0
    assert "replica of c" not in {replica for replica, _, _ in boards.asked}


async def test_only_boards_with_a_replica_have_a_seat() -> None:
    boards = FakeBoards([report("a")], failure=BoardStartFailed("b", "no such library"))
    it = fleet(only=boards)
    await it.refresh()
    await it.refresh_failures()
    assert [r.board_id for r in it.reports()] == ["a", "b"]
    assert [seat.board_id for seat in it.addresses()] == ["a"]
    assert it.addresses("another") == []


# -- boards that are held, behind or joining -------------------------------------------------------


def hold(mode: PauseMode, *boards: str) -> Desired:
    return Desired(2, pauses=(ActivePause("op", Scope((), boards), mode),))


async def test_a_board_that_is_behind_or_paused_is_passed_over_for_another() -> None:
    for refusal in (BoardBehind("a", "it obeys epoch 3"), EnginePaused("the board a", 9)):
        boards = FakeBoards.answering("a", "b")
        boards.scripts["replica of a"] = [[refusal]]
        of = fleet(only=boards)
        await of.refresh()
        for _ in range(24):
            events = await talk(of)
            assert isinstance(events[0], Accepted)
            assert events[0].board_id == "b"
        assert any(replica == "replica of a" for replica, _ in boards.opened)


async def test_while_a_change_reaches_the_boards_a_request_waits_for_it() -> None:
    boards = FakeBoards.answering("a")
    late: list[Sequence[Step]] = [[BoardBehind("a", "it obeys epoch 3")] for _ in range(3)]
    boards.scripts["replica of a"] = [*late, answer("a", "hello")]
    of = fleet(only=boards)
    await of.refresh()
    assert text_of(await talk(of)) == "hello"
    assert len(boards.opened) == 4


async def test_a_board_that_stays_behind_is_given_up() -> None:
    boards = FakeBoards([report("a")], {"replica of a": [[BoardBehind("a", "epoch 3")]]})
    of = fleet(only=boards)
    await of.refresh()
    with pytest.raises(BoardBehind):
        await talk(of)
    assert len(boards.opened) > 1


async def test_a_request_waits_for_boards_that_are_joining() -> None:
    boards = FakeBoards.answering("a")
    boards.reported = [report("a", state=BoardState.JOINING)]
    of = fleet(only=boards)
    await of.refresh()
    asked = asyncio.create_task(talk(of))
    await asyncio.sleep(2 * LOOK_AGAIN_S)
    assert not asked.done()
    boards.reported = [report("a")]
    assert text_of(await asked) == "hello"


async def test_where_every_board_is_paused_the_soonest_return_is_told() -> None:
    boards = FakeBoards(
        [report("a"), report("b")],
        {"replica of a": [[EnginePaused("a", 9)]], "replica of b": [[EnginePaused("b", 4)]]},
    )
    of = fleet(only=boards)
    await of.refresh()
    with pytest.raises(EnginePaused) as caught:
        await talk(of)
    assert caught.value.retry_after_s == 4


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_request_goes_to_a_held_board_only_where_all_are_held(mode: PauseMode) -> None:
    of = fleet(only=FakeBoards.answering("a", "b"))
    await of.refresh()
    of.obey(hold(mode, "a"))
    for _ in range(8):
        (first, *_) = await talk(of)
        assert isinstance(first, Accepted)
        assert first.board_id == "b"
    await of.refresh()  # the next report keeps it so
    of.obey(hold(mode))
    assert isinstance((await talk(of))[0], Accepted)


async def test_a_board_that_is_full_is_not_left_for_one_that_is_held() -> None:
    boards = FakeBoards.answering("a", "b")
    boards.reported = [report("a"), report("b", running=1, queued=1)]
    of = fleet(only=boards)
    of.obey(hold(PauseMode.KEEP, "a"))
    await of.refresh()
    talking = asyncio.create_task(talk(of))
    await asyncio.sleep(10.0)
    assert boards.opened == []
    boards.reported = [report("a"), report("b")]
    await of.refresh()
    await talking
    assert [replica for replica, _ in boards.opened] == ["replica of b"]


async def test_a_board_that_says_that_it_is_full_is_not_left_for_one_that_is_held() -> None:
    boards = FakeBoards.answering("a", "b")
    boards.scripts["replica of a"] = [[QueueFull(1, 3)]]
    of = fleet(only=boards)
    of.obey(hold(PauseMode.KEEP, "b"))
    await of.refresh()
    with pytest.raises(QueueFull):
        await talk(of)
    assert [replica for replica, _ in boards.opened] == ["replica of a"]


async def test_where_all_are_held_one_that_is_full_is_left_for_another() -> None:
    boards = FakeBoards.answering("a", "b")
    boards.scripts["replica of a"] = [[QueueFull(1, 3)]]
    of = fleet(only=boards)
    of.obey(hold(PauseMode.KEEP))
    await of.refresh()
    for _ in range(24):
        assert text_of(await talk(of)) == "hello"
    assert any(replica == "replica of a" for replica, _ in boards.opened)


async def test_rates_are_those_of_the_last_seconds() -> None:
    boards = FakeBoards([report("a", decode_tokens=10)])
    of = fleet(only=boards)
    await of.refresh()
    assert of.rates()["a"].decode_tokens_per_s == 0
    boards.reported = [report("a", decode_tokens=50)]
    await asyncio.sleep(0.02)
    await of.refresh()
    assert of.rates()["a"].decode_tokens_per_s > 0


@dataclass
class SlowReports(FakeBoards):
    """Boards whose first report is on its way until ``gate`` is set."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    rounds: int = 0

    async def reports(self) -> list[BoardReport]:
        self.rounds += 1
        found = list(self.reported)
        if self.rounds == 1:
            await self.gate.wait()
        return found


async def test_who_refreshes_gets_reports_that_were_written_afterwards() -> None:
    boards = SlowReports([report("a", base="old")])
    of = fleet(only=boards)
    first = asyncio.ensure_future(of.refresh())
    await eventually(lambda: boards.rounds == 1)
    boards.reported = [report("a", base="new")]
    later = [asyncio.ensure_future(of.refresh()) for _ in range(5)]
    await asyncio.sleep(1)
    assert not any(one.done() for one in later)
    boards.gate.set()
    await asyncio.gather(first, *later)
    assert [one.base for one in of.reports()] == ["new"]
    assert boards.rounds == 2, "callers that come together share a round"
