"""The channel between boards and Routers over real sockets: what it carries, and how it fails."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing

import pytest

from rkserve.config.router import ChannelConfig
from rkserve.core.errors import BoardFailed, BoardSilent, QueueFull
from rkserve.core.messages import Delta, Embedded, EmbedRequest, Finished
from rkserve.transport.client import BoardConnection
from rkserve.transport.connection import HEARTBEAT, BoardHandshake, Heartbeat, frame
from rkserve.transport.server import ChannelAddress
from tests.support.boards.channel_bench import HASTY, Board, connect, read, router, until
from tests.support.boards.channel_streams import REQUEST, answering, spoken, words
from tests.support.boards.fake_boards import Step, accepted, finished


async def test_tokens_come_one_by_one_as_they_are_made() -> None:
    board, gates = Board("sim-0"), [asyncio.Event() for _ in range(3)]
    steps: list[Step] = [accepted("sim-0")]
    for number, gate in enumerate(gates):
        steps += [gate, Delta(str(number), (number,))]
    board.steps = [*steps, finished(3)]
    async with (
        router(board) as (_, [link]),
        aclosing(link.open(REQUEST, "replica of sim-0")) as events,
    ):
        assert await anext(events) == accepted("sim-0")
        for number, gate in enumerate(gates):
            gate.set()
            assert await anext(events) == Delta(str(number), (number,))
        assert isinstance(await anext(events), Finished)


async def test_vectors_come_over_the_connection_too() -> None:
    board = Board("sim-0")
    asked = EmbedRequest("e/0", "m", (), 0, inputs=((1, 2), (3,)))
    async with router(board) as (channels, [link]):
        found = [event async for event in link.open(asked, "replica of sim-0")]
        assert found == [accepted("sim-0"), Embedded((bytes(8), bytes(4))), finished(0)]
        assert board.requests == [asked]
        assert channels.streams == {"channel": 1, "ray": 0}


async def test_many_streams_of_two_routers_share_connections_and_none_is_mixed_up() -> None:
    boards = [Board(f"sim-{k}") for k in range(2)]
    for board in boards:
        texts = [f"{board.name}:{n} " for n in range(200)]
        board.steps = words(*texts, board=board.name)
    async with router(*boards) as (one, links), router(*boards) as (two, others):
        assert (len(one._lines), len(two._lines)) == (2, 2)
        pairs = [(link, board) for link, board in zip(links + others, boards * 2, strict=True)]
        answers = await asyncio.gather(*(read(*pair) for pair in pairs * 20))
        for (_, board), events in zip(pairs * 20, answers, strict=True):
            assert spoken(events) == spoken(e for e in board.steps if isinstance(e, Delta))
        assert one.streams == two.streams == {"channel": 40, "ray": 0}


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param([], "", id="a refusal"),
        pytest.param([accepted("sim-0"), Delta("half", (1,))], "half", id="in mid-answer"),
    ],
)
async def test_an_error_comes_behind_all_events_before_it(
    before: list[Step], expected: str
) -> None:
    board = Board("sim-0")
    board.steps = [*before, QueueFull(3, 2)]
    async with router(board) as (_, [link]):
        events = link.open(REQUEST, "replica of sim-0")
        found = [await anext(events) for _ in before]
        with pytest.raises(QueueFull):
            await anext(events)
        assert spoken(found) == expected
        assert board.running == 0


async def test_hanging_up_frees_the_board() -> None:
    async with answering() as (board, _, link, events):
        await events.aclose()
        await until(lambda: board.running == 0)
        board.steps = words("next")
        assert spoken(await read(link, board)) == "next"


async def test_a_board_that_dies_ends_its_streams_and_comes_back() -> None:
    async with answering(Delta("half", (1,))) as (board, channels, link, events):
        for one in list(board.outlet.connections):
            one.line._transport.abort()  # type: ignore[union-attr] # as its kernel does
        with pytest.raises(BoardFailed):
            await anext(events)
        await until(lambda: board.running == 0)
        await connect(channels, [board], [link])
        board.steps = words("again")
        assert spoken(await read(link, board)) == "again"
        assert board.streamed == 0


async def test_a_connection_that_ends_before_the_board_reads_the_call_costs_nothing() -> None:
    board = Board("sim-0")
    board.steps = words("Hello")
    async with router(board) as (channels, [link]):
        for one in list(board.outlet.connections):
            one.line._transport.abort()  # type: ignore[union-attr] # the Router has not heard yet
        assert spoken(await read(link, board)) == "Hello"
        assert (board.streamed, channels.streams) == (1, {"channel": 0, "ray": 1})


async def test_a_frozen_board_is_noticed_by_its_silence() -> None:
    async with answering(pulse=HASTY, config=HASTY) as (board, _, _link, events):
        for one in board.outlet.connections:
            one.line._timer.cancel()  # type: ignore[union-attr] # it neither ticks nor reads
            one.line._transport.pause_reading()  # type: ignore[union-attr]
        with pytest.raises(BoardSilent, match="no sign of life"):
            await anext(events)
        assert board.streamed == 0, "Ray would say nothing for long"


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.times_s: list[float] = []

    def write(self, data: bytes) -> None:  # type: ignore[override] # bytes alone are written
        self.sent.append(data)
        self.times_s.append(asyncio.get_running_loop().time())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is buffered."""

    def abort(self) -> None:
        """Nothing is open."""


