"""Bodies of the Messages API: calls and the parameters at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.anthropic.requests import parse_count, parse_messages
from rkserve.api.common.calls import ChatCall
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.api.parsing.tool_choice import NO_TOOLS, ToolOptions
from rkserve.core.errors import (
    RequestError,
    UnsupportedParameter,
)
from rkserve.core.run_params import Guide, GuideKind
from tests.support.values.wire_json import JSON

HELLO = {"role": "user", "content": "Hello"}
FORM = {"type": "json_schema", "schema": {"type": "integer"}}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def parsed(**keys: Any) -> ChatCall:
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO], **keys}
    return parse_messages(json.dumps(body).encode())


def text(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


SOURCE = "messages[0].content[0].source"


def shown(source: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        pytest.param({"messages": [HELLO]}, [HELLO], id="a text"),
        pytest.param(
            {"messages": [{"role": "user", "content": text("Hel", "lo")}]}, [HELLO], id="blocks"
        ),
        pytest.param(
            {"system": "Be brief."},
            [{"role": "system", "content": "Be brief."}, HELLO],
            id="system",
        ),
        pytest.param(
            {"system": text("x-anthropic-billing-header: cc_version=1; cch=0;", "Be brief.")},
            [{"role": "system", "content": "Be brief."}, HELLO],
            id="system, behind a note to the provider",
        ),
        pytest.param(
            {"system": text("Be ", "brief.")},
            [{"role": "system", "content": "Be brief."}, HELLO],
            id="system in blocks",
        ),
        pytest.param(
            {"messages": [HELLO, {"role": "system", "content": "Now rhyme."}, HELLO]},
            [HELLO, {"role": "system", "content": "Now rhyme."}, HELLO],
            id="system in the middle",
        ),
        pytest.param(
            {
                "messages": [
                    HELLO,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": "s"},
                            *text("Let me look."),
                            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                            {"type": "tool_use", "id": "t2", "name": "wait", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": "dark"},
                            {
                                "type": "tool_result",
                                "tool_use_id": "t2",
                                "content": text("do", "ne"),
                            },
                            *text("And?"),
                        ],
                    },
                ]
            },
            [
                HELLO,
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "Let me look.",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "type": "function",
                            "function": {"name": "look", "arguments": {"at": 1}},
                        },
                        {
                            "id": "t2",
                            "type": "function",
                            "function": {"name": "wait", "arguments": {}},
                        },
                    ],
                },
                {"role": "tool", "content": "dark", "tool_call_id": "t1"},
                {"role": "tool", "content": "done", "tool_call_id": "t2"},
                {"role": "user", "content": "And?"},
            ],
            id="calls of tools and their results",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            *text("a"),
                            {"type": "tool_result", "tool_use_id": "t"},
                            *text("b"),
                        ],
                    }
                ]
            },
            [
                {"role": "user", "content": "a"},
                {"role": "tool", "content": "", "tool_call_id": "t"},
                {"role": "user", "content": "b"},
            ],
            id="a result between words",
        ),
    ],
)
def test_a_conversation_becomes_what_templates_read(
    keys: dict[str, Any], read: list[dict[str, Any]]
) -> None:
    assert list(parsed(**keys).messages) == read


def test_the_other_keys_are_those_of_every_call() -> None:
    call = parsed(
        stop_sequences=["a", "b", "c", "d", "e"],
        temperature=0.5,
        top_k=7,
        top_p=0.5,
        stream=True,
        metadata={"user_id": "u1"},
        priority=3,
        timeout=5,
        service_tier="auto",
        nonsense=1,
    )
    assert call.stop == ("a", "b", "c", "d", "e")
    assert call.sampling == {"temperature": 0.5, "top_k": 7, "top_p": 0.5}
    assert (call.stream, call.session, call.priority, call.timeout_s) == (True, "u1", 3, 5.0)
    assert (call.max_tokens, call.n, call.choices) == (9, 1, 1)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"model": None}, "model", id="no model"),
        pytest.param({"max_tokens": None}, "max_tokens", id="no limit"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="a limit of nothing"),
        pytest.param({"max_tokens": "9"}, "max_tokens", id="a limit in words"),
        pytest.param({"messages": None}, "messages", id="no messages"),
        pytest.param({"messages": []}, "messages", id="an empty conversation"),
        pytest.param({"messages": ["hi"]}, "messages[0]", id="a text for a message"),
        pytest.param({"messages": [{"content": "x"}]}, "messages[0].role", id="nobody speaks"),
        pytest.param({"messages": [{**HELLO, "role": "tool"}]}, "messages[0].role", id="a tool"),
        pytest.param({"messages": [{"role": "user"}]}, "messages[0].content", id="says nothing"),
        pytest.param(
            {"messages": [{"role": "user", "content": []}]}, "messages[0].content", id="no blocks"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", id="a number"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source",
            id="an image from nowhere",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
            id="a document",
        ),
        pytest.param(
            shown({"type": "file", "file_id": "x"}), f"{SOURCE}.type", id="an image that is kept"
        ),
        pytest.param(shown({"data": "eA=="}), f"{SOURCE}.type", id="an image of no type"),
        pytest.param(
            shown({"type": "base64", "media_type": "image/tiff", "data": "eA=="}),
            f"{SOURCE}.media_type",
            id="an image of another type",
        ),
        pytest.param(
            shown({"type": "base64", "media_type": "image/png", "data": "?"}),
            f"{SOURCE}.data",
            id="an image that is not base64",
        ),
        pytest.param(
            shown({"type": "url", "url": "file:///etc/passwd"}), f"{SOURCE}.url", id="a file's URL"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            id="a text without text",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].type",
            id="the user calls a tool",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
            id="a result of nothing",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "image"}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
            id="a result with an image",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "n", "input": "x"}],
                    },
                    HELLO,
                ]
            },
            "messages[0].content[0].input",
            id="arguments that are no object",
        ),
        pytest.param(
            {
                "messages": [
                    HELLO,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}],
                    },
                ]
            },
            "messages",
            id="a call without its result at the end",
        ),
        pytest.param({"system": 5}, "system", id="a number for a system prompt"),
        pytest.param({"system": [{"type": "image"}]}, "system[0].type", id="a system image"),
        pytest.param({"stop_sequences": ["x"] * 17}, "stop_sequences", id="too many stops"),
        pytest.param({"stop_sequences": [""]}, "stop_sequences[0]", id="an empty stop"),
        pytest.param({"temperature": 3}, "temperature", id="too hot"),
        pytest.param({"stream": "yes"}, "stream", id="a word for a flag"),
        pytest.param({"tools": "x"}, "tools", id="a word for tools"),
        pytest.param({"tools": [{}]}, "tools[0].name", id="a tool without a name"),
        pytest.param({"tools": [{"name": "a b"}]}, "tools[0].name", id="a name with a blank"),
        pytest.param(
            {"tools": [{"type": "web search", "name": "x"}]}, "tools[0].type", id="no type's name"
        ),
        pytest.param(
            {"tools": [SEARCH], "tool_choice": {"type": "any"}},
            "tool_choice",
            id="only a tool of the server's, and it must be called",
        ),
        pytest.param(
            {"tools": [LOOK, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name",
            id="a tool of the server's must be called",
        ),
        pytest.param(
            {"tools": [{"name": "x", "input_schema": []}]}, "tools[0].input_schema", id="no schema"
        ),
        pytest.param({"tools": [{"name": "x"}] * 129}, "tools", id="too many tools"),
        pytest.param({"tool_choice": {"type": "any"}}, "tool_choice", id="none to be called"),
        pytest.param({"tool_choice": {"type": "x"}}, "tool_choice.type", id="a strange choice"),
        pytest.param(
            {"tools": [{"name": "x"}], "tool_choice": {"type": "tool", "name": "y"}},
            "tool_choice.name",
            id="a tool that there is not",
        ),
        pytest.param({"thinking": {"type": "x"}}, "thinking.type", id="strange thoughts"),
        pytest.param(
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
            "thinking.budget_tokens",
            id="thoughts of nothing",
        ),
        pytest.param(
            {"output_config": {"effort": "much"}}, "output_config.effort", id="a strange effort"
        ),
        pytest.param(
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
            id="no schema",
        ),
        pytest.param(
            {"output_format": {"type": "json_object"}}, "output_format.type", id="another format"
        ),
        pytest.param(
            {"output_config": {"format": FORM}, "output_format": FORM}, "output_format", id="two"
        ),
        pytest.param(
            {"output_format": FORM, "guided_regex": "a"}, "guided_regex", id="two of two kinds"
        ),
        pytest.param({"seed": "x"}, "seed", id="a word for a seed"),
        pytest.param({"mcp_servers": [{}]}, "mcp_servers", id="servers of tools"),
        pytest.param({"container": "c"}, "container", id="a container"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**keys)
    assert (caught.value.http_status, caught.value.param) == (400, param)


def edits(**edit: Any) -> dict[str, Any]:
    """Keys of a call that asks for one edit of its conversation, or with nothing for none."""
    return {"context_management": {"edits": [edit] if edit else []}}


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"context_management": "x"}, id="a word"),
        pytest.param({"context_management": {"edits": 5}}, id="a number of edits"),
        pytest.param({"context_management": {"edits": [5]}}, id="a number for an edit"),
        pytest.param(edits(type="clear_thinking_20251015"), id="thoughts of earlier turns"),
        pytest.param(
            edits(type="clear_thinking_20251015", keep={"type": "thinking_turns", "value": 2}),
            id="thoughts but for two turns",
        ),
        pytest.param(
            edits(
                type="clear_tool_uses_20250919", trigger={"type": "input_tokens", "value": 16383}
            ),
            id="within a context",
        ),
        pytest.param(
            edits(type="clear_tool_uses_20250919", trigger={"type": "tool_uses", "value": 50}),
            id="after so many calls",
        ),
        pytest.param(edits(type="forget_20990101"), id="unknown"),
    ],
)
def test_edits_that_would_change_a_prompt_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parsed(**keys)
    assert caught.value.param == "context_management"


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"tools": []}, id="no tools"),
        pytest.param({"tool_choice": {"type": "auto"}}, id="a choice among none"),
        pytest.param({"thinking": {"type": "disabled"}}, id="no thoughts"),
        pytest.param({"mcp_servers": [], "context_management": {}}, id="nothing of it"),
        pytest.param(edits(), id="no edits"),
        pytest.param(edits(type="clear_thinking_20251015", keep="all"), id="all thoughts are kept"),
        pytest.param(edits(type="clear_tool_uses_20250919"), id="an edit beyond every context"),
        pytest.param(
            edits(type="compact_20260112", trigger={"type": "input_tokens", "value": 150000}),
            id="a summary beyond every context",
        ),
        pytest.param({"metadata": {"user_id": 5}}, id="a user without a name"),
        pytest.param({"metadata": "x"}, id="no metadata"),
        pytest.param({"output_config": {"format": None}, "output_format": None}, id="no format"),
    ],
)
def test_what_asks_for_nothing_is_accepted(keys: dict[str, Any]) -> None:
    assert parsed(**keys).session is None


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        pytest.param(
            {"output_config": {"format": FORM}}, "output_config.format.schema", id="in its place"
        ),
        pytest.param({"output_format": FORM}, "output_format.schema", id="by its older name"),
    ],
)
def test_a_format_is_a_schema_that_the_answer_follows(keys: dict[str, Any], name: str) -> None:
    guide = Guide(GuideKind.JSON_SCHEMA, '{"type":"integer"}')
    assert parsed(**keys).steps == SamplingOptions(guide=(name, guide))


def test_seeds_and_biases_are_rkserve_s_own_words_here() -> None:
    steps = parsed(seed=7, min_p=0.1, logit_bias={"5": 2}).steps
    assert steps == SamplingOptions(seed=7, min_p=0.1, logit_bias=((5, 2.0),))


LOOKS = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        pytest.param(None, ToolOptions((LOOKS,)), id="as it likes"),
        pytest.param({"type": "auto"}, ToolOptions((LOOKS,)), id="as it likes, said"),
        pytest.param({"type": "any"}, ToolOptions((LOOKS,), forced=True), id="one of them"),
        pytest.param(
            {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            ToolOptions((LOOKS,), forced=True, named="look", parallel=False),
            id="this one, once",
        ),
        pytest.param({"type": "none"}, NO_TOOLS, id="none"),
    ],
)
def test_tools_are_offered_as_openai_s_are(choice: Any, read: ToolOptions) -> None:
    assert parsed(tools=[LOOK], tool_choice=choice).tools == read


def test_a_tool_without_a_schema_takes_nothing() -> None:
    (tool,) = parsed(tools=[{"type": "custom", "name": "x"}]).tools.given
    assert tool["function"] == {"name": "x", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("keys", "wish"),
    [
        pytest.param({}, (False, None, None), id="not asked for"),
        pytest.param({"thinking": {"type": "disabled"}}, (False, None, None), id="not wanted"),
        pytest.param(
            {"thinking": {"type": "enabled", "budget_tokens": 50}}, (True, None, 50), id="so long"
        ),
        pytest.param(
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            (True, "low", None),
            id="with little effort",
        ),
        pytest.param({"enable_thinking": True}, (True, None, None), id="rkserve's own key"),
    ],
)
def test_thoughts_come_where_they_are_asked_for(keys: dict[str, Any], wish: Any) -> None:
    found = parsed(**keys).wish
    assert (found.enabled, found.effort, found.max_tokens) == wish


def test_counting_needs_no_limit() -> None:
    body = json.dumps({"model": "m", "system": "S", "messages": [HELLO]}).encode()
    assert [one["role"] for one in parse_count(body).messages] == ["system", "user"]


_BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional={
        "text": JSON,
        "id": JSON,
        "name": JSON,
        "input": JSON,
        "tool_use_id": JSON,
        "content": JSON,
    },
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "x"])},
    optional={"content": st.lists(_BLOCK, max_size=3) | JSON},
)


@given(messages=st.lists(_MESSAGE, max_size=3), system=JSON, stops=JSON, thinking=JSON)
def test_whatever_comes_is_read_or_refused(
    messages: list[Any], system: Any, stops: Any, thinking: Any
) -> None:
    try:
        call = parsed(messages=messages, system=system, stop_sequences=stops, thinking=thinking)
    except RequestError as exc:
        found = exc.param is not None or "not valid JSON" in exc.message  # infinity
    else:
        found = all(isinstance(one["content"], str) for one in call.messages)
    assert found
