"""Truths of a soak: asked twice at rest, and learned of contents that are new during the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks.harness.exchange import Truth
from benchmarks.soak.judge import Ending, Outcome
from benchmarks.soak.operator import AdapterHistory
from benchmarks.soak.questions import Question, ReadAnswer, ordinary_questions
from benchmarks.soak.script import TALKS, TURNS, Script, with_adapter_truths, with_truths
from rkserve.bench.processes import BenchFailed

HISTORY = AdapterHistory({"v1": 1, "v2": 2})
UNTRIED = Script.untried(ordinary_questions("m", 8), HISTORY.seed_of)


def truth(text: str) -> Truth:
    return Truth(text, "length", 1, 1)


class Echo:
    """A cluster that answers each question by its name, but for ``odd`` in the ``nth`` call."""

    def __init__(self, odd: str = "", nth: int = 0) -> None:
        self._odd, self._nth = odd, nth
        self.asked: list[Question] = []

    async def __call__(self, script: Script, question: Question) -> Outcome:
        self.asked.append(question)
        times = sum(one.number == question.number for one in self.asked)
        text = "odd" if question.kind == self._odd and times == self._nth else question.same
        outcome = Outcome(question.kind, Ending.WHOLE, 0.0, 1.0, found=truth(text))
        return replace(outcome, truth=script.truths.get(question.number))


def test_everything_is_asked_twice_and_conversations_go_on_from_their_own_answers() -> None:
    echo = Echo()
    script = asyncio.run(with_truths(echo, UNTRIED, "m", 8))
    assert len(script.conversations) == TALKS
    last = script.conversations[0][-1]
    said = [one["content"] for one in last.body["messages"] if one["role"] == "assistant"]
    assert said == ["talk 0.0", "talk 0.1"]
    assert len(last.body["messages"]) == 2 * TURNS - 1
    assert set(script.truths) == {one.number for one in script.plain}
    assert len(echo.asked) == 2 * len(script.plain)


@pytest.mark.parametrize(
    ("kind", "nth", "why"),
    [
        ("chat", 2, "the same prompt was answered differently at rest"),
        ("chat, streamed", 1, "differs from the same without streaming"),
    ],
)
def test_truths_that_differ_are_none(kind: str, nth: int, why: str) -> None:
    with pytest.raises(BenchFailed, match=why):
        asyncio.run(with_truths(Echo(kind, nth), UNTRIED, "m", 8))


def test_an_adapter_s_truth_is_that_of_its_content() -> None:
    script = asyncio.run(with_adapter_truths(Echo(), UNTRIED, 1))
    question = script.adapter[0]
    assert script.truth(question, ReadAnswer(truth("x"), version="tone@v1")) == truth("adapter 0")
    assert script.truth(question, ReadAnswer(truth("x"), version="tone@v9")) is None


def test_of_a_new_content_the_first_answer_that_was_not_moved_is_the_truth() -> None:
    question = UNTRIED.adapter[0]
    script = replace(UNTRIED, learned=type(UNTRIED.learned)())

    def given(text: str, continued: int = 0) -> ReadAnswer:
        return ReadAnswer(truth(text), version="tone@v2", continued=continued)

    assert script.truth(question, given("moved", 1)) == truth("moved")
    assert script.truth(question, given("first")) == truth("first")
    assert script.truth(question, given("second")) == truth("first")
