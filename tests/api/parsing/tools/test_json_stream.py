"""Calls in JSON, however their text is cut."""

from __future__ import annotations

import pytest

from rkserve.api.parsing.tools.json_stream import ObjectCall, ObjectScan, as_json

TEXT = '{"name": "f", "arguments": {"a": ["}", "\\"", 1]}} and more'
ARGUMENTS = '{"a": ["}", "\\"", 1]}'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(TEXT)])
def test_an_object_ends_where_its_brace_closes(size: int) -> None:
    scan, taken = ObjectScan(), 0
    for at in range(0, len(TEXT), size):
        taken += scan.feed(TEXT[at : at + size])
    assert scan.done
    assert not scan.bad
    assert TEXT[taken:] == " and more"
    assert scan.complete == {"name", "arguments"}


@pytest.mark.parametrize("size", [1, 4, len(TEXT)])
def test_a_call_tells_its_name_and_its_arguments(size: int) -> None:
    call, arguments = ObjectCall(), ""
    for at in range(0, len(TEXT), size):
        call.feed(TEXT[at : at + size])
        arguments += call.take()
    assert call.done
    assert call.name == "f"
    assert as_json(arguments) == as_json(ARGUMENTS)


@pytest.mark.parametrize("text", ["x", "{x", '{"a" 1}', '{"a": 1; }'])
def test_text_that_is_no_object_is_bad(text: str) -> None:
    scan = ObjectScan()
    scan.feed(text)
    assert scan.bad


@pytest.mark.parametrize("text", ["NaN", '{"a": Infinity}', "{", ""])
def test_text_that_is_no_json_has_no_value(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        as_json(text)
