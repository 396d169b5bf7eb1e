"""Prompt cache files from one board to another, over a connection of the channel of their own.

Its handshake is the channel's, with a key that opens cache files only (``cache_key``): a board that
fetches could not generate on the other one, or read its reports. One query is answered by an offer,
or an error, and by the file in frames of raw bytes: as JSON it would take a third more of the
network, and ten times the processor time. The reader's pace holds up the sender.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from rkserve.core.errors import BoardFailed, RkserveError
from rkserve.core.messages import CacheOffer, CacheQuery, CacheSource
from rkserve.transport import codec
from rkserve.transport.codec import MalformedMessage
from rkserve.transport.connection import (
    ChannelConnection,
    Disconnect,
    Heartbeat,
    RouterHandshake,
)

log = logging.getLogger(__name__)

# A board that stalls is left in time for the prefill.
PULSE = Heartbeat(heartbeat_s=1.0, silence_s=3.0, connect_s=1.0)
MOST_UNREAD = 4  # chunks that wait for the reader before the connection is not read any more
STREAM = 1  # the number of the one query of a connection

# Answers a query: the offer first, then the content. Raises ``RkserveError``.
SendCache = Callable[[CacheQuery], AsyncGenerator[CacheOffer | bytes, None]]


def cache_key(key: bytes) -> bytes:
    """Return the key to the cache files of a board with that channel key."""
    return hmac.new(key, b"prompt cache files", hashlib.sha256).digest()


class CacheSender:
    """The end of a connection at the board that has the file."""

    def __init__(
        self, board_id: str, line: ChannelConnection, send: SendCache, ended: Callable[[], None]
    ) -> None:
        self._board_id, self._line, self._send, self._ended = board_id, line, send, ended
        self._task: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    def opened(self) -> None:
        """See ``ConnectionOwner``."""

    def handle(self, items: list[list[Any]]) -> None:
        """Answer the query. Raises ``MalformedMessage``."""
        if self._task is not None or len(items) != 1:
            raise MalformedMessage("more than one query for a prompt cache file")
        query = codec.unpack_query(items[0])
        self._task = asyncio.get_running_loop().create_task(
            self._answer(query), name="send a prompt cache file"
        )

    def handle_raw(self, _data: bytes) -> None:
        """Refuse raw bytes. Raises ``MalformedMessage``."""
        raise MalformedMessage("raw bytes where a query was expected")

    def drained(self) -> None:
        """See ``ConnectionOwner``."""
        self._room.set()

    def lost(self, _loss: Disconnect) -> None:
        """End with the connection."""
        self._ended()
        self._room.set()
        if self._task is not None:
            self._task.cancel()

    async def _answer(self, query: CacheQuery) -> None:
        line = self._line
        try:
            async with aclosing(self._send(query)) as parts:
                async for part in parts:
                    if isinstance(part, CacheOffer):
                        line.send([codec.pack_offer(STREAM, part)])
                        continue
                    line.send_raw(part)
                    # The end of the connection comes with a turn of the loop.
                    await asyncio.sleep(0)
                    if line.full:
                        self._room.clear()
                        await self._room.wait()
        except RkserveError as exc:
            line.send([codec.pack_error(STREAM, exc)])
        except Exception:  # a bug: the other board would wait for its time limit
            log.exception("board %s could not send a prompt cache file", self._board_id)
            line.send([codec.pack_error(STREAM, codec.internal(self._board_id))])
        # The reader closes the connection once it has what was offered.


class _Receiver:
    """The end of a connection at the board that fetches."""

    def __init__(self, source: CacheSource, query: CacheQuery, pulse: Heartbeat) -> None:
        self._source, self._query = source, query
        self._parts: deque[CacheOffer | bytes] = deque()
        self._error: RkserveError | None = None
        self._news = asyncio.Event()
        self.line = ChannelConnection(RouterHandshake(source.key, source.fingerprint), pulse, self)

    def opened(self) -> None:
        """Send the query."""
        self.line.send([codec.pack_query(STREAM, self._query)])

    def handle(self, items: list[list[Any]]) -> None:
        """Take the offer, or the error in its place. Raises ``MalformedMessage``."""
        for item in items:
            if item[1:2] == [codec.FAILED]:
                self._end(codec.unpack_error(item, self._source.board_id))
            else:
                self._parts.append(codec.unpack_offer(item))
                self._news.set()

    def handle_raw(self, data: bytes) -> None:
        """Take a part of the file."""
        self._parts.append(data)
        self._news.set()
        if len(self._parts) > MOST_UNREAD:
            self.line.pause_reading()

    def drained(self) -> None:
        """See ``ConnectionOwner``: only a query is sent."""

    def lost(self, loss: Disconnect) -> None:
        """End with the connection."""
        self._end(BoardFailed(self._source.board_id, loss.reason))

    def _end(self, error: RkserveError) -> None:
        self._error = self._error or error
        self._news.set()

    async def next(self) -> CacheOffer | bytes:
        """Return the next part. Raises ``RkserveError`` if there is none."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        part = self._parts.popleft()
        if not self._parts:
            self.line.resume_reading()
        return part


async def fetched(
    source: CacheSource, query: CacheQuery, pulse: Heartbeat = PULSE
) -> AsyncGenerator[CacheOffer | bytes, None]:
    """Yield the offer of another board's file, then exactly its content. Close it after use.

    Raises:
        RkserveError: the board has no such file, refuses it, or its connection is lost.
        OSError: there is no connection.
    """
    loop = asyncio.get_running_loop()
    receiver = _Receiver(source, query, pulse)
    try:
        await asyncio.wait_for(
            loop.create_connection(lambda: receiver.line, source.host, source.port),
            pulse.connect_s,
        )
        offer = await receiver.next()
        if not isinstance(offer, CacheOffer):
            raise BoardFailed(source.board_id, "a prompt cache file came without its offer")
        yield offer
        left = offer.file_bytes
        while left > 0:
            part = await receiver.next()
            if isinstance(part, CacheOffer) or len(part) > left:
                raise BoardFailed(source.board_id, "a prompt cache file was longer than offered")
            left -= len(part)
            yield part
    except (TimeoutError, asyncio.TimeoutError) as exc:  # two classes before Python 3.11
        raise BoardFailed(source.board_id, "no connection for a prompt cache file") from exc
    finally:
        receiver.line.close("the prompt cache file was fetched, or is not wanted any more")
