"""The board's end of the channel: strangers, Routers that send nonsense, and its end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rkserve.config.router import ChannelConfig
from rkserve.core.errors import BoardFailed, RequestError
from rkserve.core.messages import Delta
from rkserve.transport.connection import NONCE_BYTES, RouterHandshake
from rkserve.transport.server import MAX_UNPROVEN, ChannelAddress
from tests.support.boards.channel_bench import (
    ENCRYPTED,
    HASTY,
    PATIENT,
    Board,
    connect,
    read,
    router,
    until,
)
from tests.support.boards.channel_streams import answering, spoken, words
from tests.support.boards.fake_boards import accepted, finished
from tests.support.boards.fakes import run_loop


async def test_a_router_that_is_frozen_frees_the_board() -> None:
    async with answering(pulse=HASTY) as (board, channels, _, events):
        line = channels.line("replica of sim-0")
        assert line is not None
        line.line._timer.cancel()  # type: ignore[union-attr]
        line.line._transport.pause_reading()  # type: ignore[union-attr]
        await until(lambda: board.running == 0)
        assert not board.outlet.connections
        await events.aclose()


@pytest.mark.parametrize("config", [PATIENT, ENCRYPTED], ids=["in clear", "encrypted"])
async def test_a_router_that_does_not_read_fills_no_memory_and_misses_nothing(
    config: ChannelConfig,
) -> None:
    board, go, count = Board("sim-0", config), asyncio.Event(), 3000
    long = [Delta("x" * 1000, (number,)) for number in range(count)]
    board.steps = [accepted("sim-0"), go, *long, finished(count)]
    async with router(board) as (channels, [link]):
        line = channels.line("replica of sim-0")
        assert line is not None
        (guest,) = board.outlet.connections
        ends = [line.line._transport, guest.line._transport]
        for end in ends:
            shrink(end)
        reading = asyncio.ensure_future(read(link, board))
        await until(lambda: board.running == 1)
        ends[0].pause_reading()  # type: ignore[union-attr]
        go.set()
        await until(lambda: not guest.tasks)
        assert guest.line.full
        assert len(guest._waiting) <= 3, "what waits has been merged"
        ends[0].resume_reading()  # type: ignore[union-attr]
        found = await reading
        assert spoken(found) == "x" * 1000 * count
        ids = [one for event in found if isinstance(event, Delta) for one in event.token_ids]
        assert ids == list(range(count))


def shrink(transport: asyncio.Transport | None) -> None:
    """Let the kernel hold little of what nobody reads."""
    assert transport is not None
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, 1 << 16)


STRANGERS = [
    pytest.param(b"GET / HTTP/1.1\r\nhost: board\r\n\r\n" + b" " * 64, id="a browser"),
    pytest.param(b"\0" * (NONCE_BYTES + 32), id="zeros"),
    pytest.param(b"\x80\x04cos\nsystem\n(S'true'\ntR." + b"." * 64, id="a pickle"),
]


@pytest.mark.parametrize("config", [PATIENT, ENCRYPTED], ids=["in clear", "encrypted"])
@pytest.mark.parametrize("said", STRANGERS)
async def test_a_stranger_is_cut_off_and_harms_nobody(said: bytes, config: ChannelConfig) -> None:
    board = Board("sim-0", config)
    board.steps = words("Hello")
    async with router(board) as (_, [link]):
        address = board.outlet.address
        assert address is not None
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(said)
        heard = await reader.read(-1) if await opened(reader) else b""
        assert heard == b"", "nothing but the opening"
        writer.close()
        assert spoken(await read(link, board)) == "Hello"


async def opened(reader: asyncio.StreamReader) -> bool:
    """Read the board's opening; False where it was cut before."""
    try:
        await reader.readexactly(RouterHandshake(b"k" * 32).need)
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return True


@pytest.mark.parametrize("encrypt", ["never", "always"])
async def test_a_stranger_who_says_nothing_is_cut_off(encrypt: str) -> None:
    board = Board("sim-0", HASTY.model_copy(update={"encrypt": encrypt}))
    async with router(board, connected=False):
        address = board.outlet.address
        assert address is not None
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert await opened(reader)
        while board.outlet.connections:
            writer.write(b"x")  # a byte now and then is no proof
            await asyncio.sleep(0.02)
        writer.close()


