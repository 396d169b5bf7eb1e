"""One HTTP exchange with an upstream: a request, and the events of its answer as they arrive.

The upstream's failures become ``RkserveError``s here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

import httpx

from rkserve.api.json.fields import JsonObject
from rkserve.api.upstream.answers import message_of
from rkserve.core.errors import QueueFull, RkserveError, UpstreamFailed, UpstreamRefused

OK, TOO_MANY = 200, 429
# Sent again, or elsewhere: the upstream had no fault in the request.
BUSY = frozenset((500, 502, 503, 504))
# The request itself is at fault; any other status is the configuration's or the upstream's.
AT_FAULT = frozenset((400, 413, 415, 422))
MAX_EVENT_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # of one that is not streamed
MAX_ERROR_BYTES = 64 * 1024
RETRY_S, LONGEST_RETRY_S = 5, 600  # without a Retry-After, and the longest that counts
LOOK_S = 1.0  # how often an exchange's silence is measured
WAITING = 256  # events of an answer that are not read yet


class Signal(Enum):
    """A sign of an exchange beside the events of the answer."""

    TAKEN = "the upstream has begun to answer"
    SLOW = "it has not, for longer than a client should wait for a status"
    ABORTED = "the Router ends it"
    END = "the answer is complete"


Item = bytes | Signal | RkserveError


class EventReader:
    """Splits a stream of server-sent events into the data of each."""

    def __init__(self) -> None:
        self._left = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, block: bytes) -> Iterator[bytes]:
        """Yield the data of events that are complete now.

        Raises ``ValueError``: an event is too long.
        """
        *lines, self._left = (self._left + block).split(b"\n")
        for line in lines:
            yield from self._line(line.removesuffix(b"\r"))
        if self._size + len(self._left) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")

    def end(self) -> Iterator[bytes]:
        """Yield the data of an event that no blank line has ended."""
        yield from self._line(self._left.removesuffix(b"\r"))
        yield from self._line(b"")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
        elif not line and self._data:
            yield b"\n".join(self._data)
            self._data, self._size = [], 0


class Exchange:
    """A request to an upstream, in a task of its own. Always ``aclose`` it: that aborts it."""

    def __init__(
        self, client: httpx.AsyncClient, name: str, url: str, body: JsonObject, *, slow_s: float
    ) -> None:
        """After ``slow_s`` without a status, ``next`` returns ``Signal.SLOW`` once."""
        self._client, self._name, self._url, self._body = client, name, url, body
        self._items: deque[Item] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._limit_s = 0.0
        self.received_s = time.monotonic()  # the latest bytes, those of comments too
        loop = asyncio.get_running_loop()
        self._slow = loop.call_later(slow_s, self._put, Signal.SLOW)
        self._watch: asyncio.TimerHandle | None = None
        self._task = loop.create_task(self._run(), name=f"ask upstream {name}")

    async def next(self, silence_s: float) -> Item:
        """Return the next item. An error is returned after the items before it.

        An upstream that is silent for ``silence_s`` has failed.
        """
        self._limit_s = silence_s
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            if self._watch is None:
                self._look()
            await self._reader
        if not self._room.is_set():
            self._received()  # it was not read from
            self._room.set()
        return self._items.popleft()

    def abort(self) -> None:
        """End the exchange before all pending items."""
        self._items.appendleft(Signal.ABORTED)
        self._wake()

    async def aclose(self) -> None:
        """Close the connection, which has the upstream stop."""
        self._slow.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _look(self) -> None:
        """End an exchange that has been silent for too long, or look again."""
        left_s = self.received_s + self._limit_s - time.monotonic()
        if left_s <= 0 and self._reader is not None and not self._reader.done():
            self._put(UpstreamFailed(self._name, f"nothing came for {self._limit_s:g} s"))
            return
        # The limit becomes shorter with the first token, and the reader may be at work.
        wait_s = LOOK_S if left_s <= 0 else min(left_s, LOOK_S)
        self._watch = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _put(self, item: Item) -> None:
        self._items.append(item)
        if len(self._items) >= WAITING:
            self._room.clear()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _run(self) -> None:
        try:
            await self._answer()
        except RkserveError as exc:
            self._put(exc)
        except httpx.InvalidURL as exc:
            self._put(UpstreamFailed(self._name, f"its URL cannot be used: {exc}"))
        except httpx.HTTPError as exc:
            self._put(UpstreamFailed(self._name, _reason(exc), again=True))
        except ValueError as exc:
            self._put(UpstreamFailed(self._name, str(exc)))

    async def _answer(self) -> None:
        async with self._client.stream("POST", self._url, json=self._body) as response:
            self._received()
            self._slow.cancel()
            if response.status_code != OK:
                raise await self._refusal(response)
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in ("text/event-stream", "application/json"):
                raise UpstreamFailed(
                    self._name,
                    f"its answer is of the type '{kind[:80]}', and no stream of events and no JSON",
                )
            self._put(Signal.TAKEN)
            if kind == "application/json":
                self._put(await self._whole(response, MAX_ANSWER_BYTES))
            else:
                await self._events(response)
        self._put(Signal.END)

    def _received(self) -> None:
        self.received_s = time.monotonic()

    async def _events(self, response: httpx.Response) -> None:
        reader = EventReader()
        async for block in response.aiter_bytes():
            self._received()
            for data in reader.feed(block):
                self._put(data)
            await self._room.wait()
        for data in reader.end():
            self._put(data)

    async def _whole(self, response: httpx.Response, most: int) -> bytes:
        found = bytearray()
        async for block in response.aiter_bytes():
            self._received()
            found += block
            if len(found) > most:
                raise UpstreamFailed(self._name, f"its answer has more than {most} bytes")
        return bytes(found)

    async def _refusal(self, response: httpx.Response) -> RkserveError:
        """Return the error of a status other than 200."""
        status = response.status_code
        try:
            body = await self._whole(response, MAX_ERROR_BYTES)
        except (httpx.HTTPError, UpstreamFailed):
            body = b""
        message, param = message_of(body)
        if status == TOO_MANY:
            return QueueFull(0, _retry_after(response.headers.get("retry-after")))
        if status in AT_FAULT:
            return UpstreamRefused(self._name, message, param)
        if status in (401, 403):
            # Its message may quote a part of the key.
            return UpstreamFailed(
                self._name, f"it answers {status}: it does not take the key of this cluster"
            )
        return UpstreamFailed(self._name, f"it answers {status}: {message}", status in BUSY)


def _reason(exc: httpx.HTTPError) -> str:
    """Return the reason of a failed exchange, without the addresses of internal networks."""
    if isinstance(exc, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "no connection was made in time"
    if isinstance(exc, httpx.ConnectError):
        return "it cannot be reached"
    if isinstance(exc, httpx.TimeoutException):
        return "it took no more of the request in time"
    return f"the connection broke ({type(exc).__name__})"


def _retry_after(header: str | None) -> int:
    """Return the seconds of a Retry-After header; a date counts as none."""
    if header is None or not (header.isascii() and header.strip().isdigit()):
        return RETRY_S
    return max(1, min(LONGEST_RETRY_S, int(header.strip()[:9])))
