"""The metrics of a Router, on a registry that is passed in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from rkserve.core.board_metrics import BoardCollector
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.metrics import RouterMetrics
from tests.core.test_board_metrics import REPORT


def test_two_routers_in_one_process_do_not_share_figures() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    RouterMetrics(one).hang_ups.inc()
    RouterMetrics(other)
    assert one.get_sample_value("rkserve_hang_ups_total") == 1
    assert other.get_sample_value("rkserve_hang_ups_total") == 0


def test_the_exposition_parses_as_prometheus_text() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry()
    registry.register(BoardCollector(lambda: [REPORT]))
    metrics = RouterMetrics(registry)
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
