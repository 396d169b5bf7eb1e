"""The metrics of the Coordinator, which a scrape has beside those of Routers and boards."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from rkserve.core.board_metrics import BoardCollector
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.metrics import RouterMetrics
from tests.core.test_board_metrics import REPORT


def test_the_owners_of_metrics_share_no_name() -> None:
    registries = [CollectorRegistry() for _ in range(3)]
    RouterMetrics(registries[0])
    CoordinatorMetrics(registries[1])
    registries[2].register(BoardCollector(lambda: [REPORT]))
    names = [family.name for registry in registries for family in registry.collect()]
    assert len(names) == len(set(names))


def test_operations_are_counted_by_kind_and_end() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    metrics.operations.labels("pause", "succeeded").inc()
    metrics.duration.labels("pause").observe(0.3)
    metrics.epoch.set(7)
    text = generate_latest(registry).decode()
    assert 'rkserve_operations_total{kind="pause",state="succeeded"} 1.0' in text
    assert 'rkserve_operation_seconds_bucket{kind="pause",le="0.4"} 1.0' in text
    assert "rkserve_desired_epoch 7.0" in text


def test_the_first_operation_of_a_kind_is_seen_as_an_increase() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry, ["pause", "wake"], ["succeeded", "failed"])
    for kind in ("pause", "wake"):
        for state in ("succeeded", "failed"):
            labels = {"kind": kind, "state": state}
            assert registry.get_sample_value("rkserve_operations_total", labels) == 0
        found = registry.get_sample_value("rkserve_operation_seconds_count", {"kind": kind})
        assert found == 0
