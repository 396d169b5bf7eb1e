"""A board whose engines are fakes, and what tests ask of it."""

from __future__ import annotations

import asyncio
import inspect
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from rkserve.board.answer.hooks import HookFactory
from rkserve.board.board import Board
from rkserve.board.engine.protocol import RunCommand
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import BoardState
from rkserve.core.errors import RkserveError
from rkserve.core.messages import Delta, Event, Finished, FinishReason, GenerateRequest
from tests.support.boards.fakes import EOS, QUIRKS, FakeEngine, Script, tokens_of
from tests.support.boards.own_time import run_loop

PATIENCE = RunTimeouts(first_token_s=0.3, prefill_per_token_s=0.0, token_s=0.3, abort_s=0.1)
SETTINGS = BoardSettings(
    "b", "m", context_len=64, eos_ids=frozenset({EOS}), patience=PATIENCE, quarantine_s=0.05
)
SPOKEN = 1000  # ids of ``talker`` are not below
PLAIN = Script([*tokens_of("Hel", "lo"), (EOS, b"")])


def request(*ids: int, max_tokens: int = 8, **extra: Any) -> GenerateRequest:
    return GenerateRequest("same for all", "m", ids or (1, 2, 3), max_tokens, **extra)


class Bench:
    """A board whose engines are fakes: the first runs ``scripts`` in turn, then ``PLAIN``."""

    def __init__(
        self,
        *scripts: Script,
        settings: BoardSettings = SETTINGS,
        per_run: bool = True,
        quirks: Mapping[str, bool] | None = None,
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.starts: list[Callable[[], Awaitable[None]]] = []
        self.scripts = list(scripts)
        self._per_run = per_run
        self._quirks = QUIRKS | dict(quirks or {})
        self._n_batch = settings.n_batch
        self.board = Board(settings, self._start)

    async def _start(self, weights: Path | None) -> FakeEngine:
        if self.starts:
            await self.starts.pop(0)()
        engine = FakeEngine(
            self._next, per_run=self._per_run, n_batch=self._n_batch, quirks=self._quirks
        )
        self.engines.append(engine)
        return self.engines[-1]

    def _next(self, command: RunCommand) -> Script:
        return self.scripts.pop(0) if self.scripts else PLAIN

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


class Listener:
    """A client that reads its stream in the background, and applies what is taken back."""

    def __init__(self, board: Board, asked: GenerateRequest, *hooks: HookFactory) -> None:
        self.asked = asked
        self.text = ""
        self.ids: list[int] = []
        self.accepted = False
        self.finished: Finished | None = None
        self.error: RkserveError | None = None
        self.task = asyncio.create_task(self._listen(board, hooks))

    async def _listen(self, board: Board, hooks: tuple[HookFactory, ...]) -> None:
        try:
            async with aclosing(board.generate(self.asked, hooks, self._take)) as events:
                async for event in events:
                    self._take(event)
        except RkserveError as exc:
            self.error = exc

    def _take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.text = self.text[: len(self.text) - event.retract] + event.text
            self.ids += event.token_ids
        elif isinstance(event, Finished):
            self.finished = event
        else:
            self.accepted = True

    async def end(self) -> tuple[str, FinishReason]:
        """Return the whole answer; raise what ended it."""
        await self.task
        if self.error is not None:
            raise self.error
        assert self.finished is not None
        return self.text, self.finished.reason

    async def hang_up(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def talker(length: int) -> Callable[[int, tuple[int, ...]], tuple[int, bytes]]:
    """Return a model that says ``length`` words, each made of all that its context holds."""

    def next_token(entry: int, context: tuple[int, ...]) -> tuple[int, bytes]:
        said = sum(token_id >= SPOKEN for token_id in context)
        if said >= length:
            return EOS, b""
        token_id = SPOKEN + zlib.crc32(repr(context).encode()) % 1000
        return token_id, b"%d " % token_id

    return next_token


def spoken(prompt: tuple[int, ...], length: int) -> str:
    """Return what ``talker`` says when nobody interrupts it."""
    model, context, text = talker(length), list(prompt), ""
    while (token := model(0, tuple(context)))[0] != EOS:
        context.append(token[0])
        text += token[1].decode()
    return text


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces; the loop's own limit applies."""
    while not condition():  # noqa: ASYNC110 - boards have no event for each of their states
        await asyncio.sleep(0.001)


def board_test(
    bench: Callable[[], Bench],
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an async test within a started board that must be well afterwards."""

    def decorate(body: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        async def main(**params: Any) -> None:
            async with bench().running() as made:
                await body(made, **params)

        def test(**params: Any) -> None:
            run_loop(main(**params))

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        # pytest asks for the test's own parameters, the first of which is the bench, by an
        # attribute that typeshed knows on no function.
        signature = inspect.signature(body)
        own = list(signature.parameters.values())[1:]
        test.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined] # see above
        return test

    return decorate
