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
from rkserve.api.admin.cluster_status import ServerLoadAnswer, WorldSizeAnswer
from rkserve.api.admin.lora import (
    AdapterMessageDone,
    AdapterSuccessAnswer,
    LoadAdapterBody,
    UnloadAdapterBody,
)
from rkserve.api.admin.operations import AbortDone, SleepDone, SuccessDone, WakeDone
from rkserve.api.admin.pause import AbortOneBody, FlushBody, parse_abort_one
from rkserve.api.admin.query import (
    ControlRequest,
    ModelQuery,
    NoParameters,
    QueryOrBody,
    WorldSizeQuery,
)
from rkserve.api.admin.sleep import SleepBody, WakeBody
from rkserve.api.admin.weights import DiskDone, WeightDirBody, WeightVersionAnswer
from rkserve.api.common.output import ErrorAnswer
from rkserve.api.json.body import parse_object
from rkserve.api.json.fields import Fields
from rkserve.api.json.schemas import RequestModel
from rkserve.core.errors import NoBoard, RequestError, UnsupportedParameter
from rkserve.http.openapi import (
    CHANGE,
    KEY,
    PLAIN,
    PUSHED_ADAPTER,
    SERVICE,
    SIM,
    Access,
    EndpointAnswer,
    Example,
    described,
    told,
)
from rkserve.router.admin.operations import OK, AdminAnswer, Operations, SleepControl
from rkserve.router.admin.weights import Adapters, WeightsControl
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
        label, model = made.body["weight_version"], made.body["model"]
        return AdminAnswer(OK, WeightVersionAnswer(weight_version=label, model=model))

    async def world_size(self, asked: ControlRequest) -> AdminAnswer:
        """Return the number of boards, in vLLM's form."""
        asked.read(WorldSizeQuery)
        return AdminAnswer(OK, WorldSizeAnswer(world_size=len(self._service.fleet.reports())))

    async def load(self, asked: ControlRequest) -> AdminAnswer:
        """Return the number of requests in flight at this Router, in vLLM's form."""
        asked.read(NoParameters)
        return AdminAnswer(OK, ServerLoadAnswer(server_load=self._service.in_flight))


def add_trainers(
    app: FastAPI,
    service: Service,
    trainers: Trainers,
    change: Callable[[Request, Change], Awaitable[Response]],
    look: Callable[[Request, Change], Awaitable[Response]],
) -> None:
    """Add the routes; ``change`` admits operators, ``look`` clients."""
    both = ("GET", "POST")
    one, tags = Example({"rid": "chatcmpl-1"}), Example({"tags": ["weights", "kv_cache"]})
    changes: dict[str, tuple[Change, dict[str, Any], tuple[str, ...]]] = {
        "/flush_cache": (
            trainers.flush_cache,
            _change("Drop KV caches, in SGLang's words.", SuccessDone, FlushBody, tag="Cluster"),
            both,
        ),
        "/release_memory_occupation": (
            trainers.release,
            _change("Unload models, in SGLang's words.", SleepDone, SleepBody, tags),
            POST,
        ),
        "/resume_memory_occupation": (
            trainers.occupy,
            _change("Load models again, in SGLang's words.", WakeDone, WakeBody, tags),
            POST,
        ),
        "/abort_request": (
            trainers.abort,
            _change("End a request, in SGLang's words.", AbortDone, AbortOneBody, one),
            POST,
        ),
        "/load_lora_adapter": (
            trainers.load_adapter,
            adapter_call(
                _SUCCESS, LoadAdapterBody, "Take and serve an adapter, as SGLang answers it."
            ),
            POST,
        ),
        "/unload_lora_adapter": (
            trainers.unload_adapter,
            adapter_call(
                _SUCCESS, UnloadAdapterBody, "Serve an adapter no more, as SGLang answers it."
            ),
            POST,
        ),
        "/update_weights": (
            trainers.update_weights,
            described(
                "Trainers",
                Access.OPERATOR,
                *changed(DiskDone, "The weights are served."),
                summary="Load base weights from the head's disk, as prime-rl and vLLM ask for "
                "them.",
                errors=CHANGE,
                headers=(KEY,),
                body=WeightDirBody,
                may_be_empty=True,
                example=Example(
                    {"model": SIM, "weight_dir": "/srv/models/other.rkllm"}, needs=HEADS_FILE
                ),
            ),
            POST,
        ),
        **dict.fromkeys(REFUSED, (trainers.refuse, _REFUSED, POST)),
    }
    for path, (made, description, methods) in changes.items():
        app.add_api_route(path, _route(change, made), methods=list(methods), **description)
    version = _look("Say which weights a model has.", WeightVersionAnswer, ModelQuery)
    looks: dict[str, tuple[Change, dict[str, Any]]] = {
        "/get_weight_version": (trainers.weight_version, version),
        "/weight_version": (trainers.weight_version, version),
        "/get_world_size": (
            trainers.world_size,
            _look("Say how many boards there are.", WorldSizeAnswer, WorldSizeQuery),
        ),
        "/load": (
            trainers.load,
            _look("Say how many requests this Router answers.", ServerLoadAnswer),
        ),
    }
    for path, (shown, description) in looks.items():
        app.add_api_route(path, _route(look, shown), methods=["GET"], **description)
    _add_health(app, service)


