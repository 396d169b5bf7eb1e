"""The queue of one model: waiting requests, and their assignment to boards.

Each change of the queue or of the boards applies the decisions of ``AdmissionQueue`` and of the
routing policy. Requests that no board could take are rejected before they reach this queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from rkserve.core.desired_state import ServedWeights
from rkserve.core.errors import DeadlineUnreachable, QueueTimeout, RkserveError
from rkserve.core.messages import Finished, GenerateRequest
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import Reuse
from rkserve.router.policies import RoutingPolicy, RoutingRequest, SendTo, WaitFor
from rkserve.router.queue.admission import (
    ANONYMOUS,
    AdmissionQueue,
    Capacity,
    QueueEntry,
    QueueTerms,
)
from rkserve.router.queue.reservation import RequestSize, Reservation, ServiceTimeModel

# The requests compared for one free board. Those that wait for another board do not count.
LOOKED_AT = 16
# Of one request, where Routers choose the same board at the same moment again and again.
MOST_RECALLS = 4
# For that time, a board is left free for a recalled request: its client may have left meanwhile.
RETURN_S = 0.1
# Board time of running requests is charged this often: at every change of a board it would take as
# long as all else, where many run.
METER_S = 0.1
# While no board is better than these, none will become free.
_CLOSED = (None, PauseEffect.REFUSES, PauseEffect.DRAINED)


@dataclass(eq=False, slots=True)
class Waiter:
    """One request that waits for a board. Boards in ``barred`` are excluded.

    A request that was ``let_in`` before is not rejected for lack of room; one that is ``ahead``
    never is, and goes before all that are not. ``recalled`` counts its recalls from boards' queues.
    """

    request: GenerateRequest
    routing: RoutingRequest
    terms: QueueTerms
    since_s: float
    ahead: bool = False
    let_in: bool = False
    recalled: int = 0
    barred: Collection[str] = ()
    shed: bool = False
    held: tuple[float, ServedWeights] | None = (
        None  # since when the cluster pauses it, and what it served before
    )
    entry: QueueEntry[Waiter] | None = None
    granted: asyncio.Future[Reservation | None] | None = None

    @property
    def adapter(self) -> str | None:
        """The name of the request's adapter, whatever its version."""
        ref = self.request.adapter
        return self.request.line if ref is None else ref.name

    @property
    def asked(self) -> RequestSize:
        """The size of the request."""
        return RequestSize(max(1, self.routing.prompt_tokens), self.routing.max_tokens)

    @property
    def gone(self) -> bool:
        """Return whether the request no longer waits."""
        return self.granted is None or self.granted.done()

    def resolve(self, reservation: Reservation | None) -> None:
        """Give it a reservation; with None, its prospects must be checked again."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_result(reservation)

    def fail(self, exc: RkserveError) -> None:
        """End the wait with an error."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_exception(exc)


@dataclass(eq=False, slots=True)
class _Running:
    """A request on a board; ``metered_s`` have been charged to its owner."""

    waiter: Waiter
    entry: QueueEntry[Waiter] | None
    metered_s: float = 0.0


class ModelQueue:
    """The queue of one model. Use from one event loop. ``waiters`` are by request ID."""

    def __init__(
        self,
        model: str,
        boards: ModelBoards,
        policy: RoutingPolicy,
        metrics: RouterMetrics,
        *,
        timeout_s: float,
        blocked: Callable[[], Collection[str]],
    ) -> None:
        """``blocked`` returns the keys of boards with an open circuit."""
        self._model = model
        self.boards = boards
        self._metrics = metrics
        self._policy = policy
        self._timeout_s = timeout_s
        self._blocked = blocked
        self._admission: AdmissionQueue[Waiter] = AdmissionQueue(timeout_s)
        self._aside: dict[Waiter, None] = {}  # requests that wait for the end of a pause, in order
        self._picky: dict[Waiter, None] = {}  # waiting requests that some boards cannot serve
        self.waiters: dict[str, Waiter] = {}
        self._expectation = ServiceTimeModel()
        self._limit = self._elsewhere = 0
        self._shared: list[Candidate] = []
        self._at_boards: dict[Reservation, None] = {}  # those in boards' own queues, in order
        self._returns_s = -math.inf  # until when a recalled request is to be back
        self._again_s = math.inf  # by request: when a decision to wait is reconsidered
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[Reservation, _Running] = {}
        self._metered_s = -math.inf

    def __len__(self) -> int:
        return len(self._admission) + len(self._aside)

    def by_priority(self) -> dict[int, int]:
        """Return the number of waiting requests at each priority."""
        counts = dict(self._admission.by_priority())
        for waiter in self._aside:
            counts[waiter.terms.priority] = counts.get(waiter.terms.priority, 0) + 1
        return counts

    # -- waiting ------------------------------------------------------------------------------

    async def wait(self, waiter: Waiter) -> Reservation | None:
        """Wait for a board; return None if the boards have changed and must be checked again.

        Raises:
            QueueFull, QueueTimeout, DeadlineUnreachable: the request is rejected.
        """
        now_s = time.monotonic()
        expected = self._expectation.of(waiter.asked)
        if waiter.let_in or waiter.ahead:
            waiter.entry = self._admission.readmit(
                waiter, waiter.terms, expected, waiter.since_s, ahead=waiter.ahead
            )
        else:
            supply = self._supply()
            waiter.entry, leaves = self._admission.offer(
                waiter, waiter.terms, expected, supply, now_s
            )
            if leaves is not None:
                leaves.what.shed = True
                self._left(leaves.what, self._admission.full(leaves.terms, supply, now_s))
        waiter.let_in = True
        if waiter.recalled:
            self._returns_s = -math.inf
        waiter.granted = asyncio.get_running_loop().create_future()
        self.waiters[waiter.routing.request_id] = waiter
        if waiter.barred or waiter.adapter is not None:
            self._picky[waiter] = None
        try:
            self.pump()
            return await self._granted(waiter, waiter.granted)
        finally:
            self.waiters.pop(waiter.routing.request_id, None)
            self._picky.pop(waiter, None)

    async def aside(self, waiter: Waiter, again_s: float | None = None) -> Reservation | None:
        """Wait outside of the queue for a change of the boards or of the desired state.

        The wait also ends at ``again_s`` of the monotonic clock. Raises as ``wait``.
        """
        now_s = time.monotonic()
        if not (waiter.let_in or waiter.ahead) and len(self) >= self._limit:
            raise self._admission.full(waiter.terms, self._supply(), now_s)
        waiter.let_in = True
        until_s = waiter.since_s + self._timeout_s
        deadline_s = waiter.terms.deadline_s
        granted = waiter.granted = asyncio.get_running_loop().create_future()
        self._aside[waiter] = None
        self.waiters[waiter.routing.request_id] = waiter
        try:
            limit_s = until_s if deadline_s is None else min(until_s, deadline_s)
            wake_s = limit_s if again_s is None else min(limit_s, again_s)
            return await asyncio.wait_for(granted, max(0.0, wake_s - now_s))
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            if wake_s < limit_s:
                return None
            waited_s = time.monotonic() - waiter.since_s
            if deadline_s is not None and deadline_s <= until_s:
                raise DeadlineUnreachable(waiter.terms.timeout_s, waited_s) from None
            raise QueueTimeout(waited_s, 1) from None
        finally:
            self._aside.pop(waiter, None)
            self.waiters.pop(waiter.routing.request_id, None)

    def at_once(self, waiter: Waiter, board: Candidate) -> Reservation:
        """Reserve a board even if it is busy; it will reject the request itself."""
        return self._place(waiter, board, None)

    async def _granted(
        self, waiter: Waiter, granted: asyncio.Future[Reservation | None]
    ) -> Reservation | None:
        if granted.done():
            return granted.result()
        try:
            return await granted
        except asyncio.CancelledError:
            self._withdraw(waiter)
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                reservation = granted.result()
                if reservation is not None:  # the reservation came after the request was cancelled
                    reservation.ended(left=False)
            raise

    def _withdraw(self, waiter: Waiter) -> None:
        if waiter.entry is not None:
            self._admission.withdraw(waiter.entry)
        self.boards.unbook(waiter.routing.request_id)

    def _left(self, waiter: Waiter, exc: RkserveError) -> None:
        self._withdraw(waiter)
        waiter.fail(exc)

    # -- what changes -------------------------------------------------------------------------

    def changed(self, limit: int | None, routers: int, paused: Collection[str]) -> None:
        """React to new reports or desired state; adapters in ``paused`` are paused somewhere."""
        boards = list(self.boards)
        room = sum(max(0, board.capacity - board.n_batch) for board in boards)
        self._limit = math.ceil(room / routers) if limit is None else limit
        self._elsewhere = sum(max(0, board.load - board.n_batch) for board in boards)
        self._shared = [board for board in boards if _is_shared(board)]
        for waiter in self._aside:
            waiter.resolve(None)
        if self._blocked():
            self._call_off([entry.what for entry in self._admission.order()])
        else:
            # Reports arrive every second; most waiting requests need no new check for them.
            self._call_off([one for one in self._picky if one.barred or one.adapter in paused])
        self.pump()

    def _call_off(self, waiters: Iterable[Waiter]) -> None:
        """End the waits of these, so that their prospects are checked again."""
        for waiter in waiters:
            self._withdraw(waiter)
            waiter.resolve(None)

    def pump(self) -> None:
        """Assign the free boards, and set a timer for the next thing to do."""
        now_s = time.monotonic()
        if now_s - self._metered_s >= METER_S:
            self._metered_s = now_s
            for reservation in list(self._running):
                self._meter(reservation, now_s)
        for entry, exc in self._admission.expire(now_s):
            self._left(entry.what, exc)
        if len(self._admission) and self.boards.held in _CLOSED:
            self._call_off([entry.what for entry in self._admission.order()])
        while (found := self._next(now_s)) is not None:
            entry, board = found
            if entry.what.gone:
                self._withdraw(entry.what)  # it will handle that itself shortly
            else:
                self._admission.start(entry, now_s)
                entry.what.resolve(self._place(entry.what, board, entry))
        self._recall()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        event_s = min(self._again_s, self._admission.next_event_s() or math.inf)
        if event_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(event_s, self.pump)

    def _recall(self) -> None:
        """Take back one request from a board's own queue, if another board is free for it.

        Another Router's request was there first. The next pump takes back the next one, when this
        one has a board. A paused request of ours may keep a board that counts as free until its
        next report.
        """
        if not self._at_boards or not self.boards.any_open or time.monotonic() < self._returns_s:
            return
        for reservation in list(self._at_boards):
            if not reservation.movable:
                del self._at_boards[reservation]
                continue
            waiter, board = self._running[reservation].waiter, reservation.board
            tried = {*waiter.barred, *self._blocked(), board.key}
            if any(not free.resting for free in self.boards.free(tried, board.held)):
                self._metrics.decisions.labels(self._model, "recalled").inc()
                self._returns_s = time.monotonic() + RETURN_S
                reservation.recall()
                del self._at_boards[reservation]
                return

    def _queued_at_board(self, reservation: Reservation) -> None:
        """Recall the request at once, or when a board is free for it."""
        if self._running[reservation].waiter.recalled < MOST_RECALLS:
            self._at_boards[reservation] = None
            self.pump()

    def _next(self, now_s: float) -> tuple[QueueEntry[Waiter], Candidate] | None:
        """Return the next assignment: of the first requests with a board, the policy's choice."""
        self._again_s = math.inf
        if not len(self._admission):
            return None
        ahead = self._admission.ahead
        continuing = [entry for entry in ahead if entry.what.request.continued is not None]
        if not (self.boards.any_open or self._shared or continuing):
            return None
        offers = self._offers(now_s)
        if offers:
            chosen = self._policy.first([(entry.what.routing, take) for entry, take in offers])
            entry, take = offers[chosen]
            self._metrics.decisions.labels(self._model, _word(take.reuse)).inc()
            return entry, take.board
        for entry in self._admission.order() if self._shared else continuing:
            routing = entry.what.routing
            continues = entry.what.request.continued is not None
            board = self._before_others(routing) if continues else self._behind_others(routing)
            if board is not None:
                return entry, board
            if not routing.tried:
                break
        return None

    def _offers(self, now_s: float) -> list[tuple[QueueEntry[Waiter], SendTo]]:
        """Return possible assignments, as many as the policy wants to compare."""
        blocked = self._blocked()
        offers: list[tuple[QueueEntry[Waiter], SendTo]] = []
        patient = 0
        for entry in self._admission.order():
            if offers and _rank(offers[0][0]) != _rank(entry):
                break
            routing = entry.what.routing
            routing.tried = {*entry.what.barred, *blocked} if blocked else entry.what.barred
            if routing.waits(now_s):
                self._again_s = min(self._again_s, routing.until_s)
                continue
            if len(offers) + patient == LOOKED_AT:
                if not offers:
                    self._again_s = now_s  # the next ones, after those before them were considered
                break
            began_s = time.perf_counter()
            verdict = self._policy.choose(routing, self.boards, now_s)
            self._metrics.decision.observe(time.perf_counter() - began_s)
            if isinstance(verdict, SendTo):
                offers.append((entry, verdict))
                if entry.ahead or self._policy.satisfied(verdict):
                    break
            elif isinstance(verdict, WaitFor):
                patient += 1
                self._metrics.decisions.labels(self._model, "wait").inc()
                self.boards.book(routing.request_id, verdict.board, verdict.work_ms)
                routing.wait_for(verdict.board, verdict.until_ms, now_s)
                self._again_s = min(self._again_s, routing.until_s)
            elif not routing.tried:
                break  # without a board for this request, there is none for any
        return offers

    def _behind_others(self, routing: RoutingRequest) -> Candidate | None:
        """Return a board that only other Routers' requests or a pause keep busy.

        Other Routers' requests are known from reports only and may have ended, and a board ends a
        pause inside the runtime only for a request that waits there. One request of this Router
        therefore waits at the board, which leaves no other board without work.
        """
        found = filter(_is_shared, self._fitting(self._shared, routing))
        return min(found, key=lambda board: board.load, default=None)

    def _before_others(self, routing: RoutingRequest) -> Candidate | None:
        """Return a board with other Routers' requests for one that continues.

        A board puts such a request first in its queue. At a place of this Router's own it would
        find a request before it that another Router has waiting there. Of these boards it goes to
        the one that should end its run first; the rest of another Router's run is unknown.
        """
        now_s = time.monotonic()
        runs = {one.board: one for one in self._running if one.runs}

        def rest_ms(board: Candidate) -> float:
            run = runs.get(board)
            return self.boards.typical_ms(board) / 2 if run is None else run.rest_ms(now_s)

        fitting = self._fitting(self.boards, routing)
        found = (one for one in fitting if _is_mixed(one) and one.in_flight <= one.n_batch)
        return min(found, key=rest_ms, default=None)

    def _fitting(self, boards: Iterable[Candidate], routing: RoutingRequest) -> Iterator[Candidate]:
        """Yield the boards that may take a request, in the state of pauses that is best now."""
        tier = self.boards.tier(routing.tried) if routing.tried else self.boards.held
        return (one for one in boards if one.key not in routing.tried and one.held == tier)

    # -- places -------------------------------------------------------------------------------

    def _place(
        self, waiter: Waiter, board: Candidate, entry: QueueEntry[Waiter] | None
    ) -> Reservation:
        now_s = time.monotonic()
        request = replace(waiter.request, patient=self._patient(waiter, board))
        if isinstance(request, GenerateRequest) and request.native_pause:
            request = replace(request, native_pause=self._may_keep(waiter.terms))
        waited_ms = (now_s - waiter.since_s) * 1e3

        reservation = Reservation(
            request,
            self.boards,
            board,
            waiter.routing,
            waited_ms=waited_ms,
            freed=self._freed,
            queued=self._queued_at_board,
        )
        self._running[reservation] = _Running(waiter, entry)
        return reservation

    def _may_keep(self, terms: QueueTerms) -> bool:
        """Return whether one more request may occupy its board while it is paused.

        Each key may have as many of those as half of the boards, and at least one, so that others
        find a free board.
        """
        if terms.flow == ANONYMOUS:
            return True
        keeps = sum(
            reservation.keeps and one.waiter.terms.flow == terms.flow
            for reservation, one in self._running.items()
        )
        return keeps < max(1, len(list(self.boards)) // 2)

    def _meter(self, reservation: Reservation, now_s: float) -> None:
        """Charge a request's owner with its board time."""
        running, used_s = self._running[reservation], sum(reservation.used_s(now_s))
        if running.entry is not None:
            self._admission.charge(running.entry, used_s * 1e3)
        since_s, running.metered_s = used_s - running.metered_s, used_s
        if since_s > 0:
            running.waiter.terms.use(reservation.request.request_id, since_s)

    def _patient(self, waiter: Waiter, chosen: Candidate) -> bool:
        """Return whether to wait for a board that went to sleep: if no other one is awake."""
        if chosen.held is not PauseEffect.NOT:
            return True
        return not any(
            board.ready and board.loaded and board.held is PauseEffect.NOT
            for board in self.boards
            if board is not chosen and board.key not in waiter.barred
        )

    def _freed(self, reservation: Reservation, finished: Finished | None) -> None:
        """Settle a request that has left its board, or frees it during a pause."""
        running = self._running[reservation]
        if reservation.over:
            now_s = time.monotonic()
            self._meter(reservation, now_s)
            del self._running[reservation]
            self._at_boards.pop(reservation, None)
            if running.entry is not None:
                self._admission.ended(running.entry, sum(reservation.used_s(now_s)) * 1e3)
        # Estimates and prefix counters are of boards: an upstream has other times and caches.
        if finished is not None and not (reservation.board.upstream and self._has_boards):
            tokens = self._metrics.prefix_tokens.labels
            tokens(self._model, "expected").inc(reservation.expected.tokens)
            tokens(self._model, "found").inc(finished.usage.cached_tokens)
            if (took := reservation.timing(finished)) is not None:
                self._expectation.observe(running.waiter.asked, took)
        if _is_shared(reservation.board):
            self._shared.append(reservation.board)
        self.pump()

    @property
    def _has_boards(self) -> bool:
        return any(not board.upstream for board in self.boards)

    def _supply(self) -> Capacity:
        typical_ms = self._expectation.typical_ms or self.boards.typical_ms()
        return Capacity(
            places=self.boards.places,
            free=int(self.boards.any_open),
            limit=self._limit,
            elsewhere=self._elsewhere,
            typical_ms=typical_ms,
        )


def _is_shared(board: Candidate) -> bool:
    """Return whether only others keep the board busy, and one more request may wait there."""
    return board.in_flight == 0 and board.load < board.capacity and _is_mixed(board)


def _is_mixed(board: Candidate) -> bool:
    """Return whether the board is busy, with requests of others too.

    One that continues may always wait there: boards refuse none for want of room.
    """
    return board.ready and board.foreign > 0 and board.load >= board.n_batch


def _rank(entry: QueueEntry[Waiter]) -> tuple[bool, int]:
    """Return the sort key of urgency: a request is never preferred to a more urgent one."""
    return entry.ahead, entry.priority


def _word(reuse: Reuse) -> str:
    """Return the metric's label for a cached prefix."""
    if not reuse.tokens:
        return "none"
    if reuse.source is not None:
        return "fetch"
    return "live" if reuse.live else "file"
