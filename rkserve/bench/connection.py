"""Kept-alive connections of HTTP/1.1 that note when each event of a streamed answer arrived.

A full HTTP library would cost more per token than the cluster does. While bytes arrive they are
only split into events with their time, because the client shares the machine with the system under
test. For the same reason the parser is hand-made: on one core it takes 3.8 microseconds per chunk,
and h11 16.4.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from typing_extensions import Self

from rkserve.bench.processes import BenchFailed, Json

CHAT = "/v1/chat/completions"
OK = 200
BODILESS = (204, 304)
LONGEST_HEAD = 64 << 10
# Beyond any model's output: a server that sends without end must not fill the client's memory.
LONGEST_EVENT = 8 << 20
LONGEST_ANSWER = 64 << 20


class NotHttp(BenchFailed):
    """A server sent bytes that are no answer of HTTP/1.1."""


@dataclass
class Incoming:
    """The bytes of one answer, cut into events. ``done`` once the answer is complete."""

    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[float, bytes]] = field(default_factory=list)
    head_s: float | None = None
    last_s: float | None = None
    done_s: float | None = None
    _raw: bytes = b""
    _body: bytes = b""
    _chunked: bool = False
    _length: int | None = None
    _size: int = 0

    @property
    def done(self) -> bool:
        """True once the answer is complete."""
        return self.done_s is not None

    @property
    def size(self) -> int:
        """Bytes that have arrived."""
        return self._size

    @property
    def reusable(self) -> bool:
        """True if the connection can carry another request."""
        bounded = self._chunked or self._length is not None or self.status in BODILESS
        return self.done and bounded and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse bytes that arrived at ``now_s``. Raises ``NotHttp``."""
        self.last_s = now_s
        self._raw += data
        self._size += len(data)
        try:
            if self.status or self._take_head(now_s):
                self._take_body(now_s)
        except ValueError:
            raise NotHttp(f"no answer of HTTP/1.1: {self._raw[:80]!r}") from None

    def eof(self, now_s: float) -> None:
        """The server has closed, which is how an answer without a length ends. See ``done``."""
        if self.status and not self.done and not self._chunked and self._length is None:
            self._end(now_s)

    def _take_body(self, now_s: float) -> None:
        if self._chunked:
            self._take_chunks(now_s)
        elif self._length is None:
            self._body, self._raw = self._body + self._raw, b""
        elif len(self._raw) >= self._length:
            self._body, self.done_s = self._raw, now_s
        if b"\r" in self._body:
            self._body = self._body.replace(b"\r\n", b"\n")
        *events, self._body = self._body.split(b"\n\n")
        if len(self._body) > LONGEST_EVENT or self._size > LONGEST_ANSWER:
            raise ValueError
        self.events += [(now_s, event) for event in events]
        if self.done:
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        self.done_s = now_s
        if self._body:
            self.events.append((now_s, self._body))
            self._body = b""

    def _take_head(self, now_s: float) -> bool:
        if not self._raw.startswith(b"HTTP/1."[: len(self._raw)]):
            raise ValueError
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            if len(head) > LONGEST_HEAD:
                raise ValueError
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        _, status, *_ = first.split()
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.status, self.head_s, self._raw = int(status), now_s, rest
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if (length := self.headers.get("content-length")) is not None:
            self._length = int(length)
        elif self.status in BODILESS:
            self._length = 0
        return True

    def _take_chunks(self, now_s: float) -> None:
        raw, at, body = self._raw, 0, [self._body]
        while (line_end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:line_end].partition(b";")[0], 16)
            if size < 0:
                raise ValueError
            start = line_end + 2
            if len(raw) < start + size + 2:
                break
            at = start + size + 2
            if size == 0:
                self.done_s = now_s
                break
            body.append(raw[start : start + size])
        else:
            if len(raw) - at > LONGEST_HEAD:
                raise ValueError
        self._raw, self._body = raw[at:], b"".join(body)


class ConnectionLost(BenchFailed):
    """The server closed the connection; ``began`` is False if no byte of the answer had arrived."""

    began = True


class Connection(asyncio.Protocol):
    """One kept-alive connection with one request at a time on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._incoming: Incoming | None = None
        self._ended: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls, host: str, port: int, tls: ssl.SSLContext | None = None, name: str | None = None
    ) -> Self:
        """Connect. With ``tls`` the server must prove that it is ``name``."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            cls, host, port, ssl=tls, server_hostname=name if tls else None
        )
        return connection

    @property
    def closed(self) -> bool:
        """True if either side has closed the connection."""
        return self._transport is None or self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        incoming = self._incoming
        if incoming is None:
            return
        try:
            incoming.feed(data, time.monotonic())
        except BenchFailed as exc:
            self._settle(exc)
            self.close()
            return
        if incoming.done:
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        if self._incoming is None:
            return
        self._incoming.eof(time.monotonic())
        lost = ConnectionLost(f"the connection was lost in mid-answer: {exc or 'closed'}")
        lost.began = self._incoming.last_s is not None
        self._settle(None if self._incoming.done else lost)

    def send(self, request: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._incoming = Incoming(sent_s=time.monotonic())
        self._transport.write(request)

    @property
    def so_far(self) -> Incoming:
        """The part of the answer that has arrived."""
        assert self._incoming is not None
        return self._incoming

    async def ends_by(self, until_s: float) -> bool:
        """Wait for the answer to what was sent; False where ``until_s`` comes first.

        Raises ``BenchFailed`` where it is lost.
        """
        assert self._ended is not None
        done, _ = await asyncio.wait({self._ended}, timeout=until_s - time.monotonic())
        if done:
            self._incoming = None
            self._ended.result()
        return bool(done)

    def close(self) -> None:
        """Hang up; once more does no harm."""
        assert self._transport is not None
        self._incoming = None
        self._transport.abort()

    def _settle(self, failure: BenchFailed | None) -> None:
        if self._ended is None or self._ended.done() or self._incoming is None:
            return
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)


def request_bytes(
    host: str,
    port: int,
    body: Json,
    path: str = CHAT,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return a request as it goes over the wire."""
    content = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n{more}\r\n"
    )
    return head.encode() + content
