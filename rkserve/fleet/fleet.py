"""The boards as one Router sees them: their reports, and calls to them.

Boards are reached only through ``BoardLink``, the interface of the token path, so that tests need
no Ray and a faster transport changes nothing here.
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

from rkserve.core.board_report import BoardReport, BoardState, next_round
from rkserve.core.desired_state import Desired
from rkserve.core.errors import BoardFailed, BoardStartFailed, RkserveError, UpstreamFailed
from rkserve.core.messages import CacheSource, Delta, Event, GenerateRequest
from rkserve.fleet.board_table import SILENT, BoardAddress, BoardTable

log = logging.getLogger(__name__)
T = TypeVar("T")

FAILURES_EVERY = 5  # each look is a call to Serve's controller
SETTLES_S = 2.0  # a few rounds of the Coordinator
LOOK_AGAIN_S = 0.25  # bounds the rounds of reports caused by requests without a board
# Boards answer such calls within milliseconds; a frozen one must not delay the others for longer.
TOGETHER_S = 1.0


@dataclass
class Answers(Generic[T]):
    """Answers of several boards to one call: by board, a value and its time, or an error."""

    found: dict[str, T] = field(default_factory=dict)
    failed: dict[str, RkserveError] = field(default_factory=dict)
    took_ms: dict[str, float] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """Return whether some boards succeeded and others failed."""
        return bool(self.found) and bool(self.failed)

    def require_one(self) -> None:
        """Raise the error of the first board by name if all boards failed."""
        if self.failed and not self.found:
            raise min(self.failed.items())[1]


def merged(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the boards' lists as one."""
    return [item for one in lists for item in one]


# Processes a delta in the turn of the loop in which it arrived; False if its reader must do that.
TakeDelta = Callable[[Delta], bool]


