"""The board's end of the channel: it listens for Routers, and sends each the events of its streams.

It knows sockets and the events of generations, neither Ray nor boards: what it carries is any
stream of events. The call that began a stream comes another way, and so does how it ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rkserve.config import ChannelConfig
from rkserve.deployments import channel_codec as codec
from rkserve.deployments.channel_codec import Garbled
from rkserve.deployments.channel_frames import BoardSide, new_key
from rkserve.deployments.channel_line import Line, Loss, Pulse
from rkserve.messages import Delta, Event, merged

log = logging.getLogger(__name__)

ITEMS = 32  # of a frame: of that many whole answers it is not too long
MAX_LEFT = 1024
MAX_UNPROVEN = 64  # connections of which nobody knows yet whose they are


@dataclass(frozen=True, slots=True)
class Address:
    """Where a board listens, for Routers of its own application only."""

    board_id: str
    host: str
    port: int
    key: bytes = field(repr=False)  # no log may show it


class BoardLine:
    """The streams of one Router."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._line: Line | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._waiting: list[tuple[int, Event | None]] = []  # None ends a stream
        self._last: dict[int, int] = {}  # of a stream in what waits
        self._due = False
        self._left: set[int] = set()  # streams whose reader has left, and that have not begun

    def enter(self, stream: int, task: asyncio.Task[Any]) -> bool:
        """A stream begins; the task is ended where its reader leaves. False: it has left already.

        Word of that overtakes a call that is still on its way.
        """
        if stream in self._left:
            self._left.remove(stream)
            return False
        self._tasks[stream] = task
        return True

    def put(self, stream: int, event: Event | None) -> None:
        """Send an event, or the end of the stream, with what else this round of the loop brings.

        What waits longer, for a Router that does not read, is merged: it never is more than the
        answers are long.
        """
        at = self._last.get(stream)
        before = None if at is None else self._waiting[at][1]
        if at is not None and isinstance(before, Delta) and isinstance(event, Delta):
            whole = merged(before, event)
            if whole is not None:
                self._waiting[at] = (stream, whole)
                return
        self._last[stream] = len(self._waiting)
        self._waiting.append((stream, event))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def leave(self, stream: int) -> None:
        """The stream is over here."""
        self._tasks.pop(stream, None)
        self.put(stream, None)

    @property
    def over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._line is None or not self._line.open

    def _flush(self) -> None:
        self._due = False
        if self._line is None or self._line.full or not self._waiting:
            return
        items = [
            [stream] if event is None else codec.pack(stream, event)
            for stream, event in self._waiting
        ]
        self._waiting.clear()
        self._last.clear()
        for start in range(0, len(items), ITEMS):
            self._line.send(items[start : start + ITEMS])

    def opened(self, line: Line) -> None:
        """The Router has proven who it is; see ``Owner``."""
        self._line = line

    def heard(self, items: list[list[Any]]) -> None:
        """The Router leaves streams. Raises ``Garbled``."""
        for item in items:
            if len(item) != 1:
                raise Garbled("not the number of a stream")
            task = self._tasks.pop(item[0], None)
            if task is not None:
                task.cancel()
            else:
                self._left.add(item[0])
        if len(self._left) > MAX_LEFT:
            self._left.clear()  # mostly of calls that ended at the same moment, or never came

    def drained(self) -> None:
        """The Router reads again."""
        self._flush()

    def lost(self, loss: Loss) -> None:
        """Nobody reads any more: the streams end."""
        self._waiting.clear()
        self._last.clear()
        if self._tasks:
            log.warning("a Router's connection is lost with its streams: %s", loss.reason)
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()


class Outlet:
    """All Routers of one board. Use it from one event loop; close it."""

    def __init__(self, board_id: str, config: ChannelConfig) -> None:
        self._board_id, self._config = board_id, config
        self._pulse = Pulse(config.heartbeat_s, config.silence_s)
        self._key = new_key()
        self._numbers = itertools.count(1)
        self._lines: dict[int, BoardLine] = {}
        self._open: set[Line] = set()
        self._server: asyncio.Server | None = None
        self.address: Address | None = None  # None where nobody can come

    async def listen(self, host: str) -> None:
        """Let Routers come. Raises ``OSError``: no port could be had."""
        failure: OSError | None = None
        for port in self._config.candidates():
            try:
                self._server = await asyncio.get_running_loop().create_server(
                    self._admit, host, port, start_serving=True
                )
            except OSError as exc:
                failure = exc
                continue
            found: int = self._server.sockets[0].getsockname()[1]
            self.address = Address(self._board_id, host, found, self._key)
            return
        raise failure or OSError(f"no port to listen on in {self._config.ports}")

    async def carry(self, number: int, stream: int, events: AsyncGenerator[Event, None]) -> bool:
        """Send events to that Router as they come; False where its connection is not there.

        Raises what the events raise, after the end of the stream was sent; ``CancelledError`` where
        the Router left the stream, or was lost.
        """
        line = self._lines.get(number)
        if line is None or line.over:
            return False
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in one
        if not line.enter(stream, task):
            return True
        try:
            async with aclosing(events):
                async for event in events:
                    line.put(stream, event)
        finally:
            line.leave(stream)
        return True

    async def close(self) -> None:
        """Let nobody come any more, and cut those who are there."""
        self.address = None
        if self._server is not None:
            self._server.close()
        for line in list(self._open):
            line.close("the board ends")
        if self._server is not None:
            await self._server.wait_closed()

    def _admit(self) -> Line:
        number = next(self._numbers)
        owner = _Guest(self, number)
        line = Line(BoardSide(self._key, number), self._pulse, owner)
        owner.line = line
        self._open.add(line)
        if len(self._open) - len(self._lines) > MAX_UNPROVEN:
            asyncio.get_running_loop().call_soon(line.close, "too many connections")
        return line

    def enroll(self, line: BoardLine) -> None:
        """A Router has proven who it is."""
        self._lines[line.number] = line

    def dismiss(self, number: int, line: Line) -> None:
        """It is gone."""
        self._lines.pop(number, None)
        self._open.discard(line)


class _Guest(BoardLine):
    """A Router's line that enrols itself in its outlet once it is proven, and leaves it."""

    line: Line

    def __init__(self, outlet: Outlet, number: int) -> None:
        super().__init__(number)
        self._outlet = outlet

    def opened(self, line: Line) -> None:
        super().opened(line)
        self._outlet.enroll(self)

    def lost(self, loss: Loss) -> None:
        super().lost(loss)
        self._outlet.dismiss(self.number, self.line)
