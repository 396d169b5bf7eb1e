"""Usage, timings and fingerprints of answers."""

from __future__ import annotations

from typing import Any

from rkserve.api.common.answer import AnswerOrigin, fingerprint
from rkserve.api.common.calls import ChatCall, CompletionCall
from rkserve.api.openai.answers import ChatAnswer, CompletionAnswer
from rkserve.core.messages import (
    Finished,
    FinishReason,
    Timings,
    Usage,
)

MESSAGES = ({"role": "user", "content": "Hi"},)


STAMP = AnswerOrigin("tiny", "1.3.0")


TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0)


def finished(
    prompt: int = 6, completion: int = 2, cached: int = 2, reason: FinishReason = FinishReason.STOP
) -> Finished:
    return Finished(reason, Usage(prompt, completion, cached), TIMINGS)


def chat_answer(**keys: Any) -> ChatAnswer:
    return ChatAnswer(
        ChatCall("tiny", None, messages=MESSAGES, **keys), "chatcmpl-abc", 1700000000, STAMP
    )


def completion_answer(prompts: int = 1, **keys: Any) -> CompletionAnswer:
    call = CompletionCall("tiny", 16, prompts=("Hi",) * prompts, **keys)
    return CompletionAnswer(call, "cmpl-abc", 1700000000, STAMP)


def test_a_prompt_and_its_cached_tokens_count_once_for_all_its_choices() -> None:
    answer = completion_answer(prompts=2, n=2)
    for i, (prompt, completion, cached) in enumerate(
        [(10, 1, 4), (10, 2, 10), (20, 3, 8), (20, 4, 0)]
    ):
        answer.end(i, finished(prompt, completion, cached))
    assert answer.usage() == {
        "prompt_tokens": 30,
        "completion_tokens": 10,
        "total_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_timings_add_up_over_choices() -> None:
    answer = chat_answer(n=2)
    for i in range(2):
        answer.end(i, finished())
    assert answer.whole()["timings"] == {
        "queue_ms": 2.0,
        "prefill_ms": 40.0,
        "prefill_tokens": 8,
        "decode_ms": 200.0,
        "decode_tokens": 4,
        "tokens_per_s": 20.0,
        "cached": 4,
    }


def test_no_decode_time_is_no_speed() -> None:
    answer = chat_answer()
    answer.end(0, Finished(FinishReason.STOP, Usage(5, 1), Timings(0, 1, 5, 0.0, 0, 0)))
    assert answer.whole()["timings"]["tokens_per_s"] is None


def test_a_fingerprint_tells_model_release_and_adapter_apart() -> None:
    same = [fingerprint("m", "1.3.0", None), fingerprint("m", "1.3.0", "")]
    other = [
        fingerprint("m", "1.2.3", None),
        fingerprint("m2", "1.3.0", None),
        fingerprint("m", "1.3.0", "a"),
        fingerprint("m1", ".3.0", None),
    ]
    assert same[0] == same[1]
    assert len({same[0], *other}) == 5
    assert same[0].startswith("fp_")
    assert len(same[0]) == 13
