"""Bodies of OpenAI calls: what is read, what is refused and by which name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common.calls import (
    ChatCall,
    CompletionCall,
    parse_chat,
    parse_completion,
)
from rkserve.api.common.parameters import TOP_K_OFF
from rkserve.api.json.fields import MAX_CHOICES, MAX_PAUSE_ON, MAX_STOP_CHARS
from rkserve.api.parsing.sampling import UNSUPPORTED, UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION
from rkserve.core.block_hashes import salted
from rkserve.core.errors import RequestError, RkserveError
from tests.support.values.wire_json import JSON, MESSAGE

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **keys}).encode())


def completion(**keys: Any) -> CompletionCall:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hello", **keys}).encode())


# --- what is read ---


def test_a_minimal_chat_has_openais_defaults() -> None:
    assert chat() == ChatCall(model="m", max_tokens=None, messages=tuple(HELLO))


def test_a_minimal_completion_has_openais_defaults() -> None:
    assert completion() == CompletionCall(model="m", max_tokens=16, prompts=("Hello",))


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        pytest.param({"max_tokens": 5}, "max_tokens", 5, id="max_tokens"),
        pytest.param({"max_completion_tokens": 6}, "max_tokens", 6, id="max_completion_tokens"),
        pytest.param(
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_tokens",
            6,
            id="the newer name wins over the deprecated one",
        ),
        pytest.param({"stop": "END"}, "stop", ("END",), id="one stop string"),
        pytest.param({"stop": ["a", "b"]}, "stop", ("a", "b"), id="stop strings"),
        pytest.param({"stop": []}, "stop", (), id="no stop strings"),
        pytest.param({"n": 3}, "n", 3, id="n"),
        pytest.param({"stream": True}, "stream", True, id="stream"),
        pytest.param(
            {"stream": True, "stream_options": {"include_usage": True}},
            "include_usage",
            True,
            id="include_usage",
        ),
        pytest.param(
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            "include_usage",
            False,
            id="other stream options",
        ),
        pytest.param({"pause_on": ["</a>", 7]}, "pause_on", ("</a>", 7), id="pause_on"),
        pytest.param({"pause_on": ["a"]}, "native_pause", True, id="pause_on pauses natively"),
        pytest.param(
            {"pause_on": ["a"], "native_pause": False}, "native_pause", False, id="unless asked not"
        ),
        pytest.param({"native_pause": True}, "native_pause", True, id="native_pause"),
        pytest.param({"cache_salt": "tenant"}, "salt", salted("tenant"), id="cache_salt"),
        pytest.param({"use_cache": "doc-1.v2_x"}, "use_cache", "doc-1.v2_x", id="use_cache"),
        pytest.param(
            {"mirostat": 2, "mirostat_tau": 5, "mirostat_eta": 0.1},
            "sampling",
            {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
            id="mirostat",
        ),
        pytest.param({"strict_sampling": True}, "strict_sampling", True, id="strict_sampling"),
        pytest.param({"temperature": 0}, "sampling", {"temperature": 0.0}, id="greedy"),
        pytest.param({"top_p": 1}, "sampling", {"top_p": 1.0}, id="top_p"),
        pytest.param({"top_k": 5}, "sampling", {"top_k": 5}, id="top_k"),
        pytest.param({"top_k": -1}, "sampling", {"top_k": TOP_K_OFF}, id="top_k off as in vLLM"),
        pytest.param({"top_k": 0}, "sampling", {"top_k": TOP_K_OFF}, id="top_k off as in HF"),
        pytest.param(
            {"frequency_penalty": -2, "presence_penalty": 2},
            "sampling",
            {"frequency_penalty": -2.0, "presence_penalty": 2.0},
            id="additive penalties",
        ),
        pytest.param(
            {"repeat_penalty": 1.2}, "sampling", {"repeat_penalty": 1.2}, id="RKLLM's penalty"
        ),
        pytest.param(
            {"repetition_penalty": 1.2}, "sampling", {"repeat_penalty": 1.2}, id="vLLM's name"
        ),
        pytest.param(
            {"repetition_penalty": 1.2, "repeat_penalty": 1.2},
            "sampling",
            {"repeat_penalty": 1.2},
            id="both names, one value",
        ),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_parameter_is_read(read: Any, keys: dict[str, Any], field: str, value: object) -> None:
    if read is completion and "max_completion_tokens" in keys:
        assert completion(**keys).max_tokens == keys.get("max_tokens", 16)  # a chat parameter
    else:
        assert getattr(read(**keys), field) == value


@pytest.mark.parametrize("read", [chat, completion])
def test_null_counts_as_absent(read: Any) -> None:
    names = {
        *UNSUPPORTED_CHAT,
        *UNSUPPORTED_COMPLETION,
        *UNSUPPORTED,
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
        "stream",
    }
    names |= {"stop_token_ids", "return_token_ids", "return_tokens_as_token_ids"}
    names |= {"skip_special_tokens", "include_stop_str_in_output", "regex", "ebnf"}
    names |= {"stream_options", "temperature", "top_p", "top_k", "seed", "strict_sampling"}
    names |= {"logprobs", "top_logprobs", "logit_bias", "min_p", "echo", "best_of"}
    names |= {"pause_on", "native_pause", "use_cache", "cache_salt"}
    names |= {"mirostat", "mirostat_tau", "mirostat_eta"}
    names |= {"frequency_penalty", "presence_penalty", "repeat_penalty", "repetition_penalty"}
    assert read(**dict.fromkeys(names)) == read()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        pytest.param("a", ("a",), id="text"),
        pytest.param(["a", "b"], ("a", "b"), id="texts"),
        pytest.param([1, 2], ((1, 2),), id="ids"),
        pytest.param([[1, 2], [3]], ((1, 2), (3,)), id="lists of ids"),
        pytest.param(["a", [3]], ("a", (3,)), id="mixed"),
    ],
)
def test_prompts_come_as_text_or_ids_alone_or_listed(prompt: Any, prompts: Any) -> None:
    call = completion(prompt=prompt, n=2)
    assert call.prompts == prompts
    assert call.choices == 2 * len(prompts)


# --- what is wrong ---

WRONG = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["x"] * 5}, "stop"),
    ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"n": 0}, "n"),
    ({"n": MAX_CHOICES + 1}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": "2"}, "n"),
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": False}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 4.5}, "top_k"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repetition_penalty"),
    ({"strict_sampling": "yes"}, "strict_sampling"),
    ({"mirostat": 3}, "mirostat"),
    ({"mirostat": True}, "mirostat"),
    ({"mirostat_tau": 0}, "mirostat_tau"),
    ({"mirostat_eta": 1.1}, "mirostat_eta"),
    ({"native_pause": 1}, "native_pause"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"pause_on": "x"}, "pause_on"),
    ({"pause_on": []}, "pause_on"),
    ({"pause_on": ["x"] * (MAX_PAUSE_ON + 1)}, "pause_on"),
    ({"pause_on": ["x", ""]}, "pause_on[1]"),
    ({"pause_on": ["x" * (MAX_STOP_CHARS + 1)]}, "pause_on[0]"),
    ({"pause_on": [1, True]}, "pause_on[1]"),
    ({"pause_on": [1.0]}, "pause_on[0]"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 513}, "cache_salt"),
    ({"use_cache": 5}, "use_cache"),
    ({"use_cache": ""}, "use_cache"),
    ({"use_cache": "../x"}, "use_cache"),
    ({"use_cache": ".x"}, "use_cache"),
    ({"use_cache": "x" * 65}, "use_cache"),
    ({"use_cache": "x\n"}, "use_cache"),
]


@pytest.mark.parametrize(("keys", "param"), WRONG, ids=lambda x: str(x)[:50])
@pytest.mark.parametrize("read", [chat, completion])
def test_a_wrong_value_is_a_400_that_names_it(read: Any, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**keys)
    assert caught.value.http_status == 400
    assert caught.value.param == param
    assert re.split(r"[.\[]", param, maxsplit=1)[0] in caught.value.message


@pytest.mark.parametrize("number", [b"1e999", b"-1e999"])
def test_a_number_that_overflows_to_infinity_is_out_of_range(number: bytes) -> None:
    with pytest.raises(RequestError, match="temperature") as caught:
        parse_completion(b'{"model": "m", "prompt": "x", "temperature": ' + number + b"}")
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        (["a", ""], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, 2.0], "prompt[1]"),
        ([None], "prompt[0]"),
        ([[1, "a"]], "prompt[0][1]"),
        (["a"] * (MAX_CHOICES + 1), "prompt"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_bad_prompt_is_named(prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param


def test_prompts_times_n_are_bounded() -> None:
    assert completion(prompt=["a"] * 4, n=4).choices == MAX_CHOICES
    with pytest.raises(RequestError, match="16 at most") as caught:
        completion(prompt=["a"] * 4, n=5)
    assert caught.value.param == "n"


# --- what is refused ---


BEGUN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("keys", "prefill"),
    [
        pytest.param({}, False, id="a new turn"),
        pytest.param({"add_generation_prompt": True}, False, id="a new turn by name"),
        pytest.param({"continue_final_message": True}, True, id="vLLM's flag alone"),
        pytest.param(
            {"continue_final_message": True, "add_generation_prompt": False}, True, id="vLLM's"
        ),
        pytest.param({"messages": [BEGUN[0], {**BEGUN[1], "prefix": True}]}, True, id="DeepSeek's"),
        pytest.param({"messages": [BEGUN[0], {**BEGUN[1], "prefix": False}]}, False, id="no"),
    ],
)
def test_an_answer_continues_the_final_message_where_that_is_asked(
    keys: dict[str, Any], prefill: bool
) -> None:
    assert chat(**{"messages": BEGUN, **keys}).prefill is prefill


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"add_generation_prompt": True}, "continue_final_message", id="both"),
        pytest.param({"messages": BEGUN[:1]}, "messages[0].role", id="the user's"),
        pytest.param({"messages": [BEGUN[0], CALLED]}, "messages[1].role", id="a call of a tool"),
        pytest.param({"continue_final_message": "yes"}, "continue_final_message", id="a word"),
        pytest.param(
            {"messages": [BEGUN[0], {**BEGUN[1], "prefix": 1}]}, "messages[1].prefix", id="a number"
        ),
    ],
)
def test_what_no_answer_can_continue_is_refused(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**{"messages": BEGUN, "continue_final_message": True, **keys})
    assert caught.value.param == param


# --- whatever comes ---

VALUES: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
    [
        *UNSUPPORTED_CHAT,
        *UNSUPPORTED_COMPLETION,
        *UNSUPPORTED,
        "stop",
        "n",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
    ],
    JSON,
) | dict.fromkeys(["top_p", "top_k", "seed", "repeat_penalty", "repetition_penalty"], JSON)
VALUES |= dict.fromkeys(["pause_on", "native_pause", "use_cache", "cache_salt"], JSON)
VALUES |= dict.fromkeys(["mirostat", "mirostat_tau", "stop_token_ids"], JSON)
VALUES |= dict.fromkeys(["return_token_ids", "skip_special_tokens", "regex", "ebnf"], JSON)
BODY = st.fixed_dictionaries(
    {
        "model": st.just("m") | JSON,
        "messages": st.lists(MESSAGE, max_size=3) | JSON,
        "prompt": JSON | st.lists(st.integers(), max_size=3),
    },
    optional=VALUES,
)


@given(BODY | JSON)
def test_no_json_raises_anything_but_a_request_error(body: Any) -> None:
    raw = json.dumps(body).encode()
    caught: list[RkserveError] = []
    for parse in (parse_chat, parse_completion):
        try:
            parse(raw)
        except RkserveError as exc:
            caught.append(exc)
    assert {(exc.http_status, bool(exc.message)) for exc in caught} <= {(400, True)}


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_chat(body)
