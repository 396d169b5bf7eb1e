"""The clients of the benchmark: one process, one plain asyncio protocol per connection.

A full HTTP library would cost more per token than the cluster does. Nothing is parsed while it
measures; see ``stream``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rkserve.bench.child import BenchFailed, Json, serve_commands
from rkserve.bench.stream import HangUp, Incoming, read_exchange

PATH = "/v1/chat/completions"


class Connection(asyncio.Protocol):
    """One kept-alive connection with one request at a time on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._incoming: Incoming | None = None
        self._ended: asyncio.Future[None] | None = None
        self._arrived = asyncio.Event()

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connect."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        incoming = self._incoming
        if incoming is None:
            return
        incoming.feed(data, time.monotonic())
        self._arrived.set()
        if incoming.done:
            self._settle(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._settle(BenchFailed(f"the connection was lost in mid-answer: {exc}"))

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

    async def reach(self, enough: Callable[[Incoming], bool], until_s: float) -> None:
        """Wait until so much of the answer is there. Raises ``BenchFailed`` at ``until_s``."""
        assert self._incoming is not None
        while not enough(self._incoming):
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), until_s - time.monotonic())
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                raise BenchFailed("an answer did not get as far as it should") from None

    async def answer(self, until_s: float) -> Incoming:
        """Wait for the answer to what was sent, or for ``until_s``; then it hangs up."""
        assert self._ended is not None
        assert self._incoming is not None
        done, _ = await asyncio.wait({self._ended}, timeout=until_s - time.monotonic())
        incoming, self._incoming = self._incoming, None
        if done:
            self._ended.result()
        else:
            self.close()
        return incoming

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


def request_bytes(host: str, port: int, body: Json) -> bytes:
    """Return a request as it goes over the wire."""
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def one_client(
    command: Json, requests: Sequence[bytes], start_s: float, found: list[Incoming]
) -> None:
    """Ask one request after the other, from ``start_s`` to the command's ``until_s``."""
    await asyncio.sleep(start_s)
    connection = await Connection.open(command["host"], command["port"])
    left = command.get("requests_each", -1)
    index = 0
    while left and time.monotonic() < command["until_s"]:
        request = requests[index % len(requests)]
        found.append(await connection.ask(request, command["until_s"]))
        index, left = index + 1, left - 1
    connection.close()


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

    It leaves ``pause_s`` after both the answer has ``events`` events and the board has queued the
    other request, which the headers of its answer say.
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


def carry_out(command: Json) -> dict[str, Any]:
    """Do what one command asks for and return what came of it."""
    try:
        if command["do"] == "hang up":
            return asdict(asyncio.run(hang_up(command)))
        incoming = asyncio.run(load(command))
    except OSError as exc:
        raise BenchFailed(f"the cluster cannot be reached: {exc}") from exc
    return {"exchanges": [read_exchange(one).to_json() for one in incoming]}


if __name__ == "__main__":
    serve_commands(carry_out)
