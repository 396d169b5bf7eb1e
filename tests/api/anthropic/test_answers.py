"""Anthropic's messages, their streams, and its error object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.anthropic.answers import MESSAGES, MessageAnswer, anthropic_error
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall
from rkserve.api.parsing.answer_parser import PLAIN, ParserOptions
from rkserve.api.parsing.tool_choice import as_object
from rkserve.api.parsing.tools.formats import FORMATS
from rkserve.core.errors import (
    ContextOverflow,
    EngineDied,
    QueueFull,
    RequestError,
    UnsupportedParameter,
)
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Kv,
    Paused,
    Thinking,
    Timings,
    Usage,
)

READING = ParserOptions(
    thinking=Thinking("<think>", "</think>"), form=FORMATS["hermes"], names=frozenset({"look"})
)


TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0)


def text(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


def made(reading: ParserOptions = PLAIN, **keys: Any) -> MessageAnswer:
    call = ChatCall("tiny", 9, **{"stop": ("##",), **keys})
    stamp = AnswerOrigin("tiny", "1.3.0", prompt_tokens=6, reading=reading)
    return MessageAnswer(call, "msg_1", 1700000000, stamp)


def ended(
    reason: FinishReason = FinishReason.STOP, by: str | None = None, tokens: int = 2
) -> Finished:
    return Finished(reason, Usage(6, tokens, 2), TIMINGS, (), by)


def events(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert told["type"] == name.removeprefix("event: ")
        found.append(told)
    return found


def test_a_stream_is_one_message_with_one_block_of_text() -> None:
    answer = made()
    raw = answer.opening(0) + answer.delta(0, Delta("", (6,)))
    raw += answer.delta(0, Delta("Grüß\n", (7,))) + answer.delta(0, Delta(' "you"', (8,)))
    start, block, *pieces, stop, delta, end = events(
        raw + answer.finish(0, ended()) + answer.closing()
    )
    assert start["message"]["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert (start["message"]["id"], start["message"]["content"]) == ("msg_1", [])
    assert block == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert [piece["delta"] for piece in pieces] == [
        {"type": "text_delta", "text": "Grüß\n"},
        {"type": "text_delta", "text": ' "you"'},
    ]
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 2,
    }
    assert delta["timings"]["tokens_per_s"] == 20.0
    assert delta["weight_version"] == "default"
    assert end == {"type": "message_stop"}


def test_an_answer_without_words_has_an_empty_block() -> None:
    answer = made()
    kinds = [one["type"] for one in events(answer.opening(0) + answer.finish(0, ended()))]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta"]


def test_a_whole_message_says_what_a_stream_says() -> None:
    answer = made()
    answer.add(0, Delta("Hello", (1, 2)))
    answer.add(0, Delta(" you", (3,), retract=2))
    answer.end(0, ended())
    told = answer.whole()
    assert told["content"] == [{"type": "text", "text": "Hel you"}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "tiny")
    assert told["usage"]["output_tokens"] == 2
    assert told["timings"]["cached"] == 2


@pytest.mark.parametrize(
    ("finished", "told"),
    [
        pytest.param(ended(), ("end_turn", None), id="the model ended"),
        pytest.param(ended(by="##"), ("stop_sequence", "##"), id="a stop sequence came"),
        pytest.param(ended(by="own"), ("end_turn", None), id="a hook of the board stopped it"),
        pytest.param(ended(FinishReason.LENGTH, tokens=9), ("max_tokens", None), id="the limit"),
        pytest.param(
            ended(FinishReason.LENGTH, tokens=8),
            ("model_context_window_exceeded", None),
            id="the end of the context",
        ),
        pytest.param(ended(FinishReason.ABORT), ("abort", None), id="somebody aborted it"),
    ],
)
def test_the_reason_tells_the_truth(finished: Finished, told: tuple[str, str | None]) -> None:
    answer = made()
    answer.end(0, finished)
    whole = answer.whole()
    assert (whole["stop_reason"], whole["stop_sequence"]) == told


@pytest.mark.parametrize("reading", [PLAIN, READING], ids=["words", "anything"])
def test_words_that_are_taken_back_are_said_by_a_ping(reading: ParserOptions) -> None:
    answer = made(reading)
    answer.opening(0)
    answer.delta(0, Delta("abc", (1,)))
    void, more = events(answer.delta(0, Delta("X", (), retract=3)))
    assert void == {"type": "ping", "rkserve": {"retract": 3}}
    assert more["delta"] == {"type": "text_delta", "text": "X"}


SPOKEN = (
    "<think>\nHm.\n</think>\n\nLet me look."
    '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
)


def test_thoughts_and_calls_are_blocks_of_their_own() -> None:
    answer = made(READING)
    raw = answer.opening(0)
    for at in range(0, len(SPOKEN), 4):
        raw += answer.delta(0, Delta(SPOKEN[at : at + 4], (at,)))
    told = events(raw + answer.finish(0, ended()) + answer.closing())
    starts = [one for one in told if one["type"] == "content_block_start"]
    kinds = [one["content_block"]["type"] for one in starts]
    assert kinds == ["thinking", "text", "tool_use"]
    assert starts[2]["content_block"]["name"] == "look"
    stops = [one["index"] for one in told if one["type"] == "content_block_stop"]
    assert [one["index"] for one in starts] == stops == [0, 1, 2]
    said = ["", "", ""]
    for one in told:
        if one["type"] == "content_block_delta":
            (text,) = (value for key, value in one["delta"].items() if key != "type")
            said[one["index"]] += text
    assert (said[0], said[1].strip(), json.loads(said[2])) == ("Hm.", "Let me look.", {"at": 1})
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_whole_message_has_them_too() -> None:
    answer = made(READING)
    answer.add(0, Delta(SPOKEN, (1,)))
    answer.end(0, ended())
    whole = answer.whole()
    thinking, words, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (words["type"], words["text"].strip()) == ("text", "Let me look.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": 1})
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param('{"a": 1}', {"a": 1}, id="an object"),
        pytest.param("", {}, id="nothing"),
        pytest.param('{"a": tru}', {"raw_arguments": '{"a": tru}'}, id="no JSON"),
        pytest.param("[1]", {"raw_arguments": "[1]"}, id="no object"),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(written: str, read: Any) -> None:
    assert as_object(written) == read


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        pytest.param({}, {"type": "ping"}, id="nobody asked"),
        pytest.param(
            {"pause_on": ("x",)},
            {
                "type": "ping",
                "rkserve": {
                    "status": "paused",
                    "choice": 0,
                    "by": "x",
                    "tokens": 3,
                    "kv": "kept",
                },
            },
            id="asked for",
        ),
    ],
)
def test_a_pause_is_a_ping(keys: dict[str, Any], told: dict[str, Any]) -> None:
    assert events(made(**keys).paused(0, Paused("x", 3, Kv.KEPT))) == [told]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        pytest.param(RequestError("no", "x"), 400, "invalid_request_error", None, id="request"),
        pytest.param(
            UnsupportedParameter("no", "x"),
            400,
            "invalid_request_error",
            "unsupported_parameter",
            id="cannot",
        ),
        pytest.param(QueueFull(3, 7), 429, "rate_limit_error", "queue_full", id="full"),
        pytest.param(EngineDied("a", "x"), 503, "overloaded_error", "board_failed", id="lost"),
        pytest.param(ZeroDivisionError("secret"), 500, "api_error", "internal_error", id="a bug"),
    ],
)
def test_errors_are_anthropic_s_object(
    error: Exception, status: int, kind: str, code: str | None
) -> None:
    found, headers, body = anthropic_error(error)
    assert (found, body["type"], set(body)) == (status, "error", {"type", "error"})
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert ("retry-after" in headers) == (status in {429, 503})
    assert "secret" not in body["error"]["message"]
    (event,) = events(MESSAGES.broken(error))
    assert event == body


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for() -> None:
    told = anthropic_error(ContextOverflow(5000, 4096))[2]["error"]
    assert told["message"].startswith("prompt is too long: 5000 tokens > 4096 maximum. ")
    assert told["code"] == "context_length_exceeded"
    early = anthropic_error(ContextOverflow(5000, 4096, at_least=True))[2]["error"]["message"]
    assert early.startswith("prompt is too long: at least 5000 tokens > 4096 maximum. ")
