"""Parameters that would change an answer are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.common.calls import (
    ChatCall,
    CompletionCall,
    parse_chat,
    parse_completion,
)
from rkserve.api.parsing.sampling import UNSUPPORTED, UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION
from rkserve.core.errors import UnsupportedParameter
from tests.support.paths import PROJECT

API_DOC = PROJECT / "docs" / "reference" / "api.md"


HELLO = [{"role": "user", "content": "Hello"}]


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **keys}).encode())


def completion(**keys: Any) -> CompletionCall:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hello", **keys}).encode())


@pytest.mark.parametrize(
    "keys",
    [
        {"user": 7, "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"parallel_tool_calls": True, "prediction": None, "verbosity": "low"},
        {"some_new_parameter": [1, {"x": None}]},
        {"ignore_eos": False, "logit_bias": {}, "logprobs": False},
        {"response_format": {"type": "text"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_changes_no_answer_is_accepted(read: Any, keys: dict[str, Any]) -> None:
    assert read(**keys) == read()


@pytest.mark.parametrize(
    "keys",
    [
        {"chat_template_kwargs": {}},
        {"modalities": ["text"]},
        {"top_logprobs": 0},
    ],
    ids=str,
)
def test_a_chat_accepts_what_asks_for_nothing(keys: dict[str, Any]) -> None:
    assert chat(**keys) == chat()


@pytest.mark.parametrize(
    "keys",
    [{"best_of": 1}, {"best_of": 2, "n": 2}, {"echo": False}, {"suffix": ""}],
    ids=str,
)
def test_a_completion_accepts_what_asks_for_nothing(keys: dict[str, Any]) -> None:
    assert completion(**keys) == completion(n=keys.get("n", 1))


REFUSED_BY_BOTH = [
    ("bad_words", ["no"]),
    ("allowed_token_ids", [1]),
    ("structural_tag", {"triggers": []}),
    ("stop_regex", "a+"),
    ("lora_path", "pirate"),
    ("max_new_tokens", 5),
    ("no_stop_trim", True),
    ("xtc_probability", 0.1),
    ("use_beam_search", True),
    ("use_beam_search", 1),
]


REFUSED_IN_CHAT = [
    ("echo", True),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy"}),
    ("web_search_options", {}),
    ("add_generation_prompt", False),
]


REFUSED_IN_COMPLETIONS = [("suffix", "end")]


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        *((chat, *pair) for pair in REFUSED_BY_BOTH + REFUSED_IN_CHAT),
        *((completion, *pair) for pair in REFUSED_BY_BOTH + REFUSED_IN_COMPLETIONS),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(read: Any, name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter, match=name) as caught:
        read(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", sorted({*UNSUPPORTED_CHAT, *UNSUPPORTED_COMPLETION, *UNSUPPORTED}))
def test_every_refused_parameter_is_documented(name: str) -> None:
    refused = API_DOC.read_text(encoding="utf-8").partition("### Refused by name")[2]
    assert f"`{name}`" in refused.partition("### Messages")[0]
