"""One generation as bookkeeping: what is given out, interruptions, edits, why it ended."""

from __future__ import annotations

import codecs
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.answer.generation import Generation, RunSignal
from rkserve.core.errors import ContextOverflow, RequestError, RkserveError
from rkserve.core.messages import (
    Delta,
    Edit,
    FailoverState,
    FinishReason,
    GenerateRequest,
    Splice,
    TokenOrigin,
    TranscriptToken,
)

EOS = 2


def generation(
    max_tokens: int = 8,
    stop: tuple[str, ...] = (),
    *,
    runtime_counts: bool = True,
    **extra: Any,
) -> Generation:
    request = GenerateRequest("r", "m", (7, 8, 9), max_tokens, stop=stop, **extra)
    return Generation(request, frozenset({EOS}), runtime_counts=runtime_counts)


@pytest.mark.parametrize(
    ("asked", "tokens", "text", "reason", "must_stop"),
    [
        pytest.param({}, [(10, b"Hi"), (EOS, b"</s>")], "Hi", FinishReason.STOP, False, id="EOS"),
        pytest.param(
            {},
            [(10, b"Hi"), (EOS, b""), (11, b"?")],
            "Hi",
            FinishReason.STOP,
            True,
            id="the runtime goes on after an EOS",
        ),
        pytest.param(
            {"max_tokens": 2}, [(10, b"a"), (11, b"b")], "ab", FinishReason.LENGTH, False, id="1.3"
        ),
        pytest.param(
            {"max_tokens": 2, "runtime_counts": False},
            [(10, b"a"), (11, b"b")],
            "ab",
            FinishReason.LENGTH,
            True,
            id="on 1.2.x the limit is ours",
        ),
        pytest.param(
            {"max_tokens": 2, "runtime_counts": False},
            [(10, b"a"), (11, b"b"), (12, b"c"), (EOS, b"")],
            "ab",
            FinishReason.LENGTH,
            True,
            id="late tokens are not text",
        ),
        pytest.param(
            {"max_tokens": 2}, [(10, b"a"), (EOS, b"")], "a", FinishReason.STOP, False, id="both"
        ),
        pytest.param(
            {"stop": ("!",)}, [(10, b"a!b")], "a", FinishReason.STOP, True, id="stop string"
        ),
        pytest.param(
            {"max_tokens": 2, "stop": ("bX",)},
            [(10, b"a"), (11, b"b")],
            "ab",
            FinishReason.LENGTH,
            False,
            id="text held back for a stop string is released",
        ),
        pytest.param(
            {"stop_ids": (11, EOS)},
            [(10, b"a"), (11, b"b"), (12, b"c")],
            "a",
            FinishReason.STOP,
            True,
            id="stop id",
        ),
        pytest.param(
            {"stop_ids": (11,), "include_stop": True},
            [(10, b"a"), (11, b"b"), (12, b"c")],
            "ab",
            FinishReason.STOP,
            True,
            id="stop id that is shown",
        ),
        pytest.param(
            {"stop_ids": (EOS,)}, [(EOS, b"")], "", FinishReason.STOP, False, id="EOS as a stop id"
        ),
        pytest.param(
            {"stop": ("!?",), "include_stop": True},
            [(10, b"a!"), (11, b"?b")],
            "a!?",
            FinishReason.STOP,
            True,
            id="stop string that is shown",
        ),
        pytest.param({}, [(10, b"a")], "a", FinishReason.STOP, False, id="an EOS of the runtime's"),
        pytest.param(
            {},
            [(10, b"a\xe4\xbd"), (11, b"\xa0")],
            "a你",
            FinishReason.STOP,
            False,
            id="a character in two tokens",
        ),
    ],
)
def test_an_answer_ends_for_the_true_reason(
    asked: dict[str, Any],
    tokens: list[tuple[int, bytes]],
    text: str,
    reason: FinishReason,
    must_stop: bool,
) -> None:
    made, given_out = generation(**asked), []
    for token_id, data in tokens:
        made.accept(token_id, data)
        given_out.append(made.take())
    assert made.want is (RunSignal.STOP if must_stop else None)
    assert made.ended(context_full=False) is reason
    deltas = [delta for delta in (*given_out, made.take()) if delta is not None]
    assert "".join(delta.text for delta in deltas) == text
    assert [i for delta in deltas for i in delta.token_ids] == made.token_ids


