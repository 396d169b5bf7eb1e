"""Calls of tools in the text of answers, in every form and however the text is cut into pieces."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.parsing.answer_parser import AnswerParser, ParserOptions
from rkserve.api.parsing.tools.base import (
    Part,
    Retraction,
    TextPart,
    ToolCallDelta,
    ToolCallStart,
    overlap,
)
from rkserve.api.parsing.tools.formats import FORMATS, guess
from rkserve.api.prompting.templates import named_template
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Splice,
    Timings,
    TokenOrigin,
    TranscriptToken,
    Usage,
)
from tests.support.values.wire_folders import CHATML


@pytest.mark.parametrize(
    ("text", "mark", "length"),
    [
        ("", "</think>", 0),
        ("well", "</think>", 0),
        ("well<", "</think>", 1),
        ("well</thi", "</think>", 5),
        ("<</", "</think>", 2),
        ("well</think>", "</think>", 0),
        ("aa", "aab", 2),
    ],
)
def test_overlap_is_the_beginning_of_a_mark_at_the_end_of_a_text(
    text: str, mark: str, length: int
) -> None:
    assert overlap(text, mark) == length


NAMES = frozenset({"get_weather", "get_time", "add"})
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = ("get_weather", '{"city": "Oslo"}')
NOON = ("get_time", '{"zone": "UTC"}')


def finished(reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(reason, Usage(1, 1), Timings(0, 0, 1, 0, 1, 0))


def heard(reading: ParserOptions, pieces: list[str]) -> tuple[AnswerParser, list[Part]]:
    """An answer that came in these pieces, and all that was told of it."""
    speech, told = AnswerParser(reading), []
    for piece in pieces:
        told += speech.feed(Delta(piece, (1,)))
    return speech, told + speech.end()


def calls_of(speech: AnswerParser) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in speech.calls]


def all_cuts(text: str) -> list[list[str]]:
    """The text in one piece, letter by letter, and cut in two at every place."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


