"""The Coordinator's list of boards; a board stays in it until it is certainly gone.

A Router may drop a silent board; here a frozen one still counts, because it may wake up and
continue with an old state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rkserve.control.operations import BoardOutcome, ResultStatus
from rkserve.core.board_report import BoardReport
from rkserve.core.desired_state import Adoption, Desired, Probe, Scope
from rkserve.core.errors import (
    BoardFailed,
    BoardGone,
    BoardSilent,
    CoordinatorAway,
    RebaseFailed,
    RkserveError,
)
from rkserve.fleet.board_table import BoardAddress
from rkserve.fleet.fleet import Fleet

log = logging.getLogger(__name__)

# Between tries of a call that may not have reached the board at all.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
TRIES = 100  # the time limit ends the retries earlier
# Tries of a call to which a board answers with an error of its own, which rarely changes.
REFUSALS = 3
PROBE_S = 2.0

Failed = Callable[[str, RkserveError], None]  # method and error, for the metrics


@dataclass
class Replies:
    """The boards' answers: values of those that succeeded, and a result for each board."""

    answers: dict[str, Any] = field(default_factory=dict)
    results: dict[str, BoardOutcome] = field(default_factory=dict)

    @property
    def behind(self) -> dict[str, BoardOutcome]:
        """The boards that did not succeed, and are not gone."""
        return {board: result for board, result in self.results.items() if not result.good}

    @property
    def skew_ms(self) -> float:
        """The time from the first board's answer to the last one's."""
        took = [self.results[board].latency_ms for board in self.answers]
        return max(took) - min(took) if took else 0.0