def test_an_answer_of_no_tokens_is_complete_at_once() -> None:
    made = generation(0)
    assert made.complete
    assert made.ended(context_full=False) is FinishReason.LENGTH


@pytest.mark.parametrize("include", [False, True])
def test_an_answer_that_a_stop_id_ended_is_complete_on_another_board(include: bool) -> None:
    made = generation(stop_ids=(11,), include_stop=include)
    made.accept(10, b"a")
    made.accept(11, b"b")
    delta = made.take()
    assert delta is not None
    slots = (TranscriptToken(10, b"a"), TranscriptToken(11, b"b" if include else b""))
    before = FailoverState(slots=slots, text=delta.text)
    after = generation(stop_ids=(11,), include_stop=include, continued=before)
    assert after.complete
    assert (after.take(), after.token_ids) == (None, [10, 11])
    assert after.ended(context_full=False) is FinishReason.STOP


def test_a_run_that_ends_because_the_context_is_full_ended_by_length() -> None:
    made = generation()
    made.accept(10, b"a")
    assert made.ended(context_full=True) is FinishReason.LENGTH


def test_what_piles_up_is_taken_as_one_delta_and_only_once() -> None:
    made = generation()
    assert made.take() is None
    made.accept(10, b"a")
    made.accept(11, b"b")
    assert made.take() == Delta("ab", (10, 11), lengths=(1, 1))
    assert made.take() is None


PROMPT = (7, 8, 9)
Tokens = list[tuple[int, bytes, bool]]


def as_the_runtime_does(text: str) -> Tokens:
    """One token per byte; the text of a character comes with its last one."""
    tokens: Tokens = []
    for letter in text:
        data = letter.encode()
        tokens += [(100 + byte, b"", True) for byte in data[:-1]]
        tokens.append((100 + data[-1], data, False))
    return tokens


def as_bytes(text: str) -> Tokens:
    """One token per byte, with just that byte."""
    return [(100 + byte, bytes([byte]), False) for byte in text.encode()]


class Reader:
    """What a client has been given."""

    def __init__(self, made: Generation) -> None:
        self.made = made
        self.text = ""
        self.ids: list[int] = []

    def read(self) -> str:
        delta = self.made.take()
        if delta is not None:
            kept = len(self.text) - delta.retract
            assert kept >= 0
            self.text = self.text[:kept] + delta.text
            self.ids += delta.token_ids
        return self.text


TEXT = "a é 你 🍵 b"


@pytest.mark.parametrize("tokenize", [as_the_runtime_does, as_bytes], ids=["held", "bytes"])
@pytest.mark.parametrize("beyond", [0, 1, 3], ids="{} late tokens".format)
def test_interrupted_at_every_token_it_becomes_the_same_answer(tokenize: Any, beyond: int) -> None:
    tokens = tokenize(TEXT)
    for at in range(len(tokens) + 1):
        made = generation(max_tokens=99, stop=("never",))
        reader = Reader(made)
        for token_id, data, waiting in tokens[:at]:
            made.accept(token_id, data, waiting)
            reader.read()
        made.interrupted()
        # Whoever continues makes what follows the context; late tokens are made again as well.
        done = len(made.context) - len(PROMPT)
        assert done <= at
        assert at == len(tokens) or not tokens[at - 1][2] or done < at
        for token_id, data, waiting in tokens[done : done + beyond]:
            made.accept(token_id, data, waiting)
        made.interrupted()
        for token_id, data, waiting in tokens[len(made.context) - len(PROMPT) :]:
            made.accept(token_id, data, waiting)
            reader.read()
        assert made.ended(context_full=False) is FinishReason.STOP
        assert reader.read() == TEXT
        assert reader.ids == made.token_ids == [token_id for token_id, _, _ in tokens]


