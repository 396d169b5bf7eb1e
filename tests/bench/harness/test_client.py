"""Connections of the benchmark's clients to servers that hang up, each in its own way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rkserve.bench.harness.client import ConnectionLost, one_client, request_bytes
from rkserve.bench.harness.stream import Incoming
from tests.support.boards.fakes import run_loop

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"


class Server:
    """Says these on each connection, one to a request, and hangs up at the request after them."""

    def __init__(self, *connections: Sequence[bytes]) -> None:
        self.connections = list(connections)
        self.asked: list[int] = []

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, answers = len(self.asked), list(self.connections.pop(0))
        self.asked.append(0)
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break  # the client has hung up
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.asked[number] += 1
            if not answers:
                break
            writer.write(said := answers.pop(0))
            await writer.drain()
            if said != WHOLE:
                break
        writer.close()

    async def serve(self, requests: int) -> list[Incoming]:
        """Be asked so often by a client, and return what it got."""
        found: list[Incoming] = []
        async with await asyncio.start_server(self._talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            until_s = time.monotonic() + 60
            command: dict[str, Any] = {
                "host": "127.0.0.1",
                "port": port,
                "until_s": until_s,
                "requests_each": requests,
            }
            await one_client(command, [request_bytes("127.0.0.1", port, {})], 0.0, found)
        return found


@pytest.mark.parametrize(
    ("connections", "asked"),
    [
        pytest.param([[WHOLE] * 3], [3], id="it never hangs up"),
        pytest.param([[WHOLE], [WHOLE] * 2], [2, 2], id="while the next request is on its way"),
        pytest.param([[WHOLE, LAST], [WHOLE]], [2, 1], id="after an answer that says so"),
    ],
)
def test_who_is_hung_up_on_between_answers_asks_again(
    connections: list[list[bytes]], asked: list[int]
) -> None:
    server = Server(*connections)
    found = run_loop(server.serve(3), 100.0)
    assert [one.done for one in found] == [True] * 3
    assert server.asked == asked


@pytest.mark.parametrize(
    "connections",
    [
        pytest.param([[WHOLE, HALF]], id="in mid-answer"),
        pytest.param([[]], id="on a connection that was never answered"),
        pytest.param([[WHOLE], []], id="once more, before the second answer"),
    ],
)
def test_an_answer_that_is_lost_is_an_error(connections: list[list[bytes]]) -> None:
    with pytest.raises(ConnectionLost):
        run_loop(Server(*connections).serve(3), 100.0)
