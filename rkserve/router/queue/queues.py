"""The queues of one Router: reservations at boards, and the rejection of requests without a
prospect.

A request is sent only when a board can start it, so that the first free board takes the next
request; the boards' own queues are for simultaneous requests of several Routers. Nothing is polled:
waiting requests are reconsidered when a board becomes free, a report or a new desired state
arrives, or a timer fires.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil

from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import Desired, PauseMode, undrain_command
from rkserve.core.errors import (
    AdapterBroken,
    BoardAsleep,
    BoardBehind,
    CacheNotFound,
    EnginePaused,
    ModelDrained,
    ModelFetching,
    ModelNotFound,
    NoBoard,
    QueueFull,
    RkserveError,
    UpstreamRefused,
)
from rkserve.core.messages import EmbedRequest, GenerateRequest
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.board_table import USABLE
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.measurements import CircuitBreaker
from rkserve.router.policies import RoutingPolicy, RoutingRequest
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.model_queue import ModelQueue, Waiter
from rkserve.router.queue.reservation import Reservation

# Errors of a board that lacks something that another board may have.
LACKING = (CacheNotFound, AdapterBroken, UpstreamRefused)


class TriedBoards(dict[str, RkserveError]):
    """The boards that rejected a request, by replica, with their errors, over all attempts.

    ``behind_until_s`` is the end of the wait for boards that lag behind the desired state;
    ``recalled`` counts the recalls from boards' queues.
    """

    behind_until_s: float | None = None
    recalled: int = 0


@dataclass(frozen=True, slots=True)
class Availability:
    """The boards that a request may get.

    Boards in ``barred`` are excluded, and those with a pause effect worse than ``most``.
    ``no_board``: no board could take it. ``asks``: the board that is asked even if it is busy, as
    its rejection is the client's answer, or as it is the last one for an accepted request.
    ``waits``: all boards keep such requests until a pause ends.
    """

    barred: Collection[str] = ()
    most: PauseEffect = PauseEffect.REFUSES
    no_board: bool = False
    asks: Candidate | None = None
    waits: bool = False


def prospect(
    request: GenerateRequest,
    boards: ModelBoards,
    desired: Desired,
    tried: Mapping[str, RkserveError],
    blocked: Collection[str],
) -> Availability:
    """Return the availability for a request that has ``tried`` some boards; others are
    ``blocked``.
    """
    # A request is rather rejected with a retry time than queued behind a pause: if a board with a
    # better pause effect is full, boards with a worse one are not tried.
    full = [boards.get(key) for key, exc in tried.items() if isinstance(exc, QueueFull)]
    most = min((board.held for board in full if board is not None), default=PauseEffect.REFUSES)
    most = min(max(most, PauseEffect.OVERFLOW), PauseEffect.REFUSES)
    barred = {*tried, *blocked}
    name = request.line if request.adapter is None else request.adapter.name
    if name is not None and any(pause.scope.adapter == name for pause in desired.pauses):
        pauses = {
            board: desired.target(board.board_id, request.model).held(name)
            for board in boards
            if board.ready and board.key not in barred and board.held is not PauseEffect.DRAINED
        }
        held = {board: pause.mode for board, pause in pauses.items() if pause is not None}
        if held and len(held) == len(pauses):
            if PauseMode.KEEP in held.values():
                return Availability(barred, most, waits=True)
            return Availability(barred, most, asks=next(iter(held)))
        barred |= {board.key for board in held}
    tier = boards.tier(barred) if barred else boards.held
    last = [board for board in boards if board.ready and board.key not in barred]
    if tier is PauseEffect.DRAINED and request.continued is not None:
        # An answer that was accepted may end on a drained board, if no other one is left.
        last = [board for board in last if board.board_id not in desired.moved]
        return Availability(barred, most, no_board=not last, asks=next(iter(last), None))
    if tier is None or tier > most:
        return Availability(barred, most, no_board=True)
    if tier is not PauseEffect.REFUSES:
        return Availability(barred, most)
    asked = next(one for one in last if one.held is PauseEffect.REFUSES)
    hold = desired.target(asked.board_id, request.model).hold if asked.upstream else None
    # An upstream has no queue for a pause.
    keeps = hold is not None and hold.mode is PauseMode.KEEP
    return Availability(barred, most, asks=None if keeps else asked, waits=keeps)


def _unsuited(waiter: Waiter, boards: ModelBoards) -> Collection[str]:
    """Return the upstreams that cannot serve a request: a begun answer has token IDs of boards, and
    adapters and embeddings are with boards only.
    """
    request, before = waiter.request, waiter.request.continued
    begun = before is not None and bool(before.slots or before.text)
    if begun or request.adapter_name is not None or isinstance(request, EmbedRequest):
        return [board.key for board in boards if board.upstream]
    return waiter.terms.unsuited


def refusal(
    fleet: Fleet, model: str, tried: Mapping[str, RkserveError], avoided: Collection[str] = ()
) -> RkserveError:
    """Return the error for a request that no board takes: behind, full, lacking, or no board.

    ``avoided`` holds the reasons of open circuits.
    """
    met = list(tried.values())
    behind = [exc for exc in met if isinstance(exc, BoardBehind)]
    if behind:
        return behind[-1]
    full = [exc for exc in met if isinstance(exc, QueueFull)]
    if full:
        soonest_s = min(exc.retry_after_s or 1 for exc in full)
        return QueueFull(sum(exc.queued for exc in full), soonest_s)
    lacking = [exc for exc in met if isinstance(exc, LACKING)]
    paused = [exc for exc in met if isinstance(exc, EnginePaused)]
    paused.sort(key=lambda exc: exc.retry_after_s or 1)
    asleep = [exc for exc in met if isinstance(exc, BoardAsleep)]
    if reasons := [*lacking[-1:], *paused[:1], *asleep[-1:]]:
        return reasons[0]
    if avoided:
        return NoBoard(model, "; ".join(sorted(avoided)))
    if drained := _drained(fleet, model):
        command = undrain_command(model, drained)
        return ModelDrained(model, f"its boards are drained; to end that, run: {command}")
    return _fetching(fleet, model) or NoBoard(model, fleet.why_not_ready(model, met))


def _drained(fleet: Fleet, model: str) -> list[str]:
    """Return the drained boards of a model that would serve otherwise."""
    drained = fleet.desired.drained
    return [
        one.board_id
        for one in fleet.reports(model)
        if one.state in USABLE and one.board_id in drained
    ]


LOAD_S = 5  # added to the rest of a fetch: the model is verified and loaded
UNKNOWN_S = 10  # before the first bytes
LONGEST_S = 3600


def _fetching(fleet: Fleet, model: str) -> ModelFetching | None:
    """Return the error where boards fetch the model, with the progress of the foremost."""
    found = [
        (report.fetch, report.reason)
        for report in fleet.reports(model)
        if report.fetch is not None and report.state is BoardState.FETCHING
    ]
    if not found:
        return None
    first, reason = max(found, key=lambda one: one[0].fetched_bytes)
    rest, wait_s = first.total_bytes - first.fetched_bytes, UNKNOWN_S
    if first.bytes_per_s > 0:
        wait_s = min(LONGEST_S, ceil(rest / first.bytes_per_s) + LOAD_S)
    return ModelFetching(model, first.fetched_bytes, first.total_bytes, wait_s, reason)


def routing_request(request: GenerateRequest, desired: Desired, *, hashed: bool) -> RoutingRequest:
    """Return a request in the terms of the policies; see ``RoutingRequest.of``."""
    ref = request.adapter
    if ref is None and request.line is not None:
        # The board chooses the version, and during a rollout boards differ: this is a guess, which
        # the next report corrects.
        line = desired.line(request.model, request.line)
        ref = None if line is None else line.serves("", request.session)
    return RoutingRequest.of(request, None if ref is None else ref.key, hashed=hashed)


# While a change is distributed, boards may lag behind the desired state that this Router knows.
CATCH_UP_S = 5.0
CATCH_UP_STEP_S = 0.05
CATCH_UP_LONGEST_S = 0.5


@dataclass(frozen=True, slots=True)
class QueueRules:
    """``limit`` requests may wait for boards of one model, for ``timeout_s`` each.

    Without a limit, it is the total of the boards' own queues divided by ``routers``.
    """

    limit: int | None = None
    timeout_s: float = 300.0
    routers: int = 1
    catch_up_s: float = CATCH_UP_S


class ModelQueues:
    """The queues of all models at one Router. Use from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        policy: RoutingPolicy,
        rules: QueueRules,
        breaker: CircuitBreaker,
        metrics: RouterMetrics,
    ) -> None:
        """``policy`` chooses among the boards that ``breaker`` does not block."""
        self._fleet = fleet
        self._rules = rules
        self._breaker = breaker
        self._metrics = metrics
        self._hashed = policy.uses_prefixes
        timeout_s = rules.timeout_s
        self._queues = {
            model: ModelQueue(
                model, boards, policy, metrics, timeout_s=timeout_s, blocked=self._blocked
            )
            for model, boards in fleet.boards.items()
        }
        fleet.changed.append(self._changed)
        self._changed()

    def depths(self) -> dict[str, Mapping[int, int]]:
        """Return the number of waiting requests at each priority, by model."""
        return {model: queue.by_priority() for model, queue in self._queues.items()}

    def waits(self, request_id: str) -> bool:
        """Return whether the request is in a queue."""
        return any(request_id in queue.waiters for queue in self._queues.values())

    async def take(
        self,
        request: GenerateRequest,
        tried: TriedBoards,
        terms: QueueTerms,
    ) -> Reservation:
        """Wait until a board is free for the request, and reserve it.

        ``tried`` are boards that rejected it, with their errors; boards that were behind the
        desired state are removed once they may have caught up. A request that is continued or was
        tried before goes ahead of all others and is never rejected for lack of room.

        Raises:
            ModelNotFound, NoBoard, BoardBehind, EnginePaused, BoardAsleep: no board takes it.
            QueueFull, QueueTimeout, DeadlineUnreachable: not in time.
            CacheNotFound, AdapterBroken: all boards lack something that it needs.
        """
        queue = self._queues.get(request.model)
        if queue is None:
            raise ModelNotFound(request.model)
        routing = routing_request(request, self._fleet.desired, hashed=self._hashed)
        ahead = bool(tried) or tried.recalled > 0 or request.continued is not None
        waiter = Waiter(
            request, routing, terms, time.monotonic(), ahead=ahead, recalled=tried.recalled
        )
        try:
            reservation = await self._place(queue, waiter, tried)
        except RkserveError as exc:
            self._metrics.refused(request.model, "shed" if waiter.shed else exc.code or "")
            raise
        self._metrics.queue_wait.labels(request.model).observe(reservation.waited_ms / 1e3)
        if waiter.held is not None:
            since_s, before = waiter.held
            by = before.held_by(self._fleet.desired.served(request.model))
            self._metrics.held(request.model, by, time.monotonic() - since_s)
        return reservation

    async def _place(self, queue: ModelQueue, waiter: Waiter, tried: TriedBoards) -> Reservation:
        """Wait in the queue; without a board, check for new ones before failing.

        After a redeploy all replicas are new, and a request must not fail in the second before a
        Router has their reports, nor in the moment before a change reaches the boards.
        """
        looked, step_s = False, CATCH_UP_STEP_S
        while True:
            try:
                reservation = await self._turn(queue, waiter, tried)
            except (NoBoard, BoardBehind):
                if not looked:
                    looked = True
                    if await self._fleet.look_again():
                        continue
                if not self._may_catch_up(queue, waiter, tried):
                    raise
                await asyncio.sleep(step_s)
                step_s = min(2 * step_s, CATCH_UP_LONGEST_S)
                for key in [key for key, exc in tried.items() if isinstance(exc, BoardBehind)]:
                    del tried[key]
                await self._fleet.look_again()
            else:
                if reservation is not None:
                    return reservation

    async def _turn(
        self, queue: ModelQueue, waiter: Waiter, tried: Mapping[str, RkserveError]
    ) -> Reservation | None:
        """Wait for a reservation; return None if the boards must be checked again.

        Raises the error for which no board takes the request.
        """
        desired, blocked = self._fleet.desired, self._blocked()
        unsuited = _unsuited(waiter, queue.boards)
        shut = {*blocked, *unsuited}
        found = prospect(waiter.request, queue.boards, desired, tried, shut)
        waiter.barred = waiter.routing.tried = found.barred
        waiter.routing.most = found.most
        if found.no_board:
            soon = prospect(waiter.request, queue.boards, desired, tried, unsuited)
            if blocked and not soon.no_board and soon.asks is None:
                # The boards exist, and only their circuits are open: the request can wait.
                return await queue.aside(waiter, self._breaker.soonest_s(time.monotonic()))
            reasons = [self._breaker.reason(key, time.monotonic()) for key in blocked]
            raise refusal(self._fleet, waiter.request.model, tried, reasons)
        if found.asks is not None:
            return queue.at_once(waiter, found.asks)
        return await (self._aside(queue, waiter) if found.waits else queue.wait(waiter))

    async def _aside(self, queue: ModelQueue, waiter: Waiter) -> Reservation | None:
        """Wait as ``ModelQueue.aside``, and note how long the cluster held the request."""
        model, since_s = waiter.request.model, time.monotonic()
        before = self._fleet.desired.served(model)
        if waiter.held is None:
            waiter.held = (since_s, before)
        return await queue.aside(waiter)

    def _blocked(self) -> Collection[str]:
        return self._breaker.blocked(time.monotonic()) if self._breaker.failing else ()

    def _changed(self) -> None:
        pauses = self._fleet.desired.pauses
        paused = {one.scope.adapter for one in pauses if one.scope.adapter is not None}
        for queue in self._queues.values():
            queue.changed(self._rules.limit, self._rules.routers, paused)

    def _may_catch_up(self, queue: ModelQueue, waiter: Waiter, tried: TriedBoards) -> bool:
        """Return whether boards will serve soon, and the wait for that is not over.

        That is the case while boards lag behind the desired state, or until a failed board reports
        again.
        """
        model, now_s, limit_s = waiter.request.model, time.monotonic(), self._rules.catch_up_s
        if tried.behind_until_s is None or now_s > tried.behind_until_s + limit_s:
            tried.behind_until_s = now_s + limit_s  # an older deadline belonged to another change
        if now_s >= tried.behind_until_s:
            return False
        states = {report.replica: report.state for report in self._fleet.reports(model)}
        return (
            waiter.let_in
            or any(isinstance(exc, BoardBehind) for exc in tried.values())
            or BoardState.JOINING in states.values()
            or any(
                states.get(board.key) is BoardState.READY
                for board in queue.boards
                if not board.ready and board.key not in tried
            )
        )
