"""Chats and completions as OpenAI's own client reads them: streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.openai.answers import ChatAnswer, CompletionAnswer
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Kv,
    Paused,
    Timings,
    Usage,
)

MESSAGES = ({"role": "user", "content": "Hi"},)
STAMP = AnswerOrigin("tiny", "1.3.0")
TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0)


def finished(
    prompt: int = 6, completion: int = 2, cached: int = 2, reason: FinishReason = FinishReason.STOP
) -> Finished:
    return Finished(reason, Usage(prompt, completion, cached), TIMINGS)


def chat_answer(**keys: Any) -> ChatAnswer:
    return ChatAnswer(
        ChatCall("tiny", None, messages=MESSAGES, **keys), "chatcmpl-abc", 1700000000, STAMP
    )


def completion_answer(prompts: int = 1, **keys: Any) -> CompletionAnswer:
    call = CompletionCall("tiny", 16, prompts=("Hi",) * prompts, **keys)
    return CompletionAnswer(call, "cmpl-abc", 1700000000, STAMP)


def stream(answer: ChatAnswer | CompletionAnswer, choices: int = 1) -> bytes:
    """What a router sends for ``choices`` interleaved choices."""
    events = [output.PING, *(answer.opening(i) for i in range(choices))]
    events += [
        answer.delta(i, Delta(text, (7,))) for text in ("Grüß", " 你好\n") for i in range(choices)
    ]
    events += [answer.finish(i, finished()) for i in range(choices)]
    return b"".join([*events, answer.closing()])


def chunks(raw: bytes) -> list[dict[str, Any]]:
    events = [e.removeprefix("data: ") for e in raw.decode().split("\n\n") if e.startswith("data")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def client_of(answer: Callable[[httpx2.Request], httpx2.Response], strict: bool) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="none",
        base_url="http://rkserve.test/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
        _strict_response_validation=strict,
    )


def streaming(raw: bytes) -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda _request: httpx2.Response(200, content=raw, headers=output.HEADERS)


def whole(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return lambda _request: httpx2.Response(status, json=body, headers=headers)


@pytest.fixture(params=[True, False], ids=["strict", "lenient"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# --- OpenAI's client ---


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [True, False])
def test_the_client_reads_a_streamed_chat(strict: bool, n: int, include_usage: bool) -> None:
    raw = stream(chat_answer(n=n, stream=True, include_usage=include_usage), n)
    with client_of(streaming(raw), strict) as client:
        got = list(client.chat.completions.create(model="tiny", messages=[], stream=True))
    texts = [""] * n
    for chunk in got:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Grüß 你好\n"] * n
    roles = [c.delta.role for chunk in got for c in chunk.choices if c.delta.role]
    assert roles == ["assistant"] * n
    reasons = [c.finish_reason for chunk in got for c in chunk.choices if c.finish_reason]
    assert reasons == ["stop"] * n
    assert {chunk.id for chunk in got} == {"chatcmpl-abc"}
    usages = [chunk.usage for chunk in got if chunk.usage]
    assert [u.total_tokens for u in usages] == ([6 + 2 * n] if include_usage else [])


def test_the_client_reads_a_whole_chat(strict: bool) -> None:
    answer = chat_answer(n=2)
    for i in range(2):
        answer.add(i, Delta(f"Nr {i}", (1, 2)))
        answer.add(i, Delta("", (3,)))
        answer.add(i, Delta(".", (4,)))
        answer.end(i, finished(reason=FinishReason.LENGTH))
    with client_of(whole(answer.whole()), strict) as client:
        got = client.chat.completions.create(model="tiny", messages=[])
    assert [c.message.content for c in got.choices] == ["Nr 0.", "Nr 1."]
    assert {c.finish_reason for c in got.choices} == {"length"}
    assert got.usage is not None
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 2
    assert got.system_fingerprint == STAMP.fingerprint(["default"])


def test_the_client_reads_a_whole_completion(strict: bool) -> None:
    answer = completion_answer(prompts=2)
    for i in range(2):
        answer.add(i, Delta(f"Nr {i}", (1, 2)))
        answer.end(i, finished())
    with client_of(whole(answer.whole()), strict) as client:
        got = client.completions.create(model="tiny", prompt=["a", "b"])
    assert [c.text for c in got.choices] == ["Nr 0", "Nr 1"]
    assert got.object == "text_completion"
    assert got.usage is not None
    assert got.usage.prompt_tokens == 12


def test_the_client_reads_a_streamed_completion() -> None:
    # Strict mode wants a finish_reason in every chunk of this legacy stream; OpenAI sends none.
    raw = stream(completion_answer(stream=True, include_usage=True))
    with client_of(streaming(raw), strict=False) as client:
        got = list(client.completions.create(model="tiny", prompt="a", stream=True))
    assert "".join(c.text for chunk in got for c in chunk.choices) == "Grüß 你好\n"
    assert got[-1].usage is not None
    assert got[-1].choices == []


# --- the chunks ---


def test_a_streamed_chat_chunk_by_chunk() -> None:
    head = {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "tiny",
        "system_fingerprint": STAMP.fingerprint(["default"]),
    }

    def choice(delta: dict[str, Any], reason: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]

    assert chunks(stream(chat_answer(stream=True, include_usage=True))) == [
        {
            **head,
            "choices": choice({"role": "assistant", "content": "", "refusal": None}),
            "usage": None,
        },
        {**head, "choices": choice({"content": "Grüß"}), "usage": None},
        {**head, "choices": choice({"content": " 你好\n"}), "usage": None},
        {
            **head,
            "choices": choice({}, "stop"),
            "usage": None,
            "weight_version": "default",
            "timings": {
                "queue_ms": 1.0,
                "prefill_ms": 20.0,
                "prefill_tokens": 4,
                "decode_ms": 100.0,
                "decode_tokens": 2,
                "tokens_per_s": 20.0,
                "cached": 2,
            },
        },
        {
            **head,
            "choices": [],
            "usage": {
                "prompt_tokens": 6,
                "completion_tokens": 2,
                "total_tokens": 8,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        },
    ]


def test_without_include_usage_no_chunk_speaks_of_it() -> None:
    assert all("usage" not in chunk for chunk in chunks(stream(chat_answer(stream=True))))


def test_a_completion_opens_with_nothing() -> None:
    assert completion_answer().opening(0) == b""


@pytest.mark.parametrize("answer", [chat_answer(), completion_answer()], ids=["chat", "completion"])
def test_a_delta_without_text_sends_nothing(answer: ChatAnswer | CompletionAnswer) -> None:
    assert answer.delta(0, Delta("", (5,))) == b""


@given(st.text(max_size=50), st.text(max_size=20), st.integers(0, 15))
def test_a_pre_rendered_delta_is_the_plain_json(text: str, model: str, index: int) -> None:
    answer = ChatAnswer(ChatCall(model + output.EventTemplate.HOLE, None, n=16), "u", 1, STAMP)
    raw = answer.delta(index, Delta(text or "x", (1,)))
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    assert b"\r" not in raw
    chunk = json.loads(raw[6:])
    assert chunk["model"] == model + output.EventTemplate.HOLE
    assert chunk["choices"] == [
        {
            "index": index,
            "delta": {"content": text or "x"},
            "logprobs": None,
            "finish_reason": None,
        }
    ]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_the_finish_reason_is_told_as_it_is(reason: FinishReason) -> None:
    answer = chat_answer()
    (event,) = chunks(answer.finish(0, finished(reason=reason)) + output.DONE)
    assert event["choices"][0]["finish_reason"] == reason.value
    assert answer.whole()["choices"][0]["finish_reason"] == reason.value


# --- pauses and edits ---


PAUSED = Paused("</tool_call>", 17, Kv.KEPT)


def test_a_pause_is_a_comment_and_for_those_who_asked_for_it_a_chunk() -> None:
    assert chat_answer(stream=True).paused(0, PAUSED) == output.PAUSED
    asked = chat_answer(stream=True, pause_on=("</tool_call>",), n=2)
    comment, event, rest = asked.paused(1, PAUSED).decode().split("\n\n")
    assert (comment, rest) == (": paused", "")
    chunk = json.loads(event.removeprefix("data: "))
    assert chunk["choices"] == []
    assert chunk["rkserve"] == {
        "status": "paused",
        "choice": 1,
        "by": "</tool_call>",
        "tokens": 17,
        "kv": "kept",
    }


def test_the_client_reads_over_a_pause_and_a_retraction(strict: bool) -> None:
    answer = chat_answer(stream=True, pause_on=("l",))
    raw = b"".join(
        [
            answer.opening(0),
            answer.delta(0, Delta("Helm", (1,))),
            answer.paused(0, PAUSED),
            answer.delta(0, Delta("lo", (2,), retract=1)),
            answer.finish(0, finished()),
            output.DONE,
        ]
    )
    text = ""
    with client_of(streaming(raw), strict) as client:
        for chunk in client.chat.completions.create(model="tiny", messages=[], stream=True):
            told = (chunk.model_extra or {}).get("rkserve") or {}
            text = text[: len(text) - told.get("retract", 0)]
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == "Hello"


@pytest.mark.parametrize("text", ["", "new"])
@pytest.mark.parametrize("answer", [chat_answer(), completion_answer()], ids=["chat", "completion"])
def test_a_retraction_is_told_even_if_nothing_takes_its_place(
    answer: ChatAnswer | CompletionAnswer, text: str
) -> None:
    (chunk,) = chunks(answer.delta(0, Delta(text, (), retract=3)) + output.DONE)
    assert chunk["rkserve"] == {"retract": 3}
    (choice,) = chunk["choices"]
    assert choice.get("text", choice.get("delta", {}).get("content", "")) == text


def test_a_whole_answer_is_what_it_became() -> None:
    answer = chat_answer()
    for delta in (
        Delta("one ", (1,)),
        Delta("two ", (2,)),
        Delta("three", (3,)),
        Delta("2 ", (), retract=len("two three")),
        Delta("3", (4,)),
    ):
        answer.add(0, delta)
    answer.end(0, finished())
    assert answer.whole()["choices"][0]["message"]["content"] == "one 2 3"


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="nothing of it happened"),
        pytest.param({"paused_ms": 1500.0}, id="paused"),
        pytest.param({"batch": 4, "batch_wait_ms": 8.0}, id="a batch"),
        pytest.param({"batch_wait_ms": 20.0}, id="nobody else came"),
        pytest.param({"encode_ms": 500.0}, id="images"),
        pytest.param({"continued": 2, "lost_ms": 350.0}, id="boards were lost"),
        pytest.param({"boards": ("a", "b")}, id="two boards wrote it"),
    ],
)
def test_timings_tell_of_pauses_and_batches_where_there_were_any(extra: dict[str, Any]) -> None:
    answer = chat_answer()
    timings = Timings(1.0, 20.0, 4, 100.0, 2, 812.0, **extra)
    answer.end(0, Finished(FinishReason.STOP, Usage(6, 2), timings))
    told = answer.whole()["timings"].items()
    shown = {*extra, "batch", "paused_ms", "encode_ms", "continued", "boards"}
    assert {k: tuple(v) if k == "boards" else v for k, v in told if k in shown} == extra
