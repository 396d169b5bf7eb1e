"""Ollama's answers and errors, as lines or whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Literal

from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import (
    AnswerOrigin,
    AnyCall,
    Dialect,
    DialectAnswer,
    pause_status,
    retracted,
    timings_of,
)
from rkserve.api.common.output import error_object
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count
from rkserve.api.ollama.requests import parse_chat, parse_generate
from rkserve.api.parsing.tool_choice import as_object
from rkserve.api.parsing.tools.base import Part, ReasoningPart, Retraction, TextPart
from rkserve.core.messages import Delta, Finished, Paused

HEADERS = {**output.HEADERS, "content-type": "application/x-ndjson"}
_WORDS, _THOUGHTS = "words", "thoughts"
_NS_PER_MS = 1_000_000


class _Line(TypedDict):
    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[str]
    total_duration: NotRequired[Count]
    load_duration: NotRequired[Count]
    prompt_eval_count: NotRequired[Count]
    prompt_eval_duration: NotRequired[Count]
    eval_count: NotRequired[Count]
    eval_duration: NotRequired[Count]
    rkserve: NotRequired[JsonObject]


class OllamaFunction(TypedDict):
    """A call of a function; its arguments are an object."""

    name: str
    arguments: JsonObject


class OllamaCall(TypedDict):
    """A call of a tool."""

    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaChatAnswer(_Line):
    """The answer to a conversation, or a line of it; the last one has the counts."""

    message: OllamaMessage


class OllamaGenerateAnswer(_Line):
    """The answer to a prompt, or a line of it; the last one has the counts."""

    response: str
    thinking: NotRequired[str]


class _Lines(DialectAnswer):
    """An answer as lines of JSON, or as one line."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        self._frames: dict[str, output.EventTemplate] = {}

    def delta(self, index: int, delta: Delta) -> bytes:
        return b"".join([self._part(part) for part in self._parts(index, delta)])

    def _part(self, part: Part) -> bytes:
        match part:
            case TextPart(text=text):
                return self._more(_WORDS, text)
            case ReasoningPart(text=text):
                return self._more(_THOUGHTS, text)
            case Retraction():
                result = retracted(part, ("retract", "retract_thinking"))
                return line({**self._head(), **self._content(), "done": False, "rkserve": result})
            case _:  # clients take whole calls, which are known at the end
                return b""

    def _more(self, kind: str, text: str) -> bytes:
        frame = self._frames.get(kind)
        if frame is None:
            hole = output.EventTemplate.HOLE
            fields = self._content(hole) if kind == _WORDS else self._content(thoughts=hole)
            value = {**self._head(), **fields, "done": False}
            frame = self._frames[kind] = output.EventTemplate(value, before="", after="\n")
        return frame.fill(text)

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return a line without text, with the status for clients that asked for pauses."""
        status = {"rkserve": pause_status(index, paused)} if self._tells_of_pauses else {}
        return line({**self._head(), **self._content(), "done": False, **status})

    def finish(self, index: int, finished: Finished) -> bytes:
        """Return held-back text and the calls; the last line has the finish reason and usage."""
        held_back = b"".join([self._part(part) for part in self.end(index, finished)])
        if not (calls := self._calls()):
            return held_back
        return held_back + line({**self._head(), **self._content(calls=calls), "done": False})

    def closing(self) -> bytes:
        return line(self._last(self._content()))

    def broken(self, exc: BaseException) -> bytes:
        return _broken(exc)

    def whole(self) -> JsonObject:
        speech = self.speech(0)
        return self._last(self._content(speech.words, speech.thoughts, self._calls()))

    def _calls(self) -> list[JsonObject]:
        """Return the calls in Ollama's form: arguments are an object."""
        return [
            {
                "id": one.call_id,
                "function": {"name": one.name, "arguments": as_object(one.arguments)},
            }
            for one in self.speech(0).calls
        ]

    def _last(self, fields: JsonObject) -> JsonObject:
        end, counts = self._ends[0], self.usage()
        timings: JsonObject = {**timings_of([end])}
        own = {"id": self.id, **self._seal(self.versions), "timings": timings, **self._spans(0)}
        waited = (
            *("queue_ms", "batch_wait_ms", "encode_ms", "prefill_ms", "decode_ms"),
            *("paused_ms", "lost_ms"),
        )
        return {
            **self._head(),
            **fields,
            "done": True,
            "done_reason": end.reason.value,
            "total_duration": _ns(sum(timings.get(name, 0) for name in waited)),
            "load_duration": 0,
            "prompt_eval_count": counts["prompt_tokens"],
            "prompt_eval_duration": _ns(timings["prefill_ms"]),
            "eval_count": counts["completion_tokens"],
            "eval_duration": _ns(timings["decode_ms"]),
            "rkserve": own,
        }

    def _head(self) -> JsonObject:
        return {"model": self._model, "created_at": timestamp(self._created)}

    @abstractmethod
    def _content(
        self, words: str = "", thoughts: str = "", calls: Sequence[JsonObject] = ()
    ) -> JsonObject:
        """Return text, reasoning and tool calls."""


class ChatLines(_Lines):
    """The answer to a call of /api/chat."""

    def _content(
        self, words: str = "", thoughts: str = "", calls: Sequence[JsonObject] = ()
    ) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": words}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class GenerateLines(_Lines):
    """The answer to a call of /api/generate."""

    def _content(
        self,
        words: str = "",
        thoughts: str = "",
        calls: Sequence[JsonObject] = (),  # noqa: ARG002 - a prompt offers no tools
    ) -> JsonObject:
        return {"response": words, **({"thinking": thoughts} if thoughts else {})}


def loaded(model: str, created: int, *, chat: bool) -> JsonObject:
    """Return the answer to a call that only loads the model."""
    fields = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    head = {"model": model, "created_at": timestamp(created)}
    return {**head, **fields, "done": True, "done_reason": "load"}


def line(value: JsonObject) -> bytes:
    """Frame a JSON value as a line."""
    return f"{output.dumps(value)}\n".encode()


def timestamp(seconds: int) -> str:
    """Return a time as Ollama writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ns(milliseconds: float) -> int:
    return round(milliseconds * _NS_PER_MS)


# -- errors ---------------------------------------------------------------------------------------


def ollama_error(exc: BaseException) -> tuple[int, dict[str, str], JsonObject]:
    """Return status, headers and body for an exception, as ``errors.error_object`` does."""
    status, headers, body = error_object(exc)
    error = body["error"]
    return (
        status,
        headers,
        {"error": error["message"], "param": error["param"], "code": error["code"]},
    )


def _broken(exc: BaseException) -> bytes:
    return line(ollama_error(exc)[2])


def _pinging(fields: JsonObject) -> Callable[[AnyCall], bytes]:
    """Return the keep-alive of a stream, a line without text: clients read every line as JSON."""
    return lambda call: line({"model": call.model, **fields, "done": False})


CHAT = Dialect(
    parse_chat,
    ChatLines,
    "ollama-",
    _pinging({"message": {"role": "assistant", "content": ""}}),
    _broken,
    HEADERS,
)
GENERATE = Dialect(
    parse_generate, GenerateLines, "ollama-", _pinging({"response": ""}), _broken, HEADERS
)
