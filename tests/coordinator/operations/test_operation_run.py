"""The record of an operation: its time limit, the boards' answers, and its error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.control.calls import OperationKind, OperationRequest, PauseAction
from rkserve.control.operations import BoardOutcome, OperationState, Phase, ResultStatus
from rkserve.coordinator.operations.operation_run import OperationContext, OperationRun, shortfall
from rkserve.core.desired_state import Desired, Scope
from rkserve.core.errors import BoardNotFound, ModelNotFound
from tests.support.cluster.fake_cluster import MODEL, Control, controlled
from tests.support.values.control_values import recorded

pytestmark = pytest.mark.virtual_time

OK, SILENT = BoardOutcome(ResultStatus.OK), BoardOutcome(ResultStatus.SILENT)


def run_of(it: Control, timeout_s: float | None = None) -> OperationRun:
    context: OperationContext = it.it._context
    call = OperationRequest(PauseAction(), timeout_s=timeout_s)
    return OperationRun(context, recorded("op-1", OperationKind.PAUSE), call)


async def test_a_time_limit_grows_unless_the_caller_set_it(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        own, given = run_of(it), run_of(it, 5.0)
        before_s = own.limit_s
        own.allow(30.0)
        given.allow(30.0)
        assert (own.limit_s, given.limit_s) == (before_s + 30.0, 5.0)
        assert given.left_s == pytest.approx(5.0, abs=0.5)
        given.rest(60.0)
        assert (given.limit_s, given.left_s > 60.0) == (5.0, True)
        given.rest(-1000.0)
        assert given.left_s == 0.001


async def test_answers_of_a_board_add_up_and_waiting_boards_are_forgotten(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        run = run_of(it)
        run.show({"a": BoardOutcome(ResultStatus.WAITING), "b": OK})
        run.forget_waiting()
        assert set(run.operation.results) == {"b"}
        run.record({"b": replace(SILENT, details={"stopped": 2})})
        run.record({"b": replace(OK, details={"kept": 1})})
        assert run.operation.results["b"] == replace(OK, details={"stopped": 2, "kept": 1})


async def test_each_step_is_in_the_ledger_and_the_end_in_the_audit_log(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        run = run_of(it)
        assert not run.begun
        run.begin(Phase.STOPPING, Desired(1))
        assert run.begun
        with run.timed("stopping"):
            pass
        run.end(OperationState.SUCCEEDED)
        assert (run.outcome.status, run.operation.epoch) == (200, 1)
        assert it.it.operation("op-1") == run.operation
        assert [name for name, _ in run.operation.phases] == ["stopping"]
        assert it.it.audit(1)[0].operation == "op-1"


async def test_an_unknown_part_of_the_cluster_is_refused(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.it._context.check(Scope((MODEL,), ("a",)))
        with pytest.raises(ModelNotFound):
            it.it._context.check(Scope(("none",)))
        with pytest.raises(BoardNotFound):
            it.it._context.check(Scope((), ("z",)))


def test_a_shortfall_names_the_silent_boards_or_the_first_refusal() -> None:
    one = shortfall({"a": OK, "b": SILENT}, "nothing was changed", 2.5)
    assert (one.status, one.code) == (504, "operation_timeout")
    assert one.message == "Board b did not answer within 2.5 s; nothing was changed."
    assert shortfall({"c": SILENT, "b": SILENT}, "so", 2).message.startswith("Boards b, c did")
    refused = BoardOutcome(ResultStatus.FAILED, error="stage_failed", message="No space.")
    failed = shortfall({"b": refused}, "nothing was changed", 2.5)
    assert (failed.status, failed.code) == (503, "stage_failed")
    assert failed.message == "Board b: No space. So nothing was changed."
