"""Desired states and operations come back from text as they were, and from nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from rkserve.api.admin.operations import operation_entry
from rkserve.control.calls import (
    AdapterRolloutAction,
    AdapterStageAction,
    OperationKind,
    PauseAction,
    Strategy,
)
from rkserve.control.codec import (
    SCHEMA,
    read_desired,
    read_operation,
    write_desired,
    write_operation,
)
from rkserve.control.operations import BoardOutcome, ControlOperation, ResultStatus
from rkserve.core.board_report import AdapterTrial, TrialVerdict
from rkserve.core.desired_state import ActivePause, AdapterVersions, Desired, PauseMode, Scope
from rkserve.core.errors import LedgerFailed
from tests.support.values.control_values import desires, operations, recorded, version

STATE = Desired(
    epoch=7,
    pauses=(ActivePause("op", Scope(("m",), ("b1",)), PauseMode.KEEP, expires_s=5.0),),
    lines=(AdapterVersions("m", "law", active=version("law", "v1"), weight=0.5),),
)


@settings(deadline=None)
@given(desires)
def test_a_desired_state_comes_back_as_it_was(desired: Desired) -> None:
    text = write_desired(desired)
    assert read_desired(text) == desired
    assert write_desired(read_desired(text)) == text


@settings(deadline=None)
@given(operations)
def test_an_operation_comes_back_as_it_was(operation: ControlOperation) -> None:
    text = write_operation(operation)
    found = read_operation(text)
    assert found == operation
    assert write_operation(found) == text


def test_whole_numbers_in_a_field_of_seconds_come_back_as_such() -> None:
    pause = ActivePause("op", Scope(), PauseMode.WAIT, since_s=3)
    (found,) = read_desired(write_desired(Desired(pauses=(pause,)))).pauses
    assert found == pause
    assert type(found.since_s) is float


def test_a_stored_value_is_one_line_with_its_schema() -> None:
    text = write_desired(STATE)
    assert "\n" not in text
    assert json.loads(text)["schema"] == SCHEMA


def broken(change: Callable[[Any], None]) -> str:
    content = json.loads(write_desired(STATE))
    change(content)
    return json.dumps(content)


def put(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        content[path[-1]] = to

    return change


def lose(*path: str | int) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        del content[path[-1]]

    return change


D = "desired"
PAUSE, LINE = (D, "pauses", 0), (D, "lines", 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "no JSON", id="nothing"),
        pytest.param("{", "no JSON", id="half of it"),
        pytest.param("[" * 100_000, "no JSON", id="deeper than anyone reads"),
        pytest.param("[]", "schema", id="a list"),
        pytest.param('{"desired": {}}', "schema", id="no schema"),
        pytest.param(
            broken(put("schema", to=SCHEMA + 1)), f"schema {SCHEMA + 1}", id="a later one"
        ),
        pytest.param(broken(put("schema", to=True)), "schema", id="a schema of another type"),
        pytest.param(broken(put("more", to=1)), "more", id="more than one value"),
        pytest.param(
            write_operation(recorded("o", OperationKind.PAUSE)), "keys", id="another kind"
        ),
        pytest.param('{"schema":1,"schema":1,"desired":{}}', "twice", id="a key twice"),
        pytest.param(broken(put(D, to=None)), "an object", id="null"),
        pytest.param(broken(lose(D, "epoch")), "epoch", id="a field is missing"),
        pytest.param(broken(put(D, "colour", to="red")), "colour", id="a field is unknown"),
        pytest.param(broken(put(D, "epoch", to="7")), "desired.epoch", id="a number as text"),
        pytest.param(broken(put(D, "epoch", to=7.0)), "desired.epoch", id="an epoch with a point"),
        pytest.param(broken(put(D, "epoch", to=True)), "desired.epoch", id="true for a number"),
        pytest.param(broken(put(D, "pauses", to={})), "valid array", id="an object for a list"),
        pytest.param(broken(put(*PAUSE, "mode", to="sleep")), "sleep", id="no such mode"),
        pytest.param(broken(put(*PAUSE, "clear_cache", to=0)), "clear_cache", id="0 for false"),
        pytest.param(broken(put(*PAUSE, "scope", "boards", to=["b", 1])), "boards[1]", id="deep"),
        pytest.param(broken(put(*PAUSE, "expires_s", to="soon")), "expires_s", id="optional, text"),
        pytest.param(broken(put(*LINE, "active", to=[])), "lines[0].active", id="no version"),
        pytest.param(
            write_desired(STATE).replace("0.5", "1e999"), "not finite", id="more than a float"
        ),
        pytest.param(write_desired(STATE).replace("0.5", "NaN"), "no number", id="not a number"),
        pytest.param(
            write_desired(STATE).replace("0.5", "1" + 400 * "0"), "weight", id="a huge whole number"
        ),
    ],
)
def test_a_text_of_another_form_is_refused(text: str, said: str) -> None:
    with pytest.raises(LedgerFailed) as failure:
        read_desired(text)
    assert said in failure.value.message


def test_a_phase_of_three_parts_is_refused() -> None:
    operation = recorded("o", OperationKind.PAUSE, phases=(("staging", 1.0),))
    text = write_operation(operation).replace('["staging",1.0]', '["staging",1.0,2]')
    with pytest.raises(LedgerFailed, match="at most 2 items"):
        read_operation(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}], ids=repr)
def test_a_value_that_json_cannot_hold_is_not_written(value: Any) -> None:
    results = {"b1": BoardOutcome(ResultStatus.OK, details={"kept": value})}
    with pytest.raises(LedgerFailed):
        write_operation(recorded("o", OperationKind.PAUSE, results=results))
    with pytest.raises(LedgerFailed):
        write_operation(replace(recorded("o", OperationKind.PAUSE), created_s=value))


# A line of the ledger as releases before typed actions wrote it.
WRITTEN = (
    '{"operation":{"created_s":12.5,"epoch":7,"error":null,"fingerprint":"f00d",'
    '"finished_s":13.0,"id":"op-1","key":"k","kind":"pause","params":{"adapter":null,"boards":[],'
    '"clear_cache":true,"lease_s":30.0,"mode":"wait","models":["m"]},"phase":"done",'
    '"phases":[["stopping",1.5]],"results":{"b1":{"details":{"kept":[1,2]},"error":"",'
    '"latency_ms":1.25,"message":"","status":"ok"}},"state":"succeeded","who":"ann"},"schema":2}'
)
ROLLED = (
    '{"operation":{"created_s":0.0,"epoch":0,"error":{"code":"board_failed","message":"no",'
    '"status":503},"fingerprint":"","finished_s":null,"id":"op-2","key":null,'
    '"kind":"adapter_rollout","params":{"auto":true,"in_flight":"pin","model":"m","name":"law",'
    '"strategy":"canary","version":"v1","weight":0.25},"phase":"staging","phases":[],"results":{},'
    '"state":"running","who":""},"schema":2}'
)


def test_a_line_of_an_earlier_release_is_read_and_written_as_it_was() -> None:
    pause, rollout = read_operation(WRITTEN), read_operation(ROLLED)
    assert pause.action == PauseAction(
        models=("m",), mode=PauseMode.WAIT, clear_cache=True, lease_s=30
    )
    assert pause.results["b1"].details == {"kept": [1, 2]}
    assert rollout.action == AdapterRolloutAction(
        model="m", name="law", version="v1", strategy=Strategy.CANARY, weight=0.25
    )
    assert operation_entry(rollout)["params"] == json.loads(ROLLED)["operation"]["params"]
    now = [text.replace('"schema":2}', f'"schema":{SCHEMA}}}') for text in (WRITTEN, ROLLED)]
    assert [write_operation(pause), write_operation(rollout)] == now


# A desired state as schema 2 was written.
BEFORE_DRAINS = (
    '{"desired":{"epoch":7,"lines":[],"pauses":[{"clear_cache":false,"expires_s":null,"level":null,'
    '"mode":"keep","operation":"op","scope":{"adapter":null,"boards":["b1"],"models":[]},'
    '"since_s":0.0,"wakes":false}],"weights":[]},"schema":2}'
)


def test_a_desired_state_of_a_ledger_without_drains_has_no_drained_board() -> None:
    found = read_desired(BEFORE_DRAINS)
    pause = ActivePause("op", Scope(boards=("b1",)), PauseMode.KEEP)
    assert found == Desired(7, (pause,), drained=(), moved=())
    assert read_desired(write_desired(found)) == found


# A staging as schema 3 was written.
STAGED = ROLLED.replace("adapter_rollout", "adapter_stage").replace('"schema":2', '"schema":3')
STAGED = re.sub(
    r'"params":{[^}]*}',
    f'"params":{{"digest":"{"a" * 64}","model":"m","name":"law","scale":1.0,"size_bytes":7,'
    '"version":"v1"}',
    STAGED,
)


def test_a_staging_of_a_ledger_without_trials_was_not_forced() -> None:
    action = read_operation(STAGED).action
    assert isinstance(action, AdapterStageAction)
    assert (action.version, action.force) == ("v1", False)
    older = BEFORE_DRAINS.replace('"weights":[]', '"drained":["b1"],"moved":[],"weights":[]')
    found = read_desired(older.replace('"schema":2', '"schema":3'))
    assert (found.drained, found.trials) == (("b1",), ())


def test_a_trial_of_a_ledger_without_its_subject_is_of_any_release() -> None:
    trial = AdapterTrial("m", "a" * 64, TrialVerdict.HUNG, "law@v1", "b1", "it hung", 12.5)
    older = write_desired(Desired(3, trials=(trial,))).replace(f'"schema":{SCHEMA}', '"schema":4')
    for added in ('"base":"",', ',"release":""', ',"scale":1.0'):
        assert added in older
        older = older.replace(added, "")
    assert read_desired(older) == Desired(3, trials=(trial,))


def test_trials_are_kept() -> None:
    trial = AdapterTrial("m", "a" * 64, TrialVerdict.HUNG, "law@v1", "b1", "it hung", 12.5)
    desired = Desired(3, trials=(trial,))
    assert read_desired(write_desired(desired)) == desired


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param('"kind":"pause"', '"kind":"halt"', "halt", id="no such kind"),
        pytest.param('"kind":"pause",', "", "kind", id="no kind"),
        pytest.param('"lease_s":30.0', '"lease_s":"30"', "lease_s", id="a text for seconds"),
        pytest.param('"lease_s":30.0', '"lease":30.0', "lease", id="an unknown parameter"),
        pytest.param('"key":"k",', "", "key", id="a field is missing"),
        pytest.param('"params":{', '"action":{', "action", id="another field"),
    ],
)
def test_an_operation_of_another_form_is_refused(old: str, new: str, said: str) -> None:
    assert old in WRITTEN
    with pytest.raises(LedgerFailed, match=said):
        read_operation(WRITTEN.replace(old, new))
