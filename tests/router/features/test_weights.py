"""Adapter calls, weight updates and base weights: uploaded, checked, repeated and retired."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import DeclaredArtifact, OperationKind, OperationRequest
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationOutcome,
    OperationState,
    ResultStatus,
)
from rkserve.core.desired_state import BaseVersion
from rkserve.core.errors import ArtifactRefused, OperationConflict, StaleWeights
from rkserve.models.files import Parameter
from tests.support.cluster.fake_cluster import Control
from tests.support.http.coordinator_house import Ask, with_both
from tests.support.http.router_house import MAX_MODEL_BYTES
from tests.support.http.weights_house import (
    BASE,
    DISK,
    MODEL,
    UPDATE,
    WEIGHTS,
    house,
    request,
    send,
)
from tests.support.values.control_values import recorded


def test_an_adapter_is_pushed_listed_and_retired(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        pushed = await ask("POST", "/v1/lora_adapters", json={"name": "tone", "path": "/srv/x"})
        assert pushed.status_code == 200, pushed.text
        told = pushed.json()
        assert (told["activated"], told["kind"]) == (True, "adapter_rollout")
        assert told["staging"]["results"].keys() == {"a", "b"}
        (entry,) = (await ask("GET", "/v1/lora_adapters")).json()["data"]
        assert entry["active"] == "v1"
        models = (await ask("GET", "/v1/models")).json()["data"]
        assert "sim-chat:tone" in {one["id"] for one in models}
        label = {"new_version": "step-2"}
        assert (await ask("POST", "/update_weight_version", json=label)).status_code == 200
        assert (await ask("GET", "/weight_info")).json()["weight_version"] == "step-2"
        for path in ("/reset_prefix_cache", "/abort_requests"):
            made = await ask("POST", path)
            assert made.status_code == 200, made.text
        gone = await ask("POST", "/v1/unload_lora_adapter", json={"lora_name": "tone"})
        assert gone.text == "Success: LoRA adapter 'tone' removed successfully."
        assert (await ask("GET", "/v1/lora_adapters")).json()["data"] == []
        assert "rkserve_desired_epoch" in (await ask("GET", "/metrics")).text

    with_both(tmp_path, work)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        pytest.param("DELETE", "/v1/lora_adapters/tone", None, id="an adapter"),
        pytest.param("DELETE", "/v1/lora_adapters/tone/v1", None, id="its only version"),
        pytest.param("POST", "/v1/unload_lora_adapter", {"lora_name": "tone"}, id="vLLM's unload"),
    ],
)
def test_a_removal_that_is_repeated_is_answered_as_the_first_time(
    tmp_path: Path, method: str, path: str, body: Any
) -> None:
    async def work(ask: Ask, control: Control) -> None:
        await ask("POST", "/v1/lora_adapters", json={"name": "tone", "path": "/srv/x"})
        once = {"headers": {"idempotency-key": "gone"}, "json": body}
        first = await ask(method, path, **once)
        assert first.status_code == 200, first.text
        assert control.desired.line("sim-chat", "tone") is None
        again = await ask(method, path, **once)
        assert again.status_code == 200, again.text
        if body is None:
            assert again.json() == {**first.json(), "applied": False}
        else:
            assert (again.text, again.headers["x-operation-id"]) == (
                first.text,
                first.headers["x-operation-id"],
            )
        other = await ask(method, path, headers={"idempotency-key": "another"}, json=body)
        assert other.status_code == 404

    with_both(tmp_path, work)


def test_a_load_that_is_repeated_is_answered_as_the_first_time(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        path, body = "/v1/load_lora_adapter", {"lora_name": "tone", "lora_path": "/srv/x"}
        once = {"headers": {"idempotency-key": "once"}}
        first = await ask("POST", path, json=body, **once)
        assert first.status_code == 200, first.text
        count = len(control.it.operations(10))
        control.store.files.clear()  # nothing is read or staged again
        again = await ask("POST", path, json=body, **once)
        assert again.status_code == 200, again.text
        assert (again.text, again.headers["x-operation-id"]) == (
            first.text,
            first.headers["x-operation-id"],
        )
        assert len(control.it.operations(10)) == count
        mistaken = await ask("POST", path, json={**body, "lora_name": "other"}, **once)
        assert mistaken.status_code == 400
        assert mistaken.json()["error"]["param"] == "Idempotency-Key"
        assert len(control.it.operations(10)) == count, "nothing was staged for it"
        unkeyed = await ask("POST", path, json=body)
        assert unkeyed.json()["error"]["code"] == "adapter_exists"

    with_both(tmp_path, work)


def test_a_load_that_was_lost_after_its_staging_goes_on_when_it_is_repeated(
    tmp_path: Path,
) -> None:
    async def work(ask: Ask, control: Control) -> None:
        version = control.store.add("v1", b"x" * 300)
        staged = await control.stage(version, key="once:stage", scale=1.0, force=False)
        assert staged.status == 200
        label = {"new_version": "step-1"}  # so that the Router hears what became of it
        assert (await ask("POST", "/update_weight_version", json=label)).status_code == 200
        (entry,) = (await ask("GET", "/v1/lora_adapters")).json()["data"]
        assert entry["active"] is None
        path, body = "/v1/load_lora_adapter", {"lora_name": "tone", "lora_path": "/srv/x"}
        loaded = await ask("POST", path, json=body, headers={"idempotency-key": "once"})
        assert loaded.status_code == 200, loaded.text
        (entry,) = (await ask("GET", "/v1/lora_adapters")).json()["data"]
        assert entry["active"] == "v1"
        kinds = sorted(one.kind.value for one in control.it.operations(10))
        assert kinds == ["adapter_rollout", "adapter_stage", "label"]

    with_both(tmp_path, work)


K = OperationKind

OCTETS = {"content-type": "application/octet-stream"}

HEAD = {"name": "lm_head", "shape": [4, 8], "dtype": "torch.bfloat16"}


@pytest.mark.promise("Weights", "An update in PipelineRL's form is applied when it is answered")
def test_an_update_in_pipelinerl_s_words_serves_the_adapter_it_names() -> None:
    of = house()
    response = send(of, "POST", UPDATE, json=request(), headers={"idempotency-key": "k"})
    assert response.status_code == 200, response.text
    told = response.json()
    assert told["status"] == "ok"
    assert set(told["timing"]) == {
        "lock_ms",
        "pause_ms",
        "broadcast_ms",
        "verify_ms",
        "resume_ms",
        "total_ms",
    }
    assert (told["kind"], told["applied"], told["succeeded"]) == ("weight_update", True, 1)
    (call,) = of.head.calls
    assert (call.kind, call.key) == (K.WEIGHT_UPDATE, "k")
    assert call.params == {
        "model": MODEL,
        "step": 7,
        "in_flight": "switch",
        "name": "tone",
        "version": "v2",
    }


def test_an_update_may_list_the_tensors_and_name_base_weights() -> None:
    of = house()
    listed = request(artifact="tone@v2", parameters_info=[HEAD])
    assert send(of, "POST", UPDATE, json=listed).status_code == 200
    base = {"name": f"{MODEL}@step-7", "shape": [5678], "dtype": "uint8"}
    body = request(parameters_info=[base], in_flight="abort")
    assert send(of, "POST", UPDATE, json=body).status_code == 200
    assert of.head.calls[-1].params == {
        "model": MODEL,
        "step": 7,
        "in_flight": "abort",
        "version": "step-7",
        "digest": BASE.digest,
        "size_bytes": 5678,
    }


@pytest.mark.promise("Weights", "A wrong update is refused before anything pauses")
@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        pytest.param(
            {"artifact": "tone@v9", "parameters_info": []}, 404, "artifact_not_found", id="unknown"
        ),
        pytest.param(
            {"parameters_info": [{"name": "tone@v2", "shape": [1], "dtype": "uint8"}]},
            400,
            "artifact_refused",
            id="another size",
        ),
        pytest.param(
            {"artifact": "tone@v2", "parameters_info": [{**HEAD, "shape": [8, 4]}]},
            400,
            "artifact_refused",
            id="another shape",
        ),
        pytest.param({"model": "no-such"}, 404, "model_not_found", id="another model"),
        pytest.param({"version": None}, 400, "invalid_request", id="no step"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_before_anything_is_asked(
    changes: dict[str, Any], status: int, code: str
) -> None:
    of = house()
    response = send(of, "POST", UPDATE, json=request(**changes))
    assert response.status_code == status, response.text
    if code != "invalid_request":
        assert response.json()["error"]["code"] == code
    assert of.head.calls == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(StaleWeights("Step 9 is applied.", "version"), "stale_weights", id="stale"),
        pytest.param(OperationConflict("'op-1' goes on."), "operation_conflict", id="overlapping"),
    ],
)
def test_what_comes_too_late_or_in_between_is_a_409(error: Exception, code: str) -> None:
    of = house(says={"perform": error})
    response = send(of, "POST", UPDATE, json=request())
    assert (response.status_code, response.json()["error"]["code"]) == (409, code)


def test_a_repeat_with_the_same_key_asks_for_the_same_and_looks_at_no_file() -> None:
    earlier = recorded("op-1", K.REBASE, params={"digest": BASE.digest, "size_bytes": 5678})
    of = house(says={"operation_by_key": earlier, "register_model": AssertionError("looked")})
    body = {"model_path": "/srv/new.rkllm"}
    response = send(of, "POST", DISK, json=body, headers={"idempotency-key": "k"})
    assert response.status_code == 200, response.text
    assert of.head.calls[0].params["digest"] == BASE.digest


def answered(**changes: Any) -> Any:
    """A Coordinator's answer to every call."""

    def perform(call: OperationRequest) -> OperationOutcome:
        results = {
            "a": BoardOutcome(ResultStatus.OK, 5.0, details={"stopped": 2}),
            "b": BoardOutcome(ResultStatus.OK, 5.0, details={"stopped": 3}),
        }
        known = {"state": OperationState.SUCCEEDED, "results": results}
        operation = ControlOperation("op-1", call.action, **{**known, **changes})
        return OperationOutcome(operation.status, operation)

    return perform


