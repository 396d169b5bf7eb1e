"""The outcome of a request: its latencies, and what is kept of an answer that is cut off."""

from __future__ import annotations

import pytest

from rkserve.bench.connection import Incoming
from rkserve.bench.outcome import OutcomeKind, SentRequest, read_outcome
from tests.support.http.fake_openai import chunks, said
from tests.support.values.bench_load import (
    answered,
)


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    one = answered(10.0, ttft_s=2.0, late_s=1.5, tokens=3, step_s=0.1)
    assert one.ttft_ms == pytest.approx(2000)
    assert one.e2e_ms == pytest.approx(2250)
    assert one.late_ms == pytest.approx(1500)
    assert one.gaps_ms == pytest.approx([100, 100])


@pytest.mark.parametrize(
    ("tokens", "texts", "expected"),
    [
        pytest.param(5, 5, 100.0, id="one by one"),
        pytest.param(9, 5, 50.0, id="two in an event"),
        pytest.param(1, 1, None, id="a single token"),
        pytest.param(4, 1, None, id="all in one event"),
    ],
)
def test_the_time_per_token_is_by_tokens_not_by_events(
    tokens: int, texts: int, expected: float | None
) -> None:
    one = answered(tokens=texts, step_s=0.1, completion_tokens=tokens)
    assert one.token_ms == (None if expected is None else pytest.approx(expected))


def test_what_is_cut_off_in_mid_answer_keeps_what_there_was() -> None:
    incoming = Incoming(sent_s=1.0)
    for at_s, part in enumerate(chunks(*said("one"), last=False), 2):
        assert part is not None
        incoming.feed(part, float(at_s))
    found = read_outcome(SentRequest("s", 0, 1.0, 1.0), incoming, OutcomeKind.CUT, over_s=9.0)
    assert (found.kind, found.code, found.text) == (OutcomeKind.CUT, "in mid-answer", "one")
    assert (found.text_s, found.end_s, found.over_s) == ((3.0,), None, 9.0)
