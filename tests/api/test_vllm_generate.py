"""Bodies of vLLM's /inference/v1/generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.vllm_generate import DEFAULT_TOKENS, NEUTRAL, parse_generate
from rkserve.core.errors import RequestError


def parsed(**params: Any) -> Any:
    body = {"token_ids": [1, 2], "sampling_params": params, "stop": "ignored here"}
    return parse_generate(json.dumps(body).encode())


def test_what_is_left_out_has_vllm_s_defaults() -> None:
    call = parsed()
    assert (call.prompts, call.max_tokens, call.n) == (((1, 2),), DEFAULT_TOKENS, 1)
    assert call.sampling == NEUTRAL
    assert (call.token_ids, call.tokens_as_ids, call.stop) == (True, True, ())


def test_parameters_are_read_below_their_key() -> None:
    call = parsed(temperature=0.5, stop="a", stop_token_ids=[3, 3], prompt_logprobs=False, n=2)
    assert call.sampling == {**NEUTRAL, "temperature": 0.5}
    assert (call.stop, call.stop_ids, call.prompt_top, call.n) == (("a",), (3,), None, 2)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {}}, "token_ids"),
        ({"token_ids": [1]}, "sampling_params"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1, "a"], "sampling_params": {}}, "token_ids[1]"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"token_ids": [1], "sampling_params": {"topp": 1}}, "sampling_params.topp"),
        ({"token_ids": [1], "sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
        ({"token_ids": [1], "sampling_params": {}, "features": {"a": 1}}, "features"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_generate(json.dumps(body).encode())
    assert caught.value.param == param
