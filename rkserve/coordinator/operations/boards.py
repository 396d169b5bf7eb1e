"""Operations on single boards: drain and its end, restart of the engine, measurement of the speed.

Each takes its ``OperationRun`` and awaits nothing before ``begin``; see ``pause``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from rkserve.control import drain as changes
from rkserve.control.calls import (
    BoardAction,
    DrainAction,
    DrainMode,
    MeasureAction,
    OperationKind,
    RestartAction,
    UndrainAction,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    OperationState,
    Phase,
    ResultStatus,
)
from rkserve.coordinator.operations.operation_run import Handler, OperationContext, OperationRun
from rkserve.coordinator.operations.pause import halt, spread
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import Probe, Scope
from rkserve.core.errors import BoardFailed, BoardNotFound, OperationConflict
from rkserve.fleet.board_table import BoardAddress

# A run that has begun within a measurement's time may take so much longer, and so may the one
# before it, which the caller waits for.
LAST_RUN_S = 60.0


async def drain(run: OperationRun, asked: DrainAction) -> None:
    """Send boards no new requests; it succeeds when they have none left.

    The drain stays whatever becomes of the operation: boards with requests make it partial.
    """
    context, scope = run.context, asked.scope
    context.check(scope)
    boards = [one.board_id for one in context.roster.addresses(scope)]
    move = asked.mode is DrainMode.MOVE
    before = context.state.desired
    if move:
        changes.require_takers(before, boards, context.roster.reports())
    desired = changes.drain(before, boards, move=move)
    run.applied = desired is not before
    run.begin(Phase.DRAINING, desired)
    await halt(run, Scope(boards=tuple(boards)), Phase.DRAINING)
    with run.timed(Phase.DRAINING.value):
        left = await _emptied(run, boards, desired.epoch)
    if not set(boards) & {*context.state.desired.drained}:
        message = "The boards were undrained before they had no requests left."
        run.end(OperationState.UNDONE, ControlError.of(OperationConflict(message)))
        return
    run.record({board: _still_has(count) for board, count in left.items()})
    behind = any(not one.good for one in run.operation.results.values())
    run.end(OperationState.PARTIAL if behind else OperationState.SUCCEEDED)


async def _emptied(run: OperationRun, boards: list[str], epoch: int) -> dict[str, int | None]:
    """Wait until the boards have no requests, and return those that still have some then."""
    roster, state = run.context.roster, run.context.state
    deadline_s = time.monotonic() + run.left_s
    while True:
        there = {one.board_id for one in roster.addresses()}
        waited = [one for one in boards if one in there and one in state.desired.drained]
        reports = {one.board_id: one for one in roster.reports()}
        left = changes.remaining(waited, reports, epoch)
        pause_s = min(run.context.config.report_s, deadline_s - time.monotonic())
        if not left or pause_s <= 0:
            return left
        waiting = dict.fromkeys(left, _WAITS)
        state.show(replace(run.operation, results={**run.operation.results, **waiting}))
        await asyncio.sleep(pause_s)


_WAITS = BoardOutcome(ResultStatus.WAITING)


def _still_has(count: int | None) -> BoardOutcome:
    if count is None:
        return BoardOutcome(ResultStatus.SILENT, message="It has not reported since.")
    requests = "1 request" if count == 1 else f"{count} requests"
    message = f"It still has {requests}; it takes no new ones."
    return BoardOutcome(
        ResultStatus.FAILED, error="board_busy", message=message, details={"requests": count}
    )


async def undrain(run: OperationRun, asked: UndrainAction) -> None:
    """Let boards take requests again; those that do not answer follow later."""
    context, scope = run.context, asked.scope
    # A drained board may be one that is gone.
    context.check(Scope(models=scope.models))
    before = context.state.desired
    boards = scope.boards or before.drained
    if scope.models:
        there = {one.board_id for one in context.roster.addresses(Scope(models=scope.models))}
        boards = tuple(one for one in boards if one in there)
    desired = changes.undrain(before, boards)
    run.applied = desired is not before
    run.begin(Phase.RELEASING, desired)
    await spread(run, Scope(boards=boards) if boards else scope)


async def restart(run: OperationRun, asked: RestartAction) -> None:
    """Replace a board's engine; the answer comes when the model is loaded again."""
    run.allow(run.context.config.load_timeout_s)
    await _errand(run, asked, Phase.RESTARTING, "restart_engine", "an operator restarts its engine")


async def measure(run: OperationRun, asked: MeasureAction) -> None:
    """Measure a board's speed; the figures are in the board's result."""
    _require_awake(run.context, asked.board)
    run.allow(asked.seconds + LAST_RUN_S)
    await _errand(run, asked, Phase.MEASURING, "measure", asked.seconds, asked.wait)


async def _errand(
    run: OperationRun, asked: BoardAction, phase: Phase, method: str, *args: object
) -> None:
    """Make one call to one board, once. Raises the board's error; the operation has failed then."""
    address = _address(run.context, asked.board)
    run.begin(phase)
    began_s = time.monotonic()
    with run.timed(phase.value):
        answer = await run.context.roster.ask_one(address, method, *args, timeout_s=run.left_s)
    details = _figures(answer) if isinstance(answer, Probe) else {}
    took_ms = (time.monotonic() - began_s) * 1e3
    run.record({asked.board: BoardOutcome(ResultStatus.OK, took_ms, details=details)})
    run.end(OperationState.SUCCEEDED)


def _address(context: OperationContext, board: str) -> BoardAddress:
    """Return a board's address. Raises ``BoardNotFound``, or ``BoardFailed`` for a lost one."""
    address = context.roster.address(board)
    if address is not None:
        return address
    if any(one.board_id == board for one in context.roster.reports()):
        raise BoardFailed(board, "its replica is gone, and another one has not reported yet")
    raise BoardNotFound(board[:80])


def _require_awake(context: OperationContext, board: str) -> None:
    report = next((one for one in context.roster.reports() if one.board_id == board), None)
    if report is not None and report.state is BoardState.ASLEEP:
        raise OperationConflict(f"Board {board} is asleep; wake it, and measure then.")


def _figures(found: Probe) -> dict[str, float | int]:
    return {
        "prefill_tokens_per_s": round(found.prefill_tokens_per_s, 2),
        "decode_tokens_per_s": round(found.decode_tokens_per_s, 2),
        "tokens": found.tokens,
    }


HANDLERS: dict[OperationKind, Handler] = {
    OperationKind.DRAIN: drain,
    OperationKind.UNDRAIN: undrain,
    OperationKind.RESTART: restart,
    OperationKind.MEASURE: measure,
}
