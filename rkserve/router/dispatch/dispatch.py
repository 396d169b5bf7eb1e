"""Sending of requests to boards, and failover to another board when one is lost."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from rkserve.core.board_report import BoardState, GenerationInfo, GenerationState, RouterGenerations
from rkserve.core.desired_state import Scope, ServedWeights
from rkserve.core.errors import (
    AdapterBroken,
    BoardAsleep,
    BoardBehind,
    BoardFailed,
    BoardSilent,
    CacheNotFound,
    EngineDied,
    EngineHung,
    EnginePaused,
    NoBoard,
    PoisonRequest,
    QueueFull,
    QueueTimeout,
    RkserveError,
)
from rkserve.core.messages import (
    ControlAction,
    Delta,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    Kv,
    Paused,
)
from rkserve.fleet.fleet import Fleet, GenerationBoards
from rkserve.router.dispatch.circuit_breaker import Circuit, CircuitBreaker
from rkserve.router.dispatch.failover import BY_CLUSTER, GenerationProgress, why
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.queues import TriedBoards

log = logging.getLogger(__name__)

# Another board may have what this one lacks; nothing of the request was run.
_LACKING = (CacheNotFound, AdapterBroken)
# The board is healthy; retry later.
_WAITING = (BoardBehind, BoardAsleep)
# Another board may succeed.
_ELSEWHERE = (BoardFailed, QueueFull, QueueTimeout, EnginePaused, *_LACKING)
# No board takes the request now; a restarting board will, and a begun answer waits for that.
_LATER = (NoBoard, QueueFull, QueueTimeout, EnginePaused, *_WAITING)
# Failures counted by the circuit breaker: those with an unknown time of recovery. A board that is
# out of order reports that itself, and a replica that has ended gets no more requests.
_FAULTS = (EngineDied, EngineHung, BoardSilent)
FORGIVE_S = 5.0
ENDED_REMEMBERED = 256
BY_REQUEST = "request"  # the origin of the pause
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """The limits of the effort for one request.

    A board must accept it within ``accept_timeout_s``. A generation fails over at most
    ``continuations`` times, and waits up to ``restart_wait_s`` if no board is left to take it. The
    pause between two attempts starts at ``pause_s`` and doubles up to ``longest_pause_s``, with
    jitter, so that requests of one lost board do not return at once.
    """

    accept_timeout_s: float = 10.0
    continuations: int = 8
    restart_wait_s: float = 60.0
    pause_s: float = 0.02
    longest_pause_s: float = 1.0


class BoardReservation(Protocol):
    """A request's reservation at one board; see ``reservation.Reservation``."""

    group: str
    replica: str
    request: GenerateRequest
    waited_ms: float

    def heard(self, event: Event) -> None:
        """Process an event of the board."""

    def lost(self, exc: RkserveError) -> None:
        """Stop using the board until its next report."""

    def ended(self, *, left: bool) -> None:
        """End the reservation; ``left``: the client disconnected before the board was done."""


class ReservationQueue(Protocol):
    """The queue for boards; see ``queues.ModelQueues``."""

    async def take(
        self, request: GenerateRequest, tried: TriedBoards, claim: QueueTerms
    ) -> BoardReservation:
        """Wait for a reservation. Raises the error for which no board takes the request."""

    def waits(self, request_id: str) -> bool:
        """Return whether the request is in a queue."""


class FailoverFigures(Protocol):
    """The metrics of lost boards."""

    def continued(self, word: str) -> None:
        """Count a failover by its reason."""

    def back(self, took_s: float) -> None:
        """Count the time from the loss to the first event of the next board."""

    def opened(self) -> None:
        """Count an opened circuit."""

    def held(self, model: str, by: str, held_s: float) -> None:
        """Count the time for which the cluster held a generation."""


class _Attempt:
    """The outcome of a request on one board."""

    def __init__(self, place: BoardReservation) -> None:
        self.place = place
        self.accepted = self.finished = self.left = False


class _ControlChange(Exception):
    """A control call changed a request that no board has."""


