"""Traces of requests by OpenTelemetry, made by the Router from its record of each request.

A request's span begins with it, because its answer names the trace; the spans of its parts are
made at its end. Boards have no part in it. OpenTelemetry is imported where traces are configured,
and nowhere else.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rkserve import __version__
from rkserve.config.router import TracingConfig
from rkserve.core.errors import ConfigError
from rkserve.core.request_record import BoardVisit, GenerationRecord, RequestRecord, RequestTrace
from rkserve.deployments import span_names as names

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span, Tracer

SERVICE = "rkserve"
PATH, TRACEPARENT = "/v1/traces", "traceparent"
BAD_REQUEST, SERVER_ERROR = 400, 500
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
MISSING = (
    "router.tracing: the package that sends traces is missing. Run on the nodes of the Routers: "
    "pip install 'rkserve[otel]'"
)


def check_tracing(config: TracingConfig) -> None:
    """Raise ``ConfigError`` if this machine lacks the packages of configured traces."""
    if not config.enabled:
        return
    try:
        found = find_spec(EXPORTER)
    except ModuleNotFoundError:  # of a package around it
        found = None
    if found is None:
        raise ConfigError(MISSING)


def span_processors() -> list[SpanProcessor]:
    """Return the processor that sends spans as the environment (``OTEL_EXPORTER_OTLP_*``) has it.

    It is for Ray's own traces: ``exporter_import_path`` of Ray Serve's ``tracing_config``.
    """
    return [_processor(None)]


def _processor(endpoint: str | None) -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    url = None if endpoint is None else f"{endpoint.rstrip('/')}{PATH}"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))


def open_tracing(config: TracingConfig, replica: str) -> OpenTelemetry | None:
    """Return the traces of a Router, None where they are off. Raises ``ConfigError``."""
    check_tracing(config)
    return OpenTelemetry(config, replica, _processor(config.endpoint)) if config.enabled else None


class OpenTelemetry:
    """``Tracing`` by OpenTelemetry, with a provider of its own: Ray's may be the global one.

    The client's decision on recording counts where there is one, and chance elsewhere. A request
    that is not recorded costs the making of its name: OpenTelemetry's own sampler takes many times
    as long.
    """

    def __init__(self, config: TracingConfig, replica: str, processor: SpanProcessor) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = _provider(replica)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer(SERVICE, __version__, names.SCHEMA_URL)
        self._propagator = TraceContextTextMapPropagator()
        self._ratio, self._texts = config.sampling_ratio, config.prompts
        self._around, self._trace = context.get_current, trace

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> RequestTrace:
        """Begin a request's span: below Ray's where Ray traces, else below the client's."""
        trace, around = self._trace, self._around()
        parent = trace.get_current_span(around).get_span_context() if around else None
        if (parent is None or not parent.is_valid) and TRACEPARENT in headers:
            around = self._propagator.extract(headers, around)
            parent = trace.get_current_span(around).get_span_context()
        if parent is None or not parent.is_valid:
            if random.random() >= self._ratio:
                return _Unrecorded(random.getrandbits(128) or 1)
        elif not parent.trace_flags.sampled:
            return _Unrecorded(parent.trace_id)
        span = self._tracer.start_span(
            record.method,
            around,
            trace.SpanKind.SERVER,
            {names.HTTP_METHOD: record.method},
            start_time=record.begun_ns,
        )
        return _Recorded(self._tracer, span, trace, texts=self._texts)

    def close(self) -> None:
        """Send the last spans. It may block for seconds."""
        self._provider.shutdown()


def _provider(replica: str) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    facts = {"service.version": __version__, "service.instance.id": replica}
    environ = os.environ.get("OTEL_SERVICE_NAME"), os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not environ[0] and "service.name=" not in environ[1]:
        facts["service.name"] = SERVICE
    # The Router ends it itself; at the interpreter's exit there is no loop left.
    return TracerProvider(
        sampler=ALWAYS_ON, resource=Resource.create(facts), shutdown_on_exit=False
    )


class _Unrecorded:
    """The trace of a request that is not recorded."""

    sampled = wants_texts = False

    def __init__(self, trace_id: int) -> None:
        self.trace_id = f"{trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{random.getrandbits(64) or 1:016x}-00"

    def end(self, record: RequestRecord) -> None:
        """Send nothing."""


