"""Models and weights by both clients: what their calls send, wait for and raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkserve.client import (
    Conflict,
    NotFound,
    Operation,
    OperationFailed,
    PartlyDone,
    Progress,
    Pushed,
    PushedWeights,
    SourceFailed,
    UnexpectedAnswer,
)
from tests.support.cluster.control_clients import ASKED, SLEEP, WAKE, Use, both
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored

LOAD, UNLOAD = "POST /v1/models/load", "POST /v1/models/unload"
UPDATE, RECEIVE = "POST /update_weights_from_disk", "POST /receive_weight_update"
STAGED = Operation("op-0", "adapter_stage", "succeeded", 3, 2, 2)
PUSHED = Pushed("tone", "step-9", "sim-chat", "ab" * 32, 4096, STAGED)
WEIGHTS = PushedWeights("sim-chat@step-9", "sim-chat", "cd" * 32, 8192)
TENSORS = [{"name": "lora_a", "shape": [8, 64], "dtype": "float16"}]


@both
@pytest.mark.parametrize(
    ("use", "route", "sent"),
    [
        pytest.param(lambda c: c.sleep(), SLEEP, {"level": 1, "mode": "keep"}, id="sleep"),
        pytest.param(
            lambda c: c.sleep(
                2, "abort", models="m", boards=["a*"], wake_on_request=True, lease_s=9, epoch=6
            ),
            SLEEP,
            {
                "level": 2,
                "mode": "abort",
                "model": ["m"],
                "selector": ["a*"],
                "wake_on_request": True,
                "lease_s": 9,
                "epoch": 6,
            },
            id="a part sleeps",
        ),
        pytest.param(lambda c: c.wake(), WAKE, {}, id="wake"),
        pytest.param(
            lambda c: c.drain_boards(["a*"], "move", epoch=6),
            "POST /v1/boards/drain",
            {"selector": ["a*"], "mode": "move", "epoch": 6},
            id="drain",
        ),
        pytest.param(
            lambda c: c.restart_board("rk@one", timeout_s=9),
            "POST /v1/boards/rk@one/restart",
            {"timeout_s": 9},
            id="restart",
        ),
        pytest.param(
            lambda c: c.wake(["weights"], models=["m", "n"], timeout_s=90),
            WAKE,
            {"tags": ["weights"], "model": ["m", "n"], "timeout_s": 90},
            id="a part wakes",
        ),
        pytest.param(lambda c: c.load_model("m"), LOAD, {"model": "m"}, id="load"),
        pytest.param(lambda c: c.unload_model("m"), UNLOAD, {"model": "m"}, id="unload"),
        pytest.param(
            lambda c: c.unload_model("m", 2, "abort", wake_on_request=False),
            UNLOAD,
            {"model": "m", "level": 2, "mode": "abort", "wake_on_request": False},
            id="unload in another way",
        ),
        pytest.param(
            lambda c: c.update_weights("/srv/m.rkllm"),
            UPDATE,
            {"model_path": "/srv/m.rkllm"},
            id="update",
        ),
        pytest.param(
            lambda c: c.update_weights(
                "/srv/m.rkllm", "step-9", model="m", in_flight="switch", max_unavailable=2
            ),
            UPDATE,
            {
                "model_path": "/srv/m.rkllm",
                "weight_version": "step-9",
                "model": "m",
                "in_flight": "switch",
                "max_unavailable": 2,
            },
            id="update in another way",
        ),
        pytest.param(
            lambda c: c.receive_weight_update(9, PUSHED),
            RECEIVE,
            {
                "kind": "weight_update_request",
                "version": 9,
                "artifact": "tone@step-9",
                "model": "sim-chat",
                "parameters_info": [{"name": "tone@step-9", "shape": [4096], "dtype": "uint8"}],
            },
            id="what was pushed",
        ),
        pytest.param(
            lambda c: c.receive_weight_update(9, WEIGHTS),
            RECEIVE,
            {
                "kind": "weight_update_request",
                "version": 9,
                "artifact": "sim-chat@step-9",
                "model": "sim-chat",
                "parameters_info": [{"name": "sim-chat@step-9", "shape": [8192], "dtype": "uint8"}],
            },
            id="base weights that were pushed",
        ),
        pytest.param(
            lambda c: c.update_weights(WEIGHTS, "nine"),
            UPDATE,
            {"model_path": "sim-chat@step-9", "model": "sim-chat", "weight_version": "nine"},
            id="update to what was pushed",
        ),
        pytest.param(
            lambda c: c.receive_weight_update(9, "tone@step-9", TENSORS, in_flight="pin"),
            RECEIVE,
            {
                "kind": "weight_update_request",
                "version": 9,
                "artifact": "tone@step-9",
                "parameters_info": TENSORS,
                "in_flight": "pin",
            },
            id="tensors of a manifest",
        ),
    ],
)
def test_a_call_begins_an_operation_and_follows_it_to_its_end(
    server: FakeControl, run: Callable[..., Any], use: Use, route: str, sent: dict[str, Any]
) -> None:
    server.on(route, ok(envelope("running", applied=False), 202))
    server.on(ASKED, ok(stored("running")), ok(stored("succeeded")))
    done = run(server, use)
    assert (done.state, done.applied, done.epoch) == ("succeeded", False, 7)
    assert server.routes == [route, ASKED, ASKED]
    assert server.json(0) == {**sent, "async": True}
    assert len(server.asked[0].headers["idempotency-key"]) >= 32


@both
@pytest.mark.parametrize(
    ("name", "args", "route"),
    [
        ("sleep", (), SLEEP),
        ("wake", (), WAKE),
        ("load_model", ("m",), LOAD),
        ("unload_model", ("m",), UNLOAD),
        ("update_weights", ("/srv/m.rkllm",), UPDATE),
        ("receive_weight_update", (9, PUSHED), RECEIVE),
    ],
)
def test_it_tells_how_far_it_is_or_does_not_wait(
    server: FakeControl, run: Callable[..., Any], name: str, args: Any, route: str
) -> None:
    server.on(route, ok(envelope("running", kind="sleep"), 202))
    server.on(
        ASKED,
        ok({**stored("running", succeeded=1, kind="sleep"), "phase": "sleeping"}),
        ok(stored("succeeded", kind="sleep")),
    )
    told: list[Progress] = []
    run(server, lambda client: getattr(client, name)(*args, on_progress=told.append, key="mine"))
    assert [(one.step, one.phase, one.done, one.total) for one in told] == [
        ("sleep", "sleeping", 1, 2),
        ("sleep", "done", 2, 2),
    ]
    assert server.asked[0].headers["idempotency-key"] == "mine"
    begun = run(server, lambda client: getattr(client, name)(*args, wait=False))
    assert begun.state == "running"
    assert server.routes[-1] == route


@both
@pytest.mark.parametrize(
    ("answer", "end", "raised"),
    [
        pytest.param(error(409, "stale_weights"), None, Conflict, id="an old step"),
        pytest.param(error(404, "artifact_not_found"), None, NotFound, id="no such artifact"),
        pytest.param(None, stored("undone", **PARTLY), OperationFailed, id="undone"),
        pytest.param(None, stored("partial", **PARTLY), PartlyDone, id="partly"),
    ],
)
def test_what_does_not_succeed_is_raised(
    server: FakeControl, run: Callable[..., Any], answer: Any, end: Any, raised: type[Exception]
) -> None:
    server.on(RECEIVE, answer or ok(envelope("running"), 202)).on(ASKED, ok(end or {}))
    with pytest.raises(raised):
        run(server, lambda client: client.receive_weight_update(9, PUSHED))


@both
def test_what_sleeps_is_read(server: FakeControl, run: Callable[..., Any]) -> None:
    body = {
        "is_sleeping": True,
        "all": False,
        "epoch": 7,
        "boards": {"a": {"sleeping": True, "level": 2}, "b": {"sleeping": False, "level": None}},
    }
    server.on("GET /is_sleeping", ok(body), ok({**body, "is_sleeping": False}), ok({"boards": []}))
    found = run(server, lambda client: client.is_sleeping("m"))
    assert (bool(found), found.all, found.epoch) == (True, False, 7)
    assert dict(found.boards) == {"a": 2, "b": None}
    assert server.asked[0].url.params["model"] == "m"
    assert not run(server, lambda client: client.is_sleeping())
    with pytest.raises(UnexpectedAnswer, match="is_sleeping"):
        run(server, lambda client: client.is_sleeping())


@both
def test_boards_that_ask_to_join_are_listed_and_decided(
    server: FakeControl, run: Callable[..., Any]
) -> None:
    rows = {"object": "list", "data": [{"id": "1a2b3c4d", "host": "rock", "state": "waiting"}]}
    server.on("GET /v1/members", ok(rows))
    server.on("POST /v1/members/approve", ok(rows)).on("POST /v1/members/deny", ok(rows))
    assert run(server, lambda client: client.members()) == rows["data"]
    for call, body in (
        (lambda client: client.approve_boards("rock"), {"boards": ["rock"]}),
        (lambda client: client.approve_boards(waiting=True), {"all": True}),
        (lambda client: client.deny_boards(["rock", "pi"]), {"boards": ["rock", "pi"]}),
    ):
        assert run(server, call) == rows
        assert server.json() == body


@both
def test_weights_are_shown_as_they_are(server: FakeControl, run: Callable[..., Any]) -> None:
    info = {"weight_version": "step-9", "step": 9, "models": {}}
    server.on("GET /weight_info", ok(info))
    assert run(server, lambda client: client.weight_info("m")) == info
    assert server.asked[0].url.params["model"] == "m"


@both
@pytest.mark.parametrize(
    ("name", "args"), [("update_weights", ("/m",)), ("receive_weight_update", (9, PUSHED))]
)
def test_a_file_may_take_the_head_minutes_to_read(
    server: FakeControl, run: Callable[..., Any], name: str, args: Any
) -> None:
    server.on(UPDATE, ok(envelope())).on(RECEIVE, ok(envelope()))
    run(server, lambda client: getattr(client, name)(*args))
    assert server.asked[0].extensions["timeout"]["read"] > 300


@both
@pytest.mark.parametrize("parameters", [None, TENSORS], ids=["alone", "with its tensors"])
def test_base_weights_are_sent_to_the_head(
    server: FakeControl, run: Callable[..., Any], tmp_path: Path, parameters: Any
) -> None:
    file = tmp_path / "model.rkllm"
    file.write_bytes(b"weights")
    server.on("POST /v1/weights", ok({"id": "m@v1", "model": "m", "own": False}))
    told: list[Progress] = []
    pushed = run(
        server,
        lambda client: client.push_weights(
            file, "v1", parameters=parameters, on_progress=told.append, key="mine"
        ),
    )
    digest = hashlib.sha256(b"weights").hexdigest()
    assert pushed == PushedWeights(
        "m@v1", "m", digest, 7, {"id": "m@v1", "model": "m", "own": False}
    )
    query = dict(server.asked[0].url.params)
    sent = query.pop("parameters", "null")
    assert query == {"version": "v1", "sha256": digest, "size": "7"}
    assert json.loads(sent) == parameters
    assert server.bodies == [b"weights"]
    assert server.asked[0].headers["idempotency-key"] == "mine"
    assert [(one.step, one.done, one.total) for one in told] == [("upload", 7, 7)]


@both
def test_what_an_adapter_fits_is_sent_with_it(server: FakeControl, run: Callable[..., Any]) -> None:
    names = {"name": "tone", "version": "v1", "model": "m"}
    server.on("POST /v1/lora_adapters", ok({**names, **envelope()}))
    run(
        server,
        lambda client: client.push_adapter(
            b"x", "tone", parameters=TENSORS, base_digest="cd" * 32, activate=False
        ),
    )
    query = server.asked[0].url.params
    assert (json.loads(query["parameters"]), query["base_digest"]) == (TENSORS, "cd" * 32)


ENVELOPE = {"payload": "e30=", "payloadType": "x", "signatures": []}


@both
@pytest.mark.parametrize("way", ["beside", "beside in a folder", "a path", "its content"])
def test_a_signed_manifest_is_sent_with_its_file(
    server: FakeControl, run: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(b"x")
    beside = "adapter.rkllm.manifest.json" if way.startswith("beside") else "other.json"
    (tmp_path / beside).write_text(json.dumps(ENVELOPE, indent=2), encoding="utf-8")
    source = tmp_path if way == "beside in a folder" else file
    known = {"a path": tmp_path / beside, "its content": ENVELOPE}.get(way)
    server.on("POST /v1/lora_adapters", ok({"version": "v1", "model": "m", **envelope()}))
    run(
        server,
        lambda client: client.push_adapter(
            source, "tone", manifest=known, allow_older=True, activate=False
        ),
    )
    query = server.asked[0].url.params
    assert query["manifest"] == json.dumps(ENVELOPE, separators=(",", ":"))
    assert query["allow_older"] == "true"


@both
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"a":"' + b"x" * 9000 + b'"}']
)
def test_a_file_that_is_no_manifest_is_not_sent(
    server: FakeControl, run: Callable[..., Any], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "m.rkllm").write_bytes(b"x")
    (tmp_path / "m.rkllm.manifest.json").write_bytes(content)
    with pytest.raises(SourceFailed, match=r"The manifest .*m\.rkllm\.manifest\.json"):
        run(server, lambda client: client.push_weights(tmp_path / "m.rkllm"))
    assert server.asked == []


def sleeping(server: FakeControl) -> FakeControl:
    server.on(SLEEP, ok(envelope("running", kind="sleep"), 202))
    server.on(WAKE, ok(envelope("running", operation_id="op-2", kind="wake"), 202))
    server.on(ASKED, ok(stored("succeeded", kind="sleep")))
    return server.on("GET /v1/operations/op-2", ok(stored("succeeded", kind="wake")))
