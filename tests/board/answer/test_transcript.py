"""The transcript of one generation: clears, splices, and the deltas that another board reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.answer.transcript import (
    CachedContext,
    Ids,
    PendingDelta,
    Range,
    ResumePlan,
    Transcript,
    Utf8Decoder,
    held,
    ordered,
    plan_resume,
)
from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import RequestError
from rkserve.core.messages import Splice, TokenOrigin, TranscriptToken

TURN_1 = (1, 2, 3)
ANSWER = (10, 11, 12)
TURN_2 = (*TURN_1, *ANSWER, 4, 5)


def after_turn_1(*, append: bool = True, positions: int = 6) -> CachedContext:
    context = CachedContext(append=append)
    assert context.reusable(TURN_1) == 0
    context.forget()
    context.settle((*TURN_1, *ANSWER), positions)
    return context


@pytest.mark.parametrize(
    ("positions", "prompt", "reused"),
    [
        pytest.param(6, TURN_2, 6, id="the conversation goes on"),
        pytest.param(5, TURN_2, 5, id="the last token is not in the KV"),
        pytest.param(6, (9, *TURN_2), 0, id="another conversation"),
        pytest.param(6, TURN_2[:6], 0, id="the same ids: one must be sent"),
        pytest.param(6, TURN_1, 0, id="a shorter prompt: no cutting back"),
        pytest.param(
            6,
            (*TURN_1, 10, 99, 12, 4),
            0,
            id="an edit",
        ),
    ],
)
def test_a_request_reuses_the_whole_live_context_or_nothing(
    positions: int, prompt: tuple[int, ...], reused: int
) -> None:
    assert after_turn_1(positions=positions).reusable(prompt) == reused


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(7, id="more than was ever sent"),
        pytest.param(4, id="only the last input: the runtime did not append"),
        pytest.param(0, id="nothing"),
        pytest.param(-1, id="unknown"),
    ],
)
def test_a_size_that_cannot_be_true_is_reported_and_the_context_forgotten(positions: int) -> None:
    context = CachedContext(append=True)
    assert not context.settle((*TURN_1, *ANSWER), positions)
    assert context.positions == 0
    assert context.reusable(TURN_2) == 0


def test_a_forgotten_context_is_cleared_before_the_next_run() -> None:
    context = after_turn_1()
    assert context.positions == 6
    context.forget()
    assert context.positions == 0
    assert context.reusable(TURN_2) == 0


def test_a_runtime_that_cannot_append_gets_the_whole_prompt() -> None:
    assert after_turn_1(append=False).reusable(TURN_2) == 0


@pytest.mark.parametrize(
    ("prompt", "reused"),
    [
        pytest.param(TURN_2, 6, id="the conversation goes on"),
        pytest.param((*TURN_1, *ANSWER), 6, id="the same ids"),
        pytest.param(TURN_1, 3, id="a shorter prompt"),
        pytest.param((*TURN_1, 10, 99, 12, 4), 4, id="an edit"),
        pytest.param((9, *TURN_2), 0, id="another conversation"),
    ],
)
def test_a_runtime_that_reuses_prefixes_computes_what_differs(
    prompt: tuple[int, ...], reused: int
) -> None:
    context = CachedContext(append=True, prefix=True)
    assert context.reusable(prompt, history=False) == 0
    context.keep((*TURN_1, *ANSWER), "kind")
    assert context.reusable(prompt, "kind", history=False) == reused
    assert context.reusable(prompt, history=False) == 0, "another origin"
    assert context.reusable(prompt, "kind") == 0, "nothing is appended to a single turn"
    context.settle((*TURN_1, *ANSWER), 6, "kind")
    assert context.reusable(prompt, "kind", history=False) == 0, "nor a single turn to these"
    context.forget()
    assert context.reusable(prompt, history=False) == 0


def test_an_empty_context_needs_no_clear() -> None:
    context = after_turn_1()
    context.reset()
    assert context.reusable(TURN_2) == 0


# -- adapters -------------------------------------------------------------------------------------


def after_a_run_with(adapter: str | None) -> CachedContext:
    context = CachedContext(append=True)
    context.forget()
    assert context.settle((*TURN_1, *ANSWER), 6, adapter)
    return context


@pytest.mark.parametrize("adapter", [None, "legal@2-abc-1"], ids=["the base model", "an adapter"])
def test_a_context_is_extended_under_the_adapter_that_computed_it(adapter: str | None) -> None:
    context = after_a_run_with(adapter)
    assert context.origin == adapter
    assert context.reusable(TURN_2, adapter) == 6


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(None, "legal@2-abc-1", id="from the base model to an adapter"),
        pytest.param("legal@2-abc-1", None, id="from an adapter to the base model"),
        pytest.param("legal@2-abc-1", "legal@2-abc-0.5", id="the same adapter at another scale"),
    ],
)
def test_another_adapter_clears_a_context_of_the_same_ids(
    before: str | None, now: str | None
) -> None:
    assert after_a_run_with(before).reusable(TURN_2, now) == 0


def test_an_empty_context_belongs_to_no_adapter() -> None:
    context = after_a_run_with("legal@2-abc-1")
    context.reset()
    assert context.origin is None
    assert context.reusable(TURN_1) == 0


# -- clears by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "reused"),
    [
        pytest.param(0, 0, id="all of it"),
        pytest.param(2, 2, id="but a system prompt"),
        pytest.param(6, 6, id="nothing after all"),
        pytest.param(7, 0, id="more than there was"),
        pytest.param(-1, 0, id="unknown"),
    ],
)
def test_what_a_clear_by_hand_leaves_is_reused(kept: int, reused: int) -> None:
    context = after_turn_1()
    context.cleared(kept)
    assert context.reusable(TURN_2) == reused


def test_what_is_spared_of_an_unknown_context_stays_unknown() -> None:
    context = after_turn_1()
    context.forget()
    context.cleared(2)
    assert context.ids is None
    context.cleared(0)
    assert context.ids == ()


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "kept"),
    [
        pytest.param(3, TURN_1, id="all of it"),
        pytest.param(2, TURN_1[:2], id="without the last token"),
        pytest.param(1, None, id="less"),
        pytest.param(4, None, id="more"),
        pytest.param(-1, None, id="unknown"),
    ],
)
def test_what_is_held_is_the_transcript_but_perhaps_its_last_token(
    positions: int, kept: Ids | None
) -> None:
    assert held(TURN_1, positions) == kept


def test_an_empty_transcript_holds_nothing_and_never_less() -> None:
    assert held((), 0) == ()
    assert held((), -1) is None


HELD = (1, 2, 3, 10, 11)


@pytest.mark.parametrize(
    ("wanted", "cuts", "resume"),
    [
        pytest.param((*HELD, 12), (), ResumePlan((), (12,)), id="as it was paused"),
        pytest.param(
            HELD, (), ResumePlan(((4, 5),), (11,)), id="the last token was in: sent again"
        ),
        pytest.param(
            (1, 2, 3, 10, 7, 8), (), ResumePlan(((4, 5),), (7, 8)), id="the tail replaced"
        ),
        pytest.param((1, 2, 3), (), ResumePlan(((2, 5),), (3,)), id="the whole answer taken back"),
        pytest.param((*HELD, 12, 9), (), ResumePlan((), (12, 9)), id="text appended"),
        pytest.param((1, 10, 11, 12), ((1, 3),), ResumePlan(((1, 3),), (12,)), id="a range cut"),
        pytest.param(
            (1, 10, 7), ((1, 3),), ResumePlan(((1, 3), (2, 3)), (7,)), id="a range and the tail"
        ),
        pytest.param(
            (1, 3, 11, 12), ((3, 4), (1, 2)), ResumePlan(((3, 4), (1, 2)), (12,)), id="two ranges"
        ),
        pytest.param((*HELD, 12), ((2, 2),), ResumePlan((), (12,)), id="an empty range"),
        pytest.param((12,), ((0, 5),), None, id="everything cut"),
        pytest.param((9, 2, 3), (), None, id="nothing in common"),
        pytest.param((1,), (), None, id="a single id: it has to be sent"),
        pytest.param((1, 2, 12), ((2, 6),), None, id="a cut that is not held"),
    ],
)
def test_a_paused_run_goes_on_from_a_prefix_of_what_is_wanted(
    wanted: Ids, cuts: tuple[Range, ...], resume: ResumePlan | None
) -> None:
    assert plan_resume(HELD, wanted, cuts) == resume


def test_a_paused_run_of_unknown_content_is_recomputed() -> None:
    assert plan_resume(None, (1, 2, 3)) is None


def apply(kept: Ids, resume: ResumePlan) -> Ids:
    """Do to a KV cache what the runtime does."""
    for start, end in resume.cut:
        assert 0 <= start < end <= len(kept)
        kept = kept[:start] + kept[end:]
        assert kept, "a range clear of everything"
    return kept + resume.send


few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


@given(kept=few_ids, wanted=few_ids, data=st.data())
def test_resuming_makes_the_cache_hold_exactly_what_is_wanted(
    kept: Ids, wanted: Ids, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(kept)))
    end = data.draw(st.integers(start, len(kept)))
    resume = plan_resume(kept, wanted, ((start, end),))
    left = kept[:start] + kept[end:]
    if resume is None:
        assert common_prefix(left, wanted) == 0 or len(wanted) == 1
    else:
        assert resume.send
        assert apply(kept, resume) == wanted


@given(one=few_ids, other=few_ids)
def test_the_common_prefix_is_what_a_loop_would_find(one: Ids, other: Ids) -> None:
    counted = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        counted += 1
    assert common_prefix(one, other) == counted


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
