"""A stream at the Router: every event is read, and then how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from rkserve.core.errors import BoardFailed, RkserveError
from rkserve.core.messages import Delta, Event
from rkserve.transport.client import EventStream
from tests.support.boards.fake_boards import accepted, finished

pytestmark = pytest.mark.virtual_time

HELLO: list[Event] = [accepted("sim-0"), Delta("a", (1,))]
LOST = BoardFailed("sim-0", "the connection ended")
OWN = BoardFailed("sim-0", "SIGSEGV")


async def everything(inbox: EventStream) -> tuple[list[Event], RkserveError | None]:
    """Read to the end; return the events, and the error behind them."""
    found: list[Event] = []
    try:
        while (event := await inbox.next()) is not None:
            found.append(event)
    except RkserveError as exc:
        return found, exc
    return found, None


def play(inbox: EventStream, steps: Sequence[str]) -> None:
    """Let things happen to a stream in this order."""
    for step in steps:
        _DOES[step](inbox)


def _events(inbox: EventStream) -> None:
    for event in HELLO:
        inbox.put(event)


_DOES: Mapping[str, Callable[[EventStream], None]] = {
    "events": _events,
    "finished": lambda inbox: inbox.put(finished(1)),
    "end": lambda inbox: inbox.end(),
    "raised": lambda inbox: inbox.fail(OWN),
    "lost": lambda inbox: inbox.cut(LOST),
}


@pytest.mark.parametrize(
    ("steps", "events", "error", "lost"),
    [
        pytest.param("events finished end", 3, None, False, id="in order"),
        pytest.param("events raised end", 2, OWN, False, id="an error behind the events"),
        pytest.param("raised end", 0, OWN, False, id="a refusal"),
        pytest.param("events lost", 2, LOST, True, id="the connection is lost"),
        pytest.param("lost", 0, LOST, True, id="lost before anything"),
        pytest.param("events raised lost", 2, OWN, False, id="lost behind the error"),
        pytest.param("events finished lost", 3, None, True, id="lost behind the last event"),
        pytest.param("events finished end lost", 3, None, False, id="lost behind the end"),
    ],
)
@pytest.mark.parametrize("waits", [False, True], ids=["read later", "read meanwhile"])
async def test_every_event_is_read_and_then_the_end(
    steps: str, events: int, error: RkserveError | None, lost: bool, waits: bool
) -> None:
    inbox = EventStream(1)
    reading = asyncio.ensure_future(everything(inbox)) if waits else None
    for step in steps.split():
        play(inbox, [step])
        if waits:
            await asyncio.sleep(0)
    found, raised = await (reading or everything(inbox))
    assert [*HELLO, finished(1)][:events] == found
    assert raised is error
    assert inbox.lost is lost
    assert inbox.received is (steps != "lost")
    assert inbox.over


async def test_what_nobody_reads_becomes_one_delta() -> None:
    inbox = EventStream(1)
    inbox.put(accepted("sim-0"))
    for number in range(1000):
        inbox.put(Delta("x", (number,)))
    inbox.put(Delta("!", (), retract=3))
    inbox.put(finished(1000))
    play(inbox, ["end"])
    found, _ = await everything(inbox)
    assert len(found) == 4
    assert found[1] == Delta("x" * 1000, tuple(range(1000)), lengths=(1,) * 1000)


async def test_a_reader_who_leaves_is_not_waited_for() -> None:
    inbox = EventStream(1)
    reading = asyncio.ensure_future(inbox.next())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    inbox.end()
    play(inbox, ["events", "end", "lost"])


async def test_a_delta_is_taken_at_once_while_the_reader_waits_and_in_its_order() -> None:
    taken: list[Event] = []

    def take(delta: Delta) -> bool:
        taken.append(delta)
        return True

    inbox = EventStream(1, take)
    inbox.put(accepted("sim-0"))
    inbox.put(Delta("unread", (1,)))  # the acceptance is not read yet
    assert await inbox.next() == accepted("sim-0")
    assert await inbox.next() == Delta("unread", (1,))
    reading = asyncio.ensure_future(inbox.next())
    await asyncio.sleep(0)
    inbox.put(Delta("a", (2,)))
    inbox.put(Delta("b", (3,)))
    assert taken == [Delta("a", (2,)), Delta("b", (3,))]
    inbox.put(finished(3))
    inbox.put(Delta("behind the end", (4,)))  # the reader has an event to read before it
    assert await reading == finished(3)
    assert taken == [Delta("a", (2,)), Delta("b", (3,))]


async def test_a_delta_that_is_not_taken_is_read() -> None:
    inbox = EventStream(1, lambda _: False)
    reading = asyncio.ensure_future(inbox.next())
    await asyncio.sleep(0)
    inbox.put(Delta("a", (2,)))
    assert await reading == Delta("a", (2,))


async def test_a_delta_behind_a_cancelled_reader_is_not_taken() -> None:
    taken: list[Event] = []

    def take(delta: Delta) -> bool:
        taken.append(delta)
        return True

    inbox = EventStream(1, take)
    reading = asyncio.ensure_future(inbox.next())
    await asyncio.sleep(0)
    reading.cancel()
    inbox.put(Delta("a", (2,)))
    assert taken == []
    await asyncio.wait({reading})
    assert await inbox.next() == Delta("a", (2,))


async def test_an_error_of_the_one_that_takes_is_raised_to_the_reader() -> None:
    def take(_: Delta) -> bool:
        raise ValueError("a defect")

    inbox = EventStream(1, take)
    reading = asyncio.ensure_future(inbox.next())
    await asyncio.sleep(0)
    inbox.put(Delta("a", (2,)))
    with pytest.raises(ValueError, match="a defect"):
        await reading
