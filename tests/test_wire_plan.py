"""Calls to generations: how many, how long, and with which sampling."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from wire_folders import VOCABULARY, make_folder

from rkserve.errors import ContextOverflow, UnsupportedParameter
from rkserve.messages import GenerateRequest, Sampling
from rkserve.wire.openai import parse_chat, parse_completion
from rkserve.wire.plan import plan
from rkserve.wire.renderer import Renderer

DEFAULTS = Sampling(temperature=0.6, top_p=0.95, top_k=20, repeat_penalty=1.05)
CONTEXT = 64


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "tiny"))


@pytest.fixture
def text_renderer(tmp_path: Path) -> Renderer:
    return Renderer(make_folder(tmp_path / "textual", tokenizer=False))


def planned(renderer: Renderer, context_len: int = CONTEXT, **keys: Any) -> list[GenerateRequest]:
    body = json.dumps({"model": "m", **keys}).encode()
    call = parse_chat(body) if "messages" in keys else parse_completion(body)
    ids = count()
    return plan(call, renderer, DEFAULTS, context_len, lambda: f"r{next(ids)}")


def test_a_chat_becomes_one_request_with_the_rest_of_the_context(renderer: Renderer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (request,) = planned(renderer, messages=messages, stop="END", strict_sampling=True)
    prompt = renderer.chat(messages).ids
    assert request == GenerateRequest(
        request_id="r0",
        model="m",
        prompt_ids=prompt,
        max_tokens=CONTEXT - len(prompt),
        sampling=DEFAULTS,
        strict_sampling=True,
        stop=("END",),
    )


def test_every_choice_of_every_prompt_is_a_request_of_its_own(renderer: Renderer) -> None:
    requests = planned(renderer, prompt=[[7], [8, 9]], n=2)
    assert [(r.request_id, r.prompt_ids) for r in requests] == [
        ("r0", (7,)),
        ("r1", (7,)),
        ("r2", (8, 9)),
        ("r3", (8, 9)),
    ]


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "limit"),
    [
        pytest.param(10, None, 16, id="completions default to 16"),
        pytest.param(10, 5, 5, id="what was asked"),
        pytest.param(10, 54, 54, id="exactly the rest"),
        pytest.param(10, 55, 54, id="never more than the rest"),
        pytest.param(10, 10**30, 54, id="never more than the rest, however large"),
        pytest.param(60, None, 4, id="the default shrinks too"),
        pytest.param(63, None, 1, id="room for one"),
    ],
)
def test_max_tokens(renderer: Renderer, prompt_tokens: int, asked: int | None, limit: int) -> None:
    (request,) = planned(renderer, prompt=[7] * prompt_tokens, max_tokens=asked)
    assert request.max_tokens == limit


@pytest.mark.parametrize("size", [64, 65, 500])
def test_a_prompt_that_leaves_no_room_overflows(renderer: Renderer, size: int) -> None:
    with pytest.raises(ContextOverflow) as caught:
        planned(renderer, prompt=[[7], [7] * size])
    assert (caught.value.prompt_tokens, caught.value.context_len) == (size, CONTEXT)
    assert caught.value.param == "prompt"


def test_a_chat_that_leaves_no_room_overflows_by_its_messages(renderer: Renderer) -> None:
    with pytest.raises(ContextOverflow) as caught:
        planned(renderer, messages=[{"role": "user", "content": "é!" * 60}])
    assert caught.value.param == "messages"
    assert not caught.value.at_least


@pytest.mark.parametrize(
    ("keys", "sampling", "asked"),
    [
        pytest.param({}, DEFAULTS, (), id="nothing asked"),
        pytest.param(
            {"temperature": 0},
            Sampling(temperature=0.0, top_p=0.95, top_k=20, repeat_penalty=1.05),
            ("temperature",),
            id="greedy",
        ),
        pytest.param(
            {"top_k": 5, "repetition_penalty": 1.3, "presence_penalty": 1},
            Sampling(0.6, 0.95, 5, 1.3, 0.0, 1.0),
            ("presence_penalty", "top_k", "repeat_penalty"),
            id="several",
        ),
        pytest.param(
            {"top_k": -1},
            Sampling(0.6, 0.95, VOCABULARY, 1.05),
            ("top_k",),
            id="top_k off: the vocabulary",
        ),
        pytest.param(
            {"top_k": 10**12},
            Sampling(0.6, 0.95, VOCABULARY, 1.05),
            ("top_k",),
            id="top_k is cut to it",
        ),
    ],
)
def test_sampling_is_the_models_with_what_the_client_set(
    renderer: Renderer, keys: dict[str, Any], sampling: Sampling, asked: tuple[str, ...]
) -> None:
    (request,) = planned(renderer, prompt="Hi", **keys)
    assert (request.sampling, request.sampling_asked) == (sampling, asked)


def test_text_mode_leaves_the_counting_to_the_runtime(text_renderer: Renderer) -> None:
    (request,) = planned(text_renderer, messages=[{"role": "user", "content": "Hi"}])
    assert request.prompt_ids == ()
    assert request.prompt_text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert request.max_tokens == CONTEXT - 1


@pytest.mark.parametrize("top_k", [0, -1, 1025])
def test_text_mode_refuses_a_top_k_that_it_cannot_bound(
    text_renderer: Renderer, top_k: int
) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        planned(text_renderer, prompt="Hi", top_k=top_k)
    assert caught.value.param == "top_k"
