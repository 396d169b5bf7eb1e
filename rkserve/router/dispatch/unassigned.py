"""The requests of a Router that no board has at the moment, and control calls for them.

Such a request waits in the queue, is on the way to a board, or is between two boards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from rkserve.core.board_report import GenerationInfo, GenerationState, RouterGenerations
from rkserve.core.desired_state import Scope
from rkserve.core.messages import ControlAction, EmbedRequest, Event, GenerateRequest
from rkserve.fleet.fleet import Fleet
from rkserve.router.dispatch.failover import RequestLocation
from rkserve.router.queue.admission import QueueTerms

ENDED_REMEMBERED = 256


class UnassignedRequests:
    """The requests of one Router, of which those without a board are listed and controlled."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.known: dict[str, RequestLocation] = {}
        self._ended: dict[str, GenerationInfo] = {}  # requests aborted here, the oldest first
        # The times of aborts of all requests, by model or of everything.
        self.aborts: dict[str | None, float] = {}
        # Aborts a request at the upstream of an address; False if it is no upstream.
        self.cut: Callable[[str, str], bool] = lambda _replica, _request_id: False

    def infos(self) -> list[GenerationInfo]:
        """Return the states of the requests that no board has."""
        return [one.info() for one in self.known.values() if one.controllable]

    def control(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Apply ``action`` to those choices of a generation that no board has.

        A request that waits for its first board can only be aborted. An abort also ends a choice
        that leaves its board during the call.
        """
        meant = [one for one in self.known.values() if _is_of(one.id, generation, choice)]
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

        Requests on boards are aborted by the boards, and here if they lose their board first; those
        at upstreams are aborted here, without being counted. With
        ``scope.boards`` only requests on these boards are meant.
        """
        boards = {address.replica: address.board_id for address in self._fleet.addresses()}
        if request_ids is None and not scope.boards:
            now_s = time.monotonic()
            self.aborts |= dict.fromkeys(scope.models or (None,), now_s)
        ended = 0
        for location in list(self.known.values()):
            request, replica = location.progress.asked, location.replica
            board = "" if replica is None else boards.get(replica, replica)
            if isinstance(request, EmbedRequest) or not scope.covers(board, request.model):
                continue
            if request_ids is None or any(_is_named(location.id, one) for one in request_ids):
                ended += location.controllable and not location.ended
                location.abort()
                if replica is not None:
                    self.cut(replica, location.id)
        return ended

    def end(self, location: RequestLocation) -> list[Event]:
        """Return the events that end an aborted request that no board has."""
        self._ended[location.id] = replace(location.info(), state=GenerationState.ENDED)
        while len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return location.progress.aborted((time.monotonic() - location.since_s) * 1e3)

    def is_aborted(self, request: GenerateRequest, terms: QueueTerms) -> bool:
        """Return whether everything was aborted between the call's arrival and now."""
        if terms.came_s is None or isinstance(request, EmbedRequest):
            return False
        latest_s = max(self.aborts.get(model, -math.inf) for model in (None, request.model))
        return terms.came_s < latest_s


def _is_of(request_id: str, generation: str, choice: int | None) -> bool:
    completion, _, index = request_id.rpartition("/")
    return completion == generation and choice in (None, int(index) if index.isdigit() else -1)


def _is_named(request_id: str, name: str) -> bool:
    """Return whether a name is that of the request or of its completion."""
    return name in (request_id, request_id.rpartition("/")[0])
