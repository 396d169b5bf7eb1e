"""Answers and control calls as clients of a cluster under load see them. Pure.

Answers carry the versions that they are stamped with; ``checks`` judges them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.exchange import Exchange, is_data, read_exchange, read_text
from rkserve.bench.connection import OK, Incoming

ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one answer, from ``start`` to before ``end``, and the version that wrote them."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. ``prompt`` is the number of its prompt.

    ``stamp`` is what its headers say of its version, ``version`` what its last chunk says, and
    ``spans`` which tokens were whose; each is empty where nothing was said. ``early`` headers were
    sent while no board had accepted it, and cannot name a version. It was ``continued`` so often on
    another board, and waited ``lost_ms`` for that from when the losses were noticed.
    """

    exchange: Exchange
    prompt: int
    text: str
    finish: str = ""
    stamp: str = ""
    version: str = ""
    spans: tuple[Span, ...] = ()
    paused_ms: float = 0.0
    continued: int = 0
    lost_ms: float = 0.0
    early: bool = False

    @property
    def whole(self) -> bool:
        """True if it was answered to its end or refused; False if its client left it."""
        return self.exchange.end_s is not None or bool(self.exchange.error)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Answer:
        """Read what ``asdict`` made of one."""
        spans = tuple(Span(**span) for span in value["spans"])
        exchange = Exchange.from_json(value["exchange"])
        return cls(**{**value, "exchange": exchange, "spans": spans})


@dataclass(frozen=True, slots=True)
class Call:
    """A control call and its answer. Times in seconds of the clients' clock.

    ``answered_s`` lies behind everything that had arrived when the answer did, and before
    everything that came later.
    """

    what: str
    asked_s: float
    answered_s: float
    status: int
    body: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def latencies_ms(self) -> list[float]:
        """The time that each board reports for it."""
        results: dict[str, dict[str, Any]] = self.body.get("results", {})
        return [one["latency_ms"] for one in results.values() if one.get("latency_ms") is not None]

    @property
    def took_ms(self) -> float:
        """From asking to the answer."""
        return (self.answered_s - self.asked_s) * 1e3


def read_answer(incoming: Incoming, prompt: int) -> Answer:
    """Note what a streamed answer was. Raises ``BenchFailed`` for what is no OpenAI stream."""
    exchange = read_exchange(incoming)
    last: dict[str, Any] = {}
    if incoming.status == OK:
        for value in _chunks(incoming):
            choice = (value.get("choices") or [{}])[0]
            told = {**choice, **value}
            names = ("finish_reason", "weight_version", "weight_versions", "timings")
            last |= {name: told[name] for name in names if told.get(name)}
    return Answer(
        exchange=exchange,
        prompt=prompt,
        text=read_text(incoming) if incoming.status == OK else "",
        finish=last.get("finish_reason", ""),
        stamp=incoming.headers.get("x-weight-version", ""),
        version=last.get("weight_version", ""),
        spans=tuple(
            Span(one["version"], one["start"], one["end"])
            for one in last.get("weight_versions", ())
        ),
        paused_ms=last.get("timings", {}).get("paused_ms", 0.0),
        continued=last.get("timings", {}).get("continued", 0),
        lost_ms=last.get("timings", {}).get("lost_ms", 0.0),
        early=incoming.status == OK and "x-rkserve-board" not in incoming.headers,
    )


def read_call(what: str, asked_s: float, answered_s: float, incoming: Incoming) -> Call:
    """Note what a control call was answered; what is not JSON is kept as its error's message."""
    words = b"\n\n".join(event for _, event in incoming.events).decode(errors="replace")
    try:
        body = json.loads(words)
    except json.JSONDecodeError:
        body = {"error": {"message": words}}
    return Call(what, asked_s, answered_s, incoming.status, body)


def _chunks(incoming: Incoming) -> list[dict[str, Any]]:
    texts = (event.partition(b": ")[2] for _, event in incoming.events if is_data(event))
    return [json.loads(text) for text in texts if text != b"[DONE]"]
