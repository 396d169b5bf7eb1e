"""The record of one request at a Router: its caller, generations, and the times of their parts.

It is filled while the request is served, and read once at its end: for the access line and for
traces. Nothing is written for a token apart from the first. All times are of the monotonic clock,
and those of boards are the times at which the Router got to know of the events.

A task's context has the request that it works for, whose id is on its log lines. Work that outlives
a request, such as a connection or the start of an engine, is begun ``apart`` from it.
"""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rkserve.core.errors import RkserveError
from rkserve.core.messages import Accepted, Delta, Embedded, Event, Finished, QueueChange

T = TypeVar("T")
MAX_FOREIGN_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")


@dataclass(slots=True)
class LoggedRequest:
    """The request that a task works for. ``id`` is on its log lines."""

    id: str


_current: contextvars.ContextVar[LoggedRequest | None] = contextvars.ContextVar(
    "rkserve_request", default=None
)


def current_request() -> LoggedRequest | None:
    """Return the request of this task's context."""
    return _current.get()


def log_for(request: LoggedRequest | str) -> None:
    """Set the request of this task's context; later changes of its id count."""
    _current.set(LoggedRequest(request) if isinstance(request, str) else request)


def request_id() -> str:
    """Return the id of the request of this task's context, empty without one."""
    request = _current.get()
    return "" if request is None else request.id