CASES = [
    # Hermes
    ("hermes", "Rain is wet.", "Rain is wet.", []),
    ("hermes", HERMES_CALL, "", [OSLO]),
    ("hermes", f"Let me see.\n{HERMES_CALL}", "Let me see.", [OSLO]),
    ("hermes", f"Let me see.\n\n{HERMES_CALL}\nThat was it.", "Let me see.\nThat was it.", [OSLO]),
    (
        "hermes",
        HERMES_CALL
        + '\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>\n',
        "",
        [OSLO, NOON],
    ),
    ("hermes", HERMES_CALL.removesuffix("\n</tool_call>"), "", [OSLO]),
    ("hermes", HERMES_CALL.removesuffix("call>"), "", [OSLO]),
    ("hermes", HERMES_CALL[:50], HERMES_CALL[:50], []),
    ("hermes", f"So:\n{HERMES_CALL[:-14]}", f"So:\n{HERMES_CALL[:-14]}", []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", "a\n", "a\n", []),
    ("hermes", "<tool_call>what?</tool_call>", "<tool_call>what?</tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>!',
        '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>!',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {"b": "}\\""}]}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": [1, {"b": "}\\""}]}')],
    ),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "get_time", "arguments": null}</tool_call>',
        "",
        [("get_time", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "a is 1"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a is 1"}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>',
        "",
        [("unheard_of", "{}")],
    ),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"no": "name"}', '<tool_call>{"no": "name"}', []),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"text": "two\nlines"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"text": "two\nlines"}}</tool_call>',
        [],
    ),
    # What is no call ends where that shows, and what comes behind it may be one.
    ("hermes", f'<tool_call>{{"name": "a\nb{HERMES_CALL}', '<tool_call>{"name": "a\nb', [OSLO]),
    # Llama
    ("llama", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    (
        "llama",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
        '{"name": "get_time", "parameters": {"zone": "UTC"}}',
        "",
        [OSLO, NOON],
    ),
    (
        "llama",
        'Well: <|python_tag|>{"name": "get_time", "parameters": {"zone": "UTC"}} Done.',
        "Well:  Done.",
        [NOON],
    ),
    ("llama", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama", '{"answer": 42}', '{"answer": 42}', []),
    ("llama", '{"name": "get_weather", "par', '{"name": "get_weather", "par', []),
    ("llama", "It rains.", "It rains.", []),
    ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama", "<|python_tag|> ", "<|python_tag|> ", []),
    # Mistral
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "get_time", "arguments": {"zone": "UTC"}}]',
        "",
        [OSLO, NOON],
    ),
    ("mistral", ' [{"name": "get_weather", "arguments": {"city": "Oslo"}}]', "", [OSLO]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}', "", [OSLO]),
    (
        "mistral-args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_time[ARGS]{"zone": "UTC"}',
        "",
        [OSLO, NOON],
    ),
    ("mistral", 'get_weather{"city": "Oslo"}', "", [OSLO]),
    ("mistral", 'Yes.[TOOL_CALLS] [{"name": "add", "arguments": {}}]', "Yes.", [("add", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{a}[TOOL_CALLS] [{"name": "get_weather", "arguments": '
        '{"city": "Oslo"}}, {"name": "get_time", "arguments": {"zone": "UTC"}}]',
        "[TOOL_CALLS]add[ARGS]{a}",
        [OSLO, NOON],
    ),
    (
        "mistral-args",
        '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}'
        '[TOOL_CALLS]get_time[CALL_ID]zzzzzzzz9[ARGS]{"zone": "UTC"}',
        "",
        [OSLO, NOON],
    ),
    # As they are where the runtime hides the marks.
    ("mistral-args", 'get_weathera1b2c3d4e{"city": "Oslo"}', "", [OSLO]),
    ("mistral-args", 'get_weathera1b2c3d4e[ARGS]{"city": "Oslo"}', "", [OSLO]),
    ("mistral-args", 'get_weather[CALL_ID]a1{"city": "Oslo"}', "", [OSLO]),
    ("mistral-args", 'get_weathera1b2{"city": "Oslo"}', 'get_weathera1b2{"city": "Oslo"}', []),
    (
        "mistral-args",
        "get_weathera1b2c3d4e is no call",
        "get_weathera1b2c3d4e is no call",
        [],
    ),
    (
        "mistral-args",
        "[TOOL_CALLS]get_weather[CALL_ID]a1",
        "[TOOL_CALLS]get_weather[CALL_ID]a1",
        [],
    ),
    ("mistral-args", "[TOOL_CALLS]get_weather[CALLED]", "[TOOL_CALLS]get_weather[CALLED]", []),
    ("mistral", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("mistral", '[{"name": "Ada"}]', '[{"name": "Ada"}]', []),
    ("mistral", "get_weather is a tool", "get_weather is a tool", []),
    ("mistral", "get_wea", "get_wea", []),
    ("mistral", "Rain.", "Rain.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "argu', '[TOOL_CALLS] [{"name": "add", "argu', []),
    # pythonic
    ("pythonic", "[get_weather(city='Oslo'), get_time(zone=\"UTC\")]", "", [OSLO, NOON]),
    (
        "pythonic",
        "<|tool_call_start|>[add(a=1, b=[-2.5, true, None], c={'d': (1,)})]<|tool_call_end|>Sum!",
        "Sum!",
        [("add", '{"a": 1, "b": [-2.5, true, null], "c": {"d": [1]}}')],
    ),
    ("pythonic", "[add()]", "", [("add", "{}")]),
    ("pythonic", "[add(a='it\\'s, (ok)',)]", "", [("add", '{"a": "it\'s, (ok)"}')]),
    ("pythonic", "[add(a='\\d')]", "", [("add", '{"a": "\\\\d"}')]),
    ("pythonic", "[add(1, 2)]", "[add(1, 2)]", []),
    ("pythonic", "[add(a=open('x'))]", "[add(a=open('x'))]", []),
    ("pythonic", "[add(a=1", "[add(a=1", []),
    ("pythonic", "[print(a=1)]", "[print(a=1)]", []),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[x] is a list", "[x] is a list", []),
    ("pythonic", "Rain.", "Rain.", []),
]


@pytest.mark.parametrize(("form", "text", "words", "calls"), CASES)
def test_an_answer_is_read_alike_however_it_is_cut(
    form: str, text: str, words: str, calls: list[tuple[str, str]]
) -> None:
    reading = ParserOptions(form=FORMATS[form], names=NAMES)
    for pieces in all_cuts(text):
        speech, _ = heard(reading, pieces)
        assert (speech.words, calls_of(speech)) == (words, calls), pieces
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls_of(speech))


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *dict.fromkeys(each.marker for each in FORMATS.values()),
                *("</tool_call>", "[ARGS]"),
                *('{"name": "add"', ', "arguments": {', '"a": 1', "}", "]", "[", "add(", "a=1"),
                *(")", ",", ";", " ", "\n", '"', "'", "\\", "x", "get_time", "é", "<|tool_call_"),
            ]
        ),
        max_size=12,
    )
)
def test_nothing_is_lost_of_whatever_a_model_says(form: str, pieces: list[str]) -> None:
    """Cut or whole it means the same, calls have JSON arguments, and without calls it is text."""
    reading = ParserOptions(form=FORMATS[form], names=NAMES)
    whole, told = heard(reading, ["".join(pieces)])
    cut, _ = heard(reading, list("".join(pieces)))
    assert (whole.words, calls_of(whole)) == (cut.words, calls_of(cut))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls_of(whole))
    if not whole.calls:
        assert whole.words == "".join(pieces)
    assert sum(isinstance(part, ToolCallStart) for part in told) >= len(whole.calls)


def test_a_name_comes_first_and_arguments_as_they_are_written() -> None:
    reading = ParserOptions(form=FORMATS["hermes"], names=NAMES)
    speech = AnswerParser(reading)
    told = [
        speech.feed(Delta(piece, (1,)))
        for piece in ('<tool_call>\n{"name": "add", ', '"arguments": ', '{"a": ', "12", "}}", "\n")
    ]
    (begun, first), second, third = told[2], told[3], told[4]
    assert told[:2] == [[], []]
    assert isinstance(begun, ToolCallStart)
    assert (begun.name, begun.index) == ("add", 0)
    assert re.fullmatch("[A-Za-z0-9]{9}", begun.call_id)
    assert [first, *second, *third] == [
        ToolCallDelta('{"a": '),
        ToolCallDelta("12"),
        ToolCallDelta("}"),
    ]
    assert speech.reason(finished()) == "tool_calls"


def test_half_a_call_is_taken_back_and_becomes_text() -> None:
    text = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1'
    speech, told = heard(ParserOptions(form=FORMATS["hermes"], names=NAMES), [text])
    assert told[0] == TextPart("So:")
    assert [type(part) for part in told[1:3]] == [ToolCallStart, ToolCallDelta]
    assert told[3:] == [Retraction(calls=1), TextPart(text.removeprefix("So:"))]
    assert speech.words == text
    assert speech.reason(finished(FinishReason.LENGTH)) == "length"


def test_a_call_after_a_void_one_has_an_index_of_its_own() -> None:
    """Clients add up by index."""
    bad = '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>\n'
    speech, told = heard(ParserOptions(form=FORMATS["hermes"], names=NAMES), [*bad, HERMES_CALL])
    begun = [part for part in told if isinstance(part, ToolCallStart)]
    assert [part.index for part in begun] == [0, 1]
    assert len({part.call_id for part in begun}) == 2
    assert calls_of(speech) == [OSLO]
    assert speech.words == bad.removesuffix("\n")


@pytest.mark.parametrize("cut", [False, True])
def test_without_parallel_calls_the_first_one_counts(cut: bool) -> None:
    text = f"One.\n{HERMES_CALL}\n{HERMES_CALL.replace('Oslo', 'Rome')}\nTwo."
    reading = ParserOptions(form=FORMATS["hermes"], names=NAMES, most_calls=1)
    speech, told = heard(reading, list(text) if cut else [text])
    assert (speech.words, calls_of(speech)) == ("One.Two.", [OSLO])
    assert sum(isinstance(part, ToolCallStart) for part in told) == 1


@pytest.mark.parametrize(
    ("form", "name", "rest"),
    [
        ("hermes", None, ' "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
        ("hermes", "get_weather", ' {"city": "Oslo"}}\n</tool_call>'),
        ("llama", None, ' "get_weather", "parameters": {"city": "Oslo"}}'),
        ("llama", "get_weather", ' {"city": "Oslo"}}'),
        ("mistral", None, ' "get_weather", "arguments": {"city": "Oslo"}}]'),
        ("mistral", "get_weather", ' {"city": "Oslo"}}]'),
        ("mistral-args", None, 'get_weather[ARGS]{"city": "Oslo"}'),
        ("mistral-args", "get_weather", '{"city": "Oslo"}'),
        ("pythonic", None, 'get_weather(city="Oslo")]'),
        ("pythonic", "get_weather", 'city="Oslo")]'),
    ],
)
def test_a_call_goes_on_from_its_beginning_in_the_prompt(
    form: str, name: str | None, rest: str
) -> None:
    opening = FORMATS[form].opening(name)
    assert not opening.endswith(" ")
    reading = ParserOptions(form=FORMATS[form], names=NAMES, opening=opening)
    for pieces in all_cuts(rest):
        speech, _ = heard(reading, pieces)
        assert (speech.words, calls_of(speech)) == ("", [OSLO])


def test_a_beginning_that_the_model_leaves_hanging_is_text() -> None:
    opening = FORMATS["hermes"].opening("add")
    speech, _ = heard(
        ParserOptions(form=FORMATS["hermes"], names=NAMES, opening=opening), [" or not."]
    )
    assert (speech.words, calls_of(speech)) == (f"{opening} or not.", [])
    assert speech.reason(finished()) == "stop"


def test_a_call_that_was_answered_in_mid_stream_asks_for_nothing() -> None:
    speech = AnswerParser(ParserOptions(form=FORMATS["hermes"], names=NAMES))
    speech.feed(Delta(HERMES_CALL, (1,)))
    assert speech.reason(finished()) == "tool_calls"
    injected = Splice(1, (TranscriptToken(9, b"", TokenOrigin.INJECTED),))
    speech.feed(Delta("", (), splice=injected))
    assert speech.feed(Delta("It snows.", (1,))) == [TextPart("It snows.")]
    assert speech.reason(finished()) == "stop"
    speech.feed(Delta(f"\n{HERMES_CALL}", (1,)))
    assert speech.reason(finished()) == "tool_calls"


# --- retractions ---


# --- forms of model folders ---


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHATML, "hermes"),
        (named_template("chatml"), "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral-args"),
        ("{{ '<|tool_call_start|>' }}", "pythonic"),
        ('"[func_name1(params_name1=params_value1)]"', "pythonic"),
        ("{{ '<|python_tag|>' }}", "llama"),
        ("{{ '<start_of_turn>' }}", None),
    ],
)
def test_the_form_is_guessed_from_the_template(template: str, form: str | None) -> None:
    assert guess(template) == form
