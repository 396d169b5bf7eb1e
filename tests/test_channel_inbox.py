"""A stream at the Router: events and the call's end overtake each other, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest
from fake_boards import accepted, finished
from own_time import run_loop

from rkserve.deployments.channel_inbox import STRAGGLERS_S, VERDICT_S, Inbox
from rkserve.errors import BoardFailed, BoardGone, BoardSilent, QueueFull, RkserveError
from rkserve.messages import Delta, Event

HELLO: list[Event] = [accepted("sim-0"), Delta("a", (1,))]
LOST = BoardFailed("sim-0", "the connection ended")
SILENT = BoardSilent("sim-0", "no sign of life")
GONE = BoardGone("sim-0", "its replica died")
OWN = BoardFailed("sim-0", "SIGSEGV")


async def everything(inbox: Inbox) -> tuple[list[Event], RkserveError | None]:
    """Read to the end; return the events, and the error behind them."""
    found: list[Event] = []
    try:
        while (event := await inbox.next()) is not None:
            found.append(event)
    except RkserveError as exc:
        return found, exc
    return found, None


def play(inbox: Inbox, steps: Sequence[str]) -> None:
    """Let things happen to a stream in this order."""
    for step in steps:
        _DOES[step](inbox)


def _events(inbox: Inbox) -> None:
    for event in HELLO:
        inbox.put(event)


_DOES: Mapping[str, Callable[[Inbox], None]] = {
    "events": _events,
    "finished": lambda inbox: inbox.put(finished(1)),
    "mark": lambda inbox: inbox.end(),
    "lost": lambda inbox: inbox.cut(LOST),
    "silent": lambda inbox: inbox.cut(SILENT, 0.0),
    "ok": lambda inbox: inbox.answered(None, reached=True),
    "raised": lambda inbox: inbox.answered(OWN, reached=True),
    "full": lambda inbox: inbox.answered(QueueFull(1, 2), reached=True),
    "died": lambda inbox: inbox.answered(GONE, reached=False),
}


@pytest.mark.parametrize(
    ("steps", "events", "error"),
    [
        pytest.param("events finished mark ok", 3, None, id="in order"),
        pytest.param("ok events finished mark", 3, None, id="the call's end comes first"),
        pytest.param("events finished ok mark", 3, None, id="the call's end before the mark"),
        pytest.param("events mark raised", 2, OWN, id="an error behind the events"),
        pytest.param("raised events mark", 2, OWN, id="an error that overtakes the events"),
        pytest.param("mark full", 0, QueueFull, id="a refusal"),
        pytest.param("full mark", 0, QueueFull, id="a refusal that overtakes its mark"),
        pytest.param("died", 0, GONE, id="it never got there"),
        pytest.param("events died lost", 2, GONE, id="Ray says first that it died"),
        pytest.param("events lost died", 2, GONE, id="the connection says first that it died"),
        pytest.param("events lost", 2, LOST, id="only the connection is lost"),
        pytest.param("lost", 0, LOST, id="lost before anything"),
        pytest.param("events silent", 2, SILENT, id="a frozen board"),
        pytest.param("events died", 2, GONE, id="Ray alone says that it died"),
        pytest.param("events ok lost", 2, LOST, id="it ended well, and the rest was lost"),
        pytest.param("events mark lost raised", 2, OWN, id="lost behind the last event"),
        pytest.param("events finished lost", 3, LOST, id="lost behind the end"),
    ],
)
@pytest.mark.parametrize("waits", [False, True], ids=["read later", "read meanwhile"])
def test_every_event_is_read_and_then_the_end(
    steps: str, events: int, error: RkserveError | type[RkserveError] | None, waits: bool
) -> None:
    async def main() -> None:
        inbox = Inbox(1)
        reading = asyncio.ensure_future(everything(inbox)) if waits else None
        for step in steps.split():
            play(inbox, [step])
            if waits:
                await asyncio.sleep(0)
        found, raised = await (reading or everything(inbox))
        assert [*HELLO, finished(1)][:events] == found
        if isinstance(error, type):
            assert type(raised) is error
        else:
            assert raised is error

    run_loop(main())


@pytest.mark.parametrize(
    ("steps", "waited_s"),
    [
        pytest.param("lost", VERDICT_S, id="for Ray's verdict on a lost connection"),
        pytest.param("silent", 0.0, id="not for that on a frozen board"),
        pytest.param("events died", STRAGGLERS_S, id="for the events of a board that Ray lost"),
        pytest.param("died", 0.0, id="not for those of one that was never reached"),
        pytest.param("events lost raised", 0.0, id="for nothing once both have spoken"),
    ],
)
def test_how_long_the_end_is_waited_for(steps: str, waited_s: float) -> None:
    async def main() -> None:
        inbox = Inbox(1)
        play(inbox, steps.split())
        began_s = asyncio.get_running_loop().time()
        await everything(inbox)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(waited_s, abs=0.01)

    run_loop(main())


def test_what_nobody_reads_becomes_one_delta() -> None:
    async def main() -> None:
        inbox = Inbox(1)
        inbox.put(accepted("sim-0"))
        for number in range(1000):
            inbox.put(Delta("x", (number,)))
        inbox.put(Delta("!", (), retract=3))
        inbox.put(finished(1000))
        play(inbox, ["mark", "ok"])
        found, _ = await everything(inbox)
        assert len(found) == 4
        assert found[1] == Delta("x" * 1000, tuple(range(1000)), lengths=(1,) * 1000)

    run_loop(main())


def test_a_reader_who_leaves_is_not_waited_for() -> None:
    async def main() -> None:
        inbox = Inbox(1)
        reading = asyncio.ensure_future(inbox.next())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        inbox.close()
        play(inbox, ["events", "mark", "died"])

    run_loop(main())
