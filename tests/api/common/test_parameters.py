"""Parameters that several APIs share: values, errors with paths, and JSON Schemas."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.api.common.parameters import TOP_K_OFF, OpenAIParameters, RunParameters
from rkserve.api.json.fields import MAX_PAUSE_ON, MAX_STOP
from rkserve.core.errors import RequestError


def test_null_is_absent_at_every_depth() -> None:
    asked = OpenAIParameters.read(
        {"temperature": None, "stream": True, "stream_options": {"include_usage": None}, "n": None}
    )
    assert asked.shared()["include_usage"] is False
    assert asked.n == 1


def test_one_stop_is_a_list_of_one() -> None:
    assert OpenAIParameters.read({"stop": "a"}).stop == ("a",)
    assert OpenAIParameters.read({"stop": ["a", "b"]}).stop == ("a", "b")


def test_values_that_a_client_set_are_kept_and_no_others() -> None:
    asked = OpenAIParameters.read({"top_k": -1, "repetition_penalty": 1.5, "mirostat": 0})
    assert asked.sampling() == {"top_k": TOP_K_OFF, "repeat_penalty": 1.5, "mirostat": 0}


def test_a_pause_keeps_the_cache_unless_told_otherwise() -> None:
    assert RunParameters.read({"pause_on": ["a"]}).own()["native_pause"] is True
    assert RunParameters.read({"pause_on": ["a"], "native_pause": False}).own()["native_pause"] is (
        False
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * (MAX_STOP + 1)}, "stop"),
        ({"pause_on": [1, True]}, "pause_on[1]"),
        ({"pause_on": []}, "pause_on"),
        ({"pause_on": [1] * (MAX_PAUSE_ON + 1)}, "pause_on"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"temperature": True}, "temperature"),
        ({"use_cache": "../x"}, "use_cache"),
    ],
)
def test_the_path_of_a_wrong_value_is_told(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        OpenAIParameters.read(body)
    assert caught.value.param == param


def test_keys_that_may_be_left_out_may_be_null_in_the_schema() -> None:
    schema = OpenAIParameters.model_json_schema()
    assert schema["additionalProperties"] is True
    assert {"type": "null"} in schema["properties"]["temperature"]["anyOf"]
