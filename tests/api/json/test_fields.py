"""Readers of JSON bodies and of their values: what is read, and what is refused by which name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rkserve.api.json.fields import Fields, Range, as_fields, parse_object, quoted
from rkserve.core.errors import RequestError


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b" \n", "empty", id="blanks"),
        pytest.param(b"{", "not valid JSON", id="cut off"),
        pytest.param(b'{"a": 1} x', "trailing", id="something behind it"),
        pytest.param(b'{"a": 1,}', "not valid JSON", id="trailing comma"),
        pytest.param(b"[]", "an array", id="array"),
        pytest.param(b'"model"', "a string", id="string"),
        pytest.param(b"12", "an integer", id="integer"),
        pytest.param(b"1.5", "a decimal", id="decimal"),
        pytest.param(b"true", "a boolean", id="boolean"),
        pytest.param(b"null", "null", id="null"),
        pytest.param(b'{"a": NaN}', "not valid JSON", id="NaN"),
        pytest.param(b'{"a": -Infinity}', "not valid JSON", id="Infinity"),
        pytest.param(b'{"a": "\xff\xfe"}', "not valid JSON", id="not UTF-8"),
        pytest.param('{"a": 1}'.encode("utf-16"), "not valid JSON", id="UTF-16"),
        pytest.param(b'\xef\xbb\xbf{"a": 1}', "not valid JSON", id="byte order mark"),
        pytest.param(b'{"a": "\\ud800"}', "not valid JSON", id="lone high surrogate"),
        pytest.param(b'{"a": "\\udc00x"}', "not valid JSON", id="lone low surrogate"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON", id="5,000 digits"),
        pytest.param(b"[" * 10_000 + b"]" * 10_000, "recursion limit", id="10,000 arrays deep"),
        pytest.param(b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "recursion", id="10,000 objects"),
        pytest.param(b"[" * 1_000_000, "recursion limit", id="a million brackets"),
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(body: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        parse_object(body)
    assert caught.value.http_status == 400


def test_a_body_with_surrogate_pairs_and_raw_utf8_is_read() -> None:
    assert parse_object('{"a": "\\ud83d\\ude00 é"}'.encode()) == {"a": "😀 é"}


BODY = Fields(
    {
        "text": "x",
        "empty": "",
        "none": None,
        "flag": True,
        "whole": 7,
        "part": 0.5,
        "list": [{"a": 1}, {"a": "b"}],
        "child": {"a": "b"},
    },
    "at",
)


def test_values_are_read_by_their_types() -> None:
    assert (BODY.text("text"), BODY.any_text("empty"), BODY.required_text("text")) == ("x", "", "x")
    assert (BODY.flag("flag"), BODY.flag("missing"), BODY.maybe_flag("none")) == (True, False, None)
    assert (BODY.integer("whole"), BODY.number("whole"), BODY.number("part")) == (7, 7.0, 0.5)
    assert [one.get("a") for one in BODY.objects("list")] == [1, "b"]
    assert BODY.required_child("child").required_choice("a", "b", "c") == "b"
    assert (BODY.text("none"), BODY.child("none"), BODY.choice("missing", "a")) == (None,) * 3


@pytest.mark.parametrize(
    ("read", "param", "says"),
    [
        (lambda: BODY.text("whole"), "at.whole", "expected a string, but got an integer"),
        (lambda: BODY.any_text("none"), "at.none", "Missing required parameter"),
        (lambda: BODY.required_text("empty"), "at.empty", "empty string"),
        (lambda: BODY.choice("text", "a", "b"), "at.text", "Supported values are: 'a', 'b'"),
        (lambda: BODY.required_choice("none", "a"), "at.none", "Missing required parameter"),
        (lambda: BODY.maybe_flag("whole"), "at.whole", "expected a boolean"),
        (lambda: BODY.integer("flag"), "at.flag", "expected an integer, but got a boolean"),
        (lambda: BODY.integer("whole", Range(8)), "at.whole", "Expected a value >= 8"),
        (lambda: BODY.number("part", Range(0.5, above=True)), "at.part", "a value > 0.5"),
        (lambda: BODY.number("whole", Range(0, 6)), "at.whole", "Expected a value <= 6"),
        (lambda: BODY.items("child"), "at.child", "expected an array, but got an object"),
        (lambda: BODY.items("list", 1), "at.list", "array too long"),
        (lambda: Fields({"list": [1]}).objects("list"), "list[0]", "expected an object"),
        (lambda: BODY.objects("list")[0].text("a"), "at.list[0].a", "expected a string"),
        (lambda: BODY.required_child("none"), "at.none", "Missing required parameter"),
        (lambda: BODY.only(["text"]), "at.empty", "Known are: text"),
        (lambda: as_fields([], "x"), "x", "expected an object, but got an array"),
    ],
)
def test_a_wrong_value_is_named(read: Callable[[], Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        read()
    assert caught.value.param == param


def test_a_client_s_value_is_quoted_in_part() -> None:
    assert quoted("x") == "'x'"
    assert len(quoted("x" * 1000)) < 100
