"""The routes of sleep, and requests for what sleeps: who wakes it, and who is told why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    OperationState,
    ResultStatus,
)
from rkserve.core.block_hashes import CachedPrefixes, pack
from rkserve.core.desired_state import Desired
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.fakes import run_loop
from tests.support.http.router_house import CHAT, House, chat
from tests.support.http.sleeping_house import ASLEEP, MODEL, K, house, napping, send, slept

EVERYWHERE: dict[str, Any] = {"models": [], "boards": []}


@pytest.mark.parametrize(
    ("query", "body", "level", "mode", "more"),
    [
        pytest.param({}, None, 1, "abort", {}, id="vLLM, as it is"),
        pytest.param({"level": "2"}, None, 2, "abort", {}, id="vLLM's query"),
        pytest.param({}, {"level": 0, "mode": "keep"}, 0, "keep", {}, id="a body"),
        pytest.param(
            {"lease_s": "9"},
            {"wake_on_request": True},
            1,
            "abort",
            {"lease_s": 9.0, "wakes": True},
            id="both",
        ),
    ],
)
def test_a_sleep_is_asked_for_in_vllm_s_words(
    query: dict[str, str], body: Any, level: int, mode: str, more: dict[str, Any]
) -> None:
    of = house()
    response = send(of, "POST", "/sleep", params=query, json=body)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    known = {**EVERYWHERE, "level": level, "mode": mode, "lease_s": None, "wakes": False}
    assert (call.kind, call.params) == (K.SLEEP, {**known, **more})
    told = response.json()
    assert (told["status"], told["level"], told["mode"]) == ("sleeping", level, mode)
    assert (told["operation_id"], told["applied"], told["total"]) == ("op-1", True, 1)
    assert told["results"]["a"]["status"] == "sleeping"


@pytest.mark.parametrize("path", ["/wake_up", "/wakeup"])
@pytest.mark.parametrize(
    ("query", "status", "tags"),
    [
        pytest.param({}, "awake", ["weights", "kv_cache"], id="all"),
        pytest.param({"tags": ["weights"]}, "sleeping", ["weights"], id="weights"),
        pytest.param({"tags": ["kv_cache"]}, "awake", ["kv_cache"], id="the rest"),
    ],
)
def test_a_wake_up_is_asked_for_in_every_peer_s_words(
    path: str, query: dict[str, Any], status: str, tags: list[str]
) -> None:
    of = house()
    response = send(of, "POST", path, params=query)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    assert (call.kind, call.params) == (K.WAKE, {**EVERYWHERE, "tags": query.get("tags", [])})
    told = response.json()
    assert (told["status"], told["tags"]) == (status, tags)
    assert told["results"]["a"]["status"] == "awake"


@pytest.mark.parametrize(
    ("asleep", "status"), [(False, "awake"), (True, "sleeping")], ids=["awake", "asleep"]
)
def test_to_wake_a_part_again_changes_nothing_and_shows_what_is_left(
    asleep: bool, status: str
) -> None:
    of = house(desired=slept() if asleep else Desired(6))
    of.head.says["perform"] = lambda call: replace(of.head.outcome(call), applied=False)
    told = send(of, "POST", "/wake_up", params={"tags": ["weights"]}).json()
    assert (told["status"], told["applied"]) == (status, False)


@pytest.mark.parametrize(
    ("path", "kind", "params", "status"),
    [
        pytest.param(
            "/v1/models/unload",
            K.SLEEP,
            {"mode": "wait", "level": 1, "lease_s": None, "wakes": None},
            "asleep",
            id="unload",
        ),
        pytest.param("/v1/models/load", K.WAKE, {"tags": []}, "ready", id="load"),
    ],
)
def test_a_model_is_unloaded_and_loaded(path: str, kind: K, params: Any, status: str) -> None:
    of = house()
    told = send(of, "POST", path, json={"model": MODEL})
    (call,) = of.head.calls
    assert (call.kind, call.params) == (kind, {"models": [MODEL], "boards": [], **params})
    assert told.status_code == 200
    assert (told.json()["id"], told.json()["object"]) == (MODEL, "model")
    assert told.json()["status"] == status
    unknown = send(of, "POST", path, json={"model": "none"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert send(of, "POST", path, json={}).status_code == 400
    assert len(of.head.calls) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/sleep", {"status": "falling_asleep"}),
        ("/wake_up", {"status": "waking"}),
        ("/v1/models/load", {"status": "loading"}),
        ("/v1/models/unload", {"status": "unloading"}),
    ],
)
def test_what_goes_on_is_not_called_done(path: str, said: dict[str, str]) -> None:
    of = house()
    response = send(of, "POST", path, json={"model": MODEL, "async": True})
    assert response.status_code == 202
    told = response.json()
    assert {name: told[name] for name in said} == said


def test_a_model_that_some_boards_did_not_load_is_loading() -> None:
    results = {
        "a": BoardOutcome(ResultStatus.OK, 5.0),
        "b": BoardOutcome(ResultStatus.FAILED, 5.0, "board_failed", "It cannot be loaded."),
    }
    of = house("a", "b")
    of.head.says["perform"] = lambda call: of.head.outcome(
        call, 207, state=OperationState.PARTIAL, results=results
    )
    response = send(of, "POST", "/v1/models/load", json={"model": MODEL})
    assert response.status_code == 207
    told = response.json()
    assert (told["status"], told["succeeded"], told["total"]) == ("loading", 1, 2)
    assert told["failed"][0]["board"] == "b"


def test_a_sleep_that_was_undone_is_an_error_that_says_so() -> None:
    of = house()
    error = ControlError(504, "operation_timeout", "Board a did not answer.")
    of.head.says["perform"] = lambda call: of.head.outcome(
        call, 504, state=OperationState.UNDONE, error=error
    )
    response = send(of, "POST", "/sleep")
    assert response.status_code == 504
    told = response.json()
    assert (told["error"]["code"], told["state"]) == ("operation_timeout", "undone")
    assert "status" not in told


def test_what_sleeps_is_listed_everywhere() -> None:
    of = napping("a", "b", desired=slept("a", wakes=False))
    of.boards.reported[1] = report("b", idle_s=12.34)
    found = send(of, "GET", "/is_sleeping").json()
    assert (found["is_sleeping"], found["all"], found["epoch"]) == (True, False, 7)
    assert found["boards"]["a"]["level"] == 1
    assert send(of, "GET", "/is_sleeping", params={"model": "none"}).status_code == 404
    cluster = send(of, "GET", "/v1/cluster").json()
    assert (cluster["total"]["asleep"], cluster["total"]["paused_boards"]) == (1, 1)
    told = {one["id"]: (one["asleep"], one["level"], one["idle_s"]) for one in cluster["boards"]}
    assert told == {"a": (True, 1, 0.0), "b": (False, None, 12.3)}
    (pause,) = cluster["pauses"]
    assert (pause["level"], pause["wake_on_request"]) == (1, False)
    model, _adapter = send(of, "GET", "/v1/models").json()["data"]
    assert model["rkserve"]["state"] == "ready"
    of.head.desired = replace(slept(wakes=False), epoch=8)
    of.boards.reported = [report(name, state=ASLEEP, level=1) for name in ("a", "b")]
    assert send(of, "GET", f"/v1/models/{MODEL}").json()["rkserve"]["state"] == "asleep"
    boards = send(of, "GET", "/v1/boards").json()["data"]
    assert [(one["state"], one["level"]) for one in boards] == [("asleep", 1)] * 2
    assert of.head.calls == []


@pytest.mark.parametrize(
    "path", ["/sleep", "/wake_up", "/wakeup", "/v1/models/load", "/v1/models/unload"]
)
def test_to_change_what_sleeps_needs_the_admin_key(path: str) -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr("s3cret")))
    assert send(of, "POST", path, json={"model": MODEL}).status_code == 403
    assert of.head.asked == []
    good = {"authorization": "Bearer s3cret"}
    assert send(of, "POST", path, json={"model": MODEL}, headers=good).status_code == 200


@pytest.mark.promise("Sleep", "Nothing stale is left in admission, index, adapters or reservations")
def test_the_prefixes_of_boards_that_sleep_are_forgotten() -> None:
    of = house("a", "b")
    of.boards.reported = [
        replace(one, holdings=pack(CachedPrefixes(appends=True))) for one in of.boards.reported
    ]
    assert send(of, "POST", CHAT, json=chat()).status_code == 200
    index = of.service.fleet.boards[MODEL].index
    assert index is not None
    assert len(index) == 1
    of.head.desired = slept()
    run_loop(of.cluster.refresh())
    assert len(index) == 0
