"""One generation as bookkeeping: what is given out, when it must stop, why it ended."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.board.generation import Generation
from rkserve.messages import Delta, FinishReason, GenerateRequest

EOS = 2


def generation(
    max_tokens: int = 8, stop: tuple[str, ...] = (), *, runtime_counts: bool = True
) -> Generation:
    request = GenerateRequest("r", "m", (7, 8, 9), max_tokens, stop=stop)
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
    assert made.must_stop is must_stop
    assert made.ended(context_full=False) is reason
    deltas = [delta for delta in (*given_out, made.take()) if delta is not None]
    assert "".join(delta.text for delta in deltas) == text
    assert [i for delta in deltas for i in delta.token_ids] == made.token_ids
    assert made.transcript == (7, 8, 9, *(token_id for token_id, _ in tokens))


def test_a_run_that_ends_because_the_context_is_full_ended_by_length() -> None:
    made = generation()
    made.accept(10, b"a")
    assert made.ended(context_full=True) is FinishReason.LENGTH


def test_what_piles_up_is_taken_as_one_delta_and_only_once() -> None:
    made = generation()
    assert made.take() is None
    made.accept(10, b"a")
    made.accept(11, b"b")
    assert made.take() == Delta("ab", (10, 11))
    assert made.take() is None
