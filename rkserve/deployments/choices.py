"""The generations of one call, each on a board of its own, as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from rkserve.errors import RkserveError
from rkserve.messages import Accepted, Delta, Event, Finished, GenerateRequest, Paused

Generate = Callable[[GenerateRequest], AsyncGenerator[Event, None]]
_Item = tuple[int, Event | BaseException]


class Choices:
    """Runs one generation per choice and merges them. Always ``aclose`` it: that frees the boards.

    An error of one choice is the error of the call.
    """

    def __init__(self, generate: Generate, requests: Sequence[GenerateRequest]) -> None:
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._early: list[_Item] = []  # events of fast choices, before the slowest was accepted
        self._open = len(requests)
        self._tasks = [
            asyncio.create_task(self._pump(generate, index, request))
            for index, request in enumerate(requests)
        ]

    async def accepted(self) -> list[Accepted]:
        """Wait until a board has taken every choice. Raises what the first refusal was."""
        found: dict[int, Accepted] = {}
        while len(found) < len(self._tasks):
            index, event = await self._queue.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Accepted):
                found[index] = event
            else:
                self._early.append((index, event))
        return [found[index] for index in sorted(found)]

    async def next(
        self, timeout_s: float | None = None
    ) -> tuple[int, Delta | Paused | Finished] | None:
        """Return the next event and its choice's index, or None after the last one.

        Raises:
            TimeoutError: nothing came within ``timeout_s``; call again.
            RkserveError: a choice failed.
        """
        if self._open == 0:
            return None
        if self._early:
            index, event = self._early.pop(0)
        elif self._queue.empty() and timeout_s is not None:
            try:
                index, event = await asyncio.wait_for(self._queue.get(), timeout_s)
            except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
                raise TimeoutError from None
        else:
            index, event = await self._queue.get()
        if isinstance(event, BaseException):
            raise event
        assert not isinstance(event, Accepted)  # accepted() took them all
        if isinstance(event, Finished):
            self._open -= 1
        return index, event

    async def aclose(self) -> None:
        """Abort what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, generate: Generate, index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(generate(request)) as events:
                async for event in events:
                    self._queue.put_nowait((index, event))
        except RkserveError as exc:
            self._queue.put_nowait((index, exc))
        except Exception as exc:  # noqa: BLE001 - handed to the caller, who logs it as a 500
            self._queue.put_nowait((index, exc))