def test_an_interruption_mid_character_drops_its_beginning_from_the_context() -> None:
    made = generation()
    made.accept(10, b"a")
    made.accept(11, b"", waiting=True)
    made.accept(12, b"", waiting=True)
    assert made.take() == Delta("a", (10,))
    assert (made.tokens, made.budget) == (3, 5)
    made.interrupted()
    assert made.context[len(PROMPT) :] == (10,)
    assert made.budget == 7
    made.accept(13, "é".encode())
    assert made.take() == Delta("é", (13,))
    assert made.context[len(PROMPT) :] == (10, 13)


def test_late_tokens_before_an_interruption_say_nothing_of_the_next_run() -> None:
    request = GenerateRequest("r", "m", PROMPT, 9, pause_on_text=("b",))
    made = Generation(request, frozenset({EOS}), runtime_counts=True)
    for letter in "abc":
        made.accept(ord(letter), letter.encode())
    made.interrupted()
    made.accept(EOS, b"")
    assert (made.want, made.reason) == (None, FinishReason.STOP)


def test_tokens_that_wait_are_given_out_at_the_end() -> None:
    made = generation(max_tokens=2, runtime_counts=False)
    assert made.accept(10, b"a")
    assert made.accept(11, b"", waiting=True)  # the limit is news
    assert made.want is RunSignal.STOP
    assert made.ended(context_full=False) is FinishReason.LENGTH
    # The second one has no text of its own, and never will.
    slots = (TranscriptToken(10, b"a"), TranscriptToken(11, b"", waiting=True))
    assert made.take() == Delta("a", (10, 11), splice=Splice(0, slots))


def test_the_limit_is_the_runtimes_only_in_the_runs_that_were_given_it() -> None:
    made = generation(max_tokens=2)
    made.runtime_counts = False
    made.accept(10, b"a")
    made.accept(11, b"b")
    assert made.want is RunSignal.STOP


@pytest.mark.parametrize(
    ("tokens", "by"),
    [
        pytest.param([(10, b"a##b")], "##", id="one came"),
        pytest.param([(10, b"a#"), (11, b"#b")], "##", id="over the border of two tokens"),
        pytest.param([(10, b"a!##")], "!", id="the one that is complete first"),
        pytest.param([(10, b"a"), (EOS, b"##")], None, id="the model ended"),
        pytest.param([(10, b"a#")] * 3, None, id="the limit was reached"),
    ],
)
def test_the_stop_string_that_ended_an_answer_is_told(
    tokens: list[tuple[int, bytes]], by: str | None
) -> None:
    made = generation(max_tokens=3, stop=("##", "!"))
    for token in tokens:
        made.accept(*token)
    assert made.complete
    made.ended(context_full=False)
    assert made.stopped_by == by


def test_an_aborted_answer_takes_no_more() -> None:
    made = generation(stop=("bc",))
    made.accept(10, b"ab")
    made.aborted()
    assert made.want is RunSignal.STOP
    assert not made.accept(11, b"x")
    assert made.ended(context_full=False) is FinishReason.ABORT
    # What was held back is the answer's, and all of the token's own.
    assert made.take() == Delta("ab", (10,), splice=Splice(0, (TranscriptToken(10, b"ab"),)))


def test_an_abort_after_the_end_changes_nothing() -> None:
    made = generation()
    made.accept(EOS, b"")
    made.aborted()
    assert (made.reason, made.want) == (FinishReason.STOP, None)


def paused(text: str = "abcd", **asked: Any) -> Generation:
    """An answer of one-letter tokens that was interrupted."""
    made = generation(**{"max_tokens": 99, **asked})
    for letter in text:
        made.accept(ord(letter), letter.encode())
    made.interrupted()
    return made


def apply(made: Generation, edit: Edit, kv_positions: int = 99, context_len: int = 99) -> None:
    made.apply(edit, kv_positions=kv_positions, context_len=context_len)


