"""Ray's replica of a Router, which answers HTTP with a ``Service``; and calls over Ray handles: of
Routers to the Coordinator and to each other, and back.

Ray's exceptions become rkserve's here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import random
import sys
from typing import Any

import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rkserve.api.responses.stored import StoredResponse
from rkserve.config.serve_config import RkserveConfig
from rkserve.core.board_report import GenerationInfo, RouterGenerations
from rkserve.core.desired_state import Scope as ClusterScope
from rkserve.core.errors import BoardFailed, CoordinatorAway, RkserveError
from rkserve.core.messages import ControlAction
from rkserve.core.metrics import RouterMetrics, StreamCollector
from rkserve.deployments.board_link import RayLink
from rkserve.deployments.haproxy import check_environ, is_loopback
from rkserve.deployments.replica import log_with_serve
from rkserve.http.app import make_app
from rkserve.http.auth import host_names, machine_names
from rkserve.http.gradio_routes import GradioCalls, PendingCall
from rkserve.models.folder import open_model_folder
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.features.generations import ROUTERS
from rkserve.router.membership import Membership
from rkserve.router.served_models import ServedModel
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from rkserve.transport.client import ChannelClient

log = logging.getLogger(__name__)

SWITCH_S = 0.001
FIND_BOARDS_S = 3.0  # running boards answer at once; new ones may load for minutes


class _Handover:
    """The ASGI application passed to Serve; pickled, so it looks the real one up when called."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _acknowledge_lifespan(receive, send)
            return
        replica: RouterReplica = serve.get_replica_context().servable_object
        if replica.hides_clients:
            scope = {**scope, "client": None}
        await replica.asgi(scope, _until_gone(receive), send)


def hides_clients() -> bool:
    """Return whether a caller may be Ray's HAProxy, and so looks like a program of this machine.

    HAProxy does not forward its clients' addresses. If it listens to this machine only, they are
    local.
    """
    if not RAY_SERVE_ENABLE_HA_PROXY:
        return False
    client = _get_global_client()  # no public way
    return client is None or not is_loopback(client.http_config.host)


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


@serve.ingress(_Handover())
class RouterReplica:
    """One Router replica.

    ``handles`` maps a group's name to its Board deployment's handle; ``coordinator`` is that of the
    Coordinator's deployment.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits an async constructor
        self, config: RkserveConfig, handles: dict[str, Any], coordinator: Any
    ) -> None:
        log_with_serve()
        check_environ(os.environ)  # of this node: the head may have another one
        # A thread that reads a long prompt lets go of the interpreter this often at the latest; a
        # token waits for that at every call into the kernel.
        sys.setswitchinterval(SWITCH_S)
        folders = {g.name: open_model_folder(config.folder_of(g)) for g in config.deployed}
        self._channels = channels = ChannelClient(config.channel)
        links = {
            name: RayLink(handle, name, config.router.report_timeout_s, channels)
            for name, handle in handles.items()
        }
        fleet = open_fleet(config.router, links, {name: f.id for name, f in folders.items()})
        metrics = RouterMetrics(CollectorRegistry())
        dispatch = open_dispatch(config.router, fleet, metrics, random.Random())
        models = {folder.id: ServedModel.open(folder) for folder in folders.values()}
        cluster = CoordinatorClient(RayCoordinatorLink(coordinator), fleet.obey)
        self._service = Service(config.router, models, dispatch, cluster, metrics)
        self._service.registry.register(StreamCollector(channels.counts))
        several = config.router.replicas > 1
        peers = RayPeers(config.router.report_timeout_s) if several else None
        self._responses = Responses(
            config.router, config.state_dir.expanduser() / "responses", peers
        )
        self._gradio = GradioCalls(peers)
        self.asgi: ASGIApp = make_app(
            self._service,
            config.coordinator.max_adapter_bytes,
            config.coordinator.max_model_bytes,
            self._responses,
            peers,
            hosts=host_names(config.router, cluster_names),
            gradio=self._gradio,
            membership=Membership.of(os.environ),
        )
        self.hides_clients = await asyncio.to_thread(hides_clients)
        # A Router that replaces another one should know the boards and the desired state
        # before its first request.
        await asyncio.gather(fleet.find_boards(FIND_BOARDS_S), cluster.find(FIND_BOARDS_S))
        loop = asyncio.get_running_loop()
        self._follows = [
            loop.create_task(fleet.follow(config.router.report_s), name="follow the boards"),
            loop.create_task(cluster.follow(), name="follow the Coordinator"),
            loop.create_task(self._responses.forget_old(), name="forget old responses"),
        ]

    async def unassigned(self) -> list[GenerationInfo]:
        """Return this Router's generations without a board."""
        return self._service.unassigned.infos()

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Control this Router's part of a generation without a board."""
        return self._service.unassigned.control(generation, action, choice)

    async def abort_waiting(self, scope: ClusterScope, request_ids: list[str] | None) -> int:
        """Abort this Router's requests without a board; return their number."""
        return self._service.unassigned.abort(scope, request_ids)

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
        if hasattr(self, "_responses"):
            self._responses.close()
        if hasattr(self, "_channels"):
            await self._channels.close()


