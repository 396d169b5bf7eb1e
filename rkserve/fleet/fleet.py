"""The boards as one Router sees them: who is there, and what they report and answer.

It knows the boards through ``BoardLink`` only, the one small interface of the token path, so that
a faster path replaces Ray's without touching anything here; and so that tests need no Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired
from rkserve.core.errors import (
    BoardFailed,
    BoardStartFailed,
    RkserveError,
)
from rkserve.core.messages import Event, GenerateRequest
from rkserve.fleet.board_table import SILENT, BoardAddress, BoardTable
from rkserve.fleet.speeds import Rate

log = logging.getLogger(__name__)
T = TypeVar("T")

FAILURES_EVERY = 5  # that question goes to Serve's controller
LOOK_AGAIN_S = 0.25  # so that requests without a board do not ask for reports all the time
# What boards say at once they say in milliseconds. One that is frozen must not hold up the others
# for longer than that.
TOGETHER_S = 1.0


@dataclass
class Answers(Generic[T]):
    """What boards said: by board an answer and how long it took, or an error."""

    said: dict[str, T] = field(default_factory=dict)
    failed: dict[str, RkserveError] = field(default_factory=dict)
    took_ms: dict[str, float] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """Whether some boards did what they were asked, and others did not."""
        return bool(self.said) and bool(self.failed)

    def require_one(self) -> None:
        """Raise the error of a board, of the first by name, where all have failed."""
        if self.failed and not self.said:
            raise min(self.failed.items())[1]


class GenerationBoards:
    """Which boards hold the generations that this Router sent them."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, tuple[str, str]]] = {}

    def enter(self, request_id: str, group: str, replica: str) -> None:
        """That replica gets the request."""
        completion, _, choice = request_id.rpartition("/")
        self._held.setdefault(completion, {})[choice] = (group, replica)

    def leave(self, request_id: str) -> None:
        """It is over there."""
        completion, _, choice = request_id.rpartition("/")
        choices = self._held.get(completion, {})
        choices.pop(choice, None)
        if not choices:
            self._held.pop(completion, None)

    def of(self, generation: str, choice: int | None) -> list[tuple[str, str]]:
        """Return groups and replicas, without repeats; none where this Router knows nothing."""
        choices = self._held.get(generation, {})
        wanted: Iterable[tuple[str, str] | None] = (
            choices.values() if choice is None else [choices.get(str(choice))]
        )
        return list(dict.fromkeys(place for place in wanted if place is not None))

    def __len__(self) -> int:
        return len(self._held)


def merged(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the boards' lists as one."""
    return [item for one in lists for item in one]


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
        files_per_board: int | None = None,
    ) -> None:
        """``groups`` maps a group's name to the model that it serves.

        What boards hold of contexts is kept track of, up to ``files_per_board``; None: it is not.
        ``entries`` says which boards hold requests of this Router.
        """
        self.links = links
        self.groups = groups
        self._refreshed_s = float("-inf")
        self._looking = asyncio.Lock()
        self._rounds = asyncio.Lock()  # held while the boards are asked for their reports
        self._begun = self._done = 0  # rounds of reports: those begun, and the last one that ended
        self.listing = BoardTable(groups, files_per_board=files_per_board)
        self.entries = GenerationBoards()
        self.changed: list[Callable[[], None]] = []  # who wants to know when anything may be new
        self.unknown = set(links)  # groups of which some board may never have been heard

    @property
    def models(self) -> list[str]:
        """Configured models, without repeats, in the configuration's order."""
        return list(dict.fromkeys(self.groups.values()))

    def reports(self, model: str | None = None) -> list[BoardReport]:
        """Latest reports, sorted by board; one whose replica vanished says so."""
        return self.listing.reports(model)

    def rates(self) -> dict[str, Rate]:
        """How fast the boards work now, by board."""
        return self.listing.rates()

    def seats(self, model: str | None = None) -> list[BoardAddress]:
        """Return the boards that have a replica, also those that fell silent a moment ago."""
        return self.listing.seats(model)

    def obey(self, desired: Desired) -> None:
        """Choose boards by what they shall be from now on."""
        self.listing.obey(desired)
        self._tell()

    def forget_prompts(self, meant: Callable[[str, str], bool], *, files: bool = True) -> None:
        """Forget what boards hold of contexts; ``meant`` takes board and model.

        Without ``files`` those stay that they have on their disks.
        """
        self.listing.forget_prompts(meant, files=files)

    def holders(self, generation: str, choice: int | None = None) -> list[BoardAddress]:
        """Return the boards that hold this Router's generation; none for that of another one."""
        known = {(seat.group, seat.replica): seat for seat in self.seats()}
        return [
            known.get((group, replica), BoardAddress(group, replica, replica, self.groups[group]))
            for group, replica in self.entries.of(generation, choice)
        ]

    async def ask_together(
        self, seats: Collection[BoardAddress], method: str, *args: Any, timeout_s: float
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
                self.links[group].ask_all(method, *args, timeout_s=limit_s, heard=heard)
                for group, count in counts.items()
                if count > 1
            )
        )
        return answers

    async def ask(
        self,
        seats: Collection[BoardAddress],
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

        async def one(seat: BoardAddress) -> None:
            if seat.silent:
                answers.failed[seat.board_id] = BoardFailed(seat.board_id, SILENT)
                return
            began_s = time.monotonic()
            try:
                answers.said[seat.board_id] = await self.links[seat.group].ask(
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
        return self.listing.is_awake(model)

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
        """Collect reports that the boards write after this call; a group that fails is logged.

        Rounds never overlap, so that no older report replaces a newer one; callers that come during
        a round share the one after it.
        """
        before = self._begun
        async with self._rounds:
            if self._done > before:
                return
            self._begun += 1
            await asyncio.gather(*(self._refresh(group) for group in self.links))
            self._done = self._begun
        self._refreshed_s = asyncio.get_running_loop().time()
        self._tell()

    def _tell(self) -> None:
        for tell in self.changed:
            tell()

    async def _refresh(self, group: str) -> None:
        self.listing.asked(group)
        try:
            self.listing.update(group, await self.links[group].reports())
            if self.links[group].complete:
                self.unknown.discard(group)
        except RkserveError as exc:
            log.warning("the boards of group %s did not report: %s", group, exc)

    async def find_boards(self, timeout_s: float) -> None:
        """Refresh until every group has a board, or for ``timeout_s``: before the first request."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self.refresh()
            if (
                all(self.listing.has_board(group) for group in self.links)
                or asyncio.get_running_loop().time() >= deadline_s
            ):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def refresh_failures(self) -> None:
        """List boards that cannot start, with the reason; they have no replica to report."""
        for group, link in self.links.items():
            failure = await link.start_failure()
            if failure is not None:
                self.listing.note_failure(group, failure)

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


def _by_name(exc: RkserveError, seat: BoardAddress) -> RkserveError:
    """Say the board's name where the link only knew its replica's id."""
    if isinstance(exc, BoardFailed) and exc.board_id == seat.replica:
        return type(exc)(seat.board_id, exc.reason)
    return exc
