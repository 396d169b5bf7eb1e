"""Bodies of sleep and wake-up in every form that peers send, and how what sleeps is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.api.admin.cluster_status import is_paused_entry, is_sleeping_entry
from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.sleep import parse_load, parse_sleep, parse_unload, parse_wake
from rkserve.api.openai.models import model_state
from rkserve.control import sleep as sleep_changes
from rkserve.control import state_changes
from rkserve.core.board_report import BoardReport, BoardState
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
    found = parse_sleep(call)
    assert (found.level, found.mode, found.wakes) == (level, mode, False)
    assert type(found.level) is SleepLevel


def test_what_a_sleep_may_say_besides() -> None:
    body = {"model": "m", "selector": ["b*"], "lease_s": 30, "wake_on_request": True, "epoch": 4}
    found = parse_sleep(asked({**body, "async": True, "timeout_s": 9}))
    assert (found.terms.models, found.terms.selector) == (("m",), ("b*",))
    assert (found.lease_s, found.wakes) == (30.0, True)
    assert (found.terms.background, found.terms.timeout_s, found.terms.epoch) == (True, 9.0, 4)


@pytest.mark.parametrize(
    ("read", "call", "param"),
    [
        pytest.param(parse_sleep, asked(level="3"), "level", id="too deep"),
        pytest.param(parse_sleep, asked({"level": -1}), "level", id="below"),
        pytest.param(parse_sleep, asked({"level": True}), "level", id="true"),
        pytest.param(parse_sleep, asked({"level": 1.5}), "level", id="in between"),
        pytest.param(parse_sleep, asked(mode="in_place"), "mode", id="another peer's mode"),
        pytest.param(parse_sleep, asked(lease_s="0"), "lease_s", id="a lease of no time"),
        pytest.param(parse_sleep, asked({"adapter": "x"}), "adapter", id="an adapter"),
        pytest.param(parse_sleep, asked(tags="kv_cache"), "tags", id="tags without weights"),
        pytest.param(parse_wake, asked(level="1"), "level", id="a level of a wake-up"),
        pytest.param(parse_wake, asked(tags="weights,code"), "tags", id="an unknown tag"),
        pytest.param(parse_unload, asked(), "model", id="unload what"),
        pytest.param(parse_unload, asked({"model": ["a", "b"]}), "model", id="unload two"),
        pytest.param(parse_unload, asked({"model": "m", "level": 0}), "level", id="stays loaded"),
        pytest.param(parse_unload, asked({"model": "m", "boards": "b"}), "boards", id="of a board"),
        pytest.param(parse_load, asked({}), "model", id="load what"),
        pytest.param(parse_load, asked({"model": "m", "mode": "keep"}), "mode", id="load how"),
    ],
)
def test_what_is_no_such_call_is_refused_by_name(
    read: Any, call: ControlRequest, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read(call)
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
    found = parse_wake(call)
    assert (found.tags, found.whole) == (tags, whole)


def test_a_model_is_unloaded_and_loaded() -> None:
    unload = parse_unload(asked({"model": "m"}))
    assert (unload.terms.models, unload.mode, unload.level) == (("m",), WAIT, 1)
    assert unload.wakes is None  # as its boards are configured
    assert parse_unload(asked({"model": "m", "wake_on_request": False})).wakes is False
    assert parse_load(asked(model="m")).terms.models == ("m",)


def board(name: str, state: BoardState = BoardState.READY, **figures: Any) -> BoardReport:
    return BoardReport(name, "m", state, **figures)


def slept(level: SleepLevel, *boards: str) -> Desired:
    return sleep_changes.sleep(Desired(4), "op", Scope((), boards), KEEP, level, now_s=0.0)


PAUSED = state_changes.pause(Desired(), "op", Scope(), KEEP, 0.0)
ASLEEP = BoardState.ASLEEP


@pytest.mark.parametrize(
    ("desired", "boards", "state"),
    [
        pytest.param(Desired(), [board("a")], "ready", id="ready"),
        pytest.param(slept(SleepLevel.UNLOADED, "a"), [board("a"), board("b")], "ready", id="one"),
        pytest.param(PAUSED, [board("a")], "paused", id="paused"),
        pytest.param(slept(SleepLevel.PAUSED), [board("a")], "paused", id="the lightest sleep"),
        pytest.param(slept(SleepLevel.UNLOADED), [board("a", ASLEEP)], "asleep", id="asleep"),
        pytest.param(
            slept(SleepLevel.DROPPED),
            [board("a", ASLEEP), board("b", BoardState.FAILED)],
            "asleep",
            id="one of them failed",
        ),
        pytest.param(Desired(), [board("a", ASLEEP)], "loading", id="about to wake"),
        pytest.param(Desired(), [board("a", BoardState.RECOVERING)], "loading", id="recovering"),
        pytest.param(
            slept(SleepLevel.UNLOADED, "a"),
            [board("a", ASLEEP), board("b", BoardState.JOINING)],
            "loading",
            id="another one joins",
        ),
        pytest.param(Desired(), [board("a", BoardState.FAILED)], "failed", id="failed"),
        pytest.param(
            slept(SleepLevel.UNLOADED), [board("a", BoardState.LOST)], "failed", id="lost"
        ),
        pytest.param(Desired(), [], "loading", id="not heard yet"),
    ],
)
def test_a_model_has_one_state(desired: Desired, boards: list[BoardReport], state: str) -> None:
    assert model_state(desired, boards) == state


@pytest.mark.parametrize(
    ("desired", "boards", "told"),
    [
        pytest.param(Desired(), ["a", "b"], (False, False), id="nobody"),
        pytest.param(slept(SleepLevel.UNLOADED, "a"), ["a", "b"], (True, False), id="one"),
        pytest.param(slept(SleepLevel.PAUSED), ["a", "b"], (True, True), id="all, lightly"),
        pytest.param(slept(SleepLevel.UNLOADED), [], (True, True), id="no board is there"),
        pytest.param(PAUSED, ["a"], (False, False), id="a pause is no sleep"),
    ],
)
def test_is_sleeping_tells_any_and_all(
    desired: Desired, boards: list[str], told: tuple[bool, bool]
) -> None:
    found = is_sleeping_entry(desired, [board(name) for name in boards], None)
    assert (found["is_sleeping"], found["all"], found["epoch"]) == (*told, desired.epoch)
    assert list(found["boards"]) == boards


def test_what_sleeps_is_paused_as_well_and_told_apart() -> None:
    desired = slept(SleepLevel.DROPPED, "a")
    reports = [board("a", ASLEEP, level=2, hold="keep"), board("b")]
    assert is_sleeping_entry(desired, reports, "m")["boards"] == {
        "a": {"sleeping": True, "level": 2, "reported": 2, "state": "asleep", "epoch": None},
        "b": {"sleeping": False, "level": None, "reported": None, "state": "ready", "epoch": None},
    }
    paused = is_paused_entry(desired, reports, None)
    assert (paused["is_paused"], paused["all"]) == (True, False)
    assert [one["level"] for one in paused["boards"].values()] == [2, None]
