"""Requests of trainers as they send them: slime, verl, AReaL, SkyRL, prime-rl and PipelineRL.

Each shape is what the client code of that trainer puts on the wire, and each check what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rkserve import __version__
from rkserve.api.common.calls import named_answer
from rkserve.api.json.fields import JsonObject
from rkserve.api.sglang_generate import parse_generate
from rkserve.control.calls import OperationKind
from rkserve.core.messages import Delta, FinishReason, GenerateRequest
from rkserve.core.run_params import Guide, GuideKind, Scored
from rkserve.http.trainer_routes import REFUSED
from tests.support.boards import embedding_boards
from tests.support.boards.fake_boards import FakeBoards, Step, accepted, finished, report
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, events, house, send

_K = OperationKind
EOS = 2911
IDS = [5, 6, 7]
TOP = ((100, -0.5), (7, -1.5))


def rollout(*, reason: FinishReason = FinishReason.STOP) -> House:
    """A board that generates two tokens and the EOS token, with log-probabilities."""
    last = EOS if reason is FinishReason.STOP else 102
    steps: list[Step] = [
        accepted("a"),
        Delta("", (), prompt=(Scored(-2.0, TOP), Scored(-3.0, TOP))),
        Delta("Hel", (100,), logprobs=(Scored(-0.5, TOP),)),
        Delta("lo", (101,), logprobs=(Scored(-0.25, TOP),)),
        Delta("", (last,), logprobs=(Scored(-0.125, TOP),)),
        finished(3, reason, prompt=len(IDS)),
    ]
    return House(FakeBoards([report("a")], {"replica of a": [steps]}))


def asked(of: House) -> GenerateRequest:
    """The request that the board got."""
    return of.boards.opened[-1][1]


SLIME: dict[str, Any] = {
    "input_ids": IDS,
    "sampling_params": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 64,
        "stop": None,
        "stop_token_ids": [EOS],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    },
    "return_logprob": True,
}
AREAL: dict[str, Any] = {
    "input_ids": IDS,
    "image_data": [],
    "sampling_params": {
        "top_p": 1.0,
        "top_k": 100000000,
        "max_new_tokens": 64,
        "temperature": 1.0,
        "stop_token_ids": [EOS, 2913],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "frequency_penalty": 0.0,
    },
    "return_logprob": True,
    "stream": False,
}
VERL: dict[str, Any] = {
    "input_ids": [IDS],
    "sampling_params": {
        "n": 1,
        "max_new_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
    },
    "return_logprob": True,
    "top_logprobs_num": 0,
    "stream": False,
}
VLLM_GENERATE: dict[str, Any] = {
    "model": "sim-chat",
    "token_ids": IDS,
    "sampling_params": {
        "temperature": 1.0,
        "max_tokens": 64,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 0,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    },
}


def sglang(body: Any) -> None:
    """As slime, verl and AReaL read the answer of /generate."""
    (one,) = body if isinstance(body, list) else [body]
    meta = one["meta_info"]
    assert [pair[1] for pair in meta["output_token_logprobs"]] == [100, 101, EOS]
    assert [pair[0] for pair in meta["output_token_logprobs"]] == [-0.5, -0.25, -0.125]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 3)
    assert meta["weight_version"] == "default"
    assert (one["text"], one["output_ids"]) == ("Hello", [100, 101, EOS])


def vllm(body: Any) -> None:
    """As SkyRL and prime-rl read the answer of /inference/v1/generate."""
    (choice,) = body["choices"]
    assert choice["token_ids"] == [100, 101, EOS]
    content = choice["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [-0.5, -0.25, -0.125]
    assert content[0]["token"] == "token_id:100"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 3


def areal_vllm(body: Any) -> None:
    """As AReaL reads completions of vLLM."""
    log = body["choices"][0]["logprobs"]
    assert [int(one.split(":")[1]) for one in log["tokens"]] == [100, 101, EOS]
    assert log["token_logprobs"] == [-0.5, -0.25, -0.125]


def prime_rl(body: Any) -> None:
    """As prime-rl and its verifiers read chats."""
    (choice,) = body["choices"]
    assert len(body["prompt_token_ids"]) > 3
    assert choice["token_ids"] == [100, 101, EOS]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def pipeline_rl(body: Any) -> None:
    """As PipelineRL reads chats: the text of the answer is that of its tokens."""
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Hello<|endoftext|>"
    tokens = choice["logprobs"]["content"]
    assert [int(one["token"].split(":")[-1]) for one in tokens] == [100, 101, EOS]


MESSAGES = [{"role": "user", "content": "Hello"}]
ROLLOUTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {
    "slime": ("/generate", SLIME, sglang),
    "AReaL on SGLang": ("/generate", AREAL, sglang),
    "verl": ("/generate", VERL, sglang),
    "SkyRL": ("/inference/v1/generate", VLLM_GENERATE, vllm),
    "prime-rl, ids": (
        "/inference/v1/generate",
        {**VLLM_GENERATE, "cache_salt": "step-7", "priority": 0},
        vllm,
    ),
    "AReaL on vLLM": (
        "/v1/completions",
        {
            "model": "sim-chat",
            "prompt": IDS,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 64,
            "temperature": 1.0,
            "stop_token_ids": [EOS],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,
            "use_beam_search": False,
            "stream": False,
        },
        areal_vllm,
    ),
    "prime-rl": (
        CHAT,
        {
            "model": "sim-chat",
            "messages": MESSAGES,
            "temperature": 1.0,
            "top_p": 1.0,
            "logprobs": True,
            "return_token_ids": True,
            "top_k": -1,
            "min_p": 0.0,
            "min_tokens": 0,
            "max_tokens": 64,
            "prompt_logprobs": False,
            "return_tokens_as_token_ids": True,
        },
        prime_rl,
    ),
    "PipelineRL": (
        CHAT,
        {
            "model": "sim-chat",
            "messages": MESSAGES,
            "stream": False,
            "logprobs": 1,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "max_tokens": 64,
            "temperature": 1.0,
            # Its server is started with this one; here it is one of the request's `parameters`.
            "return_tokens_as_token_ids": True,
        },
        pipeline_rl,
    ),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_is_answered_as_the_trainer_reads_it(name: str) -> None:
    path, body, read = ROLLOUTS[name]
    of = rollout()
    answer = send(of, "POST", path, json=body)
    assert answer.status_code == 200, answer.text
    read(answer.json())


@pytest.mark.parametrize("name", ["slime", "SkyRL"])
def test_what_a_trainer_leaves_out_is_neutral_and_not_the_models(name: str) -> None:
    path, body, _ = ROLLOUTS[name]
    of = rollout()
    send(of, "POST", path, json=body)
    sampling = asked(of).sampling
    assert (sampling.temperature, sampling.top_p, sampling.repeat_penalty) == (1.0, 1.0, 1.0)
    assert sampling.top_k > 1000  # the whole vocabulary


def test_a_prompt_is_scored_in_both_words() -> None:
    body = {**VLLM_GENERATE["sampling_params"], "prompt_logprobs": 1, "logprobs": None}
    got = send(
        rollout(), "POST", "/inference/v1/generate", json={**VLLM_GENERATE, "sampling_params": body}
    )
    first, second, third = got.json()["prompt_logprobs"]
    assert first is None
    assert second["6"]["logprob"] == -2.0
    assert (third["7"]["logprob"], third["100"]["rank"]) == (-3.0, 1)
    assert got.json()["choices"][0]["logprobs"] is None
    more = {"logprob_start_len": 0, "top_logprobs_num": 1}
    meta = send(rollout(), "POST", "/generate", json={**SLIME, **more}).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-2.0, 6, None], [-3.0, 7, None]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 100, None]]


def test_streams_of_both() -> None:
    got = events(send(rollout(), "POST", "/generate", json={**SLIME, "stream": True}).text)
    assert [one["text"] for one in got[:-1]] == ["Hel", "Hello", "Hello", "Hello"]
    assert got[-2]["meta_info"]["finish_reason"]["type"] == "stop"
    assert got[-1] == "data: [DONE]"
    body = {**VLLM_GENERATE, "stream": True, "stream_options": {"include_usage": True}}
    got = events(send(rollout(), "POST", "/inference/v1/generate", json=body).text)
    ids = [i for one in got[:-1] for choice in one["choices"] for i in choice["token_ids"]]
    assert ids == [100, 101, EOS]
    assert got[-2]["usage"]["completion_tokens"] == 3


def test_ends_are_told_apart() -> None:
    got = send(rollout(reason=FinishReason.LENGTH), "POST", "/generate", json=SLIME).json()
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    got = send(rollout(reason=FinishReason.ABORT), "POST", "/generate", json=SLIME).json()
    assert got["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_name_of_a_request_is_the_answers_and_not_taken_twice() -> None:
    of = rollout()
    got = send(of, "POST", "/generate", json={**SLIME, "rid": "r-1"}).json()
    assert got["meta_info"]["id"] == "r-1"
    assert asked(of).request_id == f"{named_answer('r-1')}/0"
    again = send(of, "POST", "/generate", json={**SLIME, "rid": "r-1"})
    assert again.status_code == 200  # the first one is over

    async def twice() -> int:
        of.service._named.add(named_answer("r-2"))
        answer = await of("POST", "/generate", json={**SLIME, "rid": "r-2"})
        assert named_answer("r-2") in of.service._named
        return answer.status_code

    assert run_loop(twice()) == 400


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/generate", {"input_ids": None}, "input_ids"),
        ("/generate", {"text": "Hi"}, "input_ids"),
        ("/generate", {"input_ids": [1, "a"]}, "input_ids[1]"),
        ("/generate", {"input_ids": [1, 10**6]}, "input_ids[1]"),
        ("/generate", {"sampling_params": [{}]}, "sampling_params"),
        ("/generate", {"sampling_params": {"nonsense": 1}}, "sampling_params.nonsense"),
        ("/generate", {"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ("/generate", {"image_data": ["x"]}, "image_data"),
        ("/generate", {"token_ids_logprob": [1]}, "token_ids_logprob"),
        ("/generate", {"rid": ["a"]}, "rid"),
        ("/inference/v1/generate", {"token_ids": None}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": "Hi"}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"sampling_params": None}, "sampling_params"),
        ("/inference/v1/generate", {"features": {"a": 1}}, "features"),
        (
            "/inference/v1/generate",
            {"sampling_params": {"bad_words": ["x"]}},
            "sampling_params.bad_words",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(
    path: str, changes: dict[str, Any], param: str
) -> None:
    body = {**(SLIME if path == "/generate" else VLLM_GENERATE), **changes}
    answer = send(rollout(), "POST", path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_grammars_beside_sampling_values_are_followed() -> None:
    params = {"max_new_tokens": 8, "ebnf": 'root ::= "a"'}
    call = parse_generate(json.dumps({"text": "x", "sampling_params": params}).encode())
    assert call.steps.guide == ("ebnf", Guide(GuideKind.LARK, 'root ::= "a"'))


# -- control calls ----------------------------------------------------------------------------


def operated(of: House, method: str, path: str, **rest: Any) -> tuple[OperationKind, JsonObject]:
    """Make a control call, and return what the Coordinator was asked for."""
    answer = send(of, method, path, **rest)
    assert answer.status_code == 200, answer.text
    call = of.head.calls[-1]
    return call.kind, dict(call.params)


CONTROL: dict[str, tuple[str, str, dict[str, Any], OperationKind, JsonObject]] = {
    "slime flushes": ("GET", "/flush_cache", {}, _K.CACHE_RESET, {}),
    "SGLang flushes": ("POST", "/flush_cache?timeout=5", {}, _K.CACHE_RESET, {}),
    "slime releases": (
        *("POST", "/release_memory_occupation"),
        *({"json": {}}, _K.SLEEP, {"level": 1}),
    ),
    "verl releases": (
        *("POST", "/release_memory_occupation"),
        *({"json": {"tags": ["kv_cache", "weights"]}}, _K.SLEEP, {"level": 1}),
    ),
    "slime resumes": (
        *("POST", "/resume_memory_occupation"),
        *({"json": {"tags": None}}, _K.WAKE, {"tags": []}),
    ),
    "verl resumes": (
        *("POST", "/resume_memory_occupation"),
        *({"json": {"tags": ["weights"]}}, _K.WAKE, {"tags": ["weights"]}),
    ),
    "slime aborts all": (
        *("POST", "/abort_request"),
        *({"json": {"abort_all": True}}, _K.ABORT, {"request_ids": None}),
    ),
    "AReaL aborts one": (
        *("POST", "/abort_request"),
        *({"json": {"rid": "r-1"}}, _K.ABORT, {"request_ids": ["r-1", named_answer("r-1")]}),
    ),
    "SkyRL aborts": (
        *("POST", "/abort_requests", {"json": {"request_ids": ["r-1"]}}, _K.ABORT),
        {"request_ids": ["r-1", named_answer("r-1")]},
    ),
    "an answer is aborted": (
        *("POST", "/abort_request", {"json": {"rid": "chatcmpl-1"}}, _K.ABORT),
        {"request_ids": ["chatcmpl-1"]},
    ),
    "slime pauses": ("POST", "/pause_generation", {"json": {}}, _K.PAUSE, {"mode": "abort"}),
    "SkyRL pauses": (
        *("POST", "/pause?mode=abort&wait_for_inflight_requests=false", {}),
        *(_K.PAUSE, {"mode": "abort"}),
    ),
    "vLLM waits": (
        *("POST", "/pause?wait_for_inflight_requests=true", {}),
        *(_K.PAUSE, {"mode": "wait"}),
    ),
    "SkyRL resets": (
        *("POST", "/reset_prefix_cache?reset_external=false&reset_running_requests=false", {}),
        *(_K.CACHE_RESET, {}),
    ),
    "SkyRL sleeps": ("POST", "/sleep?level=2&tags=weights", {}, _K.SLEEP, {"level": 2}),
}


@pytest.mark.parametrize("name", CONTROL)
def test_a_control_call_is_the_operation_that_is_meant(name: str) -> None:
    method, path, rest, kind, params = CONTROL[name]
    found, asked_for = operated(house("a"), method, path, **rest)
    assert found is kind
    assert {key: asked_for[key] for key in params} == params


@pytest.mark.parametrize(
    ("method", "path", "key", "value"),
    [
        ("GET", "/get_weight_version", "weight_version", "default"),
        ("GET", "/weight_version", "weight_version", "default"),
        ("GET", "/get_world_size", "world_size", 2),
        ("GET", "/load", "server_load", 0),
        ("GET", "/version", "version", __version__),
    ],
)
def test_what_trainers_look_at(method: str, path: str, key: str, value: Any) -> None:
    answer = send(house("a", "b"), method, path)
    assert (answer.status_code, answer.json()[key]) == (200, value)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/ping"), ("POST", "/ping"), ("GET", "/health_generate")]
)
def test_what_only_says_that_it_lives(method: str, path: str) -> None:
    answer = send(house("a"), method, path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_without_a_board_nothing_generates() -> None:
    of = House(FakeBoards([]))
    assert send(of, "GET", "/health_generate").status_code == 503


def test_a_flush_waits_for_requests_only_as_long_as_it_was_told() -> None:
    of = House(FakeBoards([report("a", running=1)]))
    answer = send(of, "GET", "/flush_cache?timeout=0.2")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("path", REFUSED)
def test_tensors_are_refused_with_what_to_use_instead(path: str) -> None:
    answer = send(house("a"), "POST", path, json={"group_name": "g", "names": ["w"]})
    assert answer.status_code == 400
    assert "/update_weights_from_disk" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/abort_request", {}, "rid"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "tags"),
        ("/release_memory_occupation", {"tags": ["cuda_graph", "weights"]}, "tags"),
        ("/reset_prefix_cache", {"reset_external": True}, "reset_external"),
        ("/pause", {"mode": "keep", "wait_for_inflight_requests": True}, None),
        ("/update_weights", {"update_info": {"names": ["w"]}}, "update_info"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "/x", "is_3d_lora_weight": True},
            "is_3d_lora_weight",
        ),
    ],
    ids=str,
)
def test_what_a_board_cannot_do_is_refused_by_name(
    path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = send(house("a"), "POST", path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == (param or "wait_for_inflight_requests")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/generate", SLIME, id="slime"),
        pytest.param("/generate", AREAL, id="AReaL"),
        pytest.param(
            "/inference/v1/generate", {"token_ids": IDS, "sampling_params": {}}, id="vLLM"
        ),
    ],
)
def test_the_only_model_that_generates_is_meant_beside_one_for_vectors(
    path: str, body: JsonObject
) -> None:
    of = rollout()
    generates = of.served
    models = {"vectors": embedding_boards.model(), generates.folder.id: generates}
    of.service.models.by_name = models
    assert send(of, "POST", path, json=body).status_code == 200
    assert asked(of).model == generates.folder.id
    models["another"] = generates
    response = send(of, "POST", path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
