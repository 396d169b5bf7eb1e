"""Sending of requests to boards, and failover to another board when one is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from rkserve.config.router import RouterConfig
from rkserve.core.board_report import BoardState
from rkserve.core.errors import (
    AdapterBroken,
    BoardAsleep,
    BoardBehind,
    BoardDrained,
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
    UpstreamFailed,
    UpstreamRefused,
)
from rkserve.core.messages import (
    Delta,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    Paused,
)
from rkserve.core.metrics import QueueCollector, RouterMetrics
from rkserve.core.request_record import (
    BoardVisit,
    GenerationRecord,
    code_of,
    record_generation,
)
from rkserve.fleet.fleet import BoardLink, Fleet
from rkserve.fleet.load import Candidate
from rkserve.fleet.measurements import Circuit, CircuitBreaker
from rkserve.router.dispatch.failover import (
    BY_CLUSTER,
    ControlChange,
    GenerationProgress,
    RequestLocation,
    why,
)
from rkserve.router.dispatch.unassigned import UnassignedRequests
from rkserve.router.policies import POLICIES, PolicySettings
from rkserve.router.queue.admission import QueueTerms
from rkserve.router.queue.queues import ModelQueues, QueueRules, TriedBoards
from rkserve.router.queue.reservation import Recalled
from rkserve.router.upstreams.overflow import OverflowPolicy

log = logging.getLogger(__name__)
T = TypeVar("T")

# Another board may have what this one lacks; nothing of the request was run.
_LACKING = (CacheNotFound, AdapterBroken, UpstreamRefused)
# The board is healthy; retry later.
_WAITING = (BoardBehind, BoardAsleep, BoardDrained)
# Another board may succeed.
_ELSEWHERE = (BoardFailed, QueueFull, QueueTimeout, EnginePaused, *_LACKING)
# No board takes the request now; a restarting board will, and a begun answer waits for that.
_LATER = (NoBoard, QueueFull, QueueTimeout, EnginePaused, *_WAITING)
# Failures counted by the circuit breaker: those with an unknown time of recovery. A board that is
# out of order reports that itself, and a replica that has ended gets no more requests.
_FAULTS = (EngineDied, EngineHung, BoardSilent, UpstreamFailed)
FORGIVE_S = 5.0


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

    @property
    def expected_tokens(self) -> int:
        """The tokens of the cached prefix that is expected at the board."""

    @property
    def source(self) -> Candidate | None:
        """The board from which that one is to fetch a prompt cache file, if any."""

    @property
    def prefill_ms(self) -> float:
        """The expected prefill time of a token at the board."""

    @property
    def movable(self) -> bool:
        """True while it is in the board's own queue, and nothing has happened to it there."""

    @property
    def queue_ms(self) -> float:
        """The time that a movable request has been in the board's queue."""

    def leave_if_recalled(self) -> None:
        """Raise ``Recalled`` if the request is movable and was recalled."""

    async def unless_recalled(self, work: Awaitable[T]) -> T:
        """Return the result of ``work``. Raises ``Recalled`` if it was recalled first."""

    def observe(self, event: Event) -> None:
        """Process an event of the board."""

    def lost(self) -> None:
        """Stop using the board until its next report."""

    def ended(self, *, left: bool) -> None:
        """End the reservation; ``left``: the client disconnected before the board was done."""


class ReservationQueue(Protocol):
    """The queue for boards; see ``queues.ModelQueues``."""

    async def take(
        self, request: GenerateRequest, tried: TriedBoards, terms: QueueTerms
    ) -> BoardReservation:
        """Wait for a reservation. Raises the error for which no board takes the request."""

    def waits(self, request_id: str) -> bool:
        """Return whether the request is in a queue."""

    def depths(self) -> Mapping[str, Mapping[int, int]]:
        """Return the number of waiting requests at each priority, by model."""


class _Attempt:
    """The outcome of a request on one board."""

    def __init__(self, reservation: BoardReservation, visit: BoardVisit) -> None:
        self.reservation, self.visit = reservation, visit
        self.accepted = self.finished = self.left = False

    def observe(self, event: Event) -> None:
        """Process an event of the board."""
        self.finished = isinstance(event, Finished)
        self.reservation.observe(event)
        if self.visit.first_s is None or self.finished:
            self.visit.observe(event)

    def failed(self, exc: BaseException) -> None:
        """Note the error that ends it."""
        if not self.finished:
            self.visit.failure = "moved" if isinstance(exc, ControlChange) else code_of(exc)


