"""Hooks: what each of their answers does to a generation, in a chain, and when they fail.

``mask_cards`` and ``never_say`` are the two kinds that one would write: a filter of what is shown,
and a guide that changes what the model goes on from.
"""

from __future__ import annotations

import asyncio
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.answer.generation import REWINDS_WITHOUT_PROGRESS, Generation, RunSignal
from rkserve.board.answer.hooks import (
    Action,
    Continue,
    Decoded,
    Hook,
    HookFactory,
    Pause,
    Replace,
    Stop,
)
from rkserve.core.errors import HookFailed
from rkserve.core.messages import Delta, Edit, FinishReason, GenerateRequest, Splice


class MaskCards:
    """A filter: shows four digits in a row as asterisks; the model goes on from the real ones.

    Digits are held back until it is clear what they are, so none is shown and taken back.
    """

    def __init__(self) -> None:
        self._digits = ""

    def on_piece(self, piece: Decoded) -> Action:
        if not piece.text.isdigit():
            return Continue(self.on_end() + piece.text)
        self._digits += piece.text
        if len(self._digits) < 4:
            return Continue("")
        self._digits = ""
        return Replace((), "****", last=4, in_context=False)

    def on_end(self) -> str:
        held, self._digits = self._digits, ""
        return held


class NeverSay:
    """A guide: wherever the model says one word, it goes on as if it had said another."""

    def __init__(self, word: str, instead: str, ids: tuple[int, ...]) -> None:
        self._word, self._instead, self._ids = word, instead, ids
        self._letters = 0

    def on_piece(self, piece: Decoded) -> Action:
        if piece.answer.endswith(self._word):
            return Replace(self._ids, self._instead, last=len(self._word))
        return Continue()

    def on_end(self) -> str:
        return ""


class Scripted:
    """Says what a function says; holds back what it is given."""

    def __init__(self, say: Callable[[Decoded], Action], held: str = "") -> None:
        self._say, self._held = say, held

    def on_piece(self, piece: Decoded) -> Action:
        return self._say(piece)

    def on_end(self) -> str:
        return self._held


def mask_cards(request: GenerateRequest) -> Hook | None:
    return MaskCards()


def never_say(word: str, instead: str, ids: tuple[int, ...]) -> HookFactory:
    return lambda _: NeverSay(word, instead, ids)


def scripted(say: Callable[[Decoded], Action], held: str = "") -> HookFactory:
    return lambda _: Scripted(say, held)


def made(
    *hooks: HookFactory,
    stop: tuple[str, ...] = (),
    pause_on_text: tuple[str, ...] = (),
    pause_on_ids: tuple[int, ...] = (),
    max_tokens: int = 99,
) -> Generation:
    request = GenerateRequest(
        "r",
        "m",
        (7, 8),
        max_tokens,
        stop=stop,
        pause_on_text=pause_on_text,
        pause_on_ids=pause_on_ids,
    )
    return Generation(request, frozenset({2}), runtime_counts=True, hooks=hooks, vocab_size=1000)


def letters(generation: Generation, text: str) -> None:
    """Each letter is a token with the id of its code point."""
    for letter in text:
        generation.accept(ord(letter), letter.encode())


