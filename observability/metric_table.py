"""All metrics of rkserve with their labels, from the collectors themselves: for the reference page,
and to check what dashboards and rules ask for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from rkserve.core.board_metrics import BoardCollector
from rkserve.core.board_report import BoardReport, BoardState, CpuClock, Hardware
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.metrics import (
    ControlCollector,
    QueueCollector,
    RouterMetrics,
    RouterUpCollector,
    StreamCollector,
)
from rkserve.router.upstreams.metrics import UpstreamMetrics
from rkserve.router.vllm_metrics import LoraCalls, VllmClusterCollector, VllmRouterCollector

MODEL = "sim-chat"
ROUTER = "router"  # the label that a Router's own metrics get when it renders them


class MetricSource(Enum):
    """The owner of a metric."""

    ROUTER = "router"
    SCRAPE = "scrape"
    BOARD = "board"
    COORDINATOR = "coordinator"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. ``name`` is without the suffixes of its samples, such as ``_total``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    source: MetricSource

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def all_metrics() -> tuple[MetricRow, ...]:
    """Return all metrics of a scrape, those under vLLM's names included."""
    router = _router_metrics()
    coordinator = CollectorRegistry()
    CoordinatorMetrics(coordinator)
    vllm_cluster = VllmClusterCollector([MODEL], (), {}, LoraCalls(), 0.0)
    return (
        *_rows(router.registry, MetricSource.ROUTER, ROUTER),
        *_rows(RouterUpCollector({"0": True}), MetricSource.SCRAPE),
        *_rows(BoardCollector(lambda: [_report()]), MetricSource.BOARD),
        *_rows(coordinator, MetricSource.COORDINATOR),
        *_rows(VllmRouterCollector(router), MetricSource.VLLM, ROUTER),
        *_rows(vllm_cluster, MetricSource.VLLM),
    )


def _router_metrics() -> RouterMetrics:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.expect(MODEL, embeds=False)
    UpstreamMetrics(metrics.registry)
    metrics.registry.register(QueueCollector(lambda: {MODEL: {0: 0}}))
    metrics.registry.register(StreamCollector(lambda: ({"channel": 0, "ray": 0}, 0)))
    metrics.registry.register(ControlCollector(lambda: (True, 0.0, True)))
    return metrics


def _report() -> BoardReport:
    """Return a report in which everything is known: an unknown figure has no sample, and without a
    sample its labels cannot be seen.
    """
    return BoardReport(
        board_id="sim-0",
        model=MODEL,
        state=BoardState.READY,
        hardware=Hardware(
            npu_load=(0.0,),
            npu_hz=1,
            npu_max_hz=1,
            cpu_clocks=(CpuClock("0-3", 1),),
            ddr_hz=1,
            ddr_load=0.0,
            temperature_c=0.0,
            memory_total_bytes=1,
            memory_available_bytes=1,
            ddr_max_hz=1,
            disk_total_bytes=1,
            disk_free_bytes=1,
        ),
        crashes=(("SIGSEGV", 1),),
    )


def _rows(
    source: CollectorRegistry | Collector, owner: MetricSource, *more: str
) -> Iterator[MetricRow]:
    # A metric with labels has no sample until it is counted.
    known = getattr(source, "_collector_to_names", ())
    declared = {
        one._name: one._labelnames  # noqa: SLF001 - published by no method
        for one in known
        if isinstance(one, MetricWrapperBase)
    }
    for family in source.collect():
        found = declared.get(family.name)
        if found is None:
            found = family.samples[0].labels if family.samples else ()
        labels = tuple(name for name in found if name != "le")
        yield MetricRow(family.name, family.type, (*labels, *more), family.documentation, owner)
