"""Calls of Gradio's functions, and their description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api import gradio
from rkserve.core.errors import RequestError, RouteNotFound


def joined(**body: Any) -> gradio.GradioCall:
    return gradio.read_join(json.dumps(body).encode())


def test_arguments_that_are_left_out_take_their_defaults() -> None:
    call = gradio.read_call("chat", b'{"data": ["Hello"]}')
    assert call == gradio.GradioCall(gradio.CHAT, ("Hello", [], "", "", 0))


def test_a_call_of_a_session_names_its_function_by_number() -> None:
    call = joined(data=["Hello", []], fn_index=1, session_hash="s")
    assert (call.function, call.session) == (gradio.TAKE_INPUT, "s")
    assert gradio.immediate(call) is not None


def test_an_unknown_function_is_not_found() -> None:
    with pytest.raises(RouteNotFound):
        gradio.read_call("nothing", b"{}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"fn_index": 0, "session_hash": "s"}, "data"),
        ({"data": [], "session_hash": "s"}, "fn_index"),
        ({"data": [], "fn_index": 3, "session_hash": "s"}, "fn_index"),
        ({"data": [], "fn_index": 0}, "session_hash"),
        ({"data": [], "fn_index": 0, "session_hash": ""}, "session_hash"),
        ({"data": [], "fn_index": 0, "session_hash": "s"}, "data[0]"),
        ({"data": ["a"] * 9, "fn_index": 0, "session_hash": "s"}, "data"),
    ],
)
def test_a_wrong_call_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        joined(**body)
    assert caught.value.param == param


def test_the_configuration_and_the_signatures_describe_the_same_functions() -> None:
    names = [f"/{one['api_name']}" for one in gradio.configuration("t")["dependencies"]]
    assert names == list(gradio.signatures()["named_endpoints"])
