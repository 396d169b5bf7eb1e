"""Bodies of Ollama's API: calls and the parameters at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.ollama.models import parse_show
from rkserve.api.ollama.requests import parse_chat, parse_generate, parse_load
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.api.parsing.tool_choice import ToolOptions
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import Guide, GuideKind
from tests.support.values.wire_json import JSON

HELLO = {"role": "user", "content": "Hello"}


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": [HELLO], **keys}).encode())


def generate(**keys: Any) -> ChatCall | CompletionCall:
    return parse_generate(json.dumps({"model": "m", "prompt": "Hello", **keys}).encode())


def test_answers_are_streamed_unless_the_client_says_no() -> None:
    assert chat().stream
    assert not chat(stream=False).stream
    assert generate(stream=None).stream


@pytest.mark.parametrize(
    ("limit", "most"), [(None, None), (-2, None), (-1, None), (0, None), (7, 7)], ids=str
)
def test_num_predict_is_the_limit_where_it_is_one(limit: int | None, most: int | None) -> None:
    assert chat(options={"num_predict": limit}).max_tokens == most


def test_options_are_sampling_values_and_stops() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "repeat_penalty": 1.5,
        "stop": ["a", "b"],
        "num_ctx": 2048,
        "num_gpu": 1,
        "min_p": 0.0,
    }
    call = chat(options=options, keep_alive="5m", priority=3, timeout=5)
    assert call.sampling == {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "repeat_penalty": 1.5,
    }
    assert (call.stop, call.priority, call.timeout_s) == (("a", "b"), 3, 5.0)


JSON_GUIDE = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        pytest.param({}, SamplingOptions(), id="nothing"),
        pytest.param({"options": {"seed": 7}}, SamplingOptions(seed=7), id="a seed"),
        pytest.param({"options": {"seed": -1}}, SamplingOptions(), id="the seed that is none"),
        pytest.param({"options": {"min_p": 0.1}}, SamplingOptions(min_p=0.1), id="min_p"),
        pytest.param(
            {"options": {"logit_bias": {"5": 2}}},
            SamplingOptions(logit_bias=((5, 2.0),)),
            id="a bias",
        ),
        pytest.param({"format": ""}, SamplingOptions(), id="no format"),
        pytest.param({"format": "json"}, SamplingOptions(guide=("format", JSON_GUIDE)), id="JSON"),
        pytest.param(
            {"format": {"type": "integer"}},
            SamplingOptions(guide=("format", Guide(GuideKind.JSON_SCHEMA, '{"type":"integer"}'))),
            id="a schema",
        ),
    ],
)
def test_seeds_and_formats_are_asked_for_in_ollama_s_words(
    keys: dict[str, Any], steps: SamplingOptions
) -> None:
    assert chat(**keys).steps == steps
    assert generate(**keys).steps == steps
    assert generate(raw=True, **keys).steps == steps


def test_calls_and_results_of_tools_find_each_other_by_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": 1}}} for name in ("look", "wait")]
    call = chat(
        messages=[
            HELLO,
            {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "hm"},
            {"role": "tool", "content": "dark", "tool_name": "look"},
            {"role": "tool", "content": "done", "tool_name": "wait"},
            {"role": "assistant", "tool_calls": calls[:1]},
            {"role": "tool", "content": "light"},
        ]
    )
    _, first, look, wait, second, again = call.messages
    assert first["reasoning_content"] == "hm"
    assert [one["id"] for one in first["tool_calls"]] == ["call00000", "call00001"]
    assert first["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert look == {
        "role": "tool",
        "content": "dark",
        "tool_call_id": "call00000",
        "name": "look",
    }
    assert wait["tool_call_id"] == "call00001"
    assert second["tool_calls"][0]["id"] == again["tool_call_id"] == "call00002"


@pytest.mark.parametrize(
    ("ids", "results", "answered"),
    [
        pytest.param(
            (None, None), ({"tool_name": "wait"}, {"tool_name": "look"}), (1, 0), id="by name"
        ),
        pytest.param(
            ("a", "b"), ({"tool_name": "look"}, {"name": "wait"}), (0, 1), id="calls with ids"
        ),
        pytest.param(("a", "b"), ({"tool_call_id": "b"}, {}), (1, 0), id="one by its id"),
        pytest.param((None, None), ({"tool_name": "see"}, {}), (0, 1), id="a name of no call"),
    ],
)
def test_results_of_tools_find_their_calls(
    ids: tuple[str | None, ...], results: tuple[dict[str, str], ...], answered: tuple[int, ...]
) -> None:
    named = zip(ids, ("look", "wait"), strict=True)
    calls = [{"id": one, "function": {"name": name, "arguments": {}}} for one, name in named]
    told = [{"role": "tool", "content": "x", **result} for result in results]
    turn = {"role": "assistant", "tool_calls": calls}
    _, made, *read = chat(messages=[HELLO, turn, *told]).messages
    given = [call["id"] for call in made["tool_calls"]]
    assert [one["tool_call_id"] for one in read] == [given[at] for at in answered]


def test_results_of_no_call_have_ids_of_their_own() -> None:
    said = {"role": "tool", "content": "x"}
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    first, second, made, third = chat(messages=[said, said, turn, said]).messages
    ids = [first["tool_call_id"], second["tool_call_id"], third["tool_call_id"]]
    assert len(set(ids)) == 3
    assert made["tool_calls"][0]["id"] == ids[2]


@pytest.mark.parametrize(
    ("keys", "made"),
    [
        pytest.param({}, (HELLO,), id="a prompt is a turn of the user"),
        pytest.param(
            {"system": "Be brief."},
            ({"role": "system", "content": "Be brief."}, HELLO),
            id="system",
        ),
    ],
)
def test_generate_renders_its_prompt(keys: dict[str, Any], made: tuple[Any, ...]) -> None:
    call = generate(**keys)
    assert isinstance(call, ChatCall)
    assert call.messages == made


def test_a_raw_prompt_is_taken_as_it_is() -> None:
    call = generate(raw=True)
    assert isinstance(call, CompletionCall)
    assert (call.prompts, call.max_tokens) == (("Hello",), None)


@pytest.mark.parametrize(
    ("asked", "model"),
    [("m", "m"), ("m:latest", "m"), ("m:tone@v2", "m:tone@v2"), (":latest", ":latest")],
    ids=str,
)
def test_the_tag_that_clients_add_is_dropped(asked: str, model: str) -> None:
    assert chat(model=asked).model == model
    assert parse_show(json.dumps({"name": asked}).encode()) == model


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"model": None}, "model", id="no model"),
        pytest.param({"model": 5}, "model", id="a number for a model"),
        pytest.param({"messages": "hi"}, "messages", id="a text for messages"),
        pytest.param({"messages": [1]}, "messages[0]", id="a number for a message"),
        pytest.param({"messages": [{"content": "x"}]}, "messages[0].role", id="nobody speaks"),
        pytest.param({"messages": [{**HELLO, "role": "x"}]}, "messages[0].role", id="who?"),
        pytest.param({"messages": [{**HELLO, "content": []}]}, "messages[0].content", id="parts"),
        pytest.param({"messages": [{**HELLO, "images": ["?"]}]}, "messages[0].images[0]", id="?"),
        pytest.param({"messages": [{**HELLO, "images": [5]}]}, "messages[0].images[0]", id="a 5"),
        pytest.param({"messages": [{**HELLO, "images": "x"}]}, "messages[0].images", id="no list"),
        pytest.param(
            {"messages": [{"role": "system", "content": "", "images": ["eA=="]}]},
            "messages[0].images",
            id="an image of the operator",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            id="a call of nothing",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            id="arguments in words",
        ),
        pytest.param({"options": []}, "options", id="options in a list"),
        pytest.param({"options": {"temperature": "hot"}}, "options.temperature", id="a word"),
        pytest.param({"options": {"num_predict": 1.5}}, "options.num_predict", id="half a token"),
        pytest.param({"options": {"stop": [""]}}, "options.stop[0]", id="an empty stop"),
        pytest.param({"options": {"stop": ["x"] * 17}}, "options.stop", id="too many stops"),
        pytest.param({"options": {"min_p": 2}}, "min_p", id="a share of two"),
        pytest.param({"options": {"typical_p": 0.5}}, "typical_p", id="typical_p"),
        pytest.param({"options": {"seed": "x"}}, "seed", id="a word for a seed"),
        pytest.param({"stream": 1}, "stream", id="a number for a flag"),
        pytest.param({"tools": [{}]}, "tools[0].type", id="a tool of nothing"),
        pytest.param({"format": "xml"}, "format", id="XML"),
        pytest.param({"format": [1]}, "format", id="a list for a format"),
        pytest.param({"think": "a lot"}, "think", id="a strange effort"),
        pytest.param({"think": 1}, "think", id="a number of thoughts"),
        pytest.param({"logprobs": True}, "logprobs", id="logprobs"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**keys)
    assert caught.value.http_status == 400
    assert caught.value.param in {param, f"options.{param}"}


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"prompt": ["x"]}, "prompt", id="a list for a prompt"),
        pytest.param({"suffix": "x"}, "suffix", id="a suffix"),
        pytest.param({"template": "x"}, "template", id="a template"),
        pytest.param({"context": [1]}, "context", id="a context"),
        pytest.param({"images": [""]}, "images[0]", id="an empty image"),
        pytest.param({"images": ["eA=="], "raw": True}, "images", id="raw with an image"),
        pytest.param({"raw": True, "system": "x"}, "system", id="raw with a system prompt"),
    ],
)
def test_generate_names_what_it_cannot_do(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        generate(**keys)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "what", "load"),
    [
        pytest.param({"model": "m:latest"}, "prompt", "m", id="no prompt"),
        pytest.param({"model": "m", "prompt": ""}, "prompt", "m", id="an empty one"),
        pytest.param({"model": "m", "messages": []}, "messages", "m", id="no messages"),
        pytest.param({"model": "m", "keep_alive": False}, "prompt", "m", id="no number"),
        pytest.param({"model": "m", "prompt": "x"}, "prompt", None, id="a prompt"),
        pytest.param({"model": "m", "prompt": 5}, "prompt", None, id="read later"),
    ],
)
def test_a_call_without_a_prompt_only_loads(
    body: dict[str, Any], what: str, load: str | None
) -> None:
    assert parse_load(json.dumps(body).encode(), what) == load


@pytest.mark.parametrize("keep_alive", [0, "0", "0s"])
def test_clients_do_not_unload_models(keep_alive: Any) -> None:
    body = json.dumps({"model": "m", "keep_alive": keep_alive}).encode()
    with pytest.raises(UnsupportedParameter) as caught:
        parse_load(body, "prompt")
    assert caught.value.param == "keep_alive"


@given(messages=JSON, options=JSON, think=JSON, stream=JSON)
def test_whatever_comes_is_read_or_refused(
    messages: Any, options: Any, think: Any, stream: Any
) -> None:
    try:
        call = chat(messages=messages, options=options, think=think, stream=stream)
    except RequestError as exc:
        found = exc.param is not None or "not valid JSON" in exc.message  # infinity
    else:
        found = all(isinstance(one["content"], str) for one in call.messages)
    assert found


@pytest.mark.parametrize(
    ("keys", "wish"),
    [
        pytest.param({}, (None, None), id="the model's own"),
        pytest.param({"think": True}, (True, None), id="think"),
        pytest.param({"think": False}, (False, None), id="do not"),
        pytest.param({"think": "low"}, (True, "low"), id="a little"),
        pytest.param({"enable_thinking": False}, (False, None), id="rkserve's own key"),
    ],
)
def test_think_is_read_in_both_calls(keys: dict[str, Any], wish: Any) -> None:
    for call in (chat(**keys), generate(**keys)):
        assert isinstance(call, ChatCall)
        assert (call.wish.enabled, call.wish.effort) == wish


def test_tools_are_openai_s() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert chat(tools=[tool]).tools == ToolOptions((tool,))
