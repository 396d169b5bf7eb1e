"""Which grammar is asked for, in OpenAI's words and in vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.common.calls import parse_chat, parse_completion
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.core.errors import RequestError
from rkserve.core.run_params import Guide, GuideKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMPILED = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))
ANY_OBJECT = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')


def chat(**keys: Any) -> SamplingOptions:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **keys}
    return parse_chat(json.dumps(body).encode()).steps


def completion(**keys: Any) -> SamplingOptions:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi", **keys}).encode()).steps


def openai_schema(**extra: Any) -> dict[str, Any]:
    wanted = {"name": "answer", "strict": True, "schema": SCHEMA, **extra}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


@pytest.mark.parametrize(
    ("keys", "param", "guide"),
    [
        pytest.param(
            {"response_format": {"type": "json_object"}}, "response_format", ANY_OBJECT, id="object"
        ),
        pytest.param(openai_schema(), "response_format", COMPILED, id="schema"),
        pytest.param(openai_schema(strict=False), "response_format", COMPILED, id="not strict"),
        pytest.param({"guided_json": SCHEMA}, "guided_json", COMPILED, id="vLLM's schema"),
        pytest.param({"guided_json": json.dumps(SCHEMA)}, "guided_json", COMPILED, id="as text"),
        pytest.param(
            {"guided_regex": "a+"}, "guided_regex", Guide(GuideKind.REGEX, "a+"), id="regex"
        ),
        pytest.param(
            {"guided_choice": ["a", 'b"\n']},
            "guided_choice",
            Guide(GuideKind.LARK, r'start: "a" | "b\"\n"'),
            id="choice",
        ),
        pytest.param(
            {"guided_grammar": 'start: "a"'},
            "guided_grammar",
            Guide(GuideKind.LARK, 'start: "a"'),
            id="grammar",
        ),
        pytest.param({"regex": "a+"}, "regex", Guide(GuideKind.REGEX, "a+"), id="SGLang's regex"),
        pytest.param(
            {"ebnf": 'root ::= "a"'}, "ebnf", Guide(GuideKind.LARK, 'root ::= "a"'), id="its EBNF"
        ),
        pytest.param(
            {"structured_outputs": {"json": SCHEMA}}, "structured_outputs", COMPILED, id="newer"
        ),
        pytest.param(
            {"structured_outputs": {"json_object": True}},
            "structured_outputs",
            ANY_OBJECT,
            id="newer object",
        ),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_grammar_is_read(read: Any, keys: dict[str, Any], param: str, guide: Guide) -> None:
    assert read(**keys).guide == (param, guide)


@pytest.mark.parametrize(
    "keys",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"guided_json_object": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_asks_for_nothing_leaves_the_answer_free(read: Any, keys: dict[str, Any]) -> None:
    assert read(**keys) == read()


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (openai_schema(schema=None), "response_format.json_schema.schema"),
        (openai_schema(schema=5), "response_format.json_schema.schema"),
        (openai_schema(name=5), "response_format.json_schema.name"),
        (openai_schema(strict="yes"), "response_format.json_schema.strict"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
        ({**openai_schema(), "guided_regex": "a"}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_is_no_grammar_is_named(read: Any, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**keys)
    assert caught.value.param == param