class Dispatch:
    """Sends the requests of one Router to boards. Use from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        queues: ReservationQueue,
        rng: random.Random,
        limits: FailoverLimits,
        *,
        breaker: CircuitBreaker,
        metrics: RouterMetrics,
    ) -> None:
        """``breaker`` records outcomes; the queues must be set up to respect it."""
        self.fleet = fleet
        self.queues = queues
        self.breaker = breaker
        self._rng = rng
        self._limits = limits
        self._metrics = metrics
        self.unassigned = UnassignedRequests(fleet)
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.changed.append(self._forget_boards)

    def circuit(self, replica: str) -> tuple[Circuit, str]:
        """Return the state of the board's circuit, and the reason if it is not closed."""
        now_s = time.monotonic()
        return self.breaker.circuit(replica, now_s), self.breaker.reason(replica, now_s)

    def _forget_boards(self) -> None:
        """Forget replicas that no longer exist; their successors have other keys."""
        self.breaker.keep(frozenset(address.replica for address in self.fleet.addresses()))

    async def generate(
        self,
        request: GenerateRequest,
        terms: QueueTerms | None = None,
        deliver: Callable[[Event], None] | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation, over as many boards as it takes.

        Deltas that arrive while the reader waits are passed to ``deliver`` instead, in order with
        the yielded events.

        Before acceptance, a board that fails, is full, paused, asleep, behind the desired state, or
        lacks something that the request needs, is skipped for another one. A request in a board's
        own queue goes to another board that is free. After a later loss another board continues the
        answer without repeated or missing text.

        Raises:
            ModelNotFound, NoBoard, QueueFull, EnginePaused, BoardBehind: no board takes it.
            PoisonRequest: two boards have failed during it.
            RkserveError: the error of the last board, after the events before it.
        """
        progress = GenerationProgress(request, self._limits.continuations)
        tried = TriedBoards()
        terms = terms or QueueTerms()
        location = RequestLocation(progress, self.fleet, self.unassigned.known, terms)
        aborts = self.unassigned.aborts
        location.ended = bool(aborts) and self.unassigned.is_aborted(request, terms)
        record = record_generation(request.request_id)
        with location:
            while (one := await self._attempt(location, tried, terms, record)) is not None:
                reservation, moves = one.reservation, False
                link = self.fleet.links[reservation.group]
                try:
                    async with (
                        aclosing(self._opened(location, one, link, deliver)) as opened,
                        aclosing(self._events(location, one, opened)) as events,
                    ):
                        async for event in events:
                            yield event
                        self._require_end(one)
                except Recalled:
                    one.visit.failure = "moved"
                    one.left = moves = True
                    tried.recalled += 1
                    progress.queued_ms += reservation.queue_ms
                except (ControlChange, *_ELSEWHERE) as exc:
                    self._left(location, one, exc, tried)
                except BaseException as exc:
                    one.failed(exc)
                    # After the last event there is no need to wait for the end of the stream.
                    one.left = not one.finished
                    raise
                else:
                    return
                finally:
                    record.left(one.visit, progress.times)
                    self._give_back(reservation, left=one.left)
                await self._between(location, at_once=moves)
            for last in self.unassigned.end(location):
                yield last

    def _opened(
        self,
        location: RequestLocation,
        one: _Attempt,
        link: BoardLink,
        deliver: Callable[[Event], None] | None,
    ) -> AsyncGenerator[Event, None]:
        def take(delta: Delta) -> bool:
            assert deliver is not None
            if not one.accepted or one.reservation.movable:
                return False
            if (sent := self._observed(location, one, delta)) is not None:
                deliver(sent)
            return True

        reservation = one.reservation
        taken = None if deliver is None else take
        return link.open(self._sourced(reservation), reservation.replica, taken)

    def _sourced(self, reservation: BoardReservation) -> GenerateRequest:
        """Return the request with the way to the board that has a prompt cache file for it."""
        board, request = reservation.source, reservation.request
        if board is None or not isinstance(request, GenerateRequest):
            return request
        link = self.fleet.links[board.group]
        source = link.cache_source(board.key, reservation.expected_tokens)
        if source is None:
            return request
        return replace(request, source=replace(source, prefill_ms=reservation.prefill_ms))

    async def _events(
        self, location: RequestLocation, one: _Attempt, opened: AsyncGenerator[Event, None]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one board as the client gets them.

        Raises:
            ControlChange: a control call changed the request before the board accepted it.
            Recalled: it leaves the board's queue for another board.
            RkserveError: as the board's stream.
        """
        reservation = one.reservation
        first = await self._accepted(location, opened, reservation.replica)
        one.observe(first)
        reservation.leave_if_recalled()  # before the client gets the name of this board
        one.accepted = True
        location.enter(reservation.group, reservation.replica)
        if (sent := location.progress.observe(first)) is not None:
            yield sent
        while reservation.movable:
            following = await reservation.unless_recalled(anext(opened, None))
            if following is None:
                return
            if (sent := self._observed(location, one, following)) is not None:
                yield sent
        async for event in opened:
            if (sent := self._observed(location, one, event)) is not None:
                yield sent

    def _observed(self, location: RequestLocation, one: _Attempt, event: Event) -> Event | None:
        """Process an event after the acceptance; return it as the client gets it."""
        one.observe(event)
        if location.progress.waits or location.paused or isinstance(event, Paused):
            self._noted(location, event)
        return location.progress.observe(event)

    async def _attempt(
        self,
        location: RequestLocation,
        tried: TriedBoards,
        terms: QueueTerms,
        record: GenerationRecord,
    ) -> _Attempt | None:
        """Wait for a reservation, through any control calls meanwhile; None if aborted.

        Raises the error for which no board takes it.
        """
        progress, wait = location.progress, record.wait()
        try:
            while not location.ended:
                with suppress(ControlChange):
                    reservation = await location.unless_changed(
                        self._take(progress, tried, terms), self._give_back
                    )
                    progress.queued_ms += reservation.waited_ms
                    return _Attempt(
                        reservation,
                        record.visit(
                            reservation.replica,
                            progress.tokens,
                            reservation.expected_tokens,
                            embeds=isinstance(progress.asked, EmbedRequest),
                        ),
                    )
        except BaseException as exc:
            wait.failure = code_of(exc)
            raise
        finally:
            wait.ended_s = time.monotonic()
        return None

    async def _between(self, location: RequestLocation, *, at_once: bool) -> None:
        """Wait before the next attempt, unless a control call ends the wait."""
        location.leave()
        if at_once or location.ended:
            return
        with suppress(ControlChange):
            await location.unless_changed(self._pause(location.progress, location.failures))

    def _give_back(self, reservation: BoardReservation, *, left: bool = False) -> None:
        """Release a reservation; ``left``: the client disconnected before the board was done."""
        if self.breaker.failing:
            self.breaker.undecided(reservation.replica)
        reservation.ended(left=left)

    # -- before a board has it ----------------------------------------------------------------

    async def _take(
        self, progress: GenerationProgress, tried: TriedBoards, terms: QueueTerms
    ) -> BoardReservation:
        """Return a reservation; wait for a restart if no board is left for a begun answer.

        Raises the error for which no board takes it.
        """
        until_s = time.monotonic() + self._limits.restart_wait_s
        tries = 0
        while True:
            try:
                reservation = await self.queues.take(progress.request, tried, terms)
            except _LATER as exc:
                if not progress.accepted:
                    raise
                if time.monotonic() >= until_s:
                    if progress.cause is not None and isinstance(exc, QueueTimeout):
                        raise progress.cause from exc  # more useful than the timeout
                    raise
                if not progress.begun and self._is_hopeless(progress.request.model):
                    raise
            else:
                if self.breaker.failing:
                    self.breaker.sent(reservation.replica, time.monotonic())
                return reservation
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

    async def _accepted(
        self, location: RequestLocation, events: AsyncGenerator[Event, None], replica: str
    ) -> Event:
        """Return the board's acceptance, which is due at once even if the request must queue.

        Raises:
            BoardFailed: it did not arrive; the replica is frozen or unreachable.
            ControlChange: a control call changed the request before.
        """
        limit_s = self._limits.accept_timeout_s
        try:
            return await location.unless_changed(_first(events, replica), timeout_s=limit_s)
        except TimeoutError:
            reason = f"it did not accept the request within {limit_s:g} s"
            raise BoardSilent(replica, reason) from None

    def _require_end(self, one: _Attempt) -> None:
        """Raise ``BoardFailed`` if the stream ended normally before the answer did."""
        if not one.finished:
            raise BoardFailed(one.reservation.replica, "its answer has no end")
        if self.breaker.failing:
            self.breaker.worked(one.reservation.replica)

    async def _pause(self, progress: GenerationProgress, failures: int) -> None:
        """Wait before the next attempt; the first retry of a begun answer does not wait."""
        if progress.tokens and progress.times <= 1:
            return
        await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, tries: int) -> float:
        rules = self._limits
        most_s = min(rules.longest_pause_s, rules.pause_s * 2 ** min(tries - 1, 30))
        return self._rng.uniform(most_s / 2, most_s)

    # -- when it is lost ----------------------------------------------------------------------

    def _left(
        self,
        location: RequestLocation,
        one: _Attempt,
        exc: ControlChange | RkserveError,
        tried: TriedBoards,
    ) -> None:
        """Handle a request that has no board. Raises as ``_missed``."""
        one.failed(exc)
        if isinstance(exc, ControlChange):
            one.left = True
            return
        location.failures += 1
        try:
            self._missed(location.progress, one, exc, tried)
        except RkserveError:
            if not location.ended:  # the abort ends it
                raise

    def _missed(
        self, progress: GenerationProgress, one: _Attempt, exc: RkserveError, tried: TriedBoards
    ) -> None:
        """Handle a rejection or a loss. Raises the client's error if the request ends by it."""
        if isinstance(exc, QueueTimeout) and not progress.begun:
            raise exc  # it has waited as long as a request without any text may
        reservation, now_s = one.reservation, time.monotonic()
        if isinstance(exc, BoardFailed) and not isinstance(exc, _WAITING):
            reservation.lost()
        if isinstance(exc, _FAULTS) and self.breaker.failed(
            reservation.replica, exc.message, now_s
        ):
            self._metrics.opened()
        if isinstance(exc, AdapterBroken):
            log.warning("board %s is passed over: %s", reservation.replica, exc)
        if not one.accepted:
            tried[reservation.replica] = exc
            return
        one.left = True
        if not isinstance(exc, _LACKING):
            tried.clear()  # earlier rejections of other boards may be outdated
        tried[reservation.replica] = exc
        if (error := progress.lost(reservation.replica, exc, now_s)) is not None:
            if isinstance(error, PoisonRequest):
                self._forgive(progress)
            raise error
        one.visit.why = why(exc)
        self._metrics.continued(one.visit.why)
        log.log(
            logging.INFO if isinstance(exc, BoardDrained) else logging.WARNING,
            "%s goes on elsewhere after %d tokens: %s",
            reservation.request.request_id,
            progress.tokens,
            exc,
        )

    def _noted(self, location: RequestLocation, event: Event) -> None:
        """Register an event that pauses or resumes the answer."""
        now_s, model = time.monotonic(), location.progress.asked.model
        served = self.fleet.desired.served
        if isinstance(event, Paused):
            if event.by == BY_CLUSTER and location.paused is None:
                location.paused = (now_s, served(model))
        elif location.paused is not None and (
            isinstance(event, Finished) or (isinstance(event, Delta) and event.token_ids)
        ):
            (since_s, before), location.paused = location.paused, None
            self._metrics.held(model, before.held_by(served(model)), now_s - since_s)
        if location.progress.waits and (took_s := location.progress.back(event, now_s)) is not None:
            self._metrics.back(took_s)

    def _forgive(self, progress: GenerationProgress) -> None:
        """Clear the boards that failed during a request that caused it itself."""
        groups = {address.replica: address.group for address in self.fleet.addresses()}
        for strike in progress.strikes:
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