def connected(pulse: Heartbeat) -> tuple[BoardConnection, Wire]:
    """Return a Router's connection after its handshake."""
    key, wire = bytes(32), Wire()
    line = BoardConnection(ChannelAddress("sim-0", "h", 1, key), pulse)
    board = BoardHandshake(key, 7)
    line.line.connection_made(wire)
    line.line.data_received(board.opening())
    line.line.data_received(board.take(wire.sent[-1]))
    assert line.line.open
    return line, wire


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("silence_s", "beats", "longest_s"),
    [
        pytest.param(3.0, 10, 1.0, id="half of the heartbeats, by default"),
        pytest.param(12.0, 0, 1.0, id="none, where the peer waits for long"),
        pytest.param(1.0, 20, 0.5, id="all, where it waits for two of them only"),
    ],
)
async def test_a_report_every_second_spares_heartbeats(
    silence_s: float, beats: int, longest_s: float
) -> None:
    line, wire = connected(Heartbeat(0.5, silence_s, 10.0))
    await asyncio.sleep(0.2 + 1.5 * 0.5)  # the first heartbeat is due after 0.5 to 1.5 intervals
    line.line._heard_s = asyncio.get_running_loop().time()
    wire.sent.clear()
    wire.times_s.clear()
    for _ in range(10):
        line.line.send([[1]])
        line.line._heard_s = asyncio.get_running_loop().time()  # the peer is there
        await asyncio.sleep(1.0)
    line.line.close("the end")
    assert abs(wire.sent.count(HEARTBEAT) - beats) <= 1
    pauses = [after - before for before, after in itertools.pairwise(wire.times_s)]
    assert max(pauses) <= longest_s + 0.01


@pytest.mark.virtual_time
async def test_by_default_a_board_frozen_for_two_seconds_stays_and_for_good_is_lost_in_four() -> (
    None
):
    """The board's heartbeats arrive as it sends them; the loop's time is its own."""
    loop = asyncio.get_running_loop()
    line, _ = connected(Heartbeat.of(ChannelConfig()))
    pulse_s = ChannelConfig().heartbeat_s
    events = line.generate(REQUEST)
    for beats in range(1, 60):
        line.line.data_received(HEARTBEAT)
        # The next one is almost due, and the process stops; its timer fires once it goes on.
        await asyncio.sleep(pulse_s + (1.99 if beats % 10 == 0 else 0.0))
    assert line.line.open
    line.line.data_received(HEARTBEAT)
    heard_s = loop.time()
    with pytest.raises(BoardSilent, match="no sign of life for 3 s"):
        await events.next()
    assert 2.5 < loop.time() - heard_s <= 4.0


async def test_a_connection_at_rest_stays() -> None:
    board = Board("sim-0", HASTY)
    board.steps = words("Hello")
    async with router(board, config=HASTY) as (channels, [link]):
        line = channels.line("replica of sim-0")
        await asyncio.sleep(3 * HASTY.silence_s)
        assert spoken(await read(link, board)) == "Hello"
        if channels.line("replica of sim-0") is line:  # it may have stood still for so long
            assert board.streamed == 0


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(frame(b"{}"), id="no list"),
        pytest.param(frame(b'[[1,"x"]]'), id="no event"),
        pytest.param(frame(b"[[1,9]]"), id="an unknown kind of event"),
        pytest.param(b"\xff\xff\xff\xff", id="a frame without end"),
        pytest.param(HEARTBEAT + frame(b"[[1"), id="half of a frame's words"),
    ],
)
async def test_a_peer_that_talks_nonsense_loses_its_connection(garbage: bytes) -> None:
    async with answering() as (board, channels, link, events):
        (one,) = board.outlet.connections
        one.line._transport.write(garbage)  # type: ignore[union-attr]
        with pytest.raises(BoardFailed):
            await anext(events)
        await until(lambda: board.running == 0)
        await connect(channels, [board], [link])
        board.steps = words("again")
        assert spoken(await read(link, board)) == "again"


async def test_half_a_frame_is_waited_for() -> None:
    board, go = Board("sim-0"), asyncio.Event()
    board.steps = [accepted("sim-0"), go, Delta("b", (2,)), finished(2)]
    async with router(board) as (_, [link]):
        events = link.open(REQUEST, "replica of sim-0")
        await anext(events)
        (one,) = board.outlet.connections
        transport = one.line._transport
        assert transport is not None
        for byte in frame(b'[[1,0,"a",[1]]]'):
            transport.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await anext(events) == Delta("a", (1,))
        go.set()
        assert await anext(events) == Delta("b", (2,))
        await events.aclose()
