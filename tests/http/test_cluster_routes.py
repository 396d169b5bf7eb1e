"""The routes that change the cluster: the peers' words, and what the Coordinator is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.control.calls import (
    AcceptedManifest,
    DeclaredArtifact,
    OperationKind,
    OperationRequest,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    OperationOutcome,
    OperationState,
    ResultStatus,
)
from rkserve.core.board_report import Emitted, Hardware, VersionFigures
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope, Weights
from rkserve.core.errors import ArtifactRefused, BoardFailed, EnginePaused, StaleEpoch
from rkserve.core.messages import Delta, Finished, Kv, Paused
from rkserve.http import cluster_routes
from rkserve.router.features.operations import AT_REST_S
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.cluster.fake_head import FakeHead, line, version
from tests.support.http.router_house import CHAT, MAX_ADAPTER_BYTES, House, chat, house, send

pytestmark = pytest.mark.virtual_time

ADAPTERS = "/v1/lora_adapters"
OCTETS = {"content-type": "application/octet-stream"}
SHARED: dict[str, Any] = {"models": [], "boards": [], "adapter": None}
K = OperationKind


# -- the peers' words -----------------------------------------------------------------------------


@pytest.mark.promise(
    "Every call that changes something",
    "The answer has the body of vLLM or SGLang, and the result of each board",
)
@pytest.mark.parametrize(
    ("path", "query", "body", "params"),
    [
        pytest.param("/pause", {}, None, ("abort", True), id="vLLM, as it is"),
        pytest.param(
            "/pause", {"mode": "keep", "clear_cache": "false"}, None, ("keep", False), id="a query"
        ),
        pytest.param("/pause", {}, {"mode": "wait"}, ("wait", True), id="a body"),
        pytest.param(
            "/pause", {"mode": "keep"}, {"clear_cache": False}, ("keep", False), id="both"
        ),
        pytest.param("/pause_generation", {}, None, ("abort", True), id="SGLang, as it is"),
        pytest.param(
            "/pause_generation", {}, {"mode": "in_place"}, ("keep", False), id="SGLang's in_place"
        ),
        pytest.param(
            "/pause_generation", {}, {"mode": "retract"}, ("keep", True), id="SGLang's retract"
        ),
    ],
)
def test_a_pause_is_asked_for_in_every_peer_s_words(
    path: str, query: dict[str, str], body: Any, params: tuple[str, bool]
) -> None:
    of = house()
    response = send(of, "POST", path, params=query, json=body)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    assert call.kind is K.PAUSE
    mode, clear = params
    assert call.params == {**SHARED, "mode": mode, "clear_cache": clear, "lease_s": None}


@pytest.mark.promise(
    "Every call that changes something",
    "It takes `model`, `selector`, `timeout_s`, `lease_s` and an idempotency key",
)
def test_what_every_changing_call_may_say_reaches_the_coordinator() -> None:
    of = house("a", "b")
    response = send(
        of,
        "POST",
        "/pause",
        params={"lease_s": "30", "selector": "b*,a", "timeout_s": "2.5", "epoch": "0"},
        json={"model": "sim-chat", "mode": "keep"},
        headers={"idempotency-key": "once"},
    )
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    assert call.params["models"] == ["sim-chat"]
    assert call.params["boards"] == ["b", "a"]
    assert call.params["lease_s"] == 30
    assert (call.timeout_s, call.expected_epoch, call.key) == (2.5, 0, "once")
    assert call.who == "local 127.0.0.1"


@pytest.mark.promise(
    "Every call that changes something",
    "The answer has the body of vLLM or SGLang, and the result of each board",
)
def test_an_answer_has_the_peer_s_body_and_what_became_of_each_board() -> None:
    results = {
        "a": BoardOutcome(ResultStatus.OK, 12.34567, details={"stopped": 3}),
        "b": BoardOutcome(ResultStatus.GONE),
    }
    of = house("a", "b", results=results, desired=Desired(epoch=7))
    told = send(of, "POST", "/pause").json()
    assert told == {
        "status": "paused",
        "mode": "abort",
        "operation_id": "op-1",
        "kind": "pause",
        "state": "succeeded",
        "epoch": 7,
        "applied": True,
        "total": 2,
        "succeeded": 2,
        "results": {
            "a": {"stopped": 3, "status": "paused", "latency_ms": 12.346},
            "b": {"status": "gone", "latency_ms": 0.0},
        },
        "failed": [],
        "phases": {"stopping": 12.5},
    }


def partly(call: OperationRequest) -> OperationOutcome:
    failed = BoardOutcome(ResultStatus.SILENT, 9.0, "board_silent", "nothing came")
    head = FakeHead(results={"a": BoardOutcome(ResultStatus.OK), "b": failed})
    return head.outcome(call, 207, state=OperationState.PARTIAL)


def undone(call: OperationRequest) -> OperationOutcome:
    error = ControlError(504, "operation_timeout", "Board b is silent; the pause was undone.")
    return FakeHead().outcome(call, 504, state=OperationState.UNDONE, error=error)


@pytest.mark.promise(
    "Every call that changes something", "Some boards but not all are a 207, never a 200"
)
def test_where_some_boards_did_not_follow_the_answer_is_a_207_that_names_them() -> None:
    response = send(house("a", "b", says={"perform": partly}), "POST", "/resume")
    assert response.status_code == 207
    told = response.json()
    assert (told["status"], told["total"], told["succeeded"]) == ("resumed", 2, 1)
    (failed,) = told["failed"]
    assert failed["board"] == "b"
    assert failed["error"] == "board_silent"


@pytest.mark.promise(
    "Every call that changes something", "After the time limit it is undone, and a 504"
)
def test_what_was_undone_is_an_error_object_with_its_operation() -> None:
    response = send(house(says={"perform": undone}), "POST", "/pause")
    assert response.status_code == 504
    told = response.json()
    assert told["error"]["code"] == "operation_timeout"
    assert told["error"]["type"] == "server_error"
    assert told["state"] == "undone"
    assert told["operation_id"]
    assert "status" not in told


def test_what_the_coordinator_refuses_keeps_its_status() -> None:
    of = house(says={"perform": StaleEpoch("The cluster is at epoch 9.", "epoch")})
    response = send(of, "POST", "/pause", json={"epoch": 8})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "stale_epoch"


@pytest.mark.promise("Every call that changes something", "`async` is a 202 with an operation")
def test_an_asynchronous_call_is_a_202_with_its_operation() -> None:
    response = send(house(), "POST", "/pause", params={"async": "true"})
    assert response.status_code == 202
    assert response.json()["status"] == "pausing"
    assert response.json()["state"] == "running"


@pytest.mark.parametrize(
    ("path", "body", "kind", "params", "told"),
    [
        pytest.param("/resume", None, K.RESUME, SHARED, {"status": "resumed"}, id="resume"),
        pytest.param(
            "/continue_generation",
            {"boards": ["a"]},
            K.RESUME,
            {**SHARED, "boards": ["a"]},
            {"status": "ok", "message": "Generation continued successfully."},
            id="continue",
        ),
        pytest.param(
            "/abort_requests",
            {"request_ids": ["chatcmpl-1"]},
            K.ABORT,
            {"models": [], "boards": [], "request_ids": ["chatcmpl-1"]},
            {"status": "aborted", "aborted": 4},
            id="abort some",
        ),
        pytest.param(
            "/abort_requests",
            {"request_ids": []},
            K.ABORT,
            {"models": [], "boards": [], "request_ids": None},
            {"status": "aborted", "aborted": 4},
            id="abort all",
        ),
        pytest.param(
            "/reset_prefix_cache",
            {"reset_running_requests": True},
            K.CACHE_RESET,
            {"models": [], "boards": [], "reset_running_requests": True},
            {"success": True},
            id="reset",
        ),
        pytest.param(
            "/flush_cache",
            None,
            K.CACHE_RESET,
            {"models": [], "boards": [], "reset_running_requests": False},
            {"success": True},
            id="flush",
        ),
        pytest.param(
            "/update_weight_version",
            {"new_version": "step-12"},
            K.LABEL,
            {"model": "sim-chat", "label": "step-12", "reset_step": False},
            {"success": True, "new_version": "step-12"},
            id="label",
        ),
    ],
)
def test_other_changes(path: str, body: Any, kind: K, params: Any, told: dict[str, Any]) -> None:
    details = {"aborted": 4}
    of = house(results={"a": BoardOutcome(ResultStatus.OK, details=details)})
    response = send(of, "POST", path, json=body)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    assert (call.kind, call.params) == (kind, params)
    assert told.items() <= response.json().items()


# -- hostile bodies -------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, Any, int, str | None]] = [
    ("/pause", "", {"mode": "stop"}, 400, "mode"),
    ("/pause", "", {"mode": 1}, 400, "mode"),
    ("/pause", "", {"clear_cache": "yes"}, 400, "clear_cache"),
    ("/pause", "clear_cache=maybe", None, 400, "clear_cache"),
    ("/pause", "mode=keep&mode=wait", None, 400, "mode"),
    ("/pause", "mode=keep", {"mode": "wait"}, 400, "mode"),
    ("/pause", "mod=keep", None, 400, "mod"),
    ("/pause", "", {"lease_s": -1}, 400, "lease_s"),
    ("/pause", "", {"lease_s": 10**400}, 400, "lease_s"),
    ("/pause", "lease_s=nan", None, 400, "lease_s"),
    ("/pause", "lease_s=1_0", None, 400, "lease_s"),
    ("/pause", "timeout_s=1e999", None, 400, "timeout_s"),
    ("/pause", "", {"timeout_s": 0}, 400, "timeout_s"),
    ("/pause", "", {"epoch": 1.5}, 400, "epoch"),
    ("/pause", "epoch=-1", None, 400, "epoch"),
    ("/pause", "", {"boards": "a", "selector": "a"}, 400, "selector"),
    ("/pause", "", {"boards": [1]}, 400, "boards[0]"),
    ("/pause", "", {"boards": {"a": 1}}, 400, "boards"),
    ("/pause", "", {"boards": ["a"] * 300}, 400, "boards"),
    ("/pause", "", {"boards": ["nowhere"]}, 404, "boards"),
    ("/pause", "", {"selector": ["b*"]}, 404, "selector"),
    ("/pause", "boards=", None, 400, "boards"),
    ("/pause", "", {"model": "gpt"}, 404, "model"),
    ("/pause", "", {"model": "sim-chat", "models": ["sim-chat"]}, 400, "models"),
    ("/pause", "", {"adapter": "nobody"}, 404, "model"),
    ("/pause", "", {"adapter": ""}, 400, "adapter"),
    ("/pause", "", [], 400, None),
    ("/pause_generation", "", {"mode": "keep"}, 400, "mode"),
    ("/pause_generation", "", {"clear_cache": False}, 400, "clear_cache"),
    ("/resume", "", {"mode": "keep"}, 400, "mode"),
    ("/abort_requests", "", {"request_ids": 7}, 400, "request_ids"),
    ("/update_weight_version", "", {}, 400, "new_version"),
    ("/update_weight_version", "", {"new_version": "a\r\nx: y"}, 400, "new_version"),
    ("/update_weight_version", "", {"new_version": "ü"}, 400, "new_version"),
    ("/update_weight_version", "", {"new_version": "v" * 200}, 400, "new_version"),
    (
        "/update_weight_version",
        "",
        {"new_version": "v", "abort_all_requests": True},
        400,
        "abort_all_requests",
    ),
    (ADAPTERS, "", {"name": "tone"}, 400, "path"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "url": "http://x"}, 400, "path"),
    (ADAPTERS, "", {"name": "../x", "path": "/x"}, 400, "name"),
    (ADAPTERS, "", {"name": "sim-chat", "path": "/x"}, 400, "name"),
    (ADAPTERS, "", {"name": "tone", "path": "/x\0y"}, 400, "path"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "version": "a/b"}, 400, "version"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "sha256": "abc"}, 400, "sha256"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "scale": 0}, 400, "scale"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "weight": 0.5}, 400, "weight"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "max_unavailable": 0}, 400, "max_unavailable"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "strategy": "yolo"}, 400, "strategy"),
    (ADAPTERS, "", {"name": "tone", "path": "/x", "base_model": "gpt"}, 404, "model"),
    (
        ADAPTERS,
        "",
        {"name": "tone", "path": "/x", "base_model": "gpt", "model": "sim-chat"},
        400,
        "base_model",
    ),
    (f"{ADAPTERS}/tone/rollout", "", {}, 400, "version"),
    (f"{ADAPTERS}/nobody/rollback", "", {}, 404, "model"),
    (f"{ADAPTERS}/b%20d/promote", "", {}, 400, "name"),
    ("/v1/load_lora_adapter", "", {"lora_name": "x"}, 400, "lora_path"),
    (
        "/v1/load_lora_adapter",
        "",
        {"lora_name": "x", "lora_path": "/x", "base_model_name": "gpt"},
        404,
        "model",
    ),
    (
        "/v1/load_lora_adapter",
        "",
        {"lora_name": "x", "lora_path": "/x", "base_model_name": "gpt", "model": "sim-chat"},
        400,
        "base_model_name",
    ),
    ("/v1/unload_lora_adapter", "", {"lora_name": "nobody"}, 404, "model"),
]


@pytest.mark.parametrize(
    ("path", "query", "body", "status", "param"),
    [pytest.param(*case, id=f"{case[0]} {case[1]} {str(case[2])[:40]}") for case in REFUSED],
)
def test_what_is_wrong_is_refused_by_name_and_asks_nothing(
    path: str, query: str, body: Any, status: int, param: str | None
) -> None:
    of = house("a")
    target = f"{path}?{query}" if query else path
    response = send(of, "POST", target, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert of.head.calls == []


@pytest.mark.parametrize("key", ["", "two words", "k" * 201, "\u00fc"])
def test_a_key_that_could_not_be_kept_is_refused(key: str) -> None:
    of = house()
    response = send(of, "POST", "/pause", headers={"idempotency-key": key.encode("latin-1")})
    assert response.status_code == 400
    assert of.head.calls == []


# -- who may ---------------------------------------------------------------------------------------

OPERATORS = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/abort_requests"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/update_weight_version"),
    ("POST", ADAPTERS),
    ("POST", f"{ADAPTERS}/tone/rollout"),
    ("POST", f"{ADAPTERS}/tone/rollback"),
    ("POST", f"{ADAPTERS}/tone/promote"),
    ("DELETE", f"{ADAPTERS}/tone"),
    ("DELETE", f"{ADAPTERS}/tone/v1"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/v1/operations"),
    ("GET", "/v1/operations/op-1"),
    ("GET", "/v1/audit"),
]
CLIENTS = [
    ("POST", CHAT),
    ("GET", "/v1/models"),
    ("GET", "/v1/boards"),
    ("GET", "/v1/cluster"),
    ("GET", ADAPTERS),
    ("GET", "/is_paused"),
    ("GET", "/weight_info"),
    ("GET", "/v1/cache/kv/size"),
    ("GET", "/v1/generations/chatcmpl-1"),
    ("POST", "/v1/generations/chatcmpl-1/pause"),
]


@pytest.mark.promise(
    "Every call that changes something",
    "It needs the admin key; without one it accepts loopback only",
)
@pytest.mark.parametrize(("method", "path"), OPERATORS)
def test_control_needs_the_admin_key_or_this_machine(method: str, path: str) -> None:
    of = house()
    assert send(of, method, path, host="10.0.0.7").status_code == 403
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr("s3cret")))
    for headers in ({}, {"authorization": "Basic s3cret"}):
        response = send(of, method, path, headers=headers)
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "forbidden"
        assert "s3cret" not in response.text
    response = send(of, method, path, headers={"authorization": "Bearer wrong"})
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert of.head.asked == []
    good = {"authorization": "Bearer s3cret"}
    assert send(of, method, path, host="10.0.0.7", headers=good).status_code != 403


@pytest.mark.promise(
    "Every call that changes something",
    "It needs the admin key; without one it accepts loopback only",
)
@pytest.mark.parametrize(("method", "path"), CLIENTS)
def test_with_api_keys_every_other_route_needs_one_or_the_admin_key(
    method: str, path: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# clients\n\nkey-one\n  key-two  \n")
    config = RouterConfig(api_keys_file=file, admin_key=SecretStr("boss"))
    of = House(FakeBoards.answering("a"), config)
    of.boards.says = {("", "generations"): [], ("", "kv"): EnginePaused("x"), ("", "control"): []}
    for headers in (
        {},
        {"authorization": "Bearer key-three"},
        {"authorization": "Bearer # clients"},
    ):
        response = send(of, method, path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for key in ("key-one", "key-two", "boss"):
        response = send(of, method, path, headers={"authorization": f"Bearer {key}"})
        assert response.status_code != 401
    assert (
        send(of, "POST", "/pause", headers={"authorization": "Bearer key-one"}).status_code == 403
    )


@pytest.mark.parametrize("path", ["/health", "/metrics", "/ready"])
def test_what_a_watchdog_asks_needs_no_key(path: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-one\n")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=file))
    assert send(of, "GET", path).status_code == 200


# -- the answer of a pause waits for this Router's own streams ------------------------------------


def emitted(of: House, tokens: int | None) -> Emitted:
    """What board a says of the first stream; None is that it has ended there."""
    request_id = of.boards.opened[0][1].request_id
    return Emitted("a", () if tokens is None else ((request_id, tokens),))


def paused(tokens: int) -> Paused:
    return Paused("cluster", tokens, Kv.RECOMPUTED)


@pytest.mark.promise("Pause", "It is answered when every selected board has stopped emitting")
@pytest.mark.parametrize(
    "earlier",
    [
        pytest.param([Delta("one", (1,))], id="its first pause"),
        pytest.param([Delta("one", (1,)), paused(1)], id="the event of an earlier pause is there"),
        pytest.param(
            [paused(1), Delta("one", (1,))], id="a token that an earlier pause held back came since"
        ),
    ],
)
@pytest.mark.parametrize(
    "late",
    [
        pytest.param([Delta("two", (2,)), paused(2)], id="a token"),
        pytest.param([paused(2)], id="a token whose text is held back"),
        pytest.param([Delta("two", (2,)), finished(2)], id="the end"),
    ],
)
async def test_a_pause_is_answered_when_the_last_token_has_reached_the_client(
    earlier: list[Step], late: list[Step]
) -> None:
    gate = asyncio.Event()
    script = [accepted("a"), *earlier, gate, *late, asyncio.Event()]
    of = House(FakeBoards([report("a")], {"replica of a": [script]}))
    stream = asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
    await eventually(lambda: of.boards.opened and len(of.service.flows) == 1)
    await asyncio.sleep(0.05)
    ended = isinstance(late[-1], Finished)
    of.boards.says["", "emitted"] = emitted(of, None if ended else 2)
    pause = asyncio.create_task(of("POST", "/pause", json={"mode": "keep"}))
    await eventually(lambda: of.head.calls)
    await asyncio.sleep(0.1)
    assert not pause.done(), "a token was still on its way"
    gate.set()
    assert (await pause).status_code == 200
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert len(of.service.flows) == 0


async def test_a_client_that_reads_nothing_holds_a_pause_up_for_a_moment_only() -> None:
    boards = FakeBoards([report("a")], {"replica of a": [[accepted("a"), asyncio.Event()]]})
    of = House(boards)
    stream = asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
    await eventually(lambda: len(of.service.flows) == 1)
    boards.says["", "emitted"] = emitted(of, 7)
    response = await asyncio.wait_for(of("POST", "/pause", json={"mode": "keep"}), 10)
    assert response.status_code == 200
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)


@pytest.mark.parametrize(
    ("scope", "says"),
    [
        pytest.param({"boards": ["b"]}, 7, id="of another board"),
        pytest.param({"adapter": "tone"}, 7, id="of an adapter"),
        pytest.param({}, 0, id="that has not begun"),
        pytest.param({}, BoardFailed("a", "it died"), id="of a board that died"),
    ],
)
async def test_a_pause_waits_for_no_stream(scope: dict[str, Any], says: Any) -> None:
    boards = FakeBoards.answering("a", "b")
    boards.scripts["replica of a"] = [[accepted("a"), asyncio.Event()]]
    boards.reported = [report("a")]
    of = House(boards, head=FakeHead(Desired(3, lines=(line(),))))
    stream = asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
    await eventually(lambda: len(of.service.flows) == 1)
    boards.reported = [report("a"), report("b")]
    known = says if isinstance(says, Exception) else emitted(of, says)
    boards.says["", "emitted"] = known
    began_s = asyncio.get_running_loop().time()
    response = await of("POST", "/pause", json={"mode": "keep", **scope})
    assert response.status_code == 200, response.text
    assert asyncio.get_running_loop().time() - began_s < AT_REST_S, "it waited in vain"
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)


# -- adapters -------------------------------------------------------------------------------------


def test_an_upload_is_streamed_in_parts_staged_and_rolled_out() -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(25):
            yield b"x" * 100_000

    of = house()
    response = send(
        of,
        "POST",
        ADAPTERS,
        params={"name": "tone", "scale": "0.5", "strategy": "canary", "canary_weight": "0.25"},
        content=content(),
        headers={**OCTETS, "idempotency-key": "k"},
    )
    assert response.status_code == 200, response.text
    sizes = [len(part) for part in of.head.parts]
    assert sum(sizes) == 2_500_000
    assert max(sizes) == cluster_routes.PART_BYTES
    begun = next(args for method, args in of.head.asked if method == "upload_begin")
    assert begun == (DeclaredArtifact("tone", None, "sim-chat"),)
    ended = next(args for method, args in of.head.asked if method == "upload_end")
    assert ended == ("upload-1", {"scale": 0.5, "base_model": "sim-chat"})
    stage, rollout = of.head.calls
    assert (stage.kind, stage.key) == (K.ADAPTER_STAGE, "k:stage")
    assert stage.params["digest"] == version("tone", "v2").ref.digest
    assert (rollout.kind, rollout.key) == (K.ADAPTER_ROLLOUT, "k")
    assert rollout.params == {
        "model": "sim-chat",
        "name": "tone",
        "version": "v2",
        "strategy": "canary",
        "in_flight": "pin",
        "auto": True,
        "weight": 0.25,
    }
    told = response.json()
    assert (told["label"], told["activated"], told["bytes"]) == ("tone@v2", True, 2_500_000)
    assert told["kind"] == "adapter_rollout"
    assert told["staging"]["kind"] == "adapter_stage"
    assert told["staging"]["results"]["a"]["status"] == "staged"


@pytest.mark.parametrize("way", ["query", "body"])
def test_a_manifest_reaches_the_coordinator_as_it_was_sent(way: str) -> None:
    envelope = {"payload": "e30=", "payloadType": "x", "signatures": [{"keyid": "", "sig": ""}]}
    of = house()
    if way == "query":
        params = {"name": "tone", "manifest": json.dumps(envelope), "activate": "false"}
        response = send(of, "POST", ADAPTERS, params=params, content=b"x", headers=OCTETS)
        ((claim,),) = [args for method, args in of.head.asked if method == "upload_begin"]
    else:
        body = {"name": "tone", "path": "/srv/x", "manifest": envelope, "activate": False}
        response = send(of, "POST", ADAPTERS, json=body)
        (claim,) = [args[2] for method, args in of.head.asked if method == "register"]
    assert response.status_code == 200, response.text
    assert json.loads(claim.manifest) == envelope
    assert claim.who == "local 127.0.0.1"


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        pytest.param({"payload": "x" * 8192}, "has 8206 characters; the limit is 8192", id="long"),
        pytest.param(7, "expected a DSSE envelope", id="a number"),
        pytest.param([], "expected a DSSE envelope", id="a list"),
    ],
)
def test_a_manifest_that_is_none_is_a_400(manifest: Any, words: str) -> None:
    of = house()
    body = {"name": "tone", "path": "/srv/x", "manifest": manifest}
    response = send(of, "POST", ADAPTERS, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert of.head.asked == []


def test_the_list_of_adapters_has_the_signed_version_and_its_key() -> None:
    tone = line()
    assert tone.active is not None
    accepted = AcceptedManifest("sim-chat", "tone", 7, "adapter", "SHA256:abc", "release")
    known = {tone.active.digest: (accepted,)}
    of = house(desired=Desired(4, lines=(tone,)), says={"manifests": lambda _: known})
    (entry,) = send(of, "GET", ADAPTERS).json()["data"]
    assert [one["manifest"] for one in entry["versions"]] == [
        {"version": 7, "key": "release", "key_id": "SHA256:abc"}
    ]
    of.head.says["manifests"] = {}
    (entry,) = send(of, "GET", ADAPTERS).json()["data"]
    assert [one["manifest"] for one in entry["versions"]] == [None]


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_an_upload_beyond_its_own_limit_is_a_413_and_leaves_nothing(announced: bool) -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(60):
            yield b"x" * 100_000

    of = house()
    body: Any = b"x" * (MAX_ADAPTER_BYTES + 1) if announced else content()
    response = send(of, "POST", ADAPTERS, params={"name": "t"}, content=body, headers=OCTETS)
    assert response.status_code == 413
    assert of.head.parts == []
    assert of.head.calls == []
    aborted = [method for method, _ in of.head.asked if method == "upload_abort"]
    assert len(aborted) == (0 if announced else 1)


def test_an_upload_that_does_not_verify_is_refused_and_forgotten() -> None:
    of = house(says={"upload_end": ArtifactRefused("The sha256 is another.")})
    response = send(of, "POST", ADAPTERS, params={"name": "t"}, content=b"x", headers=OCTETS)
    assert response.status_code == 400
    assert of.head.parts == []
    assert of.head.calls == []


def test_what_not_all_boards_have_is_not_rolled_out() -> None:
    of = house("a", "b", says={"perform": partly})
    response = send(of, "POST", ADAPTERS, json={"name": "tone", "path": "/srv/a.rkllm"})
    assert response.status_code == 207
    assert [call.kind for call in of.head.calls] == [K.ADAPTER_STAGE]
    assert response.json()["activated"] is False


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"path": "/srv/a.rkllm"}, id="a path"),
        pytest.param({"url": "https://models/a"}, id="a URL"),
    ],
)
def test_a_registered_file_may_only_be_staged(body: dict[str, str]) -> None:
    of = house()
    asked = {"name": "tone", "version": "v9", "activate": False, "sha256": "a" * 64, **body}
    response = send(of, "POST", ADAPTERS, json=asked)
    assert response.status_code == 200, response.text
    method, args = of.head.asked[0]
    assert method == "register"
    claim = DeclaredArtifact("tone", "v9", "sim-chat", sha256="a" * 64)
    assert args == (*next(iter(body.items())), claim, 1.0)
    assert [call.kind for call in of.head.calls] == [K.ADAPTER_STAGE]


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "params"),
    [
        pytest.param(
            "POST",
            "/rollout",
            {"version": "v1", "strategy": "rolling", "max_unavailable": 2, "in_flight": "switch"},
            K.ADAPTER_ROLLOUT,
            {
                "version": "v1",
                "strategy": "rolling",
                "max_unavailable": 2,
                "in_flight": "switch",
                "auto": True,
            },
            id="rollout",
        ),
        pytest.param("POST", "/rollback", None, K.ADAPTER_ROLLBACK, {}, id="rollback"),
        pytest.param("POST", "/promote", None, K.ADAPTER_PROMOTE, {}, id="promote"),
        pytest.param("DELETE", "", None, K.ADAPTER_RETIRE, {"version": None}, id="the whole line"),
        pytest.param("DELETE", "/v1", None, K.ADAPTER_RETIRE, {"version": "v1"}, id="a version"),
    ],
)
def test_known_versions(method: str, path: str, body: Any, kind: K, params: dict[str, Any]) -> None:
    of = house(desired=Desired(3, lines=(line(),)))
    response = send(of, method, f"{ADAPTERS}/tone{path}", json=body)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    assert (call.kind, call.params) == (kind, {"model": "sim-chat", "name": "tone", **params})


def test_vllm_s_calls_answer_in_its_words() -> None:
    of = house(desired=Desired(3, lines=(line(),)))
    loaded = {"lora_name": "fresh", "lora_path": "/srv/a.rkllm", "base_model_name": "sim-chat"}
    response = send(of, "POST", "/v1/load_lora_adapter", json=loaded)
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'fresh' added successfully."
    assert response.headers["x-operation-id"] == "op-2"
    again = {"lora_name": "tone", "lora_path": "/srv/a.rkllm"}
    response = send(of, "POST", "/v1/load_lora_adapter", json=again)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "adapter_exists"
    response = send(of, "POST", "/v1/load_lora_adapter", json={**again, "load_inplace": True})
    assert response.status_code == 200
    response = send(of, "POST", "/v1/unload_lora_adapter", json={"lora_name": "tone"})
    assert response.text == "Success: LoRA adapter 'tone' removed successfully."
    assert of.head.calls[-1].kind is K.ADAPTER_RETIRE


def test_the_table_of_versions_says_which_board_has_what() -> None:
    first, second = version("tone", "v1"), version("tone", "v2")
    boards = FakeBoards(
        [
            report("a", staged=(first.ref.key, second.ref.key), adapters=(first.ref.key,)),
            report("b", staged=(first.ref.key,)),
        ]
    )
    tone = line(candidate=second, weight=0.25)
    of = House(boards, head=FakeHead(Desired(4, lines=(tone,))))
    told = send(of, "GET", ADAPTERS).json()
    assert told["epoch"] == 4
    (entry,) = told["data"]
    assert (entry["active"], entry["candidate"], entry["weight"]) == ("v1", "v2", 0.25)
    one, two = entry["versions"]
    assert (one["role"], two["role"]) == ("active", "candidate")
    assert one["sha256"] == first.ref.digest
    assert one["boards"] == {
        "a": {"staged": True, "loaded": True},
        "b": {"staged": True, "loaded": False},
    }
    assert two["boards"]["b"] == {"staged": False, "loaded": False}


def test_models_are_listed_by_names_that_a_request_may_send() -> None:
    staged = line("junk", active=None, kept=(version("junk", "v1"),))
    lines = (line("tone", kept=(version("tone", "v2"),)), staged)
    of = House(FakeBoards.answering("a"), head=FakeHead(Desired(4, lines=lines)))
    names = [one["id"] for one in send(of, "GET", "/v1/models").json()["data"]]
    assert [name for name in names if "tone" in name] == ["sim-chat:tone"]
    assert [name for name in names if "junk" in name] == ["sim-chat:junk@v1"]
    for name in names:
        assert send(of, "GET", f"/v1/models/{name}").status_code == 200
    unserved = send(of, "POST", CHAT, json=chat(model="sim-chat:junk"))
    assert (unserved.status_code, unserved.json()["error"]["code"]) == (404, "model_not_found")


# -- looking --------------------------------------------------------------------------------------


def pause(*boards: str, adapter: str | None = None) -> ActivePause:
    return ActivePause("op", Scope((), boards, adapter), PauseMode.KEEP)


@pytest.mark.promise("Pause", "`GET /is_paused` has any, all, the epoch and each board")
@pytest.mark.parametrize(
    ("pauses", "told"),
    [
        pytest.param((), (False, False, []), id="nothing"),
        pytest.param((pause("a"),), (True, False, ["a"]), id="half of it"),
        pytest.param((pause(),), (True, True, ["a", "b"]), id="everything"),
        pytest.param((pause(adapter="tone"),), (False, False, []), id="an adapter"),
    ],
)
def test_is_paused_tells_any_all_and_each(pauses: Any, told: tuple[bool, bool, list[str]]) -> None:
    of = house("a", "b", desired=Desired(5, pauses=pauses))
    found = send(of, "GET", "/is_paused").json()
    paused = [board for board, entry in found["boards"].items() if entry["paused"]]
    assert (found["is_paused"], found["all"], paused) == told
    assert found["epoch"] == 5
    assert bool(found["adapters"]) is any(one.scope.adapter for one in pauses)


def test_weights_are_told_by_model_and_adapter() -> None:
    desired = Desired(5, lines=(line(),), weights=(Weights("sim-chat", "step-3", 3),))
    told = send(house(desired=desired), "GET", "/weight_info").json()
    assert (told["weight_version"], told["step"]) == ("step-3", 3)
    assert told["models"]["sim-chat"]["adapters"] == {"tone": "v1"}


def test_the_cluster_adds_up() -> None:
    figures = {
        "context_len": 1000,
        "prompt_tokens": 100,
        "decode_tokens": 50,
        "decode_ms": 2500.0,
        "versions": (VersionFigures("tone@v1", 3, 1, 40, 2000.0),),
    }
    boards = FakeBoards(
        [
            report("a", kv_positions=10, cached_tokens=75, running=1, n_batch=4, **figures),
            report("b", kv_positions=20, hardware=Hardware(temperature_c=61.5), **figures),
        ]
    )
    of = House(boards, head=FakeHead(Desired(6, pauses=(pause("b"),))))
    told = send(of, "GET", "/v1/cluster").json()
    total = told["total"]
    assert (total["boards"], total["ready"], total["paused_boards"]) == (2, 2, 1)
    assert (total["positions"], total["capacity"]) == (30, 5000)
    assert total["hit_ratio"] == 0.375
    assert total["temperature_c"] == 61.5
    assert told["coordinator"]["reachable"] is True
    first, second = told["boards"]
    assert (first["hold"], second["hold"]) == (None, "keep")
    assert first["decode_speed"] == 20.0
    assert first["versions"][0]["decode_tokens_per_s"] == 20.0
    assert told["models"]["sim-chat"]["boards"] == 2
    assert told["pauses"][0]["boards"] == ["b"]


def test_operations_and_the_audit_log_are_listed() -> None:
    of = house()
    told = send(of, "GET", "/v1/operations", params={"limit": "1"}).json()
    (entry,) = told["data"]
    assert (entry["id"], entry["object"], entry["kind"]) == ("op-0", "operation", "pause")
    assert entry["error"] is None
    assert send(of, "GET", "/v1/operations/nope").json()["error"]["code"] == "operation_not_found"
    assert send(of, "GET", "/v1/audit").json()["data"] == [{"who": "local", "kind": "pause"}]
    for limit in ("0", "1001", "x", "1.5"):
        assert send(of, "GET", "/v1/operations", params={"limit": limit}).status_code == 400


def test_the_coordinator_s_metrics_stand_beside_the_router_s_and_may_be_missing() -> None:
    of = house()
    assert "rkserve_desired_epoch 3.0" in send(of, "GET", "/metrics").text
    of.head.away = True
    text = send(of, "GET", "/metrics").text
    assert "rkserve_desired_epoch" not in text
    assert "rkserve_requests_in_flight" in text


# -- without the Coordinator ----------------------------------------------------------------------


def test_without_the_coordinator_requests_are_served_as_it_said_last() -> None:
    of = house(desired=Desired(3, lines=(line(),)))
    assert send(of, "GET", "/health").status_code == 200  # it has been heard now
    of.head.away = True
    response = send(of, "POST", CHAT, json={**chat(), "model": "tone"})
    assert response.status_code == 200
    assert of.boards.opened[0][1].line == "tone"
    response = send(of, "POST", "/pause")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "coordinator_unavailable"
    assert "retry-after" in response.headers


def test_before_the_coordinator_was_ever_heard_an_unknown_name_is_not_denied() -> None:
    of = house()
    of.head.away = True
    assert send(of, "POST", CHAT, json=chat()).status_code == 200
    response = send(of, "POST", CHAT, json={**chat(), "model": "tone"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "coordinator_unavailable"


# -- pauses as requests see them ------------------------------------------------------------------


@pytest.mark.promise(
    "Pause", "`abort` and `wait`: new requests get 503 `engine_paused` with `Retry-After`"
)
def test_the_pause_of_all_boards_is_a_503_that_says_when_to_come_back() -> None:
    boards = FakeBoards([report("a")], {"replica of a": [[EnginePaused("the cluster", 7)]]})
    response = send(House(boards), "POST", CHAT, json=chat())
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["code"] == "engine_paused"


def test_a_board_that_is_not_held_goes_first() -> None:
    of = house("a", "b", desired=Desired(3, pauses=(pause("a"),)))
    for _ in range(6):
        assert send(of, "POST", CHAT, json=chat()).headers["x-rkserve-board"] == "b"
