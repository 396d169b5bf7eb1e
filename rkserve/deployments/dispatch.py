"""Sends the requests of one Router to boards, and goes on elsewhere where one is lost.

Who gets a place at which board is ``Places``' business, what a generation has become ``continuing``
knows, and how boards are reached the fleet's links; this module knows neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from rkserve.deployments.fleet import Fleet
from rkserve.deployments.refusing import Tried
from rkserve.deployments.seats import Holders
from rkserve.errors import (
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
from rkserve.messages import EmbedRequest, Event, Finished, GenerateRequest
from rkserve.reports import BoardState, GenerationInfo, GenerationState
from rkserve.routing.admission import Claim
from rkserve.routing.breaker import Breaker, Circuit
from rkserve.routing.continuing import Course, why

log = logging.getLogger(__name__)

# What one board may lack and another have; nothing of the request was run then.
_LACKING = (CacheNotFound, AdapterBroken)
# Such a board is well, and will take requests.
_WAITING = (BoardBehind, BoardAsleep)
# Another board may do what this one does not, or did not to the end.
_ELSEWHERE = (BoardFailed, QueueFull, QueueTimeout, EnginePaused, *_LACKING)
# Nobody takes it now; a board that restarts will, and one that is lost on the way waits for that.
_LATER = (NoBoard, QueueFull, QueueTimeout, EnginePaused, *_WAITING)
# What a circuit breaker counts: nobody knows when the board will be well again. One that is out of
# order says so, and of a replica that has ended there is nothing left to be asked.
_FAULTS = (EngineDied, EngineHung, BoardSilent)
FORGIVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Persistence:
    """How much is done for one request.

    A board owes its acceptance within ``accept_timeout_s``. A generation goes on elsewhere at most
    ``continuations`` times, and waits for ``restart_wait_s`` where no board is left to take it.
    Between two tries pass up to ``pause_s``, then twice as much each time, up to
    ``longest_pause_s``: those who lost the same board do not come at once.
    """

    accept_timeout_s: float = 10.0
    continuations: int = 8
    restart_wait_s: float = 60.0
    pause_s: float = 0.02
    longest_pause_s: float = 1.0


class Seated(Protocol):
    """A request's place at one board; see ``place.Place``."""

    group: str
    replica: str
    request: GenerateRequest
    waited_ms: float

    def heard(self, event: Event) -> None:
        """The board has said this."""

    def lost(self, exc: RkserveError) -> None:
        """The board is not to be asked until its next report."""

    def ended(self, *, left: bool) -> None:
        """It is over there; ``left``: its client went before the board was done."""


class Usher(Protocol):
    """Who gets which place; see ``places.Places``."""

    async def take(self, request: GenerateRequest, tried: Tried, claim: Claim) -> Seated:
        """Wait for a place. Raises what nobody takes the request for."""

    def waits(self, request_id: str) -> bool:
        """Whether that request has been let in, and waits for its turn."""


class Losses(Protocol):
    """What is counted of boards that are lost."""

    def continued(self, word: str) -> None:
        """A generation goes on elsewhere, and why."""

    def back(self, took_s: float) -> None:
        """It does, so long after the loss."""

    def opened(self) -> None:
        """A board is left alone for a while."""


class _Attempt:
    """What became of a request on one board."""

    def __init__(self, place: Seated) -> None:
        self.place = place
        self.accepted = self.finished = self.left = False


Homeless = dict[str, tuple[Course, float]]  # by request: what no board has, and since when


class _Home:
    """Where one request is as long as this is entered: with a board, or with none."""

    def __init__(
        self, course: Course, request_id: str, holders: Holders, homeless: Homeless
    ) -> None:
        self._course, self._id = course, request_id
        self._holders, self._homeless = holders, homeless

    def __enter__(self) -> _Home:
        self.leave()
        return self

    def __exit__(self, *_: object) -> None:
        self._holders.leave(self._id)
        self._homeless.pop(self._id, None)

    def enter(self, place: Seated) -> None:
        """A board has accepted it."""
        self._homeless.pop(self._id, None)
        self._holders.enter(self._id, place.group, place.replica)

    def leave(self) -> None:
        """No board has it."""
        self._holders.leave(self._id)
        self._homeless[self._id] = (self._course, time.monotonic())


