"""Calls of strict tools: the form, the names and the arguments that a grammar holds them to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rkserve.api.anthropic.requests import parse_messages
from rkserve.api.common.calls import parse_chat
from rkserve.api.parsing.answer_parser import AnswerParser, ParserOptions, ToolCall
from rkserve.api.parsing.tool_choice import ToolOptions, calls_guide
from rkserve.api.parsing.tools.formats import FORMATS
from rkserve.api.responses.requests import parse_response
from rkserve.core.errors import RequestError
from rkserve.core.messages import Delta
from rkserve.core.run_params import GuideKind
from rkserve.sampling.grammar import refusal
from tests.support.boards.fakes import run_loop
from tests.support.http.router_house import CHAT, chat, house
from tests.support.http.tool_talk import Talk, function, gathered, message, user
from tests.support.sim.sim_board import FOLDER, Sim
from tests.support.values.grammar_walk import check_guide, followed

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["°C", 'K "really"', "a\\b"]},
        "near": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": ["integer", "null"]}, "sure": {"type": "boolean"}},
            "required": ["x", "sure"],
            "additionalProperties": False,
        }
    },
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
FORMS = sorted(FORMATS)


def tool(name: str, schema: Any, **keys: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **keys}}


def tools(*given: dict[str, Any], **keys: Any) -> ToolOptions:
    strict = frozenset(one["function"]["name"] for one in given if one["function"].pop("strict", 1))
    return ToolOptions(given=given, forced=True, strict=strict, **keys)


def read(offered: ToolOptions, form: str, text: str) -> tuple[list[ToolCall], str]:
    """Read what stands behind the opening as a client would get it."""
    kind = FORMATS[form]
    speech = AnswerParser(
        ParserOptions(
            form=kind,
            names=offered.names,
            opening=kind.opening(offered.named),
            most_calls=offered.most_calls,
        )
    )
    speech.feed(Delta(text, ()))
    speech.end()
    return list(speech.calls), speech.words


def walked(offered: ToolOptions, form: str, seeds: int = 8) -> list[list[ToolCall]]:
    """Follow the grammar at random; return the calls of each answer that came to its end."""
    named = calls_guide(offered, FORMATS[form])
    assert named is not None
    param, guide = named
    check_guide(guide, param)
    found = []
    for seed in range(seeds):
        text, whole = followed(guide, seed)
        if whole:
            calls, words = read(offered, form, text)
            assert (bool(calls), words) == (True, ""), text
            found.append(calls)
    assert found
    return found


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_a_named_strict_tool_follow_its_schema(form: str) -> None:
    offered = tools(tool("get_weather", CITY), tool("get_time", EMPTY), named="get_weather")
    for (call,) in walked(offered, form):
        assert call.name == "get_weather"
        jsonschema.validate(json.loads(call.arguments), CITY)


@pytest.mark.parametrize("form", FORMS)
def test_of_several_strict_tools_some_are_called_each_by_its_schema(form: str) -> None:
    schemas = {"get_weather": CITY, "ping": EMPTY}
    offered = tools(*(tool(name, schema) for name, schema in schemas.items()))
    called = [call for calls in walked(offered, form, seeds=24) for call in calls]
    assert {call.name for call in called} == set(schemas)
    for call in called:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("form", FORMS)
def test_without_parallel_calls_there_is_exactly_one(form: str) -> None:
    one = tools(tool("ping", EMPTY), parallel=False)
    assert {len(calls) for calls in walked(one, form, seeds=12)} == {1}
    if FORMATS[form].shape.between is not None:
        several = tools(tool("ping", EMPTY))
        assert {len(calls) for calls in walked(several, form, seeds=24)} > {1}


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_that_is_not_strict_beside_one_that_is_gets_some_arguments(form: str) -> None:
    offered = tools(tool("ping", EMPTY), tool("loose", CITY, strict=False), parallel=False)
    calls = [call for (call,) in walked(offered, form, seeds=24)]
    assert {call.name for call in calls} == {"ping", "loose"}
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize(
    "free",
    [
        pytest.param(ToolOptions(given=(tool("f", EMPTY),), strict=frozenset({"f"})), id="auto"),
        pytest.param(ToolOptions(given=(tool("f", EMPTY),), forced=True), id="none is strict"),
        pytest.param(
            ToolOptions(
                given=(tool("f", EMPTY), tool("g", EMPTY)),
                forced=True,
                named="g",
                strict=frozenset({"f"}),
            ),
            id="another one is strict",
        ),
    ],
)
def test_an_answer_is_free_unless_a_strict_tool_may_have_to_be_called(free: ToolOptions) -> None:
    assert calls_guide(free, FORMATS["hermes"]) is None


@pytest.mark.parametrize(
    ("form", "schema", "reason"),
    [
        ("hermes", {"type": "string"}, "must be object"),
        ("hermes", {"not": {}, "x-guidance": {"lenient": True}}, "the tool 'bad': .*not"),
        (
            "hermes",
            {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
            "requires itself",
        ),
        ("hermes", {"$ref": "http://x.invalid/s"}, "bad"),
        ("pythonic", {"anyOf": [CITY, EMPTY]}, "'anyOf'"),
        ("pythonic", {"properties": {"a-b": {}}}, "argument name 'a-b'"),
        ("pythonic", {"properties": {}, "required": ["a"]}, "argument name 'a'"),
        ("pythonic", {"properties": []}, "properties"),
        ("pythonic", {"properties": {"a": {"$ref": "#/properties/a"}}}, "references"),
    ],
)
def test_a_schema_that_cannot_be_followed_names_its_tool(
    form: str, schema: Any, reason: str
) -> None:
    named = calls_guide(tools(tool("ping", EMPTY), tool("bad", schema)), FORMATS[form])
    assert named is not None
    found = refusal(named[1])
    assert found is not None
    assert re.search(reason, found)
    assert "'bad'" in found


def test_a_strict_tool_needs_a_name_that_the_form_can_write() -> None:
    offered = tools(tool("a/b", EMPTY), tool("ok", EMPTY))
    with pytest.raises(RequestError, match="'a/b'") as caught:
        calls_guide(offered, FORMATS["pythonic"])
    assert caught.value.param == "tools"
    assert calls_guide(offered, FORMATS["hermes"]) is not None


def test_every_dialect_reads_which_tools_are_strict() -> None:
    said = {"model": "m", "messages": [user("hi")], "max_tokens": 5}
    chat = {**said, "tools": [tool("a", EMPTY, strict=True), tool("b", EMPTY, strict=False)]}
    legacy = {**said, "functions": [{"name": "a", "strict": True}, {"name": "b"}]}
    claude = {**said, "tools": [{"name": "a", "input_schema": EMPTY, "strict": True}]}
    flat = [{"type": "function", "name": name, "strict": name == "a"} for name in "ab"]
    response = {"model": "m", "input": "hi", "tools": flat}
    for body in (chat, legacy):
        assert parse_chat(json.dumps(body).encode()).tools.strict == {"a"}
    assert parse_messages(json.dumps(claude).encode()).tools.strict == {"a"}
    assert parse_response(json.dumps(response).encode()).tools.strict == {"a"}
    for wrong in ({**chat, "tools": [tool("a", EMPTY, strict="yes")]},):
        with pytest.raises(RequestError, match="strict"):
            parse_chat(json.dumps(wrong).encode())


def test_a_grammar_of_its_own_does_not_go_with_a_call(tmp_path: Path) -> None:
    keys = {"tools": [function("f")], "tool_choice": "required", "guided_regex": "a+"}

    async def ask() -> None:
        async with Sim(tmp_path).board() as board:
            with pytest.raises(RequestError, match="guided_regex"):
                Talk(board).planned(messages=[user("hi")], **keys)

    run_loop(ask())


@pytest.mark.parametrize("release", ["1.2.3", "1.3.0"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "required"])
def test_a_board_calls_a_strict_tool_by_its_schema(
    tmp_path: Path, release: str, named: bool
) -> None:
    strict = [tool("get_weather", CITY, strict=True), tool("ping", EMPTY, strict=True)]
    choice: Any = "required"
    if named:
        choice = {"type": "function", "function": {"name": "get_weather"}}
    keys = {"tools": strict, "tool_choice": choice, "parallel_tool_calls": False}

    async def ask() -> None:
        sim = Sim(tmp_path, release)
        async with sim.board(tokenizer_file=FOLDER.path / "tokenizer.json") as board:
            talk = Talk(board)
            _, (request,) = talk.planned(messages=[user("What is the weather in Oslo?")], **keys)
            assert request.stepwise is not None
            assert request.stepwise.guide is not None
            assert request.stepwise.guide.kind is GuideKind.CALLS
            told, stream = await talk.say(messages=[user("What is the weather in Oslo?")], **keys)
            (call,) = message(told)["tool_calls"]
            assert told["choices"][0]["finish_reason"] == "tool_calls"
            assert message(told)["content"] is None
            schema = {"get_weather": CITY, "ping": EMPTY}[call["function"]["name"]]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            assert gathered(stream)["calls"][0]["arguments"] == call["function"]["arguments"]

    run_loop(ask())


async def test_a_router_refuses_a_strict_tool_whose_schema_has_no_grammar() -> None:
    bad = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    of = house("a")
    try:
        for choice, strict, status in (
            ("required", True, 400),
            ("required", False, 200),
            ("auto", True, 200),
        ):
            offered = [tool("good", EMPTY), tool("bad", bad, strict=strict)]
            body = chat(tools=offered, tool_choice=choice)
            response = await of("POST", CHAT, json=body)
            assert response.status_code == status, response.text
            if status == 400:
                error = response.json()["error"]
                assert error["param"] == "tools"
                assert "the tool 'bad'" in error["message"]
    finally:
        await of.service.guiding.close()
    of.expect_nothing_left()
