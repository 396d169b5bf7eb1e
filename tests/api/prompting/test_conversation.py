"""OpenAI's messages: roles, content parts and tool calls, read or refused by their path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common.calls import parse_chat
from rkserve.api.common.plan import plan
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.core.errors import RequestError, RkserveError, UnsupportedParameter
from rkserve.core.run_params import Sampling
from tests.support.values.wire_folders import make_folder
from tests.support.values.wire_json import MESSAGE

HELLO = {"role": "user", "content": "Hello"}


def chat(value: Any) -> tuple[dict[str, Any], ...]:
    return parse_chat(json.dumps({"model": "m", "messages": value}).encode()).messages


def messages(*given: Any) -> tuple[dict[str, Any], ...]:
    return chat(list(given))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        pytest.param(
            {"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi"}, id="user"
        ),
        pytest.param(
            {"role": "developer", "content": "Be kind."},
            {"role": "system", "content": "Be kind."},
            id="developer is system",
        ),
        pytest.param(
            {"role": "user", "content": "Hi", "name": "Ann", "extra": 1},
            {"role": "user", "content": "Hi", "name": "Ann"},
            id="a name",
        ),
        pytest.param(
            {"role": "user", "content": [{"type": "text", "text": x} for x in ("a", "", "b")]},
            {"role": "user", "content": "ab"},
            id="text parts",
        ),
        pytest.param(
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
            id="a refusal",
        ),
        pytest.param(
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": ""},
            id="an assistant without content",
        ),
        pytest.param(
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": [1, null]}'},
                    },
                    {"id": "c2", "function": {"name": "g", "arguments": ""}},
                ],
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": {"x": [1, None]}},
                    },
                    {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
            id="tool calls, with arguments as an object",
        ),
        pytest.param(
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
            id="a tool's answer",
        ),
    ],
)
def test_a_message_is_read(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert messages(HELLO, given) == (HELLO, read)


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        pytest.param(5, "messages[1]", id="not an object"),
        pytest.param({"content": "x"}, "messages[1].role", id="no role"),
        pytest.param({"role": "critic", "content": "x"}, "messages[1].role", id="unknown role"),
        pytest.param({"role": "function", "content": "x"}, "messages[1].name", id="whose result"),
        pytest.param(
            {"role": "assistant", "reasoning_content": 5},
            "messages[1].reasoning_content",
            id="thoughts are 5",
        ),
        pytest.param({"role": ["user"]}, "messages[1].role", id="role is a list"),
        pytest.param({"role": "user"}, "messages[1].content", id="no content"),
        pytest.param({"role": "user", "content": None}, "messages[1].content", id="null content"),
        pytest.param({"role": "user", "content": 5}, "messages[1].content", id="content is 5"),
        pytest.param({"role": "user", "content": []}, "messages[1].content", id="no parts"),
        pytest.param(
            {"role": "user", "content": ["x"]}, "messages[1].content[0]", id="part is a string"
        ),
        pytest.param(
            {"role": "user", "content": [{"text": "x"}]},
            "messages[1].content[0].type",
            id="part without type",
        ),
        pytest.param(
            {"role": "user", "content": [{"type": "text"}]},
            "messages[1].content[0].text",
            id="text part without text",
        ),
        pytest.param({"role": "tool", "content": "x"}, "messages[1].tool_call_id", id="no call"),
        pytest.param(
            {"role": "user", "content": "x", "name": 5}, "messages[1].name", id="name is 5"
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": []}, "messages[1].tool_calls", id="no calls"
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": [{**CALL, "id": ""}]},
            "messages[1].tool_calls[0].id",
            id="call with an empty id",
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": [{"id": "c"}]},
            "messages[1].tool_calls[0].function",
            id="call without function",
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": [CALL, {"id": "c", "function": {"name": "f"}}]},
            "messages[1].tool_calls[1].function.arguments",
            id="call without arguments",
        ),
        *(
            pytest.param(
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": bad}}],
                },
                "messages[1].tool_calls[0].function.arguments",
                id=f"arguments {bad!r:.12}",
            )
            for bad in ("{", "[1]", "7", '{"a": NaN}', "[" * 9999, {"x": 1})
        ),
    ],
)
def test_a_bad_message_is_named(given: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages(HELLO, given)
    assert caught.value.param == param
    assert param in caught.value.message or "Supported values" in caught.value.message


@pytest.mark.parametrize("kind", ["input_audio", "file", "video_url"])
def test_a_part_that_is_not_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedParameter, match=kind) as caught:
        messages({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind}]})
    assert caught.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"type": "custom"}, "messages[0].tool_calls[0].type"),
        ({"type": 5}, "messages[0].tool_calls[0].type"),
    ],
    ids=str,
)
def test_a_tool_call_of_another_type_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages({"role": "assistant", "tool_calls": [{**CALL, **change}]})
    assert caught.value.param == param


def test_the_deprecated_function_call_becomes_a_tools() -> None:
    """The result finds its call by the function's name, which is all that it has."""
    call, result = messages(
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "3"},
    )
    (made,) = call["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (result["role"], result["content"]) == ("tool", "3")
    assert result["tool_call_id"] == made["id"]


def calls(*named: tuple[str | None, str]) -> dict[str, Any]:
    """An assistant's message with these calls, each an id and a function's name."""
    made = [{"id": given, "function": {"name": name, "arguments": "{}"}} for given, name in named]
    return {"role": "assistant", "tool_calls": made}


def result(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


@pytest.mark.parametrize(
    ("given", "answered"),
    [
        pytest.param(
            [calls(("a", "f"), ("b", "g")), result("1"), result("2")], ["a", "b"], id="in order"
        ),
        pytest.param(
            [calls(("a", "f"), ("b", "g")), result("1", name="g"), result("2", name="f")],
            ["b", "a"],
            id="by name",
        ),
        pytest.param(
            [calls(("a", "f"), ("b", "f")), result("1", name="f"), result("2", name="f")],
            ["a", "b"],
            id="by name and in order",
        ),
        pytest.param(
            [calls(("a", "f"), ("b", "g")), result("1", tool_call_id="a"), result("2")],
            ["a", "b"],
            id="one by its id",
        ),
        pytest.param(
            [calls((None, "f"), (None, "g")), result("1", name="g"), result("2", name="f")],
            ["call00001", "call00000"],
            id="calls without ids",
        ),
        pytest.param(
            [calls((None, "f")), result("1"), calls((None, "f")), result("2", tool_call_id=None)],
            ["call00000", "call00001"],
            id="a later turn",
        ),
    ],
)
def test_results_without_an_id_answer_the_calls_before_them(
    given: list[dict[str, Any]], answered: list[str]
) -> None:
    read = messages(HELLO, *given)
    assert [one["tool_call_id"] for one in read if one["role"] == "tool"] == answered
    made = {call["id"] for one in read for call in one.get("tool_calls", ())}
    assert set(answered) <= made


@pytest.mark.parametrize(
    ("given", "at"),
    [
        pytest.param([result("1")], 1, id="no call"),
        pytest.param([calls(("a", "f")), result("1", name="g")], 2, id="no call of that name"),
        pytest.param([calls(("a", "f")), result("1"), result("2")], 3, id="one result too many"),
        pytest.param(
            [calls(("a", "f")), result("1", tool_call_id="a"), result("2", name="f")],
            3,
            id="answered by its id",
        ),
    ],
)
def test_a_result_that_answers_no_call_is_refused(given: list[dict[str, Any]], at: int) -> None:
    with pytest.raises(RequestError, match="without a result") as caught:
        messages(HELLO, *given)
    assert caught.value.param == f"messages[{at}].tool_call_id"


@pytest.mark.parametrize(
    ("given", "param"),
    [(None, "messages"), ([], "messages"), ("Hello", "messages"), ({}, "messages")],
    ids=str,
)
def test_messages_must_be_a_list_with_something_in_it(given: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(given)
    assert caught.value.param == param


def test_a_long_value_is_not_repeated_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        messages({"role": "x" * 100_000, "content": ""})
    assert len(caught.value.message) < 300


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "tiny"))


@given(st.lists(MESSAGE, max_size=3))
def test_no_messages_raise_anything_but_a_request_error_up_to_the_plan(
    renderer: Renderer, given: list[Any]
) -> None:
    body = json.dumps({"model": "m", "messages": given}).encode()
    caught: list[RkserveError] = []
    try:
        (request,) = plan(
            parse_chat(body),
            ResolvedModel("m"),
            renderer,
            defaults=Sampling(),
            context_len=4096,
            completion="chatcmpl-1",
        )
        assert request.prompt_ids[0] == 1
    except RkserveError as exc:
        caught.append(exc)
    assert {exc.http_status for exc in caught} <= {400}
