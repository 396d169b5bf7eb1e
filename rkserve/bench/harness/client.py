"""The clients of the benchmark: one process, one plain asyncio protocol per connection.

A full HTTP library would cost more per token than the cluster does. Nothing is parsed while it
measures; see ``stream``.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

from rkserve.bench.harness.child import BenchFailed, Json, OnProgress, serve_commands
from rkserve.bench.harness.stream import (
    OK,
    HangUp,
    Incoming,
    InterruptedAnswer,
    PausedSpan,
    is_data,
    read_exchange,
    read_id,
    read_text,
)

CHAT = "/v1/chat/completions"
CONTROL = "/v1/generations"
TEXTS_BETWEEN = 2  # pauses: the first text is the resumption's, the second one the decode's


class ConnectionLost(BenchFailed):
    """The server closed the connection; ``heard`` is False if no byte of the answer had arrived."""

    heard = True


class Connection(asyncio.Protocol):
    """One kept-alive connection with one request at a time on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._incoming: Incoming | None = None
        self._ended: asyncio.Future[None] | None = None
        self._arrived = asyncio.Event()

    @classmethod
    async def open(
        cls, host: str, port: int, tls: ssl.SSLContext | None = None, name: str | None = None
    ) -> Connection:
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
        self._arrived.set()
        if incoming.done:
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        if self._incoming is None:
            return
        self._incoming.eof(time.monotonic())
        lost = ConnectionLost(f"the connection was lost in mid-answer: {exc or 'closed'}")
        lost.heard = self._incoming.last_s is not None
        self._settle(None if self._incoming.done else lost)

    async def ask(self, request: bytes, until_s: float) -> Incoming:
        """Send a request and wait for its answer, or for ``until_s``; then it hangs up."""
        self.send(request)
        return await self.answer(until_s)

    def send(self, request: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._incoming = Incoming(sent_s=time.monotonic())
        self._transport.write(request)

    async def answer_at(self, until_s: float) -> tuple[Incoming, float]:
        """Wait for the answer, and return it with the moment behind all that came before it.

        Every socket that has something is read in one turn of the loop, in no particular order; the
        moment is the one between that turn and the next. Raises ``BenchFailed`` at ``until_s``.
        """
        assert self._ended is not None
        arrived_s = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(lambda _: arrived_s.set_result(time.monotonic()))
        incoming = await self.answer(until_s)
        if not arrived_s.done():
            raise BenchFailed("a control call was not answered in time")
        return incoming, arrived_s.result()

    async def reach(self, enough: Callable[[Incoming], bool], until_s: float) -> None:
        """Wait until so much of the answer is there.

        Raises ``BenchFailed`` at ``until_s``, or where the answer ends before.
        """
        assert self._incoming is not None
        assert self._ended is not None
        while not enough(self._incoming):
            if self._ended.done():
                self._ended.result()
                raise BenchFailed("an answer ended before it got as far as it should")
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), until_s - time.monotonic())
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                raise BenchFailed("an answer did not get as far as it should") from None

    @property
    def so_far(self) -> Incoming:
        """The part of the answer that has arrived."""
        assert self._incoming is not None
        return self._incoming

    async def answer(self, until_s: float) -> Incoming:
        """Wait for the answer to what was sent, or for ``until_s``; then it hangs up."""
        incoming = self.so_far
        if not await self.ends_by(until_s):
            self.close()
        return incoming

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

    def leave(self) -> Incoming:
        """Hang up in the middle of an answer. Returns what there was of it."""
        assert self._incoming is not None
        incoming = self._incoming
        self.close()
        return incoming

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
        self._arrived.set()


class RetryingClient:
    """A client that asks one request after the other, on one connection where it is let."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._kept: Connection | None = None

    async def ask(self, request: bytes, until_s: float) -> Incoming:
        """Send a request and wait for its answer, or for ``until_s``. Raises ``ConnectionLost``.

        A server may hang up between two requests, which the second one crosses on its way; clients
        ask again then, and so does this one. It is no witness of losses: those before the first
        byte on a kept connection are hidden by that.
        """
        kept, self._kept = self._kept, None
        if kept is not None and not kept.closed:
            try:
                return await self._ask(kept, request, until_s)
            except ConnectionLost as exc:
                if exc.heard:
                    raise
        return await self._ask(await Connection.open(self._host, self._port), request, until_s)

    async def _ask(self, connection: Connection, request: bytes, until_s: float) -> Incoming:
        incoming = None
        try:
            incoming = await connection.ask(request, until_s)
        finally:
            if incoming is not None and incoming.reusable:
                self._kept = connection
            else:
                connection.close()
        return incoming

    def close(self) -> None:
        """Hang up; once more does no harm."""
        if self._kept is not None:
            self._kept.close()


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


async def one_client(
    command: Json, requests: Sequence[bytes], start_s: float, found: list[Incoming]
) -> None:
    """Ask one request after the other, from ``start_s`` to the command's ``until_s``."""
    await asyncio.sleep(start_s)
    asker = RetryingClient(command["host"], command["port"])
    left = command.get("requests_each", -1)
    index = 0
    while left and time.monotonic() < command["until_s"]:
        request = requests[index % len(requests)]
        found.append(await asker.ask(request, command["until_s"]))
        index, left = index + 1, left - 1
    asker.close()


