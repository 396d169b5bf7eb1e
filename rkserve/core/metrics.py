"""The metrics of a Router, built on a registry that is passed in.

Labels are few by design: model, status, reason, and the names of API keys up to a limit; never a
request or a prompt. Series whose labels are known are there from the start, with 0: the increase
of a series that appears with its first count does not include that count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)
from prometheus_client.registry import Collector

from rkserve.core.answer_metrics import (
    AdapterCalls,
    AnswerFigures,
    KeyUsage,
    ReasonCounters,
    TokenGapCollector,
    UsageByDay,
)

# From a cached prefix on a fast board to a long prompt on a slow one (minutes). Nearly all bounds
# are vLLM's too, so that what is asked of its dashboards has an exact answer.
TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10,
    15, 20, 30, 40, 60, 80, 160, 320, 640,
)  # fmt: skip
# One generation at 3 to 250 tokens/s.
DURATION_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300, 600, 1800)
# Small models on fast SoCs reach 250, large ones on slow boards stay at 1.
DECODE_RATE_BUCKETS = (
    0.5, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 250, 400,
)  # fmt: skip
PREFILL_RATE_BUCKETS = (
    5, 10, 20, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 1500, 2500, 4000, 6000, 10_000,
)  # fmt: skip
# Contexts have 4,096 to 32,768 positions.
LENGTH_BUCKETS = (
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768,
)  # fmt: skip
# From a few boards to a thousand, and one that was delayed.
DECISION_BUCKETS_S = (2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 1e-3, 5e-3, 0.02, 0.1)
# From a free board to the longest wait that a queue allows.
WAIT_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
# From a broadcast over loopback to a slow decode step, a drain and a large adapter on a slow disk.
CONTROL_BUCKETS_S = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 15, 60, 300, 900,
)  # fmt: skip

# Kinds of losses of a board, as ``dispatch.failover`` calls them.
LOSSES = (
    *("crashed", "hung", "run_failed", "gone", "silent"),
    *("out_of_order", "drained", "unreachable", "busy", "lacking"),
)
# The usual errors of generations, and reasons for which one gets no place at a board.
ERROR_CODES = (
    *("server_error", "board_failed", "run_failed"),
    *("no_board", "queue_full", "queue_timeout"),
)
TURNED_AWAY = ("no_board", "queue_full", "queue_timeout", "shed")
# In place of a key's name: of calls without a key, and of keys beyond the limit.
NO_KEY, OTHER_KEYS = "(none)", "(other)"

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


def _begin(*counters: tuple[Counter, Iterable[str]]) -> None:
    """Let the series of counters of one label begin with 0."""
    for counter, values in counters:
        for value in values:
            counter.labels(value)


class RouterMetrics:
    """Metrics of one Router. ``clock`` returns the time in seconds since 1970."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        self.registry, self.usage = registry, UsageByDay(clock)
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
            f"Times that a generation lost its board and went on, by how it was lost: "
            f"{', '.join(LOSSES[:-1])} or {LOSSES[-1]}.",
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
        _begin((self.continuations, LOSSES), (self.generation_errors, ERROR_CODES))
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
        self.judged = counter(
            "rkserve_judged_requests",
            "Calls by how they were answered: good (in order, and the first token within "
            "`router.objectives.ttft_s`), late (not within it), or failed by the service. Calls "
            "that were wrong, or whose clients left in time, are not counted.",
            ("model", "outcome"),
        )
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
            "file (file), nothing (none); or that waiting for one costs less time (wait). Requests "
            "taken back from a board's own queue for a free board are recalled.",
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
        self.prompt_length = histogram(
            "rkserve_request_prompt_tokens",
            "Tokens of the prompt of a generation that ended.",
            ("model",),
            buckets=LENGTH_BUCKETS,
        )
        self.answer_length = histogram(
            "rkserve_request_completion_tokens",
            "Tokens of the answer of a generation that ended.",
            ("model",),
            buckets=LENGTH_BUCKETS,
        )
        self.finish_reasons = counter(
            "rkserve_finish_reasons",
            "Generations that boards had accepted, by their end: stop, length or abort; error; "
            "hang_up, where the client left first.",
            ("model", "reason"),
        )
        self.gaps = TokenGapCollector()
        registry.register(self.gaps)
        self.key_requests = counter(
            "rkserve_key_requests",
            "Calls that were admitted, by the name of their API key; (none) are those without a "
            "key, and (other) those of keys beyond `router.metrics.keys`.",
            ("key",),
        )
        self.key_prompt_tokens = counter(
            "rkserve_key_prompt_tokens",
            "Tokens of prompts and of texts for vectors, by the name of the API key.",
            ("key",),
        )
        self.key_completion_tokens = counter(
            "rkserve_key_completion_tokens",
            "Tokens of answers that were sent, by the name of the API key.",
            ("key",),
        )
        self.build = gauge(
            "rkserve_build_info",
            "Always 1; the labels are the Router's versions, node and replica.",
            ("version", "python", "ray", "node", "replica"),
        )
        self.settings = gauge(
            "rkserve_config_info",
            "Always 1; the label is a digest of the Router's configuration, without its keys.",
            ("digest",),
        )
        self.adapters = AdapterCalls()
        # Called with the model and the seconds of each time to a first token.
        self.first_token: Callable[[str, float], None] | None = None
        self._answers: dict[str, AnswerFigures] = {}

    def answers(self, model: str) -> AnswerFigures:
        """Return the bound metrics of a model's answers."""
        found = self._answers.get(model)
        if found is None:
            found = self._answers[model] = AnswerFigures(
                self.gaps.of(model),
                self.prompt_length.labels(model),
                self.answer_length.labels(model),
                ReasonCounters(partial(self.finish_reasons.labels, model)),
            )
        return found

    def expect(self, model: str, *, embeds: bool) -> None:
        """Begin the series of a configured model."""
        self.queue_wait.labels(model)
        self.board_seconds.labels(model)
        if embeds:
            self.embedded_texts.labels(model)
            self.embedded_tokens.labels(model)
            return
        self.answers(model)
        for one in (self.ttft, self.duration, self.prefill, self.prefill_rate, self.decode_rate):
            one.labels(model)
        self.goodput.labels(model)
        for outcome in ("good", "late", "failed"):
            self.judged.labels(model, outcome)
        for word in ("expected", "found"):
            self.prefix_tokens.labels(model, word)
        for reason in TURNED_AWAY:
            self.turned_away.labels(model, reason)

    def key_usage(self, name: str, label: str | None = None) -> KeyUsage:
        """Return the counters of an API key's name; metrics have ``label`` in its place."""
        shown = name if label is None else label
        return KeyUsage(
            self.key_requests.labels(shown),
            self.key_prompt_tokens.labels(shown),
            self.key_completion_tokens.labels(shown),
            name,
            self.usage,
        )

    def forget_key(self, label: str) -> None:
        """Remove the series of a key that is gone."""
        for counted in (self.key_requests, self.key_prompt_tokens, self.key_completion_tokens):
            counted.remove(label)

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


