"""Routes of cluster operations and of the cluster's status.

Names and bodies are vLLM's and SGLang's where they have one. Operations and their audit log are for
the operator; the status is for every client.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from rkserve import __version__
from rkserve.api.admin import (
    cluster_status,
    heartbeat,
    join,
    lora,
    operations,
    pause,
    sleep,
    weights,
)
from rkserve.api.admin.query import ControlRequest, ListQuery, ModelQuery, QueryOrBody, read_key
from rkserve.api.json.fields import parse_object
from rkserve.api.json.schemas import Example, RequestModel, read_model
from rkserve.core.errors import RequestError, RouteNotFound
from rkserve.http.auth import bearer_of, may_administer, who_of
from rkserve.http.bodies import announced, body_of, query_of, read_parts
from rkserve.http.openapi import (
    ADMIN,
    CHANGE,
    KEY,
    OCTETS,
    OPEN,
    OPERATE,
    PLAIN,
    PUSHED_ADAPTER,
    READ,
    SIM,
    EndpointAnswer,
    EndpointParameter,
    H,
    Routes,
    returns,
)
from rkserve.router.features.operations import AdminAnswer, Operations
from rkserve.router.features.weights import Adapters, WeightsControl
from rkserve.router.membership import WAITING_RETRY_S, Membership
from rkserve.router.service import Service

PART_BYTES = 1024 * 1024
HEADS_FILE = "that file on the head node, in a folder of `coordinator.allowed_paths`"
# An adapter's load and unload in vLLM's form, which answers with a sentence.
SENTENCE = EndpointAnswer(
    operations.OK,
    "A sentence, as vLLM says it.",
    {PLAIN: str},
    {"x-operation-id": "The operation.", "x-epoch": "The epoch of the cluster."},
)
LOADED = Example(
    {"lora_name": "calm", "lora_path": "/srv/adapters/calm.rkllm", "base_model_name": SIM},
    needs=HEADS_FILE,
)
UNLOADED = Example({"lora_name": "tone"}, needs=PUSHED_ADAPTER)
JOIN_TOKEN = EndpointParameter(
    "authorization", "header", {"type": "string"}, "`Bearer` and a join token.", required=True
)
UP = "a head that `rkserve up` has started"
JOINING = Example(
    {"host": "rock-5b", "ray": "2.60.0", "python": "3.11"},
    headers={"authorization": "Bearer JOIN_TOKEN"},
    needs=f"{UP}, and its join token",
)
MEMBER = EndpointParameter(
    "authorization",
    "header",
    {"type": "string"},
    "`Bearer` and the secret of the cluster's boards.",
    required=True,
)
BEATING = Example(
    {"key": "0" * 32, "host": "rock-5b", "version": __version__},
    headers={"authorization": "Bearer SECRET"},
    needs="a head that `rkserve up` has started, and a board that has joined it",
)
Change = Callable[[ControlRequest], Awaitable[AdminAnswer]]


def changed(done: type, says: str = "It is done.") -> tuple[EndpointAnswer, ...]:
    """Return the answers of a change: done, and with ``async`` begun."""
    return returns(done, says), returns(done, "It goes on: `/v1/operations` tells how.", 202)


def adapter_answers(done: EndpointAnswer) -> tuple[EndpointAnswer, ...]:
    """Return the answers of a call that loads or unloads an adapter."""
    return done, returns(lora.AdapterMessageDone, "It goes on.", 202)


class ControlRoutes:
    """Routes of one tag for operations on the cluster, with access checks and descriptions."""

    def __init__(self, app: FastAPI, service: Service, tag: str) -> None:
        self._service = service
        self.route = Routes(app, tag)

    def change(  # noqa: PLR0917 - as a table of routes reads them
        self,
        call: str,
        change: Change,
        done: type | tuple[EndpointAnswer, ...],
        asked: type[QueryOrBody],
        example: Example | None = None,
        summary: str = "",
    ) -> None:
        """Add a change by the operator; ``change`` carries it out, and its docstring says what."""

        async def handler(request: Request) -> Response:
            return await self.changed(request, change)

        self.changing(call, done, asked, example, summary=summary or _summary(change))(handler)

    def changing(
        self,
        call: str,
        done: type | tuple[EndpointAnswer, ...],
        asked: type[QueryOrBody],
        example: Example | None = None,
        **more: Any,
    ) -> Callable[[H], H]:
        """Return the decorator of a change; ``done`` are its answers, or the type of the usual."""
        answers = done if isinstance(done, tuple) else changed(done)
        return self.route(
            call,
            OPERATE,
            *answers,
            errors=CHANGE,
            headers=(KEY,),
            asked=asked,
            example=example,
            **more,
        )

    def look(  # noqa: PLR0917 - as a table of routes reads them
        self,
        call: str,
        look: Change,
        answer: type,
        says: str,
        query: type[RequestModel] | None = ModelQuery,
        errors: tuple[int, ...] = (400, 404),
    ) -> None:
        """Add a query by a client; ``look`` answers it, and its docstring says what."""

        async def handler(request: Request) -> Response:
            return answered(await look(ControlRequest(query_of(request))))

        summary = _summary(look)
        self.route(call, READ, returns(answer, says), summary=summary, errors=errors, query=query)(
            handler
        )

    async def changed(self, request: Request, change: Change) -> Response:
        """Make a change that the operator asks for."""
        return answered(await change(await self.asked(request)))

    async def asked(self, request: Request, *, body: bool = True) -> ControlRequest:
        """Return what the operator asks; raises before any of the body is read if it is not."""
        who = who_of(request)
        key = read_key(request.headers.get("idempotency-key"))
        content = await body_of(self._service, request) if body else b""
        return ControlRequest(query_of(request), content, key, who, may_administer(request))

    def parts(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body in parts."""
        return read_parts(request, max_bytes, self._service.config.body_timeout_s, PART_BYTES)


