"""Operations that some boards had not followed when they were answered: when they have.

It knows reports and records; bringing the boards along is the reconcile loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rkserve.control.operations import (
    BoardResult,
    Operation,
    OperationKind,
    OperationState,
    ResultStatus,
)
from rkserve.deployments.book import Book
from rkserve.deployments.roster import Roster
from rkserve.messages import BoardReport

# These ask boards for something once; that they follow says nothing of it.
_ERRANDS = frozenset({OperationKind.CACHE_RESET, OperationKind.ABORT})


class Settling:
    """Partial operations that will yet succeed. Use it from one event loop."""

    def __init__(self, book: Book, roster: Roster, now_s: Callable[[], float]) -> None:
        self._book = book
        self._roster = roster
        self._now_s = now_s
        self._partial: dict[str, tuple[Operation, int]] = {}  # and the epoch that they wait for

    def add(self, operation: Operation) -> None:
        """Watch an operation, if it is one that boards can still follow."""
        if operation.state is OperationState.PARTIAL and operation.kind not in _ERRANDS:
            # One that found nothing to change is followed like what was desired already.
            epoch = operation.epoch or self._book.desired.epoch
            self._partial[operation.id] = (operation, epoch)

    def look(self) -> None:
        """End those that every board follows by now. Raises ``LedgerFailed``."""
        if not self._partial:
            return
        reports = {report.board_id: report for report in self._roster.reports()}
        there = {seat.board_id for seat in self._roster.seats()}
        for one, epoch in list(self._partial.values()):
            # What recovery found may have none: which boards were told died with it.
            waited = [board for board, result in one.results.items() if not result.good]
            behind = waited or sorted(there)
            followed = {board: _result(board in there, reports.get(board)) for board in behind}
            if all(_follows(epoch, board in there, reports.get(board)) for board in behind):
                done = replace(one, results={**one.results, **followed})
                self._book.write(None, done.end(OperationState.SUCCEEDED, self._now_s()))
                del self._partial[one.id]


def _follows(epoch: int, there: bool, report: BoardReport | None) -> bool:
    if not there:
        return True
    return report is not None and (report.epoch or 0) >= epoch and not report.missing


def _result(there: bool, report: BoardReport | None) -> BoardResult:
    return BoardResult(ResultStatus.OK if there and report else ResultStatus.GONE)
