"""The metrics of a Router: on a registry that is passed in, and with 0 from the start."""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rkserve.core import errors
from rkserve.core.answer_metrics import TOKEN_GAP_BUCKETS_S
from rkserve.core.board_metrics import BoardCollector
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.metrics import (
    DECODE_RATE_BUCKETS,
    ERROR_CODES,
    PREFILL_RATE_BUCKETS,
    TTFT_BUCKETS_S,
    TURNED_AWAY,
    RouterMetrics,
)
from tests.core.test_board_metrics import REPORT


def test_two_routers_in_one_process_do_not_share_figures() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    RouterMetrics(one).hang_ups.inc()
    RouterMetrics(other)
    assert one.get_sample_value("rkserve_hang_ups_total") == 1
    assert other.get_sample_value("rkserve_hang_ups_total") == 0


def test_the_exposition_parses_as_prometheus_text() -> None:
    registry = CollectorRegistry()
    registry.register(BoardCollector(lambda: [REPORT]))
    metrics = RouterMetrics(registry)
    metrics.expect("m", embeds=False)
    metrics.requests.labels("/v1/models", "200").inc()
    metrics.ttft.labels("m").observe(0.3)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert all(family.documentation for family in families)
    assert len({family.name for family in families}) == len(families)


def test_no_series_tells_when_another_one_began() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    CoordinatorMetrics(registry)
    metrics.hang_ups.inc()
    metrics.held("sim-chat", "update", 0.3)
    text = generate_latest(registry).decode()
    assert "rkserve_hang_ups_total 1.0" in text
    assert 'rkserve_held_seconds_bucket{by="update",le="0.5",model="sim-chat"} 1.0' in text
    assert "_created" not in text


def test_buckets_reach_the_fastest_and_the_slowest_board() -> None:
    assert TTFT_BUCKETS_S[0] == 0.005
    assert DECODE_RATE_BUCKETS[-2:] == (250, 400)
    assert PREFILL_RATE_BUCKETS[-1] == 10_000
    assert TOKEN_GAP_BUCKETS_S[0] < 1 / 250
    for bounds in (TTFT_BUCKETS_S, DECODE_RATE_BUCKETS, PREFILL_RATE_BUCKETS, TOKEN_GAP_BUCKETS_S):
        assert all(one < other for one, other in pairwise(bounds))


def test_the_latencies_of_tokens_are_a_histogram_by_model() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.answers("m").gaps.observe(0.02, 2)
    metrics.answers("m").gaps.observe(0.3)
    metrics.answers("other")
    value = metrics.registry.get_sample_value
    name = "rkserve_inter_token_seconds"
    assert value(f"{name}_count", {"model": "m"}) == 3
    assert value(f"{name}_bucket", {"model": "m", "le": "0.025"}) == 2
    assert value(f"{name}_sum", {"model": "m"}) == pytest.approx(0.34)
    assert value(f"{name}_count", {"model": "other"}) == 0


def test_the_series_of_a_model_begin_with_it() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.expect("chat", embeds=False)
    metrics.expect("vectors", embeds=True)
    value = metrics.registry.get_sample_value
    assert value("rkserve_finish_reasons_total", {"model": "chat", "reason": "hang_up"}) == 0
    assert value("rkserve_ttft_seconds_count", {"model": "chat"}) == 0
    assert value("rkserve_embedded_texts_total", {"model": "vectors"}) == 0
    assert value("rkserve_ttft_seconds_count", {"model": "vectors"}) is None
    assert value("rkserve_continuations_total", {"why": "crashed"}) == 0
    assert value("rkserve_generation_errors_total", {"code": "board_failed"}) == 0
    full = {"model": "chat", "reason": "queue_full"}
    assert value("rkserve_turned_away_total", full) == 0


def test_the_errors_that_are_counted_from_the_start_are_codes_of_errors() -> None:
    known = {getattr(kind, "code", None) for kind in vars(errors).values()}
    assert set(ERROR_CODES) - {"server_error"} <= known
    assert set(TURNED_AWAY) - {"shed"} <= known