class Client:
    """What a client has read."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.text = ""

    def read(self) -> str:
        while (delta := self._generation.take()) is not None:
            kept = len(self.text) - delta.retract
            assert kept >= 0
            self.text = self.text[:kept] + delta.text
        return self.text


def said(word: str, action: Action) -> Callable[[Decoded], Action]:
    return lambda piece: action if piece.text == word else Continue()


@pytest.mark.parametrize(
    ("hook", "shown", "want"),
    [
        pytest.param(said("c", Continue("C")), "abCde", None, id="continue and show another text"),
        pytest.param(said("c", Continue("")), "abde", None, id="continue and show nothing"),
        pytest.param(said("c", Stop()), "ab", RunSignal.STOP, id="stop"),
        pytest.param(said("c", Stop("!")), "ab!", RunSignal.STOP, id="stop with a last word"),
        pytest.param(said("c", Pause()), "abc", RunSignal.PAUSE, id="pause"),
        pytest.param(
            said("c", Pause("C")), "abC", RunSignal.PAUSE, id="pause and show another text"
        ),
        pytest.param(
            said("c", Replace((900,), "X", last=2)),
            "aX",
            RunSignal.REWIND,
            id="replace in the context",
        ),
        pytest.param(
            said("c", Replace((), "X", last=2, in_context=False)), "aXde", None, id="or only shown"
        ),
        pytest.param(
            said("c", Replace((), "", last=3)), "", RunSignal.REWIND, id="replace by nothing"
        ),
    ],
)
@pytest.mark.parametrize("often", [True, False], ids=["read at once", "read late"])
def test_what_a_hook_answers_is_done(
    hook: Callable[[Decoded], Action], shown: str, want: RunSignal | None, often: bool
) -> None:
    generation = made(scripted(hook))
    client = Client(generation)
    for letter in "abcde":
        letters(generation, letter)
        if often:
            client.read()
    assert generation.want is want
    assert client.read() == shown == generation.partial_output


def test_a_pause_says_which_hook_wanted_it_and_why() -> None:
    generation = made(scripted(said("b", Pause(reason="a tool is called"))))
    letters(generation, "abcd")
    generation.interrupted()
    assert generation.paused_by == "a tool is called"
    assert generation.context == (7, 8, *map(ord, "ab"))
    letters(generation, "c")
    generation.interrupted()  # this time by somebody else
    assert generation.paused_by is None

    nameless = made(scripted(said("b", Pause())))
    letters(nameless, "b")
    nameless.interrupted()
    assert nameless.paused_by == "Scripted"


@pytest.mark.parametrize(
    ("texts", "ids", "paused_at", "by"),
    [
        pytest.param(("cd",), (), "abcd", "cd", id="a text over two tokens"),
        pytest.param((), (ord("b"),), "ab", "98", id="a token"),
        pytest.param(("d",), (ord("c"),), "abc", "99", id="whichever is first"),
    ],
)
def test_a_request_pauses_itself_after_the_token_that_completes_it(
    texts: tuple[str, ...], ids: tuple[int, ...], paused_at: str, by: str
) -> None:
    generation = made(pause_on_text=texts, pause_on_ids=ids)
    letters(generation, "abcdef")
    before = generation.want
    assert Client(generation).read() == paused_at
    generation.interrupted()
    assert (before, generation.want, generation.paused_by) == (RunSignal.PAUSE, None, by)
    assert generation.context == (7, 8, *map(ord, paused_at))
    letters(generation, "xyz")
    assert generation.want is None
    assert generation.partial_output == paused_at + "xyz"


def test_a_token_whose_text_waits_pauses_when_its_character_is_whole() -> None:
    generation = made(pause_on_ids=(300,))
    generation.accept(300, b"", waiting=True)
    assert generation.want is None
    generation.accept(301, "é".encode())
    assert generation.want is RunSignal.PAUSE
    generation.interrupted()
    assert generation.context == (7, 8, 300, 301)


def test_a_filter_changes_what_is_shown_and_not_what_the_model_goes_on_from() -> None:
    generation = made(mask_cards)
    client = Client(generation)
    for letter in "no 4111 2222!":
        letters(generation, letter)
        assert not set("0123456789") & set(client.read())
    assert client.text == "no **** ****!"
    assert generation.context == (7, 8, *map(ord, "no 4111 2222!"))


def test_a_filter_still_holds_after_an_edit() -> None:
    generation = made(mask_cards)
    client = Client(generation)
    letters(generation, "no 4111!")
    client.read()
    generation.interrupted()
    edit = Edit(replace_last=1, ids=(501,), text=" or ")
    generation.apply(edit, kv_positions=9, context_len=99)
    assert client.read() == "no **** or "
    letters(generation, "2222 33")
    assert client.read() == "no **** or **** "
    generation.ended(context_full=False)
    assert client.read() == "no **** or **** 33"


@given(
    steps=st.lists(st.sampled_from([*"1234a ", "edit", "read", "interrupt"]), max_size=60),
    taken_back=st.integers(0, 6),
    put_in=st.sampled_from(["", "9", "a", "!"]),
)
def test_a_filter_hides_the_same_whatever_happens_to_the_answer(
    steps: list[str], taken_back: int, put_in: str
) -> None:
    generation, raw = made(mask_cards), ""
    client = Client(generation)
    for step in steps:
        if step == "read":
            assert re.search(r"\d{4}", client.read()) is None
        elif step == "interrupt":
            generation.interrupted()
        elif step == "edit":
            back = min(taken_back, len(raw))
            raw = raw[: len(raw) - back] + put_in
            edit = Edit(back, tuple(map(ord, put_in)), put_in)
            generation.interrupted()
            generation.apply(edit, kv_positions=0, context_len=999)
        else:
            raw += step
            letters(generation, step)
    generation.ended(context_full=False)
    assert client.read() == re.sub(r"\d{4}", "****", raw)
    assert generation.context == (7, 8, *map(ord, raw))


WORDS = ("bad", "ugly")


@given(text=st.lists(st.sampled_from([*"ba du", *WORDS]), max_size=20).map("".join))
def test_a_guided_answer_is_what_the_model_says_to_the_changed_context(text: str) -> None:
    """The model says ``text``, letter by letter, whatever was put in place of some of it."""
    hooks = [never_say(word, "-", (900 + at,)) for at, word in enumerate(WORDS)]
    generation = made(*hooks, max_tokens=999)
    client = Client(generation)
    for letter in text:
        letters(generation, letter)
        if generation.want is RunSignal.REWIND:
            letters(generation, "late")
            client.read()
            generation.interrupted()
    expected = re.sub("|".join(WORDS), "-", text)
    ids = {"-": (900, 901)}
    assert client.read() == expected
    assert len(generation.context) == 2 + len(expected)
    for token_id, letter in zip(generation.context[2:], expected, strict=True):
        assert token_id in ids.get(letter, (ord(letter),))


def test_a_guide_makes_the_model_go_on_from_what_it_should_have_said() -> None:
    generation = made(never_say("bad", "good", (501, 502)))
    client = Client(generation)
    for letter in "a bad":
        letters(generation, letter)
        client.read()
    assert generation.want is RunSignal.REWIND
    letters(generation, "xy")  # what still comes of the run is not the answer
    assert client.read() == "a good"
    generation.interrupted()
    assert generation.want is None
    assert generation.context == (7, 8, *map(ord, "a "), 501, 502)
    letters(generation, " day")
    assert client.read() == "a good day"
    assert generation.tokens == 2 + 2 + 4
    assert generation.ended(context_full=False) is FinishReason.STOP


def test_a_replacement_may_complete_the_answer() -> None:
    generation = made(scripted(said("b", Replace((5, 6), "END"))), stop=("END",))
    letters(generation, "ab")
    assert (generation.want, generation.reason) == (RunSignal.STOP, FinishReason.STOP)
    assert Client(generation).read() == "a"

    limited = made(scripted(said("b", Replace((5, 6), "xy"))), max_tokens=3)
    letters(limited, "ab")
    assert (limited.want, limited.reason) == (RunSignal.STOP, FinishReason.LENGTH)


def test_a_hook_that_never_lets_the_model_get_further_fails() -> None:
    generation = made(scripted(said("b", Replace((), ""))))
    letters(generation, "a")
    for _ in range(REWINDS_WITHOUT_PROGRESS):
        letters(generation, "b")
        assert generation.want is RunSignal.REWIND
        generation.interrupted()
    letters(generation, "b")
    assert generation.want is RunSignal.STOP
    with pytest.raises(HookFailed, match="without progress of the answer"):
        generation.ended(context_full=False)


def test_each_hook_gets_what_the_one_before_it_shows() -> None:
    seen: list[tuple[int, str, str]] = []

    def note(piece: Decoded) -> Action:
        seen.append((piece.index, piece.text, piece.answer))
        return Continue()

    def upper(piece: Decoded) -> Action:
        return Continue(piece.text.upper())

    generation = made(scripted(upper), scripted(note), stop=("CD",))
    letters(generation, "abcd")
    assert seen == [(0, "A", "A"), (1, "B", "AB"), (2, "C", "ABC"), (3, "D", "ABCD")]
    assert generation.reason is FinishReason.STOP
    assert generation.partial_output == "AB"


def test_what_one_shows_anew_reaches_those_behind_it() -> None:
    def shorten(piece: Decoded) -> Action:
        if piece.answer.endswith("haha"):
            return Replace((), "(laughs)", last=4, in_context=False)
        return Continue()

    generation = made(scripted(shorten), stop=("(laughs)!",))
    client = Client(generation)
    read = []
    for letter in "x haha!":
        letters(generation, letter)
        read.append(client.read())
    assert read == ["x", "x ", "x h", "x ha", "x hah", "x ", "x "]
    assert generation.reason is FinishReason.STOP


def test_what_a_hook_held_back_goes_through_those_behind_it_at_the_end() -> None:
    def swallow(piece: Decoded) -> Action:
        return Continue("" if piece.text == "b" else None)

    def upper(piece: Decoded) -> Action:
        assert piece.ids or piece.token_id is None
        return Continue(piece.text.upper())

    generation = made(scripted(swallow, held="bb"), scripted(upper), stop=("BB!",))
    letters(generation, "ab")
    assert Client(generation).read() == "A"
    assert generation.ended(context_full=False) is FinishReason.STOP
    # Text that belongs to no token of its own: nothing comes after the two that were given out.
    assert generation.take() == Delta("BB", (), splice=Splice(2, ()))


def test_a_stop_string_in_what_was_held_back_still_ends_the_answer() -> None:
    generation = made(scripted(said("x", Continue("")), held="yEND!"), stop=("END",), max_tokens=2)
    letters(generation, "ax")
    assert generation.reason is FinishReason.LENGTH
    assert generation.ended(context_full=False) is FinishReason.STOP
    assert Client(generation).read() == "ay"


def test_what_stands_behind_a_stop_is_not_released() -> None:
    generation = made(scripted(lambda _: Continue(), held="secret"), stop=("b",))
    letters(generation, "ab")
    generation.ended(context_full=False)
    assert Client(generation).read() == "a"


def test_what_a_hook_held_back_before_another_ones_stop_is_not_released() -> None:
    """It would come after the answer's end, as what an edit puts there does."""
    hooks = (scripted(lambda _: Continue(), held="secret"), scripted(said("b", Stop("b"))))
    generation = made(*hooks)
    letters(generation, "ab")
    generation.ended(context_full=False)
    assert Client(generation).read() == "ab"

    edited = made(*hooks)
    client = Client(edited)
    letters(edited, "a")
    edited.interrupted()
    for text in ("b", "more"):
        edited.apply(Edit(ids=(5,), text=text), kv_positions=0, context_len=99)
        assert edited.reason is FinishReason.STOP
        assert client.read() == "ab"
        edited.interrupted()


