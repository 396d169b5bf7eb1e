"""Ollama's lines, whole answers and error object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.ollama.answers import (
    CHAT,
    GENERATE,
    ChatLines,
    GenerateLines,
    loaded,
    ollama_error,
)
from rkserve.api.ollama.requests import parse_chat, parse_generate
from rkserve.api.parsing.answer_parser import PLAIN, ParserOptions
from rkserve.api.parsing.tools.formats import FORMATS
from rkserve.core.errors import QueueFull, RequestError
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


HELLO = {"role": "user", "content": "Hello"}


TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0, paused_ms=5.0)


AT = 1700000000


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": [HELLO], **keys}).encode())


def generate(**keys: Any) -> ChatCall | CompletionCall:
    return parse_generate(json.dumps({"model": "m", "prompt": "Hello", **keys}).encode())


def lines(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode().split("\n")[:-1]]


def talk(reading: ParserOptions = PLAIN, **keys: Any) -> ChatLines:
    stamp = AnswerOrigin("tiny", "1.3.0", reading=reading)
    return ChatLines(ChatCall("tiny", None, **keys), "ollama-1", AT, stamp)


def test_a_stream_is_lines_of_which_the_last_one_has_the_counts() -> None:
    answer = talk()
    raw = answer.opening(0) + answer.delta(0, Delta("Grüß\n", (1,)))
    raw += answer.delta(0, Delta(' "you"', (2,))) + answer.delta(0, Delta("", (3,)))
    raw += answer.finish(0, Finished(FinishReason.LENGTH, Usage(6, 2, 2), TIMINGS))
    *pieces, last = lines(raw + answer.closing())
    assert [one["message"]["content"] for one in pieces] == ["Grüß\n", ' "you"']
    assert {(one["model"], one["created_at"], one["done"]) for one in pieces} == {
        ("tiny", "2023-11-14T22:13:20Z", False)
    }
    own = last.pop("rkserve")
    assert last == {
        "model": "tiny",
        "created_at": "2023-11-14T22:13:20Z",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "length",
        "total_duration": 126_000_000,
        "load_duration": 0,
        "prompt_eval_count": 6,
        "prompt_eval_duration": 20_000_000,
        "eval_count": 2,
        "eval_duration": 100_000_000,
    }
    assert (own["id"], own["timings"]["cached"]) == ("ollama-1", 2)


def test_a_whole_answer_is_one_object() -> None:
    call = ChatCall("tiny", None)
    answer = GenerateLines(call, "ollama-1", AT, AnswerOrigin("tiny", "1.3.0"))
    answer.add(0, Delta("Hello", (1,)))
    answer.add(0, Delta("p", (2,), retract=2))
    answer.end(0, Finished(FinishReason.STOP, Usage(6, 2), TIMINGS))
    told = answer.whole()
    assert (told["response"], told["done"], told["done_reason"]) == ("Help", True, "stop")
    assert "message" not in told


def test_pauses_and_words_that_are_taken_back_are_said_under_a_key_of_their_own() -> None:
    answer = talk(pause_on=("x",))
    (paused,) = lines(answer.paused(0, Paused("x", 3, Kv.KEPT)))
    assert (paused["rkserve"]["status"], paused["message"]["content"]) == ("paused", "")
    for one in (answer, talk(READING)):
        one.delta(0, Delta("abc", (1,)))
        void, more = lines(one.delta(0, Delta("X", (), retract=3)))
        assert (void["rkserve"], void["message"]["content"]) == ({"retract": 3}, "")
        assert more["message"]["content"] == "X"
    (silent,) = lines(talk().paused(0, Paused("x", 3, Kv.KEPT)))
    assert "rkserve" not in silent


def test_thoughts_have_a_key_of_their_own_and_calls_come_as_a_whole() -> None:
    said = '<think>Hm.</think>Look:<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    answer, raw = talk(READING), b""
    for at in range(0, len(said), 4):
        raw += answer.delta(0, Delta(said[at : at + 4], (at,)))
    end = Finished(FinishReason.STOP, Usage(6, 2), TIMINGS)
    *told, last = lines(raw + answer.finish(0, end) + answer.closing())
    messages = [one["message"] for one in told]
    assert "".join(one.get("thinking", "") for one in messages) == "Hm."
    assert "".join(one["content"] for one in messages) == "Look:"
    (call,) = [call for one in messages for call in one.get("tool_calls", [])]
    assert call["function"] == {"name": "look", "arguments": {"at": 1}}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    whole = talk(READING)
    whole.add(0, Delta(said, (1,)))
    whole.end(0, end)
    message = whole.whole()["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "Look:")
    assert message["tool_calls"][0]["function"] == call["function"]


@pytest.mark.parametrize(
    ("dialect", "key"), [(CHAT, "message"), (GENERATE, "response")], ids=["chat", "generate"]
)
def test_a_ping_is_a_line_that_adds_no_text(dialect: Any, key: str) -> None:
    (ping,) = lines(dialect.ping(ChatCall("tiny", None)))
    assert (ping["model"], ping["done"]) == ("tiny", False)
    assert ping[key] in ("", {"role": "assistant", "content": ""})


def test_a_model_that_was_only_loaded_says_nothing() -> None:
    told = loaded("m", AT, chat=True)
    assert (told["done"], told["done_reason"], told["message"]["content"]) == (True, "load", "")
    assert loaded("m", AT, chat=False)["response"] == ""


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        pytest.param(RequestError("no", "x"), 400, "x", id="request"),
        pytest.param(QueueFull(3, 7), 429, None, id="full"),
        pytest.param(ZeroDivisionError("secret"), 500, None, id="a bug"),
    ],
)
def test_errors_are_ollama_s_object(error: Exception, status: int, param: str | None) -> None:
    found, _, body = ollama_error(error)
    assert (found, body["param"]) == (status, param)
    assert isinstance(body["error"], str)
    assert "secret" not in body["error"]
    assert lines(CHAT.broken(error)) == [body]
