"""Prompt cache files between two boards, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from contextlib import aclosing

import pytest

from rkserve.config.router import ChannelConfig
from rkserve.core.errors import BoardFailed, CacheNotFound, RkserveError
from rkserve.core.messages import CacheOffer, CacheQuery, CacheSource
from rkserve.transport import codec
from rkserve.transport.cache_transfer import MOST_UNREAD, PULSE, cache_key, fetched
from rkserve.transport.client import BoardConnection
from rkserve.transport.connection import Heartbeat
from rkserve.transport.server import ChannelAddress
from tests.support.boards.board_bench import request
from tests.support.boards.channel_bench import ENCRYPTED, PATIENT, Board, router, until

QUERY = CacheQuery(7, "kind@v1#salt", tuple(range(1000)))
CONTENT = os.urandom(3 << 20)
OFFER = CacheOffer(tuple(range(1200)), len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
CALM = Heartbeat(1.0, 120.0, 120.0)
CHUNK = 1024 * 1024


def parts(content: bytes = CONTENT) -> list[bytes]:
    return [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]


async def source_of(board: Board) -> CacheSource:
    if board.outlet.address is None:
        await board.outlet.listen("127.0.0.1")
    at = board.outlet.address
    assert at is not None
    return CacheSource("sim-1", at.host, at.port, 900, cache_key(at.key), at.fingerprint)


async def read(source: CacheSource) -> tuple[CacheOffer, bytes]:
    async with aclosing(fetched(source, QUERY, CALM)) as found:
        offer = await anext(found)
        assert isinstance(offer, CacheOffer)
        return offer, b"".join([part async for part in found if isinstance(part, bytes)])


async def parts_of(source: CacheSource) -> list[CacheOffer | bytes]:
    async with aclosing(fetched(source, QUERY, CALM)) as found:
        return [part async for part in found]


@pytest.mark.parametrize("config", [PATIENT, ENCRYPTED], ids=["in clear", "encrypted"])
async def test_a_file_arrives_as_it_is_and_the_connection_ends(config: ChannelConfig) -> None:
    board = Board("sim-1", config)
    board.file = [OFFER, *parts()]
    source = await source_of(board)
    try:
        assert await read(source) == (OFFER, CONTENT)
        assert board.queries == [QUERY]
        await until(lambda: not board.outlet.senders)
        assert (board.sending, len(board.outlet.connections)) == (0, 0)
    finally:
        await board.outlet.close()


async def test_a_board_without_the_file_says_so_and_no_file_is_an_empty_one() -> None:
    board = Board("sim-1")
    source = await source_of(board)
    try:
        board.file = [CacheNotFound("of that prompt")]
        with pytest.raises(CacheNotFound):
            await read(source)
        board.file = [dataclasses.replace(OFFER, file_bytes=0)]
        assert (await read(source))[1] == b""
    finally:
        await board.outlet.close()


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        pytest.param([b"x"], "without its offer", id="content first"),
        pytest.param([OFFER, CONTENT + b"x"], "longer", id="too long"),
        pytest.param([OFFER, OFFER], "longer", id="two offers"),
        pytest.param([OFFER, RuntimeError("a bug")], "internal error", id="a bug"),
    ],
)
async def test_another_answer_than_a_file_fails(
    file: list[CacheOffer | bytes | Exception], reason: str
) -> None:
    board = Board("sim-1")
    board.file = file
    source = await source_of(board)
    try:
        with pytest.raises(BoardFailed, match=reason):
            await parts_of(source)
    finally:
        await board.outlet.close()


async def test_a_reader_that_is_slow_holds_up_the_sender_and_one_that_leaves_ends_it() -> None:
    board, sent = Board("sim-1"), 0

    class Endless(list[CacheOffer | bytes | Exception]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal sent
            yield dataclasses.replace(OFFER, file_bytes=1 << 40)
            while True:
                sent += 1
                yield b"x" * CHUNK

    board.file = Endless()
    source = await source_of(board)
    try:
        found = fetched(source, QUERY, CALM)
        await anext(found)
        await until(lambda: sent > MOST_UNREAD)
        before = -1
        while before != sent:  # the buffers between both ends fill up
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 400, "100 MB wait in memory"
        for _ in range(sent + 10):
            assert len(await anext(found)) == CHUNK  # type: ignore[arg-type]
        assert sent > before
        await found.aclose()
        await until(lambda: board.sending == 0)
        assert not board.outlet.senders
    finally:
        await board.outlet.close()


async def test_a_board_that_ends_while_it_sends_is_an_error_at_once() -> None:
    board = Board("sim-1")
    board.file = [dataclasses.replace(OFFER, file_bytes=1 << 40), *parts()]
    source = await source_of(board)
    async with aclosing(fetched(source, QUERY, CALM)) as found:
        await anext(found)
        await board.outlet.close()
        with pytest.raises(BoardFailed):
            async for _ in found:
                pass


async def test_without_the_key_or_a_board_there_is_no_file() -> None:
    board = Board("sim-1")
    board.file = [OFFER, *parts()]
    source = await source_of(board)
    with pytest.raises(BoardFailed):
        await read(dataclasses.replace(source, key=bytes(32)))
    assert board.queries == []
    await board.outlet.close()
    with pytest.raises((OSError, RkserveError)):
        await read(source)


async def connected(address: ChannelAddress) -> BoardConnection:
    line = BoardConnection(address, PULSE)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: line.line, address.host, address.port)
    await line.ready
    return line


async def test_the_key_of_cache_files_opens_nothing_else() -> None:
    board = Board("sim-1")
    await source_of(board)
    address = board.outlet.address
    assert address is not None
    limited = dataclasses.replace(address, key=cache_key(address.key))
    for asked in ([codec.pack_request(1, request())], [codec.pack_call(1, "report", ())], None):
        line = await connected(limited)
        if asked is None:
            line.line.send_raw(b"x")
        else:
            line.line.send(asked)
        await line.over.wait()
    assert (board.requests, board.reports, board.queries) == ([], [], [])
    await board.outlet.close()


async def test_a_second_query_on_one_connection_is_cut_off() -> None:
    board = Board("sim-1")
    board.file = [dataclasses.replace(OFFER, file_bytes=1 << 40), *parts()]
    await source_of(board)
    address = board.outlet.address
    assert address is not None
    line = await connected(dataclasses.replace(address, key=cache_key(address.key)))
    line.line.send([codec.pack_query(1, QUERY)])
    line.line.send([codec.pack_query(2, QUERY)])
    await line.over.wait()
    await until(lambda: board.sending == 0)
    await board.outlet.close()


async def test_a_router_names_the_way_to_a_board_s_files_once_it_is_connected() -> None:
    board = Board("sim-1")
    board.file = [OFFER, *parts()]
    async with router(board) as (_, [link]):
        assert link.cache_source("replica of another", 900) is None
        source = link.cache_source("replica of sim-1", 900)
        assert source is not None
        assert source.tokens == 900
        assert "key" not in repr(source)
        assert (await read(source))[0] == OFFER
