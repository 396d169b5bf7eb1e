"""The begin and the end of each request at a Router: its record, its access line and its trace.

An access line has figures and names, never a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rkserve.api.common.answer import AnyCall
from rkserve.api.common.calls import ChatCall
from rkserve.api.common.plan import prompt_texts
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.core.logs import ACCESS, log_for, safe_id
from rkserve.core.request_record import RequestRecord, Tracing, code_of, record_of_request

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
