"""The Router's routes on a Coordinator as it is, with boards that obey: both halves agree."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from rkserve.config.router import RouterConfig
from rkserve.coordinator.coordinator import Coordinator
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.errors import ArtifactRefused
from rkserve.core.metrics import RouterMetrics
from rkserve.http.app import make_app
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_cluster import Control, FakeCluster, FakeStore
from tests.support.http.router_house import model

BOARDS = ("a", "b")


class Direct:
    """``HeadLink`` to a Coordinator in the same loop, and to one file as long as it is there."""

    def __init__(self, it: Coordinator, version: AdapterVersion, store: FakeStore) -> None:
        self._it, self._version, self._store = it, version, store

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "register_path":
            if self._version.ref.digest not in self._store.files:
                raise ArtifactRefused("There is no such file.")
            return self._version
        if method == "audit":
            return [asdict(line) for line in self._it.audit(*args)]
        said = getattr(self._it, method)(*args)
        return await asyncio.wait_for(said, timeout_s) if inspect.isawaitable(said) else said


Ask = Callable[..., Awaitable[httpx.Response]]


def with_both(folder: Path, work: Callable[[Ask, Control], Awaitable[None]]) -> None:
    """Run ``work`` with a way to call the Router."""

    async def main() -> None:
        control = Control(folder, FakeCluster.of(*BOARDS))
        version = control.store.add("v1", b"x" * 300)
        link = Direct(await control.open(), version, control.store)
        config, metrics = RouterConfig(), RouterMetrics(CollectorRegistry())
        fleet = open_fleet(config, {"only": control.cluster}, {"only": "sim-chat"})
        cluster = CoordinatorClient(link, fleet.obey)
        dispatch = open_dispatch(config, fleet, metrics, random.Random(5))
        service = Service(config, {"sim-chat": model()}, dispatch, cluster, metrics)
        app = make_app(service, 10_000, 10_000, Responses(config, folder / "responses"))
        await asyncio.gather(fleet.refresh(), cluster.refresh())
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            try:
                await work(client.request, control)
            finally:
                await control.close()

    run_loop(main())


def test_a_pause_is_made_repeated_shown_and_ended(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        once = {"headers": {"idempotency-key": "once"}, "json": {"mode": "keep", "lease_s": 60}}
        first = await ask("POST", "/pause", **once)
        assert first.status_code == 200, first.text
        assert control.held == ["a", "b"]
        assert first.json()["results"].keys() == {"a", "b"}
        again = (await ask("POST", "/pause", **once)).json()
        assert again["applied"] is False
        assert again["operation_id"] == first.json()["operation_id"]
        told = (await ask("GET", "/is_paused")).json()
        assert (told["is_paused"], told["all"], told["epoch"]) == (True, True, again["epoch"])
        assert (await ask("GET", "/v1/cluster")).json()["total"]["paused_boards"] == len(BOARDS)
        stale = await ask("POST", "/resume", json={"epoch": again["epoch"] - 1})
        assert stale.status_code == 409
        assert stale.json()["error"]["code"] == "stale_epoch"
        assert (await ask("POST", "/resume")).json()["status"] == "resumed"
        assert control.held == []
        listed = (await ask("GET", "/v1/operations")).json()["data"]
        assert {entry["kind"] for entry in listed} == {"pause", "resume"}
        one = await ask("GET", f"/v1/operations/{first.json()['operation_id']}")
        assert one.json()["idempotency_key"] == "once"
        lines = (await ask("GET", "/v1/audit")).json()["data"]
        assert {line["who"] for line in lines} == {"local 127.0.0.1"}

    with_both(tmp_path, work)


def test_a_board_that_is_silent_undoes_the_pause_of_the_other(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        control.cluster["b"].slow_s["adopt"] = 100.0
        response = await ask("POST", "/pause", json={"timeout_s": 0.3})
        assert response.status_code == 504, response.text
        assert response.json()["error"]["code"] == "operation_timeout"
        control.cluster["b"].slow_s.clear()
        assert not control.desired.pauses
        assert (await ask("GET", "/is_paused")).json()["is_paused"] is False

    with_both(tmp_path, work)


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
