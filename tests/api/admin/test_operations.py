"""Operations as JSON: results by board, phases, and answers of calls that change the cluster."""

from __future__ import annotations

from rkserve.api.admin.operations import changed, operation_entry, operations_list, total_of
from rkserve.control.calls import OperationKind
from rkserve.control.operations import BoardOutcome, ControlError, OperationState, ResultStatus
from tests.support.values.control_values import recorded

PAUSED = recorded(
    "op-1",
    OperationKind.PAUSE,
    OperationState.PARTIAL,
    results={
        "b": BoardOutcome(ResultStatus.FAILED, 2.0, error="board_failed", message="It broke."),
        "a": BoardOutcome(ResultStatus.OK, 1.23456, details={"stopped": 3}),
        "c": BoardOutcome(ResultStatus.WAITING),
    },
    phases=(("stopping", 1.0), ("releasing", 2.0), ("stopping", 0.5)),
)


def test_a_record_tells_each_board_and_each_phase() -> None:
    told = operation_entry(PAUSED)
    assert (told["id"], told["kind"], told["state"]) == ("op-1", "pause", "partial")
    assert (told["total"], told["succeeded"]) == (3, 1)
    assert told["results"] == {"a": {"stopped": 3, "status": "paused", "latency_ms": 1.235}}
    assert told["failed"] == [
        {"board": "b", "error": "board_failed", "message": "It broke.", "latency_ms": 2.0}
    ]
    assert told["phases"] == {"stopping": 1.5, "releasing": 2.0}
    assert told["error"] is None
    assert operations_list([PAUSED])["data"] == [told]
    assert total_of(PAUSED, "stopped") == 3


def test_a_change_has_its_own_part_or_an_error_beside_the_facts() -> None:
    done = changed({"status": "paused"}, PAUSED, applied=True)
    assert (done["status"], done["operation_id"], done["applied"]) == ("paused", "op-1", True)
    failed = recorded(
        "op-2",
        OperationKind.PAUSE,
        OperationState.UNDONE,
        error=ControlError(409, "state_conflict", "Not now."),
    )
    told = changed({"status": "paused"}, failed, applied=False)
    assert told["error"] == {
        "message": "Not now.",
        "type": "invalid_request_error",
        "param": None,
        "code": "state_conflict",
    }
    assert "status" not in told
    entry = operation_entry(failed)
    assert entry["error"] == {"status": 409, "code": "state_conflict", "message": "Not now."}
