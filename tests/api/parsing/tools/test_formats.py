"""Hermes' and Llama's calls in JSON objects."""

from __future__ import annotations

import pytest

from rkserve.api.parsing.answer_parser import AnswerParser, ParserOptions
from rkserve.api.parsing.tools.base import ToolCallParser
from rkserve.api.parsing.tools.formats import Hermes, Llama, python_value
from rkserve.core.messages import Delta

NAMES = frozenset({"add"})


def parsed(form: type[ToolCallParser], text: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of an answer that comes one character at a time."""
    parser = AnswerParser(ParserOptions(form=form, names=NAMES))
    for one in text:
        parser.feed(Delta(one, ()))
    parser.end()
    return parser.words, [(call.name, call.arguments) for call in parser.calls]


@pytest.mark.parametrize(
    ("form", "text", "words", "calls"),
    [
        (
            Hermes,
            'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            "Well.",
            [("add", '{"a": 1}')],
        ),
        (Hermes, "<tool_call>\nnothing", "<tool_call>\nnothing", []),
        (Llama, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        (Llama, '{"a": 1} is JSON.', '{"a": 1} is JSON.', []),
    ],
)
def test_calls_are_told_from_text(
    form: type[ToolCallParser], text: str, words: str, calls: list[tuple[str, str]]
) -> None:
    found, made = parsed(form, text)
    assert (found.strip(), made) == (words, calls)


@pytest.mark.parametrize(
    "text",
    [
        "f()",
        "a",
        "1 +",
        "1 + 1",
        "b'x'",
        "...",
        "1j",
        "{1: 2}",
        "{**a}",
        "1e999",
        "-'x'",
        "(" * 999,
    ],
)
def test_what_json_cannot_say_is_no_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        python_value(text)