def test_a_pause_of_the_past_is_not_repeated_when_what_was_shown_changes() -> None:
    def laugh(piece: Decoded) -> Action:
        if piece.answer.endswith("haha"):
            return Replace((), "(laughs)", last=4, in_context=False)
        return Continue()

    generation = made(scripted(laugh), scripted(said("x", Pause())))
    letters(generation, "x")
    generation.interrupted()
    letters(generation, "haha")
    assert generation.want is None
    assert Client(generation).read() == "x(laughs)"


def test_what_an_edit_puts_in_cannot_rewind() -> None:
    generation = made(scripted(said("b", Replace((6,), "X"))))
    letters(generation, "a")
    generation.interrupted()
    generation.apply(Edit(ids=(5,), text="b"), kv_positions=0, context_len=99)
    assert generation.want is None
    assert Client(generation).read() == "ab"
    letters(generation, "c")
    assert Client(generation).read() == "c"


def test_a_character_that_was_begun_twice_is_one_piece_with_the_tokens_that_count() -> None:
    seen: list[tuple[int, ...]] = []

    def note(piece: Decoded) -> Action:
        seen.append(piece.ids)
        return Continue()

    generation = made(scripted(note))
    generation.accept(300, b"", waiting=True)
    generation.interrupted()
    generation.accept(300, b"", waiting=True)
    generation.accept(301, "é".encode())
    assert seen == [(300, 301)]


