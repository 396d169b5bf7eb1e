"""The clients of the benchmarks: hang-ups of either side, pauses and resumptions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.harness.client import hang_up, interrupt, one_client
from benchmarks.harness.exchange import (
    HangUp,
    InterruptedAnswer,
)
from rkserve.api.common import output
from rkserve.bench.connection import CHAT, ConnectionLost, Incoming, request_bytes
from rkserve.bench.processes import BenchFailed
from tests.support.boards.fakes import run_loop
from tests.support.values.bench_answers import EVENTS, HEAD, USAGE, chunk, chunked

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


class OneBoard:
    """A server that streams to one client until that leaves, and only then to the next."""

    def __init__(self) -> None:
        self.sent = 0
        self.left_s = 0.0
        self._free = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(await reader.readexactly(int(head.split(b"content-length: ")[1])))
        writer.write(HEAD)
        try:
            if body["endless"]:
                await self._stream_until_it_leaves(reader, writer)
            else:
                await self._free.wait()
                writer.write(b"".join(chunked(EVENTS)))
                await reader.read()
        finally:
            writer.close()

    async def _stream_until_it_leaves(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        gone = asyncio.ensure_future(reader.read())
        while not gone.done():
            writer.write(b"".join(chunked((chunk("word"),))[:1]))
            self.sent += 1
            await asyncio.wait({gone}, timeout=0.02)
        assert gone.exception() is not None or gone.result() == b""
        self.left_s = time.monotonic()
        self._free.set()


async def hang_up_on(board: OneBoard, events: int, limit_s: float) -> HangUp:
    async with await asyncio.start_server(board.serve, "127.0.0.1", 0) as server:
        return await hang_up(
            {
                "host": "127.0.0.1",
                "port": server.sockets[0].getsockname()[1],
                "leaving": {"endless": True},
                "waiting": {"endless": False},
                "events": events,
                "pause_s": 0.05,
                "until_s": time.monotonic() + limit_s,
            }
        )


def test_the_client_leaves_in_mid_stream_and_waits_for_the_next_answer() -> None:
    async def main() -> None:
        board = OneBoard()
        found = await hang_up_on(board, events=3, limit_s=30)
        assert found.left.end_s is None
        assert 3 <= len(found.left.content_s) <= board.sent
        assert found.closed_s >= found.left.content_s[2] + 0.05
        assert found.closed_s <= board.left_s < found.next.content_s[0]
        assert (found.next.completion_tokens, found.next.prefill_ms) == (2, 7.0)
        assert HangUp.from_json(json.loads(json.dumps(asdict(found)))) == found

    asyncio.run(main())


def test_an_answer_that_does_not_get_far_enough_to_be_left_is_a_failure() -> None:
    with pytest.raises(BenchFailed, match="did not get as far as it should"):
        asyncio.run(hang_up_on(OneBoard(), events=1_000_000, limit_s=0.5))


class PausableBoard:
    """A server that streams a text every 20 ms, and pauses, resumes and ends when told to."""

    def __init__(self, refuses: bool = False) -> None:
        self.paths: list[str] = []
        self.serving: list[asyncio.Task[None] | None] = []
        self._refuses = refuses
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.current_task())
        # The client hangs up when it has what it wants.
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.split(b"content-length: ")[1]))
                path = head.split(b" ")[1].decode()
                self.paths.append(path)
                if path == CHAT:
                    await self._stream(writer)
                else:
                    self._control(writer, path.rpartition("/")[2])
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        texts = [chunk(f"{n} ", id="chatcmpl-7") for n in range(12)]
        events = (chunk("", id="chatcmpl-7"), *texts, chunk(None, id="x", usage=USAGE), output.DONE)
        writer.write(HEAD)
        for part in chunked(events):
            await self._goes_on.wait()
            writer.write(part)
            await asyncio.sleep(0.02)

    def _control(self, writer: asyncio.StreamWriter, action: str) -> None:
        status = b"200 OK"
        if self._refuses:
            status = b"409 Conflict"
        elif action == "pause":
            self._goes_on.clear()
        else:
            self._goes_on.set()
        said = json.dumps({"status": action, "kv": "kept", "tokens": 3}).encode()
        head = b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (status, len(said))
        writer.write(head + said)


async def interrupt_at(board: PausableBoard, pauses_s: list[float]) -> InterruptedAnswer:
    async with await asyncio.start_server(board.serve, "127.0.0.1", 0) as server:
        command = {
            "host": "127.0.0.1",
            "port": server.sockets[0].getsockname()[1],
            "body": {},
            "pauses_s": pauses_s,
            "rest_s": 0.1,
            "until_s": time.monotonic() + 30,
        }
        try:
            return await interrupt(command)
        finally:
            await asyncio.gather(*(task for task in board.serving if task is not None))


def test_the_client_pauses_and_resumes_the_generation_that_it_streams() -> None:
    board = PausableBoard()

    found = asyncio.run(interrupt_at(board, [0.0, 0.01]))

    control = "/v1/generations/chatcmpl-7"
    assert board.paths == [CHAT, *[f"{control}/pause", f"{control}/resume"] * 2]
    assert found.text == "".join(f"{n} " for n in range(12))
    assert [(pause.kv, pause.tokens) for pause in found.pauses] == [("kept", 3)] * 2
    first, second = found.pauses
    before = sum(at_s < first.asked_s for at_s in found.answer.content_s)
    between = sum(first.resumed_s < at_s < second.asked_s for at_s in found.answer.content_s)
    assert before >= 2
    assert between >= 2
    for pause in found.pauses:
        assert pause.asked_s < pause.answered_s < pause.answered_s + 0.1 <= pause.resumed_s
    assert InterruptedAnswer.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_an_answer_that_ends_before_its_pause_is_a_failure() -> None:
    with pytest.raises(BenchFailed, match="ended before it got as far as it should"):
        asyncio.run(interrupt_at(PausableBoard(), [0.0] * 20))


def test_a_pause_that_is_refused_is_a_failure() -> None:
    with pytest.raises(BenchFailed, match="pause was answered by HTTP 409"):
        asyncio.run(interrupt_at(PausableBoard(refuses=True), [0.0]))
