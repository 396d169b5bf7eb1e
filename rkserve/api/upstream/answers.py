"""Answers of an upstream: its events, or its whole answer, as deltas and an end.

The bodies are another server's: each value is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from rkserve.api.json.fields import JsonObject
from rkserve.core.messages import (
    CallPiece,
    Finished,
    FinishReason,
    Timings,
    UpstreamDelta,
    Usage,
)

_REASONS = {
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.FILTERED,
    "abort": FinishReason.ABORT,
}
MOST_QUOTED = 300  # characters of another server's message


class NoAnswer(ValueError):
    """An upstream's body, or an event of its stream, is no part of an answer, or is an error."""


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Times of an answer in milliseconds, as the Router measured them."""

    first_ms: float
    rest_ms: float


def message_of(body: bytes) -> tuple[str, str | None]:
    """Return the message of an error's body, and the parameter that it names, if any."""
    try:
        found = from_json(body)
    except ValueError:
        found = None
    return _error(found.get("error", found) if isinstance(found, dict) else None)


def _error(error: Any) -> tuple[str, str | None]:
    if isinstance(error, str):
        return _quoted(error), None
    if not isinstance(error, dict):
        return "it gave no reason", None
    message = error.get("message") or error.get("detail")
    param = error.get("param")
    text = _quoted(message) if isinstance(message, str) else "it gave no reason"
    return text, param[:80] if isinstance(param, str) else None


def _quoted(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MOST_QUOTED else f"{words[:MOST_QUOTED]}..."


class UpstreamAnswer:
    """One answer of an upstream, from its events."""

    def __init__(self, stop: tuple[str, ...] = (), prompt_tokens: int = 0) -> None:
        """``prompt_tokens`` is an estimate for upstreams that do not tell their usage."""
        self._stop, self._prompt_tokens = stop, prompt_tokens
        self._counted = 0
        self._calls: list[int] = []  # the upstream's indexes of its calls
        self._reason: FinishReason | None = None
        self._stopped_by: str | None = None
        self._usage: JsonObject | None = None

    @property
    def ended(self) -> bool:
        """Return whether the upstream has told the reason of the end."""
        return self._reason is not None

    @property
    def begun(self) -> bool:
        """Return whether any part of the answer has come."""
        return self._counted > 0

    def event(self, data: bytes | str) -> UpstreamDelta | None:
        """Take the data of an event, or a whole answer. Raises ``NoAnswer``."""
        found = _object(data)
        if found.get("error") is not None:
            raise NoAnswer(_error(found["error"])[0])
        if isinstance(found.get("usage"), dict):
            self._usage = found["usage"]
        choices = found.get("choices")
        if choices is None:
            return None
        if not isinstance(choices, list):
            raise NoAnswer("'choices' is no list")
        # A request asks for one answer.
        return self._choice(_dict(choices[0], "choices[0]")) if choices else None

    def _choice(self, choice: JsonObject) -> UpstreamDelta | None:
        given = choice.get("delta") or choice.get("message")
        delta = self._chat(_dict(given, "delta")) if given else self._plain(choice)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self._reason = _REASONS.get(reason, FinishReason.STOP)
            stopped_by = choice.get("stop_reason")  # vLLM's
            self._stopped_by = stopped_by if stopped_by in self._stop else None
        if not (delta.text or delta.reasoning or delta.calls):
            return None
        self._counted += 1
        return delta

    def _plain(self, choice: JsonObject) -> UpstreamDelta:
        return UpstreamDelta(_text(choice, "text"), (), counted=1)

    def _chat(self, delta: JsonObject) -> UpstreamDelta:
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list):
            raise NoAnswer("'tool_calls' is no list")
        legacy = delta.get("function_call")
        if legacy is not None:
            calls = [{"index": 0, "function": legacy}]
        return UpstreamDelta(
            # A refusal is a text of the model in the place of an answer.
            _text(delta, "content") + _text(delta, "refusal"),
            (),
            reasoning=_text(delta, "reasoning_content") or _text(delta, "reasoning"),
            calls=tuple(self._call(_dict(call, "tool_calls"), at) for at, call in enumerate(calls)),
            counted=1,
        )

    def _call(self, call: JsonObject, place: int) -> CallPiece:
        index = call.get("index", place)
        function = _dict(call.get("function"), "function")
        arguments = _text(function, "arguments")
        if index in self._calls:
            if index != self._calls[-1]:
                raise NoAnswer("it continues an earlier tool call after the begin of another one")
            return CallPiece(len(self._calls) - 1, arguments=arguments)
        name = _text(function, "name")
        if not name:
            raise NoAnswer("a tool call has no name")
        self._calls.append(index)
        return CallPiece(len(self._calls) - 1, _text(call, "id"), name, arguments)

    def rest(self) -> UpstreamDelta | None:
        """Return the tokens of the usage that came without an event of their own, if any."""
        usage = self.usage()
        left = usage.completion_tokens - self._counted
        return UpstreamDelta("", (), counted=left) if left > 0 else None

    def finished(self, times: AnswerTimes, reason: FinishReason | None = None) -> Finished:
        """Return the end; ``reason`` is the Router's, in place of the upstream's."""
        usage, why = self.usage(), reason or self._reason
        assert why is not None
        timings = Timings(
            queue_ms=0.0,
            prefill_ms=times.first_ms,
            prefill_tokens=max(0, usage.prompt_tokens - usage.cached_tokens),
            decode_ms=times.rest_ms,
            decode_tokens=max(0, usage.completion_tokens - 1),
            memory_mb=0.0,
        )
        return Finished(why, usage, timings, stopped_by=self._stopped_by)

    def usage(self) -> Usage:
        """Return the counts of tokens, those of the upstream or else estimates."""
        if self._usage is None:
            return Usage(self._prompt_tokens, self._counted)
        of_prompt, of_answer = "prompt_tokens_details", "completion_tokens_details"
        prompt = _count(self._usage, "prompt_tokens")
        return Usage(
            prompt,
            max(self._counted and 1, _count(self._usage, "completion_tokens")),
            min(prompt, _count(self._usage.get(of_prompt), "cached_tokens")),
            _count(self._usage.get(of_answer), "reasoning_tokens"),
        )


def _object(data: bytes | str) -> JsonObject:
    try:
        found = from_json(data)
    except ValueError as exc:
        raise NoAnswer("it is not JSON") from exc
    return _dict(found, "it")


def _dict(value: Any, name: str) -> JsonObject:
    if not isinstance(value, dict):
        raise NoAnswer(f"'{name}' is no object")
    return value


def _text(value: JsonObject, name: str) -> str:
    found = value.get(name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise NoAnswer(f"'{name}' is no text")
    return found


def _count(value: Any, name: str) -> int:
    found = value.get(name) if isinstance(value, dict) else None
    return found if type(found) is int and found > 0 else 0
