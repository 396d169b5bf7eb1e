"""The requests of a Router that no board has at the moment, and control calls for them.

Such a request waits in the queue, is on the way to a board, or is between two boards.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from rkserve.core.board_report import GenerationInfo, GenerationState, RouterGenerations
from rkserve.core.desired_state import Scope, ServedWeights
from rkserve.core.messages import ControlAction, EmbedRequest, Event, Kv
from rkserve.fleet.fleet import Fleet
from rkserve.router.dispatch.failover import GenerationProgress
from rkserve.router.queue.admission import QueueTerms

ENDED_REMEMBERED = 256
BY_REQUEST = "request"  # the origin of the pause
T = TypeVar("T")


class ControlChange(Exception):
    """A control call changed a request that no board has."""


class RequestLocation:
    """The board of one request, or none; registered with its Router while entered.

    While no board has the request, control calls change it here, and end the waits of
    ``unless_changed``.
    """

    def __init__(
        self, progress: GenerationProgress, fleet: Fleet, known: dict[str, RequestLocation]
    ) -> None:
        self.progress = progress
        self.id = progress.asked.request_id
        self.ended = False  # aborted, with or without a board
        # Of a pause by the cluster: its begin, and the weights that were served before it.
        self.paused: tuple[float, ServedWeights] | None = None
        self.failures = 0  # the boards that rejected it or were lost
        self.since_s = time.monotonic()  # the time since which it has no board
        self.replica: str | None = None
        self._entries, self._known = fleet.entries, known
        self._changed = asyncio.Event()

    def __enter__(self) -> RequestLocation:
        self._known[self.id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.leave(self.id)
        if self._known.get(self.id) is self:
            del self._known[self.id]

    @property
    def controllable(self) -> bool:
        """Return whether no board has the request, and it can be controlled here."""
        return self.replica is None and not isinstance(self.progress.asked, EmbedRequest)

    def enter(self, group: str, replica: str) -> None:
        """Note that a board has accepted the request."""
        self.replica = replica
        self._entries.enter(self.id, group, replica)

    def leave(self) -> None:
        """Note that no board has the request."""
        self._entries.leave(self.id)
        self.replica, self.since_s = None, time.monotonic()

    def abort(self) -> None:
        """End the request when no board has it; a board that has it is asked by others."""
        self.ended = True
        if self.replica is None:
            self._changed.set()

    def act(self, action: ControlAction) -> bool:
        """Apply a control action; return False if the request's state does not allow it."""
        progress = self.progress
        if action is ControlAction.ABORT:
            return True  # ``abort`` has done it
        if action is ControlAction.PAUSE and progress.accepted:
            progress.pause()
        elif action is ControlAction.RESUME and progress.rests is not None:
            progress.resume()
        else:
            return False
        self._changed.set()
        return True

    async def unless_changed(
        self, work: Coroutine[Any, Any, T], drop: Callable[[T], None] = lambda _: None
    ) -> T:
        """Return the result of ``work``; ``drop`` releases one that comes too late.

        Raises:
            ControlChange: a control call changed the request first.
        """
        loop = asyncio.get_running_loop()
        task, changed = loop.create_task(work), loop.create_task(self._changed.wait())
        pending: set[asyncio.Task[Any]] = {task, changed}
        returned = False
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if not self._changed.is_set():
                returned = True
                return task.result()
            self._changed.clear()
            raise ControlChange
        finally:
            changed.cancel()
            if not returned:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled() and task.exception() is None:
                    drop(task.result())

    def info(self) -> GenerationInfo:
        """Return the state of the request while no board has it."""
        progress = self.progress
        request, rests = progress.request, progress.rests
        done, ref = request.continued, request.adapter
        state = GenerationState.QUEUED if rests is None else GenerationState.PAUSED
        return GenerationInfo(
            request_id=request.request_id,
            board_id="",
            model=request.model,
            state=GenerationState.ABORTING if self.ended else state,
            prompt_tokens=len(request.prompt_ids),
            tokens=0 if done is None else done.tokens,
            context_tokens=len(request.prompt_ids) + (0 if done is None else len(done.slots)),
            partial_output="" if done is None else done.text,
            kv=None if rests is None else Kv.RECOMPUTED,
            adapter=request.line if ref is None else ref.name,
            native_pause=request.native_pause,
            paused_by=None if rests is None else rests.by or BY_REQUEST,
            age_s=time.monotonic() - self.since_s,
        )


