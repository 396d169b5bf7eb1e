"""The channel between boards and Routers over real sockets: what it carries, and how it fails."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager

import pytest

from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.errors import BoardFailed, BoardSilent, QueueFull, RequestError, StageFailed
from rkserve.core.messages import Delta, Embedded, EmbedRequest, Event, Finished, GenerateRequest
from rkserve.deployments.board_link import RayLink
from rkserve.transport.client import ChannelClient, ChannelLost
from rkserve.transport.connection import HEARTBEAT, NONCE_BYTES, RouterHandshake, frame
from rkserve.transport.server import MAX_UNPROVEN, ChannelAddress
from tests.support.boards.channel_bench import HASTY, PATIENT, Board, connect, read, router, until
from tests.support.boards.fake_boards import Step, accepted, finished
from tests.support.boards.fakes import run_loop

REQUEST = GenerateRequest("r/0", "m", (1,), 4)


def spoken(events: Iterable[Event]) -> str:
    """The text of an answer."""
    return "".join(event.text for event in events if isinstance(event, Delta))


def words(*texts: str, board: str = "sim-0") -> list[Step]:
    """An answer of these words."""
    deltas: list[Step] = [Delta(text, (at,)) for at, text in enumerate(texts)]
    return [accepted(board), *deltas, finished(len(texts))]


@asynccontextmanager
async def answering(
    *said: Event, pulse: ChannelConfig = PATIENT, config: ChannelConfig = PATIENT
) -> AsyncIterator[tuple[Board, ChannelClient, RayLink, AsyncGenerator[Event, None]]]:
    """A board that has accepted a request and said so much, and then says nothing."""
    board = Board("sim-0", pulse)
    board.steps = [accepted("sim-0"), *said, asyncio.Event()]
    async with router(board, config=config) as (channels, [link]):
        events = link.open(REQUEST, "replica of sim-0")
        for expected in (accepted("sim-0"), *said):
            assert await anext(events) == expected
        assert board.running == 1
        yield board, channels, link, events


async def test_an_answer_comes_over_the_connection_and_not_through_ray() -> None:
    board = Board("sim-0")
    board.steps = words("Hello", " there")
    async with router(board) as (channels, [link]):
        found = await read(link, board)
        assert (found[0], spoken(found)) == (accepted("sim-0"), "Hello there")
        assert isinstance(found[-1], Finished)
        assert channels.counts() == ({"channel": 1, "ray": 0}, 1)
        await until(lambda: board.running == 0)
        assert board.streamed == 0
        assert board.requests == [REQUEST]


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


async def test_a_reader_who_leaves_before_the_call_is_there_never_has_the_board() -> None:
    board = Board("sim-0")
    board.steps = [accepted("sim-0"), asyncio.Event()]
    async with router(board) as (channels, [link]):
        line = channels.line("replica of sim-0")
        assert line is not None
        line.leave(line.generate(REQUEST))
        board.steps = words("next")
        assert spoken(await read(link, board)) == "next"


async def test_a_reader_who_is_cancelled_frees_the_board() -> None:
    board = Board("sim-0")
    board.steps = [accepted("sim-0"), asyncio.Event()]
    async with router(board) as (_, [link]):
        reading = asyncio.ensure_future(read(link, board))
        await until(lambda: board.running == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: board.running == 0)


def test_without_a_connection_tokens_come_through_ray_and_later_over_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        board = Board("sim-0")
        board.steps = words("Hello")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = ChannelAddress("sim-0", "127.0.0.1", closed.getsockname()[1], b"k" * 32)
            board.offers = lambda: nobody
            async with router(board, connected=False) as (channels, [link]):
                for _ in range(3):
                    await link.reports()
                    await until(lambda: not channels._tasks)
                    await asyncio.sleep(0.02)
                assert spoken(await read(link, board)) == "Hello"
                assert (board.streamed, channels.streams["ray"]) == (1, 1)
                board.offers = lambda: board.outlet.address
                await connect(channels, [board], [link])
                assert spoken(await read(link, board)) == "Hello"
                assert channels.counts() == ({"channel": 1, "ray": 1}, 1)

    with caplog.at_level(logging.WARNING):
        run_loop(main())
    told = [record for record in caplog.records if "which is slower" in record.message]
    assert len(told) == 1


@pytest.mark.parametrize(
    "offer",
    [
        pytest.param(lambda _: None, id="a board without an outlet"),
        pytest.param(
            lambda one: ChannelAddress("sim-0", one.host, one.port, b"x" * 32), id="another key"
        ),
    ],
)
async def test_who_has_no_key_gets_nothing_over_a_connection(offer: object) -> None:
    board = Board("sim-0")
    board.steps = words("Hello")
    async with router(board, connected=False) as (channels, [link]):
        own = board.outlet.address
        assert own is not None
        board.offers = lambda: offer(own)  # type: ignore[operator]
        await link.reports()
        await until(lambda: not channels._tasks)
        assert channels.counts()[1] == 0
        assert spoken(await read(link, board)) == "Hello"
        assert board.streamed == 1


async def test_the_channel_can_be_switched_off() -> None:
    board = Board("sim-0")
    board.steps = words("Hello")
    off = ChannelConfig(enabled=False)
    async with router(board, config=off, connected=False) as (channels, [link]):
        await link.reports()
        assert not channels._tasks
        assert spoken(await read(link, board)) == "Hello"
        assert channels.counts() == ({"channel": 0, "ray": 1}, 0)


async def test_a_board_that_dies_ends_its_streams_and_comes_back() -> None:
    async with answering(Delta("half", (1,))) as (board, channels, link, events):
        for line in list(board.outlet._open):
            line._transport.abort()  # type: ignore[union-attr] # as its kernel does
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
        for line in list(board.outlet._open):
            line._transport.abort()  # type: ignore[union-attr] # the Router has not heard yet
        assert spoken(await read(link, board)) == "Hello"
        assert (board.streamed, channels.streams) == (1, {"channel": 0, "ray": 1})


async def test_a_frozen_board_is_noticed_by_its_silence() -> None:
    async with answering(pulse=HASTY, config=HASTY) as (board, _, _link, events):
        for line in board.outlet._open:
            line._timer.cancel()  # type: ignore[union-attr] # it neither ticks nor reads
            line._transport.pause_reading()  # type: ignore[union-attr]
        with pytest.raises(BoardSilent, match="no sign of life"):
            await anext(events)
        assert board.streamed == 0, "Ray would say nothing for long"


async def test_a_router_that_is_frozen_frees_the_board() -> None:
    async with answering(pulse=HASTY) as (board, channels, _, events):
        line = channels.line("replica of sim-0")
        assert line is not None
        line.line._timer.cancel()  # type: ignore[union-attr]
        line.line._transport.pause_reading()  # type: ignore[union-attr]
        await until(lambda: board.running == 0)
        assert not board.outlet._lines
        await events.aclose()


async def test_a_connection_at_rest_stays() -> None:
    board = Board("sim-0", HASTY)
    board.steps = words("Hello")
    async with router(board, config=HASTY) as (channels, [link]):
        line = channels.line("replica of sim-0")
        await asyncio.sleep(3 * HASTY.silence_s)
        assert spoken(await read(link, board)) == "Hello"
        if channels.line("replica of sim-0") is line:  # it may have stood still for so long
            assert board.streamed == 0


async def test_a_router_that_does_not_read_fills_no_memory_and_misses_nothing() -> None:
    board, go, count = Board("sim-0"), asyncio.Event(), 3000
    long = [Delta("x" * 1000, (number,)) for number in range(count)]
    board.steps = [accepted("sim-0"), go, *long, finished(count)]
    async with router(board) as (channels, [link]):
        line = channels.line("replica of sim-0")
        assert line is not None
        (guest,) = board.outlet._lines.values()
        ends = [line.line._transport, guest._line._transport]  # type: ignore[union-attr]
        for end in ends:
            shrink(end)
        reading = asyncio.ensure_future(read(link, board))
        await until(lambda: board.running == 1)
        ends[0].pause_reading()  # type: ignore[union-attr]
        go.set()
        await until(lambda: not guest.tasks)
        assert guest._line is not None
        assert guest._line.full
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


@pytest.mark.parametrize("said", STRANGERS)
async def test_a_stranger_is_cut_off_and_harms_nobody(said: bytes) -> None:
    board = Board("sim-0")
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


async def test_a_stranger_who_says_nothing_is_cut_off() -> None:
    board = Board("sim-0", HASTY)
    async with router(board, connected=False):
        address = board.outlet.address
        assert address is not None
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert await opened(reader)
        while board.outlet._open:
            writer.write(b"x")  # a byte now and then is no proof
            await asyncio.sleep(0.02)
        writer.close()


async def test_strangers_never_have_more_than_a_few_connections() -> None:
    board = Board("sim-0")  # patient: none of them is cut off for its silence
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
        assert len(board.outlet._open) == MAX_UNPROVEN + 1
        assert spoken(await read(link, board)) == "Hello"
        for one, (_, writer) in zip(cut, strangers, strict=True):
            one.cancel()
            writer.close()
        await asyncio.gather(*cut, return_exceptions=True)


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
        (line,) = board.outlet._open
        line._transport.write(garbage)  # type: ignore[union-attr]
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
        (line,) = board.outlet._open
        transport = line._transport
        assert transport is not None
        for byte in frame(b'[[1,0,"a",[1]]]'):
            transport.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await anext(events) == Delta("a", (1,))
        go.set()
        assert await anext(events) == Delta("b", (2,))
        await events.aclose()


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
        await until(lambda: not line.open)
        await until(lambda: board.running == 0 and not board.outlet._open)
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


async def test_reports_come_over_connections_once_they_are_there() -> None:
    board = Board("sim-0")
    async with router(board) as (_, [link]):
        board.reports.clear()
        assert [one.board_id for one in await link.reports()] == ["sim-0"]
        assert board.reports == ["channel"]
        assert link.complete


async def test_who_does_not_report_over_its_connection_is_asked_by_ray() -> None:
    board = Board("sim-0")
    async with router(board, report_timeout_s=0.2) as (_, [link]):
        board.reports.clear()
        board.mute = asyncio.Event()
        assert [one.board_id for one in await link.reports()] == ["sim-0"]
        assert board.reports == ["channel", "ray"]


async def test_a_connection_that_is_lost_ends_the_wait_for_a_report() -> None:
    board = Board("sim-0")
    async with router(board) as (channels, _):
        line = channels.line("replica of sim-0")
        assert line is not None
        board.mute = asyncio.Event()
        asked = asyncio.ensure_future(line.ask("report"))
        await until(lambda: board.reports[-1] == "channel")
        for one in list(board.outlet._open):
            one._transport.abort()  # type: ignore[union-attr] # as its kernel does
        with pytest.raises(ChannelLost):
            await asked


async def test_boards_are_told_what_the_cluster_shall_be_over_their_connections() -> None:
    board = Board("sim-0")
    async with router(board) as (_, [link]):
        said = await link.ask("replica of sim-0", "adopt", Desired(7), timeout_s=60.0)
        assert said == Adoption("sim-0", 7, emitted=(("r", 7),))
        board.steps = [StageFailed("sim-0", "no room")]
        with pytest.raises(StageFailed, match="no room"):
            await link.ask("replica of sim-0", "adopt", Desired(8), timeout_s=60.0)
        heard: list[Emitted] = []
        await link.ask_all("emitted", timeout_s=60.0, heard=heard.append)
        assert heard == [Emitted("sim-0", (("r", 7),))]


async def test_a_call_that_nobody_waits_for_any_more_ends_at_the_board() -> None:
    board = Board("sim-0")
    async with router(board) as (_, [link]):
        board.mute = asyncio.Event()
        with pytest.raises(BoardSilent, match="nothing came within 0"):
            await link.ask("replica of sim-0", "adopt", Desired(7), timeout_s=0.05)
        await until(lambda: board.told == [7, -7])


async def test_a_call_whose_connection_is_lost_goes_through_ray() -> None:
    board = Board("sim-0")
    async with router(board) as (_, [link]):
        board.mute = asyncio.Event()
        asked = asyncio.ensure_future(
            link.ask("replica of sim-0", "adopt", Desired(7), timeout_s=60.0)
        )
        await until(lambda: board.told == [7])
        board.mute = None
        for one in list(board.outlet._open):
            one._transport.abort()  # type: ignore[union-attr] # as its kernel does
        assert (await asked).epoch == 7
        assert board.told[-1] == 7


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


async def test_a_router_that_ends_cuts_its_connections() -> None:
    board = Board("sim-0")
    board.steps = [accepted("sim-0"), asyncio.Event()]
    channels = ChannelClient(PATIENT)
    link = RayLink(board, "sim-0", 60.0, channels)
    await board.outlet.listen("127.0.0.1")
    await connect(channels, [board], [link])
    events = link.open(REQUEST, "replica of sim-0")
    await anext(events)
    await channels.close()
    with pytest.raises(BoardFailed):
        await anext(events)
    await until(lambda: board.running == 0 and not board.outlet._open)
    await board.outlet.close()