async def load(command: Json) -> list[Incoming]:
    """Be all clients of a command at once."""
    found: list[Incoming] = []
    requests = [request_bytes(command["host"], command["port"], b) for b in command["bodies"]]
    clients = command["clients"]
    await asyncio.gather(
        *(
            # Each begins with another prompt, and at another time: boards in step with each other
            # would all be caught in the same phase by the ends of the measurement.
            one_client(
                command,
                requests[shift % len(requests) :] + requests[: shift % len(requests)],
                command["stagger_s"] * shift / clients,
                found,
            )
            for shift in range(clients)
        )
    )
    return found


async def hang_up(command: Json) -> HangUp:
    """Leave an answer in mid-stream, with another request queued behind it on the same board.

    It leaves ``pause_s`` after both the answer has ``events`` events and the other request is in
    the queue, which the headers of its answer say.
    """
    host, port, until_s = command["host"], command["port"], command["until_s"]
    leaver, waiter = await Connection.open(host, port), await Connection.open(host, port)
    try:
        leaver.send(request_bytes(host, port, command["leaving"]))
        await leaver.reach(lambda answer: bool(answer.events), until_s)
        waiter.send(request_bytes(host, port, command["waiting"]))
        await waiter.reach(lambda answer: answer.status != 0, until_s)
        await leaver.reach(lambda answer: len(answer.events) >= command["events"], until_s)
        await asyncio.sleep(command["pause_s"])
        closed_s = time.monotonic()
        left = leaver.leave()
        behind = await waiter.answer(until_s)
    finally:
        leaver.close()
        waiter.close()
    return HangUp(read_exchange(left), closed_s, read_exchange(behind))


async def talk(command: Json) -> Incoming:
    """Ask once."""
    host, port = command["host"], command["port"]
    connection = await Connection.open(host, port)
    try:
        request = request_bytes(host, port, command["body"])
        return await connection.ask(request, command["until_s"])
    finally:
        connection.close()


async def interrupt(command: Json) -> InterruptedAnswer:
    """Pause an answer and resume it, once for each of ``pauses_s``, and read it to its end.

    Each of these is how long after a text the pause is asked for. What arrives within ``rest_s`` of
    the pause's answer belongs to it; then the resumption is asked for.
    """
    host, port, until_s = command["host"], command["port"], command["until_s"]
    talker, controller = await Connection.open(host, port), await Connection.open(host, port)
    pauses: list[PausedSpan] = []
    try:
        talker.send(request_bytes(host, port, command["body"]))
        await talker.reach(lambda answer: any(is_data(e) for _, e in answer.events), until_s)
        control = GenerationControl(controller, command, read_id(talker.so_far))
        for wait_s in command["pauses_s"]:
            wanted = _data_events(talker.so_far) + TEXTS_BETWEEN
            await talker.reach(partial(_has_data_events, wanted), until_s)
            await asyncio.sleep(wait_s)
            asked_s, answered_s, said = await control.post("pause")
            await asyncio.sleep(command["rest_s"])
            resumed_s, _, _ = await control.post("resume")
            pauses.append(PausedSpan(asked_s, answered_s, resumed_s, said["kv"], said["tokens"]))
        answer = await talker.answer(until_s)
    finally:
        talker.close()
        controller.close()
    return InterruptedAnswer(read_exchange(answer), read_text(answer), tuple(pauses))


class GenerationControl:
    """Calls that control one generation, on a connection of their own."""

    def __init__(self, connection: Connection, command: Json, generation: str) -> None:
        self._connection = connection
        self._command = command
        self._generation = generation

    async def post(self, action: str) -> tuple[float, float, Json]:
        """Return when it was asked and answered, and the answer. Raises ``BenchFailed``."""
        path = f"{CONTROL}/{self._generation}/{action}"
        host, port, until_s = (self._command[key] for key in ("host", "port", "until_s"))
        incoming = await self._connection.ask(request_bytes(host, port, {}, path), until_s)
        words = b"".join(event for _, event in incoming.events).decode(errors="replace")
        if incoming.status != OK or incoming.done_s is None:
            raise BenchFailed(f"{action} was answered by HTTP {incoming.status}: {words}")
        said: Json = json.loads(words)
        return incoming.sent_s, incoming.done_s, said


def _data_events(answer: Incoming) -> int:
    return sum(is_data(event) for _, event in answer.events)


def _has_data_events(wanted: int, answer: Incoming) -> bool:
    return _data_events(answer) >= wanted


def carry_out(command: Json, _: OnProgress) -> dict[str, Any]:
    """Execute one command and return its result."""
    try:
        if command["do"] == "hang up":
            return asdict(asyncio.run(hang_up(command)))
        if command["do"] == "interrupt":
            return asdict(asyncio.run(interrupt(command)))
        if command["do"] == "talk":
            answer = asyncio.run(talk(command))
            return {"exchange": read_exchange(answer).to_json(), "text": read_text(answer)}
        incoming = asyncio.run(load(command))
    except OSError as exc:
        raise BenchFailed(f"the cluster cannot be reached: {exc}") from exc
    return {"exchanges": [read_exchange(one).to_json() for one in incoming]}


if __name__ == "__main__":
    serve_commands(carry_out)
