"""Anthropic's words: bodies to calls, events to messages and their streams, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.anthropic.answers import MESSAGES, MessageAnswer, anthropic_error
from rkserve.api.anthropic.requests import parse_count, parse_messages
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall
from rkserve.api.common.tool_definitions import as_object
from rkserve.api.parsing.answer_parser import PLAIN, ParserOptions
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.api.parsing.tool_choice import NO_TOOLS, ToolOptions
from rkserve.api.parsing.tools import FORMATS
from rkserve.core.errors import (
    ContextOverflow,
    EngineDied,
    QueueFull,
    RequestError,
    UnsupportedParameter,
)
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Kv,
    Paused,
    Thinking,
    Timings,
    Usage,
)
from rkserve.core.run_params import Guide, GuideKind
from tests.support.http.wire_json import JSON

READING = ParserOptions(
    thinking=Thinking("<think>", "</think>"), form=FORMATS["hermes"], names=frozenset({"look"})
)
HELLO = {"role": "user", "content": "Hello"}
FORM = {"type": "json_schema", "schema": {"type": "integer"}}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0)


def parsed(**keys: Any) -> ChatCall:
    body = {"model": "m", "max_tokens": 9, "messages": [HELLO], **keys}
    return parse_messages(json.dumps(body).encode())


def text(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


# --- bodies ---


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


# --- answers ---


def made(reading: ParserOptions = PLAIN, **keys: Any) -> MessageAnswer:
    call = ChatCall("tiny", 9, **{"stop": ("##",), **keys})
    stamp = AnswerOrigin("tiny", "1.3.0", prompt_tokens=6, reading=reading)
    return MessageAnswer(call, "msg_1", 1700000000, stamp)


def ended(
    reason: FinishReason = FinishReason.STOP, by: str | None = None, tokens: int = 2
) -> Finished:
    return Finished(reason, Usage(6, tokens, 2), TIMINGS, (), by)


def events(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert told["type"] == name.removeprefix("event: ")
        found.append(told)
    return found


def test_a_stream_is_one_message_with_one_block_of_text() -> None:
    answer = made()
    raw = answer.opening(0) + answer.delta(0, Delta("", (6,)))
    raw += answer.delta(0, Delta("Grüß\n", (7,))) + answer.delta(0, Delta(' "you"', (8,)))
    start, block, *pieces, stop, delta, end = events(
        raw + answer.finish(0, ended()) + answer.closing()
    )
    assert start["message"]["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert (start["message"]["id"], start["message"]["content"]) == ("msg_1", [])
    assert block == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert [piece["delta"] for piece in pieces] == [
        {"type": "text_delta", "text": "Grüß\n"},
        {"type": "text_delta", "text": ' "you"'},
    ]
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 2,
    }
    assert delta["timings"]["tokens_per_s"] == 20.0
    assert delta["weight_version"] == "default"
    assert end == {"type": "message_stop"}


def test_an_answer_without_words_has_an_empty_block() -> None:
    answer = made()
    kinds = [one["type"] for one in events(answer.opening(0) + answer.finish(0, ended()))]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta"]


def test_a_whole_message_says_what_a_stream_says() -> None:
    answer = made()
    answer.add(0, Delta("Hello", (1, 2)))
    answer.add(0, Delta(" you", (3,), retract=2))
    answer.end(0, ended())
    told = answer.whole()
    assert told["content"] == [{"type": "text", "text": "Hel you"}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "tiny")
    assert told["usage"]["output_tokens"] == 2
    assert told["timings"]["cached"] == 2


@pytest.mark.parametrize(
    ("finished", "told"),
    [
        pytest.param(ended(), ("end_turn", None), id="the model ended"),
        pytest.param(ended(by="##"), ("stop_sequence", "##"), id="a stop sequence came"),
        pytest.param(ended(by="own"), ("end_turn", None), id="a hook of the board stopped it"),
        pytest.param(ended(FinishReason.LENGTH, tokens=9), ("max_tokens", None), id="the limit"),
        pytest.param(
            ended(FinishReason.LENGTH, tokens=8),
            ("model_context_window_exceeded", None),
            id="the end of the context",
        ),
        pytest.param(ended(FinishReason.ABORT), ("abort", None), id="somebody aborted it"),
    ],
)
def test_the_reason_tells_the_truth(finished: Finished, told: tuple[str, str | None]) -> None:
    answer = made()
    answer.end(0, finished)
    whole = answer.whole()
    assert (whole["stop_reason"], whole["stop_sequence"]) == told


@pytest.mark.parametrize("reading", [PLAIN, READING], ids=["words", "anything"])
def test_words_that_are_taken_back_are_said_by_a_ping(reading: ParserOptions) -> None:
    answer = made(reading)
    answer.opening(0)
    answer.delta(0, Delta("abc", (1,)))
    void, more = events(answer.delta(0, Delta("X", (), retract=3)))
    assert void == {"type": "ping", "rkserve": {"retract": 3}}
    assert more["delta"] == {"type": "text_delta", "text": "X"}


SPOKEN = (
    "<think>\nHm.\n</think>\n\nLet me look."
    '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
)


def test_thoughts_and_calls_are_blocks_of_their_own() -> None:
    answer = made(READING)
    raw = answer.opening(0)
    for at in range(0, len(SPOKEN), 4):
        raw += answer.delta(0, Delta(SPOKEN[at : at + 4], (at,)))
    told = events(raw + answer.finish(0, ended()) + answer.closing())
    starts = [one for one in told if one["type"] == "content_block_start"]
    kinds = [one["content_block"]["type"] for one in starts]
    assert kinds == ["thinking", "text", "tool_use"]
    assert starts[2]["content_block"]["name"] == "look"
    stops = [one["index"] for one in told if one["type"] == "content_block_stop"]
    assert [one["index"] for one in starts] == stops == [0, 1, 2]
    said = ["", "", ""]
    for one in told:
        if one["type"] == "content_block_delta":
            (text,) = (value for key, value in one["delta"].items() if key != "type")
            said[one["index"]] += text
    assert (said[0], said[1].strip(), json.loads(said[2])) == ("Hm.", "Let me look.", {"at": 1})
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_whole_message_has_them_too() -> None:
    answer = made(READING)
    answer.add(0, Delta(SPOKEN, (1,)))
    answer.end(0, ended())
    whole = answer.whole()
    thinking, words, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (words["type"], words["text"].strip()) == ("text", "Let me look.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": 1})
    assert whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        pytest.param('{"a": 1}', {"a": 1}, id="an object"),
        pytest.param("", {}, id="nothing"),
        pytest.param('{"a": tru}', {"raw_arguments": '{"a": tru}'}, id="no JSON"),
        pytest.param("[1]", {"raw_arguments": "[1]"}, id="no object"),
    ],
)
def test_arguments_are_an_object_whatever_the_model_wrote(written: str, read: Any) -> None:
    assert as_object(written) == read


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        pytest.param({}, {"type": "ping"}, id="nobody asked"),
        pytest.param(
            {"pause_on": ("x",)},
            {
                "type": "ping",
                "rkserve": {
                    "status": "paused",
                    "choice": 0,
                    "by": "x",
                    "tokens": 3,
                    "kv": "kept",
                },
            },
            id="asked for",
        ),
    ],
)
def test_a_pause_is_a_ping(keys: dict[str, Any], told: dict[str, Any]) -> None:
    assert events(made(**keys).paused(0, Paused("x", 3, Kv.KEPT))) == [told]


# --- errors ---


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        pytest.param(RequestError("no", "x"), 400, "invalid_request_error", None, id="request"),
        pytest.param(
            UnsupportedParameter("no", "x"),
            400,
            "invalid_request_error",
            "unsupported_parameter",
            id="cannot",
        ),
        pytest.param(QueueFull(3, 7), 429, "rate_limit_error", "queue_full", id="full"),
        pytest.param(EngineDied("a", "x"), 503, "overloaded_error", "board_failed", id="lost"),
        pytest.param(ZeroDivisionError("secret"), 500, "api_error", "internal_error", id="a bug"),
    ],
)
def test_errors_are_anthropic_s_object(
    error: Exception, status: int, kind: str, code: str | None
) -> None:
    found, headers, body = anthropic_error(error)
    assert (found, body["type"], set(body)) == (status, "error", {"type", "error"})
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert ("retry-after" in headers) == (status in {429, 503})
    assert "secret" not in body["error"]["message"]
    (event,) = events(MESSAGES.broken(error))
    assert event == body


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for() -> None:
    told = anthropic_error(ContextOverflow(5000, 4096))[2]["error"]
    assert told["message"].startswith("prompt is too long: 5000 tokens > 4096 maximum. ")
    assert told["code"] == "context_length_exceeded"
    early = anthropic_error(ContextOverflow(5000, 4096, at_least=True))[2]["error"]["message"]
    assert early.startswith("prompt is too long: at least 5000 tokens > 4096 maximum. ")
