"""What may go on beside what, which states an operation has, and how calls are told apart."""

from __future__ import annotations

import pickle
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control.calls import OperationKind, OperationRequest
from rkserve.control.operations import (
    TRANSITIONS,
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationOutcome,
    OperationState,
    Phase,
    ResultStatus,
    conflict,
    deciding,
)
from rkserve.core.errors import OperationConflict, OperationTimeout, RkserveError
from tests.support.values.control_values import BOARDS, action, operations, recorded

K: TypeAlias = OperationKind
P: TypeAlias = Phase
S: TypeAlias = OperationState
LAW: dict[str, Any] = {"model": "m", "name": "law"}
MED: dict[str, Any] = {"model": "m", "name": "med"}
OTHER: dict[str, Any] = {"model": "n", "name": "law"}
CANARY: dict[str, Any] = {**LAW, "version": "v2", "strategy": "canary"}
ROLLING: dict[str, Any] = {**LAW, "version": "v2", "strategy": "rolling"}
ATOMIC: dict[str, Any] = {**LAW, "version": "v2", "strategy": "atomic"}


def going(kind: K, params: dict[str, Any], phase: P = P.ACCEPTED) -> ControlOperation:
    return recorded("op-1", kind, phase=phase, params=params)


CONFLICTS = [
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC), K.ADAPTER_ROLLOUT, MED, id="two rollouts of a model"
    ),
    pytest.param(going(K.ADAPTER_RETIRE, LAW), K.ADAPTER_ROLLOUT, LAW, id="rollout while retiring"),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC), K.ADAPTER_RETIRE, LAW, id="retiring while rolling out"
    ),
    pytest.param(going(K.ADAPTER_ROLLBACK, LAW), K.ADAPTER_ROLLBACK, LAW, id="two rollbacks"),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.STAGING),
        K.ADAPTER_ROLLBACK,
        LAW,
        id="rollback of what is staged",
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, CANARY, P.LOADING), K.ADAPTER_PROMOTE, LAW, id="promote too early"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, CANARY, P.OBSERVING),
        K.ADAPTER_ROLLBACK,
        MED,
        id="of another adapter",
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, CANARY, P.OBSERVING),
        K.ADAPTER_ROLLOUT,
        LAW,
        id="rollout into a canary",
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.STOPPING), K.PAUSE, {}, id="pause while boards are held"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.STOPPING),
        K.RESUME,
        {},
        id="resume while boards are held",
    ),
    pytest.param(going(K.ADAPTER_ROLLOUT, LAW, P.STOPPING), K.PAUSE, {}, id="atomic unless said"),
    pytest.param(
        going(K.ADAPTER_ROLLBACK, LAW, P.STOPPING), K.RESUME, {}, id="resume in a rollback"
    ),
    pytest.param(going(K.PAUSE, {}), K.RESUME, {"boards": ["b1"]}, id="resume while stopping"),
    pytest.param(
        going(K.CACHE_RESET, {"reset_running_requests": True}),
        K.RESUME,
        {},
        id="resume while what runs is stopped for a reset",
    ),
    pytest.param(
        going(K.ADAPTER_STAGE, ATOMIC), K.ADAPTER_STAGE, ATOMIC, id="the same staged twice"
    ),
    pytest.param(
        going(K.ADAPTER_STAGE, ATOMIC), K.ADAPTER_RETIRE, LAW, id="retire all while staging one"
    ),
    pytest.param(
        going(K.ADAPTER_RETIRE, LAW), K.ADAPTER_STAGE, ATOMIC, id="stage into what is retired"
    ),
]

NEIGHBOURS = [
    pytest.param(going(K.CACHE_RESET, {}), K.RESUME, {}, id="resume while caches are cleared"),
    pytest.param(
        going(K.ADAPTER_RETIRE, LAW, P.RELEASING), K.RESUME, {}, id="resume while engines renew"
    ),
    pytest.param(
        going(K.ADAPTER_RETIRE, LAW, P.STOPPING), K.PAUSE, {}, id="a retirement never holds"
    ),
    pytest.param(
        going(K.ADAPTER_PROMOTE, LAW, P.SWITCHING), K.PAUSE, {}, id="pause beside a promotion"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.RELEASING), K.RESUME, {}, id="resume after the commit"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLBACK, LAW, P.UNDOING), K.PAUSE, {}, id="pause while it is taken back"
    ),
    pytest.param(going(K.ADAPTER_ROLLOUT, ATOMIC), K.ADAPTER_ROLLOUT, OTHER, id="of two models"),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, CANARY, P.OBSERVING), K.ADAPTER_PROMOTE, LAW, id="promote a canary"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, CANARY, P.OBSERVING),
        K.ADAPTER_ROLLBACK,
        LAW,
        id="rollback of a canary",
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.STAGING), K.PAUSE, {}, id="pause while staging"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ROLLING, P.SWITCHING), K.PAUSE, {}, id="pause while rolling"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.STOPPING),
        K.PAUSE,
        {"models": ["n"]},
        id="pause of another model",
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC, P.STOPPING),
        K.PAUSE,
        {"adapter": "med"},
        id="pause of another adapter",
    ),
    pytest.param(going(K.ADAPTER_ROLLOUT, ATOMIC, P.STOPPING), K.ABORT, {}, id="abort always"),
    pytest.param(
        going(K.PAUSE, {"boards": ["b1"]}), K.RESUME, {"boards": ["b2"]}, id="resume of others"
    ),
    pytest.param(
        going(K.PAUSE, {"models": ["m"]}), K.RESUME, {"models": ["n"]}, id="of another model"
    ),
    pytest.param(going(K.PAUSE, {}), K.PAUSE, {}, id="two pauses"),
    pytest.param(going(K.PAUSE, {}), K.ADAPTER_ROLLOUT, LAW, id="rollout under a pause"),
    pytest.param(
        going(K.ADAPTER_STAGE, ATOMIC), K.ADAPTER_STAGE, {**LAW, "version": "v3"}, id="two versions"
    ),
    pytest.param(
        going(K.ADAPTER_ROLLOUT, ATOMIC),
        K.ADAPTER_STAGE,
        {**LAW, "version": "v3"},
        id="stage beside a rollout",
    ),
    pytest.param(going(K.LABEL, LAW), K.LABEL, LAW, id="two labels"),
]


