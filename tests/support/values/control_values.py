"""Values of the control plane for its tests: a small world, so that random changes meet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, get_args

from hypothesis import strategies as st
from pydantic import JsonValue

from rkserve.control.calls import (
    Action,
    AnyAction,
    DrainMode,
    OperationKind,
    ServingAction,
    Strategy,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationState,
    Phase,
    ResultStatus,
)
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    AdapterVersions,
    BaseVersion,
    BaseWeightsChange,
    Desired,
    InFlight,
    PauseMode,
    Scope,
    SleepLevel,
    Weights,
)
from rkserve.core.messages import AdapterRef

MODELS = ("small", "large")
NAMES = ("law", "med")
BOARDS = ("b1", "b2", "b3", "b4")
SESSIONS = tuple(f"session-{n}" for n in range(8))


# The class of each kind's action, the kinds that change what a model serves, and values for the
# parameters that an action must have: by name, or by type where any value will do.
ACTIONS: dict[OperationKind, type[Action]] = {
    one.model_fields["kind"].default: one for one in get_args(get_args(AnyAction)[0])
}
SERVING = frozenset(kind for kind, one in ACTIONS.items() if issubclass(one, ServingAction))
SAMPLE: dict[str, JsonValue] = {
    "model": "m",
    "name": "law",
    "version": "v1",
    "digest": "d" * 64,
}
SAMPLE_OF_TYPE: dict[Any, JsonValue] = {str: "a text", int: 7, float: 9.5, bool: True}


def read_action(kind: OperationKind, params: Mapping[str, Any]) -> Any:
    """The action of JSON parameters. Raises pydantic's ``ValidationError``."""
    return ACTIONS[kind].model_validate_json(json.dumps(params))


def action(kind: OperationKind, params: Mapping[str, Any] | None = None) -> Any:
    """An action of the parameters that its kind has; others that it must have are a sample's."""
    given, known = {**(params or {})}, ACTIONS[kind].model_fields
    if kind is OperationKind.DRAIN and given.get("mode") not in {one.value for one in DrainMode}:
        given.pop("mode", None)  # a pause's
    required = {
        name: SAMPLE.get(name) or SAMPLE_OF_TYPE[one.annotation]
        for name, one in known.items()
        if one.is_required()
    }
    return read_action(kind, {**required, **{name: given[name] for name in given if name in known}})


def recorded(
    name: str,
    kind: OperationKind,
    state: OperationState = OperationState.RUNNING,
    *,
    params: Mapping[str, Any] | None = None,
    **rest: Any,
) -> ControlOperation:
    """The record of an operation with such parameters."""
    return ControlOperation(name, action(kind, params), state, **rest)


def version(name: str, label: str, content: str = "", scale: float = 1.0) -> AdapterVersion:
    """An adapter version; another ``content`` is another file under the same names."""
    digest = hashlib.sha256(f"{name}/{label}/{content}".encode()).hexdigest()
    return AdapterVersion(AdapterRef(name, label, digest, scale), 1000 + len(content))


models = st.sampled_from(MODELS)
names = st.sampled_from(NAMES)
labels = st.sampled_from(("v1", "v2", "v3", "v4", "v5"))
contents = st.sampled_from(("", "", "", "other"))
versions = st.builds(version, names, labels, contents)
some_boards = st.lists(st.sampled_from(BOARDS), unique=True, max_size=3).map(tuple)
scopes = st.builds(
    Scope,
    st.lists(models, unique=True, max_size=2).map(tuple),
    some_boards,
    st.none() | names,
)
times = st.integers(0, 40).map(float)
pauses = st.builds(
    ActivePause,
    st.sampled_from(tuple(f"op-{n}" for n in range(6))),
    scopes,
    st.sampled_from(PauseMode),
    st.booleans(),
    times,
    st.none() | times,
    st.none() | st.sampled_from(SleepLevel),
    st.booleans(),
)
lines = st.builds(
    AdapterVersions,
    models,
    names,
    st.none() | versions,
    st.none() | versions,
    st.none() | versions,
    st.lists(versions, max_size=3).map(tuple),
    some_boards,
    st.floats(0, 1),
    st.sampled_from(InFlight),
    st.integers(0, 9),
    st.lists(st.sampled_from(("v1", "v2", "v3")), max_size=2, unique=True).map(tuple),
)
bases = st.none() | st.builds(
    BaseVersion, models, labels, st.sampled_from(("a" * 64, "b" * 64)), st.integers(1, 1 << 40)
)
rebases = st.none() | st.builds(BaseWeightsChange, bases, labels, some_boards, st.booleans())
weights = st.builds(
    Weights,
    models,
    st.text(min_size=1, max_size=5),
    st.none() | st.integers(),
    bases,
    rebases,
    st.sampled_from(InFlight),
)
desires = st.builds(
    Desired,
    st.integers(0, 1 << 40),
    st.lists(pauses, max_size=4).map(tuple),
    st.lists(lines, max_size=3, unique_by=lambda one: (one.model, one.name)).map(tuple),
    st.lists(weights, max_size=2).map(tuple),
    drained=st.lists(st.sampled_from(BOARDS), unique=True).map(sorted).map(tuple),
)
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
results = st.builds(
    BoardOutcome,
    st.sampled_from(ResultStatus),
    st.floats(0, 1e9),
    st.text(max_size=5),
    st.text(max_size=5),
    objects,
)
actions = st.builds(
    action,
    st.sampled_from(OperationKind),
    st.fixed_dictionaries(
        {},
        optional={
            "models": st.lists(models, max_size=2),
            "adapter": st.none() | names,
            "mode": st.sampled_from([one.value for one in PauseMode]),
            "lease_s": st.none() | st.floats(0, 1e6),
            "level": st.sampled_from([int(one) for one in SleepLevel]),
            "wakes": st.none() | st.booleans(),
            "tags": st.lists(st.sampled_from(("weights", "kv_cache"))),
            "request_ids": st.none() | st.lists(st.text(min_size=1, max_size=5)),
            "label": st.text(min_size=1, max_size=5),
            "version": labels,
            "strategy": st.sampled_from([one.value for one in Strategy]),
            "weight": st.floats(0, 1),
            "in_flight": st.sampled_from([one.value for one in InFlight]),
            "step": st.integers(0, 1 << 53),
            "max_unavailable": st.integers(1, 9),
        },
    ),
)
operations = st.builds(
    ControlOperation,
    id=st.text(min_size=1, max_size=8),
    action=actions,
    state=st.sampled_from(OperationState),
    phase=st.sampled_from(Phase),
    who=st.text(max_size=5),
    created_s=st.floats(0, 1e10),
    finished_s=st.none() | st.floats(0, 1e10),
    epoch=st.integers(0, 1 << 40),
    key=st.none() | st.text(max_size=5),
    fingerprint=st.text(max_size=5),
    results=st.dictionaries(st.sampled_from(BOARDS), results),
    phases=st.lists(st.tuples(st.text(max_size=5), st.floats(0, 1e9)), max_size=3).map(tuple),
    error=st.none()
    | st.builds(ControlError, st.integers(400, 599), st.text(max_size=5), st.text(max_size=9)),
)
