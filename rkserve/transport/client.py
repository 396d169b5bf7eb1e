"""The Router's end of the channel: a connection to every board that can be had, and their streams.

It knows sockets and streams of events. How a board says where it listens is handed in. Where there
is no connection, it says so: calls go another way then, and it tries again from time to time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rkserve.config.serve_config import ChannelConfig
from rkserve.core.errors import BoardFailed, BoardSilent, RkserveError
from rkserve.core.messages import GenerateRequest
from rkserve.transport import calls, codec
from rkserve.transport.connection import Line, Loss, Pulse
from rkserve.transport.framing import RouterSide
from rkserve.transport.inbox import Inbox
from rkserve.transport.server import Address

log = logging.getLogger(__name__)

REMEMBERED = 4096  # replicas that could not be reached

Find = Callable[[], Awaitable[Address | None]]


class LineLost(Exception):
    """The connection was lost with a call."""


class RouterLine:
    """A connection to one board, with all streams that this Router has there."""

    def __init__(self, address: Address, pulse: Pulse) -> None:
        self.board_id = address.board_id
        self._side = RouterSide(address.key)
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._asked: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # by which method
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who has given up waiting need not hear of it.
        self._opened.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._over = asyncio.Event()
        self.line = Line(self._side, pulse, self)

    @property
    def open(self) -> bool:
        """Whether streams can be carried."""
        return self.line.open

    def generate(self, request: GenerateRequest) -> Inbox:
        """Call for a generation, and begin to read its events; ``leave`` it in any case."""
        inbox = Inbox(next(self._numbers))
        self._inboxes[inbox.stream] = inbox
        self.line.send([calls.pack_request(inbox.stream, request)])
        return inbox

    async def ask(self, method: str, *args: Any) -> Any:
        """Call one of ``channel_calls.METHODS``; the board ends it where nobody waits any more.

        Raises:
            LineLost: the connection is; what became of the call is not known.
            RkserveError: what the board raised.
        """
        stream = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[stream] = method, answer
        self.line.send([calls.pack_call(stream, method, args)])
        try:
            return await answer
        finally:
            del self._asked[stream]
            if answer.cancelled():
                self.line.send([[stream]])

    def leave(self, inbox: Inbox) -> None:
        """Read a stream no further; the board ends it, unless it has already."""
        if self._inboxes.pop(inbox.stream, None) is not None and not inbox.over:
            self.line.send([[inbox.stream]])
        inbox.close()

    async def ready(self) -> None:
        """Wait for the greeting. Raises ``ConnectionError``."""
        await self._opened

    async def over(self) -> None:
        """Wait until the connection has ended."""
        await self._over.wait()

    # -- as the owner of its line -------------------------------------------------------------

    def opened(self, _line: Line) -> None:
        """The board has proven who it is; see ``Owner``."""
        if not self._opened.done():
            self._opened.set_result(None)

    def heard(self, items: list[list[Any]]) -> None:
        """Events came, and how calls ended. Raises ``Garbled``."""
        inboxes = self._inboxes
        for item in items:
            inbox = inboxes.get(item[0])
            if inbox is None:
                self._answered(item)
            elif len(item) == 1:
                inbox.end()
            elif item[1] == calls.FAILED:
                inbox.fail(calls.unpack_error(item, self.board_id))
            else:
                inbox.put(codec.unpack(item))

    def _answered(self, item: list[Any]) -> None:
        """Whoever asked gets it, and waits still."""
        method, answer = self._asked.get(item[0], ("", None))
        if answer is None or answer.done() or len(item) == 1:
            return
        if item[1] == calls.FAILED:
            answer.set_exception(calls.unpack_error(item, self.board_id))
        else:
            answer.set_result(calls.unpack_answer(item, method))

    def drained(self) -> None:
        """The board reads again: it only gets what is short."""

    def lost(self, loss: Loss) -> None:
        """It is over: all of its streams are."""
        if not self._opened.done():
            self._opened.set_exception(ConnectionError(loss.reason))
        kind = BoardSilent if loss.silent else BoardFailed
        for inbox in self._inboxes.values():
            inbox.cut(kind(self.board_id, loss.reason))
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(LineLost(loss.reason))
        self._inboxes.clear()
        self._over.set()


class Channels:
    """The connections of one Router, by replica. Use it from one event loop; close it."""

    def __init__(self, config: ChannelConfig) -> None:
        self._config = config
        self._pulse = Pulse(config.heartbeat_s, config.silence_s)
        self._lines: dict[str, RouterLine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again_s: dict[str, float] = {}  # when a replica may be tried again
        self._told: set[str] = set()  # of which the log says that it is reached without
        self.streams = {"channel": 0, "ray": 0}  # generations, by the way that they took

    def counts(self) -> tuple[dict[str, int], int]:
        """Return the generations by the way that they took, and the connections there are."""
        return self.streams, len(self._lines)

    def line(self, replica: str) -> RouterLine | None:
        """Return the connection to a replica, where there is one now."""
        line = self._lines.get(replica)
        return line if line is not None and line.open else None

    def seek(self, replica: str, find: Find) -> None:
        """Have a connection to that replica soon; nothing where there is one, or none to be had.

        ``find`` asks the replica where it listens; it raises ``RkserveError`` only.
        """
        loop = asyncio.get_running_loop()
        if not self._config.enabled or replica in self._tasks:
            return
        if loop.time() < self._again_s.get(replica, 0.0):
            return
        if len(self._again_s) >= REMEMBERED:
            self._again_s.clear()  # mostly of replicas that are no more
            self._told.clear()
        self._again_s[replica] = loop.time() + self._config.retry_s
        task = loop.create_task(self._keep(replica, find), name=f"channel to {replica}")
        self._tasks[replica] = task
        task.add_done_callback(lambda _: self._tasks.pop(replica, None))

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for line in list(self._lines.values()):
            line.line.close("the Router ends")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, replica: str, find: Find) -> None:
        """Connect, and wait until that has ended."""
        where = replica
        try:
            address = await find()
            if address is None:
                self._tell(replica, f"board of replica {replica} offers no channel")
                return
            where = address.board_id
            line = await self._connect(address)
        except (RkserveError, OSError, asyncio.TimeoutError) as exc:
            reason = str(exc) or type(exc).__name__
            self._tell(replica, f"no channel to board {where} ({reason})")
            return
        self._told.discard(replica)
        self._lines[replica] = line
        try:
            await line.over()
        finally:
            del self._lines[replica]
            line.line.close("the Router ends")
            # It may be a moment's trouble, or a board that ended: its replica will not report.
            self._again_s.pop(replica, None)

    async def _connect(self, address: Address) -> RouterLine:
        line = RouterLine(address, self._pulse)
        loop = asyncio.get_running_loop()

        async def greeted() -> None:
            await loop.create_connection(lambda: line.line, address.host, address.port)
            await line.ready()

        try:
            await asyncio.wait_for(greeted(), self._config.silence_s)
        except BaseException:
            line.line.close("no greeting")
            raise
        return line

    def _tell(self, replica: str, what: str) -> None:
        if replica not in self._told:
            self._told.add(replica)
            log.warning("%s: its generations go through Ray, which is slower", what)
