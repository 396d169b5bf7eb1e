"""Answers side by side."""

from __future__ import annotations

import pytest

from rkserve.bench.capture import exchange, marked, pairs, render, to_json, with_answers
from rkserve.bench.figures import Slo, figures
from rkserve.bench.outcome import CapturedExchange
from rkserve.bench.player import NO_ANSWER
from rkserve.bench.results import RunResult
from tests.support.values.bench_load import answered, at_once, failed, played


def test_what_only_one_of_two_texts_says_is_marked() -> None:
    assert marked("the red house", "the blue house") == "the [-red-]{+blue+} house"
    assert marked("same", "same") == "same"
    assert marked("", "new") == "{+new+}"


def test_both_answer_the_same_prompts() -> None:
    trace = at_once(1, turns=2)
    first = [answered(turn=0, text="one"), failed(turn=1)]
    given = with_answers(trace, first)
    assert [turn.answer for turn in given.sessions[0].turns] == ["one", NO_ANSWER]


def test_answers_are_put_beside_each_other() -> None:
    trace = at_once(4)
    said = {"s0": ("a b c", "a b c"), "s1": ("a b c", "a x c"), "s2": ("a", "a b")}
    first = [answered(session=name, text=one) for name, (one, _) in said.items()]
    second = [answered(session=name, text=two) for name, (_, two) in said.items()]
    found = pairs(trace, [*first, failed(session="s3")], [*second, answered(session="s3")])
    assert [one.first_at for one in found] == [None, 2, 1, None]
    assert [one.same for one in found] == [True, False, False, False]
    assert found[1].alike == pytest.approx(0.8)
    text = render(("left", "right"), found)
    assert "a [-b-]{+x+} c" in text
    assert "left: refused 429 queue_full" in text
    told = to_json(("left", "right"), found)
    assert (told["prompts"], told["same"], told["failed"]) == (4, 1, 1)
    assert told["pairs"][1]["answers"]["right"]["text"] == "a x c"


def test_a_prompt_that_was_not_asked_twice_is_left_out() -> None:
    assert pairs(at_once(1), [answered(text="a")], []) == []


def test_code_in_an_answer_cannot_end_its_block() -> None:
    text = "```\nrm -rf\n```"
    found = pairs(at_once(1), [answered(text=text)], [answered(text=f"{text} ")])
    assert "\n````\n" in render(("a", "b"), found)


def test_what_is_too_long_to_compare_is_shown_all_the_same() -> None:
    words = " ".join(f"w{number}" for number in range(3000))
    assert marked(f"{words} end", f"{words} end") == f"{words} end"
    shown = marked(f"{words} one", f"{words} two")
    assert shown.startswith(words[:100])
    assert "one" in shown
    assert "two" in shown


@pytest.mark.parametrize(
    ("timings", "step_s", "expected"),
    [
        ({"tokens_per_s": 12.5}, 0.1, 12.5),  # the board's own rate goes first
        ({}, 0.1, 10.0),
        ({}, 0.0, None),  # the whole answer was read at once
    ],
)
def test_the_rate_is_that_of_the_board_else_of_the_stream(
    timings: dict[str, float], step_s: float, expected: float | None
) -> None:
    one = answered(step_s=step_s, captured=CapturedExchange({}, timings=timings))
    run = played([one])
    run_result = RunResult(run, figures(run, Slo()))
    assert exchange(run_result, one)["tokens_per_s"] == expected
