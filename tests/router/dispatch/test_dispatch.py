"""What becomes of a request whose boards refuse it, or are lost: who is asked next, and when."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from rkserve.control import state_changes
from rkserve.core.board_report import GenerationState
from rkserve.core.desired_state import Scope
from rkserve.core.errors import (
    AdapterBroken,
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
    ControlAction,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Kv,
    Paused,
    TranscriptToken,
)
from rkserve.fleet.fleet import Fleet
from rkserve.router.dispatch.circuit_breaker import Circuit
from rkserve.router.dispatch.dispatch import Dispatch, FailoverLimits
from rkserve.router.dispatch.failover import BY_CLUSTER
from rkserve.router.queue.admission import QueueTerms
from tests.support.boards.continued_house import InTurn
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    answer,
    eventually,
    finished,
    report,
)

pytestmark = pytest.mark.virtual_time

REQUEST = GenerateRequest("r/0", "sim-chat", (1, 2, 3), 10)
PATIENCE = FailoverLimits(accept_timeout_s=0.2, continuations=3, restart_wait_s=30.0)


@dataclass
class Counted:
    """What would be in the metrics."""

    words: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def continued(self, word: str) -> None:
        self.words.append(word)

    def back(self, took_s: float) -> None:
        self.took_s.append(took_s)

    def opened(self) -> None:
        self.words.append("opened")

    def held(self, model: str, by: str, held_s: float) -> None:
        assert model == "sim-chat"
        assert held_s >= 0
        self.words.append(f"held by {by}")


class Talk:
    """A Router's dispatch on scripted boards a, b, ..., which it asks in turn."""

    def __init__(self, *scripts: Sequence[Step], rules: FailoverLimits = PATIENCE) -> None:
        names = "abcdef"[: len(scripts)]
        replicas = {f"replica of {n}": [one] for n, one in zip(names, scripts, strict=True)}
        says = {("", "forgive"): lambda: None}
        self.boards = FakeBoards([report(n) for n in names], replicas, says=says)
        self.usher = InTurn(list(replicas))
        self.counted = Counted()
        fleet = Fleet({"g": self.boards}, {"g": "sim-chat"})
        self.dispatch = Dispatch(fleet, self.usher, random.Random(3), rules, losses=self.counted)
        self.events: list[Event] = []

    async def __call__(self) -> list[Event]:
        await self.dispatch.fleet.refresh()
        async with aclosing(self.dispatch.generate(REQUEST)) as events:
            async for event in events:
                self.events.append(event)
        assert all(len(seat.ends) == 1 for seat in self.usher.seats)
        return self.events

    @property
    def asked(self) -> list[str]:
        return [replica[-1] for replica, _ in self.boards.opened]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))


def half(board: str, *after: Step) -> list[Step]:
    """A board says a first word, and then this."""
    return [accepted(board), Delta("Hel", (100,)), *after]


def rest(board: str) -> list[Step]:
    """A board goes on with it."""
    return [accepted(board), Delta("lo", (101,)), finished(2)]


LOSSES = [
    pytest.param(EngineDied("a", "SIGSEGV"), "crashed", id="the library crashed"),
    pytest.param(EngineHung("a", "silent"), "hung", id="the library hangs"),
    pytest.param(RunFailed("a", "refused"), "run_failed", id="the run failed"),
    pytest.param(BoardGone("a", "died"), "gone", id="the replica ended"),
    pytest.param(BoardSilent("a", "frozen"), "silent", id="no sign of life"),
    pytest.param(BoardOutOfOrder("a", "stopped"), "out_of_order", id="it is drained"),
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
    assert len(talk.dispatch.fleet.entries) == 1
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert talk.boards.running == 0
    assert [seat.ends for seat in talk.usher.seats] == [[True], [True]]
    assert len(talk.dispatch.fleet.entries) == 0


async def test_what_no_board_has_accepted_or_has_any_more_is_told_by_the_router() -> None:
    """Between a place and the board's word nobody else could say what became of it."""
    comes, goes_on = asyncio.Event(), asyncio.Event()
    talk = Talk(half("a", comes, EngineDied("a", "SIGSEGV")), [goes_on, *rest("b")])
    task = asyncio.create_task(talk())
    await eventually(lambda: len(talk.events) == 2)
    assert talk.dispatch.unassigned.infos() == []  # a has it
    comes.set()
    await eventually(lambda: talk.asked == ["a", "b"])
    (told,) = talk.dispatch.unassigned.infos()
    assert (told.request_id, told.board_id) == ("r/0", "")
    assert (told.state, told.tokens, told.partial_output) == (GenerationState.QUEUED, 1, "Hel")
    assert talk.dispatch.fleet.holders("r") == []
    goes_on.set()
    await task
    assert talk.dispatch.unassigned.infos() == []


# -- control calls while no board has it -----------------------------------------------------------


def lost_then(*second: Step) -> Talk:
    """Board a says a word and is lost; b is asked next."""
    return Talk(half("a", EngineDied("a", "SIGSEGV")), second)


async def test_a_request_on_its_way_to_another_board_is_aborted_by_its_id() -> None:
    talk = lost_then(asyncio.Event(), *rest("b"))
    task = asyncio.create_task(talk())
    await eventually(lambda: talk.asked == ["a", "b"])
    at = talk.dispatch.unassigned.control("r", ControlAction.ABORT, None)
    assert [one.request_id for one in at.done] == ["r/0"]
    events = await task
    assert (talk.text, events[-1].__class__, talk.boards.running) == ("Hel", Finished, 0)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is FinishReason.ABORT
    assert events[-1].usage.completion_tokens == 1
    assert (
        talk.dispatch.unassigned.control("r", ControlAction.ABORT, None).ended[0].request_id
        == "r/0"
    )


async def test_a_request_that_waits_for_a_restart_is_aborted_at_once() -> None:
    talk = Talk(half("a", EngineDied("a", "SIGSEGV")))
    talk.usher.away = lambda: bool(talk.events)
    task = asyncio.create_task(talk())
    await eventually(lambda: len(talk.events) == 2 and talk.dispatch.unassigned.infos())
    assert talk.dispatch.unassigned.abort(Scope(), None) == 1
    events = await task
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, talk.asked) == (FinishReason.ABORT, ["a"])


