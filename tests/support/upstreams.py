"""A Router without Ray on upstreams, and on scripted boards if they have a model in common."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.router import ResponsesConfig, RouterConfig
from rkserve.core.desired_state import Desired
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import BoardLink
from rkserve.http.app import make_app
from rkserve.router.cluster_metrics import ClusterMetrics
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.features.cluster_view import ClusterView
from rkserve.router.features.view_feed import ViewFeed
from rkserve.router.served_models import ServedModel
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from rkserve.router.upstreams.metrics import UpstreamMetrics
from rkserve.router.upstreams.upstreams import Upstreams, open_upstreams
from tests.support.boards.fake_boards import FakeBoards
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import MAX_ADAPTER_BYTES, MAX_MODEL_BYTES, model

CHAT = "/v1/chat/completions"
BOARDS_MODEL = "sim-chat"


def group(url: str, name: str = "gpu", here: str = "big", **upstream: Any) -> BoardGroupConfig:
    """The group of an upstream that is called ``here`` by clients."""
    given = {"url": url, "retries": 0, "health_period_s": 0.05, **upstream}
    return BoardGroupConfig.model_validate({"name": name, "model": here, "upstream": given})


def settings(**changes: Any) -> RouterConfig:
    """A Router's settings without stored responses, and without a wait for boards that restart."""
    usual = {"responses": ResponsesConfig(store="never"), "restart_wait_s": 0.0}
    return RouterConfig(**{**usual, **changes})


@dataclass
class UpstreamHouse:
    """A Router on upstreams. With ``boards`` these have the model ``sim-chat``."""

    groups: list[BoardGroupConfig]
    boards: FakeBoards | None = None
    config: RouterConfig = field(default_factory=settings)
    head: FakeHead = field(default_factory=FakeHead)
    environ: Mapping[str, str] = field(default_factory=dict)
    transport: httpx.AsyncBaseTransport | None = None

    def __post_init__(self) -> None:
        metrics = RouterMetrics(CollectorRegistry())
        served = {} if self.boards is None else {BOARDS_MODEL: model()}
        self.upstreams: Upstreams = open_upstreams(
            self.groups,
            UpstreamMetrics(metrics.registry),
            environ=self.environ,
            models=set(served),
            desired=self._desired,
            transport=self.transport,
        )
        links: dict[str, BoardLink] = dict(self.upstreams.links)
        models = {name: link.model for name, link in self.upstreams.links.items()}
        if self.boards is not None:
            links["only"], models["only"] = self.boards, BOARDS_MODEL
        self.fleet = open_fleet(self.config, links, models)
        served |= {
            name: ServedModel.at_upstreams(name, length)
            for name, length in self.upstreams.alone.items()
        }
        self.cluster = CoordinatorClient(self.head, self.fleet.obey)
        dispatch = open_dispatch(
            self.config, self.fleet, metrics, random.Random(5), self.upstreams.waits_s
        )
        self.service = Service(
            self.config, served, dispatch, self.cluster, metrics, upstreams=self.upstreams
        )
        self.view = ClusterView(self.service)
        self.app = make_app(
            self.service,
            MAX_ADAPTER_BYTES,
            MAX_MODEL_BYTES,
            Responses(self.config, Path(), None),
            metrics=ClusterMetrics(self.service),
            view=self.view,
            feed=ViewFeed(self.view, self.service),
        )

    def _desired(self) -> Desired:
        return self.fleet.desired

    async def __call__(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Make one whole request, after boards, upstreams and Coordinator have been heard."""
        await self.fleet.refresh()
        if not self.head.away:
            await self.cluster.refresh()
        transport = httpx.ASGITransport(
            self.app, raise_app_exceptions=False, client=("127.0.0.1", 1)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **kwargs)

    async def chat(self, text: str = "Hello", **extra: Any) -> httpx.Response:
        """Make one chat, of the upstream's model if ``extra`` has no other."""
        return await self("POST", CHAT, json=chat(text, **extra))

    def metric(self, name: str, **labels: str) -> float | None:
        """Return one figure of the Router's."""
        return self.service.registry.get_sample_value(name, labels)

    def expect_nothing_left(self) -> None:
        """Every upstream is free, and the Router knows it and keeps no conversation."""
        assert self.metric("rkserve_requests_in_flight") == 0
        assert not self.upstreams.calls
        for one in self.upstreams.links.values():
            assert (
                self.metric("rkserve_upstream_in_flight", upstream=one.name, model=one.model) == 0
            )


def chat(text: str = "Hello", **extra: Any) -> dict[str, Any]:
    """A chat's body."""
    return {"model": "big", "messages": [{"role": "user", "content": text}], **extra}


@asynccontextmanager
async def house(*groups: BoardGroupConfig, **rest: Any) -> AsyncIterator[UpstreamHouse]:
    """Give a Router whose connections are closed at the end, when nothing may be left."""
    found = UpstreamHouse(list(groups), **rest)
    try:
        yield found
        found.expect_nothing_left()
    finally:
        await found.upstreams.aclose()
