"""Which board gets a request of this Router's, and what is done where that board does not take it.

It chooses by what a ``Fleet`` knows and reaches the boards through the fleet's links; it knows
neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace

from rkserve.deployments.fleet import Fleet
from rkserve.deployments.seats import Stay
from rkserve.errors import (
    AdapterBroken,
    BoardAsleep,
    BoardBehind,
    BoardFailed,
    BoardGone,
    BoardOutOfOrder,
    CacheNotFound,
    EnginePaused,
    ModelNotFound,
    NoBoard,
    QueueFull,
    RkserveError,
)
from rkserve.messages import BoardState, Event, Finished, GenerateRequest
from rkserve.routing.least_load import Candidate, Held, choose

log = logging.getLogger(__name__)

# While a change is on its way, every board may be a moment behind what this Router knows already.
CATCH_UP_S = 5.0
CATCH_UP_STEP_S = 0.05
CATCH_UP_LONGEST_S = 0.5


# What one board may lack and another have; nothing of the request was run then.
_LACKING = (CacheNotFound, AdapterBroken)
_UNHARMED = (BoardOutOfOrder, BoardBehind, BoardAsleep, *_LACKING)

# Such a board is well, and will take requests.
_WAITING = (BoardBehind, BoardAsleep)


class Dispatch:
    """Sends the requests of one Router to boards. Use it from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        rng: random.Random,
        accept_timeout_s: float = 10.0,
        catch_up_s: float = CATCH_UP_S,
    ) -> None:
        """A board owes its acceptance within ``accept_timeout_s``.

        A request waits for ``catch_up_s`` where all boards have yet to hear what they shall be.
        """
        self.fleet = fleet
        self._rng = rng
        self._accept_timeout_s = accept_timeout_s
        self._catch_up_s = catch_up_s

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation on the board with the least load.

        A board that fails, is full, is paused so that it takes nothing, sleeps while another one is
        awake, or does not know yet what it shall serve, before it accepted the request, is passed
        over for another, and so is one that gives its queue up before the first token, or that
        lacks the prompt cache or the right file of the adapter. A board that is lost while it works
        on the request is not: the request may be what it died of. One whose whole replica ends is,
        once, where nothing of the answer had come: mostly the request was waiting there. Where all
        boards are behind or joining, it waits for a moment.

        Raises:
            ModelNotFound, NoBoard, QueueFull, EnginePaused, BoardBehind: nobody takes it.
            RkserveError: what the board raised, after the events before it.
        """
        tried: dict[str, RkserveError] = {}
        said = answering = False
        patience = _Patience(self._catch_up_s)
        while True:
            group, candidate = await self._find(request, tried, patience)
            request = self._hurried(request, candidate, tried)
            self.fleet.entries.enter(request.request_id, group, candidate.key)
            accepted = finished = left = False
            stay = Stay(candidate, request.prompt_ids, _adapter_of(request))
            try:
                async with aclosing(self.fleet.links[group].open(request, candidate.key)) as events:
                    first = await self._first(events, candidate.key)
                    accepted = True
                    if not said:
                        said = True
                        yield first
                    async for event in events:
                        answering = True
                        finished = isinstance(event, Finished)
                        stay.heard(event)
                        yield event
            except (BoardFailed, QueueFull, EnginePaused, *_LACKING) as exc:
                if isinstance(exc, BoardFailed) and not isinstance(exc, _WAITING):
                    candidate.ready = False  # until its next report says otherwise
                if answering or (accepted and not _may_go_elsewhere(exc, tried)):
                    raise
                if isinstance(exc, AdapterBroken):
                    log.warning("board %s is passed over: %s", candidate.key, exc)
                tried[candidate.key] = exc
            except BaseException:
                # Who has the last event need not wait for the end of the stream behind it.
                left = not finished
                raise
            else:
                return
            finally:
                self.fleet.entries.leave(request.request_id)
                stay.ended(left=left)

    def _hurried(
        self, request: GenerateRequest, chosen: Candidate, tried: Mapping[str, RkserveError]
    ) -> GenerateRequest:
        """Return the request as the chosen board gets it: it shall wait on one that has gone to
        sleep meanwhile only where no other board is awake, as far as this Router knows.
        """
        groups = [group for group, model in self.fleet.groups.items() if model == request.model]
        others = (
            c
            for group in groups
            for c in self.fleet.listing.candidates[group].values()
            if c.key != chosen.key and c.key not in tried
        )
        awake = any(one.ready and one.loaded and one.held is Held.NOT for one in others)
        return replace(request, patient=not (awake and chosen.held is Held.NOT))

    async def _find(
        self, request: GenerateRequest, tried: dict[str, RkserveError], patience: _Patience
    ) -> tuple[str, Candidate]:
        """Choose; where there is no board, look whether one came since the last round of reports.

        After a redeploy all replicas are new, and a request should not fail for the second that
        a router takes to hear of them; nor for the moment in which a change reaches the boards.
        """
        while True:
            try:
                return self._choose(request, tried)
            except (NoBoard, BoardBehind):
                if patience.looks() and await self.fleet.look_again():
                    continue
                if not self._catch_up(request.model, tried) or not await patience.waited():
                    raise
            for key in [key for key, exc in tried.items() if isinstance(exc, BoardBehind)]:
                del tried[key]
            await self.fleet.look_again()

    def _catch_up(self, model: str, tried: Mapping[str, RkserveError]) -> bool:
        """Whether boards are about to serve, once they have what the cluster shall be."""
        return any(isinstance(exc, BoardBehind) for exc in tried.values()) or any(
            report.state is BoardState.JOINING for report in self.fleet.reports(model)
        )

    async def _first(self, events: AsyncGenerator[Event, None], replica: str) -> Event:
        """Return the board's acceptance, which it owes at once, also when the request must queue.

        Raises:
            BoardFailed: it did not come; the replica is frozen or out of reach.
        """
        try:
            return await asyncio.wait_for(anext(events), self._accept_timeout_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            reason = f"it did not accept the request within {self._accept_timeout_s:g} s"
            raise BoardFailed(replica, reason) from None
        except StopAsyncIteration:
            raise BoardFailed(replica, "it ended without an answer") from None

    def _choose(
        self, request: GenerateRequest, tried: Mapping[str, RkserveError]
    ) -> tuple[str, Candidate]:
        model = request.model
        groups = [group for group, served in self.fleet.groups.items() if served == model]
        if not groups:
            raise ModelNotFound(model)
        owner = {
            c.key: group for group in groups for c in self.fleet.listing.candidates[group].values()
        }
        known = [c for group in groups for c in self.fleet.listing.candidates[group].values()]
        # A request should rather be told to come back than queue behind a pause: where a board is
        # full that was chosen for being less held, those that are held more are not asked.
        full = (c.held for c in known if isinstance(tried.get(c.key), QueueFull))
        most = min(full, default=Held.REFUSES)
        untried = (c for c in known if c.key not in tried and c.held <= most)
        chosen = choose(untried, request.prompt_ids, self._rng, _adapter_of(request))
        if chosen is not None:
            return owner[chosen.key], chosen
        raise self._refusal(model, known, tried)

    def _refusal(
        self, model: str, known: Iterable[Candidate], tried: Mapping[str, RkserveError]
    ) -> RkserveError:
        """Say why nobody took the request: full, without what it needs, or not there."""
        met = list(tried.values())
        behind = [exc for exc in met if isinstance(exc, BoardBehind)]
        if behind:
            return behind[-1]
        full = [exc for exc in met if isinstance(exc, QueueFull)]
        if full:
            soonest_s = min(exc.retry_after_s or 1 for exc in full)
            return QueueFull(sum(exc.queued for exc in full), soonest_s)
        ready = [c for c in known if c.ready]
        if all(c.key in tried for c in ready):
            lacking = [exc for exc in met if isinstance(exc, _LACKING)]
            paused = [exc for exc in met if isinstance(exc, EnginePaused)]
            paused.sort(key=lambda exc: exc.retry_after_s or 1)
            asleep = [exc for exc in met if isinstance(exc, BoardAsleep)]
            if told := [*lacking[-1:], *paused[:1], *asleep[-1:]]:
                return told[0]
        if ready:
            waiting = sum(max(0, c.load - 1) for c in ready)
            return QueueFull(waiting, self._typical_s(model))
        return NoBoard(model, self.fleet.why_not_ready(model, met))

    def _typical_s(self, model: str) -> int:
        """Seconds of a typical generation, from the boards' own totals."""
        reports = self.fleet.reports(model)
        busy_ms = sum(r.prefill_ms + r.decode_ms for r in reports)
        return max(1, round(busy_ms / 1e3 / max(1, sum(r.requests for r in reports))))


