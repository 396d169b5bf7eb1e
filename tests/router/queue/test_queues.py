"""The Router's queue in front of boards: who gets which place, and who is told of none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rkserve.core.block_hashes import origin_of, salted, seed_of
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import AdapterVersion, AdapterVersions, Desired, PauseMode
from rkserve.core.errors import (
    BoardDrained,
    BoardFailed,
    CacheNotFound,
    EnginePaused,
    ModelDrained,
    ModelNotFound,
    NoBoard,
)
from rkserve.core.messages import (
    AdapterRef,
    FailoverState,
    GenerateRequest,
)
from rkserve.router.queue.queues import TriedBoards, routing_request
from tests.support.boards.fake_boards import finished, report
from tests.support.boards.queue_hall import board_of, hall, paused

pytestmark = pytest.mark.virtual_time


async def test_a_request_that_was_refused_by_the_free_board_waits_for_the_other_one() -> None:
    of = await hall("a", "b", limit=9)
    places = {board_of(place): place for place in await of.busy(2)}
    refused = of.ask(tried={"replica of a": CacheNotFound("doc")})
    await of.settle()
    places["a"].observe(finished())
    other = await of.ask()
    assert board_of(other) == "a"
    places["b"].observe(finished())
    assert board_of(await refused) == "b"


async def test_an_unknown_model_has_no_queue() -> None:
    of = await hall("a")
    with pytest.raises(ModelNotFound):
        await of.ask(model="another")


async def test_requests_that_wait_are_told_when_the_last_board_is_gone() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    waiting = [of.ask() for _ in range(2)]
    await of.settle()
    place.lost()
    place.ended(left=False)
    for task in waiting:
        with pytest.raises(NoBoard):
            await task


async def test_requests_that_wait_are_patient_with_boards_that_come_back() -> None:
    of = await hall("a", limit=9, catch_up_s=5.0)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    place.lost()
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
    place.lost()
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


async def test_under_a_pause_that_keeps_requests_they_wait_and_go_on_when_it_is_over() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(paused(PauseMode.KEEP))
    places = await of.busy(2)  # they wait at the boards
    waiting = of.ask()
    await of.settle()
    assert not waiting.done()
    of.fleet.obey(Desired(3))
    places[0].observe(finished())
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


async def test_a_loading_board_takes_what_it_can_start_and_no_more() -> None:
    of = await hall(report("a", state=BoardState.RECOVERING), limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    assert (place.request.patient, waiting.done()) == (True, False)
    waiting.cancel()


def test_a_line_is_asked_for_under_the_version_that_is_served() -> None:
    ids = tuple(range(1000))
    ref = AdapterRef("kind", "2", "2" * 64)
    line = AdapterVersions("m", "kind", active=AdapterVersion(ref, 1))
    request, served = GenerateRequest("r", "m", ids, 10, line="kind"), Desired(lines=(line,))
    before = routing_request(request, Desired(), hashed=True).chain
    after = routing_request(request, served, hashed=True).chain
    assert before is not None
    assert after is not None
    assert (before.seed, after.seed) == (seed_of(None), seed_of(ref.key))
    assert routing_request(request, served, hashed=False).chain is None
    own = replace(request, salt=salted("tenant"))
    salty = routing_request(own, served, hashed=True).chain
    assert salty is not None
    assert salty.seed == seed_of(origin_of(ref.key, salted("tenant")))


# -- drained boards -------------------------------------------------------------------------------


def drained(*boards: str, moved: tuple[str, ...] = ()) -> Desired:
    return Desired(2, drained=boards, moved=moved)


GOES_ON = FailoverState()


@pytest.mark.promise("Single boards", "A drained board takes no new requests")
async def test_a_drained_board_gets_nothing_as_soon_as_the_router_knows() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(drained("a"))
    assert [board_of(place) for place in await of.busy(1)] == ["b"]
    waiting = of.ask()
    await of.hear(report("a"), report("b", running=1))
    await of.settle()
    assert not waiting.done()  # although a is free
    of.fleet.obey(Desired(3))
    assert board_of(await waiting) == "a"


async def test_a_board_that_recovers_is_waited_for_while_the_ready_one_is_drained() -> None:
    of = await hall("a", report("b", state=BoardState.RECOVERING), limit=9)
    of.fleet.obey(drained("a"))
    await of.hear()
    assert board_of(await of.ask()) == "b"


async def test_where_all_boards_are_drained_the_refusal_names_the_command_that_ends_it() -> None:
    of = await hall("a", "b c", limit=9, catch_up_s=5.0)
    of.fleet.obey(drained("a", "b c"))
    with pytest.raises(ModelDrained) as refused:
        await of.ask()
    assert "run: rkserve boards undrain a 'b c'." in refused.value.message
    assert (refused.value.http_status, refused.value.code) == (503, "model_drained")
    assert refused.value.retry_after_s == 5
    assert of.counted.reasons == ["model_drained"]


async def test_requests_that_wait_are_refused_when_the_last_board_is_drained() -> None:
    of = await hall("a", limit=9)
    (place,) = await of.busy(1)
    waiting = of.ask()
    await of.settle()
    of.fleet.obey(drained("a"))
    with pytest.raises(ModelDrained):
        await waiting
    place.ended(left=False)


async def test_a_drained_board_that_is_paused_takes_nothing_either() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(replace(paused(PauseMode.ABORT, "b"), drained=("a",)))
    place = await of.ask()
    assert board_of(place) == "b"  # it refuses the request itself
    place.ended(left=False)
    of.fleet.obey(replace(paused(PauseMode.KEEP), drained=("a",)))
    assert board_of(await of.ask()) == "b"  # where the request waits for the end of the pause


async def test_a_pause_of_an_adapter_holds_requests_beside_a_drained_board() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(replace(paused(PauseMode.KEEP, "b", adapter="tone"), drained=("a",)))
    waiting = of.ask(line="tone")
    await of.settle()
    assert not waiting.done()
    of.fleet.obey(replace(Desired(3), drained=("a",)))
    assert board_of(await waiting) == "b"


async def test_a_begun_answer_ends_on_a_drained_board_only_where_no_other_one_is_left() -> None:
    of = await hall("a", "b", limit=9)
    of.fleet.obey(drained("a"))
    assert board_of(await of.ask(continued=GOES_ON)) == "b"
    of.fleet.obey(drained("a", "b", moved=("b",)))
    assert board_of(await of.ask(continued=GOES_ON)) == "a"
    of.fleet.obey(drained("a", "b", moved=("a", "b")))
    with pytest.raises(ModelDrained):
        await of.ask(continued=GOES_ON)


async def test_a_board_that_was_drained_before_the_router_knew_is_passed_over() -> None:
    of = await hall("a", "b", limit=9)
    refusal = BoardDrained("a", "it takes no requests until it is undrained")
    assert board_of(await of.ask(tried={"replica of a": refusal})) == "b"
