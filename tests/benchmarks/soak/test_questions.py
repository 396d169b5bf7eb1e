"""Answers of all APIs as the soak reads them: whole, streamed, failed, and cut short in order."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.exchange import Truth
from benchmarks.soak.questions import (
    MisshapenAnswer,
    Question,
    error_of,
    next_turn,
    ordinary_questions,
    read_given,
)
from rkserve.bench.connection import Incoming

SET = ordinary_questions("m", 8)
USAGE = {"prompt_tokens": 7, "completion_tokens": 2}
TRUTH = Truth("ab", "length", 7, 2)


def question(kind: str) -> Question:
    return SET.single[kind][0]


def incoming(*events: bytes) -> Incoming:
    return Incoming(0.0, status=200, events=[(1.0, event) for event in events])


def body(value: Any) -> Incoming:
    return incoming(json.dumps(value).encode())


def stream(*values: Any, done: bool = True) -> Incoming:
    events = [f"event: x\ndata: {json.dumps(value)}".encode() for value in values]
    return incoming(b": ping", *events, *([b"data: [DONE]"] if done else []))


def chunk(text: str = "", **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"delta": {"content": text}, **more}]}


END = {"id": "c", "choices": [], "usage": USAGE, "timings": {"continued": 2}}
RESPONSE = {
    "id": "r",
    "status": "incomplete",
    "error": None,
    "output": [{"content": [{"text": "ab"}]}],
    "usage": {"input_tokens": 7, "output_tokens": 2},
}
MESSAGE_USAGE = {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 2}
MESSAGE_END = {
    "type": "message_delta",
    "delta": {"stop_reason": "max_tokens"},
    "usage": MESSAGE_USAGE,
}


def piece(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "delta": {"text": text}}


@pytest.mark.parametrize(
    ("kind", "answer", "truth"),
    [
        pytest.param(
            "chat",
            body(
                {
                    "id": "c",
                    "choices": [{"message": {"content": "ab"}, "finish_reason": "length"}],
                    "usage": USAGE,
                }
            ),
            TRUTH,
            id="chat",
        ),
        pytest.param(
            "completion",
            body(
                {"id": "c", "choices": [{"text": "ab", "finish_reason": "length"}], "usage": USAGE}
            ),
            TRUTH,
            id="completion",
        ),
        pytest.param(
            "chat, streamed",
            stream(chunk("a"), chunk("b"), chunk(finish_reason="length"), END),
            TRUTH,
            id="streamed chat",
        ),
        pytest.param(
            "response", body(RESPONSE), replace(TRUTH, finish="incomplete"), id="response"
        ),
        pytest.param(
            "response, streamed",
            stream(
                {"type": "response.output_text.delta", "delta": "a"},
                {"type": "response.output_text.delta", "delta": "b"},
                {"type": "response.incomplete", "response": RESPONSE},
            ),
            replace(TRUTH, finish="incomplete"),
            id="streamed response",
        ),
        pytest.param(
            "message",
            body(
                {
                    "id": "m",
                    "content": [{"text": "ab"}],
                    "stop_reason": "max_tokens",
                    "usage": MESSAGE_USAGE,
                }
            ),
            replace(TRUTH, finish="max_tokens"),
            id="message",
        ),
        pytest.param(
            "message, streamed",
            stream(
                {"type": "message_start", "message": {"id": "m"}},
                piece("a"),
                piece("b"),
                MESSAGE_END,
                {"type": "message_stop"},
                done=False,
            ),
            replace(TRUTH, finish="max_tokens"),
            id="streamed message",
        ),
    ],
)
def test_an_answer_is_read_from_each_api(kind: str, answer: Incoming, truth: Truth) -> None:
    assert read_given(question(kind), answer).truth == truth


def test_vectors_that_differ_in_their_last_digit_are_not_the_same() -> None:
    def vectors(value: float) -> Incoming:
        data = [{"index": 1, "embedding": [0.5]}, {"index": 0, "embedding": [value]}]
        return body({"data": data, "usage": {"prompt_tokens": 9}})

    first, again, other = (
        read_given(question("embedding"), vectors(value)).truth for value in (0.25, 0.25, 0.2500001)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        pytest.param("chat, streamed", stream(chunk("a"), done=False), id="no end at all"),
        pytest.param("chat, streamed", stream(chunk("a")), id="no finish reason"),
        pytest.param(
            "chat, streamed", stream(chunk("a", finish_reason="stop"), done=False), id="no [DONE]"
        ),
        pytest.param(
            "response, streamed",
            stream({"type": "response.output_text.delta", "delta": "a"}),
            id="a response without its last event",
        ),
        pytest.param(
            "response, streamed",
            stream({"type": "response.completed", "response": RESPONSE}),
            id="a response whose deltas are not its text",
        ),
        pytest.param(
            "message, streamed", stream(piece("a"), MESSAGE_END, done=False), id="message"
        ),
        pytest.param("chat", incoming(b"<html>"), id="not JSON"),
        pytest.param("chat", body({"id": "c", "choices": []}), id="no choice"),
    ],
)
def test_an_answer_that_ends_in_order_before_its_end_is_no_answer(
    kind: str, answer: Incoming
) -> None:
    with pytest.raises(MisshapenAnswer):
        read_given(question(kind), answer)


@pytest.mark.parametrize(
    ("kind", "answer", "code"),
    [
        ("chat, streamed", stream(chunk("a"), {"error": {"code": "board_failed"}}), "board_failed"),
        (
            "response, streamed",
            stream({"type": "response.failed", "response": {"error": {"code": "server_error"}}}),
            "server_error",
        ),
        (
            "message, streamed",
            stream(piece("a"), {"type": "error", "error": {"code": "x"}}, done=False),
            "x",
        ),
    ],
)
def test_a_failure_in_mid_stream_is_an_error(kind: str, answer: Incoming, code: str) -> None:
    read = read_given(question(kind), answer)
    assert read.truth is None
    assert read.error is not None
    assert read.error["code"] == code


def test_versions_and_failovers_of_a_stream_are_read() -> None:
    spans = [{"version": "tone@v1"}, {"version": "tone@v2"}]
    last = chunk("b", finish_reason="length", weight_versions=spans)
    read = read_given(SET.adapter[0], stream(chunk("a"), last, END))
    assert (read.name, read.version, read.continued) == ("c", "tone@v1+tone@v2", 2)


@pytest.mark.parametrize(
    ("content", "good"),
    [
        (b'{"error": {"message": "m", "type": "t", "code": null}}', True),
        (b'{"error": {"message": "m"}}', False),
        (b'{"error": "m"}', False),
        (b"Internal Server Error", False),
    ],
)
def test_only_an_error_object_is_one(content: bytes, *, good: bool) -> None:
    assert (error_of(incoming(content)) is not None) is good


def test_every_kind_streams_as_it_says_and_numbers_are_unique() -> None:
    every = [one for kind in SET.single.values() for one in kind]
    assert all(one.streamed is one.kind.endswith(", streamed") for one in every)
    numbers = [one.number for one in [*every, *SET.adapter]]
    assert len(numbers) == len(set(numbers))
    assert question("chat").same == question("chat, streamed").same


def test_a_turn_has_the_whole_history_before_it() -> None:
    first = next_turn(1, "m", 8, [], 3)
    history = [*first.body["messages"], {"role": "assistant", "content": "said"}]
    second = next_turn(2, "m", 8, history, 3)
    assert second.body["messages"][:2] == history
    assert first.same != second.same
