"""The boards as one Router sees them: who is there, who takes a request, what they report.

It knows the boards through ``BoardLink`` only, the one small interface of the token path, so that
a faster path replaces Ray's without touching anything here; and so that tests need no Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from rkserve.deployments.listing import SILENT, Listing
from rkserve.deployments.seats import Answers, Holders, Seat, Stay
from rkserve.desired import Desired
from rkserve.errors import (
    AdapterBroken,
    BoardAsleep,
    BoardBehind,
    BoardFailed,
    BoardGone,
    BoardOutOfOrder,
    BoardStartFailed,
    CacheNotFound,
    EnginePaused,
    ModelNotFound,
    NoBoard,
    QueueFull,
    RkserveError,
)
from rkserve.messages import BoardReport, BoardState, Event, Finished, GenerateRequest
from rkserve.routing.least_load import Candidate, Held, choose
from rkserve.routing.rates import Rate

log = logging.getLogger(__name__)

FAILURES_EVERY = 5  # that question goes to Serve's controller
LOOK_AGAIN_S = 0.25  # so that requests without a board do not ask for reports all the time
# What boards say at once they say in milliseconds. One that is frozen must not hold up the others
# for longer than that.
TOGETHER_S = 1.0
# While a change is on its way, every board may be a moment behind what this Router knows already.
CATCH_UP_S = 5.0
CATCH_UP_STEP_S = 0.05
CATCH_UP_LONGEST_S = 0.5


# What one board may lack and another have; nothing of the request was run then.
_LACKING = (CacheNotFound, AdapterBroken)
_UNHARMED = (BoardOutOfOrder, BoardBehind, BoardAsleep, *_LACKING)

# Such a board is well, and will take requests.
_WAITING = (BoardBehind, BoardAsleep)


class BoardLink(Protocol):
    """How one Router reaches the boards of one group."""

    def open(self, request: GenerateRequest, replica: str) -> AsyncGenerator[Event, None]:
        """Generate on that replica. Closing the generator aborts; raises ``RkserveError`` only."""

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of that replica's board; raises ``RkserveError`` only."""

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, heard: Callable[[Any], None]
    ) -> None:
        """Call a method of every board at once; ``heard`` gets each answer as it comes.

        Whoever does not answer in time, or fails, is simply not heard. ``method`` must be one that
        does no harm when it is repeated.
        """

    @property
    def complete(self) -> bool:
        """Whether the last round of reports heard every replica that there is."""

    async def reports(self) -> list[BoardReport]:
        """Collect one report from every board that answers."""

    async def start_failure(self) -> BoardStartFailed | None:
        """Return the latest failure of a board of this group to start, while one does."""


