"""Bodies of SGLang's /generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.sglang_generate import DEFAULT_TOKENS, SglangCall, parse_generate
from rkserve.api.vllm_generate import NEUTRAL
from rkserve.core.errors import RequestError


def parsed(**body: Any) -> SglangCall:
    return parse_generate(json.dumps(body).encode())


def test_what_is_left_out_has_sglang_s_defaults() -> None:
    call = parsed(text="Hi")
    assert (call.prompts, call.prompt_param, call.listed) == (("Hi",), "text", False)
    assert (call.max_tokens, call.sampling, call.prompt_top) == (DEFAULT_TOKENS, NEUTRAL, None)


def test_parameters_have_sglang_s_names() -> None:
    params = {"max_new_tokens": 4, "sampling_seed": 7, "min_new_tokens": 2, "no_stop_trim": True}
    call = parsed(input_ids=[[1], [2]], sampling_params=params, lora_path="m:tone", rid="r")
    assert (call.max_tokens, call.steps.seed, call.steps.min_tokens) == (4, 7, 2)
    assert (call.include_stop, call.listed, call.model, call.request_id) == (
        *(True, True),
        *("m:tone", "r"),
    )


def test_log_probabilities_of_the_prompt_begin_where_asked() -> None:
    call = parsed(input_ids=[1], return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
    assert (call.steps.top_logprobs, call.prompt_top, call.logprob_start) == (2, 2, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input_ids"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": "a", "rid": ["r"]}, "rid"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop[0]"),
        ({"text": "a", "sampling_params": {"unknown": 1}}, "sampling_params.unknown"),
        ({"text": ["a"] * 9, "sampling_params": {"n": 2}}, "n"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**body)
    assert caught.value.param == param