class UnassignedRequests:
    """The requests of one Router, of which those without a board are listed and controlled."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, RequestLocation] = {}
        self._ended: dict[str, GenerationInfo] = {}  # requests aborted here, the oldest first
        # The times of aborts of all requests, by model or of everything.
        self._aborts: dict[str | None, float] = {}

    def locate(self, progress: GenerationProgress, terms: QueueTerms) -> RequestLocation:
        """Return the location of a new request, ``ended`` if all were aborted since its call."""
        location = RequestLocation(progress, self._fleet, self._known)
        location.ended = self._is_aborted(progress, terms)
        return location

    def infos(self) -> list[GenerationInfo]:
        """Return the states of the requests that no board has."""
        return [one.info() for one in self._known.values() if one.controllable]

    def control(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Apply ``action`` to those choices of a generation that no board has.

        A request that waits for its first board can only be aborted. An abort also ends a choice
        that leaves its board during the call.
        """
        meant = [one for one in self._known.values() if _is_of(one.id, generation, choice)]
        done: list[GenerationInfo] = []
        refused: list[GenerationInfo] = []
        for location in meant:
            controllable = location.controllable
            if action is ControlAction.ABORT:
                location.abort()
            if controllable:
                (done if location.act(action) else refused).append(location.info())
        ended = [info for name, info in self._ended.items() if _is_of(name, generation, choice)]
        return RouterGenerations(tuple(done), tuple(refused), tuple(ended), known=bool(meant))

    def abort(self, scope: Scope, request_ids: Collection[str] | None) -> int:
        """Abort requests that no board has, all or by ID; return their number.

        Requests on boards are aborted by the boards, and here if they lose their board first. With
        ``scope.boards`` only requests on these boards are meant.
        """
        boards = {address.replica: address.board_id for address in self._fleet.addresses()}
        if request_ids is None and not scope.boards:
            now_s = time.monotonic()
            self._aborts |= dict.fromkeys(scope.models or (None,), now_s)
        ended = 0
        for location in list(self._known.values()):
            request, replica = location.progress.asked, location.replica
            board = "" if replica is None else boards.get(replica, replica)
            if isinstance(request, EmbedRequest) or not scope.covers(board, request.model):
                continue
            if request_ids is None or any(_is_named(location.id, one) for one in request_ids):
                ended += location.controllable and not location.ended
                location.abort()
        return ended

    def end(self, location: RequestLocation) -> list[Event]:
        """Return the events that end an aborted request that no board has."""
        self._ended[location.id] = replace(location.info(), state=GenerationState.ENDED)
        while len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return location.progress.aborted((time.monotonic() - location.since_s) * 1e3)

    def _is_aborted(self, progress: GenerationProgress, terms: QueueTerms) -> bool:
        """Return whether everything was aborted between the call's arrival and now."""
        request = progress.asked
        if terms.came_s is None or isinstance(request, EmbedRequest):
            return False
        latest_s = max(self._aborts.get(model, -math.inf) for model in (None, request.model))
        return terms.came_s < latest_s


def _is_of(request_id: str, generation: str, choice: int | None) -> bool:
    completion, _, index = request_id.rpartition("/")
    return completion == generation and choice in (None, int(index) if index.isdigit() else -1)


def _is_named(request_id: str, name: str) -> bool:
    """Return whether a name is that of the request or of its completion."""
    return name in (request_id, request_id.rpartition("/")[0])