A, B, C, D = map(ord, "abcd")


@pytest.mark.parametrize(
    ("edit", "text", "context", "answer"),
    [
        pytest.param(Edit(), "abcd", (*PROMPT, A, B, C, D), [A, B, C, D], id="nothing"),
        pytest.param(Edit(replace_last=3), "a", (*PROMPT, A), [A], id="taken back"),
        pytest.param(Edit(replace_last=4), "", PROMPT, [], id="all taken back"),
        pytest.param(
            Edit(ids=(40, 41), text="!?"),
            "abcd!?",
            (*PROMPT, A, B, C, D, 40, 41),
            [A, B, C, D, 40, 41],
            id="appended",
        ),
        pytest.param(
            Edit(replace_last=2, ids=(40,), text="X"),
            "abX",
            (*PROMPT, A, B, 40),
            [A, B, 40],
            id="replaced",
        ),
        pytest.param(
            Edit(ids=(40, EOS, 41), text="result", injected=True),
            "abcd",
            (*PROMPT, A, B, C, D, 40, EOS, 41),
            [A, B, C, D],
            id="injected",
        ),
        pytest.param(
            Edit(clear=((1, 4), (5, 6), (2, 2))),
            "abcd",
            (7, B, D),
            [A, B, C, D],
            id="ranges of the cache: the answer keeps its text",
        ),
        pytest.param(
            Edit(clear=((0, 3),), replace_last=1, ids=(40,), text="X"),
            "abcX",
            (A, B, C, 40),
            [A, B, C, 40],
            id="all at once",
        ),
    ],
)
def test_an_edit_changes_the_text_and_the_context(
    edit: Edit, text: str, context: tuple[int, ...], answer: list[int]
) -> None:
    made = paused()
    reader = Reader(made)
    reader.read()
    apply(made, edit)
    assert reader.read() == text == made.partial_output
    assert made.context == context
    assert made.token_ids == answer
    assert made.budget == 99 - len(answer)
    made.accept(ord("z"), b"z")
    assert reader.read() == text + "z"
    assert made.context == (*context, ord("z"))


@pytest.mark.parametrize(
    ("edit", "param", "message"),
    [
        pytest.param(Edit(clear=((0, 6),)), "clear", "which holds 5 positions", id="outside"),
        pytest.param(Edit(clear=((3, 2),)), "clear", r"\[3, 2\)", id="end before start"),
        pytest.param(Edit(clear=((-1, 2),)), "clear", r"\[-1, 2\)", id="before the beginning"),
        pytest.param(Edit(clear=((0, 3), (2, 4))), "clear", "overlap", id="overlapping"),
        pytest.param(Edit(clear=((2, 4), (2, 4))), "clear", "overlap", id="twice the same"),
        pytest.param(Edit(replace_last=5), "replace_last", "4 is what it holds", id="too many"),
        pytest.param(Edit(replace_last=-1), "replace_last", "-1 tokens", id="negative"),
        pytest.param(Edit(ids=(5, 1000), text="x"), "ids", "id 1000 is not in", id="vocabulary"),
        pytest.param(Edit(ids=(-5,), text="x"), "ids", "id -5 is not in", id="no id at all"),
        pytest.param(Edit(text="x"), "text", "needs its token ids", id="text without ids"),
        pytest.param(Edit(ids=(5,), text="\ud800"), "text", "valid Unicode", id="half a pair"),
        pytest.param(
            Edit(replace_last=4, clear=((0, 3),)), "clear", "leave nothing", id="nothing left"
        ),
        pytest.param(
            Edit(ids=tuple(range(10, 20)), text="x" * 10), "ids", "16 tokens", id="no room left"
        ),
    ],
)
def test_an_edit_that_cannot_be_made_changes_nothing(edit: Edit, param: str, message: str) -> None:
    request = GenerateRequest("r", "m", (7, 8), 99)
    made = Generation(request, frozenset({EOS}), runtime_counts=True, vocab_size=1000)
    for letter in "abcd":
        made.accept(ord(letter), letter.encode())
    made.interrupted()
    before = (made.context, made.partial_output, made.tokens, made.cuts)
    with pytest.raises(RkserveError, match=message) as refused:
        apply(made, edit, kv_positions=5, context_len=16)
    assert isinstance(refused.value, RequestError)
    assert (refused.value.http_status, refused.value.param) == (400, param)
    assert (made.context, made.partial_output, made.tokens, made.cuts) == before
    made.accept(ord("e"), b"e")
    assert Reader(made).read() == "abcde"


