"""Traces: sessions with start times, messages and think times; saved, or made from a seed. Pure.

A trace is a file of JSON lines: one that says what it is and how it was made, then one for each
session. Servers and their answers are not part of it, unless a recorded answer replaces the
server's.

The same seed and shape give the same trace, on every Python. Each quantity has a generator of its
own, so that another number of turns does not move the arrivals. Only ``random()`` of the generators
is used: what the other methods do with it has changed between versions of Python.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from rkserve.bench.processes import BenchFailed, Json

FORMAT = "rkserve-trace/1"
_T = TypeVar("_T")
ASK = "Write 4000 tokens about story number {number}."
# Common words, most of them one token in most vocabularies.
TEXT = """
the time of people and water in house with river for letter on summer from garden at
window by mountain as morning about paper after road under light before music between
city through night over friend while table against winter without door into school
during market along story toward field behind train beyond family near island above
song until king across bread beside voice within forest below horse around ship upon
stone since glass
"""
WORDS = tuple(TEXT.split())
TURNS_SPREAD, LENGTH_SPREAD = 1.0, 0.5  # of Zipf's law over sessions; sigma of the log-normal
MOST = 4.0  # times the mean: lengths and pauses have long tails, and boards have a context limit


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, sent ``think_s`` after the end of the previous answer.

    ``answer`` continues the conversation; None takes the server's answer.
    """

    user: str
    max_tokens: Annotated[int, Field(ge=1)]
    think_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class TraceSession:
    """A conversation that begins ``at_s`` after the trace does.

    ``system`` is the number of its system prompt in the trace, or None. ``more`` is added to the
    body of each of its requests: ``priority`` or ``user``, or an adapter as ``model``.
    """

    name: str
    at_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    turns: Annotated[tuple[Turn, ...], Field(min_length=1)]
    system: Annotated[int, Field(ge=0)] | None = None
    more: dict[str, Any] = field(default_factory=dict)


_SESSION = TypeAdapter(TraceSession)


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
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise BenchFailed(f"{path}, line {number}: not a trace ({problem})") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        problem = f"{type(exc).__name__}: {exc}"
        raise BenchFailed(f"{path}, line {number}: not a trace ({problem})") from exc


def _head(value: Json) -> tuple[dict[str, Any], tuple[str, ...]]:
    if value["trace"] != FORMAT:
        raise ValueError(f"not {FORMAT}")
    return dict(value.get("made", {})), tuple(str(one) for one in value["systems"])


def _session(value: Json, systems: int) -> TraceSession:
    found = _SESSION.validate_python(value)
    if found.system is not None and found.system >= systems:
        raise ValueError(f"there is no system prompt {found.system}")
    return found


def _session_json(one: TraceSession) -> Json:
    fields: Json = _SESSION.dump_python(
        one, exclude_none=True, exclude=None if one.more else {"more"}
    )
    return fields


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


class Arrivals(str, Enum):
    """The arrival processes of sessions."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURSTS = "bursts"


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The parameters of a trace; lengths in words, which are about as many tokens.

    ``rate`` is sessions per second. Bursts are ``burst`` sessions at one moment, at the same mean
    rate. Turns are spread over the sessions by Zipf's law, ``turns`` on average: a few sessions
    talk much, most of them little. Which system prompt a session has follows it too, with exponent
    ``zipf``; 0 spreads them evenly. Lengths are log-normal with a sigma of ``spread``.
    """

    sessions: int = 100
    rate: float = 1.0
    arrivals: Arrivals = Arrivals.POISSON
    burst: int = 8
    turns: float = 1.0
    most_turns: int = 12
    think_s: float = 0.0
    systems: int = 0
    system_words: int = 200
    zipf: float = 1.0
    user_words: int = 40
    answer_tokens: int = 64
    spread: float = LENGTH_SPREAD
    priorities: tuple[int, ...] = ()