class _RequestLocation:
    """The board of one request, or none; registered while entered.

    While no board has the request, control calls change it here, and end the waits of ``or_told``.
    """

    def __init__(
        self,
        course: GenerationProgress,
        holders: GenerationBoards,
        homes: dict[str, _RequestLocation],
    ) -> None:
        self.course = course
        self.id = course.asked.request_id
        self.ended = False  # aborted, with or without a board
        self.held: tuple[float, ServedWeights] | None = (
            None  # by the cluster: since when, and what it served
        )
        self.failures = 0  # the boards that rejected it or were lost
        self.begun_s = self.since_s = time.monotonic()  # the time since which it has no board
        self._holders, self._homes = holders, homes
        self.replica: str | None = None
        self._told = asyncio.Event()

    def __enter__(self) -> _RequestLocation:
        self._homes[self.id] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._holders.leave(self.id)
        if self._homes.get(self.id) is self:
            del self._homes[self.id]

    def enter(self, place: BoardReservation) -> None:
        """Note that a board has accepted the request."""
        self.replica = place.replica
        self._holders.enter(self.id, place.group, place.replica)

    def leave(self) -> None:
        """Note that no board has the request."""
        self._holders.leave(self.id)
        self.replica, self.since_s = None, time.monotonic()

    def tell(self) -> None:
        """End the current wait, because a pause or abort has changed the request."""
        self._told.set()

    async def or_told(
        self, work: Coroutine[Any, Any, T], drop: Callable[[T], None] = lambda _: None
    ) -> T:
        """Return the result of ``work``; ``drop`` releases one that comes too late.

        Raises:
            _ControlChange: a control call changed the request first.
        """
        loop = asyncio.get_running_loop()
        task, told = loop.create_task(work), loop.create_task(self._told.wait())
        waits_for: set[asyncio.Task[Any]] = {task, told}
        taken = False
        try:
            await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
            if not self._told.is_set():
                taken = True
                return task.result()
            self._told.clear()
            raise _ControlChange
        finally:
            told.cancel()
            if not taken:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled() and task.exception() is None:
                    drop(task.result())