def test_an_edit_may_leave_room_for_exactly_one_token() -> None:
    made = paused()
    apply(made, Edit(ids=(40, 41), text="xy"), context_len=10)
    with pytest.raises(ContextOverflow):
        apply(made, Edit(ids=(42,), text="z"), context_len=10)


@pytest.mark.parametrize("counts", [True, False], ids=["1.3.0", "1.2.3"])
def test_an_answer_ends_where_the_context_is_full_whatever_was_asked_for(counts: bool) -> None:
    request = GenerateRequest("r", "m", (7, 8, 9), 7)
    made = Generation(request, frozenset({EOS}), runtime_counts=counts, context_len=10)
    assert made.budget == 7
    made.accept(10, b"a")
    made.interrupted()
    made.apply(Edit(ids=(40, 41, 42), injected=True), kv_positions=4, context_len=10)
    assert (made.budget, made.complete) == (3, False)
    for token_id in (11, 12):
        made.accept(token_id, b"b")
        assert made.want is None
    made.accept(13, b"c")
    assert made.want is (None if counts else RunSignal.STOP)
    assert made.ended(context_full=False) is FinishReason.LENGTH
    assert (made.tokens, len(made.context)) == (4, 10)


def test_an_interruption_at_the_brim_of_a_context_in_text_mode_is_the_end() -> None:
    request = GenerateRequest("r", "m", (), 10, prompt_text="Hi there")
    made = Generation(request, frozenset({EOS}), runtime_counts=True, context_len=10)
    made.accept(10, b"a")
    made.interrupted(prompt_tokens=8)
    assert (made.budget, made.complete) == (1, False)
    made.accept(11, b"b")
    assert made.ended(context_full=False) is FinishReason.LENGTH


def test_without_a_vocabulary_only_impossible_ids_are_refused() -> None:
    made = paused()
    apply(made, Edit(ids=(10**6,), text="x"))
    with pytest.raises(RequestError, match="-1 is not in the vocabulary"):
        apply(made, Edit(ids=(-1,), text="x"))


def test_a_generation_without_a_tokenizer_cannot_be_edited() -> None:
    request = GenerateRequest("r", "m", (), 9, prompt_text="Hi")
    made = Generation(request, frozenset(), runtime_counts=True)
    made.interrupted()
    with pytest.raises(RequestError, match="without a tokenizer"):
        apply(made, Edit(replace_last=0))


def test_what_was_injected_and_what_is_before_it_stays() -> None:
    made = paused()
    apply(made, Edit(ids=(40, 41), text="result", injected=True))
    with pytest.raises(RequestError, match="0 is what it holds since what was injected last"):
        apply(made, Edit(replace_last=1))
    made.accept(ord("e"), b"e")
    made.interrupted()
    apply(made, Edit(replace_last=1))
    assert made.context == (*PROMPT, A, B, C, D, 40, 41)


def test_words_that_were_put_in_as_one_are_taken_back_as_one() -> None:
    made = paused()
    apply(made, Edit(ids=(40, 41, 42), text="own"))
    for count in (1, 2):
        with pytest.raises(RequestError, match="cut words in two"):
            apply(made, Edit(replace_last=count))
    apply(made, Edit(replace_last=4))
    assert made.partial_output == "abc"


