"""Answers of scripted boards over the channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager

from rkserve.config.router import ChannelConfig
from rkserve.core.messages import Delta, Event, GenerateRequest
from rkserve.deployments.board_link import RayLink
from rkserve.transport.client import ChannelClient
from tests.support.boards.channel_bench import PATIENT, Board, router
from tests.support.boards.fake_boards import Step, accepted, finished

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
