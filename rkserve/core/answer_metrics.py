"""The metrics of answers, bound to their labels once: a token costs a Router no lookup."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as MultiSet
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from rkserve.core.messages import Finished, FinishReason

# From 400 tokens/s to the gap that a client notices as a stop.
TOKEN_GAP_BUCKETS_S = (
    0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5,
    5, 10, 30,
)  # fmt: skip
# The ends of answers apart from those of ``FinishReason``.
ERROR, HANG_UP = "error", "hang_up"
REASONS = (*(reason.value for reason in FinishReason), ERROR, HANG_UP)


class TokenGaps:
    """Inter-token latencies of one model, for one event loop.

    An observation takes a third of the time of the library's, which locks each of its two values:
    0.3 us of the 170 us or more that a token costs a Router.
    """

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_GAP_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float, tokens: int = 1) -> None:
        """Observe tokens that came ``gap_s`` apart."""
        self._counts[bisect_left(TOKEN_GAP_BUCKETS_S, gap_s)] += tokens
        self._sum_s += gap_s * tokens

    def buckets(self) -> tuple[Sequence[tuple[str, float]], float]:
        """Return the cumulative counts by upper bound, and the sum of all."""
        bounds = (*(str(float(bound)) for bound in TOKEN_GAP_BUCKETS_S), "+Inf")
        counts = (float(count) for count in accumulate(self._counts))
        return list(zip(bounds, counts, strict=True)), self._sum_s


class TokenGapCollector(Collector):
    """Exports the inter-token latencies of all models."""

    def __init__(self) -> None:
        self._models: dict[str, TokenGaps] = {}

    def of(self, model: str) -> TokenGaps:
        """Return those of a model."""
        return self._models.setdefault(model, TokenGaps())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram."""
        family = HistogramMetricFamily(
            "rkserve_inter_token_seconds",
            "Time between two tokens of an answer at the Router, without pauses.",
            labels=("model",),
        )
        for model, gaps in self._models.items():
            family.add_metric((model,), *gaps.buckets())
        yield family


class AnswerFigures:
    """The metrics of one model's answers, bound once, so that tokens cost no lookup of labels."""

    def __init__(
        self, gaps: TokenGaps, prompt: Histogram, answer: Histogram, reasons: Mapping[str, Counter]
    ) -> None:
        """``prompt`` and ``answer`` are lengths; ``reasons`` has a counter for each end."""
        self.gaps = gaps
        self._prompt, self._answer, self._reasons = prompt, answer, reasons

    def finished(self, event: Finished) -> None:
        """Count a generation that its board has ended."""
        self._prompt.observe(event.usage.prompt_tokens)
        self._answer.observe(event.usage.completion_tokens)
        self._reasons[event.reason.value].inc()

    def broken(self, reason: str, generations: int) -> None:
        """Count generations without an end in order; ``reason`` is ``ERROR`` or ``HANG_UP``."""
        self._reasons[reason].inc(generations)


class AdapterCalls:
    """The adapters of this Router's calls, by name: of those that wait for a board, and of those
    that boards have accepted.
    """

    def __init__(self) -> None:
        self.waiting: MultiSet[str] = MultiSet()
        self.running: MultiSet[str] = MultiSet()

    @contextmanager
    def waits(self, adapter: str | None) -> Iterator[None]:
        """Count a call that waits for boards."""
        if adapter is None:
            yield
            return
        self.waiting[adapter] += 1
        try:
            yield
        finally:
            self.waiting[adapter] -= 1