async def test_an_aborted_request_that_then_loses_its_board_goes_nowhere_else() -> None:
    """The board that should have ended it died first: another one must not go on with it."""
    dies = asyncio.Event()
    talk = Talk(half("a", dies, EngineDied("a", "SIGSEGV")), rest("b"))
    task = asyncio.create_task(talk())
    await eventually(lambda: len(talk.events) == 2)
    assert talk.dispatch.unassigned.abort(Scope(), None) == 0  # the board is to end it
    dies.set()
    events = await task
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, talk.asked, talk.text) == (FinishReason.ABORT, ["a"], "Hel")


async def test_a_request_that_no_board_ever_had_is_accepted_and_ended() -> None:
    talk = Talk([asyncio.Event(), *answer("a", "Hello")])
    task = asyncio.create_task(talk())
    await eventually(lambda: talk.asked == ["a"])
    assert talk.dispatch.unassigned.abort(Scope(models=("other",)), None) == 0
    assert talk.dispatch.unassigned.abort(Scope(boards=("a",)), None) == 0  # a has not taken it
    assert talk.dispatch.unassigned.abort(Scope(), ["q", "r/1"]) == 0
    assert talk.dispatch.unassigned.abort(Scope(models=("sim-chat",)), ["r"]) == 1
    events = await task
    assert [type(event) for event in events] == [Accepted, Finished]


async def test_what_came_before_an_abort_of_everything_is_ended_when_it_comes_to_the_queue() -> (
    None
):
    """Its body was still read, or its model still woken, when the abort came."""
    talk = Talk(answer("a", "Hello"))
    await talk.dispatch.fleet.refresh()
    before = QueueTerms(came_s=time.monotonic())
    await asyncio.sleep(0.001)
    talk.dispatch.unassigned.abort(Scope(), None)
    await asyncio.sleep(0.001)
    found = [event async for event in talk.dispatch.generate(REQUEST, before)]
    assert [type(event) for event in found] == [Accepted, Finished]
    assert talk.asked == []
    after = QueueTerms(came_s=time.monotonic())
    found = [event async for event in talk.dispatch.generate(REQUEST, after)]
    assert [type(event) for event in found] == [Accepted, Delta, Finished]


async def test_a_request_between_two_boards_is_paused_and_resumed_by_its_id() -> None:
    talk = Talk(
        half("a", EngineDied("a", "SIGSEGV")),
        [asyncio.Event(), *rest("b")],
        [accepted("c"), Paused(None, 1, Kv.RECOMPUTED), asyncio.Event()],
    )
    task = asyncio.create_task(talk())
    await eventually(lambda: talk.asked == ["a", "b"])
    (paused,) = talk.dispatch.unassigned.control("r", ControlAction.PAUSE, 0).done
    assert (paused.state, paused.partial_output) == (GenerationState.PAUSED, "Hel")
    await eventually(lambda: talk.asked == ["a", "b", "c"])
    taken = talk.boards.opened[2][1].continued
    assert taken is not None
    assert taken.paused == Paused(None, 1, Kv.RECOMPUTED)
    await eventually(
        lambda: talk.dispatch.unassigned.infos() == []
    )  # c has it, and keeps it paused
    assert talk.text == "Hel"
    task.cancel()
    await asyncio.wait({task})


async def test_a_pause_that_ends_before_a_board_takes_it_is_none() -> None:
    gate = asyncio.Event()
    talk = Talk(half("a", EngineDied("a", "SIGSEGV")), [gate, *rest("b")], rest("c"))
    task = asyncio.create_task(talk())
    await eventually(lambda: talk.asked == ["a", "b"])
    talk.dispatch.unassigned.control("r", ControlAction.PAUSE, None)
    (resumed,) = talk.dispatch.unassigned.control("r", ControlAction.RESUME, None).done
    assert resumed.state is GenerationState.QUEUED
    await task
    assert talk.text == "Hello"
    continued = talk.boards.opened[-1][1].continued
    assert continued is not None
    assert continued.paused is None


async def test_a_request_that_waits_for_its_first_board_cannot_be_paused() -> None:
    talk = Talk([asyncio.Event(), *answer("a", "Hello")])
    task = asyncio.create_task(talk())
    await eventually(lambda: talk.asked == ["a"])
    at = talk.dispatch.unassigned.control("r", ControlAction.PAUSE, None)
    assert (at.done, at.refused[0].state) == ((), GenerationState.QUEUED)
    task.cancel()
    await asyncio.wait({task})


async def test_how_long_the_cluster_held_a_generation_is_counted_by_why() -> None:
    gate, again = asyncio.Event(), asyncio.Event()
    held = Paused(BY_CLUSTER, 1, Kv.RECOMPUTED)
    talk = Talk(half("a", held, gate, Delta("l", (101,)), held, again, *rest("a")[1:]))
    task = asyncio.create_task(talk())
    await eventually(lambda: len(talk.events) == 3)
    before = talk.dispatch.fleet.listing.desired
    talk.dispatch.fleet.obey(state_changes.set_label(before, "sim-chat", "step-2"))
    gate.set()
    await eventually(lambda: len(talk.events) == 5)
    again.set()
    await task
    assert talk.counted.words == ["held by update", "held by pause"]
