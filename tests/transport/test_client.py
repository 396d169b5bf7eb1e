"""The Router's end of the channel: streams over connections or through Ray, and calls."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.errors import BoardFailed, BoardSilent, StageFailed
from rkserve.core.messages import Finished
from rkserve.deployments.board_link import RayLink
from rkserve.transport.client import ChannelClient, ChannelLost
from rkserve.transport.server import ChannelAddress
from tests.support.boards.channel_bench import PATIENT, Board, connect, read, router, until
from tests.support.boards.channel_streams import REQUEST, spoken, words
from tests.support.boards.fake_boards import accepted
from tests.support.boards.fakes import run_loop


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


async def test_reports_come_over_connections_once_they_are_there() -> None:
    board = Board("sim-0")
    async with router(board) as (_, [link]):
        board.reports.clear()
        assert [one.board_id for one in await link.reports()] == ["sim-0"]
        assert board.reports == ["channel"]
        assert link.complete


async def test_a_report_is_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board("sim-0")
    async with router(board) as (_, [link]):
        (one,) = board.outlet.connections
        frames: list[int] = []
        send = one.line.send

        def counted(items: Any) -> None:
            frames.append(len(items))
            send(items)

        monkeypatch.setattr(one.line, "send", counted)
        await link.reports()
        await until(lambda: not one.tasks)
        assert frames == [2], "the answer, and the end of its stream"


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
        for one in list(board.outlet.connections):
            one.line._transport.abort()  # type: ignore[union-attr] # as its kernel does
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
        await link.ask_all("emitted", timeout_s=60.0, take=heard.append)
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
        for one in list(board.outlet.connections):
            one.line._transport.abort()  # type: ignore[union-attr] # as its kernel does
        assert (await asked).epoch == 7
        assert board.told[-1] == 7


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
    await until(lambda: board.running == 0 and not board.outlet.connections)
    await board.outlet.close()
