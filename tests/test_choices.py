"""Several generations as one stream: all accepted first, then merged, and closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
from fake_boards import FakeBoards, Step, accepted, answer, finished, report
from own_time import run_loop

from rkserve.deployments.choices import Choices, Generate
from rkserve.errors import BoardFailed, QueueFull
from rkserve.messages import Accepted, Delta, Event, Finished, GenerateRequest, Paused

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


def test_the_choices_are_merged_and_each_keeps_its_order() -> None:
    async def main() -> None:
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

    run_loop(main())


def test_a_fast_choice_loses_nothing_while_a_slow_one_is_accepted() -> None:
    async def main() -> None:
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

    run_loop(main())


def test_a_refusal_of_one_choice_is_raised_and_closing_frees_the_rest() -> None:
    async def main() -> None:
        never = asyncio.Event()
        boards, generate = scripted([accepted("a"), never], [QueueFull(1, 1)])
        choices = Choices(generate, REQUESTS[:2])
        with pytest.raises(QueueFull):
            await choices.accepted()
        await choices.aclose()
        assert boards.running == 0

    run_loop(main())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(BoardFailed("a", "SIGSEGV"), id="one of ours"),
        pytest.param(ZeroDivisionError("a bug"), id="a bug"),
    ],
)
def test_an_error_of_one_choice_is_the_error_of_the_call(error: Exception) -> None:
    async def main() -> None:
        never = asyncio.Event()
        boards, generate = scripted(
            [accepted("a"), Delta("text", (1,)), error], [accepted("b"), never]
        )
        choices = Choices(generate, REQUESTS[:2])
        await choices.accepted()
        assert await choices.next() == (0, Delta("text", (1,)))
        with pytest.raises(type(error), match=str(error.args[-1])):
            await choices.next()
        await choices.aclose()
        assert boards.running == 0

    run_loop(main())


def test_a_silence_is_a_timeout_and_nothing_is_lost() -> None:
    async def main() -> None:
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

    run_loop(main())


def test_closing_before_anything_was_accepted_frees_the_boards() -> None:
    async def main() -> None:
        never = asyncio.Event()
        boards, generate = scripted([never], [accepted("b"), never])
        choices = Choices(generate, REQUESTS[:2])
        await asyncio.sleep(0.01)
        assert boards.running == 2
        await choices.aclose()
        await choices.aclose()  # twice does no harm
        assert boards.running == 0

    run_loop(main())


def test_an_acceptance_names_what_the_board_ignored() -> None:
    async def main() -> None:
        _, generate = scripted([accepted("a", ("temperature",)), finished(0)])
        choices = Choices(generate, REQUESTS[:1])
        (first,) = await choices.accepted()
        assert isinstance(first, Accepted)
        assert first.sampling_ignored == ("temperature",)
        await choices.aclose()

    run_loop(main())
