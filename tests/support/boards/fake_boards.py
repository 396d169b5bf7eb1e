"""Scripted boards that obey ``BoardLink``, for everything of the Router that needs no Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.errors import BoardStartFailed, RkserveError
from rkserve.core.messages import (
    Accepted,
    CacheSource,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Timings,
    Usage,
)

# An event to yield, an error to raise, or a moment to wait for.
Step = Event | Exception | asyncio.Event


def report(board: str, **changes: Any) -> BoardReport:
    """A ready board whose replica is called like itself, with a queue of one."""
    known = {"model": "sim-chat", "state": BoardState.READY, "release": "1.3.0", "queue_limit": 1}
    return BoardReport(board, **{**known, "replica": f"replica of {board}", **changes})


def accepted(board: str, ignored: tuple[str, ...] = (), *, waits: bool = False) -> Accepted:
    """The board has taken the request."""
    return Accepted(board, "1.3.0", 0, ignored, waits=waits)


def finished(
    tokens: int = 2, reason: FinishReason = FinishReason.STOP, prompt: int = 5, cached: int = 0
) -> Finished:
    """An end in order."""
    timings = Timings(1.0, 20.0, prompt - cached, 30.0, tokens, 100.0)
    return Finished(reason, Usage(prompt, tokens, cached), timings)


def answer(board: str, *texts: str) -> list[Step]:
    """The events of an answer of one token per text."""
    deltas = [Delta(text, (100 + at,)) for at, text in enumerate(texts)]
    return [accepted(board), *deltas, finished(len(texts))]


@dataclass
class FakeBoards:
    """One group. ``scripts`` says what each replica does, call after call; the last one repeats."""

    reported: list[BoardReport]
    scripts: dict[str, list[Sequence[Step]]] = field(default_factory=dict)
    failure: BoardStartFailed | None = None
    trouble: Exception | None = None
    # What a replica says when a method of its board is called: an answer, an error, or how to
    # make one from the arguments. "" stands for every replica that is not named.
    says: dict[tuple[str, str], Any] = field(default_factory=dict)
    asked: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)
    opened: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    running: int = 0
    unreachable: bool = False  # no board has a connection
    new: bool = False  # a board has come since the last round of reports
    runs: bool = True  # in Serve's status, whether or not a board has reported

    @classmethod
    def answering(cls, *boards: str, text: str = "hello") -> FakeBoards:
        """Boards that all answer the same."""
        scripts = {f"replica of {b}": [answer(b, *text.split("|"))] for b in boards}
        return cls([report(b) for b in boards], {key: list(s) for key, s in scripts.items()})

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        self.opened.append((replica, request))
        scripts = self.scripts[replica]
        script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        self.running += 1
        try:
            for step in script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(0)
                    yield _stamped(step, request)
        finally:
            self.running -= 1
            self.closed.append(replica)

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.asked.append((replica, method, args))
        said = self.says.get((replica, method), self.says.get(("", method)))
        assert said is not None, f"nobody told {replica} what to say to {method}"
        assert timeout_s > 0
        if isinstance(said, Exception):
            raise said
        return said(*args) if callable(said) else said

    def cache_source(self, replica: str, tokens: int) -> CacheSource | None:
        return None if self.unreachable else CacheSource(replica, "host", 1, tokens, b"key")

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        for one in self.reported:
            with contextlib.suppress(RkserveError):
                take(await self.ask(one.replica, method, *args, timeout_s=timeout_s))

    @property
    def complete(self) -> bool:
        return True

    async def reports(self) -> list[BoardReport]:
        if self.trouble is not None:
            raise self.trouble
        return list(self.reported)

    def has_new(self) -> bool:
        return self.new

    async def has_running(self) -> bool:
        return self.runs

    async def start_failure(self) -> BoardStartFailed | None:
        return self.failure


def _stamped(event: Event, request: GenerateRequest) -> Event:
    """A board says which version it would begin with."""
    adapter = request.adapter
    if not isinstance(event, Accepted) or adapter is None or event.version != "default":
        return event
    return replace(event, version=f"{adapter.name}@{adapter.version}")


async def eventually(look: Callable[[], object]) -> None:
    """Let other tasks run until ``look`` returns something true."""
    for _ in range(10_000):
        if look():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")