def test_a_changed_answer_is_replayed_to_a_fresh_hook() -> None:
    seen: list[list[tuple[tuple[int, ...], str, bool]]] = []

    def factory(request: GenerateRequest) -> Hook:
        mine: list[tuple[tuple[int, ...], str, bool]] = []
        seen.append(mine)

        def note(piece: Decoded) -> Action:
            mine.append((piece.ids, piece.text, piece.replayed))
            return Pause()

        return Scripted(note)

    generation = made(factory)
    letters(generation, "a")
    generation.interrupted()
    letters(generation, "b")
    generation.interrupted()
    edit = Edit(replace_last=1, ids=(5, 6), text="own")
    generation.apply(edit, kv_positions=3, context_len=99)
    assert generation.want is None  # it is paused already
    letters(generation, "c")
    assert generation.want is RunSignal.PAUSE
    assert seen == [
        [((97,), "a", False), ((98,), "b", False)],
        [((97,), "a", True), ((5, 6), "own", True), ((99,), "c", False)],
    ]


ODD: Any = 5.5


def broken(piece: Decoded) -> Action:
    raise ZeroDivisionError("oops")


def broken_factory(request: GenerateRequest) -> Hook:
    raise ZeroDivisionError("oops")


class BrokenEnd(Scripted):
    """Fails at the end."""

    def on_end(self) -> str:
        raise ZeroDivisionError("oops")


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        pytest.param(broken, "Scripted failed: it raised ZeroDivisionError", id="it raises"),
        pytest.param(lambda _: None, "it did not return an action", id="no action"),
        pytest.param(lambda _: Continue(ODD), "Continue has a wrong show", id="no text"),
        pytest.param(lambda _: Continue("\ud800"), "wrong show", id="shown: half a character"),
        pytest.param(lambda _: Stop(ODD), "Stop has a wrong show", id="stop without a text"),
        pytest.param(lambda _: Stop("", ODD), "Stop has a wrong by", id="stopped by no text"),
        pytest.param(lambda _: Pause(reason=ODD), "Pause has a wrong reason", id="no reason"),
        pytest.param(lambda _: Replace((1,), ODD), "Replace has a wrong text", id="no new text"),
        pytest.param(lambda _: Replace(ODD, "x"), "Replace has a wrong ids", id="no tuple"),
        pytest.param(lambda _: Replace((ODD,), "x"), "Replace has a wrong ids", id="no id"),
        pytest.param(lambda _: Replace((True,), "x"), "Replace has a wrong ids", id="a boolean"),
        pytest.param(lambda _: Replace((1,), "x", last=ODD), "has a wrong last", id="no number"),
        pytest.param(
            lambda _: Replace((), "x", last=ODD, in_context=False), "wrong last", id="shown only"
        ),
        pytest.param(
            lambda _: Replace((1,), "x", in_context=ODD), "wrong in_context", id="no boolean"
        ),
        pytest.param(lambda _: Replace((1,), "x", last=3), "3 tokens", id="too many"),
        pytest.param(lambda _: Replace((1,), "x", last=0), "last 0 tokens", id="none"),
        pytest.param(
            lambda _: Replace((), "x", last=3, in_context=False), "last 3", id="shown, too many"
        ),
        pytest.param(lambda _: Replace((1000,), "x"), "not in the vocabulary", id="vocabulary"),
        pytest.param(lambda _: Replace((-1,), "x"), "not in the vocabulary", id="negative"),
        pytest.param(lambda _: Replace((), "x"), "needs its token ids", id="no ids"),
        pytest.param(lambda _: Replace((1,), "\ud800"), "wrong text", id="half a character"),
    ],
)
def test_a_hook_that_fails_ends_its_own_generation_with_an_error(
    hook: Callable[[Decoded], Action], reason: str
) -> None:
    generation = made(scripted(lambda piece: hook(piece) if piece.text == "b" else Continue()))
    letters(generation, "abc")
    assert (generation.want, generation.complete) == (RunSignal.STOP, True)
    assert Client(generation).read() == "a"
    with pytest.raises(HookFailed, match=reason) as failed:
        generation.ended(context_full=False)
    assert pickle.loads(pickle.dumps(failed.value)).message == failed.value.message
    assert "oops" not in failed.value.message, "what the operator's code says is not the client's"


