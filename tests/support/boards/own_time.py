"""A loop in a time of its own, for tests whose boards, links and models are all fakes.

Its clock, and ``time.monotonic`` with it, goes on by a little at each turn of the loop that has
something to do, and to the next timer at once where there is nothing. So what a test waits for
takes no time, and which of two things comes first is decided by what they say and not by the
machine. What it cannot know of is time that passes outside: a process, a socket, a thread that no
executor has; such tests use ``fakes.run_loop``.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

from tests.support.boards.fakes import settled

T = TypeVar("T")
TURN_S = 1e-5
EPOCH_S = 1_800_000_000.0  # where the clock of a seeded run begins
LOOK_S = 0.01  # how long a thread of an executor is waited for before the clock goes on so far


@dataclass
class SetClock:
    """A clock that tests set; by default a time of day."""

    now_s: float = 1.7e9

    def __call__(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for a timer it puts the clock forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = time.monotonic()
        self.threads = 0  # jobs of executors; one may wait for something that a timer has to do

    def select(self, timeout: float | None = None) -> list[Any]:
        """See ``BaseSelector``."""
        if timeout is None or timeout <= 0:
            self.now_s += TURN_S
            return super().select(timeout)
        step_s = min(timeout, LOOK_S) if self.threads else timeout
        events = super().select(step_s if self.threads else 0)
        if not events:
            self.now_s += step_s
        return events


class Loop(asyncio.SelectorEventLoop):
    """A loop on that selector's clock."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        """See ``AbstractEventLoop``."""
        return self.clock.now_s

    def run_in_executor(  # type: ignore[override]  # typeshed's own has type variables
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """See ``AbstractEventLoop``."""
        future = super().run_in_executor(executor, func, *args)
        self.clock.threads += 1
        future.add_done_callback(self._done)
        return future

    def _done(self, _: asyncio.Future[Any]) -> None:
        self.clock.threads -= 1


class SeededLoop(Loop):
    """A loop without threads and without the machine's clock: one seed gives one order of events.

    Jobs of executors are done at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock.now_s = EPOCH_S

    def run_in_executor(  # type: ignore[override]  # as above
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """See ``AbstractEventLoop``."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # noqa: BLE001 - the caller gets it, as from a thread
            future.set_exception(exc)
        return future


def sleep(seconds: float) -> None:
    """Let time pass without a turn of the loop, as ``time.sleep`` does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.clock.now_s += seconds


def run_loop(work: Coroutine[Any, Any, T], limit_s: float = 600.0) -> T:
    """As ``fakes.run_loop``, in a time of its own; so is the limit."""
    return settled(work, limit_s, _run)


def run_seeded(work: Coroutine[Any, Any, T], seed: int, limit_s: float) -> T:
    """As ``run_loop``; dates, and names that are drawn at random, come of the seed as well.

    Sets of strings have another order in each process, unless ``PYTHONHASHSEED`` is set.
    """
    drawn = random.Random(seed)
    random.seed(seed)

    class Seeded(random.Random):
        """A generator that comes of the seed, also where its user gives none."""

        def __init__(self, own: Any = None) -> None:
            super().__init__(drawn.random() if own is None else own)

    with (
        patch("random.Random", Seeded),
        patch("secrets.token_hex", lambda size=32: drawn.randbytes(size).hex()),
        patch("os.urandom", drawn.randbytes),
    ):
        return settled(work, limit_s, partial(_run, make=SeededLoop, dates=True))


def _run(
    main: Coroutine[Any, Any, T], make: Callable[[], Loop] = Loop, *, dates: bool = False
) -> T:
    loop = make()
    asyncio.set_event_loop(loop)
    try:
        with patch("time.monotonic", loop.time), ExitStack() as stack:
            if dates:
                stack.enter_context(patch("time.time", loop.time))
                stack.enter_context(patch("time.perf_counter", loop.time))
            return _to_the_end(loop, main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _to_the_end(loop: Loop, main: Coroutine[Any, Any, T]) -> T:
    """Do what ``asyncio.run`` does, which takes no loop before Python 3.12."""
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
