"""Every metric of rkserve, built on a registry that is passed in.

Labels are few by design: group, model, board and status; never a request, user or prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rkserve.messages import BoardReport, BoardState

# From a cached prefix on a fast board (50 ms) to a long prompt on a slow one (minutes).
TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 2, 4, 8, 15, 30, 60, 120, 300)
# One generation at 3 to 45 tokens/s.
DURATION_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)

_BOARD_LABELS = ("board", "model")

_GAUGES: tuple[tuple[str, str, Callable[[BoardReport], float]], ...] = (
    ("rkserve_board_running", "Generations that run on the board.", lambda r: r.running),
    ("rkserve_board_queued", "Requests that wait for the board.", lambda r: r.queued),
    ("rkserve_board_queue_limit", "Requests that may wait.", lambda r: r.queue_limit),
    ("rkserve_kv_positions", "Positions the live KV cache holds.", lambda r: r.kv_positions),
    ("rkserve_kv_capacity", "Positions the KV cache can hold.", lambda r: r.context_len),
    (
        "rkserve_engine_memory_bytes",
        "Peak memory of the engine, as the runtime reports it.",
        lambda r: r.memory_mb * 2**20,
    ),
)

_COUNTERS: tuple[tuple[str, str, Callable[[BoardReport], float]], ...] = (
    ("rkserve_board_requests", "Requests that the board took.", lambda r: r.requests),
    ("rkserve_prompt_tokens", "Prompt tokens of answers.", lambda r: r.prompt_tokens),
    ("rkserve_cached_tokens", "Prompt tokens found in the KV cache.", lambda r: r.cached_tokens),
    ("rkserve_completion_tokens", "Tokens of answers.", lambda r: r.completion_tokens),
    ("rkserve_prefill_tokens", "Tokens really prefilled.", lambda r: r.prefill_tokens),
    ("rkserve_prefill_seconds", "Time in prefill.", lambda r: r.prefill_ms / 1e3),
    ("rkserve_decode_tokens", "Tokens decoded.", lambda r: r.decode_tokens),
    ("rkserve_decode_seconds", "Time in decode.", lambda r: r.decode_ms / 1e3),
    ("rkserve_board_aborted", "Requests whose client left.", lambda r: r.aborted),
    ("rkserve_board_failed", "Requests that the board failed.", lambda r: r.failed),
    ("rkserve_engine_starts", "Engine processes that loaded.", lambda r: r.engine_starts),
)


class RouterMetrics:
    """What the Router itself sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "rkserve_requests",
            "HTTP requests by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "rkserve_requests_in_flight", "Calls that are being answered.", registry=registry
        )
        self.ttft = Histogram(
            "rkserve_ttft_seconds",
            "From a request's arrival at the Router to its first token.",
            ("model",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "rkserve_generation_seconds",
            "From a request's arrival at the Router to the end of its answer.",
            ("model",),
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.hang_ups = Counter(
            "rkserve_hang_ups", "Answers whose client left before the end.", registry=registry
        )
        self.generation_errors = Counter(
            "rkserve_generation_errors",
            "Generations that ended with an error, by its code.",
            ("code",),
            registry=registry,
        )


class BoardCollector(Collector):
    """Exports the boards' latest reports; the figures cost no call when they are scraped."""

    def __init__(self, reports: Callable[[], Iterable[BoardReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield one family per figure."""
        reports = list(self._reports())
        state = GaugeMetricFamily(
            "rkserve_board_state", "1 for the board's state.", labels=(*_BOARD_LABELS, "state")
        )
        for report in reports:
            for known in BoardState:
                labels = (report.board_id, report.model, known.value)
                state.add_metric(labels, float(report.state is known))
        yield state
        for name, text, figure in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_BOARD_LABELS)
            for report in reports:
                gauge.add_metric((report.board_id, report.model), figure(report))
            yield gauge
        for name, text, figure in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_BOARD_LABELS)
            for report in reports:
                counter.add_metric((report.board_id, report.model), figure(report))
            yield counter
