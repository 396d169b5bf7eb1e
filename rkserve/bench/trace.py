"""Traces: sessions with start times, messages and think times. Pure.

A trace is a file of JSON lines: one that says what it is and how it was made, then one for each
session. Servers and their answers are not part of it, unless a recorded answer replaces the
server's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rkserve.bench.harness.child import BenchFailed, Json

FORMAT = "rkserve-trace/1"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, sent ``think_s`` after the end of the previous answer.

    ``answer`` continues the conversation; None takes the server's answer.
    """

    user: str
    max_tokens: int
    think_s: float = 0.0
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class TraceSession:
    """A conversation that begins ``at_s`` after the trace does.

    ``system`` is the number of its system prompt in the trace, or None. ``more`` is added to the
    body of each of its requests: ``priority`` or ``user``, or an adapter as ``model``.
    """

    name: str
    at_s: float
    turns: tuple[Turn, ...]
    system: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order in which they begin. ``made`` says how, for the report."""

    sessions: tuple[TraceSession, ...]
    systems: tuple[str, ...] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """The number of requests."""
        return sum(len(one.turns) for one in self.sessions)

    @property
    def span_s(self) -> float:
        """The start of the last session."""
        return self.sessions[-1].at_s if self.sessions else 0.0

    def first(self, sessions: int) -> Trace:
        """Return its beginning."""
        return Trace(self.sessions[:sessions], self.systems, self.made)

    def opening(self, session: TraceSession, salt: str = "") -> list[Json]:
        """Return what a conversation begins with.

        The salt is put in front, so that no server still has the beginning from another run.
        """
        system = "" if session.system is None else self.systems[session.system]
        text = " ".join(part for part in (salt and f"Run {salt}.", system) if part)
        return [{"role": "system", "content": text}] if text else []


def write_trace(trace: Trace, path: Path) -> None:
    """Save a trace."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines_of(trace))


def lines_of(trace: Trace) -> Iterator[str]:
    """Yield a trace's lines."""
    yield _line({"trace": FORMAT, "made": dict(trace.made), "systems": list(trace.systems)})
    for one in trace.sessions:
        yield _line(_session_json(one))


def read_trace(path: Path) -> Trace:
    """Read what was saved. Raises ``BenchFailed`` with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise BenchFailed(f"{path} cannot be read: {exc}") from exc
    head, *rest = [(number, line) for number, line in enumerate(lines, 1) if line.strip()] or [
        (1, "{}")
    ]
    made, systems = _parsed(path, *head, _head)
    sessions = [
        _parsed(path, number, line, lambda value: _session(value, len(systems)))
        for number, line in rest
    ]
    return Trace(tuple(sorted(sessions, key=lambda one: one.at_s)), systems, made)


def _parsed(path: Path, number: int, line: str, read: Callable[[Json], _T]) -> _T:
    try:
        return read(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        said = f"{type(exc).__name__}: {exc}"
        raise BenchFailed(f"{path}, line {number}: not a trace ({said})") from exc


def _head(value: Json) -> tuple[dict[str, Any], tuple[str, ...]]:
    if value["trace"] != FORMAT:
        raise ValueError(f"not {FORMAT}")
    return dict(value.get("made", {})), tuple(str(one) for one in value["systems"])


def _session(value: Json, systems: int) -> TraceSession:
    turns = tuple(_turn(one) for one in value["turns"])
    system = value.get("system")
    if system is not None and not 0 <= int(system) < systems:
        raise ValueError(f"there is no system prompt {system}")
    if not turns:
        raise ValueError("a session without turns")
    at_s = float(value["at_s"])
    if not 0 <= at_s < float("inf"):
        raise ValueError(f"at_s is {at_s}")
    more = dict(value.get("more", {}))
    return TraceSession(
        str(value["name"]), at_s, turns, None if system is None else int(system), more
    )


def _turn(value: Json) -> Turn:
    answer = value.get("answer")
    turn = Turn(
        user=str(value["user"]),
        max_tokens=int(value["max_tokens"]),
        think_s=float(value.get("think_s", 0.0)),
        answer=None if answer is None else str(answer),
    )
    if turn.max_tokens < 1 or not 0 <= turn.think_s < float("inf"):
        raise ValueError(
            "a turn needs max_tokens of 1 or more, and a think_s that is no less than 0"
        )
    return turn


def _session_json(one: TraceSession) -> Json:
    turns = [
        {"user": turn.user, "max_tokens": turn.max_tokens, "think_s": turn.think_s}
        | ({} if turn.answer is None else {"answer": turn.answer})
        for turn in one.turns
    ]
    said: Json = {"name": one.name, "at_s": one.at_s, "turns": turns}
    if one.system is not None:
        said["system"] = one.system
    return said | ({"more": dict(one.more)} if one.more else {})


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
