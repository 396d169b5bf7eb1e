"""Bodies of sleep and wake-up in every form that peers send, and how what sleeps is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.admin.pause import OperationBody
from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.sleep import TAGS, LoadBody, SleepBody, UnloadBody, WakeBody
from rkserve.control.calls import SleepAction, WakeAction
from rkserve.control.operations import ControlOperation, OperationOutcome
from rkserve.core.desired_state import Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import RequestError

KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT


def asked(body: Any = None, **query: str) -> ControlRequest:
    return ControlRequest(tuple(query.items()), b"" if body is None else json.dumps(body).encode())


@pytest.mark.parametrize(
    ("call", "level", "mode"),
    [
        pytest.param(asked(), 1, ABORT, id="vLLM, as it is"),
        pytest.param(asked(level="2"), 2, ABORT, id="vLLM's query"),
        pytest.param(asked(level="0", mode="keep"), 0, KEEP, id="a query"),
        pytest.param(asked({"level": 2, "mode": "wait"}), 2, WAIT, id="a body"),
        pytest.param(asked({"mode": "keep"}, level="2"), 2, KEEP, id="both"),
    ],
)
def test_a_sleep_is_read(call: ControlRequest, level: int, mode: PauseMode) -> None:
    found = call.read(SleepBody).action(Scope())
    assert found == SleepAction(mode=mode, level=SleepLevel(level), wakes=False)


def test_what_a_sleep_may_say_besides() -> None:
    body = {"model": "m", "selector": ["b*"], "lease_s": 30, "wake_on_request": True, "epoch": 4}
    found = asked({**body, "async": True, "timeout_s": 9}).read(SleepBody)
    assert (found.terms.models, found.terms.selector) == (("m",), ("b*",))
    assert (found.lease_s, found.wake_on_request) == (30.0, True)
    assert (found.terms.background, found.terms.timeout_s, found.terms.epoch) == (True, 9.0, 4)


@pytest.mark.parametrize(
    ("body", "call", "param"),
    [
        pytest.param(SleepBody, asked(level="3"), "level", id="too deep"),
        pytest.param(SleepBody, asked({"level": -1}), "level", id="below"),
        pytest.param(SleepBody, asked({"level": True}), "level", id="true"),
        pytest.param(SleepBody, asked({"level": 1.5}), "level", id="in between"),
        pytest.param(SleepBody, asked(mode="in_place"), "mode", id="another peer's mode"),
        pytest.param(SleepBody, asked(lease_s="0"), "lease_s", id="a lease of no time"),
        pytest.param(SleepBody, asked({"adapter": "x"}), "adapter", id="an adapter"),
        pytest.param(SleepBody, asked(tags="kv_cache"), "tags", id="tags without weights"),
        pytest.param(WakeBody, asked(level="1"), "level", id="a level of a wake-up"),
        pytest.param(WakeBody, asked(tags="weights,code"), "tags", id="an unknown tag"),
        pytest.param(UnloadBody, asked(), "model", id="unload what"),
        pytest.param(UnloadBody, asked({"model": ["a", "b"]}), "model", id="unload two"),
        pytest.param(UnloadBody, asked({"model": "m", "level": 0}), "level", id="stays loaded"),
        pytest.param(UnloadBody, asked({"model": "m", "boards": "b"}), "boards", id="of a board"),
        pytest.param(LoadBody, asked({}), "model", id="load what"),
        pytest.param(LoadBody, asked({"model": "m", "mode": "keep"}), "mode", id="load how"),
    ],
)
def test_what_is_no_such_call_is_refused_by_name(
    body: type[OperationBody], call: ControlRequest, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        call.read(body)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("call", "tags", "whole"),
    [
        pytest.param(asked(), (), True, id="all"),
        pytest.param(asked(tags="weights"), ("weights",), False, id="weights alone"),
        pytest.param(asked({"tags": ["kv_cache"]}), ("kv_cache",), True, id="what is left"),
        pytest.param(asked(tags="weights,kv_cache"), ("weights", "kv_cache"), True, id="both"),
        pytest.param(
            ControlRequest((("tags", "weights"), ("tags", "kv_cache"))),
            ("weights", "kv_cache"),
            True,
            id="vLLM's repeated query",
        ),
    ],
)
def test_a_wake_up_is_read(call: ControlRequest, tags: tuple[str, ...], whole: bool) -> None:
    body = call.read(WakeBody)
    assert body.action(Scope()) == WakeAction(tags=tags)
    woken = OperationOutcome(200, ControlOperation("op", body.action(Scope())))
    told = body.reply(woken, Desired())
    assert told == {"status": "awake" if whole else "sleeping", "tags": list(tags or TAGS)}


def test_a_model_is_unloaded_and_loaded() -> None:
    scope = Scope(("m",))
    unload = asked({"model": "m"}).read(UnloadBody).action(scope)
    # Whether a request ends it is as its boards are configured.
    assert unload == SleepAction(models=("m",), mode=WAIT, level=SleepLevel.UNLOADED, wakes=None)
    kept = asked({"model": "m", "wake_on_request": False}).read(UnloadBody)
    assert kept.wake_on_request is False
    assert asked(model="m").read(LoadBody).action(scope) == WakeAction(models=("m",))