def _summary(handler: Change) -> str:
    return " ".join((inspect.getdoc(handler) or "").partition("\n\n")[0].split())


def add_cluster(
    app: FastAPI, service: Service, max_adapter_bytes: int, max_model_bytes: int
) -> None:
    """Add the routes to the Router's application."""
    control = Operations(service)
    adapters, weights_control = Adapters(service, control), WeightsControl(service, control)
    for call in (*pause.CALLS, *sleep.CALLS):
        change = partial(control.change, call.body)
        about = (call.answer, call.body, call.example, call.summary)
        ControlRoutes(app, service, call.tag).change(f"POST {call.path}", change, *about)
    _add_looks(ControlRoutes(app, service, "Cluster"), control)
    _add_records(ControlRoutes(app, service, "Operations"), control)
    adapter_routes = ControlRoutes(app, service, "Adapters")
    _add_uploads(adapter_routes, adapters, max_adapter_bytes)
    _add_adapters(adapter_routes, adapters)
    _add_weights(ControlRoutes(app, service, "Weights"), weights_control, max_model_bytes)


def add_join(app: FastAPI, service: Service, membership: Membership) -> None:
    """Add the routes by which boards join, and the operator approves them."""
    route = Routes(app, "Cluster")

    @route(
        "POST /v1/join",
        OPEN,
        returns(join.JoinAnswer, "The values that the board's Ray starts with."),
        returns(
            join.JoinWaiting,
            "The board waits for the operator's approval.",
            operations.ACCEPTED,
            {"retry-after": "Seconds after which the board asks again."},
        ),
        errors=(403, 409, 429),
        body=join.JoinBody,
        headers=(JOIN_TOKEN,),
        example=JOINING,
        says="The call of `rkserve join`. It needs a join token, which `rkserve up` and `rkserve "
        "token` print on the head.",
    )
    async def joined(request: Request) -> Response:
        """Give a board the address, the token and the settings of the head's Ray."""
        asked = read_model(join.JoinBody, parse_object(await body_of(service, request)))
        token = bearer_of(request)
        folder = await asyncio.to_thread(membership.check, token, asked)
        answer = await asyncio.to_thread(membership.admit, folder, token, asked)
        if "ray_address" in answer:
            return JSONResponse(answer)
        return JSONResponse(
            answer, operations.ACCEPTED, headers={"retry-after": str(WAITING_RETRY_S)}
        )

    _add_members(ControlRoutes(app, service, "Cluster"), membership)


