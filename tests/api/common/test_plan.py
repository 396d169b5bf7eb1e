"""Calls to generations: how many, how long, and with which sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.common.calls import parse_chat, parse_completion
from rkserve.api.common.plan import plan
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.core.errors import ContextOverflow, RequestError, UnsupportedParameter
from rkserve.core.messages import AdapterRef, GenerateRequest
from rkserve.core.run_params import Sampling
from tests.support.values.wire_folders import VOCABULARY, make_folder

DEFAULTS = Sampling(temperature=0.6, top_p=0.95, top_k=20, repeat_penalty=1.05)
CONTEXT = 64
ADAPTER = AdapterRef("kind", "v2", "0" * 64)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "tiny"))


@pytest.fixture
def text_renderer(tmp_path: Path) -> Renderer:
    return Renderer(make_folder(tmp_path / "textual", tokenizer=False))


def planned(renderer: Renderer, context_len: int = CONTEXT, **keys: Any) -> list[GenerateRequest]:
    body = json.dumps({"model": "m", **keys}).encode()
    call = parse_chat(body) if "messages" in keys else parse_completion(body)
    return plan(
        call,
        ResolvedModel("m", ADAPTER),
        renderer,
        defaults=DEFAULTS,
        context_len=context_len,
        completion="cmpl-1",
    )


def test_a_chat_becomes_one_request_with_the_rest_of_the_context(renderer: Renderer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (request,) = planned(renderer, messages=messages, stop="END", strict_sampling=True)
    prompt = renderer.chat(messages).ids
    assert request == GenerateRequest(
        request_id="cmpl-1/0",
        model="m",
        prompt_ids=prompt,
        max_tokens=CONTEXT - len(prompt),
        sampling=DEFAULTS,
        strict_sampling=True,
        stop=("END",),
        adapter=ADAPTER,
    )


ASKED = {"role": "user", "content": "### Task:\nGenerate a title.\nUSER: Hi"}
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("keys", "once"),
    [
        pytest.param({"messages": [ASKED]}, True, id="a task"),
        pytest.param({"messages": [BRIEF, ASKED]}, True, id="with a system prompt"),
        pytest.param({"messages": [ASKED], "stream": True}, False, id="streamed"),
        pytest.param({"messages": [BRIEF]}, False, id="no user"),
        pytest.param(
            {"messages": [ASKED, {"role": "assistant", "content": "x"}, ASKED]},
            False,
            id="in a conversation",
        ),
        pytest.param({"messages": [{"role": "user", "content": "Hi"}]}, False, id="a question"),
        pytest.param({"prompt": ASKED["content"]}, False, id="a raw prompt"),
    ],
)
def test_what_is_asked_once_is_known_by_its_form(
    renderer: Renderer, keys: dict[str, Any], once: bool
) -> None:
    (request,) = planned(renderer, context_len=500, **keys)
    assert request.once is once


def test_every_choice_of_every_prompt_is_a_request_of_its_own(renderer: Renderer) -> None:
    requests = planned(renderer, prompt=[[7], [8, 9]], n=2)
    assert [(r.request_id, r.prompt_ids) for r in requests] == [
        ("cmpl-1/0", (7,)),
        ("cmpl-1/1", (7,)),
        ("cmpl-1/2", (8, 9)),
        ("cmpl-1/3", (8, 9)),
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


def test_what_pauses_and_where_it_begins_is_handed_on(renderer: Renderer) -> None:
    (request,) = planned(renderer, prompt="Hi", pause_on=["</tool_call>", 7, "."], use_cache="doc")
    assert (request.pause_on_text, request.pause_on_ids) == (("</tool_call>", "."), (7,))
    assert (request.native_pause, request.use_cache) == (True, "doc")


@pytest.mark.parametrize(
    ("keys", "native"),
    [
        pytest.param({}, False, id="nothing is said"),
        pytest.param({"native_pause": True}, True, id="it is asked for"),
        pytest.param({"pause_on": ["x"], "native_pause": False}, False, id="it is asked not to"),
    ],
)
def test_a_native_pause_is_the_client_s_choice(
    renderer: Renderer, keys: dict[str, Any], native: bool
) -> None:
    (request,) = planned(renderer, prompt="Hi", **keys)
    assert request.native_pause is native


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**40])
def test_an_id_to_pause_on_must_be_one_of_the_vocabulary(renderer: Renderer, bad: int) -> None:
    with pytest.raises(RequestError, match=str(bad)) as caught:
        planned(renderer, prompt="Hi", pause_on=["x", bad])
    assert caught.value.param == "pause_on[1]"


def test_text_mode_pauses_on_text_and_not_on_ids(text_renderer: Renderer) -> None:
    (request,) = planned(text_renderer, prompt="Hi", pause_on=["x"])
    assert request.pause_on_text == ("x",)
    with pytest.raises(UnsupportedParameter) as caught:
        planned(text_renderer, prompt="Hi", pause_on=["x", 7])
    assert caught.value.param == "pause_on[1]"
