"""OpenAI's responses, streamed or whole.

An answer is a list of items in order: reasoning, messages and tool calls. A stream numbers its
events, and ends with ``[DONE]`` as Open Responses demands: OpenAI's clients stop reading there, as
in their other streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import (
    AnswerOrigin,
    AnyCall,
    CompletionDetails,
    Dialect,
    DialectAnswer,
    TimingsAnswer,
    WeightSpans,
    pause_status,
    retracted,
    timings_of,
)
from rkserve.api.common.logprobs import chat_logprobs
from rkserve.api.common.output import error_object
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count
from rkserve.api.parsing.tools.base import (
    Part,
    ReasoningPart,
    Retraction,
    TextPart,
    ToolCallDelta,
    ToolCallStart,
)
from rkserve.api.responses.requests import ResponseCall, parse_response
from rkserve.core.messages import Delta, Finished, FinishReason, Paused

PREFIX = "resp_"
_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"
_IDS = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc"}
# The text of an item grows by events of this name.
_GROWS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
}
_MORE: dict[str, JsonObject] = {_MESSAGE: {"role": "assistant"}, _REASONING: {"summary": []}}
_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
    FinishReason.FILTERED: "incomplete",
}
_CUT = {FinishReason.LENGTH: "max_output_tokens", FinishReason.FILTERED: "content_filter"}


@dataclass
class _Item:
    """One item of an answer; ``number`` is its index."""

    kind: str
    number: int
    item_id: str
    more: JsonObject = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)
    open: bool = True
    void: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def part(self, text: str) -> JsonObject:
        """Return its only part, with a text."""
        if self.kind == _REASONING:
            return {"type": "reasoning_text", "text": text}
        entry = {"type": "output_text", "text": text, "annotations": []}
        return {**entry, "logprobs": self.logprobs}

    def item(self, status: str) -> JsonObject:
        """Return the item in its current state."""
        head = {"id": self.item_id, "type": self.kind, "status": status, **self.more}
        begun = status != "in_progress"
        if self.kind == _CALL:
            return {**head, "arguments": self.text if begun else ""}
        return {**head, "content": [self.part(self.text)] if begun else []}


class CachedInput(TypedDict):
    """Details about the tokens of the input."""

    cached_tokens: Count
    cache_write_tokens: Count


class ResponseUsage(TypedDict):
    """Counts of tokens."""

    input_tokens: Count
    input_tokens_details: CachedInput
    output_tokens: Count
    output_tokens_details: CompletionDetails
    total_tokens: Count


class IncompleteDetails(TypedDict):
    """The reason for an incomplete response."""

    reason: str


class ResponseObject(WeightSpans):
    """OpenAI's response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: Literal[False]
    error: JsonObject | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[JsonObject]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    service_tier: Literal["default"]
    safety_identifier: str | None
    prompt_cache_key: str | None
    parallel_tool_calls: bool
    max_tool_calls: int | None
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    reasoning: JsonObject
    text: JsonObject
    top_logprobs: Count
    previous_response_id: str | None
    store: bool
    system_fingerprint: NotRequired[str]
    timings: NotRequired[TimingsAnswer]
    weight_version: NotRequired[str]


class ResponseEvent(TypedDict):
    """An event of a streamed response, with the keys of its type."""

    type: str
    sequence_number: Count
    response: NotRequired[ResponseObject]
    rkserve: NotRequired[Any]
    item: NotRequired[Any]
    part: NotRequired[Any]
    item_id: NotRequired[Any]
    output_index: NotRequired[Any]
    content_index: NotRequired[Any]
    delta: NotRequired[Any]
    logprobs: NotRequired[Any]
    text: NotRequired[Any]
    name: NotRequired[Any]
    arguments: NotRequired[Any]
    code: NotRequired[Any]
    message: NotRequired[Any]
    param: NotRequired[Any]


