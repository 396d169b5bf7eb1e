"""Streamed answers: the order of chunks, clients that do not read, and broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from rkserve.core.messages import Delta
from rkserve.http.streamed_answer import ClientStream, StreamedAnswer
from tests.support.boards.fake_boards import answer
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, chat, scripted, send


class Server:
    """A server's ``send``, which waits while the client does not read."""

    def __init__(self) -> None:
        self.reads, self.broken = asyncio.Event(), False
        self.sent: list[bytes] = []
        self.reads.set()

    async def __call__(self, message: Message) -> None:
        if self.broken:
            raise OSError("the connection is closed")
        await self.reads.wait()
        await asyncio.sleep(0) if not self.sent and message["body"] == b"slow" else None
        self.sent.append(message["body"])


async def test_a_chunk_is_sent_in_the_same_turn() -> None:
    server, writer, noted = Server(), ClientStream(), []
    assert not writer.ready
    writer.open(server)
    writer.write(b"a", lambda: noted.append("a"))
    writer.write(b"b", lambda: noted.append("b"))
    assert (server.sent, noted, writer.ready) == ([b"a", b"b"], ["a", "b"], True)


async def test_a_client_that_does_not_read_gets_every_chunk_later_and_in_order() -> None:
    server, writer, noted = Server(), ClientStream(), []
    writer.open(server)
    server.reads.clear()
    writer.write(b"a", lambda: noted.append("a"))
    assert (server.sent, noted, writer.ready) == ([], [], False)
    rest = asyncio.ensure_future(writer.send(b"b"))
    await asyncio.sleep(0.01)
    assert server.sent == []
    server.reads.set()
    await rest
    assert (server.sent, noted, writer.ready) == ([b"a", b"b"], ["a"], True)


async def test_a_send_that_waits_more_than_once_is_carried_on() -> None:
    server, writer, noted = Server(), ClientStream(), []
    writer.open(server)
    server.reads.clear()
    writer.write(b"slow", lambda: noted.append("slow"))
    await asyncio.sleep(0)
    server.reads.set()
    await writer.settle()
    assert (server.sent, noted) == ([b"slow"], ["slow"])


async def test_closing_ends_a_send_that_waits() -> None:
    server, writer, noted = Server(), ClientStream(), []
    writer.open(server)
    server.reads.clear()
    writer.write(b"a", lambda: noted.append("a"))
    writer.close()
    server.reads.set()
    await asyncio.sleep(0.01)
    assert (server.sent, noted, writer.ready) == ([], [], False)


async def test_a_broken_connection_is_raised_with_the_next_chunk() -> None:
    server, writer, noted = Server(), ClientStream(), []
    writer.open(server)
    server.broken = True
    writer.write(b"a", lambda: noted.append("a"))
    assert (noted, writer.ready) == ([], False)
    with pytest.raises(OSError, match="closed"):
        await writer.send(b"b")


def test_the_last_chunk_comes_with_the_end() -> None:
    async def chunks(writer: ClientStream) -> AsyncGenerator[bytes, None]:
        yield b"first"
        writer.last = True
        yield b"last"

    async def main() -> list[tuple[bytes, bool]]:
        writer, sent = ClientStream(), []

        async def keep(message: Message) -> None:
            sent.append((message.get("body", b""), message.get("more_body", True)))

        async def end() -> None:
            pass

        made = StreamedAnswer(chunks(writer), end, {}, writer=writer)
        await made.stream_response(keep)
        return sent[1:]

    assert run_loop(main()) == [(b"first", True), (b"last", False)]


def test_an_answer_that_is_there_at_once_is_one_chunk() -> None:
    of = scripted(*answer("a", "Hel", "lo"))
    found = send(of, "POST", CHAT, json=chat(stream=True)).text
    assert found.count("data: ") == 5  # role, two deltas, the end, [DONE]
    assert found.endswith("data: [DONE]\n\n")
    assert of.boards.closed == ["replica of a"]


def test_a_delta_behind_an_error_is_not_lost() -> None:
    of = scripted(*answer("a", "Hello")[:2], Delta(" you", (7,)), ValueError("a defect"))
    found = send(of, "POST", CHAT, json=chat(stream=True)).text
    assert found.index("Hello") < found.index(" you") < found.index("internal_error")
