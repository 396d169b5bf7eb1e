"""Sampling options that need single steps: read, needed or not, and planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.common.calls import ChatCall, CompletionCall, parse_chat, parse_completion
from rkserve.api.common.plan import held, plan
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.fields import MAX_LOGIT_BIAS
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.messages import (
    GenerateRequest,
)
from rkserve.core.run_params import Sampling, Stepwise
from tests.support.values.wire_folders import CHATML, make_folder

THINKS = CHATML + "{% if add_generation_prompt %}<think>\n{% else %}</think>{% endif %}"
CHANCE = Sampling(temperature=0.8, top_k=40)
USER = [{"role": "user", "content": "Hi"}]


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": USER, **keys}).encode())


def completion(**keys: Any) -> CompletionCall:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi", **keys}).encode())


# -- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        pytest.param({"seed": -3}, SamplingOptions(seed=-3), id="seed"),
        pytest.param({"seed": 2**64 - 1}, SamplingOptions(seed=2**64 - 1), id="a large one"),
        pytest.param({"min_p": 1}, SamplingOptions(min_p=1.0), id="min_p"),
        pytest.param({"min_p": 0}, SamplingOptions(), id="min_p off"),
        pytest.param(
            {"logit_bias": {"7": -100, "05": 1.5}},
            SamplingOptions(logit_bias=((5, 1.5), (7, -100.0))),
            id="logit_bias",
        ),
        pytest.param({"logit_bias": []}, SamplingOptions(), id="an empty bias"),
        pytest.param({"logprobs": False}, SamplingOptions(), id="logprobs off"),
        pytest.param({"ignore_eos": True}, SamplingOptions(ignore_eos=True), id="no end"),
        pytest.param({"min_tokens": 5}, SamplingOptions(min_tokens=5), id="no early end"),
        pytest.param(
            {"ignore_eos": False, "min_tokens": 0}, SamplingOptions(), id="an end whenever"
        ),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_needs_steps_is_read(read: Any, keys: dict[str, Any], steps: SamplingOptions) -> None:
    assert read(**keys).steps == steps


def test_chats_and_completions_ask_for_logprobs_in_their_own_ways() -> None:
    assert chat(logprobs=True).steps.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).steps.top_logprobs == 5
    assert chat(top_logprobs=0).steps.top_logprobs is None
    assert completion(logprobs=0).steps.top_logprobs == 0
    assert completion(logprobs=3).steps.top_logprobs == 3


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias.1"),
        ({"logit_bias": {str(at): 1 for at in range(MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_wrong_value_is_named(read: Any, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**keys)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("read", "keys", "param"),
    [
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": 2}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"echo": 1}, "echo"),
        (completion, {"max_tokens": 0}, "max_tokens"),
        (completion, {"logprobs": 1, "max_tokens": 0}, "max_tokens"),
        (completion, {"n": 3, "best_of": 2}, "best_of"),
        (completion, {"best_of": 17}, "best_of"),
        (completion, {"best_of": 2, "stream": True}, "best_of"),
        (completion, {"best_of": 9, "prompt": ["a", "b"]}, "best_of"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_what_does_not_go_together_is_named(read: Any, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**keys)
    assert caught.value.param == param


# -- whether they are needed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sampling", "name"),
    [
        pytest.param({}, CHANCE, None, id="nothing"),
        pytest.param({"seed": 7}, CHANCE, "seed", id="a seed"),
        pytest.param({"seed": 7}, Sampling(temperature=0), None, id="a seed without chance"),
        pytest.param({"seed": 7}, Sampling(top_k=1), None, id="one to choose among"),
        pytest.param({"min_p": 0.1}, CHANCE, "min_p", id="min_p"),
        pytest.param({"min_p": 0.1}, Sampling(temperature=0), None, id="min_p without chance"),
        pytest.param(
            {"logit_bias": {"1": 5}}, Sampling(temperature=0), "logit_bias", id="a bias decides"
        ),
        pytest.param({"logprobs": True}, Sampling(temperature=0), "logprobs", id="logprobs"),
        pytest.param({"ignore_eos": True}, Sampling(temperature=0), "ignore_eos", id="no end"),
        pytest.param({"min_tokens": 1}, Sampling(temperature=0), "min_tokens", id="no early end"),
    ],
)
def test_steps_are_made_where_they_are_needed_only(
    keys: dict[str, Any], sampling: Sampling, name: str | None
) -> None:
    assert chat(**keys).steps.asked(sampling) == name


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "tiny"))


def planned(
    renderer: Renderer, call: ChatCall | CompletionCall, defaults: Sampling = CHANCE
) -> list[GenerateRequest]:
    meant = ResolvedModel("m", None)
    return plan(
        call, meant, renderer, defaults=defaults, context_len=256, completion="c", dice=4711
    )


def test_each_choice_of_a_prompt_has_its_own_number(renderer: Renderer) -> None:
    call = completion(prompt=["a", "b"], n=2, seed=5, min_p=0.2)
    assert [one.stepwise for one in planned(renderer, call)] == [
        Stepwise(5, 0, min_p=0.2),
        Stepwise(5, 1, min_p=0.2),
    ] * 2


def test_what_has_no_seed_gets_one(renderer: Renderer) -> None:
    (one,) = planned(renderer, chat(logprobs=True, top_logprobs=2))
    assert one.stepwise == Stepwise(4711, top_logprobs=2)
    assert planned(renderer, chat())[0].stepwise is None


def test_the_best_of_several_need_logprobs_that_nobody_is_told(renderer: Renderer) -> None:
    requests = planned(renderer, completion(best_of=3, prompt=[[7], [8]]))
    assert [one.stepwise for one in requests] == [
        Stepwise(4711, choice, top_logprobs=0) for choice in (0, 1, 2)
    ] * 2


def test_an_echo_asks_for_the_prompts_logprobs_and_may_ask_for_nothing_else(
    renderer: Renderer,
) -> None:
    (one,) = planned(renderer, completion(echo=True, logprobs=1, max_tokens=0))
    assert one.stepwise == Stepwise(4711, top_logprobs=1, prompt_logprobs=True)
    assert one.max_tokens == 0
    assert planned(renderer, completion(echo=True))[0].stepwise is None
    (nothing,) = planned(renderer, completion(echo=True, max_tokens=0))
    assert (nothing.stepwise, nothing.max_tokens) == (None, 0)


def test_how_long_the_model_may_not_end_an_answer(renderer: Renderer) -> None:
    (later,) = planned(renderer, chat(min_tokens=3, max_tokens=3))
    assert later.stepwise == Stepwise(4711, least=3)
    (never,) = planned(renderer, chat(ignore_eos=True, stop="x"), Sampling(temperature=0))
    assert never.stepwise is not None
    assert never.stepwise.least > 10**6


FORCED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "guided_regex": "a",
}


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"seed": 1, "mirostat": 2}, "seed"),
        ({"seed": 1, "use_cache": "doc"}, "use_cache"),
        ({"logit_bias": {"99999": 1}}, "logit_bias.99999"),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
        ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 3, "stop": "x"}, "min_tokens"),
    ],
)
def test_what_steps_cannot_have_is_refused(
    renderer: Renderer, keys: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        planned(renderer, chat(**keys))
    assert caught.value.param == param


def test_without_a_tokenizer_there_are_no_steps(tmp_path: Path) -> None:
    textual = Renderer(make_folder(tmp_path / "textual", tokenizer=False))
    with pytest.raises(UnsupportedParameter, match="needs a tokenizer") as caught:
        planned(textual, chat(seed=1))
    assert caught.value.param == "seed"
    assert planned(textual, chat())[0].stepwise is None
    with pytest.raises(UnsupportedParameter):
        textual.vocabulary()


def test_a_tokenizer_of_another_kind_tells_no_logprobs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "strange")
    assert folder.tokenizer_file is not None
    renderer = Renderer(folder)
    found = json.loads(folder.tokenizer_file.read_text())
    folder.tokenizer_file.write_text(json.dumps(found | {"decoder": {"type": "WordPiece"}}))
    with pytest.raises(UnsupportedParameter, match="bytes") as caught:
        renderer.vocabulary()
    assert caught.value.param == "logprobs"


def test_an_answer_that_follows_a_grammar_has_no_thoughts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "thinks", template=THINKS)
    (free,) = planned(Renderer(folder), chat())
    (guided,) = planned(Renderer(folder), chat(guided_regex="a+"))
    assert free.thinking is not None
    assert free.thinking.begun
    assert guided.thinking is None
    assert guided.prompt_ids != free.prompt_ids  # what the template has begun is ended


def test_an_answer_cannot_be_a_call_and_follow_a_grammar(tmp_path: Path) -> None:
    template = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
    folder = make_folder(tmp_path / "calls", template=template, settings="tool_format: hermes")
    with pytest.raises(RequestError, match="call a tool") as caught:
        held(chat(**FORCED), Renderer(folder))
    assert caught.value.param == "guided_regex"
    (free,) = planned(Renderer(folder), chat(**FORCED | {"tool_choice": "auto"}))
    assert free.stepwise is not None


def test_a_call_that_is_forced_goes_before_the_form_of_the_words(tmp_path: Path) -> None:
    template = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
    folder = make_folder(tmp_path / "calls", template=template, settings="tool_format: hermes")
    asked = {**FORCED, "guided_regex": None, "response_format": {"type": "json_object"}}
    renderer = Renderer(folder)
    (forced,) = planned(renderer, held(chat(**asked), renderer))
    assert forced.stepwise is None
    (free,) = planned(Renderer(folder), chat(**asked | {"tool_choice": "auto"}))
    assert free.stepwise is not None
