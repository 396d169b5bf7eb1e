"""The generations of one call, one per choice, merged into one stream of events.

Every token passes through here: no task, timer or time limit is created per token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from rkserve.core.errors import RkserveError
from rkserve.core.messages import (
    Accepted,
    Delta,
    Embedded,
    Event,
    Finished,
    GenerateRequest,
    Paused,
    merged,
)

Generate = Callable[[GenerateRequest], AsyncGenerator[Event, None]]
_Item = tuple[int, Event | BaseException]
_Event = Delta | Paused | Finished
# Pending events of a slow client; further deltas are merged.
WAITING = 64


class Choices:
    """Runs one generation per choice and merges them. Always ``aclose`` it: that frees the boards.

    An error of one choice is the error of the call.
    """

    def __init__(self, generate: Generate, requests: Sequence[GenerateRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Item] = deque()
        self._reader: asyncio.Future[bool] | None = None  # False: timed out
        self._patience: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._until_s = 0.0  # the reader's deadline
        self._early: list[_Item] = []  # events of fast choices, before the slowest was accepted
        self._begun = False  # accepted() has returned: later acceptances are not reported
        self._open = len(requests)
        self._tasks = [
            asyncio.create_task(self._pump(generate, index, request))
            for index, request in enumerate(requests)
        ]

    async def accepted(self, waits: Callable[[int], bool] = lambda _: False) -> list[Accepted]:
        """Wait until a board has accepted each choice, apart from those that ``waits``.

        Waiting choices have been admitted to the queue, and the events of the others need not wait
        for them. At least one choice is accepted. Raises the first rejection.
        """
        found: dict[int, Accepted] = {}
        while not found or not all(one in found or waits(one) for one in range(len(self._tasks))):
            if not self._waiting:
                await self._news(None)
            index, event = self._waiting.popleft()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Accepted):
                found[index] = event
            else:
                self._early.append((index, event))
        self._begun = True
        self._waiting.extendleft(reversed(self._early))
        self._early.clear()
        return [found[index] for index in sorted(found)]

    async def next(self, timeout_s: float | None = None) -> tuple[int, _Event] | None:
        """Return the next event and its choice's index, or None after the last one.

        Raises:
            TimeoutError: no event arrived within ``timeout_s``; call again.
            RkserveError: a choice failed.
        """
        if self._open == 0:
            return None
        if not self._waiting and not await self._news(timeout_s):
            raise TimeoutError
        return self._take()

    async def batch(self, timeout_s: float | None = None) -> list[tuple[int, _Event]]:
        """Return all pending events, at least one; an empty list after the last one.

        Raises as ``next``: an error after the events before it have been returned.
        """
        first = await self.next(timeout_s)
        found = [] if first is None else [first]
        while self._open and self._waiting and not isinstance(self._waiting[0][1], BaseException):
            found.append(self._take())
        return found

    def fail(self, error: RkserveError) -> None:
        """End the call with an error of the Router, before all pending events."""
        self._waiting.appendleft((0, error))
        self._wake(came=True)

    def fail_at(self, when_s: float, error: RkserveError) -> None:
        """End the call with the error at a time of the loop's clock, unless it is over then."""
        self._deadline = self._loop.call_at(when_s, self.fail, error)

    async def aclose(self) -> None:
        """Abort the running generations."""
        for timer in (self._patience, self._deadline):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self) -> tuple[int, _Event]:
        index, event = self._waiting.popleft()
        if isinstance(event, BaseException):
            raise event
        assert not isinstance(
            event, Accepted | Embedded
        )  # accepted() has consumed acceptances; no embeddings here
        if isinstance(event, Finished):
            self._open -= 1
        return index, event

    async def _news(self, timeout_s: float | None) -> bool:
        """Wait for an event; return False on timeout."""
        self._reader = self._loop.create_future()
        if timeout_s is not None:
            self._until_s = self._loop.time() + timeout_s
            # One timer serves all waits: it is renewed if an event arrived meanwhile.
            if self._patience is None:
                self._patience = self._loop.call_at(self._until_s, self._look)
        try:
            return await self._reader
        finally:
            self._reader = None

    def _look(self) -> None:
        self._patience = None
        if self._reader is None:
            return  # the next wait sets its own timer
        if self._loop.time() < self._until_s:
            self._patience = self._loop.call_at(self._until_s, self._look)
        else:
            self._wake(came=False)

    def _wake(self, *, came: bool) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(came)

    def _put(self, index: int, event: Event | BaseException) -> None:
        if self._begun and isinstance(event, Accepted):
            return
        if len(self._waiting) >= WAITING and isinstance(event, Delta):
            at, last = self._waiting[-1]
            whole = merged(last, event) if at == index and isinstance(last, Delta) else None
            if whole is not None:
                self._waiting[-1] = (index, whole)
                return
        self._waiting.append((index, event))
        self._wake(came=True)

    async def _pump(self, generate: Generate, index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(generate(request)) as events:
                async for event in events:
                    self._put(index, event)
        except RkserveError as exc:
            self._put(index, exc)
        except Exception as exc:  # noqa: BLE001 - handed to the caller, who logs it as a 500
            self._put(index, exc)