class Mean(str):
    """A text that passes for one and cannot be worked with."""

    def __add__(self, other: str) -> str:
        raise ArithmeticError(other)

    __radd__ = __add__


def test_whatever_else_a_hook_breaks_is_its_generations_own_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generation = made(scripted(said("b", Continue(Mean("x")))))
    letters(generation, "abc")
    assert generation.want is RunSignal.STOP
    with pytest.raises(HookFailed, match="made an error"):
        generation.ended(context_full=False)
    assert "ArithmeticError" in caplog.text


def test_a_hook_may_fail_before_the_first_token_and_after_the_last() -> None:
    with pytest.raises(HookFailed, match="broken_factory failed: it raised ZeroDivisionError"):
        made(broken_factory)
    generation = made(lambda _: BrokenEnd(lambda _: Continue()))
    letters(generation, "ab")
    with pytest.raises(HookFailed, match="BrokenEnd failed"):
        generation.ended(context_full=False)
    assert Client(generation).read() == "ab"


def test_a_hook_that_fails_in_a_replay_ends_the_generation_that_was_edited() -> None:
    generation = made(scripted(broken_in_replay))
    letters(generation, "ab")
    generation.interrupted()
    generation.apply(Edit(replace_last=1), kv_positions=3, context_len=99)
    assert generation.complete
    with pytest.raises(HookFailed) as failed:
        generation.ended(context_full=False)
    assert failed.value.detail == "ValueError('in the replay')"


