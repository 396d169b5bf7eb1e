"""What becomes of a request whose boards refuse it, or are lost: who is asked next, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rkserve.control import state_changes
from rkserve.core.errors import (
    AdapterBroken,
    BoardDrained,
    BoardFailed,
    BoardGone,
    BoardOutOfOrder,
    BoardSilent,
    ContextOverflow,
    EngineDied,
    EngineHung,
    HookFailed,
    NoBoard,
    PoisonRequest,
    QueueFull,
    QueueTimeout,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import (
    Accepted,
    CacheSource,
    Delta,
    Finished,
    Kv,
    Paused,
    TranscriptToken,
)
from rkserve.fleet.measurements import Circuit
from rkserve.router.dispatch.dispatch import FailoverLimits
from rkserve.router.dispatch.failover import BY_CLUSTER
from tests.support.boards.continued_house import InTurn
from tests.support.boards.dispatch_talk import REQUEST, Talk, half, rest
from tests.support.boards.fake_boards import (
    Step,
    accepted,
    answer,
    eventually,
    finished,
)

pytestmark = pytest.mark.virtual_time

LOSSES = [
    pytest.param(EngineDied("a", "SIGSEGV"), "crashed", id="the library crashed"),
    pytest.param(EngineHung("a", "silent"), "hung", id="the library hangs"),
    pytest.param(RunFailed("a", "refused"), "run_failed", id="the run failed"),
    pytest.param(BoardGone("a", "died"), "gone", id="the replica ended"),
    pytest.param(BoardSilent("a", "frozen"), "silent", id="no sign of life"),
    pytest.param(BoardOutOfOrder("a", "stopped"), "out_of_order", id="it is drained"),
    pytest.param(BoardDrained("a", "moved"), "drained", id="its requests are moved"),
    pytest.param(BoardFailed("a", "cut"), "unreachable", id="the connection is lost"),
    pytest.param(AdapterBroken("x@1", "gone"), "lacking", id="an adapter is missing"),
]


@pytest.mark.parametrize(("loss", "word"), LOSSES)
async def test_another_board_goes_on_with_an_answer(loss: RkserveError, word: str) -> None:
    talk = Talk(half("a", loss), rest("b"))
    events = await talk()
    assert [type(event) for event in events] == [Accepted, Delta, Delta, Finished]
    assert (talk.text, talk.asked) == ("Hello", ["a", "b"])
    first, second = (request for _, request in talk.boards.opened)
    assert first == REQUEST
    assert second.continued is not None
    assert second.continued.slots == (TranscriptToken(100, b"Hel"),)
    assert (second.continued.text, second.continued.times) == ("Hel", 1)
    assert talk.counted.words == [word]
    assert len(talk.counted.took_s) == 1


@pytest.mark.parametrize(("loss", "word"), LOSSES)
async def test_what_was_accepted_and_has_no_token_yet_goes_first_elsewhere(
    loss: RkserveError, word: str
) -> None:
    talk = Talk([accepted("a"), loss], answer("b", "Hello"))
    events = await talk()
    assert [type(event) for event in events] == [Accepted, Delta, Finished]
    assert events[0] == accepted("a")
    continued = talk.boards.opened[1][1].continued
    assert continued is not None
    assert (continued.slots, continued.bound) == ((), None)
    assert talk.counted.words == [word]


async def test_the_last_event_tells_how_often_and_for_how_long_it_was_lost() -> None:
    talk = Talk(half("a", BoardGone("a", "died")), half("b", BoardGone("b", "died")), rest("c"))
    events = await talk()
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.timings.continued == 2
    assert end.timings.lost_ms == pytest.approx(1e3 * sum(talk.counted.took_s))
    assert end.timings.lost_ms > 0
    assert talk.counted.words == ["gone", "gone"]


async def test_a_stream_that_ends_without_an_end_is_a_loss() -> None:
    talk = Talk(half("a"), rest("b"))
    await talk()
    assert (talk.text, talk.asked) == ("Hello", ["a", "b"])


async def test_a_generation_goes_on_so_often_and_no_more() -> None:
    scripts = [half(name, BoardGone(name, "its node died")) for name in "abcde"]
    talk = Talk(*scripts)
    with pytest.raises(BoardGone, match="Board d "):
        await talk()
    assert talk.asked == ["a", "b", "c", "d"]
    assert talk.counted.words == ["gone"] * 3


@pytest.mark.parametrize(
    "death", [EngineDied, EngineHung], ids=["which crashes", "which makes it hang"]
)
@pytest.mark.parametrize("first", [[], [Delta("Hel", (100,))]], ids=["at once", "on its way"])
async def test_a_request_that_two_boards_die_of_ends_and_they_are_not_to_blame(
    death: Callable[[str, str], RkserveError], first: list[Step]
) -> None:
    talk = Talk(
        [accepted("a"), *first, death("a", "SIGSEGV")],
        [accepted("b"), death("b", "SIGSEGV")],
        answer("c", "never"),
    )
    with pytest.raises(PoisonRequest, match="2 boards failed"):
        await talk()
    assert talk.asked == ["a", "b"]
    await asyncio.sleep(1)
    forgiven = [replica for replica, method, _ in talk.boards.asked if method == "forgive"]
    assert forgiven == ["replica of a", "replica of b"]
    assert talk.dispatch.breaker.blocked(0.0) == []
    second = talk.boards.opened[1][1].continued
    assert second is not None
    assert second.suspect  # so that it shares its run with nobody


async def test_a_request_that_gets_further_is_not_what_the_boards_died_of() -> None:
    talk = Talk(
        half("a", EngineDied("a", "SIGSEGV")),
        [accepted("b"), Delta("l", (101,)), EngineDied("b", "SIGSEGV")],
        [accepted("c"), Delta("o", (102,)), finished(3)],
    )
    await talk()
    assert talk.text == "Hello"


async def test_replicas_that_end_one_after_the_other_are_no_word_against_a_request() -> None:
    gone: list[list[Step]]
    gone = [[accepted(name), BoardGone(name, "its node died")] for name in "abc"]
    talk = Talk(*gone, answer("d", "Hello"))
    await talk()
    assert talk.text == "Hello"


async def test_a_run_that_two_boards_refuse_is_the_client_s_to_know() -> None:
    refused: list[list[Step]]
    refused = [[accepted(name), RunFailed(name, "no")] for name in "abc"]
    talk = Talk(*refused)
    with pytest.raises(RunFailed):
        await talk()
    assert talk.asked == ["a", "b"]


@pytest.mark.parametrize(
    "error", [ContextOverflow(9, 8), HookFailed("h", "raised")], ids=["the request", "a hook"]
)
async def test_what_is_no_fault_of_a_board_ends_the_answer(error: RkserveError) -> None:
    talk = Talk(half("a", error), rest("b"))
    with pytest.raises(type(error)):
        await talk()
    assert talk.asked == ["a"]


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(NoBoard("sim-chat", "none is left"), id="no board is left"),
        pytest.param(QueueTimeout(30.0, 1), id="all boards are busy with long answers"),
    ],
)
async def test_where_no_board_takes_it_it_waits_for_one(refusal: RkserveError) -> None:
    talk = Talk(half("a", EngineDied("a", "SIGSEGV")))
    talk.usher.refusal = refusal
    talk.boards.scripts["replica of a"].append(rest("a"))
    loop = asyncio.get_running_loop()
    back_s = loop.time() + 20
    talk.usher.away = lambda: bool(talk.boards.opened) and loop.time() < back_s
    await talk()
    assert (talk.text, talk.asked) == ("Hello", ["a", "a"])
    assert 20 <= talk.counted.took_s[0] < 22


async def test_an_answer_that_waits_too_long_at_the_next_board_goes_on_at_another() -> None:
    busy: list[Step] = [accepted("b"), QueueTimeout(30.0, 1)]
    talk = Talk(half("a", EngineDied("a", "SIGSEGV")), busy, rest("c"))
    await talk()
    assert (talk.text, talk.asked) == ("Hello", ["a", "b", "c"])
    assert talk.counted.words == ["crashed", "busy"]


async def test_who_has_no_word_of_an_answer_is_told_that_it_waited_too_long() -> None:
    talk = Talk([accepted("a"), QueueTimeout(30.0, 1)], answer("b", "never"))
    with pytest.raises(QueueTimeout):
        await talk()
    assert talk.asked == ["a"]


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        pytest.param(NoBoard("sim-chat", "a: crashed"), NoBoard, id="no board is left"),
        pytest.param(QueueTimeout(30.0, 1), EngineDied, id="others are busy: the loss is told"),
    ],
)
async def test_it_does_not_wait_for_ever(refusal: RkserveError, told: type[RkserveError]) -> None:
    talk = Talk(half("a", EngineDied("a", "SIGSEGV")))
    talk.usher.refusal = refusal
    talk.usher.away = lambda: bool(talk.boards.opened)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(told):
        await talk()
    assert 30 <= loop.time() - began_s < 32


async def test_a_request_that_no_board_has_accepted_does_not_wait_here() -> None:
    talk = Talk(answer("a", "never"))
    talk.usher.away = lambda: True
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(NoBoard):
        await talk()
    assert loop.time() - began_s < 1


async def test_whoever_reads_an_answer_waits_for_no_back_off_at_first() -> None:
    rules = FailoverLimits(pause_s=1.0, longest_pause_s=8.0)
    loss = BoardGone("a", "died")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await Talk(half("a", loss), rest("b"), rules=rules)()
    assert loop.time() - began_s < 0.1
    # Before the first token nobody knows how many others lost the same board.
    began_s = loop.time()
    await Talk([loss], [QueueFull(1, 1)], [loss], answer("d", "x"), rules=rules)()
    assert 0.5 + 1 + 2 <= loop.time() - began_s <= 1 + 2 + 4.1


async def test_a_board_that_keeps_failing_is_left_alone_until_a_probe_succeeds() -> None:
    loop = asyncio.get_running_loop()
    talk = Talk([accepted("a"), BoardSilent("a", "no sign of life")], answer("b", "Hello"))
    key = "replica of a"
    for _ in range(3):
        talk.usher.replicas.sort()
        await talk()
    assert talk.counted.words == ["silent"] * 2 + ["opened", "silent"]
    assert talk.dispatch.breaker.blocked(loop.time()) == [key]
    assert "no sign of life" in talk.dispatch.breaker.reason(key, loop.time())
    await asyncio.sleep(3)
    assert talk.dispatch.breaker.circuit(key, loop.time()) is Circuit.HALF_OPEN
    talk.boards.scripts[key] = [[QueueFull(1, 1)], answer("a", "well")]
    talk.usher.replicas.sort()
    await talk()  # a probe that the board had no room for
    assert talk.dispatch.breaker.circuit(key, loop.time()) is Circuit.HALF_OPEN
    talk.usher.replicas.sort()
    await talk()
    assert talk.dispatch.breaker.circuit(key, loop.time()) is Circuit.CLOSED


async def test_leaving_closes_the_board_s_stream_wherever_it_goes_on() -> None:
    talk = Talk(half("a", BoardGone("a", "died")), half("b", asyncio.Event()))
    listening = asyncio.create_task(talk())
    await eventually(lambda: len(talk.events) == 3)
    assert len(talk.dispatch.fleet.running) == 1
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert talk.boards.running == 0
    assert [seat.ends for seat in talk.usher.seats] == [[True], [True]]
    assert len(talk.dispatch.fleet.running) == 0


async def test_how_long_the_cluster_held_a_generation_is_counted_by_why() -> None:
    gate, again = asyncio.Event(), asyncio.Event()
    held = Paused(BY_CLUSTER, 1, Kv.RECOMPUTED)
    talk = Talk(half("a", held, gate, Delta("l", (101,)), held, again, *rest("a")[1:]))
    task = asyncio.create_task(talk())
    await eventually(lambda: len(talk.events) == 3)
    before = talk.dispatch.fleet.desired
    talk.dispatch.fleet.obey(state_changes.set_label(before, "sim-chat", "step-2"))
    gate.set()
    await eventually(lambda: len(talk.events) == 5)
    again.set()
    await task
    assert talk.counted.words == ["held by update", "held by pause"]


@pytest.mark.parametrize("reachable", [True, False])
async def test_a_request_names_the_board_that_has_a_file_for_it(reachable: bool) -> None:
    talk = Talk(answer("a", "Hello"))
    talk.boards.unreachable = not reachable
    holder = SimpleNamespace(group="g", key="replica of z")

    class Sourced(InTurn):
        async def take(self, *args: Any) -> Any:
            seat = await super().take(*args)
            seat.source, seat.expected_tokens = holder, 900
            return seat

    talk.usher.__class__ = Sourced
    await talk()
    ((_, sent),) = talk.boards.opened
    source = CacheSource("replica of z", "host", 1, 900, b"key", prefill_ms=2.5)
    assert sent.source == (source if reachable else None)
    assert replace(sent, source=None) == REQUEST
