"""Bodies of the vendor's /rkllm_chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.common.calls import ChatCall
from rkserve.api.rkllm_chat import parse_rkllm
from rkserve.core.errors import RequestError

HELLO = {"role": "user", "content": "Hello"}


def parsed(**body: Any) -> ChatCall:
    return parse_rkllm(json.dumps(body).encode(), {"served"}, "default")


@pytest.mark.parametrize(
    ("model", "found"), [("served", "served"), ("rkllm", "default"), (None, "default")]
)
def test_a_name_that_is_not_served_is_the_default_model(model: str | None, found: str) -> None:
    assert parsed(model=model, messages=[HELLO]).model == found


def test_calls_of_one_turn_become_one_message() -> None:
    calls = [
        {"role": "assistant", "content": "", "function_call": {"name": name, "arguments": {"a": 1}}}
        for name in ("f", "g")
    ]
    _, message, *_ = parsed(messages=[HELLO, *calls]).messages
    made = [call["function"] for call in message["tool_calls"]]
    assert made == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"a": 1}}]


def test_a_wrong_message_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        parsed(messages=[{"role": "nobody", "content": ""}])
    assert caught.value.param == "messages[0].role"
