"""Anthropic's messages and errors, streamed or whole.

The blocks of an answer are in ``_OPENED``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from rkserve.api.anthropic.requests import parse_messages
from rkserve.api.common import output
from rkserve.api.common.answer import (
    AnswerOrigin,
    AnyCall,
    Dialect,
    DialectAnswer,
    TimingsAnswer,
    WeightSpans,
    pause_status,
    retracted,
    timings_of,
)
from rkserve.api.common.output import error_object
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count
from rkserve.api.parsing.answer_parser import TOOL_CALLS
from rkserve.api.parsing.tool_choice import as_object
from rkserve.api.parsing.tools.base import (
    Part,
    ReasoningPart,
    Retraction,
    TextPart,
    ToolCallDelta,
    ToolCallStart,
)
from rkserve.core.errors import ContextOverflow
from rkserve.core.messages import Delta, Finished, FinishReason, Paused

# How a block of a stream begins; its text comes in deltas of the type behind it, under that name.
_TEXT, _THINKING, _CALL = "text", "thinking", "tool_use"
_OPENED: dict[str, tuple[JsonObject, str, str]] = {
    _TEXT: ({"type": _TEXT, "text": ""}, "text_delta", "text"),
    # Reasoning is not signed here, but clients require the key.
    _THINKING: ({"type": _THINKING, "thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    _CALL: ({"type": _CALL, "input": {}}, "input_json_delta", "partial_json"),
}
_REASONS = {
    "stop": "end_turn",
    TOOL_CALLS: "tool_use",
    "abort": "abort",
    "content_filter": "refusal",
}


class MessageUsage(TypedDict):
    """Counts of tokens; cached tokens are no part of the input."""

    input_tokens: int
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessageObject(WeightSpans):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "model_context_window_exceeded",
        "refusal",
        "abort",
    ]
    stop_sequence: str | None
    usage: MessageUsage
    system_fingerprint: str
    timings: TimingsAnswer
    weight_version: str


class MessageEvent(WeightSpans):
    """An event of a streamed message, with the keys of its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]
    message: NotRequired[JsonObject]
    content_block: NotRequired[JsonObject]
    delta: NotRequired[JsonObject]
    rkserve: NotRequired[JsonObject]
    error: NotRequired[JsonObject]
    index: NotRequired[Count]
    usage: NotRequired[MessageUsage]
    system_fingerprint: NotRequired[str]
    timings: NotRequired[TimingsAnswer]
    weight_version: NotRequired[str]


class TokenCountAnswer(TypedDict):
    """The number of tokens of a conversation's prompt."""

    input_tokens: Count


