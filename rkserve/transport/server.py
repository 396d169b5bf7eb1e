"""The board's end of the channel: a listening socket for Routers, and the calls that they make.

It carries any stream of events and any answer, and knows neither Ray nor boards.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import BoardReport, Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.errors import BoardFailed, RkserveError
from rkserve.core.logs import LogPage, LogQuery
from rkserve.core.messages import (
    CacheOffer,
    CacheQuery,
    Delta,
    EmbedRequest,
    Event,
    GenerateRequest,
    PassDelta,
    merged,
)
from rkserve.core.skew import crosses_versions
from rkserve.transport import codec
from rkserve.transport.cache_transfer import CacheSender, cache_key
from rkserve.transport.codec import MalformedMessage
from rkserve.transport.connection import (
    BoardHandshake,
    ChannelConnection,
    Disconnect,
    Heartbeat,
    new_key,
)
from rkserve.transport.encryption import BoardIdentity, new_identity

log = logging.getLogger(__name__)

ITEMS = 32  # per frame: that many whole answers fit into ``MAX_FRAME``
MAX_UNPROVEN = 64  # connections that have not completed the handshake


@crosses_versions
@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """The address of a board's channel, secret to the Routers of its application."""

    board_id: str
    host: str
    port: int
    key: bytes = field(repr=False)  # must not be logged
    fingerprint: bytes = b""  # SHA-256 of the certificate; empty where nothing is encrypted


class BoardMethods(Protocol):
    """The methods of a board that Routers and the Coordinator call; raise ``RkserveError``."""

    def generate(
        self, request: GenerateRequest, pass_on: PassDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation, but for deltas that ``pass_on`` got at once."""

    def embed(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of one embedding request."""

    def report(self) -> Awaitable[BoardReport]:
        """Return the board's report."""

    def emitted(self) -> Awaitable[Emitted]:
        """Return the number of tokens emitted by each generation."""

    def adopt(self, desired: Desired) -> Awaitable[Adoption]:
        """Apply the desired state."""

    def logs(self, query: LogQuery) -> Awaitable[LogPage]:
        """Return lines of the board's log."""

    def send_cache(self, query: CacheQuery) -> AsyncGenerator[CacheOffer | bytes, None]:
        """Yield the offer of a prompt cache file, then its content."""


class RouterConnection:
    """The calls of one Router. Each is a task, cancelled when its reader leaves."""

    def __init__(self, server: ChannelServer, side: BoardHandshake, pulse: Heartbeat) -> None:
        self._server = server
        self._board_id, self._callee = server.board_id, server.callee
        self._side = side
        self.line = ChannelConnection(side, pulse, self)
        self.tasks: dict[int, asyncio.Task[None]] = {}  # the calls in progress, by stream
        # By stream: an event, an encoded answer or error, or None for its end.
        self._waiting: list[tuple[int, Event | list[Any] | None]] = []
        self._last: dict[int, int] = {}  # by stream: the index of its last item in ``_waiting``
        self._due = False

    def put(self, stream: int, event: Event | None) -> None:
        """Send an event, or None for the end of the stream.

        Items of one iteration of the event loop share a frame. Items for a Router that does not
        read are merged, so that they never take more memory than the answers themselves.
        """
        at = self._last.get(stream)
        before = None if at is None else self._waiting[at][1]
        if at is not None and isinstance(before, Delta) and isinstance(event, Delta):
            whole = merged(before, event)
            if whole is not None:
                self._waiting[at] = (stream, whole)
                return
        self._last[stream] = len(self._waiting)
        self._send(stream, event)

    def _flush(self) -> None:
        self._due = False
        if self.line.full or not self._waiting:
            return
        items = [_item(stream, item) for stream, item in self._waiting]
        self._waiting.clear()
        self._last.clear()
        for start in range(0, len(items), ITEMS):
            self.line.send(items[start : start + ITEMS])

    def opened(self) -> None:
        """Leave the connection of another board, which may read cache files only, to its sender."""
        if self._side.is_limited:
            server = self._server
            server.connections.discard(self)
            server.senders.add(self.line)
            ended = partial(server.senders.discard, self.line)
            sender = CacheSender(self._board_id, self.line, self._callee.send_cache, ended)
            self.line.hand_to(sender)

    def handle_raw(self, _data: bytes) -> None:
        """Refuse raw bytes. Raises ``MalformedMessage``."""
        raise MalformedMessage("raw bytes where a call was expected")

    def handle(self, items: list[list[Any]]) -> None:
        """Handle calls and cancellations of streams. Raises ``MalformedMessage``."""
        for item in items:
            stream = item[0]
            if len(item) == 1:
                if (task := self.tasks.pop(stream, None)) is not None:
                    task.cancel()
            elif stream in self.tasks:
                raise MalformedMessage(f"stream {stream} is called for twice")
            elif item[1] in (codec.GENERATE, codec.EMBED) and self._server.ends:
                self._fail(stream, BoardFailed(self._board_id, "its replica is being ended"))
            elif item[1] in (codec.GENERATE, codec.EMBED):
                request = codec.unpack_request(item)
                self._begin(stream, partial(self._generate, stream, request))
            else:
                method, args = codec.unpack_call(item)
                self._begin(stream, partial(self._ask, stream, method, args))

    def drained(self) -> None:
        """See ``ConnectionOwner``."""
        self._flush()

    def lost(self, loss: Disconnect) -> None:
        """Cancel all calls: the Router has disconnected."""
        self._server.connections.discard(self)
        self._waiting.clear()
        self._last.clear()
        if self.tasks:
            log.warning("a Router's connection is lost with its streams: %s", loss.reason)
        for task in self.tasks.values():
            task.cancel()
        self.tasks.clear()

    # -- calls --------------------------------------------------------------------------------

    def _begin(self, stream: int, work: Callable[[], Awaitable[None]]) -> None:
        self.tasks[stream] = asyncio.get_running_loop().create_task(self._called(stream, work))

    async def _called(self, stream: int, work: Callable[[], Awaitable[None]]) -> None:
        """Run a call and end its stream, with an error if it failed."""
        try:
            await work()
        except RkserveError as exc:
            self._fail(stream, exc)
        except Exception:  # a bug: without an answer the Router would wait forever
            log.exception("board %s raised what it should not", self._board_id)
            self._fail(stream, codec.internal(self._board_id))
        # No end is sent if the reader has left or the connection was lost.
        if self.tasks.pop(stream, None) is not None:
            self.put(stream, None)

    async def _generate(self, stream: int, request: GenerateRequest) -> None:
        callee = self._callee
        if isinstance(request, EmbedRequest):
            made = callee.embed(request)
        else:
            made = callee.generate(request, partial(self._pass_on, stream))
        async with aclosing(made) as events:
            async for event in events:
                self.put(stream, event)

    def _pass_on(self, stream: int, delta: Delta) -> None:
        """Send a delta, unless the reader has left."""
        if stream in self.tasks:
            self.put(stream, delta)

    async def _ask(self, stream: int, method: str, args: Sequence[Any]) -> None:
        answer = await getattr(self._callee, method)(*args)
        # Sent with the end of the stream, as one frame: boards report to all Routers every second.
        self._waiting.append((stream, codec.pack_answer(stream, method, answer)))

    def _fail(self, stream: int, exc: RkserveError) -> None:
        """Send the error that ended a call, after its events."""
        self._last.pop(stream, None)
        try:
            error = codec.pack_error(stream, exc)
        except TypeError:  # without an answer the Router would wait forever
            log.exception("board %s raised an error that cannot be sent", self._board_id)
            error = codec.pack_error(stream, codec.internal(self._board_id))
        self._send(stream, error)

    def _send(self, stream: int, item: Event | list[Any] | None) -> None:
        """Send at once if this is the only stream, else with the next loop iteration."""
        self._waiting.append((stream, item))
        if len(self.tasks) == 1:
            self._flush()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)


