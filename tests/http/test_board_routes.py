"""The routes that change single boards, in front of a real Coordinator and boards that obey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import EngineDied
from tests.support.cluster.fake_cluster import Control
from tests.support.http.coordinator_house import Ask, with_both
from tests.support.http.router_house import chat

DRAIN, UNDRAIN = "/v1/boards/drain", "/v1/boards/undrain"


def test_boards_are_drained_and_shown_as_such_until_they_are_undrained(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        done = await ask("POST", DRAIN, json={"boards": ["a"]})
        assert done.status_code == 200, done.text
        found = done.json()
        assert (found["status"], found["mode"], found["kind"]) == ("drained", "wait", "drain")
        assert found["results"]["a"]["status"] == "drained"
        cluster = (await ask("GET", "/v1/cluster")).json()
        assert cluster["total"]["drained"] == 1
        assert {one["id"]: one["drained"] for one in cluster["boards"]} == {"a": True, "b": False}
        view = (await ask("GET", "/v1/cluster/verdict")).json()
        assert view["verdict"] != "NOT READY"
        repeated = await ask("POST", DRAIN, json={"boards": ["a"]})
        assert (repeated.status_code, repeated.json()["applied"]) == (200, False)
        done = await ask("POST", UNDRAIN, json={"boards": ["a"]})
        assert (done.status_code, done.json()["status"]) == (200, "serving")
        assert not control.desired.drained

    with_both(tmp_path, work)


@pytest.mark.promise(
    "Single boards", "Without another board requests get 503 `model_drained` and the command"
)
def test_requests_for_a_model_without_an_undrained_board_get_the_reason_and_the_command(
    tmp_path: Path,
) -> None:
    async def work(ask: Ask, _: Control) -> None:
        assert (await ask("POST", DRAIN, json={"model": "sim-chat"})).status_code == 200
        refused = await ask("POST", "/v1/chat/completions", json=chat())
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("model_drained", "overloaded_error")
        assert error["message"] == (
            "No board can serve 'sim-chat' now: its boards are drained; to end that, run: rkserve "
            "boards undrain a b."
        )
        verdict = (await ask("GET", "/v1/cluster/verdict")).json()
        assert verdict["verdict"] == "NOT READY"
        assert verdict["reasons"][0]["command"] == "rkserve boards undrain a b"
        model, *_ = (await ask("GET", "/v1/models")).json()["data"]
        assert model["rkserve"]["state"] == "drained"

    with_both(tmp_path, work)


@pytest.mark.promise("Single boards", "After the time limit it is a 207, and the drain stays")
def test_a_drain_whose_boards_still_have_requests_is_a_207_and_stays(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        control.cluster["a"].jobs = 2
        done = await ask("POST", DRAIN, json={"boards": ["a"], "timeout_s": 0.2})
        assert (done.status_code, done.json()["status"]) == (207, "draining")
        [left] = done.json()["failed"]
        assert (left["board"], left["error"]) == ("a", "board_busy")
        assert "It still has 2 requests" in left["message"]
        assert control.desired.drained

    with_both(tmp_path, work)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        pytest.param(DRAIN, {}, 400, "Say which boards", id="no board is named"),
        pytest.param(DRAIN, {"boards": ["z"]}, 404, "no board 'z'", id="an unknown board"),
        pytest.param(DRAIN, {"selector": ["z*"]}, 404, "z*", id="a pattern without a board"),
        pytest.param(DRAIN, {"model": "z"}, 404, "'z'", id="an unknown model"),
        pytest.param(DRAIN, {"boards": ["a"], "mode": "now"}, 400, "mode", id="no such mode"),
        pytest.param(
            DRAIN, {"boards": ["a", "b"], "mode": "move"}, 409, "No other board", id="nowhere to go"
        ),
        pytest.param("/v1/boards/z/restart", {}, 404, "no board 'z'", id="restart of an unknown"),
        pytest.param("/v1/boards/z/measure", {}, 404, "no board 'z'", id="measure an unknown one"),
        pytest.param("/v1/boards/a/measure", {"seconds": 21}, 400, "seconds", id="too long"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused_and_nothing_is_drained(
    tmp_path: Path, path: str, body: Any, status: int, said: str
) -> None:
    async def work(ask: Ask, control: Control) -> None:
        await control.heard()
        refused = await ask("POST", path, json=body)
        assert refused.status_code == status, refused.text
        assert said in refused.json()["error"]["message"]
        assert not control.desired.drained

    with_both(tmp_path, work)


def test_an_engine_is_restarted_on_one_board(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        done = await ask("POST", "/v1/boards/a/restart")
        assert (done.status_code, done.json()["status"]) == (200, "restarted")
        assert control.cluster["a"].asked["restart_engine"] == 1
        assert control.cluster["b"].asked["restart_engine"] == 0
        control.cluster["a"].refuses["restart_engine"] = EngineDied("a", "it does not load")
        done = await ask("POST", "/v1/boards/a/restart")
        assert done.status_code == 503
        assert "it does not load" in done.json()["error"]["message"]

    with_both(tmp_path, work)


def test_a_measurement_answers_with_figures_and_a_sentence(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        done = await ask("POST", "/v1/boards/a/measure", json={"seconds": 2})
        assert done.status_code == 200, done.text
        found = done.json()
        assert (found["board"], found["status"]) == ("a", "measured")
        assert found["measured"] == {
            "prefill_tokens_per_s": 80.0,
            "decode_tokens_per_s": 12.5,
            "tokens": 64,
        }
        assert (found["expected"], found["peers"], found["ratio"]) == (None, None, None)
        assert found["sentence"].startswith("a decodes 12.5 tokens/s; neither a figure")
        control.cluster["a"].jobs = 1
        busy = await ask("POST", "/v1/boards/a/measure")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "operation_conflict")
        assert (await ask("POST", "/v1/boards/a/measure?wait=true")).status_code == 200

    with_both(tmp_path, work)
