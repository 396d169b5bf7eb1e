"""Requests that no board has: listed, aborted, paused and resumed."""

from __future__ import annotations

import asyncio
import time

import pytest

from rkserve.core.board_report import GenerationState
from rkserve.core.desired_state import Scope
from rkserve.core.errors import (
    EngineDied,
)
from rkserve.core.messages import (
    Accepted,
    ControlAction,
    Delta,
    Finished,
    FinishReason,
    Kv,
    Paused,
)
from rkserve.router.queue.admission import QueueTerms
from tests.support.boards.dispatch_talk import REQUEST, Talk, half, rest
from tests.support.boards.fake_boards import (
    Step,
    accepted,
    answer,
    eventually,
)

pytestmark = pytest.mark.virtual_time


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