@pytest.mark.parametrize(("one", "kind", "params"), CONFLICTS)
def test_operations_that_exclude_each_other(
    one: ControlOperation, kind: K, params: dict[str, Any]
) -> None:
    why = conflict([one], action(kind, params))
    assert why is not None
    assert "op-1" in why
    assert one.kind.value in why
    assert conflict([one.end(S.FAILED, 0.0)], action(kind, params)) is None


@pytest.mark.parametrize(("one", "kind", "params"), NEIGHBOURS)
def test_operations_that_may_run_concurrently(
    one: ControlOperation, kind: K, params: dict[str, Any]
) -> None:
    assert conflict([one], action(kind, params)) is None


def test_an_observed_canary_receives_the_decision() -> None:
    observed = going(K.ADAPTER_ROLLOUT, CANARY, P.OBSERVING)
    assert deciding([observed], action(K.ADAPTER_PROMOTE, LAW)) is observed
    assert deciding([observed], action(K.ADAPTER_ROLLBACK, LAW)) is observed
    assert deciding([observed], action(K.ADAPTER_ROLLBACK, MED)) is None
    assert deciding([observed], action(K.ADAPTER_RETIRE, LAW)) is None
    assert deciding([going(K.ADAPTER_ROLLOUT, CANARY)], action(K.ADAPTER_PROMOTE, LAW)) is None


@pytest.mark.parametrize("before", S, ids=lambda state: state.value)
@pytest.mark.parametrize("after", S, ids=lambda state: f"to {state.value}")
def test_an_operation_takes_the_listed_ways_and_no_other(before: S, after: S) -> None:
    one = recorded("op", K.PAUSE, state=before)
    if (before, after) in TRANSITIONS:
        ended = one.end(after, 5.0)
        assert (ended.state, ended.phase, ended.finished_s) == (after, P.DONE, 5.0)
    else:
        with pytest.raises(OperationConflict, match=before.value):
            one.end(after, 5.0)


def test_an_ended_operation_has_no_next_phase() -> None:
    one = recorded("op", K.PAUSE).at(P.STOPPING, epoch=4).at(P.UNDOING)
    assert (one.phase, one.epoch) == (P.UNDOING, 4)
    with pytest.raises(OperationConflict, match="is over"):
        one.end(S.UNDONE, 1.0).at(P.STOPPING)


def test_boards_that_are_gone_count_as_done() -> None:
    one = recorded("op", K.PAUSE)
    for board, status in zip(("b0", *BOARDS), ResultStatus, strict=True):
        one = one.with_result(board, BoardOutcome(status, 1.5))
    assert [board for board, result in one.results.items() if result.good] == ["b1", "b2"]
    assert one.succeeded == 2
    later = one.with_result("b3", BoardOutcome(ResultStatus.OK))
    assert (later.succeeded, len(later.results)) == (3, 5)
    assert later.spent("stopping", 4.5).phases == (("stopping", 4.5),)


@pytest.mark.parametrize(
    ("state", "error", "status"),
    [
        pytest.param(S.RUNNING, None, 202, id="it goes on"),
        pytest.param(S.SUCCEEDED, None, 200, id="all of it"),
        pytest.param(S.PARTIAL, None, 207, id="some of it"),
        pytest.param(S.UNDONE, OperationTimeout("late"), 504, id="undone"),
        pytest.param(S.FAILED, OperationConflict("no"), 409, id="failed"),
    ],
)
def test_an_operation_has_a_status(state: S, error: RkserveError | None, status: int) -> None:
    said = None if error is None else ControlError.of(error)
    assert recorded("op", K.PAUSE, state=state, error=said).status == status


@settings(deadline=None)
@given(operations, st.booleans())
def test_calls_and_outcomes_cross_processes(one: ControlOperation, applied: bool) -> None:
    outcome = OperationOutcome(one.status, one, applied)
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    call = OperationRequest(one.action, one.who, one.key)
    back = pickle.loads(pickle.dumps(call))
    assert (back, back.fingerprint) == (call, call.fingerprint)
    assert hash(back) == hash(call)