async def _first(events: AsyncGenerator[Event, None], replica: str) -> Event:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise BoardFailed(replica, "it ended without an answer") from None


def open_fleet(
    config: RouterConfig, links: Mapping[str, BoardLink], groups: Mapping[str, str]
) -> Fleet:
    """Return the fleet; cached prefixes are tracked if the policy uses them."""
    uses_prefixes = POLICIES[config.policy].uses_prefixes
    remembered = config.prefix_files_per_board if uses_prefixes else None
    return Fleet(links, groups, remembered)


def open_dispatch(
    config: RouterConfig,
    fleet: Fleet,
    metrics: RouterMetrics,
    rng: random.Random,
    overflow_s: Mapping[str, float] | None = None,
) -> Dispatch:
    """Return the dispatch of a fleet, with its queues.

    ``overflow_s`` has the waits for boards before upstreams get requests, by their addresses.
    """
    breaker = CircuitBreaker()
    rules = QueueRules(config.queue_limit, config.queue_timeout_s, config.replicas)
    policy = POLICIES[config.policy](rng, PolicySettings(max_wait_s=config.board_wait_s))
    if overflow_s:
        policy = OverflowPolicy(policy, overflow_s)
    queues = ModelQueues(fleet, policy, rules, breaker, metrics)
    metrics.registry.register(QueueCollector(queues.depths))
    limits = FailoverLimits(
        config.accept_timeout_s, config.max_continuations, config.restart_wait_s
    )
    return Dispatch(fleet, queues, rng, limits, breaker=breaker, metrics=metrics)
