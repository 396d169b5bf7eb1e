"""Answer streams: the choices of one call merged into one stream, and the tokens delivered so far.

Every token passes through here: no task, timer or time limit is created per token. When a board
pauses, its last tokens may still be on the way to the client; a pause is answered after they have
arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rkserve.core.board_report import Emitted
from rkserve.core.desired_state import Scope
from rkserve.core.errors import RkserveError
from rkserve.core.messages import (
    Accepted,
    Delta,
    Embedded,
    Event,
    Finished,
    GenerateRequest,
    Paused,
    QueueChange,
    merged,
)
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Answers, Fleet

log = logging.getLogger(__name__)

# Written tokens still pass Ray's proxy, and the answer to the pause call, on another connection,
# may overtake them: by up to 3 ms on a machine loaded with three times its cores. There is no
# acknowledgement, so a fixed time is added.
PASSAGE_S = 0.02
_NOTHING: Mapping[str, int] = {}


@dataclass(slots=True)
class _OpenStream:
    """One choice of a streamed answer. ``tokens`` have been written to the client's connection.

    ``stopped_at`` is the board's token count at the latest pause event of the stream.
    """

    request_id: str
    adapter: str | None
    tokens: int = 0
    stopped_at: int = 0


class OpenStreams:
    """All open streams of a Router. Use from one event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._flows: dict[str, _OpenStream] = {}
        self._moved = asyncio.Event()
        self._sent_s = -math.inf  # the time of the latest write to any stream
        self._clock: Callable[[], float] | None = None  # the loop's, known with the first stream

    def __len__(self) -> int:
        return len(self._flows)

    def enter(self, request: GenerateRequest) -> None:
        """Add a stream."""
        # Before Python 3.12 a look at the running loop asks the kernel for the process, which for
        # each token would take as long as its decoding.
        self._clock = self._clock or asyncio.get_running_loop().time
        self._flows[request.request_id] = _OpenStream(request.request_id, request.adapter_name)

    def sent(self, request_id: str, event: Delta | Paused | Finished) -> None:
        """Note that an event, and all before it, was written to the client's connection."""
        flow = self._flows.get(request_id)
        if flow is None:
            return
        if isinstance(event, Delta):
            flow.tokens += len(event.token_ids)
            assert self._clock is not None
            self._sent_s = self._clock()
        elif isinstance(event, Paused):
            # The count includes tokens whose text is held back until it is complete; a later delta
            # brings them.
            flow.stopped_at = event.tokens
        else:
            del self._flows[request_id]
        self._moved.set()

    def leave(self, request_ids: Iterable[str]) -> None:
        """Remove streams, however they ended."""
        for request_id in request_ids:
            self._flows.pop(request_id, None)
        self._moved.set()

    async def at_rest(
        self, scope: Scope, timeout_s: float, known: Mapping[str, int] = _NOTHING
    ) -> bool:
        """Wait until the streams of a scope have delivered all tokens of their boards.

        The boards have stopped; ``known`` are the token counts of generations at that time. Boards
        are asked only for others, which have just begun or ended. Return False after ``timeout_s``,
        for example because a client does not read.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        goals = await self._goals(scope, timeout_s, known)
        while any(self._is_short_of(request_id, goal) for request_id, goal in goals.items()):
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), max(0.0, deadline_s - loop.time()))
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                log.warning("a stream still brings what its board sent before a pause")
                return False
        await asyncio.sleep(max(0.0, self._sent_s + PASSAGE_S - loop.time()))
        return True

    def _is_short_of(self, request_id: str, goal: int | None) -> bool:
        flow = self._flows.get(request_id)
        return flow is not None and (goal is None or max(flow.tokens, flow.stopped_at) < goal)

    async def _goals(
        self, scope: Scope, timeout_s: float, known: Mapping[str, int]
    ) -> dict[str, int | None]:
        """Return the final token count of each stream; None if it has ended on its board.

        Only the board knows: a generation that has not begun has no pause event, and an event that
        arrived may belong to an earlier pause.
        """
        meant = {
            flow.request_id: addresses
            for flow in self._flows.values()
            if scope.adapter in (None, flow.adapter) and (addresses := self._addresses(flow, scope))
        }
        goals: dict[str, int | None] = {one: known[one] for one in meant if one in known}
        meant = {one: addresses for one, addresses in meant.items() if one not in goals}
        if not meant:
            return goals
        asked = {address.board_id: address for addresses in meant.values() for address in addresses}
        answers: Answers[Emitted] = await self._fleet.ask(
            asked.values(), "emitted", timeout_s=timeout_s, together=True
        )
        tokens = dict(pair for reply in answers.found.values() for pair in reply.tokens)
        # The count of a board that does not answer is unknown; its streams are not awaited.
        goals |= {
            request_id: tokens.get(request_id)
            for request_id, addresses in meant.items()
            if all(address.board_id in answers.found for address in addresses)
        }
        return goals

    def _addresses(self, flow: _OpenStream, scope: Scope) -> list[BoardAddress]:
        completion, _, choice = flow.request_id.rpartition("/")
        addresses = self._fleet.holders(completion, int(choice))
        return [address for address in addresses if scope.covers(address.board_id, address.model)]


# Takes a request, and a function for the deltas that arrive while the reader waits.
Generate = Callable[[GenerateRequest, Callable[[Event], None]], AsyncGenerator[Event, None]]
_Item = tuple[int, Event | BaseException]
_Event = Delta | Paused | Finished
# Pending events of a slow client; further deltas are merged.
WAITING = 64


class ChunkWriter(Protocol):
    """The sending end of a streamed answer. ``last``: no chunk follows the next one."""

    last: bool

    @property
    def ready(self) -> bool:
        """True if the client takes a chunk at once."""

    def write(self, chunk: bytes, sent: Callable[[], None]) -> None:
        """Send a chunk without waiting, while ``ready``; ``sent`` is called when it was sent."""


class Choices:
    """Runs one generation per choice and merges them. Always ``aclose`` it: that frees the boards.

    An error of one choice is the error of the call. A delta that arrives while ``next`` waits is
    offered to ``at_once``, which returns False if ``next`` must return it.
    """

    def __init__(self, generate: Generate, requests: Sequence[GenerateRequest]) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Item] = deque()
        self._reader: asyncio.Future[bool] | None = None  # False: timed out
        self._patience: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0  # the reader's
        self._until_s = 0.0  # the reader's deadline
        self.at_once: Callable[[int, Delta], bool] | None = None
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

    @property
    def over(self) -> bool:
        """Return whether every choice has ended."""
        return self._open == 0

    @property
    def pending(self) -> bool:
        """Return whether ``next`` need not wait."""
        return bool(self._waiting)

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
            event, Accepted | Embedded | QueueChange
        )  # accepted() has consumed acceptances; no embeddings or queue changes here
        if isinstance(event, Finished):
            self._open -= 1
        return index, event

    async def _news(self, timeout_s: float | None) -> bool:
        """Wait for an event; return False on timeout."""
        self._reader = self._loop.create_future()
        if timeout_s is not None:
            self._timeout_s, self._until_s = timeout_s, self._loop.time() + timeout_s
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

    def _deliver(self, index: int, event: Event) -> None:
        """Have an event processed at once, if the reader waits for it; queue it otherwise."""
        reader = self._reader
        if (
            self.at_once is None
            or reader is None
            or reader.done()
            or self._waiting
            or not isinstance(event, Delta)
            or not self.at_once(index, event)
        ):
            self._put(index, event)
        elif self._patience is not None:
            self._until_s = self._loop.time() + self._timeout_s

    async def _pump(self, generate: Generate, index: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(generate(request, partial(self._deliver, index))) as events:
                async for event in events:
                    self._put(index, event)
        except RkserveError as exc:
            self._put(index, exc)
        except Exception as exc:  # noqa: BLE001 - handed to the caller, who logs it as a 500
            self._put(index, exc)
