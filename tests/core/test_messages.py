"""Values between Router and board: names of versions, deltas, and the state of a failover."""

from __future__ import annotations

import pytest

from rkserve.core.messages import (
    AdapterRef,
    Bound,
    Delta,
    FailoverState,
    Splice,
    TokenOrigin,
    TranscriptToken,
    merged,
)
from rkserve.core.run_params import Scored


def test_two_contents_or_scales_of_a_version_have_two_keys() -> None:
    ref = AdapterRef("law", "v1", "a" * 64)
    assert (ref.label, ref.key) == ("law@v1", f"law@v1-{'a' * 12}-1")
    others = (AdapterRef("law", "v1", "b" * 64), AdapterRef("law", "v1", "a" * 64, 0.5))
    assert len({ref.key, *(one.key for one in others)}) == 3


def test_an_answer_s_tokens_are_those_that_are_not_injected() -> None:
    kinds = (TokenOrigin.GENERATED, TokenOrigin.INJECTED, TokenOrigin.APPENDED)
    slots = tuple(TranscriptToken(n, b"x", kind) for n, kind in enumerate(kinds))
    assert FailoverState(slots).tokens == 2


@pytest.mark.parametrize("kind", TokenOrigin)
def test_only_the_model_leaves_a_character_unfinished(kind: TokenOrigin) -> None:
    assert TranscriptToken(1, b"\xc3", kind, waiting=True).unfinished is (
        kind is TokenOrigin.GENERATED
    )
    assert not TranscriptToken(1, b"a", kind).unfinished


@pytest.mark.parametrize(
    ("delta", "parts"),
    [
        (Delta("", ()), ()),
        (Delta("abc", (1,)), (3,)),
        (Delta("abc", (1, 2)), (3, 0)),
        (Delta("abc", (1, 2), lengths=(1, 2)), (1, 2)),
    ],
)
def test_each_id_has_its_part_of_the_text(delta: Delta, parts: tuple[int, ...]) -> None:
    assert delta.parts == parts


def test_plain_deltas_are_merged_with_their_parts() -> None:
    score = Scored(-0.5)
    both = merged(Delta("ab", (1,), logprobs=(score,)), Delta("c", (2,), logprobs=(None,)))
    assert both == Delta("abc", (1, 2), lengths=(2, 1), logprobs=(score, None))
    assert merged(Delta("", ()), Delta("c", (2,))) == Delta("c", (2,))


@pytest.mark.parametrize(
    "other",
    [
        Delta("a", (1,), retract=1),
        Delta("a", (1,), splice=Splice(0, ())),
        Delta("a", (1,), bound=Bound()),
        Delta("a", (1,), paused=True),
        Delta("a", (1,), prompt=(Scored(-1.0),)),
        Delta("a", ()),
    ],
)
def test_a_delta_that_says_more_is_not_merged(other: Delta) -> None:
    assert merged(Delta("b", (2,)), other) is None
    assert merged(other, Delta("b", (2,))) is None
