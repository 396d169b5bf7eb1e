"""The metrics of a Router, built on a registry that is passed in.

Labels are few by design: group, model, board and status; never a request, user or prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# From a cached prefix on a fast board (50 ms) to a long prompt on a slow one (minutes).
TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 2, 4, 8, 15, 30, 60, 120, 300)
# One generation at 3 to 45 tokens/s.
DURATION_BUCKETS_S = (0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
# Published rows decode 2.5 to 45 tokens/s and prefill 28 to 946.
DECODE_RATE_BUCKETS = (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100)
# From a few boards to a thousand, and one that was delayed.
DECISION_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 1e-3, 5e-3, 0.02, 0.1)
# From a free board to the longest wait that a queue allows.
WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
# From a broadcast over loopback to a slow decode step, a drain and a large adapter on a slow disk.
CONTROL_BUCKETS_S = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 15, 60, 300, 900,
)  # fmt: skip
PREFILL_RATE_BUCKETS = (5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2500)

# They double the series of every counter and histogram for the time at which each began.
disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no annotation there


def makers(
    registry: CollectorRegistry,
) -> tuple[partial[Counter], partial[Gauge], partial[Histogram]]:
    """Return the constructors of metrics on a registry."""
    return (
        partial(Counter, registry=registry),
        partial(Gauge, registry=registry),
        partial(Histogram, registry=registry),
    )


class RouterMetrics:
    """Metrics of one Router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        counter, gauge, histogram = makers(registry)
        self.requests = counter(
            "rkserve_requests", "HTTP requests by route and status.", ("route", "status")
        )
        self.in_flight = gauge("rkserve_requests_in_flight", "Calls that are being answered.")
        self.ttft = histogram(
            "rkserve_ttft_seconds",
            "From a request's arrival at the Router to its first token.",
            ("model",),
            buckets=TTFT_BUCKETS_S,
        )
        self.duration = histogram(
            "rkserve_generation_seconds",
            "From a request's arrival at the Router to the end of its answer.",
            ("model",),
            buckets=DURATION_BUCKETS_S,
        )
        self.continuations = counter(
            "rkserve_continuations",
            "Times that a generation lost its board and went on, by how it was lost: crashed, "
            "hung, run_failed, gone, silent, out_of_order, unreachable, busy or lacking.",
            ("why",),
        )
        self.continuation = histogram(
            "rkserve_continuation_seconds",
            "From the loss of a generation's board to its next token.",
            buckets=CONTROL_BUCKETS_S,
        )
        self.held_time = histogram(
            "rkserve_held_seconds",
            "Time that a client's generation stood still, or waited at the Router, because the "
            "cluster held it: by an update (another version of an adapter or of the weights is "
            "served since), a sleep or a pause.",
            ("model", "by"),
            buckets=WAIT_BUCKETS_S,
        )
        self.circuits = counter(
            "rkserve_circuits_opened",
            "Times that a board was left alone for a while because requests kept failing there.",
        )
        self.hang_ups = counter("rkserve_hang_ups", "Answers whose client left before the end.")
        self.generation_errors = counter(
            "rkserve_generation_errors",
            "Generations that ended with an error, by its code.",
            ("code",),
        )
        self.queue_wait = histogram(
            "rkserve_queue_wait_seconds",
            "Time that a generation waited in the Router's queue for a place at a board.",
            ("model",),
            buckets=WAIT_BUCKETS_S,
        )
        self.turned_away = counter(
            "rkserve_turned_away",
            "Generations that got no place at a board, by the error's code; shed ones were in the "
            "queue and left it for more urgent ones, or for those of others.",
            ("model", "reason"),
        )
        self.board_seconds = counter(
            "rkserve_board_seconds",
            "Time for which generations had boards, also stepped and paused inside the runtime.",
            ["model"],
        )
        self.rate_limited = counter("rkserve_rate_limited", "Calls beyond the limits of their key.")
        self.goodput = counter(
            "rkserve_goodput_tokens",
            "Tokens of answers that ended in order and in time; boards generated others in vain.",
            ("model",),
        )
        self.embedded_texts = counter(
            "rkserve_embedded_texts", "Texts that became vectors.", ("model",)
        )
        self.embedded_tokens = counter(
            "rkserve_embedded_tokens", "Tokens of these texts.", ("model",)
        )
        self.prefix_tokens = counter(
            "rkserve_prefix_tokens",
            "Prompt tokens of generations that ended: what the Router expected to be found in "
            "their boards' KV caches (expected), and what was (found).",
            ("model", "what"),
        )
        self.decisions = counter(
            "rkserve_routing_decisions",
            "Choices of a board by what it should hold of the prompt: its live context (live), a "
            "file (file), nothing (none); or that waiting for one costs less time (wait).",
            ("model", "reuse"),
        )
        self.decision = histogram(
            "rkserve_routing_decision_seconds",
            "Time that one choice of a board took.",
            buckets=DECISION_BUCKETS_S,
        )
        self.prefill = histogram(
            "rkserve_request_prefill_seconds",
            "Time that a request's prefill took on its board, as the runtime counts it.",
            ("model",),
            buckets=TTFT_BUCKETS_S,
        )
        self.prefill_rate = histogram(
            "rkserve_request_prefill_tokens_per_second",
            "Tokens that a request prefilled each second; those from the KV cache do not count.",
            ("model",),
            buckets=PREFILL_RATE_BUCKETS,
        )
        self.decode_rate = histogram(
            "rkserve_request_decode_tokens_per_second",
            "Tokens that a request decoded each second.",
            ("model",),
            buckets=DECODE_RATE_BUCKETS,
        )

    def continued(self, word: str) -> None:
        """Count a failover of a generation; ``word`` is the kind of loss."""
        self.continuations.labels(word).inc()

    def opened(self) -> None:
        """Count an opened circuit breaker."""
        self.circuits.inc()

    def held(self, model: str, by: str, held_s: float) -> None:
        """Observe the duration of a hold of a generation by the cluster."""
        self.held_time.labels(model, by).observe(held_s)

    def back(self, took_s: float) -> None:
        """Observe the time from the end of a hold to the next token."""
        self.continuation.observe(took_s)

    def refused(self, model: str, reason: str) -> None:
        """Count a request without a reservation."""
        self.turned_away.labels(model, reason).inc()


class QueueCollector(Collector):
    """Exports the queue lengths of this Router, counted at each scrape."""

    def __init__(self, depths: Callable[[], Mapping[str, Mapping[int, int]]]) -> None:
        self._depths = depths

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one figure for each model and priority with waiting requests."""
        waiting = GaugeMetricFamily(
            "rkserve_queue_depth",
            "Generations that wait at the Router for a place at a board, by priority.",
            labels=("model", "priority"),
        )
        for model, counts in self._depths().items():
            for priority, count in sorted({0: 0, **counts}.items()):
                waiting.add_metric((model, str(priority)), count)
        yield waiting


class StreamCollector(Collector):
    """Exports the transport of tokens from boards to this Router."""

    def __init__(self, counts: Callable[[], tuple[Mapping[str, int], int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield both figures."""
        streams, connections = self._counts()
        taken = CounterMetricFamily(
            "rkserve_token_streams",
            "Generations by the way that their tokens took from the board: "
            "a connection of its own (channel), or Ray (ray).",
            labels=("path",),
        )
        for path, count in streams.items():
            taken.add_metric((path,), count)
        yield taken
        yield GaugeMetricFamily(
            "rkserve_channels", "Boards that send tokens over a connection.", value=connections
        )