class Dispatch:
    """Sends the requests of one Router to boards. Use from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        places: ReservationQueue,
        rng: random.Random,
        persistence: FailoverLimits | None = None,
        *,
        breaker: CircuitBreaker | None = None,
        losses: FailoverFigures | None = None,
    ) -> None:
        """``breaker`` records outcomes; the queues must be set up to respect it."""
        self.fleet = fleet
        self.places = places
        self.breaker = CircuitBreaker() if breaker is None else breaker
        self._rng = rng
        self._persistence = persistence or FailoverLimits()
        self._losses = losses
        self._homes: dict[str, _RequestLocation] = {}
        self._ended: dict[str, GenerationInfo] = {}  # requests aborted here, the oldest first
        self._aborts: dict[
            str | None, float
        ] = {}  # times of aborts of all requests, by model or of everything
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.changed.append(self._forget_boards)

    def circuit(self, replica: str) -> tuple[Circuit, str]:
        """Return the state of the board's circuit, and the reason if it is not closed."""
        now_s = time.monotonic()
        return self.breaker.circuit(replica, now_s), self.breaker.reason(replica, now_s)

    def homeless(self) -> list[GenerationInfo]:
        """Return the states of requests that no board has at the moment.

        They wait in the queue, are on the way to a board, or between two boards.
        """
        return [_waiting(home) for home in self._homes.values() if _is_waiting(home)]

    def control(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Apply ``action`` to those choices of a generation that no board has.

        A request that waits for its first board can only be aborted. An abort also ends a choice
        that leaves its board during the call.
        """
        homes = [home for home in self._homes.values() if _is_of(home.id, generation, choice)]
        done: list[GenerationInfo] = []
        refused: list[GenerationInfo] = []
        for home in homes:
            waits = _is_waiting(home)
            if action is ControlAction.ABORT:
                self._abort(home)
            fits = waits and _act(home, action)
            if waits:
                (done if fits else refused).append(_waiting(home))
        ended = [info for name, info in self._ended.items() if _is_of(name, generation, choice)]
        return RouterGenerations(tuple(done), tuple(refused), tuple(ended), known=bool(homes))

    def abort_all(self, scope: Scope, request_ids: Collection[str] | None) -> int:
        """Abort requests that no board has, all or by ID; return their number.

        Requests on boards are aborted by the boards, and here if they lose their board first. With
        ``scope.boards`` only requests on these boards are meant.
        """
        boards = {seat.replica: seat.board_id for seat in self.fleet.seats()}
        if request_ids is None and not scope.boards:
            now_s = time.monotonic()
            self._aborts |= dict.fromkeys(scope.models or (None,), now_s)
        ended = 0
        for home in list(self._homes.values()):
            asked = home.course.asked
            board = "" if home.replica is None else boards.get(home.replica, home.replica)
            if isinstance(asked, EmbedRequest) or not scope.covers(board, asked.model):
                continue
            if request_ids is None or any(_is_named(home.id, one) for one in request_ids):
                ended += _is_waiting(home) and not home.ended
                self._abort(home)
        return ended

    def _abort(self, home: _RequestLocation) -> None:
        home.ended = True
        if home.replica is None:
            home.tell()

    def _is_aborted(self, request: GenerateRequest, claim: QueueTerms) -> bool:
        """Return whether everything was aborted between the call's arrival and now."""
        if claim.came_s is None:
            return False
        latest_s = max(self._aborts.get(model, -math.inf) for model in (None, request.model))
        return claim.came_s < latest_s and not isinstance(request, EmbedRequest)

    def _forget_boards(self) -> None:
        """Forget replicas that no longer exist; their successors have other keys."""
        self.breaker.keep(frozenset(seat.replica for seat in self.fleet.seats()))

    async def generate(
        self, request: GenerateRequest, claim: QueueTerms | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation, over as many boards as it takes.

        Before acceptance, a board that fails, is full, paused, asleep, behind the desired state, or
        lacks something that the request needs, is skipped for another one. After a later loss
        another board continues the answer without repeated or missing text.

        Raises:
            ModelNotFound, NoBoard, QueueFull, EnginePaused, BoardBehind: no board takes it.
            PoisonRequest: two boards have failed during it.
            RkserveError: the error of the last board, after the events before it.
        """
        course = GenerationProgress(request, self._persistence.continuations)
        tried = TriedBoards()
        with _RequestLocation(course, self.fleet.entries, self._homes) as home:
            home.ended = claim is not None and self._is_aborted(request, claim)
            while (place := await self._place(home, tried, claim or QueueTerms())) is not None:
                one = _Attempt(place)
                link = self.fleet.links[place.group]
                try:
                    async with aclosing(link.open(place.request, place.replica)) as events:
                        event = await home.or_told(self._first(events, place.replica))
                        one.accepted = True
                        home.enter(place)
                        place.heard(event)
                        if (told := course.heard(event)) is not None:
                            yield told
                        async for event in events:
                            one.finished = isinstance(event, Finished)
                            place.heard(event)
                            if course.waits or home.held or isinstance(event, Paused):
                                self._noted(home, event)
                            if (told := course.heard(event)) is not None:
                                yield told
                        self._require_end(one)
                except (_ControlChange, *_ELSEWHERE) as exc:
                    self._left(home, one, exc, tried)
                except BaseException:
                    # After the last event there is no need to wait for the end of the stream.
                    one.left = not one.finished
                    raise
                else:
                    return
                finally:
                    self.breaker.undecided(place.replica)
                    place.ended(left=one.left)
                await self._between(home)
            for last in self._aborted(home):
                yield last

    async def _place(
        self, home: _RequestLocation, tried: TriedBoards, claim: QueueTerms
    ) -> BoardReservation | None:
        """Return a reservation, through any control calls meanwhile; None if aborted.

        Raises the error for which no board takes it.
        """
        while not home.ended:
            with suppress(_ControlChange):
                place = await home.or_told(self._take(home.course, tried, claim), self._give_back)
                home.course.queued_ms += place.waited_ms
                return place
        return None

    async def _between(self, home: _RequestLocation) -> None:
        """Wait before the next attempt, unless a control call ends the wait."""
        home.leave()
        if home.ended:
            return
        with suppress(_ControlChange):
            await home.or_told(self._pause(home.course, home.failures))

    def _aborted(self, home: _RequestLocation) -> list[Event]:
        """Return the events that end an aborted request that no board has."""
        self._ended[home.id] = replace(_waiting(home), state=GenerationState.ENDED)
        while len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return home.course.aborted((time.monotonic() - home.since_s) * 1e3)

    def _give_back(self, place: BoardReservation) -> None:
        """Release a reservation that is no longer needed."""
        self.breaker.undecided(place.replica)
        place.ended(left=False)

    # -- before a board has it ----------------------------------------------------------------

    async def _take(
        self, course: GenerationProgress, tried: TriedBoards, claim: QueueTerms
    ) -> BoardReservation:
        """Return a reservation; wait for a restart if no board is left for a begun answer.

        Raises the error for which no board takes it.
        """
        until_s = time.monotonic() + self._persistence.restart_wait_s
        tries = 0
        while True:
            try:
                place = await self.places.take(course.request, tried, claim)
            except _LATER as exc:
                if not course.accepted:
                    raise
                if time.monotonic() >= until_s:
                    if course.cause is not None and isinstance(exc, QueueTimeout):
                        raise course.cause from exc  # more useful than the timeout
                    raise
                if not course.begun and self._is_hopeless(course.request.model):
                    raise
            else:
                self.breaker.sent(place.replica, time.monotonic())
                return place
            tries += 1
            await asyncio.sleep(self._pause_s(tries))
            tried.clear()  # boards that failed or rejected it earlier may have recovered
            await self.fleet.look_again()

    def _is_hopeless(self, model: str) -> bool:
        """Return whether all boards report that they are out of order.

        A restart rarely helps then: a request without any text is rejected, and a begun answer
        waits.
        """
        reports = self.fleet.reports(model)
        return bool(reports) and all(one.state is BoardState.FAILED for one in reports)

    async def _first(self, events: AsyncGenerator[Event, None], replica: str) -> Event:
        """Return the board's acceptance, which is due at once even if the request must queue.

        Raises:
            BoardFailed: it did not arrive; the replica is frozen or unreachable.
        """
        limit_s = self._persistence.accept_timeout_s
        try:
            return await asyncio.wait_for(anext(events), limit_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            reason = f"it did not accept the request within {limit_s:g} s"
            raise BoardSilent(replica, reason) from None
        except StopAsyncIteration:
            raise BoardFailed(replica, "it ended without an answer") from None

    def _require_end(self, one: _Attempt) -> None:
        """Raise ``BoardFailed`` if the stream ended normally before the answer did."""
        if not one.finished:
            raise BoardFailed(one.place.replica, "its answer has no end")
        self.breaker.worked(one.place.replica)

    async def _pause(self, course: GenerationProgress, failures: int) -> None:
        """Wait before the next attempt; the first retry of a begun answer does not wait."""
        if course.tokens and course.times <= 1:
            return
        await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, tries: int) -> float:
        rules = self._persistence
        most_s = min(rules.longest_pause_s, rules.pause_s * 2 ** min(tries - 1, 30))
        return self._rng.uniform(most_s / 2, most_s)

    # -- when it is lost ----------------------------------------------------------------------

    def _left(
        self,
        home: _RequestLocation,
        one: _Attempt,
        exc: _ControlChange | RkserveError,
        tried: TriedBoards,
    ) -> None:
        """Handle a request that has no board. Raises as ``_missed``."""
        if isinstance(exc, _ControlChange):
            one.left = True
            return
        home.failures += 1
        try:
            self._missed(home.course, one, exc, tried)
        except RkserveError:
            if not home.ended:  # the abort ends it
                raise

    def _missed(
        self, course: GenerationProgress, one: _Attempt, exc: RkserveError, tried: TriedBoards
    ) -> None:
        """Handle a rejection or a loss. Raises the client's error if the request ends by it."""
        if isinstance(exc, QueueTimeout) and not course.begun:
            raise exc  # it has waited as long as a request without any text may
        place, now_s = one.place, time.monotonic()
        if isinstance(exc, BoardFailed) and not isinstance(exc, _WAITING):
            place.lost(exc)
        if isinstance(exc, _FAULTS):
            self._blame(place.replica, exc, now_s)
        if isinstance(exc, AdapterBroken):
            log.warning("board %s is passed over: %s", place.replica, exc)
        if not one.accepted:
            tried[place.replica] = exc
            return
        one.left = True
        if not isinstance(exc, _LACKING):
            tried.clear()  # earlier rejections of other boards may be outdated
        tried[place.replica] = exc
        if (error := course.lost(place.replica, exc, now_s)) is not None:
            if isinstance(error, PoisonRequest):
                self._forgive(course)
            raise error
        if self._losses is not None:
            self._losses.continued(why(exc))
        log.warning(
            "%s goes on elsewhere after %d tokens: %s",
            place.request.request_id,
            course.tokens,
            exc,
        )

    def _blame(self, replica: str, exc: RkserveError, now_s: float) -> None:
        opened = self.breaker.failed(replica, exc.message, now_s)
        if opened and self._losses is not None:
            self._losses.opened()

    def _noted(self, home: _RequestLocation, event: Event) -> None:
        """Register an event that pauses or resumes the answer."""
        now_s, model = time.monotonic(), home.course.asked.model
        served = self.fleet.listing.desired.served
        if isinstance(event, Paused):
            if event.by == BY_CLUSTER and home.held is None:
                home.held = (now_s, served(model))
        elif home.held is not None and (isinstance(event, Finished) or _grows(event)):
            (since_s, before), home.held = home.held, None
            if self._losses is not None:
                self._losses.held(model, before.held_by(served(model)), now_s - since_s)
        if home.course.waits:
            self._back(home.course, event)

    def _back(self, course: GenerationProgress, event: Event) -> None:
        """Note that an answer that lost its board continues with this event."""
        took_s = course.back(event, time.monotonic())
        if took_s is not None and self._losses is not None:
            self._losses.back(took_s)

    def _forgive(self, course: GenerationProgress) -> None:
        """Clear the boards that failed during a request that caused it itself."""
        groups = {seat.replica: seat.group for seat in self.fleet.seats()}
        for strike in course.strikes:
            self.breaker.forgive(strike.board)
            if strike.board in groups:
                self._spawn(self._ask_to_forgive(groups[strike.board], strike.board))

    async def _ask_to_forgive(self, group: str, replica: str) -> None:
        try:
            await self.fleet.links[group].ask(replica, "forgive", timeout_s=FORGIVE_S)
        except RkserveError as exc:
            log.info("the failure count of board %s was not corrected: %s", replica, exc)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _grows(event: Event) -> bool:
    """Return whether the event adds a token to the answer."""
    return isinstance(event, Delta) and bool(event.token_ids)


def _is_waiting(home: _RequestLocation) -> bool:
    """Return whether no board has the request, and it can be controlled."""
    return home.replica is None and not isinstance(home.course.asked, EmbedRequest)


def _is_of(request_id: str, generation: str, choice: int | None) -> bool:
    completion, _, index = request_id.rpartition("/")
    return completion == generation and choice in (None, int(index) if index.isdigit() else -1)


def _is_named(request_id: str, asked: str) -> bool:
    """Return whether an ID is that of the request or of its completion."""
    return asked in (request_id, request_id.rpartition("/")[0])


def _act(home: _RequestLocation, action: ControlAction) -> bool:
    """Apply a control action to a request that no board has; return False if not applicable."""
    course = home.course
    if action is ControlAction.ABORT:
        return True
    if action is ControlAction.PAUSE and course.accepted:
        course.pause()
    elif action is ControlAction.RESUME and course.rests is not None:
        course.resume()
    else:
        return False
    home.tell()
    return True


def _waiting(home: _RequestLocation) -> GenerationInfo:
    """Return the state of a request that no board has."""
    course = home.course
    request, rests = course.request, course.rests
    done, ref = request.continued, request.adapter
    state = GenerationState.QUEUED if rests is None else GenerationState.PAUSED
    return GenerationInfo(
        request_id=request.request_id,
        board_id="",
        model=request.model,
        state=GenerationState.ABORTING if home.ended else state,
        prompt_tokens=len(request.prompt_ids),
        tokens=0 if done is None else done.tokens,
        context_tokens=len(request.prompt_ids) + (0 if done is None else len(done.slots)),
        partial_output="" if done is None else done.text,
        kv=None if rests is None else Kv.RECOMPUTED,
        adapter=request.line if ref is None else ref.name,
        native_pause=request.native_pause,
        paused_by=None if rests is None else rests.by or BY_REQUEST,
        age_s=time.monotonic() - home.since_s,
    )
