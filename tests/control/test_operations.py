"""What may go on beside what, which states an operation has, and how calls are told apart."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import params as read
from rkserve.control.calls import OperationOutcome, OperationRequest
from rkserve.control.operations import (
    TRANSITIONS,
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationKind,
    OperationState,
    Phase,
    ResultStatus,
    conflict,
    deciding,
)
from rkserve.control.params import Params
from rkserve.core.desired_state import PauseMode, Scope
from rkserve.core.errors import OperationConflict, OperationTimeout, RequestError, RkserveError
from tests.support.values.control_values import BOARDS, operations

K: TypeAlias = OperationKind
P: TypeAlias = Phase
S: TypeAlias = OperationState
LAW: Params = {"model": "m", "name": "law"}
MED: Params = {"model": "m", "name": "med"}
OTHER: Params = {"model": "n", "name": "law"}
CANARY: Params = {**LAW, "version": "v2", "strategy": "canary"}
ROLLING: Params = {**LAW, "version": "v2", "strategy": "rolling"}
ATOMIC: Params = {**LAW, "version": "v2", "strategy": "atomic"}


def going(kind: K, params: Params, phase: P = P.ACCEPTED) -> ControlOperation:
    return ControlOperation("op-1", kind, phase=phase, params=params)


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
        going(K.ADAPTER_ROLLOUT, {**LAW, "strategy": None}, P.STOPPING),
        K.RESUME,
        {},
        id="atomic where null is said",
    ),
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
def test_who_must_not_meet_whom(one: ControlOperation, kind: K, params: Params) -> None:
    why = conflict([one], kind, params)
    assert why is not None
    assert "op-1" in why
    assert one.kind.value in why
    assert conflict([one.end(S.FAILED, 0.0)], kind, params) is None


@pytest.mark.parametrize(("one", "kind", "params"), NEIGHBOURS)
def test_who_may_go_on_beside_whom(one: ControlOperation, kind: K, params: Params) -> None:
    assert conflict([one], kind, params) is None


def test_a_canary_that_is_observed_is_told_the_decision() -> None:
    observed = going(K.ADAPTER_ROLLOUT, CANARY, P.OBSERVING)
    assert deciding([observed], K.ADAPTER_PROMOTE, LAW) is observed
    assert deciding([observed], K.ADAPTER_ROLLBACK, LAW) is observed
    assert deciding([observed], K.ADAPTER_ROLLBACK, MED) is None
    assert deciding([observed], K.ADAPTER_RETIRE, LAW) is None
    assert deciding([going(K.ADAPTER_ROLLOUT, CANARY)], K.ADAPTER_PROMOTE, LAW) is None


@pytest.mark.parametrize("before", S, ids=lambda state: state.value)
@pytest.mark.parametrize("after", S, ids=lambda state: f"to {state.value}")
def test_an_operation_takes_the_listed_ways_and_no_other(before: S, after: S) -> None:
    one = ControlOperation("op", K.PAUSE, state=before)
    if (before, after) in TRANSITIONS:
        ended = one.end(after, 5.0)
        assert (ended.state, ended.phase, ended.finished_s) == (after, P.DONE, 5.0)
    else:
        with pytest.raises(OperationConflict, match=before.value):
            one.end(after, 5.0)


def test_what_is_over_has_no_next_phase() -> None:
    one = ControlOperation("op", K.PAUSE).at(P.STOPPING, epoch=4).at(P.UNDOING)
    assert (one.phase, one.epoch) == (P.UNDOING, 4)
    with pytest.raises(OperationConflict, match="is over"):
        one.end(S.UNDONE, 1.0).at(P.STOPPING)


def test_boards_that_are_gone_count_as_done() -> None:
    one = ControlOperation("op", K.PAUSE)
    for board, status in zip(("b0", *BOARDS), ResultStatus, strict=True):
        one = one.heard(board, BoardOutcome(status, 1.5))
    assert [board for board, result in one.results.items() if result.good] == ["b1", "b2"]
    assert one.succeeded == 2
    later = one.heard("b3", BoardOutcome(ResultStatus.OK))
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
def test_an_operation_says_its_status(state: S, error: RkserveError | None, status: int) -> None:
    said = None if error is None else ControlError.of(error)
    assert ControlOperation("op", K.PAUSE, state=state, error=said).status == status


@settings(deadline=None)
@given(operations, st.booleans())
def test_calls_and_outcomes_cross_processes(one: ControlOperation, applied: bool) -> None:
    outcome = OperationOutcome(one.status, one, applied)
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    call = OperationRequest(one.kind, one.params, one.who, one.key)
    back = pickle.loads(pickle.dumps(call))
    assert (back, back.fingerprint) == (call, call.fingerprint)
    assert hash(back) == hash(call)


def test_a_call_is_known_by_what_it_asks_for() -> None:
    call = OperationRequest(
        K.PAUSE, {"mode": "keep", "models": ["m"]}, who="ann", key="k", timeout_s=5
    )
    same = replace(call, params={"models": ("m",), "mode": "keep"}, who="bob", timeout_s=9)
    assert same.fingerprint == call.fingerprint
    for other in (
        replace(call, kind=K.RESUME),
        replace(call, params={"mode": "keep", "models": ["n"]}),
        replace(call, expected_epoch=3),
    ):
        assert other.fingerprint != call.fingerprint


GIVEN: Params = {"text": "a", "list": ["b", "a", "b"], "number": 2.5, "whole": 3, "flag": False}


def test_parameters_are_read() -> None:
    assert read.text(GIVEN, "text") == "a"
    assert read.text(GIVEN, "none", "z") == "z"
    assert read.optional_text(GIVEN, "none") is None
    assert read.texts(GIVEN, "list") == ("b", "a", "b")
    assert read.texts({"list": None}, "list") == ()
    assert read.number(GIVEN, "number") == 2.5
    assert read.number(GIVEN, "none", 1.0) == 1.0
    assert read.whole(GIVEN, "whole", low=3) == 3
    assert read.flag(GIVEN, "flag", default=True) is False
    assert read.flag(GIVEN, "none", default=True) is True
    assert read.choice({"mode": "wait"}, "mode", PauseMode, PauseMode.KEEP) is PauseMode.WAIT
    assert read.choice({}, "mode", PauseMode, PauseMode.KEEP) is PauseMode.KEEP
    assert read.scope({"models": ["m", "m"], "boards": ["b", "a"]}) == Scope(("m",), ("a", "b"))
    assert read.scope({}) == Scope()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("text", None, id="no text"),
        pytest.param("text", "", id="an empty text"),
        pytest.param("text", 3, id="a number for a text"),
        pytest.param("list", "ab", id="a text for a list"),
        pytest.param("list", ["a", ""], id="an empty one in a list"),
        pytest.param("list", ["a", 1], id="a number in a list"),
        pytest.param("list", {"a": 1}, id="an object for a list"),
        pytest.param("number", None, id="no number"),
        pytest.param("number", "1", id="a text for a number"),
        pytest.param("number", True, id="true for a number"),
        pytest.param("number", float("nan"), id="not a number"),
        pytest.param("number", -1, id="a number too small"),
        pytest.param("number", 11, id="a number too large"),
        pytest.param("whole", 1.0, id="a point in a whole number"),
        pytest.param("whole", False, id="false for a whole number"),
        pytest.param("whole", 0, id="a whole number too small"),
        pytest.param("flag", 1, id="1 for true"),
        pytest.param("choice", "sleep", id="none of them"),
        pytest.param("choice", ["keep"], id="a list of one"),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: object) -> None:
    given: Params = {name: value}  # type: ignore[dict-item]
    readers: dict[str, Callable[[], object]] = {
        "text": lambda: read.text(given, name),
        "list": lambda: read.texts(given, name),
        "number": lambda: read.number(given, name, low=0, high=10),
        "whole": lambda: read.whole(given, name, low=1),
        "flag": lambda: read.flag(given, name, default=True),
        "choice": lambda: read.choice(given, name, PauseMode, PauseMode.KEEP),
    }
    with pytest.raises(RequestError, match=name) as failure:
        readers[name]()
    assert failure.value.param == name