def test_other_base_weights_come_in_sglang_s_words() -> None:
    of = house(says={"perform": answered()})
    body = {"model_path": "/srv/new.rkllm", "weight_version": "step-7"}
    response = send(of, "POST", DISK, json=body)
    assert response.status_code == 200, response.text
    told = response.json()
    assert (told["success"], told["num_paused_requests"]) == (True, 5)
    assert told["message"]
    assert told["operation_id"] == "op-1"
    (call,) = of.head.calls
    assert call.params == {
        "model": MODEL,
        "model_path": "/srv/new.rkllm",
        "label": "step-7",
        "in_flight": "pin",
        "max_unavailable": 1,
        "digest": BASE.digest,
        "size_bytes": 5678,
    }
    assert (
        "register",
        ("path", "/srv/new.rkllm", DeclaredArtifact(MODEL, None, MODEL, base=True), 1.0),
    ) in (of.head.asked)


@pytest.mark.parametrize(
    ("place", "digest"),
    [
        pytest.param("default", None, id="the folder's own file"),
        pytest.param(f"{MODEL}@step-7", BASE.digest, id="what was sent before"),
    ],
)
def test_weights_that_need_no_copy_are_named(place: str, digest: str | None) -> None:
    of = house(says={"perform": answered()})
    assert send(of, "POST", DISK, json={"model_path": place}).status_code == 200
    assert of.head.calls[0].params["digest"] == digest
    assert all(method != "register" for method, _ in of.head.asked)


