"""Routes of trainers: SGLang's and vLLM's names for operations that other routes perform.

Calls that a board cannot support are rejected with the alternative.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from rkserve import __version__
from rkserve.api.admin import cluster_status, lora, pause, weights
from rkserve.api.admin.operations import OK
from rkserve.api.admin.query import ControlRequest, NoParameters, WorldSizeQuery
from rkserve.api.common.output import ErrorAnswer
from rkserve.api.json.fields import Fields, parse_object
from rkserve.api.json.schemas import Example
from rkserve.core.errors import NoBoard, RequestError, UnsupportedParameter
from rkserve.http.cluster_routes import (
    HEADS_FILE,
    LOADED,
    UNLOADED,
    ControlRoutes,
    adapter_answers,
    changed,
)
from rkserve.http.openapi import (
    CHANGE,
    KEY,
    OPEN,
    OPERATE,
    SERVICE,
    SIM,
    EndpointAnswer,
    Routes,
    returns,
)
from rkserve.router.features.operations import AdminAnswer, Operations
from rkserve.router.features.weights import Adapters, WeightsControl
from rkserve.router.service import Service

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

    def __init__(self, service: Service) -> None:
        self._service = service
        self.operations = Operations(service)
        self.adapters = Adapters(service, self.operations)
        self._weights = WeightsControl(service, self.operations)

    # -- changes ------------------------------------------------------------------------------

    async def flush_cache(self, asked: ControlRequest) -> AdminAnswer:
        """Drop KV caches, in SGLang's words.

        With ``timeout`` it waits until no request runs.
        """
        call = asked.read(pause.FlushBody)
        wait_s = call.timeout
        if wait_s and not await self._idle(wait_s):
            raise RequestError(
                f"Requests still ran after {wait_s:g} s; no cache was flushed.", "timeout"
            )
        return await self.operations.carry_out(call, asked)

    async def _idle(self, wait_s: float) -> bool:
        """Wait until no board has a request; return False on timeout."""
        until_s = time.monotonic() + wait_s
        while True:
            await self.operations.look()
            if not any(one.running or one.queued for one in self._service.fleet.reports()):
                return True
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(IDLE_LOOK_S)

    async def load_adapter(self, asked: ControlRequest) -> AdminAnswer:
        """Take and serve an adapter, as SGLang answers it."""
        return _sglang(await self.adapters.load(asked))

    async def unload_adapter(self, asked: ControlRequest) -> AdminAnswer:
        """Serve an adapter no more, as SGLang answers it."""
        return _sglang(await self.adapters.unload(asked))

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
        found = json.dumps({"model_path": place or "default", **rest}).encode()
        return await self._weights.from_disk(replace(asked, body=found))

    async def refuse(self, asked: ControlRequest) -> AdminAnswer:
        """Reject weights that are not sent as a file."""
        del asked
        raise RequestError(f"Weights cannot be sent so. {_BY_FILE}")

    # -- looking ------------------------------------------------------------------------------

    async def weight_version(self, asked: ControlRequest) -> AdminAnswer:
        """Say which weights a model has."""
        made = await self.operations.weights(asked)
        assert isinstance(made.body, dict)
        label, model = made.body["weight_version"], made.body["model"]
        return AdminAnswer(OK, weights.WeightVersionAnswer(weight_version=label, model=model))

    async def world_size(self, asked: ControlRequest) -> AdminAnswer:
        """Say how many boards there are."""
        asked.read(WorldSizeQuery)
        size = len(self._service.fleet.reports())
        return AdminAnswer(OK, cluster_status.WorldSizeAnswer(world_size=size))

    async def load(self, asked: ControlRequest) -> AdminAnswer:
        """Say how many requests this Router answers."""
        asked.read(NoParameters)
        return AdminAnswer(OK, cluster_status.ServerLoadAnswer(server_load=self._service.in_flight))


def add_trainers(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    trainers, routes = Trainers(service), ControlRoutes(app, service, "Trainers")
    change, look = routes.change, routes.look
    ControlRoutes(app, service, "Cluster").change(
        "GET,POST /flush_cache", trainers.flush_cache, pause.SuccessDone, pause.FlushBody
    )
    success = adapter_answers(returns(lora.AdapterSuccessAnswer, "It is done."))
    loaded, unloaded = trainers.load_adapter, trainers.unload_adapter
    change("POST /load_lora_adapter", loaded, success, lora.LoadAdapterBody, LOADED)
    change("POST /unload_lora_adapter", unloaded, success, lora.UnloadAdapterBody, UNLOADED)
    version = weights.WeightVersionAnswer
    look("GET /get_weight_version /weight_version", trainers.weight_version, version, "Its label.")
    size, load = cluster_status.WorldSizeAnswer, cluster_status.ServerLoadAnswer
    look("GET /get_world_size", trainers.world_size, size, "Their number.", WorldSizeQuery)
    look("GET /load", trainers.load, load, "Their number.", None)
    _add_updates(routes, trainers)
    _add_health(Routes(app, SERVICE), service)


def _add_updates(routes: ControlRoutes, trainers: Trainers) -> None:
    @routes.route(
        "POST /update_weights",
        OPERATE,
        *changed(weights.DiskDone, "The weights are served."),
        errors=CHANGE,
        headers=(KEY,),
        body=weights.WeightDirBody,
        may_be_empty=True,
        example=Example({"model": SIM, "weight_dir": "/srv/models/other.rkllm"}, needs=HEADS_FILE),
    )
    async def update(request: Request) -> Response:
        """Load base weights from the head's disk, as prime-rl and vLLM ask for them."""
        return await routes.changed(request, trainers.update_weights)

    nothing = "nothing: it answers 400 and says what to use instead"

    @routes.route(
        f"POST {' '.join(REFUSED)}",
        OPERATE,
        returns(ErrorAnswer, "Weights come as files.", 400),
        errors=(408, 413, 415),
        example=Example({}, status=400, needs=nothing),
    )
    async def refuse(request: Request) -> Response:
        """Refuse weights that are no file, and name the call to use instead."""
        return await routes.changed(request, trainers.refuse)


class VersionAnswer(TypedDict):
    """The release of rkserve."""

    version: str


def _add_health(route: Routes, service: Service) -> None:
    alive = EndpointAnswer(OK, "An empty answer.")

    @route("GET /version", OPEN, returns(VersionAnswer, "The release."))
    async def version(_: Request) -> JSONResponse:
        """Say which release this is, in vLLM's words."""
        return JSONResponse(VersionAnswer(version=__version__))

    @route("GET,POST /ping", OPEN, alive)
    async def ping(_: Request) -> Response:
        """Say that the Router lives."""
        return Response(status_code=OK)

    @route("GET /health_generate", OPEN, alive, errors=(503,))
    async def health_generate(_: Request) -> Response:
        """Say that every model has a board that generates, in SGLang's words."""
        for model in service.fleet.models:
            if not service.fleet.is_ready(model):
                raise NoBoard(model, service.fleet.why_not_ready(model))
        return Response(status_code=OK)


def _sglang(made: AdminAnswer) -> AdminAnswer:
    if isinstance(made.body, str):
        body = {"success": made.status == OK, "message": made.body, "error_message": None}
        return AdminAnswer(made.status, body, made.headers)
    return made
