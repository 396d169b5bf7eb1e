"""Both ends of the channel over real sockets, with calls in place of Ray's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import BoardReport, Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.logs import LogLine, LogPage, LogQuery
from rkserve.core.messages import (
    CacheOffer,
    CacheQuery,
    Delta,
    Embedded,
    EmbedRequest,
    Event,
    GenerateRequest,
    PassDelta,
)
from rkserve.deployments.board_link import RayLink
from rkserve.transport.client import ChannelClient
from rkserve.transport.server import ChannelAddress, ChannelServer
from tests.support.boards.fake_boards import Step, accepted, finished, report

# Silence that nobody takes for a loss, however slow the machine is.
PATIENT = ChannelConfig(silence_s=120.0, retry_s=0.01)
ENCRYPTED = PATIENT.model_copy(update={"encrypt": "always"})
HASTY = ChannelConfig(heartbeat_s=0.05, silence_s=0.5, retry_s=0.01)


class Board:
    """One scripted board with an outlet. ``running`` are its generations."""

    def __init__(self, name: str, config: ChannelConfig = PATIENT) -> None:
        self.name = name
        self.outlet = ChannelServer(name, config, Callee(self))
        self.steps: list[Step] = []
        self.running = 0
        self.requests: list[GenerateRequest] = []
        self.streamed = 0  # through Ray
        self.reports: list[str] = []  # the ways by which it was asked for one
        self.file: list[CacheOffer | bytes | Exception] = []  # answers a query for a prompt cache
        self.queries: list[CacheQuery] = []
        self.sending = 0
        self.told: list[int] = []  # epochs; those whose call was given up a second time, negative
        self.mute: asyncio.Event | None = None  # it says nothing of itself until then
        self.offers: Callable[[], ChannelAddress | None] = lambda: self.outlet.address
        table = SimpleNamespace(curr_replicas={})
        self._router = SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=table))
        self.listed: dict[str, Any] = table.curr_replicas

    async def events(self) -> AsyncGenerator[Event, None]:
        """What a generation brings."""
        self.running += 1
        try:
            for step in list(self.steps):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(0)  # the loop goes round
                    yield step
        finally:
            self.running -= 1

    # -- as the handle of its deployment ------------------------------------------------------

    def options(self, **_: Any) -> Board:
        return self

    @property
    def generate(self) -> Any:
        return SimpleNamespace(remote=self._stream)

    @property
    def channel(self) -> Any:
        return SimpleNamespace(remote=lambda: Call(self._offer()))

    @property
    def report(self) -> Any:
        return SimpleNamespace(remote=lambda: Call(self._report()))

    @property
    def adopt(self) -> Any:
        return SimpleNamespace(remote=lambda one: Call(Callee(self).adopt(one)))

    def broadcast(self, _: str) -> Any:
        async def results_async(**_: Any) -> list[Any]:
            replica = f"replica of {self.name}"
            self.listed[replica] = SimpleNamespace(replica_id=SimpleNamespace(unique_id=replica))
            return [await self._report()]

        return SimpleNamespace(results_async=results_async)

    def _stream(self, _: GenerateRequest) -> Any:
        self.streamed += 1
        events = self.events()
        return SimpleNamespace(__anext__=events.__anext__, cancel=lambda: None)

    async def _report(self) -> BoardReport:
        self.reports.append("ray")
        return report(self.name)

    async def _offer(self) -> ChannelAddress | None:
        return self.offers()


class Call:
    """A call of Ray's: it goes on by itself, is awaited, and may be cancelled."""

    def __init__(self, work: Awaitable[Any]) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class Callee:
    """What Routers call over their connections."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def generate(
        self, request: GenerateRequest, pass_on: PassDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events, but for every second delta, which is passed on."""
        self._board.requests.append(request)
        deltas = 0
        async with aclosing(self._board.events()) as events:
            async for event in events:
                deltas += isinstance(event, Delta)
                if isinstance(event, Delta) and pass_on is not None and deltas % 2:
                    pass_on(event)
                else:
                    yield event

    async def embed(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        self._board.requests.append(request)
        yield accepted(self._board.name)
        yield Embedded(tuple(bytes(4 * len(ids)) for ids in request.inputs))
        yield finished(0)

    async def report(self) -> BoardReport:
        self._board.reports.append("channel")
        if self._board.mute is not None:
            await self._board.mute.wait()
        return report(self._board.name)

    async def emitted(self) -> Emitted:
        return Emitted(self._board.name, (("r", 7),))

    async def logs(self, query: LogQuery) -> LogPage:
        line = LogLine(query.tail, 1.5, "INFO", "rkserve.x", "é", "r/0", 7)
        return LogPage("p", (line,), query.tail)

    async def send_cache(self, query: CacheQuery) -> AsyncGenerator[CacheOffer | bytes, None]:
        self._board.queries.append(query)
        self._board.sending += 1
        try:
            for part in self._board.file:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self._board.sending -= 1

    async def adopt(self, desired: Desired) -> Adoption:
        """Wait for the end of what is told, as a pause does."""
        self._board.told.append(desired.epoch)
        try:
            if self._board.mute is not None:
                await self._board.mute.wait()
        except asyncio.CancelledError:
            self._board.told.append(-desired.epoch)
            raise
        if self._board.steps and isinstance(refusal := self._board.steps[0], Exception):
            raise refusal
        return Adoption(self._board.name, desired.epoch, emitted=(("r", 7),))


@asynccontextmanager
async def router(
    *boards: Board,
    config: ChannelConfig = PATIENT,
    connected: bool = True,
    report_timeout_s: float = 60.0,
) -> AsyncIterator[tuple[ChannelClient, list[RayLink]]]:
    """A Router with a link to each board; both ends are closed behind it."""
    channels = ChannelClient(config)
    links = [RayLink(board, board.name, report_timeout_s, channels) for board in boards]
    for board in boards:
        if board.outlet.address is None and config.enabled:
            await board.outlet.listen("127.0.0.1")
    try:
        if connected:
            await connect(channels, boards, links)
        yield channels, links
    finally:
        await channels.close()
        for board in boards:
            await board.outlet.close()


async def connect(
    channels: ChannelClient, boards: Sequence[Board], links: Sequence[RayLink]
) -> None:
    """Have reports collected until there is a connection to every board."""
    while any(channels.line(f"replica of {board.name}") is None for board in boards):
        for link in links:
            await link.reports()
        await asyncio.sleep(0.005)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; the test's own limit is the only one."""
    while not holds():  # noqa: ASYNC110 # nothing tells of it
        await asyncio.sleep(0.005)


async def read(link: RayLink, board: Board) -> list[Event]:
    """Generate on a board and return all events."""
    request = GenerateRequest("r/0", "m", (1,), 4)
    return [event async for event in link.open(request, f"replica of {board.name}")]