class ResponseAnswer(DialectAnswer):
    """The answer to a call of /v1/responses."""

    def __init__(
        self,
        call: AnyCall,
        answer_id: str,
        created: int,
        stamp: AnswerOrigin,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``now`` returns the seconds since 1970."""
        super().__init__(call, answer_id, created, stamp)
        self._now = now
        self._completed_at: int | None = None
        self.call = call if isinstance(call, ResponseCall) else None
        self._echo = {} if self.call is None else dict(self.call.echo)
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._sequence = 0

    # -- whole ----------------------------------------------------------------------------------

    def add(self, index: int, delta: Delta) -> list[Part]:
        parts = self._parts(index, delta)
        for part in parts:
            self._take(part)
        return parts

    def end(self, index: int, finished: Finished) -> list[Part]:
        parts = super().end(index, finished)
        for part in parts:
            self._take(part)
        self._score()
        self._complete()
        return parts

    def whole(self) -> JsonObject:
        return self._ended()

    # -- streamed -------------------------------------------------------------------------------

    def opening(self, _index: int) -> bytes:
        begun = {"response": self._response("in_progress")}
        return self._events([("response.created", begun), ("response.in_progress", begun)])

    def delta(self, index: int, delta: Delta) -> bytes:
        found = [event for part in self._parts(index, delta) for event in self._take(part)]
        return self._events(found)

    def paused(self, index: int, paused: Paused) -> bytes:
        """Return a comment for a pause, and an event for clients that asked for pauses."""
        if not self._tells_of_pauses:
            return output.PAUSED
        return output.PAUSED + self._events([self._own(pause_status(index, paused))])

    def finish(self, index: int, finished: Finished) -> bytes:
        found = [event for part in super().end(index, finished) for event in self._take(part)]
        self._score()
        return self._events([*found, *self._complete()])

    def closing(self) -> bytes:
        """Return the last event, with all of the response."""
        response = self._ended()
        done = "completed" if response["status"] == "completed" else "incomplete"
        return self._events([(f"response.{done}", {"response": response})]) + output.DONE

    def broken(self, exc: BaseException) -> bytes:
        return self._events([("response.failed", {"response": self.failed(exc)})]) + output.DONE

    # -- kept -----------------------------------------------------------------------------------

    @property
    def to_be_kept(self) -> bool:
        """Return whether the answer says that the response is stored."""
        return bool(self._echo.get("store"))

    def not_kept(self) -> None:
        """Record that the response could not be stored."""
        self._echo["store"] = False

    def failed(self, exc: BaseException) -> JsonObject:
        """Return the response up to the failure."""
        entry = error_object(exc)[2]["error"]
        error = {"code": "server_error", "message": entry["message"], "type": entry["code"]}
        return {
            **self._response("failed"),
            "error": error,
            "output": self._output("incomplete"),
        }

    def left(self) -> JsonObject:
        """Return the response up to the disconnect of its client."""
        return {**self._response("cancelled"), "output": self._output("incomplete")}

    # -- items ----------------------------------------------------------------------------------

    def _take(self, part: Part) -> list[_Event]:
        """Add a part to the items, and return its events."""
        match part:
            case TextPart(text=text):
                return self._more(_MESSAGE, text)
            case ReasoningPart(text=text):
                return self._more(_REASONING, text)
            case ToolCallStart(name=name, index=index, call_id=call_id):
                begun = self._begin(_CALL, {"call_id": call_id, "name": name})
                self._calls[index] = self._items[-1]
                return begun
            case ToolCallDelta(arguments=arguments, index=index):
                return [self._grown(self._calls[index], arguments)]
            case Retraction():
                return [self._taken_back(part)]

    def _taken_back(self, void: Retraction) -> _Event:
        for kind, count in ((_MESSAGE, void.words), (_REASONING, void.thoughts)):
            left = count
            for item in reversed([one for one in self._items if one.kind == kind]):
                text = item.text
                item.texts = [text[: max(0, len(text) - left)]]
                left -= min(left, len(text))
        calls = [item for item in self._items if item.kind == _CALL and not item.void]
        for item in calls[len(calls) - void.calls :]:
            item.void = True
        return self._own(retracted(void))

    def _more(self, kind: str, text: str) -> list[_Event]:
        last = self._items[-1] if self._items else None
        fits = last is not None and last.kind == kind and last.open
        begun = [] if fits else self._begin(kind)
        return [*begun, self._grown(self._items[-1], text)]

    def _grown(self, item: _Item, text: str) -> _Event:
        item.texts.append(text)
        more: JsonObject = {"logprobs": []} if item.kind == _MESSAGE else {}
        return f"{_GROWS[item.kind]}.delta", {**_place(item), "delta": text, **more}

    def _begin(self, kind: str, more: JsonObject | None = None) -> list[_Event]:
        closed, number = self._close(), len(self._items)
        unique = self.id.removeprefix(PREFIX)
        item = _Item(kind, number, f"{_IDS[kind]}_{unique}_{number}", more or _MORE[kind])
        self._items.append(item)
        added = {"output_index": number, "item": item.item("in_progress")}
        events = [*closed, ("response.output_item.added", added)]
        if kind != _CALL:
            part = {**_place(item), "part": item.part("")}
            events.append(("response.content_part.added", part))
        return events

    def _close(self, status: str = "completed") -> list[_Event]:
        """End the last item."""
        if not self._items or not self._items[-1].open:
            return []
        item = self._items[-1]
        item.open = False
        grown = {**_place(item), "text": item.text}
        if item.kind == _MESSAGE:
            grown["logprobs"] = item.logprobs
        if item.kind == _CALL:  # with the name, which OpenAI's client requires in its strict mode
            grown = {**_place(item), "name": item.more["name"], "arguments": item.text}
        events: list[_Event] = [(f"{_GROWS[item.kind]}.done", grown)]
        if item.kind != _CALL:
            part = {**_place(item), "part": item.part(item.text)}
            events.append(("response.content_part.done", part))
        done = {"output_index": item.number, "item": item.item(status)}
        return [*events, ("response.output_item.done", done)]

    def _score(self) -> None:
        """Add the log-probabilities of all tokens to the last message: they are final only then."""
        lexicon = self._stamp.lexicon
        if lexicon is None or lexicon.vocabulary is None:
            return
        messages = [item for item in self._items if item.kind == _MESSAGE]
        if messages:
            entry = chat_logprobs(lexicon, self._tokens[0].chosen)
            messages[-1].logprobs = entry["content"]

    def _complete(self) -> list[_Event]:
        """End all items; an answer without any has an empty message."""
        if self._ends[0].reason is FinishReason.STOP:
            self._completed_at = int(self._now())
        begun = [] if self._items else self._begin(_MESSAGE)
        return [*begun, *self._close(self._last_status())]

    # -- the response -----------------------------------------------------------------------------

    def _last_status(self) -> str:
        whole = self._ends[0].reason is FinishReason.STOP
        return "completed" if whole else "incomplete"

    def _output(self, last: str) -> list[JsonObject]:
        items = [item for item in self._items if not item.void]
        return [item.item(last if item is items[-1] else "completed") for item in items]

    def _ended(self) -> JsonObject:
        finished, counts = self._ends[0], self.usage()
        details = counts.get("completion_tokens_details", {})
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": counts["total_tokens"],
        }
        cut = _CUT.get(finished.reason)
        return {
            **self._response(_STATUS[finished.reason]),
            "completed_at": self._completed_at,
            "incomplete_details": None if cut is None else {"reason": cut},
            "output": self._output(self._last_status()),
            "usage": usage,
            **self._seal(self.versions),
            "timings": timings_of([finished]),
            **self._spans(0),
        }

    def _response(self, status: str) -> JsonObject:
        sampling = self._stamp.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "truncation": "disabled",
            "service_tier": "default",
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "usage": None,
            **self._echo,
        }

    def _own(self, entry: JsonObject) -> _Event:
        """Return rkserve's own keys in an event that clients know and that changes nothing."""
        return "response.in_progress", {"response": self._response("in_progress"), "rkserve": entry}

    def _events(self, events: list[_Event]) -> bytes:
        raw = b""
        for name, more in events:
            numbered = {"type": name, "sequence_number": self._sequence, **more}
            raw += output.event(name, numbered)
            self._sequence += 1
        return raw


_Event = tuple[str, dict[str, Any]]


def _place(item: _Item) -> JsonObject:
    place: JsonObject = {"item_id": item.item_id, "output_index": item.number}
    return place if item.kind == _CALL else {**place, "content_index": 0}


def _broken(exc: BaseException) -> bytes:
    """End a stream without a response."""
    entry = error_object(exc)[2]["error"]
    event: JsonObject = {"type": "error", "sequence_number": 0}
    event |= {key: entry[key] for key in ("code", "message", "param")}
    return output.event("error", event) + output.DONE


RESPONSES = Dialect(parse_response, ResponseAnswer, PREFIX, broken=_broken)
