"""Reconciliation: sends the desired state to boards, and brings back those that do not follow.

The broadcast is the fast path; reports are the truth. A board that joins, returns or was missed
gets the state again, and the files that it lacks, until it obeys: one attempt at a time per board,
with a growing delay after failures. Operations that were answered before all boards had followed
succeed when the last one has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rkserve.control.calls import AdapterRetireAction, DrainAction
from rkserve.control.drain import left_at
from rkserve.control.operations import (
    BoardOutcome,
    ControlOperation,
    OperationState,
    ResultStatus,
)
from rkserve.coordinator.boards.roster import Replies, Roster
from rkserve.coordinator.boards.transfer import Stager
from rkserve.coordinator.state.state_store import StateStore
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.desired_state import Adoption, Desired, Scope, SleepLevel
from rkserve.core.errors import BoardGone, RebaseFailed, RkserveError
from rkserve.fleet.board_table import BoardAddress

log = logging.getLogger(__name__)

DELAY_S, LONGEST_DELAY_S = 0.5, 30.0


@dataclass
class RetryDelay:
    """The delay after a board's failure to follow, and the last logged reason."""

    failures: int = 0
    until_s: float = 0.0
    reason: str = ""


class Reconciler:
    """Moves every board to the desired state. Use it from one event loop."""

    def __init__(
        self,
        state: StateStore,
        roster: Roster,
        stager: Stager,
        metrics: CoordinatorMetrics,
        timeout_s: float,
    ) -> None:
        self._state = state
        self._roster = roster
        self._stager = stager
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._sending: Counter[str] = Counter()
        self._heard_s: dict[str, float] = {}  # by replica: the time of its last known epoch
        self._delays: dict[str, RetryDelay] = {}
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def send(
        self, scope: Scope, timeout_s: float, boards: Collection[str] | None = None
    ) -> Replies:
        """Send the desired state to all boards; return once those in ``scope`` have answered.

        ``boards``, if given, restricts them further. The others are not waited for: an operation is
        not delayed by boards that it does not affect.
        """
        addresses = self._roster.addresses()
        covered = [
            address
            for address in addresses
            if scope.covers(address.board_id, address.model)
            and (boards is None or address.board_id in boards)
        ]
        others = [address for address in addresses if address not in covered]
        if others:
            self._begin(self._send(others, timeout_s))
        return await self._send(covered, timeout_s)

    def announce(self) -> None:
        """Send the desired state to all boards without waiting for their answers.

        Boards that do not answer get it again after their next report.
        """
        addresses = self._roster.addresses()
        if addresses:
            self._begin(self._send(addresses, self._timeout_s))

    async def _send(self, addresses: Sequence[BoardAddress], timeout_s: float) -> Replies:
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.001, deadline_s - time.monotonic())
            replies = await self._adopt(addresses, left_s)
            latest = max((answer.epoch for answer in replies.answers.values()), default=0)
            if latest <= self._state.desired.epoch or time.monotonic() >= deadline_s:
                break
            self._state.jump(latest)  # they obey an epoch later than this ledger's: send again
        return replies

    async def _adopt(self, addresses: Sequence[BoardAddress], timeout_s: float) -> Replies:
        boards = [address.board_id for address in addresses]
        self._sending.update(boards)
        began_s = time.monotonic()
        try:
            replies = await self._roster.send(addresses, self._state.desired, timeout_s=timeout_s)
        finally:
            self._sending.subtract(boards)
        now_s = time.monotonic()
        for address in addresses:
            if address.board_id in replies.answers:
                self._heard_s[address.replica] = now_s
        if replies.answers:
            self._metrics.broadcast.observe(now_s - began_s)
            self._metrics.skew.observe(replies.skew_ms / 1e3)
        return replies

    # -- those that do not follow --------------------------------------------------------------

    def look(self) -> None:
        """Compare reports with the desired state, and begin to move boards that differ.

        Raises:
            LedgerFailed: a board is ahead of the ledger, and that could not be stored.
        """
        reports = self._roster.reports()
        self._state.jump(max((report.epoch or 0 for report in reports), default=0))
        by_replica = {report.replica: report for report in reports if report.replica}
        addresses = self._roster.addresses()
        there = {address.replica for address in addresses}
        self._heard_s = {name: at for name, at in self._heard_s.items() if name in there}
        behind = 0
        for address in addresses:
            report = by_replica.get(address.replica)
            if report is None or report.state is BoardState.LOST:
                continue
            if not self._is_behind(report):
                self._delays.pop(address.board_id, None)
                continue
            behind += 1
            if self._may_bring(address):
                task = asyncio.get_running_loop().create_task(self._bring(address))
                self._bringing[address.board_id] = task
        self._metrics.behind.set(behind)

    def _is_behind(self, report: BoardReport) -> bool:
        desired = self._state.desired
        if report.epoch != desired.epoch or report.missing > 0:
            return True
        # A board that sleeps as desired follows; its engine may have failed to end or load since.
        target = desired.target(report.board_id, report.model)
        sleeps = target.level is not None and target.level > SleepLevel.PAUSED
        if report.state is (BoardState.READY if sleeps else BoardState.ASLEEP):
            return True
        return not sleeps and report.base != ("" if target.base is None else target.base.digest)

    def _may_bring(self, address: BoardAddress) -> bool:
        board = address.board_id
        going_on = self._bringing.get(board)
        if (going_on is not None and not going_on.done()) or self._sending[board] > 0:
            return False
        if self._heard_s.get(address.replica, float("-inf")) >= self._roster.asked_s:
            return False  # its report may be older than its last answer
        delay = self._delays.get(board)
        return delay is None or time.monotonic() >= delay.until_s

    async def _bring(self, address: BoardAddress) -> None:
        try:
            epoch = await self._bring_once(address)
        except BoardGone:
            self._delays.pop(address.board_id, None)
        except RkserveError as exc:
            self._delay(address.board_id, exc.message)
        except Exception:
            # No caller awaits this task: the error is logged here, and the next round tries again.
            log.exception("board %s could not be reconciled", address.board_id)
            self._delay(address.board_id, "")
        else:
            self._delays.pop(address.board_id, None)
            self._metrics.reconciled.inc()
            log.info("board %s obeys epoch %d", address.board_id, epoch)

    async def _bring_once(self, address: BoardAddress) -> int:
        """Send the state, deliver missing files, and send it again; return the epoch that it obeys.

        Raises:
            RkserveError: it does not follow.
        """
        async with self._stager.at(address.board_id):
            adoption = await self._tell_one(address)
            if adoption.lacking:
                for version in adoption.lacking:
                    await self._stager.bring(version, address.board_id)
                adoption = await self._tell_one(address)
        if adoption.refused:
            raise RebaseFailed(address.board_id, adoption.refused)
        return adoption.epoch

    async def _tell_one(self, address: BoardAddress) -> Adoption:
        self._sending[address.board_id] += 1
        try:
            adoption: Adoption = await self._roster.ask_one(
                address, "adopt", self._state.desired, timeout_s=self._timeout_s
            )
        finally:
            self._sending[address.board_id] -= 1
        self._heard_s[address.replica] = time.monotonic()
        self._state.jump(adoption.epoch)
        return adoption

    def _delay(self, board: str, why: str) -> None:
        delay = self._delays.setdefault(board, RetryDelay())
        delay_s = min(DELAY_S * 2.0**delay.failures, LONGEST_DELAY_S)
        delay.failures += 1
        delay.until_s = time.monotonic() + delay_s
        if why and why != delay.reason:
            delay.reason = why
            log.warning("board %s does not follow; retrying: %s", board, why)

    # -- tasks ---------------------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("the broadcast to the other boards failed: %s", exc, exc_info=exc)

    async def stop(self) -> None:
        """Stop. Boards stay as they are."""
        tasks = [*self._tasks, *self._bringing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LateResults:
    """Partial operations that may yet succeed. Use it from one event loop."""

    def __init__(self, state: StateStore, roster: Roster, now_s: Callable[[], float]) -> None:
        self._state = state
        self._roster = roster
        self._now_s = now_s
        self._partial: dict[
            str, tuple[ControlOperation, int]
        ] = {}  # with the epoch that they wait for

    def add(self, operation: ControlOperation) -> None:
        """Watch a partial operation that boards can still follow."""
        if operation.state is OperationState.PARTIAL and not operation.action.errand:
            # An operation that changed nothing is complete with the current epoch.
            epoch = operation.epoch or self._state.desired.epoch
            self._partial[operation.id] = (operation, epoch)

    def look(self) -> None:
        """End the operations that every board follows by now. Raises ``LedgerFailed``."""
        if not self._partial or not self._roster.is_known:
            return
        reports = {report.board_id: report for report in self._roster.reports()}
        there = {address.board_id for address in self._roster.addresses()}
        for one, epoch in list(self._partial.values()):
            # A recovered operation may have none: the list of boards was lost with its Coordinator.
            waited = [board for board, result in one.results.items() if not result.good]
            behind = waited or sorted(there)
            if all(
                board not in there or self._has_followed(one, epoch, reports.get(board))
                for board in behind
            ):
                done = replace(one, results=_settled(one, behind, there))
                self._state.write(None, done.end(OperationState.SUCCEEDED, self._now_s()))
                del self._partial[one.id]

    def _has_followed(self, one: ControlOperation, epoch: int, report: BoardReport | None) -> bool:
        if report is None or (report.epoch or 0) < epoch or report.missing:
            return False
        if one.action.loads and not self._is_up(report):
            return False
        if isinstance(one.action, DrainAction) and report.board_id in self._state.desired.drained:
            return left_at(report, epoch) == 0
        retired = one.action
        if not isinstance(retired, AdapterRetireAction):
            return True
        return not any(_is_left(key, retired, self._state.desired) for key in report.adapters)

    def _is_up(self, report: BoardReport) -> bool:
        """Return whether a board has loaded its model, or need not: it obeys before it loads."""
        target = self._state.desired.target(report.board_id, report.model)
        if target.level is not None and target.level > SleepLevel.PAUSED:
            return True
        base = "" if target.base is None else target.base.digest
        return report.state is BoardState.READY and report.base == base


def _is_left(key: str, retired: AdapterRetireAction, desired: Desired) -> bool:
    """Return whether an adapter in an engine's memory, by its key, belongs to the retired
    version.
    """
    begins = f"{retired.name}@" if retired.version is None else f"{retired.name}@{retired.version}-"
    named = {v.ref.key for line in desired.lines for v in line.versions}
    return key.startswith(begins) and key not in named


def _settled(one: ControlOperation, behind: list[str], there: set[str]) -> dict[str, BoardOutcome]:
    results = dict(one.results)
    for board in behind:
        status = ResultStatus.OK if board in there else ResultStatus.GONE
        before = results.get(board, BoardOutcome(status))
        results[board] = replace(before, status=status, error="", message="")
    return results
