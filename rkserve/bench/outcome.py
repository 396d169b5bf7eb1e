"""The outcome of one request: arrival times of its text, its cost, and the kind of error. Pure.

Whatever a server sends is read as one of ``OutcomeKind``, never raised as an exception.
Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any

from rkserve.bench.connection import OK, Incoming

MOST_WORDS = 200
UNSPOKEN = ("reasoning_content", "reasoning", "tool_calls")  # tokens too, though no text


class OutcomeKind(str, Enum):
    """The kinds of outcomes."""

    OK = "ok"
    REFUSED = "refused"  # by an HTTP status, which is the code
    FAILED = "failed"  # by an error in mid-stream
    CONNECT = "connect"
    CLOSED = "closed"  # the server hung up before the end
    STALLED = "stalled"  # not a byte for so long
    TIMEOUT = "timeout"  # bytes, but no end
    GARBAGE = "garbage"  # not HTTP, not JSON, not OpenAI's
    TRUNCATED = "truncated"  # ended in order, without a finish reason and without [DONE]
    EMPTY = "empty"  # ended as it should, without any text
    CLIENT = "client"  # this machine's own limits: no more sockets
    CUT = "cut"  # by the end of the run: neither an answer nor an error


NO_ERRORS = frozenset({OutcomeKind.OK, OutcomeKind.CUT})


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request of a trace. ``due_s`` is when it should have been sent, however late it was."""

    session: str
    turn: int
    due_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class CapturedExchange:
    """The rest of an exchange, kept where a run captures: the body that was sent, the model's
    thoughts, its calls of tools as they came, and the server's own ``usage`` and ``timings``.
    """

    body: dict[str, Any]
    thoughts: str = ""
    tool_calls: tuple[Any, ...] = ()
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """A request and its outcome.

    ``text_s`` has one entry per event that brought text. ``end_s`` is the end of an answer that has
    one, ``over_s`` when the client was done with it either way. Token counts are the server's own;
    where ``usage`` is False it sent none, and ``completion_tokens`` counts the events with text.
    ``cached_tokens`` and ``queue_ms`` are None where the server does not say. ``captured`` is None
    unless its run captures.
    """

    asked: SentRequest
    kind: OutcomeKind
    code: str = ""
    detail: str = ""
    head_s: float | None = None
    text_s: tuple[float, ...] = ()
    end_s: float | None = None
    over_s: float | None = None
    status: int = 0
    board: str = ""
    usage: bool = False
    streamed: bool = True
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    queue_ms: float | None = None
    continued: int = 0
    retry_after_s: float | None = None
    finish_reason: str = ""
    text: str = field(default="", repr=False)
    captured: CapturedExchange | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """True for a complete answer."""
        return self.kind is OutcomeKind.OK

    @property
    def label(self) -> str:
        """The kind of error and its code."""
        return f"{self.kind.value} {self.code}".strip()

    @property
    def ttft_ms(self) -> float:
        """From when the request was due to its first text; only for what has text."""
        return (self.text_s[0] - self.asked.due_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """From when the request was due to the end of its answer; only for what has an end."""
        assert self.end_s is not None
        return (self.end_s - self.asked.due_s) * 1e3

    @property
    def late_ms(self) -> float:
        """The delay of sending, caused by this program."""
        return (self.asked.sent_s - self.asked.due_s) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Times between texts that follow each other."""
        return [(after - before) * 1e3 for before, after in pairwise(self.text_s)]

    @property
    def token_ms(self) -> float | None:
        """Mean time per token after the first; None for an answer of one text."""
        if self.completion_tokens < 2 or len(self.text_s) < 2:  # noqa: PLR2004 - a gap has two ends
            return None
        return (self.text_s[-1] - self.text_s[0]) * 1e3 / (self.completion_tokens - 1)


def never_answered(
    asked: SentRequest, kind: OutcomeKind, code: str, detail: str, over_s: float
) -> RequestOutcome:
    """Return the outcome of a request that got no connection."""
    return RequestOutcome(asked, kind, code, detail[:MOST_WORDS], over_s=over_s)


def read_outcome(
    asked: SentRequest,
    incoming: Incoming,
    broken: OutcomeKind | None = None,
    detail: str = "",
    over_s: float | None = None,
    *,
    body: dict[str, Any] | None = None,
) -> RequestOutcome:
    """Return the outcome of a request. ``broken`` is its kind if the client ended it.

    ``body`` is the request's body if the exchange is captured.
    """
    answer = _Answer(json_body=_is_json(incoming))
    try:
        answer.read(incoming)
    except (ValueError, RecursionError) as exc:
        # What came before the nonsense still counts: it is what a client would have seen.
        broken, detail = OutcomeKind.GARBAGE, str(exc)
    kind, code = (broken, _phase(incoming, answer)) if broken else _judge(incoming, answer)
    # Bytes after garbage were not read.
    ended = kind not in (
        OutcomeKind.CUT,
        OutcomeKind.STALLED,
        OutcomeKind.TIMEOUT,
        OutcomeKind.CLOSED,
    )
    return RequestOutcome(
        asked,
        kind,
        code=code,
        detail=(detail or answer.error or answer.words)[:MOST_WORDS]
        if kind is not OutcomeKind.OK
        else "",
        head_s=incoming.head_s,
        text_s=tuple(answer.text_s),
        end_s=incoming.done_s if ended else None,
        over_s=over_s or incoming.done_s,
        status=incoming.status,
        board=incoming.headers.get("x-rkserve-board", ""),
        streamed=answer.streamed,
        retry_after_s=_number(incoming.headers.get("retry-after")),
        finish_reason=answer.finish_reason,
        text="".join(answer.texts),
        captured=None if body is None else answer.captured(body),
        **answer.counts(),
    )


def _judge(incoming: Incoming, answer: _Answer) -> tuple[OutcomeKind, str]:
    if incoming.status != OK:
        return OutcomeKind.REFUSED, f"{incoming.status} {answer.error_code}".strip()
    if answer.error:
        return OutcomeKind.FAILED, answer.error_code
    if not answer.ended:
        return OutcomeKind.TRUNCATED, _phase(incoming, answer)
    return (OutcomeKind.OK, "") if answer.text_s else (OutcomeKind.EMPTY, answer.finish_reason)


def _phase(incoming: Incoming, answer: _Answer) -> str:
    if not incoming.status:
        return "before the head"
    return "in mid-answer" if answer.text_s else "before text"


def _is_json(incoming: Incoming) -> bool:
    kind = incoming.headers.get("content-type", "")
    return "json" in kind or incoming.status != OK


@dataclass(slots=True)
class _Answer:
    """An answer as its events add up to it. ``read`` raises ``ValueError`` for nonsense."""

    json_body: bool
    text_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    error_code: str = ""
    words: str = ""
    finish_reason: str = ""
    ended: bool = False
    streamed: bool = True

    def read(self, incoming: Incoming) -> None:
        if self.json_body:
            self.streamed = False
            self._read_whole(incoming)
            return
        for at_s, event in incoming.events:
            if (data := _data(event)) == b"[DONE]":
                self.ended = True
            elif data:
                self._take(at_s, _object(data))

    def _read_whole(self, incoming: Incoming) -> None:
        body = b"\n\n".join(event for _, event in incoming.events)
        self.words = body[:MOST_WORDS].decode(errors="replace")
        try:
            value = _object(body)
        except ValueError:
            if incoming.status == OK and incoming.done:
                raise
            return  # a proxy's page of HTML says no more than its status
        if incoming.events:
            self._take(incoming.events[-1][0], value)

    def _take(self, at_s: float, value: dict[str, Any]) -> None:
        if error := value.get("error"):
            details = error if isinstance(error, dict) else {"message": error}
            self.error = str(details.get("message") or details)
            self.error_code = str(details.get("code") or details.get("type") or "")
        self.usage = _dict(value.get("usage")) or self.usage
        self.timings = _dict(value.get("timings")) or self.timings
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._take_choice(at_s, _dict(choice))

    def _take_choice(self, at_s: float, choice: dict[str, Any]) -> None:
        message = _dict(choice.get("delta")) or _dict(choice.get("message"))
        text = choice.get("text") or message.get("content")
        if isinstance(text, str) and text:
            self.texts.append(text)
            self.text_s.append(at_s)
        elif any(message.get(name) for name in UNSPOKEN):
            self.text_s.append(at_s)
            self._take_unspoken(message)
        if reason := choice.get("finish_reason"):
            self.finish_reason, self.ended = str(reason), True

    def _take_unspoken(self, message: dict[str, Any]) -> None:
        thought = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(thought, str):
            self.thoughts.append(thought)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = _dict(_dict(call).get("function"))
            name, arguments = function.get("name"), function.get("arguments")
            if isinstance(name, str) or not self.tool_calls:
                self.tool_calls.append({"name": name, "arguments": ""})
            if isinstance(arguments, str):
                self.tool_calls[-1]["arguments"] += arguments

    def captured(self, body: dict[str, Any]) -> CapturedExchange:
        """Return the captured exchange without its text."""
        thoughts, calls = "".join(self.thoughts), tuple(self.tool_calls)
        return CapturedExchange(body, thoughts, calls, self.usage, self.timings)

    def counts(self) -> dict[str, Any]:
        """Return the costs reported by the server, as fields of a ``RequestOutcome``."""
        cached = _dict(self.usage.get("prompt_tokens_details")).get("cached_tokens")
        has_usage = _whole(self.usage.get("completion_tokens")) is not None
        return {
            "usage": has_usage,
            "prompt_tokens": _whole(self.usage.get("prompt_tokens")) or 0,
            "completion_tokens": (_whole(self.usage.get("completion_tokens")) or 0)
            if has_usage
            else len(self.text_s),
            "cached_tokens": _whole(cached),
            "queue_ms": _number(self.timings.get("queue_ms")),
            "continued": _whole(self.timings.get("continued")) or 0,
        }


def _data(event: bytes) -> bytes:
    """Return the data of an event; nothing for a comment."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = event.split(b"\n")
    data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    known = (b"data:", b":", b"event:", b"id:", b"retry:")
    if not data and any(line and not line.startswith(known) for line in lines):
        raise ValueError(f"no event of a stream: {event[:80]!r}")
    return b"\n".join(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except UnicodeDecodeError as exc:
        raise ValueError(f"not UTF-8: {data[:80]!r}") from exc
    if not isinstance(value, dict):
        raise ValueError(f"no object: {data[:80]!r}")  # noqa: TRY004 - the server's, not a caller's
    return value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if 0 <= found < float("inf") else None
