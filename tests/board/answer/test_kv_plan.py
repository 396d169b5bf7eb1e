"""What a new request can reuse of the live context, and when it must not be trusted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.answer.kv_plan import (
    CachedContext,
    Ids,
    PrefillPlan,
    Range,
    ResumePlan,
    common_prefix,
    held,
    plan_resume,
)

TURN_1 = (1, 2, 3)
ANSWER = (10, 11, 12)
TURN_2 = (*TURN_1, *ANSWER, 4, 5)


def after_turn_1(*, append: bool = True, positions: int = 6) -> CachedContext:
    context = CachedContext(append=append)
    assert context.plan(TURN_1) == PrefillPlan(clear=False, send=TURN_1, reused=0)
    context.forget()
    context.settle((*TURN_1, *ANSWER), positions)
    return context


@pytest.mark.parametrize(
    ("positions", "prompt", "plan"),
    [
        pytest.param(6, TURN_2, PrefillPlan(False, (4, 5), 6), id="the conversation goes on"),
        pytest.param(
            5, TURN_2, PrefillPlan(False, (12, 4, 5), 5), id="the last token is not in the KV"
        ),
        pytest.param(
            6, (9, *TURN_2), PrefillPlan(True, (9, *TURN_2), 0), id="another conversation"
        ),
        pytest.param(
            6, TURN_2[:6], PrefillPlan(True, TURN_2[:6], 0), id="the same ids: one must be sent"
        ),
        pytest.param(
            6, TURN_1, PrefillPlan(True, TURN_1, 0), id="a shorter prompt: no cutting back"
        ),
        pytest.param(
            6,
            (*TURN_1, 10, 99, 12, 4),
            PrefillPlan(True, (*TURN_1, 10, 99, 12, 4), 0),
            id="an edit",
        ),
    ],
)
def test_a_request_reuses_the_whole_live_context_or_nothing(
    positions: int, prompt: tuple[int, ...], plan: PrefillPlan
) -> None:
    assert after_turn_1(positions=positions).plan(prompt) == plan


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
    assert context.plan(TURN_2) == PrefillPlan(clear=True, send=TURN_2, reused=0)


def test_a_forgotten_context_is_cleared_before_the_next_run() -> None:
    context = after_turn_1()
    assert context.positions == 6
    context.forget()
    assert context.positions == 0
    assert context.plan(TURN_2) == PrefillPlan(clear=True, send=TURN_2, reused=0)


def test_a_runtime_that_cannot_append_gets_the_whole_prompt() -> None:
    assert after_turn_1(append=False).plan(TURN_2) == PrefillPlan(clear=True, send=TURN_2, reused=0)


def test_an_empty_context_needs_no_clear() -> None:
    context = after_turn_1()
    context.reset()
    assert context.plan(TURN_2) == PrefillPlan(clear=False, send=TURN_2, reused=0)


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
    assert context.plan(TURN_2, adapter) == PrefillPlan(clear=False, send=(4, 5), reused=6)


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
    assert after_a_run_with(before).plan(TURN_2, now) == PrefillPlan(
        clear=True, send=TURN_2, reused=0
    )


def test_an_empty_context_belongs_to_no_adapter() -> None:
    context = after_a_run_with("legal@2-abc-1")
    context.reset()
    assert context.origin is None
    assert context.plan(TURN_1) == PrefillPlan(clear=False, send=TURN_1, reused=0)


# -- clears by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "plan"),
    [
        pytest.param(0, PrefillPlan(clear=False, send=TURN_2, reused=0), id="all of it"),
        pytest.param(
            2, PrefillPlan(clear=False, send=TURN_2[2:], reused=2), id="but a system prompt"
        ),
        pytest.param(
            6, PrefillPlan(clear=False, send=TURN_2[6:], reused=6), id="nothing after all"
        ),
        pytest.param(7, PrefillPlan(clear=True, send=TURN_2, reused=0), id="more than there was"),
        pytest.param(-1, PrefillPlan(clear=True, send=TURN_2, reused=0), id="unknown"),
    ],
)
def test_what_a_clear_by_hand_leaves_is_reused(kept: int, plan: PrefillPlan) -> None:
    context = after_turn_1()
    context.cleared(kept)
    assert context.plan(TURN_2) == plan


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
