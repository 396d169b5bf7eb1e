"""Commands of an engine whose entries have runs at the same time, on scripted runtimes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rkserve.native import engine_frames
from rkserve.native.engine_frames import FrameKind
from rkserve.native.runtime import TokenPiece
from tests.support.boards.engine_desk import Desk, Scripted

WAIT_S = 60.0


class Entries(Scripted):
    """A runtime of two entries, of which this is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Scripted()

    @property
    def entries(self) -> tuple[Scripted, ...]:
        return (self, self.other)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.runtime = Entries()
    made.load(n_batch=2)
    return made


def other_of(desk: Desk) -> Scripted:
    assert isinstance(desk.runtime, Entries)
    return desk.runtime.other


def until(condition: Callable[[], bool]) -> None:
    waited = threading.Event()
    while not condition():
        waited.wait(0.001)


def send(desk: Desk, frame: bytes) -> None:
    """Let the reading thread take a frame."""
    [(kind, payload)] = engine_frames.FrameReader().feed(frame)
    desk.engine.command(kind, payload)


def ended(desk: Desk, run_id: int) -> dict[str, object]:
    for put in desk.puts:
        for kind, payload in put:
            if kind is FrameKind.ENDED and engine_frames.unpack(payload)["run_id"] == run_id:
                return engine_frames.unpack(payload)
    return {}


def test_a_run_goes_to_the_thread_of_its_entry_and_an_abort_follows_it(desk: Desk) -> None:
    assert desk.puts[-1][-1][0] is FrameKind.LOADED
    assert desk.last[1]["entries"] == 2
    other, inside, goes_on = other_of(desk), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert goes_on.wait(WAIT_S)

    other.steps = [(TokenPiece(at, b"x"),) for at in range(3)]
    other.between = {1: wait}
    send(desk, desk.run_frame(7, (1, 2), entry=1))
    assert inside.wait(WAIT_S)
    # Meanwhile the first entry has a run of its own.
    desk.runtime.steps = [(TokenPiece(50, b"y"),)]
    assert desk.run(8, (3,))["end"] == "finished"
    send(desk, engine_frames.pack(FrameKind.ABORT, {"run_id": 7, "entry": 1}))
    goes_on.set()
    until(lambda: bool(ended(desk, 7)))
    assert other.made("abort") == [("abort", ())]
    assert desk.runtime.made("abort") == []
    tokens = [one for put in desk.tokens() for one in put]
    assert [(run_id, token_id) for run_id, _, token_id, *_ in tokens] == [(7, 0), (8, 50)]


def test_a_pause_concerns_the_run_of_its_entry(desk: Desk) -> None:
    other, inside, goes_on = other_of(desk), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert goes_on.wait(WAIT_S)

    other.steps = [(TokenPiece(at, b"x"),) for at in range(3)]
    other.between = {1: wait}
    send(desk, desk.run_frame(7, (1, 2), entry=1))
    assert inside.wait(WAIT_S)
    send(desk, engine_frames.pack(FrameKind.PAUSE, {"run_id": 7, "entry": 1}))
    goes_on.set()
    until(lambda: bool(ended(desk, 7)))
    assert ended(desk, 7)["end"] == "paused"


def test_a_call_concerns_its_entry(desk: Desk) -> None:
    call = {"call_id": 1, "method": "clear_kv", "args": {}, "entry": 1}
    send(desk, engine_frames.pack(FrameKind.CALL, call))
    until(lambda: desk.puts[-1][-1][0] is FrameKind.RESULT)
    assert len(other_of(desk).made("clear_kv_cache")) == 1
    assert desk.runtime.made("clear_kv_cache") == []
