"""The transcript of one generation: clears, splices, and the deltas that another board reads."""

from __future__ import annotations

import pytest

from rkserve.board.answer.transcript import PendingDelta, Transcript, Utf8Decoder, ordered
from rkserve.core.errors import RequestError
from rkserve.core.messages import Splice, TokenOrigin, TranscriptToken

PROMPT = (1, 2, 3)
SLOTS = tuple(TranscriptToken(token_id, b"x") for token_id in (11, 12, 13))
HALF_A_CHARACTER = TranscriptToken(14, b"\xf0\x9f", waiting=True)


def injected(token_id: int) -> TranscriptToken:
    return TranscriptToken(token_id, b"y", TokenOrigin.INJECTED)


def test_the_context_is_the_prompt_and_the_slots_that_were_not_cleared() -> None:
    made = Transcript(PROMPT, (*SLOTS, injected(21)))
    assert made.context == (1, 2, 3, 11, 12, 13, 21)
    assert made.answer == [11, 12, 13]  # the injected one is context and no answer
    cleared = made.cleared([(1, 2), (3, 5)], held=6)
    assert (cleared.prompt, cleared.context) == ((1, 3), (1, 3, 13, 21))
    assert cleared.answer == made.answer  # the text of a cleared token stays
    assert made.context == (1, 2, 3, 11, 12, 13, 21)  # the original is unchanged


def test_a_second_clear_counts_positions_without_the_cleared_ones() -> None:
    once = Transcript(PROMPT, SLOTS).cleared([(3, 4)], held=6)
    assert once.context == (1, 2, 3, 12, 13)
    assert once.cleared([(3, 4)], held=5).context == (1, 2, 3, 13)


def test_an_unfinished_character_is_dropped_with_the_number_of_its_tokens() -> None:
    made = Transcript(PROMPT, (*SLOTS, HALF_A_CHARACTER, HALF_A_CHARACTER))
    assert made.drop_unfinished() == 2
    assert made.context == (1, 2, 3, 11, 12, 13)
    assert made.drop_unfinished() == 0


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([(0, 2), (4, 6)], [(4, 6), (0, 2)], id="the last one first"),
        pytest.param([(2, 2), (0, 1)], [(0, 1)], id="an empty one is left out"),
        pytest.param([(0, 2), (2, 4)], [(2, 4), (0, 2)], id="adjacent ones do not overlap"),
    ],
)
def test_ranges_are_ordered_so_that_each_can_be_cleared_alone(
    ranges: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert ordered(ranges, 6) == expected


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        pytest.param([(0, 7)], "holds 6 positions", id="beyond the cache"),
        pytest.param([(-1, 2)], "holds 6 positions", id="before the cache"),
        pytest.param([(3, 2)], "holds 6 positions", id="reversed"),
        pytest.param([(0, 3), (2, 4)], "overlap", id="overlapping"),
    ],
)
def test_a_range_that_cannot_be_cleared_is_refused(
    ranges: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ordered(ranges, 6)
    assert caught.value.param == "clear"


@pytest.mark.parametrize(
    ("take_back", "after"),
    [
        pytest.param(0, (11, 12, 13, 7), id="appended"),
        pytest.param(2, (11, 7), id="in place of the last two"),
        pytest.param(3, (7,), id="in place of all"),
    ],
)
def test_a_splice_replaces_the_last_tokens_of_the_answer(
    take_back: int, after: tuple[int, ...]
) -> None:
    made = Transcript(PROMPT, SLOTS)
    spliced = made.spliced(take_back, (7,), "seven", TokenOrigin.APPENDED)
    assert spliced.context == (*PROMPT, *after)
    assert made.context == (*PROMPT, 11, 12, 13)


def test_a_splice_does_not_reach_behind_what_was_injected() -> None:
    made = Transcript(PROMPT, (*SLOTS, injected(21), SLOTS[0]))
    assert made.spliced(1, (7,), "s", TokenOrigin.APPENDED).context[-2:] == (21, 7)
    with pytest.raises(RequestError, match="1 is what it holds since what was injected") as caught:
        made.spliced(2, (7,), "s", TokenOrigin.APPENDED)
    assert caught.value.param == "replace_last"


def test_a_decoder_keeps_an_incomplete_character_back() -> None:
    decoder = Utf8Decoder()
    assert (decoder.feed("é".encode()[:1]), decoder.whole) == ("", False)
    assert (decoder.feed("é".encode()[1:]), decoder.whole) == ("é", True)
    decoder.feed(b"\xf0\x9f")
    decoder.drop()
    assert (decoder.feed(b"a"), decoder.whole) == ("a", True)


def test_a_delta_has_ids_with_their_text_and_is_taken_once() -> None:
    made, pending = Transcript(PROMPT), PendingDelta(PROMPT)
    assert pending.take(made, []) is None
    for slot in SLOTS[:2]:
        made.slots.append(slot)
        pending.certain, pending.ids = len(made.slots), len(made.slots)
        pending.add(1, "x", "x")
    delta = pending.take(made, [11, 12])
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.lengths) == ("xx", (11, 12), (1, 1))
    assert delta.splice is None
    assert pending.take(made, [11, 12]) is None


def test_a_rewritten_answer_is_retracted_and_carries_the_splice_for_another_board() -> None:
    made, pending = Transcript(PROMPT, SLOTS), PendingDelta(PROMPT, SLOTS, 3, "xxx")
    edited = made.spliced(2, (7,), "seven", TokenOrigin.APPENDED)
    pending.rewrite(same_ids=1, same_slots=1)
    pending.show("xseven")
    pending.certain, pending.ids = 2, 2
    delta = pending.take(edited, [11, 7])
    assert delta is not None
    assert (delta.text, delta.retract, delta.token_ids) == ("seven", 2, (7,))
    assert delta.splice == Splice(1, tuple(edited.slots[1:]), None)