class MessageAnswer(DialectAnswer):
    """The answer to a call of /v1/messages."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        self._stops = call.stop
        self._max_tokens = call.max_tokens
        self._blocks = 0  # that were opened
        self._open: str | None = None  # the kind of the last one, until it is closed
        self._frame: output.EventTemplate | None = None  # of its deltas
        self._calls: dict[int, int] = {}  # the index of each call's block

    def opening(self, _index: int) -> bytes:
        """Return the event that begins the message. The cached tokens are known at its end only."""
        usage = _usage({"prompt_tokens": self._stamp.prompt_tokens})
        message = self._message([], None, None, usage)
        return output.event("message_start", {"type": "message_start", "message": message})

    def delta(self, index: int, delta: Delta) -> bytes:
        return b"".join([self._part(part) for part in self._parts(index, delta)])

    def _part(self, part: Part) -> bytes:
        match part:
            case TextPart(text=text):
                return self._more(_TEXT, text)
            case ReasoningPart(text=text):
                return self._more(_THINKING, text)
            case ToolCallStart(name=name, index=index, call_id=call_id):
                self._calls[index] = self._blocks
                return self._begin(_CALL, {"id": call_id, "name": name})
            case ToolCallDelta(arguments=arguments, index=index):
                return output.event(_PIECE, _piece(_CALL, self._calls[index], arguments))
            case Retraction():
                entry = retracted(part, ("retract", "retract_thinking", "retract_tool_use"))
                return output.event("ping", {"type": "ping", "rkserve": entry})

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return a ping, with the pause's status for clients that asked for pauses."""
        if not self._tells_of_pauses:
            return PING
        return output.event("ping", {"type": "ping", "rkserve": pause_status(index, paused)})

    def finish(self, index: int, finished: Finished) -> bytes:
        """Return the end of the message: of its block, with the reason and the usage."""
        ended = b"".join([self._part(part) for part in self.end(index, finished)])
        ended += (b"" if self._blocks else self._begin(_TEXT)) + self._close()
        reason, stop = self._reason(finished)
        event = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": _usage(self.usage()),
            **self._own_fields(),
        }
        return ended + output.event("message_delta", event)

    def closing(self) -> bytes:
        return output.event("message_stop", {"type": "message_stop"})

    def broken(self, exc: BaseException) -> bytes:
        return _broken(exc)

    def whole(self) -> JsonObject:
        speech = self.speech(0)
        content: list[JsonObject] = []
        if speech.thoughts:
            content.append({**_OPENED[_THINKING][0], "thinking": speech.thoughts})
        if speech.words or not speech.calls:
            content.append({"type": _TEXT, "text": speech.words})
        for one in speech.calls:
            given = as_object(one.arguments)
            content.append({"type": _CALL, "id": one.call_id, "name": one.name, "input": given})
        entry = self._message(content, *self._reason(self._ends[0]), _usage(self.usage()))
        return {**entry, **self._own_fields()}

    def _own_fields(self) -> JsonObject:
        """Return rkserve's own keys."""
        timings = {"timings": timings_of([self._ends[0]])}
        return {**self._seal(self.versions), **timings, **self._spans(0)}

    def _message(
        self, content: list[JsonObject], reason: str | None, stop: str | None, usage: MessageUsage
    ) -> JsonObject:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _reason(self, finished: Finished) -> tuple[str, str | None]:
        if finished.stopped_by in self._stops:
            return "stop_sequence", finished.stopped_by
        if finished.reason is not FinishReason.LENGTH:
            return _REASONS[self.speech(0).reason(finished)], None
        asked = self._max_tokens is not None
        if asked and finished.usage.completion_tokens >= (self._max_tokens or 0):
            return "max_tokens", None
        return "model_context_window_exceeded", None

    def _more(self, kind: str, text: str) -> bytes:
        """Return the delta of a block, which is opened first if it is not open."""
        begun = b"" if self._open == kind else self._begin(kind)
        if self._frame is None:
            value = _piece(kind, self._blocks - 1, output.EventTemplate.HOLE)
            self._frame = output.EventTemplate(value, before=f"event: {_PIECE}\ndata: ")
        return begun + self._frame.fill(text)

    def _begin(self, kind: str, more: JsonObject | None = None) -> bytes:
        """Return the events that open a block."""
        closed = self._close()
        event = {
            "type": "content_block_start",
            "index": self._blocks,
            "content_block": {**_OPENED[kind][0], **(more or {})},
        }
        self._open, self._blocks = kind, self._blocks + 1
        return closed + output.event("content_block_start", event)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = self._frame = None
        event = {"type": "content_block_stop", "index": self._blocks - 1}
        return output.event("content_block_stop", event)


_PIECE = "content_block_delta"
PING = output.event("ping", {"type": "ping"})


def _piece(kind: str, block: int, text: str) -> JsonObject:
    _, of, name = _OPENED[kind]
    return {"type": _PIECE, "index": block, "delta": {"type": of, name: text}}


def _usage(counts: Mapping[str, Any]) -> MessageUsage:
    """Return Anthropic's usage, in which cached tokens are no part of the input."""
    cached = counts.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.get("completion_tokens", 0),
    }


# -- errors ---------------------------------------------------------------------------------------

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SERVER = 500


def anthropic_error(exc: BaseException) -> tuple[int, dict[str, str], JsonObject]:
    """Return status, headers and body for an exception, as ``errors.error_object`` does."""
    status, headers, body = error_object(exc)
    error = body["error"]
    usual = "api_error" if status >= _SERVER else "invalid_request_error"
    message = error["message"]
    if isinstance(exc, ContextOverflow):  # Anthropic's words, by which agents know it
        message = f"prompt is too long: {exc.size} tokens > {exc.context_len} maximum. {message}"
    error = {
        "type": _ERRORS.get(status, usual),
        "message": message,
        "param": error["param"],
        "code": error["code"],
    }
    return status, headers, {"type": "error", "error": error}


def _broken(exc: BaseException) -> bytes:
    return output.event("error", anthropic_error(exc)[2])


MESSAGES = Dialect(parse_messages, MessageAnswer, "msg_", lambda _call: PING, _broken)
