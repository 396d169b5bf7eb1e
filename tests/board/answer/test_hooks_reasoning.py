"""Thoughts as a board sees them: counted, ended where they get too long, and survived."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkserve.board.answer.generation import Generation, RunSignal
from rkserve.board.answer.transcript import ReasoningBlock, ReasoningSpan, reasoning_span
from rkserve.core.messages import (
    Edit,
    FailoverState,
    FinishReason,
    GenerateRequest,
    Thinking,
    TokenOrigin,
    TranscriptToken,
)

EOS = 2
CLOSING = "\n</t>\n\n"
THINK = Thinking(
    "<t>",
    "</t>",
    mark_ids=tuple(b"</t>"),
    closing=CLOSING,
    closing_ids=tuple(CLOSING.encode()),
)
OPENED = replace(THINK, begun=True)


def slots(text: str, kind: TokenOrigin = TokenOrigin.GENERATED) -> list[TranscriptToken]:
    return [TranscriptToken(byte, bytes([byte]), kind) for byte in text.encode()]


def made(thinking: Thinking | None, max_tokens: int = 99) -> Generation:
    request = GenerateRequest("r", "m", (7, 8), max_tokens, thinking=thinking)
    return Generation(request, frozenset({EOS}), runtime_counts=True, vocab_size=1000)


def say(generation: Generation, text: str) -> None:
    for byte in text.encode():
        generation.accept(byte, bytes([byte]))


def read(generation: Generation) -> str:
    text = ""
    while (delta := generation.take()) is not None:
        text = text[: len(text) - delta.retract] + delta.text
    return text


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        pytest.param(THINK, "", ReasoningSpan(), id="nothing yet"),
        pytest.param(THINK, "abc", ReasoningSpan(), id="an answer at once"),
        pytest.param(THINK, "<t>a</t>b", ReasoningSpan(8), id="with their marks"),
        pytest.param(THINK, "\n<t>aé", ReasoningSpan(7, unended=True), id="not over"),
        pytest.param(THINK, "<t", ReasoningSpan(), id="half a mark"),
        pytest.param(OPENED, "a</t>b", ReasoningSpan(5), id="begun by the prompt"),
        pytest.param(
            OPENED, "", ReasoningSpan(unended=True), id="begun by the prompt, and no more"
        ),
        pytest.param(THINK, "x<t>a</t>b", ReasoningSpan(), id="too late to be thoughts"),
    ],
)
def test_tokens_of_thoughts_are_counted(
    thinking: Thinking, text: str, expected: ReasoningSpan
) -> None:
    assert reasoning_span(slots(text), thinking) == expected


def test_what_was_injected_is_no_thought() -> None:
    injected = slots("abc", TokenOrigin.INJECTED)
    assert reasoning_span([*slots("<t>a"), *injected, *slots("</t>")], THINK) == ReasoningSpan(8)


def test_a_mark_of_one_letter_is_found() -> None:
    block = ReasoningBlock(Thinking("(", ")"))
    for letter in "(ab":
        block.feed(letter)
    assert block.inside
    block.feed(")")
    assert (block.inside, block.over) == (False, True)


@pytest.mark.parametrize(
    ("thinking", "most", "said", "shown"),
    [
        pytest.param(THINK, 2, "<t>ab", f"<t>ab{CLOSING}", id="after two tokens"),
        pytest.param(THINK, 0, "<t>", f"<t>{CLOSING}", id="at once"),
        pytest.param(OPENED, 3, "abc", f"abc{CLOSING}", id="begun by the prompt"),
    ],
)
def test_thoughts_that_get_too_long_are_ended(
    thinking: Thinking, most: int, said: str, shown: str
) -> None:
    generation = made(replace(thinking, max_tokens=most))
    say(generation, said[:-1])
    assert generation.want is None
    say(generation, said[-1])
    assert generation.want is RunSignal.REWIND
    generation.interrupted()
    assert generation.context == (7, 8, *shown.encode())
    say(generation, "yes")
    generation.accept(EOS, b"")
    assert generation.ended(context_full=False) is FinishReason.STOP
    assert read(generation) == f"{shown}yes"
    assert generation.reasoning == ReasoningSpan(len(shown))


def test_thoughts_that_end_in_time_are_left_alone() -> None:
    generation = made(replace(THINK, max_tokens=3))
    say(generation, "<t>ab</t>a long answer")
    assert generation.want is None


def test_a_mark_is_not_cut_in_two_by_the_limit() -> None:
    generation = made(replace(THINK, max_tokens=3))
    say(generation, "<t>ab</")
    assert generation.want is None, "they may end by themselves"
    say(generation, "b")
    assert generation.want is RunSignal.REWIND


def test_thoughts_are_ended_in_an_answer_that_goes_on_elsewhere_or_was_edited() -> None:
    """Whoever sees a replay ends them at the next token."""
    generation = made(replace(THINK, max_tokens=2))
    say(generation, "<t>a")
    generation.interrupted()
    generation.apply(Edit(ids=(98, 99, 100), text="bcd"), kv_positions=6, context_len=512)
    assert generation.want is None
    say(generation, "e")
    assert generation.want is RunSignal.REWIND
    assert generation.partial_output == f"<t>abcde{CLOSING}"


def test_a_limit_of_the_answer_is_not_passed_by_ending_thoughts() -> None:
    generation = made(replace(THINK, max_tokens=2), max_tokens=6)
    say(generation, "<t>ab")
    generation.interrupted()
    assert generation.complete
    assert generation.ended(context_full=False) is FinishReason.LENGTH


def test_a_run_that_ends_with_the_thoughts_is_gone_on_with() -> None:
    generation = made(THINK)
    say(generation, "<t>a\n")
    assert generation.end_thinking()
    generation.interrupted()
    assert generation.context == (7, 8, *b"<t>a\n</t>")
    assert read(generation) == "<t>a\n</t>"
    assert not generation.end_thinking(), "once is enough"


def test_in_text_mode_it_goes_on_with_text() -> None:
    request = GenerateRequest("r", "m", (), 99, thinking=THINK, prompt_text="Hi")
    generation = Generation(request, frozenset({EOS}), runtime_counts=True)
    say(generation, "<t>a\n")
    assert generation.end_thinking()
    generation.interrupted(prompt_tokens=2)
    assert generation.generated_text == "<t>a\n</t>"
    assert generation.reasoning == ReasoningSpan(6)


@pytest.mark.parametrize(
    ("thinking", "said", "max_tokens"),
    [
        pytest.param(None, "<t>a", 99, id="a model that does not think"),
        pytest.param(THINK, "yes", 99, id="there were none"),
        pytest.param(THINK, "<t>a</t>yes", 99, id="they were over"),
        pytest.param(THINK, "<t>ab", 9, id="no room for what follows"),
    ],
)
def test_any_other_run_that_ends_is_the_answers_end(
    thinking: Thinking | None, said: str, max_tokens: int
) -> None:
    generation = made(thinking, max_tokens)
    say(generation, said)
    assert not generation.end_thinking()
    assert generation.partial_output == said


@pytest.mark.parametrize("at", range(8))
def test_another_board_ends_the_same_thoughts_at_the_same_place(at: int) -> None:
    """Also where the first one was lost right after the token that was one too many."""
    said, ended = "<t>abcdef", f"<t>abcd{CLOSING}"
    continued = FailoverState(tuple(slots(said[:at])), said[:at])
    request = GenerateRequest(
        "r", "m", (7, 8), 99, thinking=replace(THINK, max_tokens=4), continued=continued
    )
    second = Generation(request, frozenset({EOS}), runtime_counts=True, vocab_size=1000)
    for letter in said[at:]:
        if second.partial_output == ended:
            break  # a model that sees the end of its thoughts goes on with the answer
        say(second, letter)
    second.interrupted()
    assert second.partial_output == ended
    say(second, "yes")
    assert second.partial_output == f"{ended}yes"