def test_taking_back_the_end_of_a_character_takes_back_all_of_it() -> None:
    made = generation(max_tokens=99)
    for token_id, data, waiting in as_the_runtime_does("a你"):
        made.accept(token_id, data, waiting)
    made.interrupted()
    apply(made, Edit(replace_last=1))
    assert made.context == (*PROMPT, 100 + ord("a"))
    assert made.partial_output == "a"


def test_half_a_character_before_words_of_an_edit_is_no_text() -> None:
    made = generation(max_tokens=99)
    made.accept(10, b"a\xe4\xbd")
    made.interrupted()
    apply(made, Edit(ids=(40,), text="é"))
    made.accept(11, b"b")
    assert made.partial_output == "aéb"


def test_what_was_cleared_is_said_in_an_order_in_which_it_can_be_done() -> None:
    made = paused("abcdef")
    apply(made, Edit(clear=((1, 2), (5, 7))), kv_positions=8)
    apply(made, Edit(clear=((0, 1), (3, 4))), kv_positions=5)
    held = [*PROMPT, *map(ord, "abcdef")]
    for start, end in made.cuts:
        del held[start:end]
    assert tuple(held) == made.context
    with pytest.raises(RequestError, match="holds 4 positions"):
        apply(made, Edit(clear=((0, 5),)), kv_positions=4)
    made.interrupted()
    assert made.cuts == ()


def test_text_that_was_given_out_and_then_taken_back_is_retracted_once() -> None:
    made = paused("abcd")
    assert made.take() == Delta("abcd", (A, B, C, D), lengths=(1, 1, 1, 1))
    apply(made, Edit(replace_last=2, ids=(40,), text="cX"))
    apply(made, Edit(replace_last=1, ids=(41,), text="ce"))
    put_in = TranscriptToken(41, b"ce", TokenOrigin.APPENDED)
    assert made.take() == Delta("e", (41,), retract=1, splice=Splice(2, (put_in,)))
    assert made.take() is None
    apply(made, Edit(replace_last=1))
    assert made.take() == Delta("", (), retract=2, splice=Splice(2, ()))


def test_nothing_is_retracted_of_what_nobody_has_read() -> None:
    made = paused("abcd")
    apply(made, Edit(replace_last=2, ids=(40,), text="X"))
    slots = (
        TranscriptToken(A, b"a"),
        TranscriptToken(B, b"b"),
        TranscriptToken(40, b"X", TokenOrigin.APPENDED),
    )
    assert made.take() == Delta("abX", (A, B, 40), splice=Splice(0, slots))


def test_a_stop_string_is_found_across_the_border_of_an_edit_and_can_be_taken_back() -> None:
    made = paused("ab EN", stop=("END",))
    reader = Reader(made)
    assert reader.read() == "ab "
    apply(made, Edit(ids=(40,), text="D and more"))
    assert made.reason is FinishReason.STOP
    assert made.complete
    assert made.stopped_by == "END"
    assert reader.read() == "ab "
    apply(made, Edit(replace_last=1))
    assert not made.complete
    assert made.stopped_by is None
    made.accept(ord("x"), b"x")
    assert made.want is None
    assert reader.read() == "ab ENx"


def test_an_edit_may_reach_the_limit_and_another_reopen_the_answer() -> None:
    made = paused("ab", max_tokens=4)
    apply(made, Edit(ids=(40, 41, 42), text="cde"))
    assert (made.reason, made.budget) == (FinishReason.LENGTH, 0)
    apply(made, Edit(replace_last=4))
    assert (made.reason, made.budget) == (None, 3)
    assert made.ended(context_full=False) is FinishReason.STOP
    assert Reader(made).read() == "a"


def test_errors_of_an_edit_survive_pickle() -> None:
    with pytest.raises(RequestError) as refused:
        apply(paused(), Edit(replace_last=9))
    assert pickle.loads(pickle.dumps(refused.value)).message == refused.value.message


# -- against a model that is too simple to be wrong -------------------------------------------


@dataclass
class Part:
    """One token, or words that were put in as one."""

    kind: str
    ids: tuple[int, ...]
    data: bytes
    waiting: bool = False