class _Recorded:
    """The span of one request, and those of its parts."""

    sampled = True

    def __init__(self, tracer: Tracer, span: Span, api: Any, *, texts: bool) -> None:
        self._tracer, self._span, self._api = tracer, span, api
        self.wants_texts = texts
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, record: RequestRecord) -> None:
        """End the request's span, with spans of its parts as they were."""
        span, within = self._span, self._api.set_span_in_context(self._span)
        span.update_name(f"{record.method} {record.route}")
        span.set_attributes(attributes(record))
        if record.error and not BAD_REQUEST <= record.status < SERVER_ERROR:
            span.set_status(self._api.StatusCode.ERROR, record.error)
        for name, begun_s, ended_s, about in parts(record):
            part = self._tracer.start_span(
                name, within, attributes=about, start_time=record.at_ns(begun_s)
            )
            if names.ERROR_TYPE in about:
                part.set_status(self._api.StatusCode.ERROR, about[names.ERROR_TYPE])
            part.end(record.at_ns(ended_s))
        span.end(record.at_ns(record.begun_s if record.ended_s is None else record.ended_s))


Attributes = dict[str, Any]
Part = tuple[str, float, float, Attributes]  # name, begin, end, attributes


def attributes(record: RequestRecord) -> Attributes:
    """Return the attributes of a request's span."""
    found: Attributes = {
        names.HTTP_METHOD: record.method,
        names.HTTP_ROUTE: record.route,
        names.HTTP_STATUS: record.status,
        names.KEY: record.key,
        names.ERROR_TYPE: record.error,
        names.CLIENT_LEFT: record.left,
        **_of_model(record),
    }
    found = {name: value for name, value in found.items() if value not in (None, "", (), False, 0)}
    known = names.PARAMETERS
    given = {known[key]: value for key, value in record.parameters.items() if key in known}
    return found | {name: value for name, value in given.items() if value is not None}


def _of_model(record: RequestRecord) -> Attributes:
    if not record.operation:
        return {}
    first_s = record.first_s
    found: Attributes = {
        names.OPERATION: record.operation,
        names.PROVIDER: SERVICE,
        names.REQUEST_MODEL: record.model,
        names.RESPONSE_MODEL: record.model,
        names.RESPONSE_ID: record.id,
        names.ADAPTER: record.adapter,
        names.STREAM: record.stream,
        names.INPUT_TOKENS: record.prompt_tokens,
        names.OUTPUT_TOKENS: record.completion_tokens,
        names.CACHED_TOKENS: record.cached_tokens,
        names.FINISH_REASONS: tuple(record.finish),
        names.TIME_TO_FIRST_CHUNK: None if first_s is None else first_s - record.begun_s,
        names.BOARDS: tuple(record.boards),
        names.FAILOVERS: record.continued,
    }
    if record.input is not None:
        found[names.INPUT_MESSAGES] = _messages(record.input)
        found[names.OUTPUT_MESSAGES] = json.dumps(
            [
                {"role": "assistant", "parts": [{"type": "text", "content": text}]}
                for text in record.output
            ],
            ensure_ascii=False,
        )
    return found


def _messages(given: Sequence[Mapping[str, Any] | str | None]) -> str:
    """Return messages, or prompts, in the form of the conventions; of pictures their kind only."""
    found = []
    for one in given:
        message = {"role": "user", "content": one} if not isinstance(one, Mapping) else one
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [content]
        found.append({"role": message["role"], "parts": [_message_part(part) for part in parts]})
    return json.dumps(found, ensure_ascii=False)


def _message_part(part: Any) -> Mapping[str, str]:
    if isinstance(part, str):
        return {"type": "text", "content": part}
    if isinstance(part, Mapping):
        kind = str(part.get("type", "unknown"))
        return {"type": kind, "content": part["text"]} if "text" in part else {"type": kind}
    return {"type": "unknown"}


