"""Bodies of pauses, resumptions, aborts and resets in every form that peers send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.admin.pause import (
    CALLS,
    AbortBody,
    AbortOneBody,
    FlushBody,
    LabelBody,
    PauseBody,
    PauseGenerationBody,
    ResetBody,
    ResumeBody,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.api.common.calls import named_answer
from rkserve.control.calls import AbortAction, LabelAction, PauseAction
from rkserve.core.desired_state import PauseMode, Scope
from rkserve.core.errors import RequestError

SCOPE = Scope(("m",), ("b1",), "tone")


def asked(body: Any = None, **query: str) -> ControlRequest:
    return ControlRequest(tuple(query.items()), b"" if body is None else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("model", "call", "mode", "clear"),
    [
        pytest.param(PauseBody, asked(), PauseMode.ABORT, True, id="vLLM, as it is"),
        pytest.param(
            PauseBody, asked(mode="keep", clear_cache="false"), PauseMode.KEEP, False, id="a query"
        ),
        pytest.param(
            PauseBody,
            asked({"wait_for_inflight_requests": True}),
            PauseMode.WAIT,
            True,
            id="vLLM's older name",
        ),
        pytest.param(PauseGenerationBody, asked({}), PauseMode.ABORT, True, id="SGLang, as it is"),
        pytest.param(
            PauseGenerationBody, asked({"mode": "retract"}), PauseMode.KEEP, True, id="retract"
        ),
        pytest.param(
            PauseGenerationBody, asked({"mode": "in_place"}), PauseMode.KEEP, False, id="in place"
        ),
    ],
)
def test_a_pause_is_one_operation(
    model: type[PauseBody | PauseGenerationBody],
    call: ControlRequest,
    mode: PauseMode,
    clear: bool,
) -> None:
    action = call.read(model).action(SCOPE)
    assert isinstance(action, PauseAction)
    assert (action.mode, action.clear_cache) == (mode, clear)
    assert (action.models, action.boards, action.adapter) == (("m",), ("b1",), "tone")


def test_requests_are_ended_by_answers_or_by_clients_own_names() -> None:
    action = asked({"request_ids": ["chatcmpl-1", "mine"]}).read(AbortBody).action(Scope())
    assert isinstance(action, AbortAction)
    assert action.request_ids == ("chatcmpl-1", "mine", named_answer("mine"))
    for everything in (asked().read(AbortBody), asked({"abort_all": True}).read(AbortOneBody)):
        action = everything.action(Scope())
        assert isinstance(action, AbortAction)
        assert action.request_ids is None


def test_a_label_is_for_one_model() -> None:
    body = asked({"new_version": "step-7", "reset_step": True}).read(LabelBody)
    assert LabelBody.one_model
    assert body.action(Scope(("m",))) == LabelAction(model="m", label="step-7", reset_step=True)


@pytest.mark.parametrize(
    ("model", "call", "param"),
    [
        (PauseBody, asked({"wait_for_inflight_requests": True, "mode": "keep"}), "wait_for_"),
        (PauseBody, asked(mode="retract"), "mode"),
        (PauseBody, asked({"model": "a", "models": "b"}), "models"),
        (PauseBody, asked({"boards": "a", "selector": "b*"}), "selector"),
        (PauseBody, asked({"boards": ["a", 1]}), "boards[1]"),
        (PauseBody, asked({"boards": ["a"] * 300}), "boards"),
        (PauseBody, asked({"lease_s": 0}), "lease_s"),
        (PauseGenerationBody, asked({"mode": "keep"}), "mode"),
        (ResumeBody, asked({"adapter": ""}), "adapter"),
        (AbortOneBody, asked({}), "rid"),
        (ResetBody, asked({"reset_external": True}), "reset_external"),
        (FlushBody, asked({"timeout": -1}), "timeout"),
        (LabelBody, asked({"new_version": "two words"}), "new_version"),
        (LabelBody, asked({"new_version": "x", "abort_all_requests": True}), "abort_all"),
    ],
    ids=str,
)
def test_what_is_no_such_call_is_refused_by_name(
    model: Any, call: ControlRequest, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        call.read(model)
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)


def test_each_call_has_a_path_of_its_own() -> None:
    paths = [call.path for call in CALLS]
    assert len(set(paths)) == len(paths)
    assert all(call.summary.endswith(".") for call in CALLS)
