"""Bodies of the Responses API: calls and the parameters at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.parsing.answer_parser import PLAIN, ParserOptions
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.api.responses.answers import ResponseAnswer
from rkserve.api.responses.requests import ResponseCall, parse_response
from rkserve.core.errors import EngineDied, RequestError
from rkserve.core.run_params import Guide, GuideKind
from tests.support.values.wire_json import JSON

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def parsed(**keys: Any) -> ResponseCall:
    return parse_response(json.dumps({"model": "m", "input": "Hello", **keys}).encode())


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        pytest.param({}, [{"role": "user", "content": "Hello"}], id="a text"),
        pytest.param(
            {"instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            id="instructions",
        ),
        pytest.param(
            {
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {
                        "type": "message",
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "Hel"},
                            {"type": "input_text", "text": "lo"},
                        ],
                    },
                ]
            },
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            id="messages in parts",
        ),
        pytest.param(
            {
                "input": [
                    {"role": "user", "content": "Where?"},
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "Hm."}],
                    },
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
                    },
                    {
                        "type": "function_call",
                        "call_id": "c1",
                        "name": "look",
                        "arguments": '{"at": 1}',
                    },
                    {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "x"},
                    {"type": "function_call_output", "call_id": "c1", "output": "dark"},
                    {
                        "type": "function_call_output",
                        "call_id": "c2",
                        "output": [{"type": "input_text", "text": "light"}],
                    },
                ]
            },
            [
                {"role": "user", "content": "Where?"},
                {
                    "role": "assistant",
                    "content": "Wait.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "look", "arguments": {"at": 1}},
                        },
                        {
                            "id": "c2",
                            "type": "function",
                            "function": {"name": "look", "arguments": {"raw_arguments": "x"}},
                        },
                    ],
                },
                {"role": "tool", "content": "dark", "tool_call_id": "c1"},
                {"role": "tool", "content": "light", "tool_call_id": "c2"},
            ],
            id="thoughts, calls and results",
        ),
    ],
)
def test_items_become_what_templates_read(keys: dict[str, Any], read: list[Any]) -> None:
    assert list(parsed(**keys).messages) == read


@pytest.mark.parametrize(("stop", "read"), [(" the", (" the",)), (["a", "b"], ("a", "b"))])
def test_stop_strings_are_those_of_a_chat(stop: Any, read: tuple[str, ...]) -> None:
    assert parsed(stop=stop).stop == read


def test_the_other_keys_are_those_of_a_chat() -> None:
    call = parsed(
        max_output_tokens=9,
        temperature=0.5,
        stream=True,
        tools=[LOOK],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        metadata={"a": "b"},
        prompt_cache_key="k",
        store=True,
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "low"},
        priority=3,
    )
    assert (call.max_tokens, call.sampling, call.stream) == (9, {"temperature": 0.5}, True)
    assert (call.tools.named, call.tools.forced, call.tools.parallel) == ("look", True, False)
    assert (call.wish.enabled, call.wish.effort) == (True, "low")
    assert (call.session, call.priority) == ("k", 3)
    assert parsed(reasoning={"effort": "none"}).wish.enabled is False
    assert parsed(tools=[LOOK], tool_choice="none").tools.given == ()
    assert parsed(tools=[LOOK], tool_choice="required").tools.forced
    assert parsed(tools=[LOOK], max_tool_calls=2).tools.most_calls == 2


@pytest.mark.parametrize("empty", [[], "", {}, None, False, 0], ids=repr)
def test_empty_metadata_of_any_type_are_none(empty: Any) -> None:
    assert parsed(metadata=empty).echo["metadata"] == {}


OTHERS = [
    {"type": "namespace", "name": "agents", "description": "d", "tools": [LOOK]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search"},
]


def test_offered_tools_of_other_types_are_left_out() -> None:
    call = parsed(tools=[OTHERS[0], LOOK, *OTHERS[1:]])
    assert [tool["function"]["name"] for tool in call.tools.given] == ["look"]
    assert call.left_out == ("namespace", "custom", "local_shell", "web_search")
    assert [tool["name"] for tool in call.echo["tools"]] == ["look"]
    alone = parsed(tools=OTHERS)
    assert (alone.tools.given, alone.left_out) == ((), call.left_out)
    both = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": both}
    must = parsed(tools=[LOOK, *OTHERS], tool_choice=choice).tools
    assert ([one["function"]["name"] for one in must.given], must.forced) == (["look"], True)


WAIT = {**LOOK, "name": "wait"}
SEARCH = {"type": "web_search"}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "tools": [{"type": "function", "name": "wait"}]}
WAIT_ALLOWED: dict[str, Any] = {**ALLOWED, "mode": "auto"}
NONE_ALLOWED: dict[str, Any] = {**WAIT_ALLOWED, "tools": []}
OBJECT = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')
INTEGER = Guide(GuideKind.JSON_SCHEMA, '{"type":"integer"}')
FORM = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        pytest.param({"text": {"format": {"type": "text"}}}, SamplingOptions(), id="text"),
        pytest.param(
            {"text": {"format": {"type": "json_object"}}},
            SamplingOptions(guide=("text.format.type", OBJECT)),
            id="an object",
        ),
        pytest.param(
            {"text": {"format": FORM}},
            SamplingOptions(guide=("text.format.schema", INTEGER)),
            id="a schema",
        ),
        pytest.param({"include": [LOGPROBS]}, SamplingOptions(top_logprobs=0), id="logprobs"),
        pytest.param(
            {"include": ["x", LOGPROBS], "top_logprobs": 3},
            SamplingOptions(top_logprobs=3),
            id="and others",
        ),
        pytest.param({"top_logprobs": 2}, SamplingOptions(top_logprobs=2), id="others"),
        pytest.param({"top_logprobs": 0, "include": []}, SamplingOptions(), id="no logprobs"),
        pytest.param(
            {"seed": 7, "min_p": 0.1}, SamplingOptions(seed=7, min_p=0.1), id="rkserve's own"
        ),
    ],
)
def test_formats_and_logprobs_are_asked_for_in_openai_s_words(
    keys: dict[str, Any], steps: SamplingOptions
) -> None:
    assert parsed(**keys).steps == steps


def test_the_format_is_repeated() -> None:
    told = made(text={"format": FORM}).failed(EngineDied("b", "x"))
    assert told["text"] == {"format": {**FORM, "strict": True, "description": None}}
    assert made().failed(EngineDied("b", "x"))["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(("mode", "forced"), [("auto", False), ("required", True)])
def test_only_tools_that_are_allowed_are_offered(mode: str, forced: bool) -> None:
    tools = parsed(tools=[LOOK, WAIT], tool_choice={**ALLOWED, "mode": mode}).tools
    assert [tool["function"]["name"] for tool in tools.given] == ["wait"]
    assert (tools.forced, tools.named) == (forced, None)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"model": None}, "model", id="no model"),
        pytest.param({"input": None}, "input", id="no input"),
        pytest.param({"input": []}, "input", id="an empty input"),
        pytest.param({"input": [5]}, "input[0]", id="a number for an item"),
        pytest.param({"input": [{"content": "x"}]}, "input[0].role", id="nobody speaks"),
        pytest.param({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", id="who?"),
        pytest.param({"input": [{"role": "user"}]}, "input[0].content", id="says nothing"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
            id="an image that is not there",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
            id="an image that is kept",
        ),
        pytest.param(
            {"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            id="an image of the model",
        ),
        pytest.param({"input": [{"type": "item_reference"}]}, "input[0].id", id="to nothing"),
        pytest.param(
            {"input": [{"type": "item_reference", "id": "msg_1"}] * 1025}, "input", id="to much"
        ),
        pytest.param({"store": "yes"}, "store", id="a word for a switch"),
        pytest.param(
            {"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id", id="no id"
        ),
        pytest.param({"max_output_tokens": 0}, "max_output_tokens", id="a limit of nothing"),
        pytest.param({"previous_response_id": 5}, "previous_response_id", id="a number"),
        pytest.param({"conversation": "c"}, "conversation", id="a conversation"),
        pytest.param({"background": True}, "background", id="in the background"),
        pytest.param({"text": {"format": {"type": "xml"}}}, "text.format.type", id="XML"),
        pytest.param({"text": {"format": {}}}, "text.format.type", id="a format of nothing"),
        pytest.param(
            {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", id="no schema"
        ),
        pytest.param(
            {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
            "guided_regex",
            id="two formats",
        ),
        pytest.param({"top_logprobs": 21}, "top_logprobs", id="too many logprobs"),
        pytest.param({"include": "x"}, "include", id="a word for a list"),
        pytest.param({"tools": [LOOK], "tool_choice": ALLOWED}, "tool_choice.mode", id="no mode"),
        pytest.param(
            {"tools": [LOOK], "tool_choice": NONE_ALLOWED}, "tool_choice.tools", id="none allowed"
        ),
        pytest.param(
            {"tools": [LOOK], "tool_choice": WAIT_ALLOWED},
            "tool_choice.tools[0].name",
            id="an unknown one is allowed",
        ),
        pytest.param({"truncation": "auto"}, "truncation", id="cut to fit"),
        pytest.param({"tools": [{"name": "x"}]}, "tools[0].type", id="a tool of no type"),
        pytest.param({"tools": [{"type": "a\nb"}]}, "tools[0].type", id="no type's name"),
        pytest.param(
            {"tools": [SEARCH], "tool_choice": "required"},
            "tool_choice",
            id="only a server's tool, and it must be called",
        ),
        pytest.param(
            {"tools": [LOOK, SEARCH], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            id="a server's tool must be called",
        ),
        pytest.param(
            {
                "tools": [LOOK, SEARCH],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]},
            },
            "tool_choice",
            id="only a server's tool is allowed, and must be called",
        ),
        pytest.param({"max_tool_calls": 0}, "max_tool_calls", id="no calls at all"),
        pytest.param({"safety_identifier": 5}, "safety_identifier", id="a number for a name"),
        pytest.param({"tools": [{"type": "function"}]}, "tools[0].name", id="without a name"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="none to be called"),
        pytest.param(
            {"tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
            id="a tool that there is not",
        ),
        pytest.param({"reasoning": {"effort": "much"}}, "reasoning.effort", id="a strange effort"),
        pytest.param({"metadata": {"a": 1}}, "metadata.a", id="metadata in numbers"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**keys)
    assert (caught.value.http_status, caught.value.param) == (400, param)


_ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "x"]),
        "content": JSON,
        "call_id": JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
    },
)


@given(items=st.lists(_ITEM, max_size=3) | JSON, tools=JSON, choice=JSON, text=JSON)
def test_whatever_comes_is_read_or_refused(items: Any, tools: Any, choice: Any, text: Any) -> None:
    try:
        call = parsed(input=items, tools=tools, tool_choice=choice, text=text)
    except RequestError as exc:
        found = exc.param is not None or "not valid JSON" in exc.message  # infinity
    else:
        found = all(isinstance(one["content"], str) for one in call.messages)
    assert found


def made(reading: ParserOptions = PLAIN, **keys: Any) -> ResponseAnswer:
    call = parsed(**{"instructions": "Be brief.", "tools": [LOOK], "metadata": {"a": "b"}, **keys})
    return ResponseAnswer(
        call, "resp_1", 1700000000, AnswerOrigin("tiny", "1.3.0", reading=reading)
    )
