"""Partial operations: those answered before all boards had followed, and their later success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rkserve.control.calls import AdapterRetireAction, OperationKind
from rkserve.control.operations import (
    UPDATES,
    BoardOutcome,
    ControlOperation,
    OperationState,
    ResultStatus,
)
from rkserve.coordinator.boards.roster import Roster
from rkserve.coordinator.state.state_store import StateStore
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired, SleepLevel

# Single requests to boards; an obeyed epoch says nothing about their success.
_ERRANDS = frozenset({OperationKind.CACHE_RESET, OperationKind.ABORT})
# Boards obey these before they have loaded the weights.
_LOADING = frozenset({OperationKind.WAKE, *UPDATES})


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
        if operation.state is OperationState.PARTIAL and operation.kind not in _ERRANDS:
            # An operation that changed nothing is complete with the current epoch.
            epoch = operation.epoch or self._state.desired.epoch
            self._partial[operation.id] = (operation, epoch)

    def look(self) -> None:
        """End the operations that every board follows by now. Raises ``LedgerFailed``."""
        if not self._partial or not self._roster.is_known:
            return
        reports = {report.board_id: report for report in self._roster.reports()}
        there = {seat.board_id for seat in self._roster.seats()}
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
        if one.kind in _LOADING and not self._is_up(report):
            return False
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
