"""Adapter calls of a Router on a real Coordinator: pushed, loaded, repeated and retired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.fake_cluster import Control
from tests.support.http.coordinator_house import Ask, with_both


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
        staged = await control.stage(version, key="once:stage", scale=1.0)
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