class Fleet:
    """All boards of an application. Use it from one event loop."""

    def __init__(
        self,
        links: Mapping[str, BoardLink],
        groups: Mapping[str, str],
        rng: random.Random,
        accept_timeout_s: float = 10.0,
        catch_up_s: float = CATCH_UP_S,
    ) -> None:
        """``groups`` maps a group's name to the model that it serves.

        A request waits for ``catch_up_s`` where all boards have yet to hear what they shall be.
        """
        self._links = links
        self._groups = groups
        self._rng = rng
        self._accept_timeout_s = accept_timeout_s
        self._catch_up_s = catch_up_s
        self._refreshed_s = float("-inf")
        self._looking = asyncio.Lock()
        self._listing = Listing(groups)
        self._holders = Holders()
        self.unknown = set(links)  # groups of which some board may never have been heard

    @property
    def models(self) -> list[str]:
        """Configured models, without repeats, in the configuration's order."""
        return list(dict.fromkeys(self._groups.values()))

    def reports(self, model: str | None = None) -> list[BoardReport]:
        """Latest reports, sorted by board; one whose replica vanished says so."""
        return self._listing.reports(model)

    def rates(self) -> dict[str, Rate]:
        """How fast the boards work now, by board."""
        return self._listing.rates()

    def seats(self, model: str | None = None) -> list[Seat]:
        """Return the boards that have a replica, also those that fell silent a moment ago."""
        return self._listing.seats(model)

    def obey(self, desired: Desired) -> None:
        """Choose boards by what they shall be from now on."""
        self._listing.obey(desired)

    def forget_prompts(self, meant: Callable[[str, str], bool]) -> None:
        """Forget what boards hold of their last prompts; ``meant`` takes board and model."""
        self._listing.forget_prompts(meant)

    def holders(self, generation: str, choice: int | None = None) -> list[Seat]:
        """Return the boards that hold this Router's generation; none for that of another one."""
        known = {(seat.group, seat.replica): seat for seat in self.seats()}
        return [
            known.get((group, replica), Seat(group, replica, replica, self._groups[group]))
            for group, replica in self._holders.of(generation, choice)
        ]

    async def ask_together(
        self, seats: Collection[Seat], method: str, *args: Any, timeout_s: float
    ) -> Answers[Any]:
        """Ask boards by one call to all of their groups, where that is quicker; who has not
        answered by then is to be asked by itself.

        All boards of a group are asked, also those that are not meant; answers carry their
        ``board_id``, and asking again does no harm.
        """
        answers: Answers[Any] = Answers()
        meant = {seat.board_id for seat in seats}
        began_s = time.monotonic()

        def heard(said: Any) -> None:
            if said.board_id in meant:
                answers.said[said.board_id] = said
                answers.took_ms[said.board_id] = (time.monotonic() - began_s) * 1e3

        counts = Counter(seat.group for seat in seats)
        limit_s = min(timeout_s, TOGETHER_S)
        await asyncio.gather(
            *(
                self._links[group].ask_all(method, *args, timeout_s=limit_s, heard=heard)
                for group, count in counts.items()
                if count > 1
            )
        )
        return answers

    async def ask(
        self,
        seats: Collection[Seat],
        method: str,
        *args: Any,
        timeout_s: float,
        together: bool = False,
    ) -> Answers[Any]:
        """Ask boards at the same time; one that fails or is silent hides nobody else's answer.

        ``together``: as ``ask_together`` does, and then those that have not answered.
        """
        answers: Answers[Any] = Answers()
        if together:
            answers = await self.ask_together(seats, method, *args, timeout_s=timeout_s)

        async def one(seat: Seat) -> None:
            if seat.silent:
                answers.failed[seat.board_id] = BoardFailed(seat.board_id, SILENT)
                return
            began_s = time.monotonic()
            try:
                answers.said[seat.board_id] = await self._links[seat.group].ask(
                    seat.replica, method, *args, timeout_s=timeout_s
                )
            except RkserveError as exc:
                answers.failed[seat.board_id] = _by_name(exc, seat)
            answers.took_ms[seat.board_id] = (time.monotonic() - began_s) * 1e3

        left = [seat for seat in seats if seat.board_id not in answers.said]
        await asyncio.gather(*(one(seat) for seat in left))
        return answers

    def is_ready(self, model: str) -> bool:
        """Whether a board could start a request now, or sleeps as it shall."""
        return self._listing.is_awake(model)

    def why_not_ready(self, model: str, met: Iterable[RkserveError] = ()) -> str:
        """Say what keeps the model's boards from serving; ``met`` is what one call just learned."""
        reasons = {exc.reason for exc in met if isinstance(exc, BoardFailed)}
        reasons |= {
            report.reason or report.state.value
            for report in self.reports(model)
            if report.state is not BoardState.READY
        }
        return "; ".join(sorted(reasons)) or "no board has joined yet"

    async def refresh(self) -> None:
        """Collect the boards' reports; what a group's boards fail to say is logged."""
        await asyncio.gather(*(self._refresh(group) for group in self._links))
        self._refreshed_s = asyncio.get_running_loop().time()

    async def _refresh(self, group: str) -> None:
        for candidate in self._listing.candidates[group].values():
            candidate.asked()
        try:
            self._listing.update(group, await self._links[group].reports())
            if self._links[group].complete:
                self.unknown.discard(group)
        except RkserveError as exc:
            log.warning("the boards of group %s did not report: %s", group, exc)

    async def find_boards(self, timeout_s: float) -> None:
        """Refresh until every group has a board, or for ``timeout_s``: before the first request."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self.refresh()
            if (
                all(self._listing.candidates.values())
                or asyncio.get_running_loop().time() >= deadline_s
            ):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def refresh_failures(self) -> None:
        """List boards that cannot start, with the reason; they have no replica to report."""
        for group, link in self._links.items():
            failure = await link.start_failure()
            if failure is not None:
                self._listing.note_failure(group, failure)

    async def follow(self, interval_s: float) -> None:
        """Refresh forever; asks after boards that cannot start every ``FAILURES_EVERY`` rounds.

        A failure of Ray's is logged and tried again: routing goes on with what is known.
        """
        rounds = itertools.cycle(range(FAILURES_EVERY))
        while True:
            try:
                await self.refresh()
                if next(rounds) == 0:
                    await self.refresh_failures()
            except Exception:
                log.exception("the boards could not be asked; trying again")
            await asyncio.sleep(interval_s)

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
            self._holders.enter(request.request_id, group, candidate.key)
            accepted = finished = left = False
            stay = Stay(candidate, request.prompt_ids, _adapter_of(request))
            try:
                async with aclosing(self._links[group].open(request, candidate.key)) as events:
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
                self._holders.leave(request.request_id)
                stay.ended(left=left)

    def _hurried(
        self, request: GenerateRequest, chosen: Candidate, tried: Mapping[str, RkserveError]
    ) -> GenerateRequest:
        """Return the request as the chosen board gets it: it shall wait on one that has gone to
        sleep meanwhile only where no other board is awake, as far as this Router knows.
        """
        groups = [group for group, model in self._groups.items() if model == request.model]
        others = (
            c
            for group in groups
            for c in self._listing.candidates[group].values()
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
                if patience.looks() and await self.look_again():
                    continue
                if not self._catch_up(request.model, tried) or not await patience.waited():
                    raise
            for key in [key for key, exc in tried.items() if isinstance(exc, BoardBehind)]:
                del tried[key]
            await self.look_again()

    def _catch_up(self, model: str, tried: Mapping[str, RkserveError]) -> bool:
        """Whether boards are about to serve, once they have what the cluster shall be."""
        return any(isinstance(exc, BoardBehind) for exc in tried.values()) or any(
            report.state is BoardState.JOINING for report in self.reports(model)
        )

    async def look_again(self) -> bool:
        """Refresh, unless that has just been done; requests that wait share one round."""
        seen_s = self._refreshed_s
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if self._refreshed_s != seen_s:
                return True
            if now_s - self._refreshed_s < LOOK_AGAIN_S:
                return False
            await self.refresh()
        return True

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
        groups = [group for group, served in self._groups.items() if served == model]
        if not groups:
            raise ModelNotFound(model)
        owner = {c.key: group for group in groups for c in self._listing.candidates[group].values()}
        known = [c for group in groups for c in self._listing.candidates[group].values()]
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
        return NoBoard(model, self.why_not_ready(model, met))

    def _typical_s(self, model: str) -> int:
        """Seconds of a typical generation, from the boards' own totals."""
        reports = self.reports(model)
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


def _by_name(exc: RkserveError, seat: Seat) -> RkserveError:
    """Say the board's name where the link only knew its replica's id."""
    if isinstance(exc, BoardFailed) and exc.board_id == seat.replica:
        return type(exc)(seat.board_id, exc.reason)
    return exc
