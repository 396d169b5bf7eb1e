"""A Router's routes in front of a real Coordinator, with boards that obey."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
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
# As the replica names the calls of the Coordinator's keeper of keys.
KEY_CALLS = {"change_key": "perform", "api_keys": "after", "listed_keys": "listed"}


class Direct:
    """``HeadLink`` to a Coordinator in the same loop, and to one file as long as it is there."""

    def __init__(self, it: Coordinator, version: AdapterVersion, store: FakeStore) -> None:
        self._it, self._version, self._store = it, version, store

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if method == "register":
            if self._version.ref.digest not in self._store.files:
                raise ArtifactRefused("There is no such file.")
            return self._version
        if method == "audit":
            return [asdict(line) for line in self._it.audit(*args)]
        if method in KEY_CALLS:
            said = getattr(self._it.keys, KEY_CALLS[method])(*args)
        else:
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
