"""Events of an upstream as deltas and an end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.upstream.answers import AnswerTimes, NoAnswer, UpstreamAnswer, message_of
from rkserve.core.messages import CallPiece, FinishReason, UpstreamDelta

TIMES = AnswerTimes(10.0, 30.0)


def fed(answer: UpstreamAnswer, *events: Any) -> list[UpstreamDelta]:
    found = [answer.event(json.dumps(event)) for event in events]
    return [one for one in found if one is not None]


def delta(reason: str | None = None, **parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": reason}]}


def call(index: int, **function: str) -> dict[str, Any]:
    return {"index": index, "id": f"id{index}", "function": function}


def test_text_reasoning_and_the_reason_of_the_end() -> None:
    answer = UpstreamAnswer()
    found = fed(
        answer,
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(reasoning=" well"),
        delta(content="A"),
        delta("length", content="B"),
    )
    assert [(one.reasoning, one.text) for one in found] == [
        ("hm", ""),
        (" well", ""),
        ("", "A"),
        ("", "B"),
    ]
    assert answer.ended
    assert answer.finished(TIMES).reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("tool_calls", FinishReason.STOP),
        ("eos_token", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("content_filter", FinishReason.FILTERED),
        ("abort", FinishReason.ABORT),
    ],
)
def test_finish_reasons(told: str, reason: FinishReason) -> None:
    answer = UpstreamAnswer()
    fed(answer, delta(told))
    assert answer.finished(TIMES).reason is reason


def test_usage_goes_before_the_count_of_events() -> None:
    answer = UpstreamAnswer(prompt_tokens=4)
    fed(answer, delta(content="A"), delta("stop", content="B"))
    assert answer.usage().prompt_tokens == 4
    assert answer.usage().completion_tokens == 2
    assert answer.rest() is None
    usage = {
        "prompt_tokens": 30,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 10},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    fed(answer, {"choices": [], "usage": usage})
    rest = answer.rest()
    assert rest is not None
    assert rest.counted == 5
    end = answer.finished(TIMES)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (30, 7)
    assert (end.usage.cached_tokens, end.usage.reasoning_tokens) == (10, 3)
    assert (end.timings.prefill_tokens, end.timings.decode_tokens) == (20, 6)


def test_tool_calls_in_pieces_and_whole() -> None:
    answer = UpstreamAnswer()
    found = fed(
        answer,
        delta(tool_calls=[call(3, name="a", arguments="")]),
        delta(tool_calls=[call(3, name="a", arguments='{"x":')]),
        delta(tool_calls=[call(3, arguments="1}"), call(4, name="b", arguments="{}")]),
        delta("tool_calls"),
    )
    assert [piece for one in found for piece in one.calls] == [
        CallPiece(0, "id3", "a", ""),
        CallPiece(0, arguments='{"x":'),
        CallPiece(0, arguments="1}"),
        CallPiece(1, "id4", "b", "{}"),
    ]
    whole = UpstreamAnswer()
    called = [{"id": "z", "type": "function", "function": {"name": "a", "arguments": "{}"}}]
    message = {"message": {"content": "I look", "tool_calls": called}, "finish_reason": "stop"}
    (one,) = fed(whole, {"choices": [message]})
    assert one.text == "I look"
    assert one.calls == (CallPiece(0, "z", "a", "{}"),)


def test_a_stop_string_that_ended_the_answer_is_known_from_vllm() -> None:
    answer = UpstreamAnswer(("END",))
    fed(answer, {"choices": [{"text": "x", "finish_reason": "stop", "stop_reason": "END"}]})
    assert answer.finished(TIMES).stopped_by == "END"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("{oops", "not JSON"),
        ("[1]", "is no object"),
        ('{"choices": 7}', "'choices' is no list"),
        ('{"choices": [3]}', "'choices[0]' is no object"),
        ('{"choices": [{"delta": 4}]}', "'delta' is no object"),
        ('{"choices": [{"delta": {"content": 4}}]}', "'content' is no text"),
        ('{"choices": [{"delta": {"tool_calls": 4}}]}', "'tool_calls' is no list"),
        ('{"choices": [{"delta": {"tool_calls": [{}]}}]}', "'function' is no object"),
        ('{"choices": [{"delta": {"tool_calls": [{"function": {}}]}}]}', "has no name"),
        ('{"error": {"message": "out of memory"}}', "out of memory"),
        ('{"error": "out of memory"}', "out of memory"),
        ('{"error": {}}', "gave no reason"),
    ],
)
def test_what_is_no_event_of_an_answer_is_an_error(event: str, words: str) -> None:
    with pytest.raises(NoAnswer, match=words.replace("[", r"\[").replace("]", r"\]")):
        UpstreamAnswer().event(event)


def test_calls_that_alternate_cannot_be_passed_on() -> None:
    answer = UpstreamAnswer()
    first, second = call(0, name="a", arguments=""), call(1, name="b", arguments="")
    fed(answer, delta(tool_calls=[first, second]))
    with pytest.raises(NoAnswer, match="earlier tool call"):
        fed(answer, delta(tool_calls=[call(0, arguments="{}")]))


def test_messages_of_errors() -> None:
    assert message_of(b'{"error": {"message": "too\\n long", "param": "x"}}') == ("too long", "x")
    assert message_of(b'{"error": "no"}') == ("no", None)
    assert message_of(b'{"message": "no"}') == ("no", None)  # vLLM's older form
    assert message_of(b"<html>") == ("it gave no reason", None)
    long = message_of(json.dumps({"error": {"message": "a" * 1000}}).encode())[0]
    assert len(long) == 303