def make_trace(shape: TraceShape, seed: int) -> Trace:
    """Make a trace."""
    starts = arrivals(shape, _random(seed, "arrivals"))
    turns = turns_of(shape, _random(seed, "turns"))
    systems = tuple(
        text(_random(seed, f"system {number}"), shape.system_words)
        for number in range(shape.systems)
    )
    chosen = _random(seed, "systems")
    ranked = _random(seed, "priorities")
    sessions = tuple(
        TraceSession(
            name=f"s{number:05}",
            at_s=round(at_s, 6),
            turns=_turns(shape, seed, number, count),
            system=zipf_rank(chosen, shape.systems, shape.zipf) if systems else None,
            more={"priority": _pick(ranked, shape.priorities)} if shape.priorities else {},
        )
        for number, (at_s, count) in enumerate(zip(starts, turns, strict=True))
    )
    made = {"seed": seed, **asdict(shape), "arrivals": shape.arrivals.value}
    return Trace(sessions, systems, made)


def arrivals(shape: TraceShape, rng: Random) -> list[float]:
    """Return when the sessions begin, in seconds."""
    if shape.arrivals is Arrivals.CONSTANT:
        return [number / shape.rate for number in range(shape.sessions)]
    together = shape.burst if shape.arrivals is Arrivals.BURSTS else 1
    found: list[float] = []
    at_s = 0.0
    while len(found) < shape.sessions:
        found += [at_s] * min(together, shape.sessions - len(found))
        at_s += _exponential(rng) * together / shape.rate
    return found


def turns_of(shape: TraceShape, rng: Random) -> list[int]:
    """Return how many turns each session has: Zipf's law over sessions in a random order."""
    if shape.turns <= 1:
        return [1] * shape.sessions
    weights = [1 / (rank + 1) ** TURNS_SPREAD for rank in range(shape.sessions)]
    wanted = shape.turns * shape.sessions
    low, high = 0.0, wanted * shape.sessions
    for _ in range(60):  # the factor with which the capped counts add up to what is wanted
        factor = (low + high) / 2
        if sum(_count(shape, factor * weight) for weight in weights) < wanted:
            low = factor
        else:
            high = factor
    counts = [_count(shape, high * weight) for weight in weights]
    order = sorted(range(shape.sessions), key=lambda _: rng.random())
    return [counts[place] for place in order]


def zipf_rank(rng: Random, count: int, exponent: float) -> int:
    """Draw one of ``count`` ranks, the first ones most often."""
    weights = [1 / (rank + 1) ** exponent for rank in range(count)]
    left = rng.random() * sum(weights)
    for rank, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return rank
    return count - 1


def text(rng: Random, words: int) -> str:
    """Return so many words."""
    return " ".join(_pick(rng, WORDS) for _ in range(words))


def _turns(shape: TraceShape, seed: int, session: int, count: int) -> tuple[Turn, ...]:
    rng = _random(seed, f"session {session}")
    return tuple(_made_turns(shape, rng, session, count))


def _made_turns(shape: TraceShape, rng: Random, session: int, count: int) -> Iterator[Turn]:
    for number in range(count):
        words = _length(rng, shape.user_words, shape.spread)
        # First what differs, then what makes it long: two sessions share no more than the system.
        ask = ASK.format(number=1000 * session + number)
        think_s = min(_exponential(rng), MOST) * shape.think_s if number else 0.0
        tokens = _length(rng, shape.answer_tokens, shape.spread)
        yield Turn(f"{ask} {text(rng, words)}", tokens, round(think_s, 6))


def _length(rng: Random, mean: int, spread: float) -> int:
    """Draw from a log-normal distribution with this mean."""
    deviation = NormalDist().inv_cdf(min(max(rng.random(), 1e-9), 1 - 1e-9))
    drawn = mean * math.exp(spread * deviation - spread * spread / 2)
    return max(1, round(min(drawn, MOST * mean)))


def _count(shape: TraceShape, turns: float) -> int:
    return max(1, min(shape.most_turns, round(turns)))


def _exponential(rng: Random) -> float:
    return -math.log(1.0 - rng.random())


def _pick(rng: Random, of: Sequence[_T]) -> _T:
    return of[int(rng.random() * len(of))]


def _random(seed: int, purpose: str) -> Random:
    return Random(f"{seed} {purpose}")