def _add_members(routes: ControlRoutes, membership: Membership) -> None:
    route = routes.route

    @route(
        "GET /v1/members",
        ADMIN,
        returns(join.MembersAnswer, "All of them."),
        errors=(409,),
        example=Example(needs=UP),
    )
    async def listed(request: Request) -> Response:
        """List the boards that have asked to join."""
        await routes.asked(request, body=False)
        return JSONResponse(await asyncio.to_thread(membership.listed))

    waiting = Example({"boards": ["rock-5b"]}, needs="a board that waits for approval")

    @route(
        "POST /v1/members/approve",
        ADMIN,
        returns(join.ApprovedAnswer, "The boards that may join."),
        errors=(404, 409),
        body=join.ApproveBody,
        example=waiting,
        says="A board that waits joins when it asks again, after some seconds.",
    )
    async def approve(request: Request) -> Response:
        """Approve boards that have asked to join."""
        asked = await routes.asked(request)
        body = asked.read(join.ApproveBody)
        if body.boards is None and not body.all:
            raise RequestError("'boards' or 'all' is needed.", "boards")
        state = join.MemberState.JOINED
        decide = partial(membership.decide, body.boards or (), state, asked.who)
        return JSONResponse(await asyncio.to_thread(decide, everything=body.all))

    @route(
        "POST /v1/members/deny",
        ADMIN,
        returns(join.ApprovedAnswer, "The boards that may not join."),
        errors=(404, 409),
        body=join.DenyBody,
        example=waiting,
        says="A board whose Ray runs goes on: `rkserve leave` there ends it.",
    )
    async def deny(request: Request) -> Response:
        """Deny boards that have asked to join."""
        asked = await routes.asked(request)
        names = asked.read(join.DenyBody).boards
        state = join.MemberState.DENIED
        decided = await asyncio.to_thread(membership.decide, names, state, asked.who)
        return JSONResponse(decided)


def add_updates(app: FastAPI, service: Service, membership: Membership) -> None:
    """Add the routes by which boards take part in updates."""

    @Routes(app, "Cluster")(
        "POST /v1/heartbeat",
        OPEN,
        returns(heartbeat.HeartbeatAnswer, "The head's version, and what an update wants."),
        errors=(403, 409),
        body=heartbeat.HeartbeatBody,
        headers=(MEMBER,),
        example=BEATING,
        says="The call of `rkserve join` every few seconds.",
    )
    async def beaten(request: Request) -> Response:
        """Take a board's version and the progress of its update."""
        asked = read_model(heartbeat.HeartbeatBody, parse_object(await body_of(service, request)))
        order, terms = await asyncio.to_thread(membership.beat, bearer_of(request), asked)
        # Beside a host name that others have too, the node's name has its address.
        names = asked.host, f"{asked.host}-"
        found = service.fleet.reports()
        replicas = [one for one in found if one.node == names[0] or one.node.startswith(names[1])]
        answer = heartbeat.HeartbeatAnswer(
            version=__version__,
            replicas=[{"pid": one.pid, "state": one.state.value} for one in replicas],
            order=order,
            measures=[{"library": one, "model": other} for one, other in terms.measures],
        )
        return JSONResponse(answer)

    @Routes(app, "Cluster")(
        "GET /v1/update/files/{sha256}",
        OPEN,
        EndpointAnswer(operations.OK, "The file.", {OCTETS: bytes}),
        errors=(403, 404, 409),
        headers=(MEMBER,),
        paths={"sha256": "The sha256 of the file."},
        example=Example(
            path={"sha256": "0" * 64},
            headers={"authorization": "Bearer SECRET"},
            needs="an update that goes on, and the sha256 of one of its files",
        ),
    )
    async def wheel(request: Request, sha256: str) -> Response:
        """Send a file of the update to a board."""
        path = await asyncio.to_thread(membership.wheel, bearer_of(request), sha256)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except OSError as exc:
            raise RouteNotFound(f"{path.name} has left the folder of the update.") from exc

        async def pieces() -> AsyncIterator[bytes]:
            with file:
                while piece := await asyncio.to_thread(file.read, PART_BYTES):
                    yield piece

        return StreamingResponse(pieces(), media_type=OCTETS)


