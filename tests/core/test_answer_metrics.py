"""The metrics of answers: latencies of tokens, ends and lengths, adapters of calls."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from rkserve.core.answer_metrics import ERROR, HANG_UP, REASONS, AdapterCalls, TokenGaps
from rkserve.core.messages import Finished, FinishReason, Timings, Usage
from rkserve.core.metrics import RouterMetrics


@pytest.mark.parametrize(
    ("gap_s", "bucket"), [(0.0, "0.0025"), (0.0025, "0.0025"), (0.0026, "0.004"), (99.0, "+Inf")]
)
def test_a_gap_is_in_the_first_bucket_that_holds_it(gap_s: float, bucket: str) -> None:
    gaps = TokenGaps()
    gaps.observe(gap_s, 3)
    counts, sum_s = gaps.buckets()
    assert sum_s == pytest.approx(3 * gap_s)
    assert next(bound for bound, count in counts if count) == bucket
    assert counts[-1] == ("+Inf", 3)


def test_every_end_of_an_answer_has_its_count() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    figures = metrics.answers("m")
    for reason in FinishReason:
        figures.finished(Finished(reason, Usage(100, 20), Timings(0, 0, 0, 0, 0, 0)))
    figures.broken(ERROR, 2)
    figures.broken(HANG_UP, 3)
    value = metrics.registry.get_sample_value
    name = "rkserve_finish_reasons_total"
    counts = {reason: value(name, {"model": "m", "reason": reason}) for reason in REASONS}
    assert counts == {"stop": 1, "length": 1, "abort": 1, "error": 2, "hang_up": 3}
    assert value("rkserve_request_prompt_tokens_sum", {"model": "m"}) == 300
    assert value("rkserve_request_completion_tokens_bucket", {"model": "m", "le": "32.0"}) == 3


def test_an_adapter_waits_only_while_its_call_does() -> None:
    calls = AdapterCalls()
    with calls.waits("tone"), calls.waits("tone"), calls.waits(None):
        assert +calls.waiting == {"tone": 2}
    assert not +calls.waiting
