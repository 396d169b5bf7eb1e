"""What tests of the binding do with it: runs on threads of their own, sinks that keep all."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from rkserve.native.binding.runtime import Binding
from rkserve.native.runtime import RunOutcome, RunParams, Sink, SinkAction, TokenInput, TokenPiece
from rkserve.native.runtime import Step as RunStep
from tests.support.sim.rkllm_fake import WAIT_ABORT, WAIT_GO, Step

Open = Callable[..., Binding]
WAIT_S = 60.0
IDS = RunParams((TokenInput((11, 12, 13)),))
UNTIL_ABORT: Step = (WAIT_ABORT, 0, 0, None)
UNTIL_GO: Step = (WAIT_GO, 0, 0, None)


class Catch:
    """A sink that keeps what it is given, and says PAUSE on the tokens that it is told."""

    def __init__(self, *pause_on: int) -> None:
        self.steps: list[RunStep] = []
        self.pieces: list[TokenPiece] = []
        self.pause_on = pause_on
        self.first = threading.Event()

    def __call__(self, step: RunStep) -> SinkAction:
        self.steps.append(step)
        self.pieces += [piece for piece in step if piece is not None]
        self.first.set()
        paused = self.pieces[-1].token_id in self.pause_on
        return SinkAction.PAUSE if paused else SinkAction.CONTINUE

    @property
    def ids(self) -> list[int]:
        return [piece.token_id for piece in self.pieces]


@contextmanager
def running(handle: Binding, sink: Sink, params: RunParams = IDS) -> Iterator[Future[RunOutcome]]:
    """A run on a thread of its own; it must have ended when the block is left."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(handle.run, params, sink)
        yield future
        future.exception(timeout=WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    """Give other threads time until ``condition`` holds."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("it never came to that")


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def ints(*values: int) -> bytes:
    return struct.pack(f"{len(values)}i", *values)


def batch(n: int, **changes: Any) -> RunParams:
    return RunParams(tuple(TokenInput((10 * i + 1, 10 * i + 2)) for i in range(n)), **changes)
