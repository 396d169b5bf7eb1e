"""The Router's end of the channel: one connection to each reachable board, and its streams.

Where a board listens is looked up by a function of the caller. Without a connection to a board,
requests go through Ray, and the connection is tried again from time to time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from rkserve.config.router import ChannelConfig
from rkserve.core.errors import BoardFailed, BoardSilent, RkserveError
from rkserve.core.messages import Delta, Event, Finished, GenerateRequest, merged
from rkserve.core.request_record import apart
from rkserve.transport import codec
from rkserve.transport.connection import ChannelConnection, Disconnect, Heartbeat, RouterHandshake
from rkserve.transport.server import ChannelAddress


class EventStream:
    """The events of one call. ``stream`` is its number on the connection."""

    def __init__(self, stream: int, take: Callable[[Delta], bool] | None = None) -> None:
        """A delta that arrives while the reader waits is offered to ``take``: a turn of the event
        loop for each token would cost more than all that is done with it.
        """
        self.stream = stream
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None  # the error that ended the stream
        self._ended = False  # no more events
        self._finished = False  # the answer is complete
        self.received = False  # the board has sent something
        self.lost = False  # the connection was lost

    # -- from the connection ------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """Add an event. Consecutive unread deltas are merged, which bounds the queue."""
        self.received = True
        if self._take is not None and event.__class__ is Delta and self._taken(event):
            return
        self._finished = isinstance(event, Finished)
        events, whole = self._events, None
        if events and isinstance(event, Delta) and isinstance(last := events[-1], Delta):
            whole = merged(last, event)
        if whole is None:
            events.append(event)
        else:
            events[-1] = whole
        self._wake()

    def _taken(self, delta: Any) -> bool:
        waiter = self._waiter
        if waiter is None or waiter.done() or self._take is None:
            return False  # the reader has events to read before this one
        try:
            return self._take(delta)
        except Exception as exc:  # noqa: BLE001 - raised where the reader would have raised it
            self.end(exc)
            return True

    def fail(self, error: RkserveError) -> None:
        """End the stream with the board's error, after all events."""
        self.received = True
        self.end(error)

    def cut(self, error: RkserveError) -> None:
        """End the stream because the connection is lost."""
        if not self._ended:
            self.lost = True
            self.end(None if self._finished else error)

    def end(self, error: Exception | None = None) -> None:
        """End the stream after its events; events and errors that come later are dropped."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    # -- to the reader ------------------------------------------------------------------------

    async def next(self) -> Event | None:
        """Return the next event; None after the last one.

        Raises:
            RkserveError: the call failed; raised after its events.
            Exception: raised by ``take``.
        """
        while not self._events:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    @property
    def over(self) -> bool:
        """Return whether the board sends nothing more, so that no cancellation is needed."""
        return self._finished or self._ended

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


log = logging.getLogger(__name__)

REMEMBERED = 4096  # unreachable replicas to remember

Find = Callable[[], Awaitable[ChannelAddress | None]]


class ChannelLost(Exception):
    """The connection was lost during a call."""


class BoardConnection:
    """The connection to one board, with all of this Router's streams there."""

    def __init__(self, address: ChannelAddress, pulse: Heartbeat) -> None:
        self.board_id, self.address = address.board_id, address
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, EventStream] = {}
        self._asked: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # method and result
        # Set after the handshake; raises ``ConnectionError``.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the exception, so that asyncio does not log it if the future is never awaited.
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.over = asyncio.Event()  # the connection has ended
        side = RouterHandshake(address.key, address.fingerprint)
        self.line = ChannelConnection(side, pulse, self)

    def generate(
        self, request: GenerateRequest, take: Callable[[Delta], bool] | None = None
    ) -> EventStream:
        """Start a generation and read its events; the caller must ``leave`` it.

        See ``EventStream`` for ``take``.
        """
        inbox = EventStream(next(self._numbers), take)
        self._inboxes[inbox.stream] = inbox
        self.line.send([codec.pack_request(inbox.stream, request)])
        return inbox

    async def ask(self, method: str, *args: Any) -> Any:
        """Call one of ``codec.METHODS``; cancelling the task cancels the call on the board.

        Raises:
            ChannelLost: the connection was lost; the outcome of the call is unknown.
            RkserveError: the board's error.
        """
        stream = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[stream] = method, answer
        self.line.send([codec.pack_call(stream, method, args)])
        try:
            return await answer
        finally:
            del self._asked[stream]
            if answer.cancelled():
                self.line.send([[stream]])

    def leave(self, inbox: EventStream) -> None:
        """Stop reading a stream; the board ends it unless it has ended."""
        if self._inboxes.pop(inbox.stream, None) is not None and not inbox.over:
            self.line.send([[inbox.stream]])
        inbox.end()

    # -- as the owner of its line -------------------------------------------------------------

    def opened(self) -> None:
        """See ``ConnectionOwner``."""
        if not self.ready.done():
            self.ready.set_result(None)

    def handle(self, items: list[list[Any]]) -> None:
        """Dispatch events, answers and errors. Raises ``MalformedMessage``."""
        inboxes = self._inboxes
        for item in items:
            inbox = inboxes.get(item[0])
            if inbox is None:
                self._answered(item)
            elif len(item) == 1:
                inbox.end()
            elif item[1] == codec.FAILED:
                inbox.fail(codec.unpack_error(item, self.board_id))
            else:
                inbox.put(codec.unpack(item))

    def _answered(self, item: list[Any]) -> None:
        """Deliver the answer of a call, unless its caller stopped waiting."""
        method, answer = self._asked.get(item[0], ("", None))
        if answer is None or answer.done() or len(item) == 1:
            return
        if item[1] == codec.FAILED:
            answer.set_exception(codec.unpack_error(item, self.board_id))
        else:
            answer.set_result(codec.unpack_answer(item, method))

    def handle_raw(self, _data: bytes) -> None:
        """Refuse raw bytes. Raises ``MalformedMessage``."""
        raise codec.MalformedMessage("raw bytes where an answer was expected")

    def drained(self) -> None:
        """Do nothing: a Router sends only short messages."""

    def lost(self, loss: Disconnect) -> None:
        """End all streams with the connection."""
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(loss.reason))
        kind = BoardSilent if loss.silent else BoardFailed
        for inbox in self._inboxes.values():
            inbox.cut(kind(self.board_id, loss.reason))
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ChannelLost(loss.reason))
        self._inboxes.clear()
        self.over.set()