def _item(stream: int, item: Event | list[Any] | None) -> list[Any]:
    if item is None:
        return [stream]
    return item if isinstance(item, list) else codec.pack(stream, item)


class ChannelServer:
    """The connections of all Routers to one board. Use from one event loop; close after use."""

    def __init__(self, board_id: str, config: ChannelConfig, callee: BoardMethods) -> None:
        self.board_id, self._config, self.callee = board_id, config, callee
        self._pulse = Heartbeat.of(config)
        self._key = new_key()
        self._identity: BoardIdentity | None = None  # the certificate, where it encrypts
        self._numbers = itertools.count(1)
        self.connections: set[RouterConnection] = set()
        self.senders: set[ChannelConnection] = set()  # connections of boards that fetch a file
        self.ends = False  # new generations are rejected
        self._server: asyncio.Server | None = None
        self.address: ChannelAddress | None = None  # None while not listening

    async def listen(self, host: str) -> None:
        """Accept connections. Raises ``OSError`` if no port is available."""
        failure: OSError | None = None
        if self._config.encrypts(host):
            self._identity = await asyncio.to_thread(new_identity)
        for port in self._config.candidates():
            try:
                self._server = await asyncio.get_running_loop().create_server(
                    self._admit, host, port, start_serving=True
                )
            except OSError as exc:
                failure = exc
                continue
            found: int = self._server.sockets[0].getsockname()[1]
            pinned = self._identity.fingerprint if self._identity is not None else b""
            self.address = ChannelAddress(self.board_id, host, found, self._key, pinned)
            return
        raise failure or OSError(f"no port to listen on in {self._config.ports}")

    async def drain(self, timeout_s: float) -> None:
        """Reject new generations, and wait up to ``timeout_s`` for the running ones.

        Ray does not know of them, and so does not wait for them.
        """
        self.ends = True
        tasks = [task for one in self.connections for task in one.tasks.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """Stop accepting connections, and close the existing ones."""
        self.address = None
        if self._server is not None:
            self._server.close()
        for line in [*(one.line for one in self.connections), *self.senders]:
            line.close("the board ends")
        if self._server is not None:
            await self._server.wait_closed()

    def _admit(self) -> ChannelConnection:
        limited = cache_key(self._key)
        side = BoardHandshake(self._key, next(self._numbers), self._identity, limited)
        admitted = RouterConnection(self, side, self._pulse)
        self.connections.add(admitted)
        if sum(not one.line.open for one in self.connections) > MAX_UNPROVEN:
            asyncio.get_running_loop().call_soon(admitted.line.close, "too many connections")
        return admitted.line