class _Patience:
    """How long one request waits for boards to catch up with what they shall be."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None
        self._step_s = CATCH_UP_STEP_S
        self._looked = False

    def looks(self) -> bool:
        """Whether to look for new boards at once: the first time."""
        first, self._looked = not self._looked, True
        return first

    async def waited(self) -> bool:
        """Wait for a moment, longer each time; False once it took too long."""
        now_s = asyncio.get_running_loop().time()
        self._until_s = now_s + self._limit_s if self._until_s is None else self._until_s
        if now_s >= self._until_s:
            return False
        await asyncio.sleep(self._step_s)
        self._step_s = min(2 * self._step_s, CATCH_UP_LONGEST_S)
        return True


def _may_go_elsewhere(exc: RkserveError, tried: Mapping[str, RkserveError]) -> bool:
    """Whether another board may try what one had accepted and given no part of an answer to.

    A library that crashes on a request ends its engine, and not the replica; should one do that all
    the same, it ends no more than two.
    """
    if isinstance(exc, BoardGone):
        return not any(isinstance(before, BoardGone) for before in tried.values())
    return isinstance(exc, _UNHARMED)


def _adapter_of(request: GenerateRequest) -> str | None:
    # The board chooses the version of a line; what was computed with another one is no use, but
    # costs nothing either: this only breaks ties.
    return request.line if request.adapter is None else request.adapter.key