def parts(record: RequestRecord) -> Iterator[Part]:
    """Yield the parts of a request: of its grammar's check, and of each generation."""
    if (grammar := record.grammar) is not None and grammar.ended_s is not None:
        yield "grammar", grammar.begun_s, grammar.ended_s, _failure(grammar.failure)
    several = len(record.generations) > 1
    for generation in record.generations:
        about: Attributes = {}
        if several:
            about[names.CHOICE] = int(generation.request_id.rpartition("/")[2] or 0)
        for name, begun_s, ended_s, found in _of_generation(generation):
            yield name, begun_s, ended_s, {**about, **found}


def _of_generation(generation: GenerationRecord) -> Iterator[Part]:
    for wait in generation.waits:
        ended_s = wait.begun_s if wait.ended_s is None else wait.ended_s
        yield "queue", wait.begun_s, ended_s, {names.QUEUE: "router", **_failure(wait.failure)}
    for at, visit in enumerate(generation.visits):
        yield from _of_visit(visit)
        if visit.why and visit.ended_s is not None:
            yield _failover(generation, at, visit.ended_s)


def _of_visit(visit: BoardVisit) -> Iterator[Part]:
    """Yield the parts of a visit; its error is that of the part during which it came."""
    ended_s = visit.begun_s if visit.ended_s is None else visit.ended_s
    board = {names.BOARD: visit.board}
    failure = _failure(visit.failure)
    expected = {names.EXPECTED_TOKENS: visit.expected_tokens} if visit.expected_tokens else {}
    if visit.accepted_s is None:
        yield "route", visit.begun_s, ended_s, {**board, **expected, **failure}
        return
    yield "route", visit.begun_s, visit.accepted_s, {**board, **expected}
    if visit.running_s is None:
        yield "queue", visit.accepted_s, ended_s, {**board, names.QUEUE: "board", **failure}
        return
    if visit.running_s > visit.accepted_s:
        yield "queue", visit.accepted_s, visit.running_s, {**board, names.QUEUE: "board"}
    measured, cached = _measured(visit)
    if visit.embeds:
        yield "embed", visit.running_s, ended_s, {**board, **cached, **failure}
    elif visit.first_s is None:
        yield "prefill", visit.running_s, ended_s, {**board, **cached, **failure}
    else:
        yield "prefill", visit.running_s, visit.first_s, {**board, **cached}
        yield "decode", visit.first_s, ended_s, {**board, **measured, **failure}


def _measured(visit: BoardVisit) -> tuple[Attributes, Attributes]:
    """Return the runtime's own figures of decode and prefill, which only a whole run has."""
    before = {names.BEFORE_TOKENS: visit.before_tokens} if visit.before_tokens else {}
    if visit.finished is None:
        return before, {}
    timings, usage = visit.finished.timings, visit.finished.usage
    decode = {
        **before,
        names.DECODE_TOKENS: timings.decode_tokens,
        names.DECODE_MS: timings.decode_ms,
        **({names.PAUSED_MS: timings.paused_ms} if timings.paused_ms else {}),
    }
    prefill = {
        names.PREFILL_TOKENS: timings.prefill_tokens,
        names.PREFILL_MS: timings.prefill_ms,
        names.CACHED_TOKENS: usage.cached_tokens,
    }
    return decode, prefill


def _failover(generation: GenerationRecord, at: int, lost_s: float) -> Part:
    """Return the time from the loss of a board to the next token, or to the end without one."""
    lost, later = generation.visits[at], generation.visits[at + 1 :]
    about: Attributes = {names.WHY: lost.why, names.BOARD: lost.board}
    ended_s = lost_s
    for visit in later:
        ended_s = visit.first_s or visit.ended_s or ended_s
        if visit.first_s is not None or visit.finished is not None or visit.why:
            about[names.BOARDS] = (lost.board, visit.board)
            return "failover", lost_s, ended_s, about
    if generation.waits and (waited_s := generation.waits[-1].ended_s) is not None:
        ended_s = max(ended_s, waited_s)
    ends = [*(one.failure for one in later), *(one.failure for one in generation.waits[-1:])]
    failure = next((code for code in reversed(ends) if code), "")
    return "failover", lost_s, ended_s, {**about, **_failure(failure)}


def _failure(code: str) -> Attributes:
    return {names.ERROR_TYPE: code} if code else {}