@dataclass
class Model:
    """What an answer with stop strings and edits has to be, computed from scratch each time."""

    stop: tuple[str, ...]
    limit: int
    parts: list[Part] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts if part.kind != "injected")

    @property
    def context(self) -> tuple[int, ...]:
        return (*PROMPT, *(token_id for part in self.parts for token_id in part.ids))

    @property
    def raw(self) -> str:
        text, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
        for part in self.parts:
            if part.kind != "generated":
                decoder.reset()
            if part.kind != "injected":
                text += decoder.decode(part.data)
        return text

    @property
    def stopped(self) -> bool:
        return any(stop in self.raw for stop in self.stop)

    @property
    def complete(self) -> bool:
        return self.stopped or self.tokens >= self.limit

    def text(self, *, ended: bool) -> str:
        raw = self.raw
        ends = [(raw.find(s) + len(s), raw.find(s)) for s in self.stop if s in raw]
        if ends:
            return raw[: min(ends)[1]]
        beginnings = {stop[:size] for stop in self.stop for size in range(1, len(stop))}
        held = max((len(b) for b in beginnings if raw.endswith(b)), default=0)
        return raw if ended else raw[: len(raw) - held]

    def drop_unfinished(self) -> None:
        while self.parts and self.parts[-1].waiting:
            self.parts.pop()

    def take_back(self, count: int) -> bool:
        parts = list(self.parts)
        while count > 0:
            if not parts or parts[-1].kind == "injected" or len(parts[-1].ids) > count:
                return False
            count -= len(parts.pop().ids)
        if count == 0:
            self.parts = parts
        return count == 0


letter = st.sampled_from("abEND é你")
token = st.builds(lambda c: ("token", as_the_runtime_does(c)), letter)
half = st.builds(lambda c: ("token", as_the_runtime_does(c)[:1]), letter)
byte = st.builds(lambda c, size: ("token", as_bytes(c)[:size]), letter, st.integers(1, 3))
edit = st.builds(
    lambda back, text, injected: (
        "edit",
        Edit(back, tuple(range(50, 50 + len(text))), text, injected),
    ),
    st.integers(0, 4),
    st.text("abEND é", max_size=4),
    st.booleans(),
)
STEPS = st.lists(
    st.one_of(token, token, token, half, byte, edit, edit, st.just(("take", None))), max_size=40
)


def step(made: Generation, model: Model, kind: str, what: Any) -> None:
    """Do one thing to both."""
    if kind == "token":
        for token_id, data, waiting in what:
            if not model.complete:
                model.parts.append(Part("generated", (token_id,), data, waiting))
            made.accept(token_id, data, waiting)
        return
    made.interrupted()
    if not model.complete:
        model.drop_unfinished()
    assert made.context == model.context
    if not model.take_back(what.replace_last):
        with pytest.raises(RequestError):
            apply(made, what, context_len=10**6)
        return
    model.drop_unfinished()
    if what.ids:
        kind = "injected" if what.injected else "appended"
        model.parts.append(Part(kind, what.ids, what.text.encode()))
    apply(made, what, context_len=10**6)


@given(
    steps=STEPS,
    stop=st.lists(st.sampled_from(["END", "ab", "é", "b E"]), max_size=2).map(tuple),
    limit=st.integers(1, 40),
)
def test_any_history_gives_the_text_of_its_transcript(
    steps: list[tuple[str, Any]], stop: tuple[str, ...], limit: int
) -> None:
    made, model = generation(limit, stop, runtime_counts=False), Model(stop, limit)
    reader = Reader(made)
    for kind, what in steps:
        if kind == "take":
            assert reader.read() == model.text(ended=False)
        else:
            step(made, model, kind, what)
        assert made.partial_output == model.text(ended=False)
        assert (made.tokens, made.complete) == (model.tokens, model.complete)
        assert made.context == model.context
    made.ended(context_full=False)
    assert reader.read() == model.text(ended=True)
    assert made.reason is (
        FinishReason.STOP if model.stopped or not model.complete else FinishReason.LENGTH
    )