class RouterUpCollector(Collector):
    """Exports the Routers of a scrape and whether each of them has answered."""

    def __init__(self, up: Mapping[str, bool]) -> None:
        self._up = up

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one figure for each Router."""
        family = GaugeMetricFamily(
            "rkserve_router_up",
            "1 for each Router whose metrics are in this answer, 0 for one that was silent.",
            labels=("router",),
        )
        for router, up in self._up.items():
            family.add_metric((router,), float(up))
        yield family


def counts_by_model(metric: Collector, label: str = "") -> dict[tuple[str, str], int]:
    """Return a counter by model and one other label, summed over all others."""
    found: dict[tuple[str, str], int] = {}
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                key = (sample.labels["model"], sample.labels.get(label, ""))
                found[key] = found.get(key, 0) + int(sample.value)
    return found


def buckets_by_model(metric: Collector) -> dict[str, tuple[int, ...]]:
    """Return the count of each bucket of a histogram by model; the last one has no upper bound."""
    below: dict[str, list[int]] = {}
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                below.setdefault(sample.labels["model"], []).append(int(sample.value))
    return {
        model: tuple(here - before for before, here in zip((0, *found), found, strict=False))
        for model, found in below.items()
    }


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


class ControlCollector(Collector):
    """Exports a Router's connection to the Coordinator, overdue pauses, and its use of the channel.

    They are what alerts need beside the figures of requests and boards.
    """

    def __init__(self, look: Callable[[], tuple[bool, float, bool]]) -> None:
        """``look`` returns whether the Coordinator is reachable, by how many seconds a pause has
        outlived its lease (0: none has), and whether the channel is switched on.
        """
        self._look = look

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one figure for each."""
        reachable, overdue_s, has_channel = self._look()
        yield GaugeMetricFamily(
            "rkserve_coordinator_reachable",
            "1 while the Router reaches the Coordinator.",
            value=float(reachable),
        )
        yield GaugeMetricFamily(
            "rkserve_pause_overdue_seconds",
            "Time by which a pause has outlived its lease; 0 where none has.",
            value=overdue_s,
        )
        yield GaugeMetricFamily(
            "rkserve_channel_enabled",
            "1 where the configuration has the channel, 0 where all tokens come through Ray.",
            value=float(has_channel),
        )


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
