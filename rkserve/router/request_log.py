"""Each request at a Router: its record, its access line, its trace, and the metrics of its answers.

An access line has figures and names, never a prompt, an answer or a key.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rkserve.api.common.answer import AnyCall, UsageAnswer
from rkserve.api.common.calls import ChatCall
from rkserve.api.common.output import error_object
from rkserve.api.common.plan import prompt_texts
from rkserve.api.common.version_policy import ResolvedModel
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
from rkserve.core.logs import ACCESS
from rkserve.core.messages import Delta, Finished, GenerateRequest, Timings, UpstreamDelta
from rkserve.core.metrics import RouterMetrics
from rkserve.core.request_record import (
    RequestRecord,
    Tracing,
    code_of,
    log_for,
    record_of_request,
    safe_id,
)

log = logging.getLogger("rkserve.access")

REQUEST_ID = "x-request-id"  # Serve makes one where the client sends none, and answers with it
# Programs ask these every few seconds.
PROBES = frozenset({"/health", "/ready", "/metrics"})
NOTHING: Mapping[str, str] = {}


class RequestLog:
    """The access lines and traces of one Router."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """Without ``tracing`` there are no traces."""
        self._tracing = tracing

    def begin(self, method: str, path: str, headers: Mapping[str, str] = NOTHING) -> RequestRecord:
        """Begin a request, and make it that of this task's context."""
        foreign = headers.get(REQUEST_ID, "")
        # Of its own: a client could choose the id of another one's request.
        record = RequestRecord(uuid.uuid4().hex, method, foreign_id=safe_id(foreign))
        log_for(record)
        if self._tracing is not None and path not in PROBES:
            record.trace = self._tracing.begin(record, headers)
        return record

    def end(self, record: RequestRecord) -> None:
        """Write the access line of a request, and send its trace."""
        record.ended_s = time.monotonic()
        level = logging.DEBUG if record.route in PROBES else logging.INFO
        if log.isEnabledFor(level):
            fields = access_fields(record)
            log.log(level, access_line(fields), extra={**fields, ACCESS: True})
        if record.trace is not None:
            record.trace.end(record)

    @contextmanager
    def part(self, method: str, route: str) -> Iterator[RequestRecord]:
        """Treat a part of a connection as a request, such as one call of several."""
        models = record_of_request().models
        record = self.begin(method, route)
        record.models = models
        record.route = route
        try:
            yield record
        except BaseException as exc:
            failed(record, exc)
            raise
        finally:
            self.end(record)


def failed(record: RequestRecord, exc: BaseException) -> None:
    """Note the error that ends a request, or that its client has left."""
    if isinstance(exc, Exception):
        record.error = code_of(exc)
    else:
        record.left = True


def noted(record: RequestRecord, call: AnyCall, meant: ResolvedModel, completion: str) -> str:
    """Note the parameters of a call and the id of its answer, and return the id."""
    record.id, record.model, record.stream = completion, meant.model, call.stream
    record.adapter = meant.adapter_name or ""
    record.operation = "chat" if isinstance(call, ChatCall) else "text_completion"
    if record.trace is not None and record.trace.sampled:
        record.parameters = {**call.sampling, "max_tokens": call.max_tokens, "n": call.choices}
        if record.trace.wants_texts:
            record.input = call.messages if isinstance(call, ChatCall) else prompt_texts(call)
            record.output = [""] * call.choices
    return completion


def access_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of an access line, without those that a request of its kind lacks."""
    begun_s, first_s = record.begun_s, record.first_s
    ended_s = time.monotonic() if record.ended_s is None else record.ended_s
    fields: dict[str, Any] = {
        "call": f"{record.method} {record.route}",
        "status": record.status,
        "duration_s": round(ended_s - begun_s, 4),
        "x_request_id": record.foreign_id,
        "key": record.key,
        "model": record.model,
        "adapter": record.adapter,
        "boards": record.boards,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "ttft_s": None if first_s is None else round(first_s - begun_s, 4),
        "finish": list(dict.fromkeys(record.finish)),
        "failovers": record.continued,
        "error": "client_left" if record.left else record.error,
        "trace_id": record.trace.trace_id if record.trace and record.trace.sampled else "",
    }
    needed = _GENERATION if record.generations else _ALWAYS
    return {name: value for name, value in fields.items() if value or name in needed}


_ALWAYS = frozenset({"call", "status", "duration_s"})
_GENERATION = _ALWAYS | {"prompt_tokens", "completion_tokens", "cached_tokens", "failovers"}


def access_line(fields: Mapping[str, Any]) -> str:
    """Return the text of an access line."""
    rest = (f"{name}={_text(value)}" for name, value in fields.items() if name not in _ALWAYS)
    head = f"{fields['call']} {fields['status']} {fields['duration_s']:.3f}s"
    return " ".join((head, *rest))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    text = str(value)
    # Names of keys and models may have spaces.
    return text if text.isprintable() and " " not in text else repr(text)


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
        if isinstance(delta, UpstreamDelta):
            tokens = delta.counted
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
