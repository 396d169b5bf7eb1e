"""The latest log lines of a process in memory, with the ids of their requests."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from rkserve.core.request_record import request_id
from rkserve.core.skew import crosses_versions

KEPT_LINES = 1000
KEPT_CHARS = 512 * 1024  # of all kept lines together
KEPT_ENGINE_LINES = 40  # of the engine, however many other lines follow them
MAX_LINE_CHARS = 4000
PAGE_LINES = 200
PAGE_CHARS = 64 * 1024  # a page shares the channel with tokens
# Attributes of records. By the second one Serve knows access lines, which a setting turns off.
ENGINE, ACCESS = "engine_pid", "serve_access_log"


@crosses_versions
@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line. ``number`` counts the lines of its process from 1.

    ``engine_pid`` is set where it is a line of the engine's, of the vendor's library in particular.
    """

    number: int
    time_s: float
    level: str
    logger: str
    message: str
    request_id: str = ""
    engine_pid: int = 0


@crosses_versions
@dataclass(frozen=True, slots=True)
class LogQuery:
    """A query of lines: those after number ``after``, or the last ``tail`` where that is None.

    With ``engine`` these include the engine's last lines, however many others have followed.
    """

    after: int | None = None
    tail: int = PAGE_LINES
    engine: bool = False


@crosses_versions
@dataclass(frozen=True, slots=True)
class LogPage:
    """Lines in order, up to number ``last``; with ``more`` there are others after it already.

    ``process`` differs after a restart, when numbers begin anew. ``source`` is the name of the
    process where the caller does not know it.
    """

    process: str
    lines: tuple[LogLine, ...] = ()
    last: int = 0
    more: bool = False
    source: str = ""


class LogRing(logging.Handler):
    """The latest log lines of this process. Threads may log at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.process = secrets.token_hex(8)
        self._lines: deque[LogLine] = deque()
        self._engine: deque[LogLine] = deque(maxlen=KEPT_ENGINE_LINES)
        self._number = self._chars = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, and drop the oldest ones beyond the limits."""
        message = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            # The end of a traceback names the error.
            trace = logging.Formatter().formatException(record.exc_info)
            message = f"{message}\n{trace[-MAX_LINE_CHARS:]}"
        self._number += 1
        line = LogLine(
            self._number,
            record.created,
            record.levelname,
            record.name,
            message[: 2 * MAX_LINE_CHARS],
            request_id(),
            getattr(record, ENGINE, 0),
        )
        self._lines.append(line)
        self._chars += len(line.message)
        if line.engine_pid:
            self._engine.append(line)
        while len(self._lines) > KEPT_LINES or self._chars > KEPT_CHARS:
            self._chars -= len(self._lines.popleft().message)

    def page(self, query: LogQuery) -> LogPage:
        """Return lines."""
        assert self.lock is not None  # ``Handler.__init__`` has made it
        with self.lock:
            if query.after is None:
                found = self._tail(query.tail, engine=query.engine)
            else:
                after = query.after
                found = (line for line in self._lines if line.number > after)
            lines: list[LogLine] = []
            chars = 0
            for line in found:
                chars += len(line.message)
                if lines and (chars > PAGE_CHARS or len(lines) >= PAGE_LINES):
                    return LogPage(self.process, tuple(lines), lines[-1].number, more=True)
                lines.append(line)
            return LogPage(self.process, tuple(lines), self._number)

    def _tail(self, count: int, *, engine: bool) -> Iterator[LogLine]:
        """Return the last lines, with ``engine`` after older ones of the engine."""
        if not count:
            return iter(())
        first = self._number - count
        last = [line for line in self._lines if line.number > first]
        oldest = last[0].number if last else self._number + 1
        words = self._engine if engine else ()
        return chain((line for line in words if line.number < oldest), last)