@pytest.mark.parametrize("config", [PATIENT, ENCRYPTED], ids=["in clear", "encrypted"])
async def test_strangers_never_have_more_than_a_few_connections(config: ChannelConfig) -> None:
    board = Board("sim-0", config)  # patient: none of them is cut off for its silence
    board.steps = words("Hello")
    async with router(board) as (_, [link]):
        address = board.outlet.address
        assert address is not None
        strangers = [
            await asyncio.open_connection(address.host, address.port)
            for _ in range(MAX_UNPROVEN + 20)
        ]
        cut = [asyncio.ensure_future(reader.read(-1)) for reader, _ in strangers]
        # Whoever is cut off reads to the end, or finds the connection reset.
        await until(lambda: sum(one.done() for one in cut) == 20)
        assert len(board.outlet.connections) == MAX_UNPROVEN + 1
        assert spoken(await read(link, board)) == "Hello"
        for one, (_, writer) in zip(cut, strangers, strict=True):
            one.cancel()
            writer.close()
        await asyncio.gather(*cut, return_exceptions=True)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([[7, 0]], id="a call without a request"),
        pytest.param([[7, 0, "r", "m", "no ids"]], id="a request that is none"),
        pytest.param([[7, 9]], id="an unknown call"),
        pytest.param([[7, "stop"]], id="a method that is not offered"),
        pytest.param([[7, "adopt"]], id="a call without its argument"),
        pytest.param([[7, "adopt", [1, "x"]]], id="an argument that is none"),
        pytest.param([[7, 0, "r", "m", [1], 4], [7, 0, "r", "m", [1], 4]], id="one number twice"),
    ],
)
async def test_a_router_that_talks_nonsense_is_cut_off(said: list[list[object]]) -> None:
    board = Board("sim-0")
    board.steps = [accepted("sim-0"), asyncio.Event()]
    async with router(board) as (channels, [link]):
        line = channels.line("replica of sim-0")
        assert line is not None
        line.line.send(said)
        await until(lambda: not line.line.open)
        await until(lambda: board.running == 0 and not board.outlet.connections)
        await connect(channels, [board], [link])
        board.steps = words("again")
        assert spoken(await read(link, board)) == "again"


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        pytest.param(ZeroDivisionError("secret"), "ZeroDivisionError: secret", id="of Python"),
        pytest.param(
            RequestError({"a": 1}),  # type: ignore[arg-type] # no plain value has such a form
            "raised an error that cannot be sent",
            id="of ours, with what is no text",
        ),
    ],
)
def test_a_bug_of_the_board_is_told_as_one_and_costs_no_other_stream(
    caplog: pytest.LogCaptureFixture, raised: Exception, words: str
) -> None:
    async def main() -> None:
        board, go = Board("sim-0"), asyncio.Event()
        board.steps = [accepted("sim-0"), go, Delta("a", (1,)), finished(1)]
        async with router(board) as (_, [link]):
            reading = asyncio.ensure_future(read(link, board))
            await until(lambda: board.running == 1)
            board.steps = [accepted("sim-0"), raised]
            with pytest.raises(BoardFailed, match="an internal error; see the board's log"):
                await read(link, board)
            go.set()
            assert spoken(await reading) == "a"

    run_loop(main())
    assert words in caplog.text


async def test_a_board_that_is_ended_finishes_its_answers_and_takes_no_others() -> None:
    board, go = Board("sim-0"), asyncio.Event()
    board.steps = [accepted("sim-0"), go, Delta("a", (1,)), finished(1)]
    async with router(board) as (_, [link]):
        reading = asyncio.ensure_future(read(link, board))
        await until(lambda: board.running == 1)
        drained = asyncio.ensure_future(board.outlet.drain(120.0))
        with pytest.raises(BoardFailed, match="its replica is being ended"):
            await read(link, board)
        assert not drained.done()
        go.set()
        await drained
        assert spoken(await reading) == "a"
        assert len(board.requests) == 1


async def test_a_board_that_is_ended_waits_no_longer_than_it_may() -> None:
    board = Board("sim-0")
    board.steps = [accepted("sim-0"), asyncio.Event()]
    async with router(board) as (_, [link]):
        reading = asyncio.ensure_future(read(link, board))
        await until(lambda: board.running == 1)
        await board.outlet.drain(0.05)
        await board.outlet.close()
        with pytest.raises(BoardFailed):
            await reading


async def test_boards_take_ports_of_a_range_and_one_too_many_goes_without() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = ChannelConfig(ports=(port, port))
    first, second = Board("sim-0", config), Board("sim-1", config)
    await first.outlet.listen("127.0.0.1")
    assert first.outlet.address is not None
    assert first.outlet.address.port == port
    with pytest.raises(OSError, match="address already in use"):
        await second.outlet.listen("127.0.0.1")
    assert second.outlet.address is None
    await first.outlet.close()


def test_an_address_does_not_show_its_key() -> None:
    assert "kkkk" not in repr(ChannelAddress("sim-0", "127.0.0.1", 1, b"k" * 32))