class BoardLink(Protocol):
    """The connection of one Router to the boards of one group."""

    @property
    def complete(self) -> bool:
        """Return whether every existing replica answered the last round of reports."""

    def open(
        self, request: GenerateRequest, replica: str, take: TakeDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Generate on that replica. Closing the generator aborts; raises ``RkserveError`` only.

        Deltas that ``take`` has processed, while all before them have been read, are not yielded.
        """

    def cache_source(self, replica: str, tokens: int) -> CacheSource | None:
        """Return the way to that replica's cache files, of which one has so many tokens of a
        prompt; None without a connection to it.
        """

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of that replica's board; raises ``RkserveError`` only."""

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        """Call a method of every board at once; ``take`` gets each answer as it arrives.

        Boards that fail or do not answer in time are skipped. ``method`` must be idempotent.
        """

    async def reports(self) -> list[BoardReport]:
        """Collect one report from every board that answers."""

    def has_new(self) -> bool:
        """Return whether a board has come that no round of reports has asked."""

    async def has_running(self) -> bool:
        """Return whether a board of this group may run; False if all are still being started."""

    async def start_failure(self) -> BoardStartFailed | None:
        """Return the latest failure to start of a board of this group, if it persists."""


class Fleet(BoardTable):
    """All boards of an application, and calls to them. Use it from one event loop."""

    def __init__(
        self,
        links: Mapping[str, BoardLink],
        groups: Mapping[str, str],
        files_per_board: int | None = None,
    ) -> None:
        """``files_per_board`` bounds the KV cache files that are tracked of each board; with None,
        cache contents are not tracked.
        """
        super().__init__(groups, files_per_board)
        self.links = links
        self._refreshed_s = self._settled_s = float("-inf")
        self._looking = asyncio.Lock()
        self._rounds = asyncio.Lock()  # held while the boards are asked for their reports
        self._begun = self._done = 0  # rounds of reports: number begun, last one ended
        # By the IDs of this Router's requests: group and replica of the boards that run them.
        self.running: dict[str, tuple[str, str]] = {}
        self.changed: list[Callable[[], None]] = []  # called after each refresh
        self.unknown = set(links)  # groups with boards that may never have reported

    @property
    def models(self) -> list[str]:
        """The configured models, without repeats, in the order of the configuration."""
        return list(dict.fromkeys(self.groups.values()))

    def obey(self, desired: Desired) -> None:
        """Apply a new desired state to the choice of boards."""
        super().obey(desired)
        self._notify()

    def holders(self, generation: str, choice: int | None = None) -> list[BoardAddress]:
        """Return the boards of a generation; empty unless this Router started it."""
        if choice is None:
            found = [at for one, at in self.running.items() if one.startswith(f"{generation}/")]
        else:
            at = self.running.get(f"{generation}/{choice}")
            found = [] if at is None else [at]
        known = {(address.group, address.replica): address for address in self.addresses()}
        return [
            known.get((group, replica), BoardAddress(group, replica, replica, self.groups[group]))
            for group, replica in dict.fromkeys(found)
        ]

    async def ask_together(
        self, addresses: Collection[BoardAddress], method: str, *args: Any, timeout_s: float
    ) -> Answers[Any]:
        """Ask boards by one call to each group that has several of them.

        All boards of such a group are asked, also those not among ``addresses``: ``method`` must
        be idempotent; answers carry their ``board_id``. The caller asks boards without an answer
        singly.
        """
        answers: Answers[Any] = Answers()
        meant = {address.board_id for address in addresses}
        began_s = time.monotonic()

        def take(answer: Any) -> None:
            if answer.board_id in meant:
                answers.found[answer.board_id] = answer
                answers.took_ms[answer.board_id] = (time.monotonic() - began_s) * 1e3

        counts = Counter(address.group for address in addresses)
        limit_s = min(timeout_s, TOGETHER_S)
        await asyncio.gather(
            *(
                self.links[group].ask_all(method, *args, timeout_s=limit_s, take=take)
                for group, count in counts.items()
                if count > 1
            )
        )
        return answers

    async def ask(
        self,
        addresses: Collection[BoardAddress],
        method: str,
        *args: Any,
        timeout_s: float,
        together: bool = False,
    ) -> Answers[Any]:
        """Ask boards concurrently and collect answers and errors.

        With ``together``, ``ask_together`` is tried first, and then boards without an answer are
        asked.
        """
        answers: Answers[Any] = Answers()
        if together:
            answers = await self.ask_together(addresses, method, *args, timeout_s=timeout_s)

        async def one(address: BoardAddress) -> None:
            if address.silent:
                answers.failed[address.board_id] = BoardFailed(address.board_id, SILENT)
                return
            began_s = time.monotonic()
            try:
                answers.found[address.board_id] = await self.links[address.group].ask(
                    address.replica, method, *args, timeout_s=timeout_s
                )
            except RkserveError as exc:
                answers.failed[address.board_id] = _by_name(exc, address)
            answers.took_ms[address.board_id] = (time.monotonic() - began_s) * 1e3

        left = [address for address in addresses if address.board_id not in answers.found]
        await asyncio.gather(*(one(address) for address in left))
        return answers

    def why_not_ready(self, model: str, met: Iterable[RkserveError] = ()) -> str:
        """Return why no board of the model serves; ``met`` are errors of the current call."""
        reasons = {
            _named(exc.board_id, exc.reason) if isinstance(exc, UpstreamFailed) else exc.reason
            for exc in met
            if isinstance(exc, BoardFailed)
        }
        for report in self.reports(model):
            if report.state is not BoardState.READY:
                reason = report.reason or report.state.value
                reasons.add(_named(report.board_id, reason) if report.is_upstream else reason)
        return "; ".join(sorted(reasons)) or "no board has joined yet"

    async def refresh(self) -> None:
        """Collect reports that boards write after this call; log groups that fail.

        Rounds never overlap, so that no older report replaces a newer one; callers that arrive
        during a round share the next one.
        """
        before = self._begun
        async with self._rounds:
            if self._done > before:
                return
            self._begun += 1
            await asyncio.gather(*(self._refresh(group) for group in self.links))
            self._done = self._begun
        self._refreshed_s = asyncio.get_running_loop().time()
        self._notify()

    def _notify(self) -> None:
        for notify in self.changed:
            notify()

    async def _refresh(self, group: str) -> None:
        self.asked(group)
        try:
            self.update(group, await self.links[group].reports())
            if self.links[group].complete:
                self.unknown.discard(group)
        except RkserveError as exc:
            log.warning("the boards of group %s did not report: %s", group, exc)

    async def find_boards(self, timeout_s: float) -> None:
        """Refresh until every group with a board that runs has one here, or for ``timeout_s``.

        A board that still loads its model is not awaited: it takes up to minutes.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            await self.refresh()
            if asyncio.get_running_loop().time() >= deadline_s:
                return
            missing = [link for group, link in self.links.items() if not self.has_board(group)]
            if not any(await asyncio.gather(*(link.has_running() for link in missing))):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def refresh_failures(self) -> None:
        """List the boards that cannot start, with the reason."""
        for group, link in self.links.items():
            failure = await link.start_failure()
            if failure is not None:
                self.note_failure(group, failure)

    async def follow(self, interval_s: float) -> None:
        """Refresh forever, and look for failed starts every ``FAILURES_EVERY`` rounds.

        Routers and the Coordinator ask at the same instants, where they are on one machine.
        Failures of Ray are logged, and routing continues with the latest reports.
        """
        rounds = itertools.cycle(range(FAILURES_EVERY))
        while True:
            try:
                await self.refresh()
                if next(rounds) == 0:
                    await self.refresh_failures()
            except Exception:
                log.exception("the boards could not be asked; trying again")
            await self._until_round(interval_s)

    async def _until_round(self, interval_s: float) -> None:
        """Wait for the next round, which is at once where a board has come.

        That board serves after the Coordinator has sent it the desired state: the rounds after it
        are close to each other for ``SETTLES_S``.
        """
        loop = asyncio.get_running_loop()
        due_s = next_round(loop.time(), interval_s)
        while (left_s := due_s - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_AGAIN_S, left_s))
            if any(link.has_new() for link in self.links.values()):
                self._settled_s = loop.time() + SETTLES_S
            if loop.time() < self._settled_s:
                return

    async def look_again(self) -> bool:
        """Refresh unless that was just done; concurrent callers share one round."""
        seen_s = self._refreshed_s
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if self._refreshed_s != seen_s:
                return True
            if now_s - self._refreshed_s < LOOK_AGAIN_S:
                return False
            await self.refresh()
        return True


def _named(upstream: str, reason: str) -> str:
    return f"upstream {upstream}: {reason}"


def _by_name(exc: RkserveError, address: BoardAddress) -> RkserveError:
    """Put the board's name into an error of a link that knew only the replica's ID."""
    if isinstance(exc, BoardFailed) and exc.board_id == address.replica:
        return type(exc)(address.board_id, exc.reason)
    return exc
