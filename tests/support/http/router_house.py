"""A Router without Ray, on scripted boards: its routes are called as a server would."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from rkserve.config.router import ResponsesConfig, RouterConfig
from rkserve.core.metrics import RouterMetrics
from rkserve.core.request_record import Tracing
from rkserve.http.app import make_app
from rkserve.models.folder import open_model_folder
from rkserve.router.auth.key_ring import KeyRing
from rkserve.router.cluster_metrics import ClusterMetrics
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.features.cluster_view import ClusterView, ViewPeers
from rkserve.router.features.view_feed import ViewFeed
from rkserve.router.idempotency.answers import KeyedAnswers
from rkserve.router.served_models import ServedModel
from rkserve.router.service import Service
from rkserve.router.stored_responses import ResponsePeers, Responses
from tests.support.boards.fake_boards import FakeBoards, Step, report
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.paths import PROJECT

CHAT = "/v1/chat/completions"
MAX_ADAPTER_BYTES = 5_000_000
MAX_MODEL_BYTES = 4_000_000
FOLDER = PROJECT / "models" / "sim-chat"


@cache
def model() -> ServedModel:
    """The model of the simulated boards; its tokenizer is read once."""
    return ServedModel.open(open_model_folder(FOLDER))


@dataclass
class House:
    """A Router on scripted boards."""

    boards: FakeBoards
    config: RouterConfig = field(default_factory=RouterConfig)
    served: ServedModel = field(default_factory=model)
    head: FakeHead = field(default_factory=FakeHead)
    kept: Path | None = None  # where responses are stored; none are without it
    once: Path | None = None  # where answers to keyed requests are stored
    others: ResponsePeers | None = None  # all Routers, where there are several
    viewers: ViewPeers | None = None  # the others, where there are some
    clock: Callable[[], float] = time.time
    tracing: Tracing | None = None

    def __post_init__(self) -> None:
        model_id = self.served.folder.id
        fleet = open_fleet(self.config, {"only": self.boards}, {"only": model_id})
        self.cluster = CoordinatorClient(self.head, fleet.obey)
        metrics = RouterMetrics(CollectorRegistry(), self.clock)
        dispatch = open_dispatch(self.config, fleet, metrics, random.Random(5))
        self.service = Service(
            self.config,
            {model_id: self.served},
            dispatch,
            self.cluster,
            metrics,
            tracing=self.tracing,
            keyed=None if self.once is None else KeyedAnswers(self.config.idempotency, self.once),
        )
        config = self.config
        if self.kept is None:
            config = config.model_copy(update={"responses": ResponsesConfig(store="never")})
        self.responses = Responses(config, self.kept or Path(), self.others)
        self.view = ClusterView(self.service, peers=self.viewers, clock=self.clock)
        self.feed = ViewFeed(self.view, self.service)
        self.use_metrics(ClusterMetrics(self.service))

    def use_keys(self, keys: KeyRing) -> None:
        """Take these keys in the place of the configured ones."""
        self.service.keys = keys
        self.use_metrics(ClusterMetrics(self.service))

    def use_metrics(self, metrics: ClusterMetrics) -> None:
        """Answer scrapes with these."""
        self.app: ASGIApp = make_app(
            self.service,
            MAX_ADAPTER_BYTES,
            MAX_MODEL_BYTES,
            self.responses,
            metrics=metrics,
            view=self.view,
            feed=self.feed,
        )

    async def __call__(
        self, method: str, path: str, *, host: str = "127.0.0.1", **kwargs: Any
    ) -> httpx.Response:
        """Make one whole request from ``host``, after boards and Coordinator have been heard."""
        await self.service.fleet.refresh()
        if not self.head.away:
            await self.cluster.refresh()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **kwargs)

    def metric(self, name: str, **labels: str) -> float | None:
        """Return one figure of the Router's."""
        return self.service.registry.get_sample_value(name, labels)

    def expect_nothing_left(self) -> None:
        """Every board is free, and the Router knows it."""
        assert self.boards.running == 0
        assert self.metric("rkserve_requests_in_flight") == 0


def house(*boards: str, **head: Any) -> House:
    """A Router with boards that answer, and a Coordinator."""
    return House(FakeBoards.answering(*(boards or ("a",))), head=FakeHead(**head))


def send(of: House, method: str, path: str, **rest: Any) -> Any:
    """Make one request, and return its answer."""
    return run_loop(of(method, path, **rest))


def chat(text: str = "Hello", **extra: Any) -> dict[str, Any]:
    """A chat's body."""
    return {"model": "sim-chat", "messages": [{"role": "user", "content": text}], **extra}


def scripted(*steps: Step, **config: Any) -> House:
    """One board that does what the steps say."""
    boards = FakeBoards([report("a")], {"replica of a": [steps]})
    return House(boards, RouterConfig(**config))


def events(text: str) -> list[Any]:
    """Return the events of a stream; ``[DONE]`` and comments as they are."""
    lines = [line for line in text.split("\n\n") if line]
    return [
        json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else line
        for line in lines
    ]
