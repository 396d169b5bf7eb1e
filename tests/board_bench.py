"""A board whose engines are fakes, and what tests ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fakes import EOS, FakeEngine, Script, run_loop, tokens_of

from rkserve.board.board import Board, BoardSettings
from rkserve.board.engine import RunCommand
from rkserve.board.watchdog import Patience
from rkserve.messages import (
    BoardState,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
)

PATIENCE = Patience(first_token_s=0.3, prefill_per_token_s=0.0, token_s=0.3, abort_s=0.1)
SETTINGS = BoardSettings(
    "b", "m", context_len=64, eos_ids=frozenset({EOS}), patience=PATIENCE, quarantine_s=0.05
)
PLAIN = Script([*tokens_of("Hel", "lo"), (EOS, b"")])


def request(*ids: int, max_tokens: int = 8, **extra: Any) -> GenerateRequest:
    return GenerateRequest("same for all", "m", ids or (1, 2, 3), max_tokens, **extra)


class Bench:
    """A board whose engines are fakes: the first runs ``scripts`` in turn, then ``PLAIN``."""

    def __init__(
        self, *scripts: Script, settings: BoardSettings = SETTINGS, per_run: bool = True
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.starts: list[Callable[[], Awaitable[None]]] = []
        self._scripts = list(scripts)
        self._per_run = per_run
        self.board = Board(settings, self._start)

    async def _start(self) -> FakeEngine:
        if self.starts:
            await self.starts.pop(0)()
        self.engines.append(FakeEngine(self._next, per_run=self._per_run))
        return self.engines[-1]

    def _next(self, command: RunCommand) -> Script:
        return self._scripts.pop(0) if self._scripts else PLAIN

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    @property
    def state(self) -> BoardState:
        return self.board.report().state

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        """Start the board; on the way out it must be able to answer, unless it may not."""
        await self.board.start()
        try:
            yield self
            if self.state in (BoardState.READY, BoardState.RECOVERING):
                assert await answer(self.board) == ("Hello", FinishReason.STOP)
                report = self.board.report()
                assert (report.running, report.queued) == (0, 0)
        finally:
            await self.board.stop()


async def collect(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with aclosing(events):
        return [event async for event in events]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def answer(board: Board, *ids: int, **extra: Any) -> tuple[str, FinishReason]:
    events = await collect(board.generate(request(*ids, **extra)))
    finished = events[-1]
    assert isinstance(finished, Finished)
    return text_of(events), finished.reason


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a test cannot be told of; the loop's own limit applies."""
    while not condition():  # noqa: ASYNC110 - the board owes nobody an event
        await asyncio.sleep(0.001)


def board_test(
    bench: Callable[[], Bench],
) -> Callable[[Callable[[Bench], Any]], Callable[[], None]]:
    """Run an async test within a started board that must be well afterwards."""

    def decorate(body: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def main() -> None:
            async with bench().running() as made:
                await body(made)

        def test() -> None:
            run_loop(main())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate
