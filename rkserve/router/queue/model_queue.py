"""The queue of one model: waiting requests, and their assignment to boards.

Each change of the queue or of the boards applies the decisions of ``AdmissionQueue`` and of the
routing policy. Requests that no board could take are rejected before they reach this queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from rkserve.core.desired_state import Served
from rkserve.core.errors import DeadlineUnreachable, QueueTimeout, RkserveError
from rkserve.core.messages import GenerateRequest
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.requests import RoutingRequest
from rkserve.router.policies.base import RoutingPolicy, SendTo, WaitFor
from rkserve.router.queue.admission import (
    ANONYMOUS,
    AdmissionQueue,
    AnswerTiming,
    Capacity,
    QueueEntry,
    QueueTerms,
    RequestSize,
    ServiceTimeModel,
)
from rkserve.router.queue.reservation import Reservation

# Requests that are decided on for one place: most could take it, and the next one may have better
# use for it. Those that wait for another board are passed by.
LOOKED_AT = 16


@dataclass(eq=False, slots=True)
class Waiter:
    """One request that wants a place. Boards in ``barred`` are not for it.

    It may have been ``let_in`` before, and then is not turned away for want of room; one that is
    ``ahead`` never is, and goes before all that are not.
    """

    request: GenerateRequest
    ask: RoutingRequest
    claim: QueueTerms
    since_s: float
    ahead: bool = False
    let_in: bool = False
    barred: Collection[str] = ()
    shed: bool = False
    held: tuple[float, Served] | None = None  # by the cluster: since when, and what it served
    ticket: QueueEntry[Waiter] | None = None
    granted: asyncio.Future[Reservation | None] | None = None

    @property
    def adapter(self) -> str | None:
        """The name of the adapter that it is for, in whichever version."""
        ref = self.request.adapter
        return self.request.line if ref is None else ref.name

    @property
    def asked(self) -> RequestSize:
        """What is known of how long it will take."""
        return RequestSize(max(1, self.ask.prompt_tokens), self.ask.max_tokens)

    @property
    def gone(self) -> bool:
        """Whether nobody would take a place for it any more."""
        return self.granted is None or self.granted.done()

    def tell(self, place: Reservation | None) -> None:
        """It has a place; None: it has to look again what it can hope for."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_result(place)

    def fail(self, exc: RkserveError) -> None:
        """It gets none."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_exception(exc)


@dataclass(eq=False, slots=True)
class _Running:
    """A request that has a board. So many seconds of that are ``told`` to its owner's meter."""

    claim: QueueTerms
    ticket: QueueEntry[Waiter] | None
    told_s: float = 0.0


class ModelQueue:
    """Use it from one event loop. ``waiters`` are all that wait, by the request's id."""

    def __init__(
        self,
        boards: ModelBoards,
        policy: RoutingPolicy,
        timeout_s: float,
        blocked: Callable[[], Collection[str]],
    ) -> None:
        """``blocked`` names boards that are sent nothing now."""
        self.boards = boards
        self._policy = policy
        self._timeout_s = timeout_s
        self._blocked = blocked
        self._admission: AdmissionQueue[Waiter] = AdmissionQueue(timeout_s)
        self._aside: dict[Waiter, None] = {}  # who waits for the end of a pause, in order
        self._picky: dict[Waiter, None] = {}  # who waits, and cannot go to every board
        self.waiters: dict[str, Waiter] = {}
        self._expectation = ServiceTimeModel()
        self._limit = self._elsewhere = 0
        self._shared: list[Candidate] = []
        self._again_s = math.inf  # when one that waits for a certain board asks again
        self._timer: asyncio.TimerHandle | None = None
        self._running: dict[Reservation, _Running] = {}

    def __len__(self) -> int:
        return len(self._admission) + len(self._aside)

    def by_priority(self) -> dict[int, int]:
        """Return how many wait at each priority."""
        counts = dict(self._admission.by_priority())
        for waiter in self._aside:
            counts[waiter.claim.priority] = counts.get(waiter.claim.priority, 0) + 1
        return counts

    # -- waiting ------------------------------------------------------------------------------

    async def wait(self, waiter: Waiter) -> Reservation | None:
        """Wait for a place; None: the boards have changed, and it must be looked at again.

        Raises:
            QueueFull, QueueTimeout, DeadlineUnreachable: it gets none.
        """
        now_s = time.monotonic()
        expected = self._expectation.of(waiter.asked)
        if waiter.let_in or waiter.ahead:
            waiter.ticket = self._admission.readmit(
                waiter, waiter.claim, expected, waiter.since_s, ahead=waiter.ahead
            )
        else:
            supply = self._supply()
            waiter.ticket, leaves = self._admission.offer(
                waiter, waiter.claim, expected, supply, now_s
            )
            if leaves is not None:
                leaves.what.shed = True
                self._left(leaves.what, self._admission.full(leaves.claim, supply, now_s))
        waiter.let_in = True
        waiter.granted = asyncio.get_running_loop().create_future()
        self.waiters[waiter.ask.request_id] = waiter
        if waiter.barred or waiter.adapter is not None:
            self._picky[waiter] = None
        try:
            self.pump()
            return await self._granted(waiter, waiter.granted)
        finally:
            self.waiters.pop(waiter.ask.request_id, None)
            self._picky.pop(waiter, None)

    async def aside(self, waiter: Waiter, again_s: float | None = None) -> Reservation | None:
        """Wait until boards or what they shall be have changed, without a turn in the queue.

        At ``again_s`` of the monotonic clock, too, it must be looked at again.

        Raises as ``wait``.
        """
        now_s = time.monotonic()
        if not (waiter.let_in or waiter.ahead) and len(self) >= self._limit:
            raise self._admission.full(waiter.claim, self._supply(), now_s)
        waiter.let_in = True
        until_s = waiter.since_s + self._timeout_s
        deadline_s = waiter.claim.deadline_s
        granted = waiter.granted = asyncio.get_running_loop().create_future()
        self._aside[waiter] = None
        self.waiters[waiter.ask.request_id] = waiter
        try:
            limit_s = until_s if deadline_s is None else min(until_s, deadline_s)
            wake_s = limit_s if again_s is None else min(limit_s, again_s)
            return await asyncio.wait_for(granted, max(0.0, wake_s - now_s))
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            if wake_s < limit_s:
                return None
            waited_s = time.monotonic() - waiter.since_s
            if deadline_s is not None and deadline_s <= until_s:
                raise DeadlineUnreachable(waiter.claim.timeout_s, waited_s) from None
            raise QueueTimeout(waited_s, 1) from None
        finally:
            self._aside.pop(waiter, None)
            self.waiters.pop(waiter.ask.request_id, None)

    def at_once(self, waiter: Waiter, board: Candidate) -> Reservation:
        """Give it that board, free or not: one that will say itself why it takes nobody."""
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
                place = granted.result()
                if place is not None:  # it came in the moment in which nobody wanted it any more
                    place.ended(left=False)
            raise

    def _withdraw(self, waiter: Waiter) -> None:
        if waiter.ticket is not None:
            self._admission.withdraw(waiter.ticket)
        self.boards.unbook(waiter.ask.request_id)

    def _left(self, waiter: Waiter, exc: RkserveError) -> None:
        self._withdraw(waiter)
        waiter.fail(exc)

    # -- what changes -------------------------------------------------------------------------

    def changed(self, limit: int | None, routers: int, paused: Collection[str]) -> None:
        """Reports came, or what boards shall be is another thing; adapters in ``paused`` are held
        somewhere.
        """
        boards = list(self.boards)
        room = sum(max(0, board.capacity - board.n_batch) for board in boards)
        self._limit = math.ceil(room / routers) if limit is None else limit
        self._elsewhere = sum(max(0, board.load - board.n_batch) for board in boards)
        self._shared = [board for board in boards if _is_shared(board)]
        for waiter in self._aside:
            waiter.tell(None)
        if self._blocked():
            self._call_off([ticket.what for ticket in self._admission.order()])
        else:
            # Reports come every second, and most who wait can do without a look at each of them.
            self._call_off([one for one in self._picky if one.barred or one.adapter in paused])
        self.pump()

    def _call_off(self, waiters: Iterable[Waiter]) -> None:
        """They have to look again what they can hope for."""
        for waiter in waiters:
            self._withdraw(waiter)
            waiter.tell(None)

    def pump(self) -> None:
        """Give out the places that are free, and come back when something has to be done."""
        now_s = time.monotonic()
        for place in list(self._running):
            self._meter(place, now_s)
        for ticket, exc in self._admission.expire(now_s):
            self._left(ticket.what, exc)
        if len(self._admission) and self.boards.held in (None, PauseEffect.REFUSES):
            # No place will get free.
            self._call_off([ticket.what for ticket in self._admission.order()])
        while (found := self._next(now_s)) is not None:
            ticket, board = found
            if ticket.what.gone:
                self._withdraw(ticket.what)  # it will do so itself in a moment
            else:
                self._admission.start(ticket, now_s)
                ticket.what.tell(self._place(ticket.what, board, ticket))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        event_s = min(self._again_s, self._admission.next_event_s() or math.inf)
        if event_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(event_s, self.pump)

    def _next(self, now_s: float) -> tuple[QueueEntry[Waiter], Candidate] | None:
        """Return who gets which board now: of the first who could, whom the policy prefers."""
        self._again_s = math.inf
        if not len(self._admission) or not (self.boards.any_open or self._shared):
            return None
        offers = self._offers(now_s)
        if offers:
            chosen = self._policy.first([(ticket.what.ask, take) for ticket, take in offers])
            return offers[chosen][0], offers[chosen][1].board
        for ticket in self._admission.order() if self._shared else ():
            ask = ticket.what.ask
            board = self._behind_others(ask)
            if board is not None:
                return ticket, board
            if not ask.tried:
                break
        return None

    def _offers(self, now_s: float) -> list[tuple[QueueEntry[Waiter], SendTo]]:
        """Return who could get which board now, as far as the policy wants to know."""
        blocked = self._blocked()
        offers: list[tuple[QueueEntry[Waiter], SendTo]] = []
        patient = 0
        for ticket in self._admission.order():
            if offers and _rank(offers[0][0]) != _rank(ticket):
                break
            ask = ticket.what.ask
            ask.tried = {*ticket.what.barred, *blocked} if blocked else ticket.what.barred
            if ask.waits(now_s):
                self._again_s = min(self._again_s, ask.until_s)
                continue
            if len(offers) + patient == LOOKED_AT:
                if not offers:
                    self._again_s = now_s  # who is behind them, after others have had a turn
                break
            verdict = self._policy.choose(ask, self.boards, now_s)
            if isinstance(verdict, SendTo):
                offers.append((ticket, verdict))
                if ticket.ahead or self._policy.satisfied(verdict):
                    break
            elif isinstance(verdict, WaitFor):
                patient += 1
                self.boards.book(ask.request_id, verdict.board, verdict.work_ms)
                ask.wait_for(verdict.board, verdict.until_ms, now_s)
                self._again_s = min(self._again_s, ask.until_s)
            elif not ask.tried:
                break  # what has no place for this one has none for any
        return offers

    def _behind_others(self, ask: RoutingRequest) -> Candidate | None:
        """Return a board that is only busy with what others sent it, or that a pause keeps.

        What others did is known from reports only, and may be over; and a board lets go of a run
        that is paused in the runtime only when somebody waits there. One request of this Router's
        waits there meanwhile: that leaves no board without work.
        """
        tier = self.boards.tier(ask.tried) if ask.tried else self.boards.held
        found = [
            board
            for board in self._shared
            if _is_shared(board) and board.key not in ask.tried and board.held == tier
        ]
        return min(found, key=lambda board: board.load, default=None)

    # -- places -------------------------------------------------------------------------------

    def _place(
        self, waiter: Waiter, board: Candidate, ticket: QueueEntry[Waiter] | None
    ) -> Reservation:
        now_s = time.monotonic()
        request = replace(waiter.request, patient=self._patient(waiter, board))
        if isinstance(request, GenerateRequest) and request.native_pause:
            request = replace(request, native_pause=self._may_keep(waiter.claim))
        waited_ms = (now_s - waiter.since_s) * 1e3

        def freed(held_ms: float | None, took: AnswerTiming | None) -> None:
            if held_ms is not None:
                self._meter(place, time.monotonic())
                del self._running[place]
                held_ms = sum(place.used_s(now_s)) * 1e3
            self._freed(board, waiter.asked, ticket, held_ms, took)

        place = Reservation(
            request, self.boards, board, waiter.ask, waited_ms=waited_ms, freed=freed
        )
        self._running[place] = _Running(waiter.claim, ticket)
        return place

    def _may_keep(self, claim: QueueTerms) -> bool:
        """Return whether one more request may keep its board while it is paused.

        Of one key so many may as half of the boards, and one at least: others find a free one.
        """
        if claim.flow == ANONYMOUS:
            return True
        keeps = sum(
            place.keeps and one.claim.flow == claim.flow for place, one in self._running.items()
        )
        return keeps < max(1, len(list(self.boards)) // 2)

    def _meter(self, place: Reservation, now_s: float) -> None:
        """Charge a request's owner with the board time that it has had."""
        running, used_s = self._running[place], sum(place.used_s(now_s))
        if running.ticket is not None:
            self._admission.charge(running.ticket, used_s * 1e3)
        since_s, running.told_s = used_s - running.told_s, used_s
        if since_s > 0:
            running.claim.use(place.request.request_id, since_s)

    def _patient(self, waiter: Waiter, chosen: Candidate) -> bool:
        """Whether it shall wait on a board that has gone to sleep meanwhile: only where no other
        board is awake, as far as this Router knows.
        """
        if chosen.held is not PauseEffect.NOT:
            return True
        return not any(
            board.ready and board.loaded and board.held is PauseEffect.NOT
            for board in self.boards
            if board is not chosen and board.key not in waiter.barred
        )

    def _freed(
        self,
        board: Candidate,
        asked: RequestSize,
        ticket: QueueEntry[Waiter] | None,
        held_ms: float | None,
        took: AnswerTiming | None,
    ) -> None:
        if held_ms is not None and ticket is not None:
            self._admission.ended(ticket, held_ms)
        if took is not None:
            self._expectation.heard(asked, took)
        if _is_shared(board):
            self._shared.append(board)
        self.pump()

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
    """Whether others keep it busy, and one more may wait there."""
    return (
        board.ready
        and board.foreign > 0
        and board.in_flight == 0
        and board.n_batch <= board.load < board.capacity
    )


def _rank(ticket: QueueEntry[Waiter]) -> tuple[bool, int]:
    """Who may be preferred to whom: nobody to one who is more urgent."""
    return ticket.ahead, ticket.priority
