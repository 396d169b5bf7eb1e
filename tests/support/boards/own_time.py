"""A loop in a time of its own, for tests whose boards, links and models are all fakes.

Its clock, and ``time.monotonic`` with it, goes on by a little at each turn of the loop that has
something to do, and to the next timer at once where there is nothing. So what a test waits for
takes no time, and which of two things comes first is decided by what they say and not by the
machine. What it cannot know of is time that passes outside: a process, a socket, a thread that no
executor has; such tests use ``fakes.run_loop``.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar
from unittest.mock import patch

from tests.support.boards.fakes import settled

T = TypeVar("T")
TURN_S = 1e-5
LOOK_S = 0.01  # how long a thread of an executor is waited for before the clock goes on so far


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


def sleep(seconds: float) -> None:
    """Let time pass without a turn of the loop, as ``time.sleep`` does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.clock.now_s += seconds


def run_loop(work: Coroutine[Any, Any, T], limit_s: float = 600.0) -> T:
    """As ``fakes.run_loop``, in a time of its own; so is the limit."""
    return settled(work, limit_s, _run)


def _run(main: Coroutine[Any, Any, T]) -> T:
    loop = Loop()
    asyncio.set_event_loop(loop)
    try:
        with patch("time.monotonic", loop.time):
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
