"""Ray's replica of a Router, which answers HTTP with a ``Service``, and the clients behind HAProxy.

Ray's exceptions become rkserve's here.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.context import _get_global_client
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rkserve import __version__
from rkserve.api.responses.stored import StoredResponse
from rkserve.config.serve_config import RkserveConfig, config_digest
from rkserve.core.answer_metrics import RouterUsage
from rkserve.core.api_keys import SpentLimits
from rkserve.core.board_report import GenerationInfo, RouterGenerations
from rkserve.core.desired_state import Scope as ClusterScope
from rkserve.core.errors import RkserveError
from rkserve.core.exposition import RouterFigures
from rkserve.core.logs import LogPage, LogQuery
from rkserve.core.messages import ControlAction
from rkserve.core.metrics import RouterMetrics, StreamCollector
from rkserve.deployments.board_factory import NodeSlot, claim_slot
from rkserve.deployments.board_link import RayLink
from rkserve.deployments.haproxy import check_environ, is_loopback
from rkserve.deployments.haproxy_config import CLIENT_HEADER
from rkserve.deployments.haproxy_listeners import (
    ANY_PORT,
    CLIENT_PORT,
    CONTROL_PORT,
    MARK_HEADER,
    Listeners,
)
from rkserve.deployments.ray_metrics import RayRouterMetrics
from rkserve.deployments.replica import Node, find_node, log_with_serve, settle
from rkserve.deployments.router_peers import SHORT_ID, RayCoordinatorLink, RayPeers
from rkserve.deployments.tracing import OpenTelemetry, open_tracing
from rkserve.fleet.fleet import BoardLink
from rkserve.http.app import make_app
from rkserve.http.auth import LISTENER, PEER, Listener, host_names, machine_names
from rkserve.http.gradio_routes import GradioCalls, PendingCall
from rkserve.models.folder import by_id, open_model_folder
from rkserve.router.auth.callers import SHARE_S, Callers
from rkserve.router.auth.key_ring import KeyRing, open_keys
from rkserve.router.cluster_metrics import ClusterMetrics
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.features.cluster_view import ClusterView
from rkserve.router.features.logs import ROUTER as ROUTER_LOG
from rkserve.router.features.logs import OwnLogs
from rkserve.router.features.view_feed import ViewFeed
from rkserve.router.idempotency.answers import KeyedAnswers
from rkserve.router.membership import Membership
from rkserve.router.served_models import ServedModel
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from rkserve.router.upstreams.metrics import UpstreamMetrics
from rkserve.router.upstreams.upstreams import open_upstreams
from rkserve.router.usage_records import UsageRecords
from rkserve.transport.client import ChannelClient
from rkserve.verdicts.facts import RouterView

log = logging.getLogger(__name__)

SWITCH_S = 0.001
NODES_AGE_S = 30.0
FIND_BOARDS_S = 3.0  # running boards answer at once; new ones may load for minutes
# A Router without the keys refuses clients: its predecessor serves on until its successor has them,
# which an update's new Coordinator may take that long to have.
FIND_KEYS_S = 30.0
# Names of Routers of one node: those that run, and as many that still end their answers.
SLOTS = 256
SLOT_GROUP = "_router"  # no name of a group, so that files in the state folder differ


class _Handover:
    """The ASGI application passed to Serve; pickled, so it looks the real one up when called."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _acknowledge_lifespan(receive, send)
            return
        replica: RouterReplica = serve.get_replica_context().servable_object
        if replica.peers is not None:
            scope = replica.peers.named(scope)
        await replica.asgi(scope, _until_gone(receive), send)


class ProxyPeers:
    """The clients behind Ray's HAProxy, by the headers that it sets.

    A mark with the proof is HAProxy's. Where Ray has no token there is none: an address of the
    cluster's nodes counts as HAProxy's then. Unless HAProxy listens to this machine only, none of
    its clients counts as a program of this machine.
    """

    def __init__(
        self,
        *,
        local_only: bool,
        nodes: Callable[[], Iterable[str]],
        listeners: Listeners | None = None,
    ) -> None:
        self._local_only, self._nodes = local_only, nodes
        self._listeners = listeners or Listeners()
        self._known: frozenset[str] = frozenset()
        self._looked_s = float("-inf")

    def named(self, scope: Scope) -> Scope:
        """Return the scope with the client's address and HAProxy's listener, without the mark."""
        client = scope.get("client")
        peer = "" if client is None else str(client[0])
        marks = [value for name, value in scope["headers"] if name == _MARK]
        listener = self._listener(marks, peer)
        names = [value for name, value in scope["headers"] if name == _CLIENT]
        if names and listener is not Listener.BESIDE:
            peer = names[-1].decode("latin-1")
        return {
            **scope,
            "headers": [one for one in scope["headers"] if one[0] != _MARK],
            "client": client if self._local_only else None,
            PEER: peer or "unknown",
            LISTENER: listener,
        }

    def _listener(self, marks: list[bytes], peer: str) -> Listener:
        word, _, proof = marks[-1].partition(b" ") if len(marks) == 1 else (b"", b"", b"")
        expected = self._listeners.proof.encode()
        believed = hmac.compare_digest(proof, expected) if expected else self._is_node(peer)
        listener = _WORDS.get(word) if believed else None
        if listener is Listener.ANY and self._listeners.control is not None:
            return Listener.CLIENT  # of another node's HAProxy, which knows no control port
        return listener or Listener.BESIDE

    def _is_node(self, peer: str) -> bool:
        if is_loopback(peer) or peer in self._known:
            return True
        if time.monotonic() - self._looked_s >= NODES_AGE_S:
            self._looked_s = time.monotonic()
            self._known = frozenset(self._nodes())
        return peer in self._known