def _add_looks(routes: ControlRoutes, control: Operations) -> None:
    look, each = routes.look, "Each board."
    look("GET /is_sleeping", control.is_sleeping, cluster_status.SleepingAnswer, each)
    look("GET /is_paused", control.is_paused, cluster_status.PausedAnswer, each)
    look("GET /weight_info", control.weights, weights.WeightInfoAnswer, "By model.")
    look(
        "GET /v1/cluster",
        control.glance,
        cluster_status.ClusterAnswer,
        "The cluster at a glance.",
        query=None,
        errors=(),
    )


def _add_records(routes: ControlRoutes, control: Operations) -> None:
    route, latest, errors = routes.route, "The latest first.", (400, 503)
    ten = Example(query={"limit": "10"})

    @route(
        "GET /v1/operations",
        OPERATE,
        returns(operations.OperationsAnswer, latest),
        errors=errors,
        query=ListQuery,
    )
    async def listed(request: Request) -> Response:
        """List the latest operations."""
        return answered(await control.listed(await routes.asked(request, body=False)))

    @route(
        "GET /v1/operations/{operation_id}",
        OPERATE,
        returns(operations.OperationAnswer, "The operation."),
        errors=(*errors, 404),
        paths={"operation_id": "Its id."},
        example=Example(path={"operation_id": "op-1"}),
    )
    async def one(request: Request, operation_id: str) -> Response:
        """Describe one operation."""
        await routes.asked(request, body=False)
        return answered(await control.one(operation_id))

    @route(
        "GET /v1/audit",
        OPERATE,
        returns(operations.AuditAnswer, latest),
        errors=errors,
        query=ListQuery,
        example=ten,
    )
    async def audit(request: Request) -> Response:
        """List who changed what."""
        return answered(await control.audit(await routes.asked(request, body=False)))


def _add_uploads(routes: ControlRoutes, adapters: Adapters, max_adapter_bytes: int) -> None:
    @routes.route(
        "POST /v1/lora_adapters",
        OPERATE,
        *changed(
            lora.AdapterPushDone,
            "It is on every board, and served unless `activate` says otherwise.",
        ),
        errors=CHANGE,
        headers=(KEY,),
        query=lora.AdapterQuery,
        body=lora.RegisterBody,
        file=True,
        may_be_empty=True,
        example=Example(
            query={"name": "tone", "version": "v2", "model": SIM},
            headers={"content-type": OCTETS},
            file="adapter.rkllm",
            needs="an adapter file: `rkserve sim adapter adapter.rkllm` makes a simulated one",
        ),
        says="With a file as the body everything else stands in the query; else one of `path` and "
        "`url` says where the file is.",
    )
    async def push(request: Request) -> Response:
        """Take a new version of an adapter: its bytes, or where they are."""
        if not _is_file(request):
            return await routes.changed(request, adapters.register)
        asked = await routes.asked(request, body=False)
        length = announced(request, max_adapter_bytes)
        if length == 0:
            raise RequestError("The body is empty. Send the adapter's file.")
        parts = routes.parts(request, max_adapter_bytes)
        return answered(await adapters.upload(asked, parts, length))

    done, change = adapter_answers(SENTENCE), routes.change
    change("POST /v1/load_lora_adapter", adapters.load, done, lora.LoadAdapterBody, LOADED)
    change("POST /v1/unload_lora_adapter", adapters.unload, done, lora.UnloadAdapterBody, UNLOADED)