def test_what_is_in_the_folder_already_is_the_folders_own() -> None:
    of = house(says={"perform": answered(), "register_model": lambda *_: None})
    assert send(of, "POST", DISK, json={"model_path": "/srv/same.rkllm"}).status_code == 200
    assert of.head.calls[0].params["digest"] is None


def test_an_update_that_was_undone_says_so_in_sglang_s_words_too() -> None:
    error = ControlError(503, "rebase_failed", "Board b did not take the weights.")
    of = house(says={"perform": answered(state=OperationState.UNDONE, error=error)})
    response = send(of, "POST", DISK, json={"model_path": "/srv/new.rkllm"})
    told = response.json()
    assert (response.status_code, told["success"]) == (503, False)
    assert told["message"] == error.message
    assert told["error"]["code"] == "rebase_failed"
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        pytest.param({"model_path": "new.rkllm"}, 404, "artifact_not_found", id="no full path"),
        pytest.param({"model_path": "tone@v2"}, 404, "artifact_not_found", id="an adapter"),
        pytest.param(
            {"model_path": "/x", "flush_cache": False}, 400, "unsupported_parameter", id="KV"
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused(body: dict[str, Any], status: int, code: str) -> None:
    of = house()
    response = send(of, "POST", DISK, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert of.head.calls == []


def test_base_weights_are_taken_by_their_path_or_as_they_come() -> None:
    def end(_upload: str, _manifest: Any) -> BaseVersion:
        content = b"".join(of.head.parts)
        return BaseVersion(MODEL, "v1", hashlib.sha256(content).hexdigest(), len(content))

    of = house(says={"upload_end_model": end})
    body = {"path": "/srv/new.rkllm", "version": "step-7", "parameters": [HEAD]}
    told = send(of, "POST", WEIGHTS, json=body).json()
    assert (told["id"], told["sha256"], told["parameters"]) == (f"{MODEL}@step-7", BASE.digest, 1)
    sent = send(of, "POST", WEIGHTS, content=b"model" * 9, headers=OCTETS, params={"version": "v1"})
    assert (sent.status_code, sent.json()["bytes"]) == (200, 45)
    (claim,) = [args[0] for method, args in of.head.asked if method == "upload_begin"]
    assert (claim.base, claim.name, claim.version, claim.size_bytes) == (True, MODEL, "v1", 45)


def test_base_weights_that_are_too_long_are_a_413() -> None:
    of = house()
    content = b"x" * (MAX_MODEL_BYTES + 1)
    assert send(of, "POST", WEIGHTS, content=content, headers=OCTETS).status_code == 413


def test_what_the_store_refuses_is_told() -> None:
    of = house(says={"register_model": ArtifactRefused("It is a page of HTML.", "model_path")})
    response = send(of, "POST", WEIGHTS, json={"path": "/srv/x.rkllm"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "artifact_refused")


def test_an_adapters_manifest_reaches_the_store() -> None:
    of = house()
    body = {
        "name": "tone",
        "version": "v3",
        "path": "/srv/tone",
        "parameters": [HEAD],
        "base_digest": "c" * 64,
    }
    assert send(of, "POST", "/v1/lora_adapters", json=body).status_code == 200
    (claim,) = [args[2] for method, args in of.head.asked if method == "register"]
    assert claim.base_digest == "c" * 64
    assert claim.parameters == (Parameter("lm_head", (4, 8), "bfloat16"),)
