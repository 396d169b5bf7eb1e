"""Actions state the parameters of every kind of operation, and a call is known by them."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from pydantic import ValidationError

from rkserve.control.calls import (
    Action,
    AdapterStageAction,
    OperationKind,
    OperationRequest,
    PauseAction,
    RebaseAction,
    ResumeAction,
    WeightUpdateAction,
)
from rkserve.core.desired_state import BaseVersion, PauseMode, Scope, SleepLevel
from tests.support.values.control_values import ACTIONS, action, actions, read_action, version

K: TypeAlias = OperationKind


def test_every_kind_has_one_action() -> None:
    assert set(ACTIONS) == set(K)
    assert all(action(kind).kind is kind for kind in K)


@given(actions)
def test_an_action_comes_back_from_its_parameters(one: Action) -> None:
    back = read_action(one.kind, one.params)
    assert (back, back.params) == (one, one.params)
    assert pickle.loads(pickle.dumps(one)).params == one.params


def test_parameters_are_shown_as_they_were_given() -> None:
    asked = PauseAction(models=("m",), mode=PauseMode.WAIT, lease_s=None)
    assert asked.params == {"models": ["m"], "mode": "wait", "lease_s": None}
    assert asked == PauseAction(models=("m",), mode=PauseMode.WAIT)


def test_a_scope_has_each_name_once_and_in_order() -> None:
    asked = read_action(K.PAUSE, {"models": ["m", "m"], "boards": ["b", "a"]})
    assert asked.scope == Scope(("m",), ("a", "b"))
    assert ResumeAction().scope == Scope()


def test_levels_are_read() -> None:
    levels = [read_action(K.SLEEP, {"level": number}).level for number in range(3)]
    assert levels == list(SleepLevel)


WRONG = [
    (K.PAUSE, "mode", "sleep"),
    (K.PAUSE, "mode", ["keep"]),
    (K.PAUSE, "models", "ab"),
    (K.PAUSE, "models", ["a", ""]),
    (K.PAUSE, "models", ["a", 1]),
    (K.PAUSE, "models", {"a": 1}),
    (K.PAUSE, "adapter", ""),
    (K.PAUSE, "lease_s", "1"),
    (K.PAUSE, "lease_s", True),
    (K.PAUSE, "lease_s", float("nan")),
    (K.PAUSE, "clear_cache", 1),
    (K.SLEEP, "level", 3),
    (K.SLEEP, "level", -1),
    (K.SLEEP, "level", 1.0),
    (K.SLEEP, "level", True),
    (K.SLEEP, "level", "1"),
    (K.SLEEP, "level", [1]),
    (K.WAKE, "tags", ["engine"]),
    (K.WEIGHT_UPDATE, "step", -1),
    (K.ADAPTER_ROLLOUT, "strategy", "blue"),
    (K.ADAPTER_ROLLOUT, "strategy", None),
    (K.ADAPTER_ROLLOUT, "in_flight", "drop"),
    (K.ADAPTER_ROLLOUT, "weight", 1.5),
    (K.ADAPTER_ROLLOUT, "weight", -1),
    (K.ADAPTER_ROLLOUT, "weight", "half"),
    (K.ADAPTER_ROLLOUT, "max_unavailable", 0),
    (K.ADAPTER_ROLLOUT, "max_unavailable", 1.5),
    (K.ADAPTER_ROLLOUT, "max_unavailable", 1.0),
    (K.ADAPTER_ROLLOUT, "max_unavailable", True),
    (K.ADAPTER_ROLLOUT, "observe_s", -1),
    (K.ADAPTER_ROLLOUT, "observe_s", float("inf")),
    (K.ADAPTER_ROLLOUT, "auto", "yes"),
    (K.ADAPTER_ROLLOUT, "name", ""),
    (K.ADAPTER_ROLLOUT, "name", 3),
    (K.ADAPTER_ROLLOUT, "model", None),
    (K.LABEL, "colour", "red"),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"), WRONG, ids=lambda one: repr(getattr(one, "value", one))
)
def test_a_wrong_parameter_is_named(kind: OperationKind, name: str, value: object) -> None:
    right = action(kind).params
    with pytest.raises(ValidationError) as failure:
        read_action(kind, {**right, name: value})
    assert [error["loc"][0] for error in failure.value.errors()] == [name]


@pytest.mark.parametrize("kind", K, ids=lambda kind: kind.value)
def test_a_required_parameter_must_be_there(kind: OperationKind) -> None:
    required = [name for name, one in ACTIONS[kind].model_fields.items() if one.is_required()]
    right = action(kind).params
    for name in required:
        with pytest.raises(ValidationError, match=name):
            read_action(kind, {key: one for key, one in right.items() if key != name})


def test_actions_name_what_they_bring_to_boards() -> None:
    v1 = version("law", "v1", scale=0.5)
    ref = v1.ref
    staged = AdapterStageAction(
        model="m",
        name=ref.name,
        version=ref.version,
        digest=ref.digest,
        scale=ref.scale,
        size_bytes=v1.size_bytes,
    )
    assert staged.artifact == v1
    content: dict[str, Any] = {"model": "m", "digest": "a" * 64, "size_bytes": 5}
    update = WeightUpdateAction(step=1, version="v2", **content)
    assert update.artifact == BaseVersion("m", "v2", "a" * 64, 5)
    assert RebaseAction(label="x", **content).artifact == BaseVersion("m", "x", "a" * 64, 5)
    assert RebaseAction(**content).artifact == BaseVersion("m", "a" * 12, "a" * 64, 5)
    assert RebaseAction(model="m").artifact is None
    assert WeightUpdateAction(model="m", step=1, name="law", version="v1").artifact is None


def test_a_call_is_known_by_its_action() -> None:
    asked = PauseAction(mode=PauseMode.KEEP, models=("m",))
    call = OperationRequest(asked, who="ann", key="k", timeout_s=5)
    same = replace(call, action=PauseAction(models=("m",), mode=PauseMode.KEEP), who="bob")
    assert same.fingerprint == call.fingerprint
    for other in (
        replace(call, action=ResumeAction(models=("m",))),
        replace(call, action=PauseAction(mode=PauseMode.KEEP, models=("n",))),
        replace(call, expected_epoch=3),
    ):
        assert other.fingerprint != call.fingerprint


def test_a_fingerprint_is_that_of_earlier_releases() -> None:
    text = '{"epoch":null,"kind":"pause","params":{"lease_s":30.0,"models":["m"]}}'
    call = OperationRequest(PauseAction(models=("m",), lease_s=30))
    assert call.fingerprint == hashlib.sha256(text.encode()).hexdigest()
