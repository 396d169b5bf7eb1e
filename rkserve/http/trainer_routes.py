"""Routes of trainers: SGLang's and vLLM's names for operations that other routes perform.

Calls that a board cannot support are rejected with the alternative.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from rkserve import __version__
from rkserve.api.admin.pause import FlushBody, parse_abort_one
from rkserve.api.admin.query import ControlRequest, ParameterKind
from rkserve.api.json.body import parse_object
from rkserve.api.json.fields import Fields
from rkserve.core.errors import NoBoard, RequestError, UnsupportedParameter
from rkserve.http.endpoints import SERVICE, Access, EndpointAnswer, described, told
from rkserve.router.admin.adapters import Adapters
from rkserve.router.admin.operations import OK, AdminAnswer, Operations, SleepControl
from rkserve.router.admin.weights import WeightsControl
from rkserve.router.service import Service

Change = Callable[[ControlRequest], Awaitable[AdminAnswer]]
IDLE_LOOK_S = 0.05
_BY_FILE = (
    "A board has no tensors that could be sent to it: it loads .rkllm files. Bring the file with "
    "POST /v1/weights and POST /update_weights_from_disk, or an adapter with POST "
    "/v1/lora_adapters."
)
# Weights over NCCL, shared memory or GPU handles.
REFUSED = (
    *("/init_weights_update_group", "/destroy_weights_update_group"),
    *("/update_weights_from_distributed", "/update_weights_from_tensor"),
    *("/update_weights_from_ipc", "/init_weight_transfer_engine"),
    *("/start_weight_update", "/finish_weight_update"),
)


class Trainers:
    """Trainers' calls, translated to operations."""

    def __init__(
        self,
        service: Service,
        operations: Operations,
        rest: SleepControl,
        adapters: Adapters,
        weights: WeightsControl,
    ) -> None:
        self._service, self._operations = service, operations
        self._rest, self._adapters, self._weights = rest, adapters, weights

    # -- changes ------------------------------------------------------------------------------

    async def flush_cache(self, asked: ControlRequest) -> AdminAnswer:
        """Clear KV caches, in SGLang's form: with ``timeout`` once no request runs."""
        call = asked.read(FlushBody)
        wait_s = call.timeout
        if wait_s and not await self._idle(wait_s):
            raise RequestError(
                f"Requests still ran after {wait_s:g} s; no cache was flushed.", "timeout"
            )
        return await self._operations.drop_caches(call, asked)

    async def _idle(self, wait_s: float) -> bool:
        """Wait until no board has a request; return False on timeout."""
        until_s = time.monotonic() + wait_s
        while True:
            await self._operations.look()
            if not any(one.running or one.queued for one in self._service.fleet.reports()):
                return True
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(IDLE_LOOK_S)

    async def release(self, asked: ControlRequest) -> AdminAnswer:
        """Unload models, in SGLang's form."""
        return await self._rest.sleep(asked)

    async def occupy(self, asked: ControlRequest) -> AdminAnswer:
        """Load models, in SGLang's form."""
        return await self._rest.wake(asked)

    async def abort(self, asked: ControlRequest) -> AdminAnswer:
        """Abort one request, or all, in SGLang's form."""
        return await self._operations.end_requests(parse_abort_one(asked), asked)

    async def load_adapter(self, asked: ControlRequest) -> AdminAnswer:
        """Serve an adapter, in SGLang's form."""
        return _sglang(await self._adapters.load(asked))

    async def unload_adapter(self, asked: ControlRequest) -> AdminAnswer:
        """Retire an adapter, in SGLang's form."""
        return _sglang(await self._adapters.unload(asked))

    async def update_weights(self, asked: ControlRequest) -> AdminAnswer:
        """Load base weights from the head's disk, in prime-rl's and vLLM's form."""
        body = parse_object(asked.body) if asked.body.strip() else {}
        fields = Fields(body)
        place = fields.text("weight_dir")
        if fields.get("update_info") is not None:
            place = (fields.child("update_info") or fields).text("model_path")
            if place is None:
                raise UnsupportedParameter(
                    f"Unsupported parameter: 'update_info' without 'model_path'. {_BY_FILE}",
                    "update_info",
                )
        rest = {k: v for k, v in body.items() if k not in ("weight_dir", "update_info")}
        found = _json({"model_path": place or "default", **rest})
        return await self._weights.from_disk(replace(asked, body=found))

    async def refuse(self, asked: ControlRequest) -> AdminAnswer:
        """Reject weights that are not sent as a file."""
        del asked
        raise RequestError(f"Weights cannot be sent so. {_BY_FILE}")

    # -- looking ------------------------------------------------------------------------------

    async def weight_version(self, asked: ControlRequest) -> AdminAnswer:
        """Return the weight version of a model, in SGLang's form."""
        made = await self._operations.weights(asked)
        assert isinstance(made.body, dict)
        return AdminAnswer(OK, {name: made.body[name] for name in ("weight_version", "model")})

    async def world_size(self, asked: ControlRequest) -> AdminAnswer:
        """Return the number of boards, in vLLM's form."""
        asked.fields({"include_dp": ParameterKind.FLAG})
        return AdminAnswer(OK, {"world_size": len(self._service.fleet.reports())})

    async def load(self, asked: ControlRequest) -> AdminAnswer:
        """Return the number of requests in flight at this Router, in vLLM's form."""
        asked.fields({})
        return AdminAnswer(OK, {"server_load": self._service.in_flight})


