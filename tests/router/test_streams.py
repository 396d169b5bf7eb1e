"""The streams of a Router: when they have brought all that boards sent before a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rkserve.core.board_report import Emitted
from rkserve.core.desired_state import Scope
from rkserve.core.errors import BoardSilent
from rkserve.core.messages import Delta, GenerateRequest, Kv, Paused
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Answers
from rkserve.router.streams import PASSAGE_S, OpenStreams
from tests.support.boards.fake_boards import eventually, finished
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
