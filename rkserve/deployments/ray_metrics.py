"""The few figures that Ray exports as well, for its dashboard and its Prometheus targets.

Each board and each Router exports its own, so that sums over them are those of the cluster. Names
get Ray's prefix: ``ray_rkserve_board_running``. ``GET /metrics`` has all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.metrics import TTFT_BUCKETS_S

EVERY_S = 5.0  # Ray's own export is slower


class _Pace:
    """Limits updates, which come with each report."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s = float("-inf")

    def is_due(self) -> bool:
        """Return whether the last update is long enough ago; then begin to wait anew."""
        now_s = self._clock()
        if now_s - self._last_s < EVERY_S:
            return False
        self._last_s = now_s
        return True


class RayBoardMetrics:
    """The figures of one board in Ray's metrics."""

    def __init__(self, board: str, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        keys, tags = ("board", "model"), {"board": board, "model": model}
        self._ready = Gauge("rkserve_board_ready", "1 while the board serves.", keys)
        self._running = Gauge("rkserve_board_running", "Generations that run on the board.", keys)
        self._queued = Gauge("rkserve_board_queued", "Requests that wait for the board.", keys)
        self._tokens = Counter("rkserve_completion_tokens", "Tokens of answers.", keys)
        for metric in (self._ready, self._running, self._queued, self._tokens):
            metric.set_default_tags(tags)
        self._pace = _Pace(clock)
        self._counted = 0

    def update(self, report: BoardReport) -> None:
        """Export a report, unless the last one was a moment ago."""
        if not self._pace.is_due():
            return
        self._ready.set(float(report.state is BoardState.READY))
        self._running.set(report.running)
        self._queued.set(report.queued)
        gained = report.completion_tokens - self._counted
        if gained > 0:  # Ray's counters refuse 0
            self._tokens.inc(gained)
            self._counted = report.completion_tokens


class RayRouterMetrics:
    """The figures of one Router in Ray's metrics."""

    def __init__(
        self,
        router: str,
        depths: Callable[[], Mapping[str, Mapping[int, int]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``depths`` returns the number of waiting generations by model and priority."""
        keys, tags = ("router", "model"), {"router": router}
        self._waiting = Gauge("rkserve_queue_depth", "Generations that wait at the Router.", keys)
        self._ttft = Histogram(
            "rkserve_ttft_seconds",
            "From a request's arrival at the Router to its first token.",
            list(TTFT_BUCKETS_S),
            keys,
        )
        self._waiting.set_default_tags(tags)
        self._ttft.set_default_tags(tags)
        self._depths = depths
        self._pace = _Pace(clock)

    def update(self) -> None:
        """Export the queue, unless that was done a moment ago."""
        if self._pace.is_due():
            for model, counts in self._depths().items():
                self._waiting.set(sum(counts.values()), {"model": model})

    def first_token(self, model: str, ttft_s: float) -> None:
        """Export the time to the first token of one request."""
        self._ttft.observe(ttft_s, {"model": model})
