"""Calls as bodies for an upstream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.common.calls import parse_chat, parse_completion
from rkserve.api.upstream.requests import CHAT_PATH, COMPLETION_PATH, generations, refusal, request
from rkserve.config.board_group import UpstreamConfig

URL = "http://gpu.local:8000/v1"
PLAIN = UpstreamConfig(url=URL)
KNOWING = UpstreamConfig(url=URL, extensions=True, images=True)
HELLO = [{"role": "user", "content": "Hello"}]
PNG = "data:image/png;base64,iVBORw0KGgo="


def chat(config: UpstreamConfig = PLAIN, index: int = 0, **body: Any) -> dict[str, Any]:
    """The body of a chat."""
    call = parse_chat(json.dumps({"model": "m", "messages": HELLO, **body}).encode())
    path, found = request(call, index, config, "there")
    assert path == CHAT_PATH
    return found


def refused(config: UpstreamConfig = PLAIN, *, alone: bool = True, **body: Any) -> str | None:
    """The parameter of a chat that is refused."""
    call = parse_chat(json.dumps({"model": "m", "messages": HELLO, **body}).encode())
    found = refusal(call, config, "gpu", alone=alone)
    return None if found is None else found.param


def test_a_plain_chat_has_what_it_needs_and_nothing_else() -> None:
    assert chat() == {
        "model": "there",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": HELLO,
    }


def test_sampling_and_limits_are_passed_on() -> None:
    found = chat(temperature=0.5, top_p=0.9, stop=["\n"], max_completion_tokens=9, seed=3, n=2)
    assert found["temperature"] == 0.5
    assert found["top_p"] == 0.9
    assert found["stop"] == ["\n"]
    assert found["max_tokens"] == 9
    assert found["seed"] == 3
    assert "n" not in found
    assert chat(index=1, seed=3, n=2)["seed"] == 4


def test_extensions_are_sent_where_they_are_known() -> None:
    body: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2}
    found = chat(KNOWING, **body, enable_thinking=False)
    assert {name: found[name] for name in body} == body
    assert found["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert chat(KNOWING, top_k=-1)["top_k"] == -1


@pytest.mark.parametrize("key", ["response_format", "guided_json"])
def test_a_schema_by_any_key_is_a_response_format(key: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given: Any = schema
    if key == "response_format":
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = chat(**{key: given})["response_format"]
    assert found["type"] == "json_schema"
    assert found["json_schema"]["schema"] == schema
    assert chat(response_format={"type": "json_object"})["response_format"] == {
        "type": "json_object"
    }


def test_a_conversation_with_tools_comes_back_in_openais_form() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": {"name": "go", "strict": True}}
    called = {"name": "look", "arguments": '{"b": 1,  "a": 2}'}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    found = chat(messages=messages, tools=[tool, strict], tool_choice="required")
    assert found["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": called}],
    }
    assert found["messages"][2] == messages[2]
    assert found["tool_choice"] == "required"
    assert [one["function"].get("strict") for one in found["tools"]] == [None, True]
    assert chat(KNOWING, messages=messages)["messages"][1]["reasoning_content"] == "hm"
    named = {"type": "function", "function": {"name": "look"}}
    assert chat(tools=[tool], tool_choice=named)["tool_choice"] == named
    assert chat(tools=[tool], parallel_tool_calls=False)["parallel_tool_calls"] is False


def test_images_are_passed_on_as_they_came() -> None:
    parts = [
        {"type": "text", "text": "See: "},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.jpg"}},
    ]
    assert chat(KNOWING, messages=[{"role": "user", "content": parts}])["messages"] == [
        {"role": "user", "content": parts}
    ]
    assert refused(messages=[{"role": "user", "content": parts}]) == (
        "messages[0].content[1].image_url.url"
    )
    assert refused(KNOWING, messages=[{"role": "user", "content": parts}]) is None


def test_a_completion_has_the_prompt_of_its_choice() -> None:
    body = {"model": "m", "prompt": ["one", "two"], "n": 2, "max_tokens": 4}
    call = parse_completion(json.dumps(body).encode())
    found = [request(call, index, PLAIN, "there") for index in range(4)]
    assert {path for path, _ in found} == {COMPLETION_PATH}
    assert [one["prompt"] for _, one in found] == ["one", "one", "two", "two"]
    assert found[0][1]["max_tokens"] == 4
    made = generations(call, "m", "cmpl-1", context_len=100, session="s")
    assert [one.request_id for one in made] == [f"cmpl-1/{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"pause_on": ["x"]}, "pause_on"),
        ({"use_cache": "a"}, "use_cache"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"mirostat": 2}, "mirostat"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
    ],
)
def test_what_only_boards_do_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refused(**body) == param
    assert refused(KNOWING, **body) == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repeat_penalty": 1.2}, "repeat_penalty"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"enable_thinking": True}, "chat_template_kwargs"),
        (
            {
                "messages": [*HELLO, {"role": "assistant", "content": "A"}],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
    ],
)
def test_keys_that_openai_lacks_need_extensions(body: dict[str, Any], param: str) -> None:
    assert refused(**body) == param
    assert refused(KNOWING, **body) is None


def test_token_ids_mean_nothing_to_an_upstream_beside_boards() -> None:
    assert refused(logit_bias={"5": 1}) is None
    assert refused(logit_bias={"5": 1}, alone=False) == "logit_bias"
    assert refused(reasoning_effort="low", temperature=1, seed=1, tools=[]) is None
