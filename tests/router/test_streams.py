"""The streams of a Router: when they have brought all that boards sent before a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rkserve.core.board_report import Emitted
from rkserve.core.desired_state import Scope
from rkserve.core.errors import BoardFailed, BoardSilent, DeadlineExceeded, QueueFull
from rkserve.core.messages import Accepted, Delta, Event, Finished, GenerateRequest, Kv, Paused
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Answers
from rkserve.router.streams import PASSAGE_S, WAITING, Choices, Generate, OpenStreams
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    answer,
    eventually,
    finished,
    report,
)
from tests.support.boards.own_time import run_loop

pytestmark = pytest.mark.virtual_time

ALL = Scope()
SEATS = {
    board: BoardAddress("only", f"replica of {board}", board, "sim-chat") for board in ("a", "b")
}


@dataclass
class Boards:
    """What ``OpenStreams`` asks of a ``Fleet``: who holds a stream, and how far it is there."""

    where: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)

    def holders(self, generation: str, choice: int | None = None) -> list[BoardAddress]:
        board = self.where.get(f"{generation}/{choice}")
        return [] if board is None else [SEATS[board]]

    async def ask(
        self, seats: Iterable[BoardAddress], method: str, *, timeout_s: float, together: bool
    ) -> Answers[Any]:
        assert (method, timeout_s > 0, together) == ("emitted", True, True)
        answers: Answers[Any] = Answers()
        for seat in seats:
            if seat.board_id in self.silent:
                answers.failed[seat.board_id] = BoardSilent(seat.replica, "nothing came")
                continue
            counts = (
                (name, n) for name, n in self.tokens.items() if self.where[name] == seat.board_id
            )
            answers.found[seat.board_id] = Emitted(seat.board_id, tuple(counts))
        return answers


def flows(tokens: int | None, board: str = "a") -> OpenStreams:
    """One stream on a board, which has emitted so many tokens of it, or has ended it (None)."""
    boards = Boards({"x/0": board}, {} if tokens is None else {"x/0": tokens})
    made = OpenStreams(boards)  # type: ignore[arg-type] # all that is asked of a Fleet
    made.enter(GenerateRequest("x/0", "sim-chat", (1,), 9, line="tone"))
    return made


def delta(*ids: int) -> Delta:
    return Delta("text", ids)


def paused(tokens: int) -> Paused:
    return Paused("cluster", tokens, Kv.RECOMPUTED)


@pytest.mark.parametrize(
    ("goal", "events", "rests"),
    [
        pytest.param(0, [], True, id="it has not begun"),
        pytest.param(2, [delta(1)], False, id="a token is on its way"),
        pytest.param(2, [delta(1, 2)], True, id="all tokens came"),
        pytest.param(3, [delta(1), paused(3)], True, id="the last ones are held back"),
        pytest.param(4, [delta(1), paused(3)], False, id="that was an earlier pause"),
        pytest.param(
            4, [delta(1), paused(3), delta(2, 3)], False, id="what it held back counts once"
        ),
        pytest.param(4, [delta(1), paused(3), delta(2, 3, 4)], True, id="and the last one came"),
        pytest.param(5, [paused(3), delta(1, 2, 3), paused(5)], True, id="the second pause"),
        pytest.param(None, [delta(1), finished(1)], True, id="it has ended"),
        pytest.param(None, [delta(1)], False, id="its end is on its way"),
    ],
)
def test_a_stream_rests_when_it_has_all_that_its_board_emitted(
    goal: int | None, events: list[Any], rests: bool
) -> None:
    async def main() -> bool:
        made = flows(goal)
        for event in events:
            made.sent("x/0", event)
        return await made.at_rest(ALL, 5.0 if rests else 0.05)

    assert run_loop(main()) is rests


async def test_it_waits_for_what_is_on_its_way() -> None:
    made = flows(2)
    resting = asyncio.create_task(made.at_rest(ALL, 60.0))
    made.sent("x/0", delta(1))
    await eventually(lambda: not made._moved.is_set() and not resting.done())
    made.sent("x/0", delta(2))
    assert await resting


async def test_of_what_is_known_no_board_is_asked() -> None:
    made = flows(7)  # which the board says and nobody hears
    made._fleet.silent.add("a")  # type: ignore[attr-defined] # it is no Fleet
    made.sent("x/0", delta(1))
    assert not await made.at_rest(ALL, 0.05, {"x/0": 2, "gone/0": 9})
    made.sent("x/0", delta(2))
    assert await made.at_rest(ALL, 60.0, {"x/0": 2})


async def test_a_stream_that_is_left_is_waited_for_no_more() -> None:
    made = flows(2)
    resting = asyncio.create_task(made.at_rest(ALL, 60.0))
    await asyncio.sleep(0)
    made.leave(["x/0"])
    assert await resting
    assert len(made) == 0


@pytest.mark.parametrize(
    ("scope", "silent"),
    [
        pytest.param(Scope(boards=("b",)), False, id="another board is meant"),
        pytest.param(Scope(models=("other",)), False, id="another model is meant"),
        pytest.param(Scope(adapter="other"), False, id="another adapter is meant"),
        pytest.param(ALL, True, id="its board does not answer"),
    ],
)
async def test_streams_that_a_pause_does_not_stop_are_not_waited_for(
    scope: Scope, silent: bool
) -> None:
    made = flows(7)
    if silent:
        made._fleet.silent.add("a")  # type: ignore[attr-defined] # see Boards
    assert await made.at_rest(scope, 60.0)


def test_what_was_handed_over_has_time_to_pass_the_proxy() -> None:
    async def main() -> float:
        made = flows(1)
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        made.sent("x/0", delta(1))
        assert await made.at_rest(ALL, 60.0)
        return loop.time() - sent_s

    # The loop's clock may be up to its resolution behind when it wakes.
    assert run_loop(main()) >= PASSAGE_S - 0.001


# -- several generations as one stream: all accepted first, then merged, and closed together --


REQUESTS = [GenerateRequest(str(number), "sim-chat", (1,), 4) for number in range(3)]


def scripted(*scripts: Sequence[Step]) -> tuple[FakeBoards, Generate]:
    """Let the choice with number k play script k."""
    boards = FakeBoards(
        [report(str(k)) for k in range(len(scripts))],
        {str(k): [script] for k, script in enumerate(scripts)},
    )

    def generate(request: GenerateRequest, _: object = None) -> AsyncGenerator[Event, None]:
        return boards.open(request, request.request_id)

    return boards, generate


async def drain(choices: Choices) -> list[tuple[int, Delta | Paused | Finished]]:
    """Return everything that comes after the acceptance."""
    found = []
    while (item := await choices.next()) is not None:
        found.append(item)
    return found


async def test_the_choices_are_merged_and_each_keeps_its_order() -> None:
    boards, generate = scripted(*(answer(f"b{k}", f"{k}x", f"{k}y") for k in range(3)))
    choices = Choices(generate, REQUESTS)
    assert [a.board_id for a in await choices.accepted()] == ["b0", "b1", "b2"]
    found = await drain(choices)
    for number in range(3):
        own = [event for index, event in found if index == number]
        assert [e.text for e in own[:-1] if isinstance(e, Delta)] == [
            f"{number}x",
            f"{number}y",
        ]
        assert isinstance(own[-1], Finished)
    assert await choices.next() is None
    await choices.aclose()
    assert boards.running == 0


async def test_a_fast_choice_loses_nothing_while_a_slow_one_is_accepted() -> None:
    gate = asyncio.Event()
    _, generate = scripted(answer("fast", "a", "b"), [gate, *answer("slow", "c")])
    choices = Choices(generate, REQUESTS[:2])
    waiting = asyncio.create_task(choices.accepted())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    assert [a.board_id for a in await waiting] == ["fast", "slow"]
    texts = [event.text for _, event in await drain(choices) if isinstance(event, Delta)]
    assert sorted(texts) == ["a", "b", "c"]
    await choices.aclose()


async def test_choices_that_wait_in_a_queue_hold_up_no_others() -> None:
    gate = asyncio.Event()
    _, generate = scripted(answer("a", "first"), [gate, *answer("b", "second")])
    choices = Choices(generate, REQUESTS[:2])
    assert [a.board_id for a in await choices.accepted(lambda index: index == 1)] == ["a"]
    assert await choices.next() == (0, Delta("first", (100,)))
    gate.set()
    texts = [event.text for _, event in await drain(choices) if isinstance(event, Delta)]
    assert texts == ["second"], "that it was accepted is no news"
    await choices.aclose()


async def test_one_choice_at_least_is_waited_for() -> None:
    gate = asyncio.Event()
    _, generate = scripted([gate, *answer("a")], [gate, *answer("b")])
    choices = Choices(generate, REQUESTS[:2])
    opening = asyncio.create_task(choices.accepted(lambda _: True))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not opening.done()
    gate.set()
    await opening
    await choices.aclose()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_call_can_be_ended_from_outside(begun: bool) -> None:
    never = asyncio.Event()
    rest: list[Step] = [accepted("a"), Delta("text", (1,))] if begun else []
    boards, generate = scripted([*rest, never])
    choices = Choices(generate, REQUESTS[:1])
    if begun:
        await choices.accepted()
    loop = asyncio.get_running_loop()
    choices.fail_at(loop.time() + 0.01, DeadlineExceeded(1.0))
    if begun:
        assert await choices.next() == (0, Delta("text", (1,)))
    with pytest.raises(DeadlineExceeded):
        await (choices.next() if begun else choices.accepted())
    await choices.aclose()
    assert boards.running == 0


async def test_a_refusal_of_one_choice_is_raised_and_closing_frees_the_rest() -> None:
    never = asyncio.Event()
    boards, generate = scripted([accepted("a"), never], [QueueFull(1, 1)])
    choices = Choices(generate, REQUESTS[:2])
    with pytest.raises(QueueFull):
        await choices.accepted()
    await choices.aclose()
    assert boards.running == 0


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(BoardFailed("a", "SIGSEGV"), id="one of ours"),
        pytest.param(ZeroDivisionError("a bug"), id="a bug"),
    ],
)
async def test_an_error_of_one_choice_is_the_error_of_the_call(error: Exception) -> None:
    never = asyncio.Event()
    boards, generate = scripted([accepted("a"), Delta("text", (1,)), error], [accepted("b"), never])
    choices = Choices(generate, REQUESTS[:2])
    await choices.accepted()
    assert await choices.next() == (0, Delta("text", (1,)))
    with pytest.raises(type(error), match=str(error.args[-1])):
        await choices.next()
    await choices.aclose()
    assert boards.running == 0


async def test_a_silence_is_a_timeout_and_nothing_is_lost() -> None:
    gate = asyncio.Event()
    _, generate = scripted([accepted("a"), gate, Delta("late", (1,)), finished(1)])
    choices = Choices(generate, REQUESTS[:1])
    await choices.accepted()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await choices.next(timeout_s=0.005)
    gate.set()
    assert await choices.next(timeout_s=10) == (0, Delta("late", (1,)))
    await choices.aclose()


async def test_closing_before_anything_was_accepted_frees_the_boards() -> None:
    never = asyncio.Event()
    boards, generate = scripted([never], [accepted("b"), never])
    choices = Choices(generate, REQUESTS[:2])
    await asyncio.sleep(0.01)
    assert boards.running == 2
    await choices.aclose()
    await choices.aclose()  # twice does no harm
    assert boards.running == 0


async def test_an_acceptance_names_what_the_board_ignored() -> None:
    _, generate = scripted([accepted("a", ("temperature",)), finished(0)])
    choices = Choices(generate, REQUESTS[:1])
    (first,) = await choices.accepted()
    assert isinstance(first, Accepted)
    assert first.sampling_ignored == ("temperature",)
    await choices.aclose()


async def test_what_has_piled_up_is_returned_at_once_and_an_error_behind_it_alone() -> None:
    lost = BoardFailed("b0", "SIGSEGV")
    _, generate = scripted([accepted("b0"), Delta("a", (1,)), Delta("b", (2,)), lost])
    choices = Choices(generate, REQUESTS[:1])
    await choices.accepted()
    for _ in range(20):
        await asyncio.sleep(0)
    assert await choices.batch() == [(0, Delta("a", (1,))), (0, Delta("b", (2,)))]
    with pytest.raises(BoardFailed) as caught:
        await choices.batch()
    assert caught.value is lost
    await choices.aclose()


async def test_behind_the_last_event_there_is_an_empty_batch() -> None:
    _, generate = scripted(answer("b0", "x"))
    choices = Choices(generate, REQUESTS[:1])
    await choices.accepted()
    found = []
    while events := await choices.batch(60.0):
        found += events
    assert isinstance(found[-1][1], Finished)
    assert await choices.batch(60.0) == []
    await choices.aclose()


async def test_a_client_that_does_not_read_fills_no_memory_and_misses_nothing() -> None:
    count = 20 * WAITING
    deltas = [Delta("x", (number,)) for number in range(count)]
    _, generate = scripted([accepted("b0"), *deltas, finished(count)])
    choices = Choices(generate, REQUESTS[:1])
    await choices.accepted()
    for _ in range(2 * count):
        await asyncio.sleep(0)
    assert len(choices._waiting) <= WAITING + 2
    found = await choices.batch()
    ids = [one for _, event in found if isinstance(event, Delta) for one in event.token_ids]
    assert ids == list(range(count))
    await choices.aclose()


async def test_each_wait_has_its_whole_patience() -> None:
    gate = asyncio.Event()
    _, generate = scripted([accepted("b0"), gate, *answer("b0", "x")[1:]])
    choices = Choices(generate, REQUESTS[:1])
    await choices.accepted()
    loop = asyncio.get_running_loop()
    for _ in range(3):
        began_s = loop.time()
        with pytest.raises(TimeoutError):
            await choices.batch(5.0)
        assert loop.time() - began_s == pytest.approx(5.0, abs=0.1)
        await asyncio.sleep(1.0)
    gate.set()
    index, event = (await choices.batch(5.0))[0]
    assert (index, isinstance(event, Delta) and event.text) == (0, "x")
    await choices.aclose()


async def test_a_call_that_is_failed_from_outside_raises_that_before_what_waits() -> None:
    _, generate = scripted(answer("b0", "x"))
    choices = Choices(generate, REQUESTS[:1])
    await choices.accepted()
    choices.fail(QueueFull(1, 2))
    with pytest.raises(QueueFull):
        await choices.batch()
    await choices.aclose()


# -- deltas that are processed in the turn in which they arrive ------------------------------------


class Pushing:
    """A generation whose deltas are delivered as a channel does it."""

    def __init__(self) -> None:
        self.deliver: dict[str, Any] = {}
        self.ends = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, deliver: Any = None
    ) -> AsyncGenerator[Event, None]:
        """Accept, and end after ``ends``; the rest is delivered by the test."""
        self.deliver[request.request_id] = deliver
        yield accepted("a")
        await self.ends.wait()
        yield finished(1)


async def test_a_delta_that_nothing_precedes_is_processed_at_once() -> None:
    source, seen = Pushing(), []

    def at_once(index: int, delta: Delta) -> bool:
        seen.append((index, delta.text))
        return delta.text != "refused"

    choices = Choices(source.generate, REQUESTS[:2])
    await choices.accepted()
    choices.at_once = at_once
    first, second = (source.deliver[one.request_id] for one in REQUESTS[:2])
    first(Delta("unread", (1,)))
    assert seen == []
    assert await choices.next() == (0, Delta("unread", (1,)))
    waiting = asyncio.ensure_future(choices.next())
    await asyncio.sleep(0)
    second(Delta("a", (1,)))
    first(Delta("b", (1,)))
    assert seen == [(1, "a"), (0, "b")]
    first(Delta("refused", (1,)))
    second(Delta("behind it", (1,)))  # must not overtake it
    assert seen == [(1, "a"), (0, "b"), (0, "refused")]
    assert await waiting == (0, Delta("refused", (1,)))
    assert await choices.next() == (1, Delta("behind it", (1,)))
    source.ends.set()
    assert {index for index, _ in await drain(choices)} == {0, 1}
    await choices.aclose()


async def test_deltas_that_are_processed_at_once_are_no_silence() -> None:
    source = Pushing()
    choices = Choices(source.generate, REQUESTS[:1])
    await choices.accepted()
    choices.at_once = lambda *_: True
    waiting = asyncio.ensure_future(choices.next(timeout_s=0.03))
    for _ in range(10):
        await asyncio.sleep(0.01)
        source.deliver[REQUESTS[0].request_id](Delta("a", (1,)))
    assert not waiting.done()
    with pytest.raises(TimeoutError):
        await waiting
    await choices.aclose()
