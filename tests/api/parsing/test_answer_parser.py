"""Answers as parts: retractions that edits cause."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.parsing.answer_parser import PLAIN, AnswerParser, ParserOptions
from rkserve.api.parsing.tools.base import (
    Part,
    ReasoningPart,
    Retraction,
    TextPart,
    ToolCallDelta,
    ToolCallStart,
)
from rkserve.api.parsing.tools.formats import FORMATS
from rkserve.core.messages import (
    Delta,
    Thinking,
)

NAMES = frozenset({"get_weather", "get_time", "add"})


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


OSLO = ("get_weather", '{"city": "Oslo"}')


def heard(reading: ParserOptions, pieces: list[str]) -> tuple[AnswerParser, list[Part]]:
    """An answer that came in these pieces, and all that was told of it."""
    speech, told = AnswerParser(reading), []
    for piece in pieces:
        told += speech.feed(Delta(piece, (1,)))
    return speech, told + speech.end()


def calls_of(speech: AnswerParser) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in speech.calls]


def retold(
    reading: ParserOptions, first: str, retract: int, second: str
) -> tuple[AnswerParser, list[Part]]:
    speech = AnswerParser(reading)
    speech.feed(Delta(first, (1,)))
    told = speech.feed(Delta(second, (1,), retract=retract))
    return speech, told + speech.end()


def test_an_edit_changes_a_plain_answer() -> None:
    speech, told = retold(PLAIN, "It rains.", 6, "snows.")
    assert told == [Retraction(words=6), TextPart("snows.")]
    assert speech.words == "It snows."


def test_an_edit_into_a_call_leaves_what_is_the_same() -> None:
    reading = ParserOptions(form=FORMATS["hermes"], names=NAMES)
    begun = '<tool_call>{"name": "add", "arguments": {"a": 1, "b'
    speech, told = retold(reading, begun, 1, 'c": 2}}</tool_call>')
    assert calls_of(speech) == [("add", '{"a": 1, "c": 2}')]
    assert told[0] == Retraction(calls=1)
    assert told[1] == ToolCallStart("add", 1, speech.calls[0].call_id)
    grown, told = retold(reading, f'{begun}"', 0, ": 2}}</tool_call>")
    assert calls_of(grown) == [("add", '{"a": 1, "b": 2}')]
    assert all(isinstance(part, ToolCallDelta) for part in told)


def test_an_edit_may_turn_a_call_into_words_and_back() -> None:
    reading = ParserOptions(form=FORMATS["hermes"], names=NAMES)
    speech, told = retold(reading, f"Hm.\n{HERMES_CALL}", len(HERMES_CALL) + 1, " No.")
    assert (speech.words, calls_of(speech)) == ("Hm. No.", [])
    assert told == [Retraction(calls=1), TextPart(" No.")]
    speech, told = retold(reading, "Hm. No.", 4, f"\n{HERMES_CALL}")
    assert (speech.words, calls_of(speech)) == ("Hm.", [OSLO])


def test_an_edit_may_take_back_thoughts() -> None:
    reading = ParserOptions(thinking=Thinking("<think>", "</think>"))
    speech, told = retold(reading, "<think>\nIt rains.\n</think>\n\nYes", 21, " snows.</think>No")
    assert (speech.thoughts, speech.words) == ("It snows.", "No")
    assert told == [Retraction(words=3, thoughts=6), ReasoningPart("snows."), TextPart("No")]


class Client:
    """Whoever adds up what is told, and follows what is taken back."""

    def __init__(self) -> None:
        self.words = self.thoughts = ""
        self.calls: list[list[str]] = []
        self.indexes: list[int] = []

    def take(self, part: Part) -> None:
        match part:
            case TextPart(text=text):
                self.words += text
            case ReasoningPart(text=text):
                self.thoughts += text
            case ToolCallStart(name=name, index=index):
                assert index == len(self.indexes), "indexes are used once, in order"
                self.indexes.append(index)
                self.calls.append([name, ""])
            case ToolCallDelta(arguments=arguments):
                self.calls[-1][1] += arguments
            case Retraction(words=words, thoughts=thoughts, calls=calls):
                assert words <= len(self.words)
                assert thoughts <= len(self.thoughts)
                self.words = self.words[: len(self.words) - words]
                self.thoughts = self.thoughts[: len(self.thoughts) - thoughts]
                del self.calls[len(self.calls) - calls :]


PIECES = (
    *("<think>", "</think>", "\n", "Hm.", "<tool_call>", '{"name": "add", "arguments": {"a": 1'),
    *("}}", ', "b": 2', "</tool_call>", HERMES_CALL, "x", " "),
)


@given(
    steps=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(PIECES)), max_size=10),
    begun=st.booleans(),
    most_calls=st.sampled_from([None, 1, 2]),
)
def test_whoever_follows_retractions_has_what_the_answer_became(
    steps: list[tuple[int, str]], begun: bool, most_calls: int | None
) -> None:
    reading = ParserOptions(
        thinking=Thinking("<think>", "</think>", begun=begun),
        form=FORMATS["hermes"],
        names=NAMES,
        most_calls=most_calls,
    )
    speech, client, raw = AnswerParser(reading), Client(), ""
    for number, (back, text) in enumerate(steps):
        retract = min(back, len(raw)) if number % 2 else 0
        raw = raw[: len(raw) - retract] + text
        for part in speech.feed(Delta(text, (1,), retract=retract)):
            client.take(part)
    for part in speech.end():
        client.take(part)
    fresh, _ = heard(reading, [raw])
    expected = (fresh.words, fresh.thoughts, calls_of(fresh))
    assert (speech.words, speech.thoughts, calls_of(speech)) == expected
    told = [(name, arguments) for name, arguments in client.calls]
    assert (client.words, client.thoughts, told) == expected
