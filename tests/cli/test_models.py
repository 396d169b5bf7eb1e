"""``rkserve sleep``, ``wake``, ``models`` and ``weights``: what they send, print and exit with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rkserve.cli.context import Exit
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored
from tests.support.http.terminal import Terminal

ASKED = "GET /v1/operations/op-1"
BASE = {"version": "step-9", "digest": "cd" * 32, "bytes": 4096}


@dataclass(frozen=True)
class Call:
    """A command with its words, what it sends where, and what it says in the end."""

    words: str
    route: str
    sent: dict[str, Any]
    said: str
    id: str

    def __str__(self) -> str:
        return self.id


CALLS = [
    Call(
        "sleep",
        "POST /sleep",
        {"level": 1, "mode": "keep"},
        "asleep at level 1",
        id="sleep",
    ),
    Call(
        "sleep --level 2 --mode abort --model m --board a* --wake-on-request --lease 9 --timeout 5",
        "POST /sleep",
        {
            "level": 2,
            "mode": "abort",
            "model": ["m"],
            "selector": ["a*"],
            "wake_on_request": True,
            "lease_s": 9.0,
            "timeout_s": 5.0,
        },
        "asleep at level 2",
        id="sleep in part",
    ),
    Call("wake", "POST /wake_up", {}, "awake", id="wake"),
    Call(
        "wake --tag weights --model m",
        "POST /wake_up",
        {"tags": ["weights"], "model": ["m"]},
        "loaded, and held until `rkserve wake`",
        id="wake the weights",
    ),
    Call(
        "wake --tag weights --tag kv_cache",
        "POST /wake_up",
        {"tags": ["weights", "kv_cache"]},
        "awake",
        id="wake by all tags",
    ),
    Call(
        "models load m --timeout 9",
        "POST /v1/models/load",
        {"model": "m", "timeout_s": 9.0},
        "loaded m",
        id="load",
    ),
    Call(
        "models unload m",
        "POST /v1/models/unload",
        {"model": "m", "level": 1, "mode": "wait"},
        "unloaded m",
        id="unload",
    ),
    Call(
        "models unload m --no-wake-on-request --mode keep",
        "POST /v1/models/unload",
        {"model": "m", "level": 1, "mode": "keep", "wake_on_request": False},
        "unloaded m",
        id="unload until told",
    ),
    Call(
        "weights update /srv/m.rkllm --version step-9 --max-unavailable 2",
        "POST /update_weights_from_disk",
        {
            "model_path": "/srv/m.rkllm",
            "weight_version": "step-9",
            "in_flight": "pin",
            "max_unavailable": 2,
        },
        "serving /srv/m.rkllm",
        id="update",
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_command_waits_for_what_it_asks_and_says_what_came_of_it(
    server: FakeControl, rkserve: Terminal, call: Call
) -> None:
    words = call.words.split()
    server.on(call.route, ok(envelope("running"), 202))
    server.on(ASKED, ok(stored("running")), ok(stored("succeeded")))
    server.on("GET /v1/cluster", ok({"pauses": []}))
    code, out, err = rkserve(*words)
    assert (code, err) == (Exit.DONE, "")
    assert out == f"{call.said}: 2 of 2 boards, epoch 7, operation op-1\n"
    assert server.json(0) == {**call.sent, "async": True}
    code, out, _ = rkserve(*words, "--json")
    assert (code, json.loads(out)["state"]) == (Exit.DONE, "succeeded")


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(
    ("answer", "end", "code", "told"),
    [
        pytest.param(error(409, "operation_conflict"), {}, Exit.FAILED, "conflict", id="refused"),
        pytest.param(None, stored("partial", **PARTLY), Exit.PARTLY, "1 of 2", id="partly"),
        pytest.param(None, stored("undone", **PARTLY), Exit.FAILED, "sim-1: It does", id="undone"),
    ],
)
def test_exit_codes(
    server: FakeControl,
    rkserve: Terminal,
    *,
    call: Call,
    answer: Any,
    end: Any,
    code: Exit,
    told: str,
) -> None:
    server.on(call.route, answer or ok(envelope("running"), 202)).on(ASKED, ok(end))
    exit_code, out, err = rkserve(*call.words.split())
    assert (exit_code, out) == (code, "")
    assert told in err


def test_base_weights_are_pushed(server: FakeControl, rkserve: Terminal, tmp_path: Path) -> None:
    (tmp_path / "m.rkllm").write_bytes(b"weights")
    answer = {"id": "m@v1", "model": "m", "own": False}
    server.on("POST /v1/weights", ok(answer))
    words = ["weights", "push", str(tmp_path / "m.rkllm"), "--version", "v1"]
    assert rkserve(*words) == (
        Exit.DONE,
        "m@v1 is on the head: rkserve weights update m@v1\n",
        "",
    )
    assert json.loads(rkserve(*words, "--json")[1]) == answer
    server.on("POST /v1/weights", error(400, "artifact_refused"))
    assert rkserve(*words)[0] == Exit.FAILED


@pytest.mark.parametrize(
    ("words", "route", "said"),
    [
        (
            "wake",
            "POST /wake_up",
            "still paused (keep): sim-chat, by operation op-7: rkserve resume",
        ),
        (
            "resume",
            "POST /resume",
            "still asleep (level 1, keep): sim-chat, by operation op-8: rkserve wake",
        ),
    ],
)
def test_what_is_still_held_in_another_way_is_told(
    server: FakeControl, rkserve: Terminal, words: str, route: str, said: str
) -> None:
    one = {"models": ["sim-chat"], "boards": [], "adapter": None, "mode": "keep", "expires_s": None}
    pauses = [{**one, "operation": "op-7", "level": None}, {**one, "operation": "op-8", "level": 1}]
    server.on(route, ok(envelope())).on("GET /v1/cluster", ok({"pauses": pauses}))
    code, out, err = rkserve(*words.split())
    assert (code, len(out.splitlines()), err.strip()) == (Exit.DONE, 1, said)
    assert rkserve(words, "--json")[2] == ""
    assert rkserve(words, "--model", "m")[2] == ""
    server.on("GET /v1/cluster", error(500, "internal_error"))
    assert rkserve(words)[0] == Exit.DONE


def test_a_label_is_set(server: FakeControl, rkserve: Terminal) -> None:
    server.on("POST /update_weight_version", ok(envelope(kind="label")))
    code, out, _ = rkserve("weights", "label", "step-9", "--model", "m")
    assert (code, "labelled step-9: 2 of 2 boards" in out) == (Exit.DONE, True)
    assert server.json() == {"new_version": "step-9", "model": "m"}


def test_what_is_kept_of_the_kv_caches_is_told(server: FakeControl, rkserve: Terminal) -> None:
    results = {
        "a": {"status": "sleeping", "latency_ms": 9.0, "kept_tokens": 500, "dropped_tokens": 0},
        "b": {"status": "sleeping", "latency_ms": 9.0, "kept_tokens": 12, "dropped_tokens": 20},
    }
    server.on("POST /sleep", ok(envelope(results=results)))
    said = "asleep at level 1, KV cache: 512 tokens kept, 20 dropped: 2 of 2 boards"
    assert said in rkserve("sleep")[1]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["sleep", "--level", "3"], id="no such level"),
        pytest.param(["sleep", "--mode", "soon"], id="no such mode"),
        pytest.param(["wake", "--tag", "all"], id="no such tag"),
        pytest.param(["models", "load"], id="no model"),
        pytest.param(["models", "frobnicate"], id="no such command"),
        pytest.param(["models", "--level", "1"], id="an option of another command"),
        pytest.param(["weights", "update"], id="no file"),
        pytest.param(["weights", "push", "/nowhere"], id="a file that is not there"),
        pytest.param(["weights", "update", "/m", "--max-unavailable", "0"], id="no board at all"),
    ],
)
def test_wrong_usage_is_2_and_asks_nobody(
    server: FakeControl, rkserve: Terminal, words: list[str]
) -> None:
    assert rkserve(*words)[0] == Exit.USAGE
    assert server.asked == []


@pytest.mark.parametrize(
    ("short", "route"),
    [("models", "GET /v1/models"), ("weights", "GET /weight_info")],
)
def test_a_group_alone_shows_how_things_are(
    server: FakeControl, rkserve: Terminal, short: str, route: str
) -> None:
    server.on("GET /v1/models", ok({"data": [{"id": "m", "rkserve": {"state": "asleep"}}]}))
    server.on("GET /weight_info", ok({"epoch": 7, "models": {}}))
    long = {"models": "list", "weights": "info"}[short]
    assert rkserve(short) == rkserve(short, long)
    assert rkserve(short, "--json") == rkserve(short, long, "--json")
    assert set(server.routes) == {route}
    code, out, _ = rkserve(short, "--help")
    assert (code, long in out) == (0, True)


def test_models_are_listed_with_their_states(server: FakeControl, rkserve: Terminal) -> None:
    boards = [{"id": "a", "state": "asleep"}, {"id": "b", "state": "ready"}]
    server.on(
        "GET /v1/models",
        ok({"data": [{"id": "m", "rkserve": {"state": "ready", "boards": boards}}]}),
    )
    assert "m      ready  a: asleep, b: ready" in rkserve("models")[1]


def test_weights_are_shown_by_model_and_board(server: FakeControl, rkserve: Terminal) -> None:
    models = {
        "m": {
            "weight_version": "step-9",
            "step": 9,
            "base": BASE,
            "rebase": {"version": "step-10", "digest": "ef" * 32, "switched": ["a"]},
            "adapters": {"tone": "v1"},
            "boards": {
                "a": {"weight_version": "step-9", "base": BASE["digest"]},
                "b": {"weight_version": "default", "base": None},
            },
        },
        "n": {"weight_version": "default", "step": None, "base": None, "adapters": {}},
    }
    server.on("GET /weight_info", ok({"epoch": 7, "models": models}))
    lines = [" ".join(line.split()) for line in rkserve("weights", "info")[1].splitlines()]
    assert "m step-9 9 cdcdcdcdcdcd 4096 tone@v1" in lines
    assert "n default - of the model folder -" in lines
    assert "m: step-10 is loaded by 1 of 2 boards" in lines
    assert "a m step-9 cdcdcdcdcdcd" in lines
    assert "b m default of the model folder" in lines