def changed(done: type, says: str = "It is done.") -> tuple[EndpointAnswer, ...]:
    """Return the answers of a change: done, and with ``async`` begun."""
    goes_on = "It goes on: `/v1/operations` tells how."
    return (told(done, says), told(done, goes_on, 202))


def _change(
    summary: str,
    done: type,
    asked: type[QueryOrBody],
    example: Example | None = None,
    tag: str = "Trainers",
) -> dict[str, Any]:
    return described(
        tag,
        Access.OPERATOR,
        *changed(done),
        summary=summary,
        errors=CHANGE,
        headers=(KEY,),
        asked=asked,
        example=example,
    )


def adapter_call(
    done: EndpointAnswer, asked: type[QueryOrBody], summary: str = ""
) -> dict[str, Any]:
    """Return the description of a call that loads or unloads an adapter.

    It is SGLang's, with a summary, or vLLM's.
    """
    file = {"lora_path": "/srv/adapters/calm.rkllm", "base_model_name": SIM}
    example = (
        Example({"lora_name": "calm", **file}, needs=HEADS_FILE)
        if asked is LoadAdapterBody
        else Example({"lora_name": "tone"}, needs=PUSHED_ADAPTER)
    )
    return described(
        "Trainers" if summary else "Adapters",
        Access.OPERATOR,
        done,
        told(AdapterMessageDone, "It goes on.", 202),
        summary=summary,
        errors=CHANGE,
        headers=(KEY,),
        asked=asked,
        example=example,
    )


def _look(summary: str, answer: type, query: type[RequestModel] | None = None) -> dict[str, Any]:
    return described(
        "Trainers",
        Access.CLIENT,
        told(answer, summary),
        summary=summary,
        errors=(400, 404),
        query=query,
    )


POST = ("POST",)
HEADS_FILE = "that file on the head node, in a folder of `coordinator.allowed_paths`"
SENTENCE = EndpointAnswer(
    OK,
    "A sentence, as vLLM says it.",
    {PLAIN: str},
    {"x-operation-id": "The operation.", "x-epoch": "The epoch of the cluster."},
)
_SUCCESS = told(AdapterSuccessAnswer, "It is done.")
_REFUSED = described(
    "Trainers",
    Access.OPERATOR,
    told(ErrorAnswer, "Weights come as files.", 400),
    summary="Refuse weights that are no file, and say what to use instead.",
    errors=(408, 413, 415),
    example=Example({}, status=400, needs="nothing: it answers 400 and says what to use instead"),
)


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
