"""Streamed answers: cleanup on disconnect, and the way of a chunk to the client's connection.

A layer or a turn of the event loop for each token is what a Router's core spends most on, so that
chunks pass the framework's layers by, and most of them are sent in the turn in which their token
arrived.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, cast

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from rkserve.core.request_record import record_of_request

DIRECT = "rkserve.send"  # the key of the server's own ``send`` in a scope


class ClientStream:
    """The sending end of one streamed answer, once its headers are sent: chunks in their order."""

    def __init__(self) -> None:
        self.last = False  # no chunk follows the next one
        self._send: Send | None = None
        self._unsent: asyncio.Task[None] | None = None  # of a client that does not read
        self._broken: OSError | None = None  # the connection, at the latest ``write``

    @property
    def ready(self) -> bool:
        """True if the client takes a chunk at once."""
        return self._send is not None and self._unsent is None and self._broken is None

    def open(self, send: Send) -> None:
        """Send over the server's ``send`` from here on."""
        self._send = send

    def close(self) -> None:
        """Send nothing more."""
        self._send = None
        if self._unsent is not None:
            self._unsent.cancel()

    def write(self, chunk: bytes, sent: Callable[[], None]) -> None:
        """Send a chunk without waiting, while ``ready``; ``sent`` is called when it was sent.

        A server's ``send`` waits only if the client does not read. It is then left to a task, and
        the stream is not ready until that has ended.
        """
        assert self._send is not None
        message = {"type": "http.response.body", "body": chunk, "more_body": True}
        sending = cast("Coroutine[Any, Any, None]", self._send(message))
        try:
            waits_for = sending.send(None)
        except StopIteration:
            sent()
            return
        except OSError as exc:
            self._broken = exc
            return
        self._unsent = asyncio.ensure_future(_rest(sending, waits_for, sent))

    async def send(self, chunk: bytes) -> None:
        """Send a chunk after all others. Raises ``OSError`` where the connection is broken."""
        await self.settle()
        assert self._send is not None
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def settle(self) -> None:
        """Wait until all chunks are sent. Raises ``OSError`` where the connection is broken."""
        if self._broken is not None:
            raise self._broken
        if self._unsent is not None:
            await self._unsent
            self._unsent = None


async def _rest(begun: Coroutine[Any, Any, None], waits_for: Any, sent: Callable[[], None]) -> None:
    await _resumed(begun, waits_for)
    sent()


@types.coroutine
def _resumed(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine that has begun and waits for a future."""
    while True:
        try:
            came = yield waits_for
        except BaseException as exc:  # noqa: BLE001 - passed on, such as a cancellation
            step = partial(begun.throw, exc)
        else:
            step = partial(begun.send, came)
        try:
            waits_for = step()
        except StopIteration:
            return


class StreamedAnswer(StreamingResponse):
    """A streamed answer whose call ends with the exchange, even before its first byte.

    The framework leaves an unfinished generator to the garbage collector; until then the board
    would go on generating.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
        send_limit_s: float | None = None,
        writer: ClientStream | None = None,
    ) -> None:
        """A client that takes no byte for ``send_limit_s`` is disconnected. ``writer`` is the end
        to which ``events`` may write themselves.
        """
        self._events, self._end, self._send_limit_s = events, end, send_limit_s
        self._writer = writer or ClientStream()
        self._direct: Send | None = None
        super().__init__(events, headers=dict(headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = scope.get(DIRECT)
        # The framework's own group of tasks would cost as much as all else that is done here.
        answering = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        except (ClientDisconnect, OSError):
            record_of_request().left = True
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._writer.close()
            await self._events.aclose()
            await self._end()

    async def stream_response(self, send: Send) -> None:
        """Send the answer; the framework's layers see only its start and its end.

        Each layer would cost time for every token.
        """
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        direct = self._direct or send
        if self._send_limit_s is not None:
            direct = _limited(direct, self._send_limit_s)
        self._writer.open(direct)
        end = {"type": "http.response.body", "body": b"", "more_body": False}
        async for chunk in self._events:
            if self._writer.last:  # it goes with the end: one segment less for each answer
                await self._writer.settle()
                end["body"] = chunk
            else:
                await self._writer.send(chunk)
        await send(end)


def _limited(send: Send, limit_s: float) -> Send:
    """Return a ``send`` that raises ``ClientDisconnect`` if the client does not read in time."""

    async def limited(message: Message) -> None:
        try:
            await asyncio.wait_for(send(message), limit_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise ClientDisconnect from None

    return limited