class Dispatch:
    """Sends the requests of one Router to boards. Use it from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        places: Usher,
        rng: random.Random,
        persistence: Persistence | None = None,
        *,
        breaker: Breaker | None = None,
        losses: Losses | None = None,
    ) -> None:
        """``breaker`` is told what became of requests; that ``places`` heeds it is not seen to."""
        self.fleet = fleet
        self.places = places
        self.breaker = Breaker() if breaker is None else breaker
        self._rng = rng
        self._persistence = persistence or Persistence()
        self._losses = losses
        self._homeless: Homeless = {}
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.changed.append(self._forget_boards)

    def circuit(self, replica: str) -> tuple[Circuit, str]:
        """Return what this Router sends a board now, and why not all."""
        now_s = time.monotonic()
        return self.breaker.circuit(replica, now_s), self.breaker.reason(replica, now_s)

    def homeless(self) -> list[GenerationInfo]:
        """Return what is told of requests that no board has accepted, or one has lost since.

        They wait for their turn, are on their way to a board, or between two.
        """
        now_s = time.monotonic()
        return [
            _queued(course, now_s - since)
            for course, since in self._homeless.values()
            if not isinstance(course.asked, EmbedRequest)  # it is nothing that can be controlled
        ]

    def _forget_boards(self) -> None:
        """Replicas that are there no more come back under other names."""
        self.breaker.keep(frozenset(seat.replica for seat in self.fleet.seats()))

    async def generate(
        self, request: GenerateRequest, claim: Claim | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation, on as many boards as it takes.

        A board that fails, is full, is paused so that it takes nothing, sleeps, does not know yet
        what it shall serve, or lacks what the request needs, before it accepted the request, is
        passed over for another. From one that is lost later another one goes on: the client gets
        no character twice, and none is missing.

        Raises:
            ModelNotFound, NoBoard, QueueFull, EnginePaused, BoardBehind: nobody takes it.
            PoisonRequest: two boards have died of it.
            RkserveError: what the board raised, after the events before it; or the last of them.
        """
        course = Course(request, self._persistence.continuations)
        tried = Tried()
        failures = 0
        with _Home(course, request.request_id, self.fleet.entries, self._homeless) as home:
            while True:
                one = _Attempt(await self._take(course, tried, claim or Claim()))
                place = one.place
                course.queued_ms += place.waited_ms
                link = self.fleet.links[place.group]
                try:
                    async with aclosing(link.open(place.request, place.replica)) as events:
                        event = await self._first(events, place.replica)
                        one.accepted = True
                        home.enter(place)
                        place.heard(event)
                        if (told := course.heard(event)) is not None:
                            yield told
                        async for event in events:
                            one.finished = isinstance(event, Finished)
                            place.heard(event)
                            if course.waits:
                                self._back(course, event)
                            if (told := course.heard(event)) is not None:
                                yield told
                        self._require_end(one)
                except _ELSEWHERE as exc:
                    failures += 1
                    self._missed(course, one, exc, tried)
                except BaseException:
                    # Who has the last event need not wait for the end of the stream behind it.
                    one.left = not one.finished
                    raise
                else:
                    return
                finally:
                    self.breaker.undecided(place.replica)
                    place.ended(left=one.left)
                home.leave()
                await self._pause(course, failures)

    # -- before a board has it ----------------------------------------------------------------

    async def _take(self, course: Course, tried: Tried, claim: Claim) -> Seated:
        """Return a place; where nobody is left to go on with an answer, wait for a restart.

        Raises what nobody takes it for.
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
                        raise course.cause from exc  # that it had to wait is not what went wrong
                    raise
                if not course.begun and self._is_hopeless(course.request.model):
                    raise
            else:
                self.breaker.sent(place.replica, time.monotonic())
                return place
            tries += 1
            await asyncio.sleep(self._pause_s(tries))
            tried.clear()  # what was lost, or refused, a while ago may be well again
            await self.fleet.look_again()

    def _is_hopeless(self, model: str) -> bool:
        """Whether all boards say that they are out of order: then a restart helps seldom.

        Who has no word of an answer yet is told so, and may come back; others wait for it.
        """
        reports = self.fleet.reports(model)
        return bool(reports) and all(one.state is BoardState.FAILED for one in reports)

    async def _first(self, events: AsyncGenerator[Event, None], replica: str) -> Event:
        """Return the board's acceptance, which it owes at once, also when the request must queue.

        Raises:
            BoardFailed: it did not come; the replica is frozen or out of reach.
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
        """Raise ``BoardFailed`` where the stream ended before the answer, and well."""
        if not one.finished:
            raise BoardFailed(one.place.replica, "its answer has no end")
        self.breaker.worked(one.place.replica)

    async def _pause(self, course: Course, failures: int) -> None:
        """Wait before the next try. Somebody who reads an answer waits for nothing at first."""
        if course.tokens and course.times <= 1:
            return
        await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, tries: int) -> float:
        rules = self._persistence
        most_s = min(rules.longest_pause_s, rules.pause_s * 2 ** min(tries - 1, 30))
        return self._rng.uniform(most_s / 2, most_s)

    # -- when it is lost ----------------------------------------------------------------------

    def _missed(self, course: Course, one: _Attempt, exc: RkserveError, tried: Tried) -> None:
        """A board did not take it, or is lost. Raises what the client gets, if it ends so."""
        if isinstance(exc, QueueTimeout) and not course.begun:
            raise exc  # it has waited for as long as one does that has no word of an answer yet
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
            tried.clear()  # what others lack, or said, may be another thing by now
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

    def _back(self, course: Course, event: Event) -> None:
        """An answer that lost its board may go on with this event."""
        took_s = course.back(event, time.monotonic())
        if took_s is not None and self._losses is not None:
            self._losses.back(took_s)

    def _forgive(self, course: Course) -> None:
        """The boards that died of a request are not to blame."""
        groups = {seat.replica: seat.group for seat in self.fleet.seats()}
        for strike in course.strikes:
            self.breaker.forgive(strike.board)
            if strike.board in groups:
                self._spawn(self._ask_to_forgive(groups[strike.board], strike.board))

    async def _ask_to_forgive(self, group: str, replica: str) -> None:
        try:
            await self.fleet.links[group].ask(replica, "forgive", timeout_s=FORGIVE_S)
        except RkserveError as exc:
            log.info("board %s was not told that it is not to blame: %s", replica, exc)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _queued(course: Course, age_s: float) -> GenerationInfo:
    """Say what no board can say of it."""
    request = course.request
    done, ref = request.continued, request.adapter
    return GenerationInfo(
        request_id=request.request_id,
        board_id="",
        model=request.model,
        state=GenerationState.QUEUED,
        prompt_tokens=len(request.prompt_ids),
        tokens=0 if done is None else done.tokens,
        context_tokens=len(request.prompt_ids) + (0 if done is None else len(done.slots)),
        partial_output="" if done is None else done.text,
        adapter=request.line if ref is None else ref.name,
        native_pause=request.native_pause,
        age_s=age_s,
    )
