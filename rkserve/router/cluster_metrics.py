"""The metrics of the whole cluster, from any of its Routers.

The Router that is asked adds the figures of the others, which label theirs, to its own, and the
figures of the boards and the Coordinator once: a scrape may reach any Router, and no counter jumps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from rkserve.core.board_metrics import BoardCollector
from rkserve.core.board_report import BoardReport
from rkserve.core.errors import RkserveError
from rkserve.core.exposition import FamilyText, RouterFigures, label_text, merged, rendered
from rkserve.core.metrics import RouterUpCollector
from rkserve.router.service import Service
from rkserve.router.vllm_metrics import LoraCalls, VllmClusterCollector, VllmRouterCollector

log = logging.getLogger(__name__)

PEERS_S = 2.0  # a scrape must not wait


class MetricsPeers(Protocol):
    """The other Routers of one application."""

    async def figures(self, timeout_s: float) -> tuple[Sequence[RouterFigures], Sequence[str]]:
        """Return the figures of those that answered in time, and the names of the silent ones."""

    async def began(self, router: str) -> None:
        """Have the others forget an earlier Router of this one's name."""

    async def ended(self, figures: RouterFigures) -> None:
        """Have the others keep what this Router has counted, because it ends."""


class ClusterMetrics:
    """The metrics of one Router, and of the cluster as it answers them."""

    def __init__(
        self, service: Service, router: str = "0", peers: MetricsPeers | None = None
    ) -> None:
        """``router`` is this Router's label. It should outlive the Router: where a successor has
        the same one, Prometheus sees a counter that begins again, and none of the successor's first
        counts are lost.
        """
        self.router = router
        self._service = service
        self._peers = peers
        self._vllm = None
        if service.config.metrics.vllm_names:
            self._vllm = VllmRouterCollector(service.metrics)
        self._departed: dict[str, RouterFigures] = {}

    async def own(self) -> RouterFigures:
        """Return the figures of this Router, with those of Routers that have ended."""
        label = label_text("router", self.router)
        families = await rendered(self._service.registry, label)
        if self._vllm is not None:
            families += await rendered(self._vllm, label)
        depths = self._service.dispatch.queues.depths()
        adapters = self._service.metrics.adapters
        return RouterFigures(
            self.router,
            families,
            tuple((model, sum(counts.values())) for model, counts in depths.items()),
            tuple(sorted(+adapters.running)),
            tuple(sorted(+adapters.waiting)),
            tuple(self._departed.values()),
        )

    def keep(self, ended: RouterFigures) -> None:
        """Keep the figures of a Router that is about to end."""
        if ended.router != self.router:
            self._departed[ended.router] = ended.last()

    def forget(self, router: str) -> None:
        """Forget a Router that has ended: the figures of its name are a successor's now."""
        self._departed.pop(router, None)

    async def begin(self) -> None:
        """Announce this Router to the others."""
        if self._peers is not None:
            await self._peers.began(self.router)

    async def end(self) -> None:
        """Leave this Router's counts to the others; after its last answer."""
        if self._peers is not None:
            await self._peers.ended((await self.own()).last())

    async def text(self) -> str:
        """Return the metrics of the cluster in Prometheus' text format."""
        own, (others, silent), head = await asyncio.gather(
            self.own(), self._others(), self._coordinator()
        )
        live = {one.router: one for one in (*others, own)}
        for router in self._departed.keys() & live.keys():
            self.forget(router)
        ended = {one.router: one for each in live.values() for one in each.departed}
        ended = {router: one for router, one in ended.items() if router not in live}
        up = dict(sorted({**dict.fromkeys(silent, False), **dict.fromkeys(live, True)}.items()))
        parts: list[Sequence[FamilyText]] = [await rendered(RouterUpCollector(up))]
        # Always in the same order, so that a person finds what was there before.
        parts += [one.families for _, one in sorted({**ended, **live}.items())]
        # Routers count what upstreams do, each its own part.
        parts.append(await rendered(BoardCollector(self._boards)))
        if self._vllm is not None:
            parts.append(await rendered(self._vllm_cluster(live.values())))
        return merged(parts) + head

    def _boards(self) -> list[BoardReport]:
        return [one for one in self._service.fleet.reports() if not one.is_upstream]

    async def _others(self) -> tuple[Sequence[RouterFigures], Sequence[str]]:
        if self._peers is None:
            return (), ()
        return await self._peers.figures(PEERS_S)

    async def _coordinator(self) -> str:
        try:
            return (await self._service.cluster.metrics()).decode()
        except RkserveError as exc:
            log.debug("without the Coordinator's metrics: %s", exc)
            return ""

    def _vllm_cluster(self, routers: Iterable[RouterFigures]) -> VllmClusterCollector:
        routers, fleet = list(routers), self._service.fleet
        queued: Counter[str] = Counter()
        for one in routers:
            queued.update(dict(one.queued))
        settings = [served.folder.settings for served in self._service.models.by_name.values()]
        lora = LoraCalls(
            max((one.max_adapters for one in settings), default=0),
            _names(one.running for one in routers),
            _names(one.waiting for one in routers),
        )
        return VllmClusterCollector(fleet.models, self._boards(), queued, lora, time.time())


def _names(of_routers: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for names in of_routers for name in names}))
