"""Several generations as one stream: all accepted first, then merged, and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from rkserve.core.errors import BoardFailed, DeadlineExceeded, QueueFull
from rkserve.core.messages import Accepted, Delta, Event, Finished, GenerateRequest, Paused
from rkserve.router.streams import WAITING, Choices, Generate
from tests.support.boards.fake_boards import FakeBoards, Step, accepted, answer, finished, report

pytestmark = pytest.mark.virtual_time

REQUESTS = [GenerateRequest(str(number), "sim-chat", (1,), 4) for number in range(3)]


def scripted(*scripts: Sequence[Step]) -> tuple[FakeBoards, Generate]:
    """Let the choice with number k play script k."""
    boards = FakeBoards(
        [report(str(k)) for k in range(len(scripts))],
        {str(k): [script] for k, script in enumerate(scripts)},
    )

    def generate(request: GenerateRequest) -> AsyncGenerator[Event, None]:
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