def add_trainers(
    app: FastAPI,
    service: Service,
    trainers: Trainers,
    change: Callable[[Request, Change], Awaitable[Response]],
    look: Callable[[Request, Change], Awaitable[Response]],
) -> None:
    """Add the routes; ``change`` admits operators, ``look`` clients."""
    changes: dict[str, tuple[Change, tuple[str, ...]]] = {
        "/flush_cache": (trainers.flush_cache, ("GET", "POST")),
        "/release_memory_occupation": (trainers.release, ("POST",)),
        "/resume_memory_occupation": (trainers.occupy, ("POST",)),
        "/abort_request": (trainers.abort, ("POST",)),
        "/load_lora_adapter": (trainers.load_adapter, ("POST",)),
        "/unload_lora_adapter": (trainers.unload_adapter, ("POST",)),
        "/update_weights": (trainers.update_weights, ("POST",)),
        **dict.fromkeys(REFUSED, (trainers.refuse, ("POST",))),
    }
    for path, (made, methods) in changes.items():
        app.add_api_route(path, _route(change, made), methods=list(methods))
    looks: dict[str, Change] = {
        "/get_weight_version": trainers.weight_version,
        "/weight_version": trainers.weight_version,
        "/get_world_size": trainers.world_size,
        "/load": trainers.load,
    }
    for path, shown in looks.items():
        app.add_api_route(path, _route(look, shown), methods=["GET"])
    _add_health(app, service)


class VersionAnswer(TypedDict):
    """The release of rkserve."""

    version: str


def _add_health(app: FastAPI, service: Service) -> None:
    alive = EndpointAnswer(OK, "An empty answer.")

    @app.get("/version", **described(SERVICE, Access.OPEN, told(VersionAnswer, "The release.")))
    async def version() -> JSONResponse:
        """Say which release this is, in vLLM's words."""
        return JSONResponse(VersionAnswer(version=__version__))

    @app.api_route("/ping", methods=["GET", "POST"], **described(SERVICE, Access.OPEN, alive))
    async def ping() -> Response:
        """Say that the Router lives."""
        return Response(status_code=OK)

    @app.get("/health_generate", **described(SERVICE, Access.OPEN, alive, errors=(503,)))
    async def health_generate() -> Response:
        """Say that every model has a board that generates, in SGLang's words."""
        for model in service.fleet.models:
            if not service.fleet.is_ready(model):
                raise NoBoard(model, service.fleet.why_not_ready(model))
        return Response(status_code=OK)


def _route(
    let_in: Callable[[Request, Change], Awaitable[Response]], made: Change
) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await let_in(request, made)

    return route


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _sglang(made: AdminAnswer) -> AdminAnswer:
    if isinstance(made.body, str):
        body = {"success": made.status == OK, "message": made.body, "error_message": None}
        return AdminAnswer(made.status, body, made.headers)
    return made
