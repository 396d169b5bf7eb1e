"""The measurement of one call for the metrics and for its record: time to the first token,
inter-token latencies, lengths, and ends of its answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rkserve.api.common.answer import UsageAnswer
from rkserve.api.common.output import error_object
from rkserve.core.answer_metrics import ERROR, HANG_UP
from rkserve.core.errors import (
    BoardAsleep,
    BoardTimeExceeded,
    EnginePaused,
    ModelAsleep,
    PoisonRequest,
    QueueFull,
    RkserveError,
)
from rkserve.core.messages import Delta, Finished, GenerateRequest, Timings
from rkserve.core.metrics import RouterMetrics
from rkserve.core.request_record import RequestRecord
from rkserve.router.request_log import failed

SERVER_ERROR = 500  # statuses from here on are no fault of a request


class AnswerMeter:
    """Measures the answers of one call that boards have accepted, from the events that the client
    gets.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        requests: Sequence[GenerateRequest],
        started_s: float,
        target_s: float,
        record: RequestRecord | None = None,
    ) -> None:
        """``requests`` are those of the choices, ``started_s`` is the call's arrival, ``target_s``
        the time within which its first token should come, and ``record`` that of the HTTP request,
        if any.
        """
        # The base model, never the client's spelling.
        model, self._adapter = requests[0].model, requests[0].adapter_name
        if self._adapter is not None:
            metrics.adapters.running[self._adapter] += 1
        self._metrics, self._model, self._started_s = metrics, model, started_s
        self._record = record or RequestRecord("")
        self._figures = metrics.answers(model)  # bound: tokens cost no lookup of labels
        self._unfinished = len(requests)
        self._waits_for_first = True  # token
        self._target_s, self._late = target_s, False
        self._token_s: dict[int, float] = {}  # by choice, the time of its latest token
        self.tokens = 0  # given out, also those of an answer that does not come to its end
        metrics.in_flight.inc()

    def delta(self, index: int, delta: Delta) -> None:
        """Measure a choice's delta. Called for every token."""
        now_s, tokens = time.monotonic(), len(delta.token_ids)
        if self._waits_for_first and (delta.text or tokens):
            self._waits_for_first = False
            self._record.first_s = now_s
            ttft_s = now_s - self._started_s
            self._late = ttft_s > self._target_s
            self._metrics.ttft.labels(self._model).observe(ttft_s)
            if self._metrics.first_token is not None:
                self._metrics.first_token(self._model, ttft_s)
        if self._record.output:  # texts are recorded
            self._record.answered(index, delta)
        if not tokens:
            return
        self.tokens += tokens
        since_s = self._token_s.get(index)
        self._token_s[index] = now_s
        if since_s is not None:
            self._figures.gaps.observe((now_s - since_s) / tokens, tokens)

    def paused(self, index: int) -> None:
        """Leave a pause of a choice out of its inter-token latencies."""
        self._token_s.pop(index, None)

    def finished(self, event: Finished) -> None:
        """Measure a choice that its board has ended."""
        self._unfinished -= 1
        self._record.finish.append(event.reason.value)
        self._figures.finished(event)
        record_timings(self._metrics, self._model, event.timings)

    def done(self, usage: UsageAnswer | None = None) -> None:
        """Measure a call whose answers have all ended in order."""
        if usage is not None:
            self._record.prompt_tokens = usage["prompt_tokens"]
            self._record.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        took_s = time.monotonic() - self._started_s
        self._metrics.duration.labels(self._model).observe(took_s)
        self._metrics.goodput.labels(self._model).inc(self.tokens)
        self._metrics.judged.labels(self._model, "late" if self._late else "good").inc()

    def broken(self, exc: BaseException) -> None:
        """Count a call that ends by an error or because its client left."""
        failed(self._record, exc)
        waited_s = time.monotonic() - self._started_s if self._waits_for_first else 0.0
        if is_fault(exc):
            self._metrics.judged.labels(self._model, "failed").inc()
        elif self._late or waited_s > self._target_s:
            self._metrics.judged.labels(self._model, "late").inc()
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            self._figures.broken(HANG_UP, self._unfinished)
            self._metrics.hang_ups.inc()
            return
        self._figures.broken(ERROR, self._unfinished)
        code = error_object(exc)[2]["error"]["code"] or "server_error"
        self._metrics.generation_errors.labels(code).inc()

    def close(self) -> None:
        """End the call; exactly once."""
        self._record.completion_tokens += self.tokens
        self._metrics.in_flight.dec()
        if self._adapter is not None:
            self._metrics.adapters.running[self._adapter] -= 1


def is_fault(exc: BaseException) -> bool:
    """Return whether the service failed a call: no limit of the caller's, no order of the operator.

    A client that left is no error.
    """
    if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
        return False
    if not isinstance(exc, RkserveError):
        return True
    if isinstance(exc, (EnginePaused, BoardAsleep, ModelAsleep, BoardTimeExceeded)):
        return False
    return exc.http_status >= SERVER_ERROR or isinstance(exc, (QueueFull, PoisonRequest))


def record_timings(metrics: RouterMetrics, model: str, timings: Timings) -> None:
    """Record the board's measurements of one finished generation.

    A phase that did not happen, or that the runtime did not time, gives no sample: a rate of 0
    would suggest a slow board.
    """
    prefill_s, decode_s = timings.prefill_ms / 1e3, timings.decode_ms / 1e3
    if timings.prefill_tokens > 0 and prefill_s > 0:
        metrics.prefill.labels(model).observe(prefill_s)
        metrics.prefill_rate.labels(model).observe(timings.prefill_tokens / prefill_s)
    if timings.decode_tokens > 0 and decode_s > 0:
        metrics.decode_rate.labels(model).observe(timings.decode_tokens / decode_s)
