"""Server-sent events as bytes, OpenAI's error object, and rkserve's own headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from rkserve.api.json.fields import MAX_TIMEOUT_S, MAX_TYPES_NAMED, JsonObject, Range, quoted
from rkserve.core.errors import NativeError, RequestError, RkserveError
from rkserve.core.errors.requests import without_folders
from rkserve.core.messages import Accepted

PING = b": ping\n\n"  # a comment: keeps the connection alive, and every client skips it
PAUSED = b": paused\n\n"
DONE = b"data: [DONE]\n\n"

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # without it nginx buffers the tokens
}


def event(name: str, value: Any) -> bytes:
    """Frame a JSON value as an event that has a name."""
    return f"event: {name}\ndata: {dumps(value)}\n\n".encode()


def data(value: Any) -> bytes:
    """Frame a JSON value. JSON escapes line breaks, so one ``data:`` line holds it."""
    return f"data: {dumps(value)}\n\n".encode()


def dumps(value: Any) -> str:
    """Return compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class EventTemplate:
    """An event rendered in advance around its one changing string.

    ``value`` holds ``HOLE`` in place of the changing string, and no ``HOLE`` after it.
    ``before`` and ``after`` frame the JSON value.
    """

    HOLE = "\ufdd0"

    def __init__(self, value: Any, before: str = "data: ", after: str = "\n\n") -> None:
        # The last one: a client may have named its model like this, and names come first.
        head, _, tail = dumps(value).rpartition(encode_basestring(self.HOLE))
        self._head, self._tail = f"{before}{head}", f"{tail}{after}"

    def fill(self, text: str) -> bytes:
        """Return the event with ``text``."""
        return f"{self._head}{encode_basestring(text)}{self._tail}".encode()


_Message = Annotated[str, Field(description="One sentence for the person who reads it.")]
_Param = Annotated[str | None, Field(description="The key at fault, where one is.")]
_Code = Annotated[str | None, Field(description="What went wrong, in one word.")]


class ErrorDetails(TypedDict):
    """The error itself."""

    message: _Message
    type: str
    param: _Param
    code: _Code


class ErrorAnswer(TypedDict):
    """OpenAI's error object. A change of the cluster that failed tells its operation too."""

    error: ErrorDetails


class AnthropicErrorAnswer(TypedDict):
    """Anthropic's error object, with the parameter and the code beside it."""

    type: Literal["error"]
    error: ErrorDetails


class OllamaErrorAnswer(TypedDict):
    """Ollama's error object, with the parameter and the code beside it."""

    error: _Message
    param: _Param
    code: _Code


UNEXPECTED = "The server failed while it worked on the request. Its log says why."


def error_object(exc: BaseException) -> tuple[int, dict[str, str], JsonObject]:
    """Return status, headers and body for an exception.

    An unexpected exception becomes a 500 without its text, which may hold paths, prompts or keys.
    The caller logs it.
    """
    if not isinstance(exc, RkserveError):
        status, kind, code = RkserveError.http_status, RkserveError.kind, "internal_error"
        return status, {}, _body(UNEXPECTED, kind, None, code)
    seconds = exc.retry_after_s
    headers = {} if seconds is None else {"retry-after": str(seconds)}
    return exc.http_status, headers, _body(public_message(exc), exc.kind, exc.param, exc.code)


def public_message(exc: RkserveError) -> str:
    """Return an error's message for a client, without the folders in it."""
    return without_folders(exc.message) if isinstance(exc, NativeError) else exc.message


def broken_stream(exc: BaseException) -> bytes:
    """Return OpenAI's end of a stream that breaks after it has begun with status 200."""
    return data(error_object(exc)[2]) + DONE


def _body(message: str, kind: str, param: str | None, code: str | None) -> JsonObject:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


BOARD = "x-rkserve-board"
RELEASE = "x-rkserve-release"
QUEUED_AHEAD = "x-rkserve-queued-ahead"
SAMPLING_IGNORED = "x-rkserve-sampling-ignored"
TOOLS_IGNORED = "x-rkserve-tools-ignored"
EPOCH = "x-rkserve-epoch"
WEIGHT_VERSION = "x-weight-version"
TIMEOUT = "x-request-timeout"
_TIMEOUT = Range(0, MAX_TIMEOUT_S, above=True)


def read_timeout(header: str | None) -> float | None:
    """Return the seconds of an x-request-timeout header. Raises ``RequestError``."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    complaint = "it is no number" if math.isnan(seconds) else _TIMEOUT.complaint(seconds)
    if complaint is not None:
        raise RequestError(f"Invalid '{TIMEOUT}': {complaint}, but got {quoted(header)}.", TIMEOUT)
    return seconds


def answer_headers(accepted: Sequence[Accepted], versions: Sequence[str]) -> dict[str, str]:
    """Return the headers of an answer, from the admissions of its choices in order.

    ``versions`` are those of the weights, by choice.

    Boards and releases are named once each. ``QUEUED_AHEAD`` is the longest queue before any
    choice. ``SAMPLING_IGNORED`` is present only if a parameter that the client set could not be
    applied to at least one choice.
    """
    ignored = _once(name for one in accepted for name in one.sampling_ignored)
    headers = {
        BOARD: _once(one.board_id for one in accepted),
        RELEASE: _once(one.release for one in accepted),
        QUEUED_AHEAD: str(max(one.queued_ahead for one in accepted)),
        SAMPLING_IGNORED: ignored,
        # The oldest epoch among the boards: all choices are at least that new.
        EPOCH: str(min(one.epoch for one in accepted)),
        WEIGHT_VERSION: _once(versions),
    }
    return {name: value for name, value in headers.items() if value}


def tool_headers(left_out: Sequence[str]) -> dict[str, str]:
    """Return the header with the types of the tools that were left out, if any."""
    if not left_out:
        return {}
    more = ["..."] if len(left_out) > MAX_TYPES_NAMED else []
    return {TOOLS_IGNORED: ", ".join([*left_out[:MAX_TYPES_NAMED], *more])}


def _once(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