class RayCoordinatorLink:
    """``HeadLink`` over Ray's handle of the Coordinator's deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the Coordinator; see ``HeadLink``."""
        # In a context of its own: a client that hangs up must not cancel what the call began.
        remote = getattr(self._handle, method).remote
        response = contextvars.Context().run(remote, *args)

        async def answer() -> Any:
            return await response

        done = False
        try:
            result = await asyncio.wait_for(answer(), timeout_s)
            done = True
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise CoordinatorAway(
                f"The Coordinator did not answer '{method}' within {timeout_s:g} s."
            ) from None
        except RayTaskError as exc:
            done = True
            if isinstance(exc.cause, RkserveError):
                raise exc.cause from None
            log.exception("the Coordinator raised what it should not")
            raise CoordinatorAway("The Coordinator failed; its log says why.") from exc
        except (RayError, RayServeException) as exc:
            raise CoordinatorAway(
                f"The Coordinator cannot be reached ({type(exc).__name__}); GET /v1/operations "
                "tells later what became of the call."
            ) from exc
        else:
            return result
        finally:
            if not done:
                # A waiting call must not outlive its caller; one that changes the cluster is
                # the Coordinator's own task, which a cancelled call does not end.
                with contextlib.suppress(RayError, RayServeException):
                    response.cancel()


class RayPeers:
    """``Peers`` over Ray's handle of the Router's own deployment."""

    def __init__(self, timeout_s: float) -> None:
        context = serve.get_replica_context()
        self._handle: Any = serve.get_deployment_handle(context.deployment, context.app_name)
        self._timeout_s = timeout_s

    async def unassigned(self) -> list[GenerationInfo]:
        """Return the generations of all Routers without a board. Raises ``BoardFailed``."""
        answers: list[list[GenerationInfo]] = await self._ask("unassigned")
        return [info for answer in answers for info in answer]

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Control the Routers' part of a generation without a board. Raises ``BoardFailed``."""
        answers: list[RouterGenerations] = await self._ask(
            "control_unassigned", generation, action, choice
        )
        return RouterGenerations(
            tuple(one for answer in answers for one in answer.done),
            tuple(one for answer in answers for one in answer.refused),
            tuple(one for answer in answers for one in answer.ended),
            any(answer.known for answer in answers),
        )

    async def kept_chain(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        """Return a response and its predecessors stored by some Router.

        Raises:
            BoardFailed: they did not answer.
        """
        answers: list[list[StoredResponse]] = await self._ask(
            "kept_chain", owner, response_id, most_bytes
        )
        return max(answers, key=len, default=[])

    async def forget_response(self, owner: str, response_id: str) -> bool:
        """Have all Routers remove a response; False if none had it. Raises ``BoardFailed``."""
        return any(await self._ask("forget_response", owner, response_id))

    async def share_gradio(self, pending: PendingCall) -> None:
        """Store a posted call of a Gradio client on all Routers. Raises ``BoardFailed``."""
        await self._ask("keep_gradio", pending)

    async def claim_gradio(self, owner: str, event_id: str, *, cancel: bool) -> bool:
        """Remove such a call from all Routers; False if none has it. Raises ``BoardFailed``."""
        return any(await self._ask("drop_gradio", owner, event_id, cancel))

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        return await _broadcast(self._handle, method, *args, timeout_s=self._timeout_s)


class RayRouters:
    """``Routers`` over Ray: all Routers of the application, as the Coordinator reaches them."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._app = serve.get_replica_context().app_name
        self._handle: Any = None

    async def abort(
        self, scope: ClusterScope, request_ids: list[str] | None, timeout_s: float
    ) -> int:
        """Have all Routers abort their requests without a board. Raises ``BoardFailed``."""
        if self._handle is None:
            # Routers are deployed after the Coordinator, so the handle is found at the first call.
            find = serve.get_deployment_handle
            try:
                self._handle = await asyncio.to_thread(find, self._deployment, self._app)
            except (RayError, RayServeException) as exc:
                raise BoardFailed(ROUTERS, f"not found ({type(exc).__name__})") from exc
        found: list[int] = await _broadcast(
            self._handle, "abort_waiting", scope, request_ids, timeout_s=timeout_s
        )
        return sum(found)


async def _broadcast(handle: Any, method: str, *args: Any, timeout_s: float) -> list[Any]:
    # In a context of its own: the caller's request is not theirs.
    broadcast = contextvars.Context().run(handle.broadcast, method, *args)
    try:
        answers: list[Any] = await broadcast.results_async(timeout_s=timeout_s)
    except RayTaskError as exc:
        # A Router's own error is its answer.
        if isinstance(exc.cause, RkserveError):
            raise exc.cause from None
        raise BoardFailed(ROUTERS, f"one of them failed ({type(exc.cause).__name__})") from exc
    except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as exc:
        raise BoardFailed(ROUTERS, f"no answer ({type(exc).__name__})") from exc
    return answers
