"""The board's measurements of an answer in the Router's metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from rkserve.core.messages import Timings
from rkserve.core.metrics import RouterMetrics
from rkserve.router.service import record_timings

TIMINGS = Timings(
    queue_ms=5.0,
    prefill_ms=500.0,
    prefill_tokens=100,
    decode_ms=2000.0,
    decode_tokens=40,
    memory_mb=800.0,
)
HISTOGRAMS = (
    "rkserve_request_prefill_seconds",
    "rkserve_request_prefill_tokens_per_second",
    "rkserve_request_decode_tokens_per_second",
)


@pytest.mark.parametrize(
    ("timings", "sums"),
    [
        pytest.param(TIMINGS, (0.5, 200.0, 20.0), id="both phases"),
        pytest.param(
            replace(TIMINGS, prefill_ms=0.0, prefill_tokens=0), (0, 0, 20.0), id="all was cached"
        ),
        pytest.param(replace(TIMINGS, decode_tokens=0), (0.5, 200.0, 0), id="nothing was decoded"),
        pytest.param(
            replace(TIMINGS, prefill_ms=0.0, decode_ms=0.0), (0, 0, 0), id="nothing was timed"
        ),
    ],
)
def test_a_phase_that_happened_is_counted_once_and_another_not_at_all(
    timings: Timings, sums: tuple[float, ...]
) -> None:
    registry = CollectorRegistry()
    record_timings(RouterMetrics(registry), "m", timings)
    for name, expected in zip(HISTOGRAMS, sums, strict=True):
        count = registry.get_sample_value(f"{name}_count", {"model": "m"})
        assert (count or 0) == (1 if expected else 0), name
        assert (registry.get_sample_value(f"{name}_sum", {"model": "m"}) or 0) == expected, name