_MARK, _CLIENT = MARK_HEADER.encode(), CLIENT_HEADER.encode()
_WORDS = {word.encode(): Listener(word) for word in (ANY_PORT, CLIENT_PORT, CONTROL_PORT)}


def http_host() -> str | None:
    """Return the address on which Serve listens for clients."""
    client = _get_global_client()  # no public way
    return None if client is None else client.http_config.host


def node_addresses() -> list[str]:
    """Return the addresses of the cluster's nodes."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def cluster_names() -> list[str]:
    """Return the host names of the application, as far as Ray knows them."""
    names = machine_names()
    names += [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
    client = _get_global_client()  # no public way
    if client is not None and client.http_config.host is not None:
        names.append(client.http_config.host)
    return names


def _until_gone(receive: Receive) -> Receive:
    """Return a ``receive`` that reports a hang-up in ASGI's form.

    At a hang-up Serve cancels the call that waits for the client's messages. It raises that error
    once; a second call would wait forever.
    """
    gone: Message = {"type": "http.disconnect"}
    left = False

    async def guarded() -> Message:
        nonlocal left
        if left:
            return gone
        try:
            return await receive()
        except RayError:
            left = True
            return gone

    return guarded


async def _acknowledge_lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge the start: Serve starts the application before the replica exists."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _peers(config: RkserveConfig) -> RayPeers | None:
    """Return the way to the other Routers, where there are some."""
    return RayPeers(config.router.report_timeout_s) if config.router.replicas > 1 else None


@serve.ingress(_Handover())
class RouterReplica:
    """One Router replica.

    ``handles`` maps a group's name to its Board deployment's handle; ``coordinator`` is that of the
    Coordinator's deployment.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits an async constructor
        self, config: RkserveConfig, handles: dict[str, Any], coordinator: Any
    ) -> None:
        self._log_ring = log_with_serve()
        check_environ(os.environ)  # of this node: the head may have another one
        # A thread that reads a long prompt lets go of the interpreter this often at the latest; a
        # token waits for that at every call into the kernel.
        sys.setswitchinterval(SWITCH_S)
        folders = {
            g.name: open_model_folder(config.folder_of(g), config.state_dir)
            for g in config.deployed
        }
        self._channels = channels = ChannelClient(config.channel)
        metrics = RouterMetrics(CollectorRegistry())
        groups = {name: folder.id for name, folder in folders.items()}
        self._upstreams = upstreams = open_upstreams(
            config.upstreams,
            UpstreamMetrics(metrics.registry),
            environ=os.environ,
            models=set(groups.values()),
            routers=config.router.replicas,
            desired=lambda: fleet.desired,
        )
        links: dict[str, BoardLink] = {
            name: RayLink(handle, name, config.router.report_timeout_s, channels)
            for name, handle in handles.items()
        }
        groups |= {name: link.model for name, link in upstreams.links.items()}
        fleet = open_fleet(config.router, {**links, **upstreams.links}, groups)
        dispatch = open_dispatch(config.router, fleet, metrics, random.Random(), upstreams.waits_s)
        opened = by_id(folders.values())
        models = {name: ServedModel.open(folder) for name, folder in opened.items()}
        models |= {
            name: ServedModel.at_upstreams(name, length) for name, length in upstreams.alone.items()
        }
        keys, self.peers = await asyncio.to_thread(open_access, config)
        limit_s = config.coordinator.operation_timeout_s
        cluster = CoordinatorClient(RayCoordinatorLink(coordinator), fleet.obey, limit_s)
        self._tracing = open_tracing(
            config.router.tracing, serve.get_replica_context().replica_id.unique_id
        )
        state_dir, once = config.state_dir.expanduser(), config.router.idempotency
        self._keyed = KeyedAnswers(once, state_dir / "idempotency") if once.enabled else None
        self._service = Service(
            config.router,
            models,
            dispatch,
            cluster,
            metrics,
            tracing=self._tracing,
            keyed=self._keyed,
            keys=keys,
            upstreams=upstreams,
        )
        self._service.registry.register(StreamCollector(channels.counts))
        peers = _peers(config)
        self._responses = Responses(config.router, state_dir / "responses", peers)
        self._gradio = GradioCalls(peers)
        self._metrics = await self._open_metrics(config, metrics, peers)
        self._view = ClusterView(
            self._service,
            self._metrics.router,
            peers or RayPeers(config.router.report_timeout_s),
            streams=channels.counts,
            has_channel=config.channel.enabled,
        )
        feed = ViewFeed(self._view, self._service)
        self._usage = UsageRecords(
            metrics.usage,
            self._metrics.router,
            state_dir / "usage",
            peers or RayPeers(config.router.report_timeout_s),
        )
        self.asgi: ASGIApp = make_app(
            self._service,
            config.coordinator.max_adapter_bytes,
            config.coordinator.max_model_bytes,
            self._responses,
            peers,
            hosts=host_names(config.router, cluster_names),
            gradio=self._gradio,
            membership=Membership.of(os.environ),
            metrics=self._metrics,
            view=self._view,
            feed=feed,
            usage=self._usage,
            logs=peers or OwnLogs(self._log_ring),
        )
        # A Router that replaces another one should know the boards and the desired state
        # before its first request.
        await asyncio.gather(
            fleet.find_boards(FIND_BOARDS_S),
            cluster.find(FIND_BOARDS_S),
            cluster.find_keys(keys, FIND_BOARDS_S if config.security.open else FIND_KEYS_S),
        )
        loop = asyncio.get_running_loop()
        self._follows = [
            loop.create_task(fleet.follow(config.router.report_s), name="follow the boards"),
            loop.create_task(cluster.follow(), name="follow the Coordinator"),
            loop.create_task(cluster.follow_keys(keys), name="follow the keys"),
            loop.create_task(self._responses.forget_old(), name="forget old responses"),
            loop.create_task(self._metrics.begin(), name="announce this Router"),
            loop.create_task(feed.follow(), name="sample the cluster"),
            loop.create_task(self._usage.follow(), name="store the usage"),
        ]
        if peers is not None:
            share = share_limits(self._service.callers, peers, self._metrics.router)
            self._follows.append(loop.create_task(share, name="share the limits of keys"))
        if self._keyed is not None:
            self._follows.append(
                loop.create_task(self._keyed.follow(), name="forget old answers to keyed requests")
            )
        settle()

    async def _open_metrics(
        self, config: RkserveConfig, metrics: RouterMetrics, peers: RayPeers | None
    ) -> ClusterMetrics:
        """Return the cluster's metrics, with a name for this Router."""
        replica = serve.get_replica_context().replica_id.unique_id
        node = find_node(ray.nodes(), ray.get_runtime_context().get_node_id())
        state_dir = config.state_dir.expanduser()
        self._slot, name = await asyncio.to_thread(router_name, state_dir, node, replica)
        versions = (__version__, platform.python_version(), ray.__version__)
        metrics.build.labels(*versions, node.name, replica).set(1)
        metrics.settings.labels(config_digest(config)).set(1)
        in_ray = RayRouterMetrics(name, self._service.dispatch.queues.depths)
        metrics.first_token = in_ray.first_token
        self._service.fleet.changed.append(in_ray.update)
        # A single Router has peers, too, while it is replaced.
        peers = peers or RayPeers(config.router.report_timeout_s)
        return ClusterMetrics(self._service, name, peers)

    async def figures(self, asked_by: str) -> tuple[str, RouterFigures] | None:
        """Return this Router's metrics and its replica's ID; None if it asks itself."""
        replica: str = serve.get_replica_context().replica_id.unique_id
        return None if asked_by == replica else (replica, await self._metrics.own())

    async def cluster_view(self, asked_by: str) -> tuple[str, RouterView] | None:
        """Return this Router's share of the cluster's view and its replica's ID; None if it asks
        itself.
        """
        replica: str = serve.get_replica_context().replica_id.unique_id
        return None if asked_by == replica else (replica, self._view.own())

    async def key_usage(self, asked_by: str, first_day: int) -> tuple[str, RouterUsage] | None:
        """Return the usage of keys at this Router's node since a day, and its replica's ID; None if
        it asks itself.
        """
        replica: str = serve.get_replica_context().replica_id.unique_id
        return None if asked_by == replica else (replica, await self._usage.own(first_day))

    async def router_began(self, router: str) -> None:
        """Forget an earlier Router of that name."""
        self._metrics.forget(router)

    async def router_ended(self, figures: RouterFigures) -> None:
        """Keep the counts of a Router that ends."""
        self._metrics.keep(figures)

    async def keys_spent(self, router: str, report: dict[str, SpentLimits]) -> None:
        """Count the use of keys' limits at another Router."""
        if router != self._metrics.router:
            self._service.callers.spent_elsewhere(router, report)

    async def unassigned(self) -> list[GenerationInfo]:
        """Return this Router's generations without a board, and those at upstreams."""
        return [*self._service.unassigned.infos(), *self._upstreams.infos()]

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Control this Router's part of a generation without a board, or at upstreams."""
        own = self._service.unassigned.control(generation, action, choice)
        return own.plus(self._upstreams.control(generation, action, choice))

    async def abort_waiting(self, scope: ClusterScope, request_ids: list[str] | None) -> int:
        """Abort this Router's requests without a board; return their number."""
        return self._service.unassigned.abort(scope, request_ids)

    async def logs(self, after: dict[str, int], tail: int) -> LogPage:
        """Return lines of this Router's log; see ``RouterLogs``."""
        ring = self._log_ring
        page = ring.page(LogQuery(after.get(ring.process), tail))
        return replace(page, source=f"{ROUTER_LOG}-{self._metrics.router}")

    async def kept_chain(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        """Return a response and its predecessors stored on this Router's node."""
        return await self._responses.chain_here(owner, response_id, most_bytes)

    async def forget_response(self, owner: str, response_id: str) -> bool:
        """Remove a response from this Router's node; False if it is not there."""
        return await self._responses.forget_here(owner, response_id)

    async def keep_gradio(self, pending: PendingCall) -> None:
        """Store a call that a Gradio client posted at one of the Routers."""
        self._gradio.keep(pending)

    async def drop_gradio(self, owner: str, event_id: str, cancel: bool) -> bool:
        """Remove such a call from this Router; False if it is not here."""
        return self._gradio.drop(owner, event_id, cancel=cancel)

    async def __del__(self) -> None:
        """Release everything. Called by Ray, also after a constructor that failed."""
        for task in getattr(self, "_follows", ()):
            task.cancel()
        if hasattr(self, "_metrics"):
            await self._metrics.end()
        if hasattr(self, "_usage"):
            await self._usage.close()
        if (keyed := getattr(self, "_keyed", None)) is not None:
            await keyed.close()
        if (slot := getattr(self, "_slot", None)) is not None:
            slot.release()
        if hasattr(self, "_responses"):
            self._responses.close()
        if hasattr(self, "_channels"):
            await self._channels.close()
        if hasattr(self, "_upstreams"):
            await self._upstreams.aclose()
        tracing: OpenTelemetry | None = getattr(self, "_tracing", None)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def share_limits(callers: Callers, peers: RayPeers, router: str) -> None:
    """Report the use of keys' limits to the other Routers once a second, where there is any."""
    while True:
        await asyncio.sleep(SHARE_S)
        if report := callers.report():
            await peers.spent(router, report)


def open_access(config: RkserveConfig) -> tuple[KeyRing, ProxyPeers | None]:
    """Return the keys that a Router of this cluster takes, and the clients behind HAProxy, if any.

    Raises ``ConfigError``: a key file, the control port or Ray's token cannot be used.
    """
    host, listeners = http_host(), Listeners.of(os.environ)
    control = listeners.control
    local_only = is_loopback(host) and (control is None or control.local_only)
    keys = KeyRing(
        open_keys(config.router),
        open_to_all=config.security.open,
        local_only=local_only,
        table=None,
        usual=config.router.board_seconds_per_minute,
    )
    if config.security.open and not local_only:
        log.warning("security.open: every client that reaches %s generates without a key", host)
    if not RAY_SERVE_ENABLE_HA_PROXY:
        return keys, None
    return keys, ProxyPeers(local_only=local_only, nodes=node_addresses, listeners=listeners)


def router_name(state_dir: Path, node: Node, replica: str) -> tuple[NodeSlot | None, str]:
    """Claim a name for a Router by a lock of its node; a successor finds that of its predecessor.

    The name is ``0`` or the like on the head, and ``0@rock`` elsewhere.
    """
    try:
        slot = claim_slot(state_dir, SLOT_GROUP, SLOTS)
    except RkserveError as exc:
        log.warning("this Router's metrics begin anew at each start: %s", exc)
        return None, replica[:SHORT_ID]
    return slot, str(slot.index) if node.is_head else f"{slot.index}@{node.name}"