class Roster:
    """All boards that may be running. Use it from one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        failed: Failed = lambda _method, _error: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet = fleet
        self._failed = failed
        self._sleep = sleep
        self._known: dict[tuple[str, str], BoardAddress] = {}
        self._looked_after: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.asked_s = float("-inf")  # when the last round of reports began

    @property
    def models(self) -> list[str]:
        """Configured models."""
        return self._fleet.models

    @property
    def is_known(self) -> bool:
        """True once every board has reported: until then an unknown one may be running."""
        return not self._fleet.unknown

    def require_known(self) -> None:
        """Raise ``CoordinatorAway`` until every board has reported once.

        Before that a stop of all boards cannot be confirmed.
        """
        if unknown := self._fleet.unknown:
            raise CoordinatorAway(
                "Not all boards have reported to the Coordinator since it started (missing: "
                f"{', '.join(sorted(unknown))}); try again in a moment."
            )

    async def refresh(self) -> None:
        """Collect the boards' reports, and check those that gave none."""
        began_s = time.monotonic()
        await self._fleet.refresh()
        self.asked_s = began_s
        present = {
            (address.group, address.board_id): address for address in self._fleet.addresses()
        }
        self._known |= present
        for key, address in self._known.items():
            if (key not in present or present[key].silent) and key not in self._looked_after:
                # Beside the rounds: a frozen board must not delay them.
                task = asyncio.get_running_loop().create_task(self._look_after(address))
                self._looked_after[key] = task
                task.add_done_callback(partial(self._looked, key))

    def _looked(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        del self._looked_after[key]
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a silent board could not be looked after: %s", exc, exc_info=exc)

    async def _look_after(self, address: BoardAddress) -> None:
        """Remove a board that is gone; a silent one stays."""
        await self._one(
            address, ("report", ()), BoardRetryLimits(time.monotonic() + PROBE_S, 1), Replies()
        )

    async def stop(self) -> None:
        """Stop checking boards."""
        tasks = list(self._looked_after.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def addresses(self, scope: Scope | None = None) -> list[BoardAddress]:
        """Return the boards of a part of the cluster, by name; those without a replica are gone."""
        return sorted(
            (
                address
                for address in self._known.values()
                if scope is None or scope.covers(address.board_id, address.model)
            ),
            key=lambda address: address.board_id,
        )

    def address(self, board_id: str) -> BoardAddress | None:
        """Return a board by its name."""
        return next(
            (address for address in self._known.values() if address.board_id == board_id), None
        )

    def reports(self, model: str | None = None) -> list[BoardReport]:
        """Return the boards' latest reports."""
        return self._fleet.reports(model)

    async def ask(
        self,
        addresses: Iterable[BoardAddress],
        method: str,
        *args: Any,
        timeout_s: float,
        tries: int = TRIES,
    ) -> Replies:
        """Call a method of boards at the same time, with retries if a call may not have arrived.

        ``method`` must be harmless when repeated.
        """
        return await self._ask_each(addresses, (method, args), timeout_s, tries, Replies())

    async def send(
        self, addresses: Collection[BoardAddress], desired: Desired, *, timeout_s: float
    ) -> Replies:
        """Have boards adopt a desired state, first by one broadcast to all of them.

        Boards outside the selection receive it as well. One that never reported here is none of
        the roster, and must not begin to serve by it: without a state a board refuses a broadcast.
        """
        replies, began_s = Replies(), time.monotonic()
        answers = await self._fleet.ask_together(addresses, "follow", desired, timeout_s=timeout_s)
        for board, answer in answers.found.items():
            replies.answers[board] = answer
            replies.results[board] = good(answer, answers.took_ms[board])
        left = [address for address in addresses if address.board_id not in answers.found]
        left_s = max(0.001, began_s + timeout_s - time.monotonic())
        return await self._ask_each(left, ("adopt", (desired,)), left_s, TRIES, replies)

    async def _ask_each(
        self,
        addresses: Iterable[BoardAddress],
        call: tuple[str, tuple[Any, ...]],
        timeout_s: float,
        tries: int,
        replies: Replies,
    ) -> Replies:
        deadline_s = time.monotonic() + timeout_s
        await asyncio.gather(
            *(
                self._one(address, call, BoardRetryLimits(deadline_s, tries), replies)
                for address in addresses
            )
        )
        return replies

    async def ask_one(
        self, address: BoardAddress, method: str, *args: Any, timeout_s: float
    ) -> Any:
        """Call a method of one board once; raises ``RkserveError`` only."""
        try:
            # A board that was silent in the last round of reports is asked as well.
            asked = [replace(address, silent=False)]
            answers = await self._fleet.ask(asked, method, *args, timeout_s=timeout_s)
            if address.board_id in answers.failed:
                raise answers.failed[address.board_id]
        except BoardGone:
            self._forget(address)
            raise
        return answers.found[address.board_id]

    def _forget(self, address: BoardAddress) -> None:
        key = (address.group, address.board_id)
        # By now another replica may have taken its place.
        if key in self._known and self._known[key].replica == address.replica:
            del self._known[key]

    async def _one(
        self,
        address: BoardAddress,
        call: tuple[str, tuple[Any, ...]],
        until: BoardRetryLimits,
        replies: Replies,
    ) -> None:
        began_s, pause_s = time.monotonic(), FIRST_PAUSE_S
        method, args = call
        while True:
            left_s = max(0.001, until.deadline_s - time.monotonic())
            try:
                answer = await self.ask_one(address, method, *args, timeout_s=left_s)
            except RkserveError as exc:
                self._failed(method, exc)
                if until.is_over(exc, pause_s):
                    took_ms = (time.monotonic() - began_s) * 1e3
                    replies.results[address.board_id] = result_of(exc, took_ms)
                    return
            else:
                replies.answers[address.board_id] = answer
                took_ms = (time.monotonic() - began_s) * 1e3
                replies.results[address.board_id] = good(answer, took_ms)
                return
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@dataclass
class BoardRetryLimits:
    """The limits of retries of a call to one board."""

    deadline_s: float
    tries: int
    refusals: int = REFUSALS

    def is_over(self, exc: RkserveError, pause_s: float) -> bool:
        """Return whether to stop after that error."""
        self.tries -= 1
        self.refusals -= is_own(exc)
        late = time.monotonic() + pause_s >= self.deadline_s
        # Each load of a whole model keeps the board from serving: one refusal is enough.
        final = isinstance(exc, BoardGone | RebaseFailed)
        return final or late or self.tries <= 0 or self.refusals <= 0


def good(answer: Any, took_ms: float) -> BoardOutcome:
    """Return the result of a board that succeeded."""
    return BoardOutcome(ResultStatus.OK, took_ms, details=_details_of(answer))


def is_own(exc: RkserveError) -> bool:
    """Return whether the board itself raised the error, so that the call did arrive."""
    return type(exc) is not BoardFailed and not isinstance(exc, BoardSilent | BoardGone)


def result_of(exc: RkserveError, took_ms: float) -> BoardOutcome:
    """Return a board's failure as a result."""
    if isinstance(exc, BoardGone):
        return BoardOutcome(ResultStatus.GONE, took_ms, message=exc.message)
    silent = isinstance(exc, BoardSilent) or type(exc) is BoardFailed
    status = ResultStatus.SILENT if silent else ResultStatus.FAILED
    return BoardOutcome(status, took_ms, exc.code or "internal_error", exc.message)


def _details_of(answer: Any) -> dict[str, Any]:
    """Return the figures of an answer that belong into the record."""
    if isinstance(answer, Probe):
        names: tuple[str, ...] = ("load_ms", "tokens", "decode_tokens_per_s")
    elif isinstance(answer, Adoption):
        names = ("held", "stopped", "kept", "aborted", "switched")
    else:
        return {}
    details = {name: getattr(answer, name) for name in names}
    if isinstance(answer, Adoption):
        details["emitted_until_ms"] = round(answer.latency_ms, 3)
    return details