def _add_adapters(routes: ControlRoutes, adapters: Adapters) -> None:
    routes.look("GET /v1/lora_adapters", adapters.listed, lora.AdaptersAnswer, "Every version.")
    tone, name = {"name": "tone"}, {"name": "The adapter."}
    one = "/v1/lora_adapters/{name}"
    rolled = Example({"version": "v1", "strategy": "rolling"}, tone, needs=PUSHED_ADAPTER)

    @routes.changing(
        f"POST {one}/rollout", lora.AdapterDone, lora.NamedRolloutBody, rolled, paths=name
    )
    async def rollout(request: Request, name: str) -> Response:
        """Have a staged version served."""
        return answered(await adapters.rollout(await routes.asked(request), name))

    two = Example(path=tone, needs="an adapter of which two versions were served in turn")

    @routes.changing(f"POST {one}/rollback", lora.AdapterDone, pause.ControlBody, two, paths=name)
    async def rollback(request: Request, name: str) -> Response:
        """Have the previous version served again."""
        return answered(await adapters.rollback(await routes.asked(request), name))

    canary = "a canary that goes on: `rkserve lora push --strategy canary`"
    trial = Example(path=tone, needs=canary)

    @routes.changing(f"POST {one}/promote", lora.AdapterDone, pause.ControlBody, trial, paths=name)
    async def promote(request: Request, name: str) -> Response:
        """Have the version on trial served to everybody."""
        return answered(await adapters.promote(await routes.asked(request), name))

    whole = Example(path=tone)

    @routes.changing(f"DELETE {one}", lora.AdapterDeleted, pause.ControlBody, whole, paths=name)
    async def delete(request: Request, name: str) -> Response:
        """Serve an adapter no more."""
        return answered(await adapters.delete(await routes.asked(request), name, None))

    # A path parameter, so that a version with slashes gets the error of the naming rule.
    @routes.changing(
        f"DELETE {one}/{{version:path}}",
        lora.AdapterDeleted,
        pause.ControlBody,
        Example(path={**tone, "version": "v1"}),
        paths={**name, "version": "The version."},
    )
    async def delete_version(request: Request, name: str, version: str) -> Response:
        """Serve a version no more."""
        return answered(await adapters.delete(await routes.asked(request), name, version))


def _add_weights(routes: ControlRoutes, control: WeightsControl, max_model_bytes: int) -> None:
    place = {"model": SIM, "path": "/srv/models/other.rkllm"}
    routes.change(
        "POST /receive_weight_update",
        control.receive,
        weights.UpdateDone,
        weights.UpdateBody,
        Example(
            {"version": 7, "artifact": f"{SIM}@step-7"},
            needs="weights that were uploaded as `step-7`: `POST /v1/weights`",
        ),
    )
    routes.change(
        "POST /update_weights_from_disk",
        control.from_disk,
        weights.DiskDone,
        weights.DiskBody,
        Example({"model": SIM, "model_path": place["path"]}, needs=HEADS_FILE),
    )

    @routes.changing(
        "POST /v1/weights",
        (returns(weights.WeightsTakenAnswer, "They are on the head."),),
        weights.NewWeightsBody,
        Example(place, needs=HEADS_FILE),
        file=True,
    )
    async def push(request: Request) -> Response:
        """Take base weights to the head: their bytes, or where they are."""
        if not _is_file(request):
            return await routes.changed(request, control.register)
        asked = await routes.asked(request, body=False)
        length = announced(request, max_model_bytes)
        parts = routes.parts(request, max_model_bytes)
        return answered(await control.upload(asked, parts, length))


def _is_file(request: Request) -> bool:
    """Return whether the body is a file instead of JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == OCTETS


def answered(made: AdminAnswer) -> Response:
    """Return the response of an administrative call."""
    if isinstance(made.body, str):
        return PlainTextResponse(made.body, made.status, made.headers)
    return JSONResponse(made.body, made.status, made.headers)
