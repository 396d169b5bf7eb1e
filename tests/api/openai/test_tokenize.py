"""Bodies of /tokenize and /detokenize, and the query of /tokenizer_info."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.openai.tokenize import (
    DetokenizeRequest,
    TokenizeCall,
    parse_info,
    parse_tokenize,
    tokenizer_info,
)
from rkserve.core.errors import RequestError

HELLO = {"role": "user", "content": "Hello"}


def test_a_text_gets_special_tokens_unless_told_otherwise() -> None:
    assert parse_tokenize(b'{"prompt": ""}') == TokenizeCall(None, "")
    asked = {"prompt": "a", "add_special_tokens": False, "return_token_strs": True}
    assert parse_tokenize(json.dumps(asked).encode()) == TokenizeCall(
        None, "a", special=False, strings=True
    )


def test_a_conversation_ends_with_the_header_of_an_answer_unless_told_otherwise() -> None:
    asked = {"model": "m", "messages": [HELLO], "add_generation_prompt": False}
    assert parse_tokenize(json.dumps(asked).encode()) == TokenizeCall(
        "m", messages=(HELLO,), answer=False
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "messages": [HELLO]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HELLO], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [HELLO], "chat_template": "x"}, "chat_template"),
    ],
)
def test_a_wrong_text_or_conversation_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tokenize(json.dumps(body).encode())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "tokens"), ({"tokens": "a"}, "tokens"), ({"tokens": [1, True]}, "tokens[1]")],
)
def test_wrong_ids_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        DetokenizeRequest.read(body)
    assert caught.value.param == param


def test_ids_are_read_as_they_are() -> None:
    asked = DetokenizeRequest.read({"tokens": [1, -2]})
    assert (asked.model, asked.tokens) == (None, [1, -2])


def test_a_query_names_a_model_and_nothing_else() -> None:
    assert parse_info([("model", "m")]) == "m"
    assert parse_info([]) is None
    with pytest.raises(RequestError, match="Unknown parameter"):
        parse_info([("modell", "m")])


def test_the_tokenizer_s_facts_have_defaults() -> None:
    told = tokenizer_info({"name_or_path": "/home/me"}, {"vocab_size": 7}, 4096)
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (told["model_max_length"], told["vocab_size"]) == (4096, 7)
    assert "name_or_path" not in told
