"""Schemas without a finite instance, and the grammar of tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.sampling.schemas import as_lark, is_endless, one_by_one

# -- what is refused --------------------------------------------------------------------------

LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("value", "endless"),
    [
        pytest.param(LOOP, True, id="required"),
        pytest.param({**LOOP, "required": []}, False, id="not required"),
        pytest.param({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, False, id="a way out"),
        pytest.param({"anyOf": [{"$ref": "#"}, LOOP]}, True, id="no way out"),
        pytest.param({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": LOOP}}, True, id="all of"),
        pytest.param({"type": "array", "items": {"$ref": "#"}}, False, id="an empty array"),
        pytest.param({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True, id="items"),
        pytest.param(
            {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, True, id="prefix"
        ),
        pytest.param(
            {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, False, id="or null"
        ),
        pytest.param(
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            True,
            id="round and round",
        ),
        pytest.param({"$ref": "#/x~1y/%25", "x/y": {"%": {"type": "null"}}}, False, id="escapes"),
        pytest.param(
            {"const": 1, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False, id="const"
        ),
        pytest.param({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True, id="no type"),
        pytest.param({"required": [1, {}], "properties": []}, False, id="nonsense"),
        pytest.param({"$ref": 5, "minItems": "x", "type": {}}, False, id="wrong types"),
        pytest.param(True, False, id="true"),
    ],
)
def test_a_schema_that_demands_itself_has_no_end(value: Any, endless: bool) -> None:
    assert is_endless(value) is endless


# -- tool calls -----------------------------------------------------------------------------------


def call(name: str = "f", *, keywords: bool = False, **schema: Any) -> dict[str, Any]:
    return {
        "name": name, "before": f"<{name}>", "after": "", "schema": schema, "keywords": keywords
    }  # fmt: skip


def text_of(*calls: dict[str, Any], between: str | None = None, end: str = "") -> str:
    return json.dumps({"calls": calls, "between": between, "end": end})


def test_a_call_is_its_text_and_the_schema_of_its_arguments_with_the_options() -> None:
    found = as_lark(text_of(call(type="object"), end="</f>"), {"x": 1}).splitlines()
    assert found == [
        'start: (call_0) "</f>"',
        'call_0: "<f>" args_0',
        "args_0: / ?/ value_0",
        'value_0: %json {"type":"object","x":1}',
    ]


def test_several_calls_need_a_text_between_them() -> None:
    start, *_ = as_lark(text_of(call("f"), call("g"), between=", "), {}).splitlines()
    assert start == 'start: (call_0 | call_1) (", " (call_0 | call_1))*'
    start, *_ = as_lark(text_of(call("f"), call("g")), {}).splitlines()
    assert start == "start: (call_0 | call_1)"


def test_keywords_are_written_one_by_one_and_optional_ones_may_be_left_out() -> None:
    made = call(keywords=True, properties={"a": {"type": "null"}, "b": True}, required=["b"])
    rules = as_lark(text_of(made), {}).splitlines()
    assert "args_0_f0: args_0_p0 args_0_r1 | args_0_f1" in rules
    assert "args_0_f1: args_0_p1 args_0_r2" in rules
    assert 'args_0_p0: "a=" args_0_v0' in rules
    assert 'args_0_r1: ", " args_0_p1 args_0_r2' in rules


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        pytest.param(call(type="string"), "type of its parameters", id="no object"),
        pytest.param({**call(), "schema": LOOP}, "no finite instance", id="endless"),
        pytest.param(call(keywords=True, anyOf=[]), "'anyOf' is not supported", id="root keyword"),
        pytest.param(call(keywords=True, required=["a"]), "argument name 'a'", id="missing"),
        pytest.param(call(keywords=True, properties={"a b": {}}), "argument name", id="a name"),
        pytest.param(call(keywords=True, properties=[]), "invalid properties", id="properties"),
        pytest.param(
            call(keywords=True, properties={"a": {"$ref": "#/properties/b"}}),
            "into",
            id="leads away",
        ),
    ],
)
def test_arguments_that_cannot_be_written_name_the_tool(made: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="the tool 'f'") as caught:
        as_lark(text_of(made), {})
    assert reason in str(caught.value)


def test_each_tool_can_be_tried_alone() -> None:
    both = text_of(call("f"), call("g"), between=",")
    alone = dict(one_by_one(both))
    assert list(alone) == ["f", "g"]
    assert json.loads(alone["g"]) == json.loads(text_of(call("g"), between=","))
