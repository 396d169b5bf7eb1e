"""Rules of drained boards, and their changes of the desired state. Pure.

A drained board takes no new requests. It stays a part of the cluster: it follows pauses, sleeps and
new versions, and its name stays drained over restarts of its replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from rkserve.control import state_changes
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired, undrain_command
from rkserve.core.errors import OperationConflict


def drain(desired: Desired, boards: Collection[str], *, move: bool) -> Desired:
    """Drain boards; with ``move`` their requests go elsewhere, otherwise they end where they are.

    The last call counts for boards that are drained already.
    """
    drained = {*desired.drained, *boards}
    moved = {*desired.moved, *boards} if move else {*desired.moved} - {*boards}
    return _with(desired, drained, moved)


def undrain(desired: Desired, boards: Collection[str]) -> Desired:
    """End the drain of boards; those that are not drained stay as they are."""
    return _with(desired, {*desired.drained} - {*boards}, {*desired.moved} - {*boards})


def _with(desired: Desired, drained: Collection[str], moved: Collection[str]) -> Desired:
    changed = replace(desired, drained=tuple(sorted(drained)), moved=tuple(sorted(moved)))
    return desired if changed == desired else state_changes.follow_up(changed)


def require_takers(
    desired: Desired, boards: Collection[str], reports: Iterable[BoardReport]
) -> None:
    """Raise ``OperationConflict`` if no other board can continue the requests of ``boards``.

    Another one is ready, awake and not drained; a paused one takes requests and keeps them.
    """
    known = list(reports)
    for model in sorted({one.model for one in known if one.board_id in boards}):
        others = [one for one in known if one.model == model and one.board_id not in boards]
        if any(_takes(desired, one) for one in others):
            continue
        drained = [one.board_id for one in others if one.board_id in desired.drained]
        also = f", or end another drain first: {undrain_command(model, drained)}" if drained else ""
        raise OperationConflict(
            f"No other board serves '{model}', so that its requests cannot be moved. Drain with "
            f"'mode': 'wait': they end where they are{also}."
        )


def _takes(desired: Desired, board: BoardReport) -> bool:
    target = desired.target(board.board_id, board.model)
    return board.state is BoardState.READY and target.level is None and not target.drained


def left_at(report: BoardReport | None, epoch: int) -> int | None:
    """Return the number of requests that a drained board still has; None if it is unknown.

    A report from before the drain says nothing: the board took requests after it.
    """
    if report is None or report.state is BoardState.LOST or (report.epoch or 0) < epoch:
        return None
    return report.running + report.queued + report.paused


def remaining(
    boards: Iterable[str], reports: Mapping[str, BoardReport], epoch: int
) -> dict[str, int | None]:
    """Return the boards that are not empty yet, with their requests as ``left_at`` does."""
    found = {board: left_at(reports.get(board), epoch) for board in boards}
    return {board: left for board, left in found.items() if left != 0}