def broken_in_replay(piece: Decoded) -> Action:
    if piece.replayed:
        raise ValueError("in the replay")
    return Continue()


def test_a_replacement_cannot_cut_words_that_were_put_in_as_one() -> None:
    generation = made(scripted(said("c", Replace((1,), "x", last=2))))
    letters(generation, "a")
    generation.interrupted()
    generation.apply(Edit(ids=(5, 6), text="own"), kv_positions=3, context_len=99)
    letters(generation, "c")
    with pytest.raises(HookFailed, match="cut words in two"):
        generation.ended(context_full=False)


def test_without_a_tokenizer_a_hook_cannot_change_the_context() -> None:
    request = GenerateRequest("r", "m", (), 9, prompt_text="Hi")
    hooks = (scripted(lambda _: Replace((1,), "x")),)
    generation = Generation(request, frozenset(), runtime_counts=True, hooks=hooks)
    letters(generation, "a")
    with pytest.raises(HookFailed, match="without a tokenizer"):
        generation.ended(context_full=False)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_hook_that_wants_to_end_the_program_ends_its_own_generation(error: BaseException) -> None:
    def leave(piece: Decoded) -> Action:
        raise error

    generation = made(scripted(leave))
    letters(generation, "a")
    with pytest.raises(HookFailed, match=type(error).__name__):
        generation.ended(context_full=False)
