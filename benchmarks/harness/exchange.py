"""A streamed answer as a value: times, tokens and text, parsed after the measurement. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rkserve.bench.connection import OK, Incoming
from rkserve.bench.processes import BenchFailed


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. Times in seconds of the monotonic clock.

    ``content_s`` has one entry per event that brought text. ``end_s`` is None where the client hung
    up first, which the end of a measurement does.
    """

    sent_s: float
    content_s: tuple[float, ...] = ()
    end_s: float | None = None
    board: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as what JSON can say."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Exchange:
        """Read what ``to_json`` returned."""
        return cls(**{**value, "content_s": tuple(value["content_s"])})


@dataclass(frozen=True, slots=True)
class HangUp:
    """An answer that its client left at ``closed_s``, and the one that waited behind it."""

    left: Exchange
    closed_s: float
    next: Exchange

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> HangUp:
        """Read what ``asdict`` made of one."""
        left, behind = (Exchange.from_json(value[name]) for name in ("left", "next"))
        return cls(left, value["closed_s"], behind)


@dataclass(frozen=True, slots=True)
class PausedSpan:
    """A pause of an answer: asked for, answered, and the resumption asked for.

    ``kv`` is what the server said became of the KV cache, ``tokens`` those of the answer so far.
    """

    asked_s: float
    answered_s: float
    resumed_s: float
    kv: str
    tokens: int


@dataclass(frozen=True, slots=True)
class InterruptedAnswer:
    """An answer that was paused and resumed, its text, and when that was."""

    answer: Exchange
    text: str
    pauses: tuple[PausedSpan, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> InterruptedAnswer:
        """Read what ``asdict`` made of one."""
        pauses = tuple(PausedSpan(**one) for one in value["pauses"])
        return cls(Exchange.from_json(value["answer"]), value["text"], pauses)


@dataclass(frozen=True, slots=True)
class Truth:
    """An answer's reference: its text, its finish reason and its usage."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int

    def difference(self, found: Truth) -> str:
        """Return the difference of an answer that is not this one, to be put behind a word."""
        if found.text == self.text:
            counts = f"{found.prompt_tokens} and {found.completion_tokens} tokens"
            return f": {found.finish}, {counts}, not {self}"
        pairs = zip(found.text, self.text, strict=False)
        shorter = min(len(found.text), len(self.text))
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), shorter)
        near = slice(max(0, at - 10), at + 20)
        was, should = found.text[near], self.text[near]
        return f" at character {at} of {len(self.text)}: {was!r}, not {should!r}"

    def __str__(self) -> str:
        return f"{self.finish}, {self.prompt_tokens} and {self.completion_tokens} tokens"


def read_exchange(incoming: Incoming) -> Exchange:
    """Parse an answer.

    Raises:
        BenchFailed: an event that is not OpenAI's.
    """
    if incoming.status and incoming.status != OK:
        words = b"".join(event for _, event in incoming.events).decode(errors="replace")
        return Exchange(incoming.sent_s, error=f"HTTP {incoming.status}: {words}")
    content_s: list[float] = []
    last: dict[str, Any] = {}
    for at_s, event in incoming.events:
        value = _value(event)
        last |= {key: value[key] for key in ("usage", "timings", "error") if value.get(key)}
        if _text(value):
            content_s.append(at_s)
    usage, timings = last.get("usage", {}), last.get("timings", {})
    error = last.get("error", {}).get("message", "")
    if incoming.done and not error and not usage:
        error = "the answer ended without its usage"
    return Exchange(
        sent_s=incoming.sent_s,
        content_s=tuple(content_s),
        end_s=incoming.done_s,
        board=",".join(timings.get("boards", ())) or incoming.headers.get("x-rkserve-board", ""),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        queue_ms=timings.get("queue_ms", 0.0),
        prefill_ms=timings.get("prefill_ms", 0.0),
        prefill_tokens=timings.get("prefill_tokens", 0),
        error=error,
    )


def read_text(incoming: Incoming) -> str:
    """Return the text of a streamed answer, or as much of it as is there."""
    return "".join(_text(_value(event)) for _, event in incoming.events)


def read_id(incoming: Incoming) -> str:
    """Return the id of a streamed answer, of which some event with data is there."""
    return str(next(value["id"] for _, event in incoming.events if (value := _value(event))))


def is_data(event: bytes) -> bool:
    """Return True if an event is more than a comment."""
    return event.startswith(b"data: ")


def _value(event: bytes) -> dict[str, Any]:
    field_name, _, text = event.partition(b": ")
    if not field_name or text == b"[DONE]":  # a comment, which keeps the connection open
        return {}
    if field_name != b"data":
        raise BenchFailed(f"not an event of an OpenAI stream: {event[:200]!r}")
    value: dict[str, Any] = json.loads(text)
    return value


def _text(value: dict[str, Any]) -> str:
    choices = value.get("choices") or [{}]
    choice = choices[0]
    return choice.get("text") or choice.get("delta", {}).get("content") or ""
