"""The measurement of a call: latencies of its tokens, and the board's own figures."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from rkserve.core.messages import Delta, GenerateRequest, Timings
from rkserve.core.metrics import RouterMetrics
from rkserve.router.answer_meter import AnswerMeter, record_timings
from tests.support.boards import own_time

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


# -- tokens ---------------------------------------------------------------------------------------


def request(choice: int = 0, **more: Any) -> GenerateRequest:
    return GenerateRequest(f"c/{choice}", "m", (1, 2), 10, **more)


def metered(*requests: GenerateRequest) -> AnswerMeter:
    return AnswerMeter(RouterMetrics(CollectorRegistry()), requests, time.monotonic(), 20.0)


def gaps(meter: AnswerMeter) -> tuple[float, float]:
    """The number of latencies, and their sum."""
    value = meter._metrics.registry.get_sample_value
    name, labels = "rkserve_inter_token_seconds", {"model": "m"}
    return value(f"{name}_count", labels) or 0.0, value(f"{name}_sum", labels) or 0.0


@pytest.mark.virtual_time
async def test_the_time_between_tokens_is_measured_for_each_choice() -> None:
    meter = metered(request(0), request(1))
    own_time.sleep(1.0)
    meter.delta(0, Delta("a", (1,)))
    own_time.sleep(0.5)
    meter.delta(1, Delta("b", (1,)))
    own_time.sleep(0.25)
    meter.delta(0, Delta("c", (2,)))
    meter.delta(0, Delta("d", ()))  # text that was held back
    own_time.sleep(0.3)
    meter.delta(1, Delta("efg", (2, 3, 4)))  # came together
    assert gaps(meter) == pytest.approx((4, 0.75 + 0.55), abs=1e-3)
    assert meter.tokens == 6
    value = meter._metrics.registry.get_sample_value
    assert value("rkserve_ttft_seconds_sum", {"model": "m"}) == pytest.approx(1.0, abs=1e-3)
    assert value("rkserve_ttft_seconds_count", {"model": "m"}) == 1


@pytest.mark.virtual_time
async def test_a_pause_is_no_latency() -> None:
    meter = metered(request())
    meter.delta(0, Delta("a", (1,)))
    own_time.sleep(0.1)
    meter.delta(0, Delta("b", (2,)))
    meter.paused(0)
    own_time.sleep(60.0)
    meter.delta(0, Delta("c", (3,)))
    own_time.sleep(0.1)
    meter.delta(0, Delta("d", (4,)))
    assert gaps(meter) == pytest.approx((2, 0.2), abs=1e-3)


@pytest.mark.virtual_time
async def test_the_time_to_the_first_token_is_passed_on_once() -> None:
    seen: list[tuple[str, float]] = []
    meter = metered(request())
    meter._metrics.first_token = lambda model, ttft_s: seen.append((model, ttft_s))
    own_time.sleep(0.5)
    meter.delta(0, Delta("a", (1,)))
    meter.delta(0, Delta("b", (2,)))
    ((model, ttft_s),) = seen
    assert model == "m"
    assert ttft_s == pytest.approx(0.5, abs=1e-3)


async def test_the_adapter_of_a_call_runs_until_its_end() -> None:
    meter = metered(request(line="tone"))
    running = meter._metrics.adapters.running
    assert +running == {"tone": 1}
    meter.close()
    assert not +running
