"""Figures of upstreams at one Router; a scrape has those of all Routers."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rkserve.core.metrics import TTFT_BUCKETS_S, makers

OUTCOMES = ("answered", "failed", "refused", "aborted", "left")
_LABELS = ("upstream", "model")


@dataclass(frozen=True, slots=True)
class UpstreamFigures:
    """The figures of one upstream."""

    outcomes: dict[str, Counter]
    prompt_tokens: Counter
    completion_tokens: Counter
    retried: Counter
    in_flight: Gauge
    up: Gauge
    ttft: Histogram

    def ended(self, outcome: str) -> None:
        """Count a request by how it ended."""
        self.outcomes[outcome].inc()

    def tokens(self, prompt: int, completion: int) -> None:
        """Count the tokens of an answer."""
        self.prompt_tokens.inc(prompt)
        self.completion_tokens.inc(completion)


class UpstreamMetrics:
    """The metrics of all upstreams."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, histogram = makers(registry)
        self._requests = counter(
            "rkserve_upstream_requests",
            "Requests sent to the upstream: answered, failed by it, refused by it (400, 429), "
            "aborted here, or left by their clients.",
            (*_LABELS, "outcome"),
        )
        self._prompt = counter(
            "rkserve_upstream_prompt_tokens", "Prompt tokens of its answers.", _LABELS
        )
        self._completion = counter(
            "rkserve_upstream_completion_tokens", "Tokens of its answers.", _LABELS
        )
        self._retries = counter(
            "rkserve_upstream_retries",
            "Times that a request was sent to the upstream again before its first token.",
            _LABELS,
        )
        self._in_flight = gauge(
            "rkserve_upstream_in_flight", "Requests at the upstream now.", _LABELS
        )
        self._up = gauge(
            "rkserve_upstream_up", "1 if the upstream's health is well, 0 if not.", _LABELS
        )
        self._ttft = histogram(
            "rkserve_upstream_ttft_seconds",
            "From sending a request to the upstream to its first token.",
            _LABELS,
            buckets=TTFT_BUCKETS_S,
        )

    def of(self, name: str, model: str) -> UpstreamFigures:
        """Return the figures of an upstream, which begin with 0."""
        labels = (name, model)
        return UpstreamFigures(
            {one: self._requests.labels(*labels, one) for one in OUTCOMES},
            self._prompt.labels(*labels),
            self._completion.labels(*labels),
            self._retries.labels(*labels),
            self._in_flight.labels(*labels),
            self._up.labels(*labels),
            self._ttft.labels(*labels),
        )
