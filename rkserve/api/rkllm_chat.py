"""The vendor's ``/rkllm_chat``, the API of its demo server before OpenAI's.

Bodies are OpenAI's with ``enable_thinking``; ``model`` has no effect there, so a name that is not
served is the default model here. Tool calls stay in the text, where the vendor's client parses
them, and a stream is lines of JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from typing_extensions import NotRequired, TypedDict

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin, AnyCall, Dialect, DialectAnswer
from rkserve.api.common.calls import ChatCall, read_chat
from rkserve.api.common.output import error_object
from rkserve.api.json.fields import JsonObject, parse_object
from rkserve.api.json.schemas import Count
from rkserve.api.parsing.tool_choice import as_object
from rkserve.api.parsing.tools.base import Part, ReasoningPart, TextPart
from rkserve.core.errors import RequestError
from rkserve.core.messages import Delta, Finished, FinishReason, Paused

NAME = "rkllm_chat"
HEADERS = {**output.HEADERS, "content-type": "text/plain; charset=utf-8"}
# An empty line: the vendor's client skips those.
PING = b"\n\n"
_THINK, _END_THINK = "<think>\n", "\n</think>\n\n"


def parse_rkllm(body: bytes, served: Collection[str], default_model: str) -> ChatCall:
    """Read a body. ``served`` are the names of models and adapters. Raises ``RequestError``."""
    asked = parse_object(body)
    if asked.get("model") not in served:
        asked = {**asked, "model": default_model}
    messages = asked.get("messages")
    if isinstance(messages, list):
        asked = {**asked, "messages": _messages(messages)}
    return read_chat(asked)


def _messages(given: list[Any]) -> list[Any]:
    """Return messages with tool calls in OpenAI's form.

    The vendor's client sends one assistant message for each call, with its arguments as an object
    under ``function_call``; one message makes all calls of a turn.
    """
    found: list[Any] = []
    for message in given:
        call = message.get("function_call") if isinstance(message, dict) else None
        if not isinstance(call, dict):
            found.append(message)
            continue
        made = {
            "id": f"call_{sum(_calls(one) for one in found)}",
            "type": "function",
            "function": {"name": call.get("name"), "arguments": _as_text(call.get("arguments"))},
        }
        if found and _calls(found[-1]):
            found[-1]["tool_calls"].append(made)
        else:
            kept = {key: value for key, value in message.items() if key != "function_call"}
            found.append({**kept, "tool_calls": [made]})
    return found


def _calls(message: Any) -> int:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return len(calls) if isinstance(calls, list) else 0


def _as_text(arguments: Any) -> Any:
    if not isinstance(arguments, dict):
        return arguments
    try:
        return output.dumps(arguments)
    except ValueError:
        raise RequestError(
            "Invalid 'function_call.arguments': a number is too large.", "messages"
        ) from None


class RkllmMessage(TypedDict):
    """A text of the assistant."""

    role: str
    content: str


class RkllmChoice(TypedDict):
    """The answer: a whole ``message``, or a line with a ``delta``."""

    index: Count
    logprobs: None
    finish_reason: str | None
    message: NotRequired[RkllmMessage]
    delta: NotRequired[RkllmMessage]


class RkllmChatAnswer(TypedDict):
    """An answer in the vendor's form."""

    id: str
    object: str
    model: str
    created: Count
    choices: list[RkllmChoice]
    usage: JsonObject


class _RkllmAnswer(DialectAnswer):
    """An answer in the vendor's form: one object, or a line for each piece of text."""

    def __init__(self, call: AnyCall, answer_id: str, created: int, stamp: AnswerOrigin) -> None:
        super().__init__(call, answer_id, created, stamp)
        self._thinks = False

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._line(self._text(self.add(index, delta)))

    def paused(self, _index: int, _paused: Paused) -> bytes:
        """Return an empty line: the API has no event for a pause."""
        return PING

    def finish(self, index: int, finished: Finished) -> bytes:
        text = self._text(self.end(index, finished)) + self._after_words()
        return self._line(text) + _framed(self._object("delta", "", self._reason()))

    def closing(self) -> bytes:
        """Return nothing: the last line has been sent."""
        return b""

    def broken(self, exc: BaseException) -> bytes:
        return broken(exc)

    def whole(self) -> JsonObject:
        speech = self.speech(0)
        thoughts = f"{_THINK}{speech.thoughts}{_END_THINK}" if speech.thoughts else ""
        text = thoughts + speech.words + self._called()
        return self._object("message", text, self._reason())

    def _reason(self) -> str:
        return self.speech(0).reason(self._ends[0])

    def _text(self, parts: list[Part]) -> str:
        """Return the text that parts add."""
        found = []
        for part in parts:
            match part:
                case ReasoningPart(text=text):
                    found.append(text if self._thinks else _THINK + text)
                    self._thinks = True
                case TextPart(text=text):
                    found.append(_END_THINK + text if self._thinks else text)
                    self._thinks = False
                case _:  # calls come at the end, and sent lines cannot be retracted
                    pass
        return "".join(found)

    def _after_words(self) -> str:
        ended = _END_THINK if self._thinks else ""
        self._thinks = False
        return ended + self._called()

    def _called(self) -> str:
        """Return the tool calls in the format of Hermes and Qwen models."""
        calls = (
            {"name": one.name, "arguments": as_object(one.arguments)}
            for one in self.speech(0).calls
        )
        return "".join(f"<tool_call>\n{output.dumps(one)}\n</tool_call>" for one in calls)

    def _line(self, text: str) -> bytes:
        return _framed(self._object("delta", text, None)) if text else b""

    def _object(self, kind: str, text: str, reason: str | None) -> JsonObject:
        choice = {
            "index": 0,
            kind: {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": reason,
        }
        usage = self.usage() if reason else {"prompt_tokens": None, "completion_tokens": None}
        return {
            "id": self.id,
            "object": NAME,
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "usage": {"total_tokens": None, **usage},
        }


def broken(exc: BaseException) -> bytes:
    """Return the line that ends a stream which breaks."""
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": FinishReason.ABORT.value,
    }
    return _framed({"object": NAME, "choices": [choice], **error_object(exc)[2]})


def _framed(value: JsonObject) -> bytes:
    return f"{output.dumps(value)}\n\n".encode()


def rkllm_dialect(served: Collection[str], default_model: str) -> Dialect:
    """Return the dialect for a Router that serves these names."""
    parse = partial(parse_rkllm, served=served, default_model=default_model)
    return Dialect(parse, _RkllmAnswer, f"{NAME}-", lambda _call: PING, broken, HEADERS)
