"""Grammars: which are accepted, why others are not, and that what follows one is valid."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.core.errors import RequestError, StepsRefused
from rkserve.core.run_params import Guide, GuideKind
from rkserve.models.files import Vocabulary
from rkserve.sampling.grammar import GrammarCompiler
from rkserve.sampling.trial import MAX_CHARS
from tests.support.values.grammar_walk import (
    END,
    EOS,
    GUIDES,
    IDS,
    VOCABULARY,
    check_guide,
    followed,
    lark,
    regex,
    schema,
)

# -- what is refused --------------------------------------------------------------------------

LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        pytest.param(schema({"$ref": "#"}), "itself", id="itself"),
        pytest.param(schema(LOOP), "itself within itself", id="endless"),
        pytest.param(schema({"$ref": "#/$defs/x"}), "does not exist", id="nowhere"),
        pytest.param(schema({"$ref": "http://x.invalid/s"}), "retriev", id="elsewhere"),
        pytest.param(schema({"type": "foo"}), "Invalid type", id="no type"),
        pytest.param(schema({"not": {"type": "null"}}), "Unimplemented", id="not"),
        pytest.param(schema({"type": "array", "uniqueItems": True}), "Unimplemented", id="unique"),
        pytest.param(schema({"type": "string", "format": "x"}), "Unknown format", id="format"),
        pytest.param(schema({"type": "string", "pattern": "(?=a)b"}), "look-around", id="look"),
        pytest.param(schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum", id="no"),
        pytest.param(
            schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
            "oneOf",
            id="oneOf that is not disjoint",
        ),
        pytest.param(
            schema({"x-guidance": {"lenient": True}, "not": {}}), "Unimplemented", id="a back door"
        ),
        pytest.param(schema({"enum": ["x" * 70_000]}), "characters", id="long"),
        pytest.param(regex("(a"), "regex", id="a regex that is none"),
        pytest.param(lark("start: foo"), "unknown name", id="a grammar with a hole"),
        pytest.param(lark('start: start "a"'), "NoExtension", id="a grammar without an end"),
        pytest.param(lark("root ::= ("), "not a grammar", id="GBNF that is none"),
        pytest.param(lark("\x00"), "not a grammar", id="NUL"),
        pytest.param(lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested", id="deep"),
    ],
)
def test_what_cannot_be_followed_is_a_400_with_the_reason(guide: Guide, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        check_guide(guide, "response_format")
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 600
    assert "\n" not in caught.value.message


def test_a_grammar_may_be_as_long_as_the_limit() -> None:
    body = '{"const":""}'
    check_guide(Guide(GuideKind.JSON_SCHEMA, body + " " * (MAX_CHARS - len(body))), "x")


# -- what follows -----------------------------------------------------------------------------

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "any value": {},
    "a record": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "a tree": TREE,
    "enum": {"enum": ["a", 1, None, {"x": [True]}]},
    "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "bounds": {"type": "integer", "minimum": -17, "maximum": 4711},
    "a multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "a pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$"},
    "a loose pattern": {"type": "string", "pattern": "ab", "maxLength": 20},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 9},
    "formats": {
        "type": "object",
        "properties": {
            name: {"type": "string", "format": name} for name in ("date", "time", "uuid", "ipv4")
        },
        "required": ["date", "time", "uuid", "ipv4"],
        "additionalProperties": False,
    },
    "a tuple": {
        "prefixItems": [{"type": "integer"}, {"type": "null"}],
        "items": False,
        "type": "array",
        "minItems": 2,
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "any of": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}}]},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "odd keys": {
        "type": "object",
        "properties": {'a"b\\ \n': {"const": 'c"\\'}, "\u2028é": {"type": "boolean"}},
        "required": ['a"b\\ \n', "\u2028é"],
        "additionalProperties": False,
    },
    "patterned keys": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "markup": {"enum": ["<|im_end|>", "a<think>b</tool_call>c", "<|im_start|>user\n"]},
    "defs": {
        "$defs": {
            "p": {
                "type": "object",
                "properties": {"q": {"enum": [1, 2]}},
                "required": ["q"],
                "additionalProperties": False,
            }
        },
        "type": "array",
        "items": {"$ref": "#/$defs/p"},
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_follows_a_schema_is_valid(name: str) -> None:
    guide, ended = schema(SCHEMAS[name]), 0
    check_guide(guide, "response_format")
    for seed in range(8):
        text, whole = followed(guide, seed)
        ended += whole
        if whole:
            jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert ended


LEAF = st.sampled_from(
    [
        {"type": "string", "maxLength": 5},
        {"type": "integer"},
        {"type": "number", "minimum": -3.5, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", 'y"z', 3]},
        {"const": {"a": [1, "b"]}},
        {"type": "string", "pattern": "^[a-z]+[0-9]?$", "maxLength": 9},
        {"not": {"type": "null"}},
        {"type": "string", "format": "nonsense"},
    ]
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "c d", 'e"', "é"])

    def record(properties: dict[str, Any]) -> dict[str, Any]:
        required = sorted(properties)[::2]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.one_of(
        st.dictionaries(keys, inner, max_size=3).map(record),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
        st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of}),
        inner.map(lambda of: {"allOf": [of]}),
    )


@settings(max_examples=120, deadline=None)
@given(value=st.recursive(LEAF, nested, max_leaves=8), seed=st.integers(0, 2**16))
def test_any_schema_is_refused_with_a_reason_or_followed_to_valid_json(
    value: Any, seed: int
) -> None:
    guide = schema(value)
    try:
        check_guide(guide, "response_format")
    except RequestError:
        return  # whose words are looked at above
    text, whole = followed(guide, seed)
    if whole:
        jsonschema.validate(json.loads(text), value)


@pytest.mark.parametrize(
    ("guide", "pattern"),
    [
        pytest.param(regex(r"[a-z]{2,4}@(x|y)\.org"), r"[a-z]{2,4}@(x|y)\.org", id="regex"),
        pytest.param(lark('start: "yes" | "no" | "täglich"'), "yes|no|täglich", id="choice"),
        pytest.param(lark('start: ("ab" NUMBER)+\nNUMBER: /[0-9]/'), r"(ab[0-9])+", id="Lark"),
        pytest.param(lark('root ::= "a" [0-9]+ "."'), r"a[0-9]+\.", id="GBNF of llama.cpp"),
    ],
)
def test_what_follows_a_regex_or_a_grammar_matches(guide: Guide, pattern: str) -> None:
    check_guide(guide, "guided_regex")
    for seed in range(10):
        text, whole = followed(guide, seed)
        assert not whole or re.fullmatch(pattern, text)


def test_a_grammar_survives_that_another_goes_on_with_the_answer() -> None:
    guide = schema(SCHEMAS["a record"])
    said = tuple(IDS[bytes([one])] for one in b'{"name":"Al","a')
    trail = GUIDES.follow(guide, VOCABULARY, EOS, said)
    allowed = {VOCABULARY.piece(int(one)) for one in np.flatnonzero(trail.allowed())}
    assert allowed
    assert all(b'ge":'.startswith(piece) or piece.startswith(b'ge"') for piece in allowed)


def test_an_answer_that_has_left_its_grammar_cannot_go_on() -> None:
    with pytest.raises(StepsRefused, match="grammar"):
        GUIDES.follow(regex("[0-9]+"), VOCABULARY, EOS, (IDS[b"a"],))


def test_an_end_that_is_no_token_is_a_refusal() -> None:
    with pytest.raises(StepsRefused, match="vocabulary"):
        GrammarCompiler().follow(regex("a"), VOCABULARY, frozenset({10**6}), ())


def test_a_vocabulary_of_another_model_is_another_one() -> None:
    guides, other = GrammarCompiler(), Vocabulary((b"b", b"a", b"<end>"), frozenset({2}))
    for vocabulary, end, letter in ((VOCABULARY, END, IDS[b"a"]), (other, 2, 1)):
        trail = guides.follow(regex("a+"), vocabulary, frozenset({end}), ())
        assert trail.allowed()[letter]
        assert trail.allowed().sum() < 10
