"""What a new request can reuse of the live context, and when it must not be trusted."""

from __future__ import annotations

import pytest

from rkserve.board.kv import LiveContext, Plan

TURN_1 = (1, 2, 3)
ANSWER = (10, 11, 12)
TURN_2 = (*TURN_1, *ANSWER, 4, 5)


def after_turn_1(*, append: bool = True, positions: int = 6) -> LiveContext:
    context = LiveContext(append=append)
    assert context.plan(TURN_1) == Plan(clear=False, send=TURN_1, reused=0)
    context.forget()
    context.settle((*TURN_1, *ANSWER), positions)
    return context


@pytest.mark.parametrize(
    ("positions", "prompt", "plan"),
    [
        pytest.param(6, TURN_2, Plan(False, (4, 5), 6), id="the conversation goes on"),
        pytest.param(5, TURN_2, Plan(False, (12, 4, 5), 5), id="the last token is not in the KV"),
        pytest.param(6, (9, *TURN_2), Plan(True, (9, *TURN_2), 0), id="another conversation"),
        pytest.param(6, TURN_2[:6], Plan(True, TURN_2[:6], 0), id="the same ids: one must be sent"),
        pytest.param(6, TURN_1, Plan(True, TURN_1, 0), id="a shorter prompt: no cutting back"),
        pytest.param(
            6, (*TURN_1, 10, 99, 12, 4), Plan(True, (*TURN_1, 10, 99, 12, 4), 0), id="an edit"
        ),
    ],
)
def test_a_request_reuses_the_whole_live_context_or_nothing(
    positions: int, prompt: tuple[int, ...], plan: Plan
) -> None:
    assert after_turn_1(positions=positions).plan(prompt) == plan


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(7, id="more than was ever sent"),
        pytest.param(4, id="only the last input: the runtime did not append"),
        pytest.param(0, id="nothing"),
        pytest.param(-1, id="unknown"),
    ],
)
def test_a_size_that_cannot_be_true_is_reported_and_the_context_forgotten(positions: int) -> None:
    context = LiveContext(append=True)
    assert not context.settle((*TURN_1, *ANSWER), positions)
    assert context.positions == 0
    assert context.plan(TURN_2) == Plan(clear=True, send=TURN_2, reused=0)


def test_a_forgotten_context_is_cleared_before_the_next_run() -> None:
    context = after_turn_1()
    assert context.positions == 6
    context.forget()
    assert context.positions == 0
    assert context.plan(TURN_2) == Plan(clear=True, send=TURN_2, reused=0)


def test_a_runtime_that_cannot_append_gets_the_whole_prompt() -> None:
    assert after_turn_1(append=False).plan(TURN_2) == Plan(clear=True, send=TURN_2, reused=0)


def test_an_empty_context_needs_no_clear() -> None:
    context = after_turn_1()
    context.reset()
    assert context.plan(TURN_2) == Plan(clear=False, send=TURN_2, reused=0)