class ChannelClient:
    """The connections of one Router, by replica. Use from one event loop; close after use."""

    def __init__(self, config: ChannelConfig) -> None:
        self._config = config
        self._pulse = Heartbeat.of(config)
        self._lines: dict[str, BoardConnection] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again_s: dict[str, float] = {}  # by replica: the time of the next attempt
        self._logged: set[str] = set()  # replicas whose missing channel has been logged
        self.streams = {"channel": 0, "ray": 0}  # number of generations by transport

    def counts(self) -> tuple[dict[str, int], int]:
        """Return the number of generations by transport, and of open connections."""
        return self.streams, len(self._lines)

    def line(self, replica: str) -> BoardConnection | None:
        """Return the open connection to a replica, or None."""
        line = self._lines.get(replica)
        return line if line is not None and line.line.open else None

    def seek(self, replica: str, find: Find) -> None:
        """Start connecting to a replica, unless connected or within the retry interval.

        ``find`` asks the replica for its address; it raises ``RkserveError`` only.
        """
        loop = asyncio.get_running_loop()
        if not self._config.enabled or replica in self._tasks:
            return
        if loop.time() < self._again_s.get(replica, 0.0):
            return
        if len(self._again_s) >= REMEMBERED:
            self._again_s.clear()  # mostly replicas that no longer exist
            self._logged.clear()
        self._again_s[replica] = loop.time() + self._config.retry_s
        name = f"channel to {replica}"
        task = apart(loop.create_task, self._keep(replica, find), name=name)
        self._tasks[replica] = task
        task.add_done_callback(lambda _: self._tasks.pop(replica, None))

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for line in list(self._lines.values()):
            line.line.close("the Router ends")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, replica: str, find: Find) -> None:
        """Connect, and wait for the end of the connection."""
        where = replica
        try:
            address = await find()
            if address is None:
                self._log_once(replica, f"board of replica {replica} offers no channel")
                return
            where = address.board_id
            if self._config.encrypt == "always" and not address.fingerprint:
                self._log_once(
                    replica,
                    f"no channel to board {where} (it offers no encryption, which "
                    "channel.encrypt: always requires; is its version of rkserve older?)",
                )
                return
            line = await self._connect(address)
        except (RkserveError, OSError, asyncio.TimeoutError) as exc:
            reason = str(exc) or type(exc).__name__
            self._log_once(replica, f"no channel to board {where} ({reason})")
            return
        self._logged.discard(replica)
        self._lines[replica] = line
        try:
            await line.over.wait()
        finally:
            del self._lines[replica]
            line.line.close("the Router ends")
            # Retry at once: a replica that has ended will not report, and will not be sought again.
            self._again_s.pop(replica, None)

    async def _connect(self, address: ChannelAddress) -> BoardConnection:
        line = BoardConnection(address, self._pulse)
        loop = asyncio.get_running_loop()

        async def greeted() -> None:
            await loop.create_connection(lambda: line.line, address.host, address.port)
            await line.ready

        try:
            await asyncio.wait_for(greeted(), self._config.connect_s)
        except BaseException:
            line.line.close("no greeting")
            raise
        return line

    def _log_once(self, replica: str, what: str) -> None:
        if replica not in self._logged:
            self._logged.add(replica)
            log.warning("%s: its generations go through Ray, which is slower", what)