def apart(begin: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function in a context without a request, such as one that starts a task."""
    return contextvars.Context().run(begin, *args, **options)


def safe_id(foreign: str) -> str:
    """Return a client's id of a request as it may be logged: few kinds of characters, and short."""
    return _UNSAFE.sub("_", foreign[:MAX_FOREIGN_CHARS])


MAX_VISITS = 128  # a call for vectors of many texts has many generations
NS = 1_000_000_000


def now_s() -> float:
    """Return the time of the monotonic clock."""
    return time.monotonic()


@dataclass(slots=True)
class Interval:
    """A part of a request's time. ``failure`` is the code of the error that ended it."""

    begun_s: float
    ended_s: float | None = None
    failure: str = ""


@dataclass(slots=True)
class BoardVisit:
    """A generation's time at one board, from the choice of the board.

    It has the board from ``running_s`` on: with its acceptance, or after a wait in the board's
    queue. ``expected_tokens`` of its prompt were expected in the KV cache there. ``before_tokens``
    of the answer are those of earlier boards.
    """

    board: str
    begun_s: float
    before_tokens: int = 0
    expected_tokens: int = 0
    accepted_s: float | None = None
    running_s: float | None = None
    first_s: float | None = None  # token, or vector
    ended_s: float | None = None
    failure: str = ""
    why: str = ""  # the kind of loss, where another board goes on
    finished: Finished | None = None
    embeds: bool = False

    def observe(self, event: Event) -> None:
        """Process an event before the first token, or the last one."""
        now_s = time.monotonic()
        if isinstance(event, Delta | Embedded):
            if isinstance(event, Embedded) or event.token_ids:
                self.first_s = now_s
                self.running_s = self.running_s or now_s
        elif isinstance(event, Accepted):
            self.board, self.accepted_s = event.board_id, now_s
            self.running_s = None if event.waits else now_s
        elif isinstance(event, QueueChange):
            self.running_s = None if event.waits else now_s
        elif isinstance(event, Finished):
            self.finished, self.ended_s = event, now_s


@dataclass(slots=True)
class GenerationRecord:
    """The record of one generation: its waits at the Router, and its visits of boards."""

    request_id: str
    waits: list[Interval] = field(default_factory=list)
    visits: list[BoardVisit] = field(default_factory=list)
    continued: int = 0

    def wait(self) -> Interval:
        """Begin a wait for a board."""
        found = Interval(time.monotonic())
        if len(self.waits) < MAX_VISITS:
            self.waits.append(found)
        return found

    def left(self, visit: BoardVisit, continued: int) -> None:
        """End a visit; the generation has failed over so many times before."""
        visit.ended_s = visit.ended_s or time.monotonic()
        self.continued = continued

    def visit(self, replica: str, tokens: int, expected: int, *, embeds: bool) -> BoardVisit:
        """Begin a visit of a board, after ``tokens`` of the answer."""
        found = BoardVisit(replica, time.monotonic(), tokens, expected, embeds=embeds)
        if len(self.visits) < MAX_VISITS:
            self.visits.append(found)
        return found


class RequestTrace(Protocol):
    """The trace of one request."""

    @property
    def trace_id(self) -> str:
        """The trace's id in hexadecimal digits."""

    @property
    def traceparent(self) -> str:
        """The header of the answer."""

    @property
    def sampled(self) -> bool:
        """Return whether it is recorded."""

    @property
    def wants_texts(self) -> bool:
        """Return whether prompts and answers are recorded."""

    def end(self, record: RequestRecord) -> None:
        """Send the spans of the request, which is over."""


class Tracing(Protocol):
    """The recording of traces."""

    def begin(self, record: RequestRecord, headers: Mapping[str, str]) -> RequestTrace:
        """Begin the trace of a request with these headers, or continue its client's."""


@dataclass(slots=True)
class RequestRecord(LoggedRequest):
    """One request. ``id`` is that of its answer as soon as there is one.

    ``foreign_id`` is the client's own. ``error`` is the code of an error, ``left`` tells of a
    client that hung up. ``parameters`` are those of the request with their names in its API.
    """

    method: str = ""
    route: str = ""
    foreign_id: str = ""
    status: int = 0
    key: str = ""
    models: frozenset[str] = frozenset()  # those that the key is for; all if empty
    model: str = ""
    adapter: str = ""
    operation: str = ""  # chat, text_completion, embeddings or rerank
    stream: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: list[str] = field(default_factory=list)  # by choice
    error: str = ""
    left: bool = False
    begun_s: float = field(default_factory=now_s)
    begun_ns: int = field(default_factory=time.time_ns)  # of the clock on the wall
    first_s: float | None = None
    ended_s: float | None = None
    grammar: Interval | None = None
    generations: list[GenerationRecord] = field(default_factory=list)
    trace: RequestTrace | None = None
    input: Any = None  # only where the trace wants texts
    output: list[str] = field(default_factory=list)

    @property
    def boards(self) -> list[str]:
        """The boards in the order of the first visits."""
        visits = [visit for one in self.generations for visit in one.visits]
        return list(dict.fromkeys(visit.board for visit in sorted(visits, key=_begun)))

    @property
    def continued(self) -> int:
        """The number of failovers."""
        return sum(one.continued for one in self.generations)

    def at_ns(self, moment_s: float) -> int:
        """Return a moment of the monotonic clock as nanoseconds since 1970."""
        return self.begun_ns + int((moment_s - self.begun_s) * NS)

    def prompted(self, tokens: int) -> int:
        """Note the tokens of the prompts, and return them."""
        self.prompt_tokens = tokens
        return tokens

    def answered(self, index: int, delta: Delta) -> None:
        """Note a part of an answer whose trace has texts."""
        text = self.output[index]
        self.output[index] = text[: len(text) - delta.retract] + delta.text

    @contextmanager
    def checks_grammar(self) -> Iterator[None]:
        """Note the time of the check of the request's grammar, and its error."""
        self.grammar = Interval(time.monotonic())
        try:
            yield
        except BaseException as exc:
            self.grammar.failure = code_of(exc)
            raise
        finally:
            self.grammar.ended_s = time.monotonic()


def code_of(exc: BaseException) -> str:
    """Return the code of the error that ended a part of a request; of a hang-up, ``cancelled``."""
    if isinstance(exc, RkserveError):
        return exc.code or exc.kind
    return "internal_error" if isinstance(exc, Exception) else "cancelled"


def _begun(visit: BoardVisit) -> float:
    return visit.begun_s


def record_of_request() -> RequestRecord:
    """Return the record of the request of this task's context, or one for none."""
    found = current_request()
    return found if isinstance(found, RequestRecord) else RequestRecord("")


def record_generation(request_id: str) -> GenerationRecord:
    """Begin the record of a generation of the request of this task's context."""
    made = GenerationRecord(request_id)
    generations = record_of_request().generations
    if len(generations) < MAX_VISITS:
        generations.append(made)
    return made
