"""Routes of cluster operations and of the cluster's status.

Names and bodies are vLLM's and SGLang's where they have one. Operations and their audit log are for
the operator; the status is for every client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rkserve.api.admin.cluster_status import ClusterAnswer, PausedAnswer, SleepingAnswer
from rkserve.api.admin.lora import (
    AdapterDeleted,
    AdapterDone,
    AdapterPushDone,
    AdapterQuery,
    AdaptersAnswer,
    LoadAdapterBody,
    NamedRolloutBody,
    RegisterBody,
    UnloadAdapterBody,
)
from rkserve.api.admin.operations import (
    AbortDone,
    AuditAnswer,
    LabelDone,
    MessageDone,
    ModelLoadDone,
    ModelUnloadDone,
    OperationAnswer,
    OperationsAnswer,
    PauseDone,
    PauseMessageDone,
    SleepDone,
    StatusDone,
    SuccessDone,
    WakeDone,
)
from rkserve.api.admin.pause import (
    AbortBody,
    ControlBody,
    LabelBody,
    PauseBody,
    PauseGenerationBody,
    ResetBody,
    ResumeBody,
)
from rkserve.api.admin.query import ControlRequest, ListQuery, ModelQuery, QueryOrBody, read_key
from rkserve.api.admin.sleep import LoadBody, SleepBody, UnloadBody, WakeBody
from rkserve.api.admin.weights import (
    DiskBody,
    DiskDone,
    NewWeightsBody,
    UpdateBody,
    UpdateDone,
    WeightInfoAnswer,
    WeightsTakenAnswer,
)
from rkserve.core.errors import RequestError
from rkserve.http.auth import check_client, check_operator
from rkserve.http.bodies import announced, query_of, read_body, read_parts
from rkserve.http.openapi import (
    CHANGE,
    KEY,
    OCTETS,
    PUSHED_ADAPTER,
    SIM,
    Access,
    Example,
    described,
    told,
)
from rkserve.http.trainer_routes import (
    HEADS_FILE,
    SENTENCE,
    Trainers,
    adapter_call,
    add_trainers,
    changed,
)
from rkserve.router.admin.operations import AdminAnswer, Operations, SleepControl
from rkserve.router.admin.weights import Adapters, WeightsControl
from rkserve.router.service import Service

PART_BYTES = 1024 * 1024
_Change = Callable[[ControlRequest], Awaitable[AdminAnswer]]


def add_cluster(
    app: FastAPI, service: Service, max_adapter_bytes: int, max_model_bytes: int
) -> None:
    """Add the routes to the Router's application."""
    operations = Operations(service)
    adapters = Adapters(service, operations)
    door = _Door(service)
    _add_changes(app, door, operations)
    sleep, weights = SleepControl(service, operations), WeightsControl(service, operations)
    _add_sleep(app, door, sleep)
    _add_looks(app, door, operations, adapters)
    _add_records(app, door, operations)
    _add_uploads(app, door, adapters, max_adapter_bytes)
    _add_adapters(app, door, adapters)
    _add_weights(app, door, weights, max_model_bytes)
    trainers = Trainers(service, operations, sleep, adapters, weights)
    add_trainers(app, service, trainers, door.change, door.look)


class _Door:
    """Access checks and request parsing for the routes."""

    def __init__(self, service: Service) -> None:
        self._keys = service.keys
        self._config = service.config

    async def change(self, request: Request, change: _Change) -> Response:
        """Make a change that the operator asks for."""
        return _answer(await change(await self.asked(request)))

    async def look(self, request: Request, look: _Change) -> Response:
        """Show a client something."""
        check_client(request, self._keys)
        return _answer(await look(ControlRequest(query_of(request))))

    async def asked(self, request: Request, *, body: bool = True) -> ControlRequest:
        """Return what the operator asks; raises before any of the body is read if it is not."""
        who = check_operator(request, self._keys)
        key = read_key(request.headers.get("idempotency-key"))
        limits = (self._config.max_body_bytes, self._config.body_timeout_s)
        content = await read_body(request, *limits) if body else b""
        return ControlRequest(query_of(request), content, key, who)

    def parts(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body in parts."""
        return read_parts(request, max_bytes, self._config.body_timeout_s, PART_BYTES)


def _change(
    summary: str,
    done: type,
    asked: type[QueryOrBody],
    example: Example | None = None,
    tag: str = "Cluster",
    **more: Any,
) -> dict[str, Any]:
    """Return the description of a call that changes the cluster; ``done`` is its answer's type."""
    return described(
        tag,
        Access.OPERATOR,
        *changed(done),
        summary=summary,
        errors=CHANGE,
        headers=(KEY,),
        asked=asked,
        example=example,
        **more,
    )


def _look(tag: str, answer: type, says: str) -> dict[str, Any]:
    """Return the description of a query of a client about one model, or about all."""
    return described(tag, Access.CLIENT, told(answer, says), errors=(400, 404), query=ModelQuery)


def _add_changes(app: FastAPI, door: _Door, operations: Operations) -> None:
    routes: dict[str, tuple[_Change, dict[str, Any]]] = {
        "/pause": (
            operations.pause,
            _change(
                "Pause boards, and answer when they have stopped.",
                PauseDone,
                PauseBody,
                Example({"mode": "keep"}),
            ),
        ),
        "/resume": (
            operations.resume,
            _change("Let paused boards go on.", StatusDone, ResumeBody),
        ),
        "/pause_generation": (
            operations.pause_generation,
            _change(
                "Pause, in SGLang's words.",
                PauseMessageDone,
                PauseGenerationBody,
                Example({"mode": "retract"}),
            ),
        ),
        "/continue_generation": (
            operations.continue_generation,
            _change("Resume, in SGLang's words.", MessageDone, ResumeBody),
        ),
        "/abort_requests": (
            operations.abort,
            _change(
                "End requests.", AbortDone, AbortBody, Example({"request_ids": ["chatcmpl-1"]})
            ),
        ),
        "/reset_prefix_cache": (
            operations.reset,
            _change("Drop KV caches.", SuccessDone, ResetBody),
        ),
        "/update_weight_version": (
            operations.label,
            _change(
                "Name a model's weights anew.",
                LabelDone,
                LabelBody,
                Example({"model": SIM, "new_version": "step-7"}),
            ),
        ),
    }
    _add_posts(app, door, routes)


def _add_posts(
    app: FastAPI, door: _Door, routes: Mapping[str, tuple[_Change, dict[str, Any]]]
) -> None:
    for path, (change, description) in routes.items():
        app.add_api_route(path, _changing(door, change), methods=["POST"], **description)


def _add_sleep(app: FastAPI, door: _Door, sleep: SleepControl) -> None:
    one = Example({"model": SIM})
    routes: dict[str, tuple[_Change, dict[str, Any]]] = {
        "/sleep": (
            sleep.sleep,
            _change(
                "Put boards to sleep, and answer when their models are unloaded.",
                SleepDone,
                SleepBody,
                Example(query={"level": "1", "mode": "wait"}),
            ),
        ),
        "/wake_up": (
            sleep.wake,
            _change("Wake boards, and answer when their models are loaded.", WakeDone, WakeBody),
        ),
        "/wakeup": (sleep.wake, _change("Wake boards, in Ray's words.", WakeDone, WakeBody)),
        "/v1/models/load": (
            sleep.load,
            _change("Load a model on all of its boards.", ModelLoadDone, LoadBody, one),
        ),
        "/v1/models/unload": (
            sleep.unload,
            _change("Unload a model from all of its boards.", ModelUnloadDone, UnloadBody, one),
        ),
    }
    _add_posts(app, door, routes)

    @app.get("/is_sleeping", **_look("Cluster", SleepingAnswer, "Each board."))
    async def is_sleeping(request: Request) -> Response:
        """Say whether boards sleep."""
        return await door.look(request, sleep.is_sleeping)


def _changing(door: _Door, change: _Change) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await door.change(request, change)

    return route


def _add_looks(app: FastAPI, door: _Door, operations: Operations, adapters: Adapters) -> None:
    @app.get("/is_paused", **_look("Cluster", PausedAnswer, "Each board."))
    async def is_paused(request: Request) -> Response:
        """Say whether boards are paused."""
        return await door.look(request, operations.is_paused)

    @app.get("/weight_info", **_look("Cluster", WeightInfoAnswer, "By model."))
    async def weights(request: Request) -> Response:
        """Say which weights are served."""
        return await door.look(request, operations.weights)

    @app.get(
        "/v1/cluster",
        **described("Cluster", Access.CLIENT, told(ClusterAnswer, "The cluster at a glance.")),
    )
    async def glance(request: Request) -> Response:
        """Show totals of the cluster, and every board."""
        return await door.look(request, operations.glance)

    @app.get("/v1/lora_adapters", **_look("Adapters", AdaptersAnswer, "Every version."))
    async def listed(request: Request) -> Response:
        """List adapters, their versions, and which boards have them."""
        return await door.look(request, adapters.listed)


def _record(answer: type, says: str, *errors: int, **more: Any) -> dict[str, Any]:
    """Return the description of a query of the operator about operations."""
    shown = told(answer, says)
    return described("Operations", Access.OPERATOR, shown, errors=(400, 503, *errors), **more)


def _add_records(app: FastAPI, door: _Door, operations: Operations) -> None:
    @app.get("/v1/operations", **_record(OperationsAnswer, "The latest first.", query=ListQuery))
    async def listed(request: Request) -> Response:
        """List the latest operations."""
        return _answer(await operations.listed(await door.asked(request, body=False)))

    @app.get(
        "/v1/operations/{operation_id}",
        **_record(
            OperationAnswer,
            "The operation.",
            404,
            paths={"operation_id": "Its id."},
            example=Example(path={"operation_id": "op-1"}),
        ),
    )
    async def one(request: Request, operation_id: str) -> Response:
        """Describe one operation."""
        await door.asked(request, body=False)
        return _answer(await operations.one(operation_id))

    latest = "The latest lines of the audit log."
    ten = Example(query={"limit": "10"})

    @app.get("/v1/audit", **_record(AuditAnswer, latest, query=ListQuery, example=ten))
    async def audit(request: Request) -> Response:
        """List who changed what."""
        return _answer(await operations.audit(await door.asked(request, body=False)))


def _add_uploads(app: FastAPI, door: _Door, adapters: Adapters, max_adapter_bytes: int) -> None:
    done = "It is on every board, and served unless `activate` says otherwise."

    @app.post(
        "/v1/lora_adapters",
        **described(
            "Adapters",
            Access.OPERATOR,
            *changed(AdapterPushDone, done),
            errors=CHANGE,
            headers=(KEY,),
            query=AdapterQuery,
            body=RegisterBody,
            file=True,
            may_be_empty=True,
            example=Example(
                query={"name": "tone", "version": "v2", "model": SIM},
                headers={"content-type": OCTETS},
                file="adapter.rkllm",
                needs="an adapter file: `rkserve sim adapter adapter.rkllm` makes a simulated one",
            ),
            says="With a file as the body everything else stands in the query; else one of `path` "
            "and `url` says where the file is.",
        ),
    )
    async def push(request: Request) -> Response:
        """Take a new version of an adapter: its bytes, or where they are."""
        if not _is_file(request):
            return await door.change(request, adapters.register)
        asked = await door.asked(request, body=False)
        length = announced(request, max_adapter_bytes)
        if length == 0:
            raise RequestError("The body is empty. Send the adapter's file.")
        parts = door.parts(request, max_adapter_bytes)
        return _answer(await adapters.upload(asked, parts, length))

    @app.post("/v1/load_lora_adapter", **adapter_call(SENTENCE, LoadAdapterBody))
    async def load(request: Request) -> Response:
        """Take and serve an adapter, in vLLM's words."""
        return await door.change(request, adapters.load)

    @app.post("/v1/unload_lora_adapter", **adapter_call(SENTENCE, UnloadAdapterBody))
    async def unload(request: Request) -> Response:
        """Serve an adapter no more, in vLLM's words."""
        return await door.change(request, adapters.unload)


def _add_adapters(app: FastAPI, door: _Door, adapters: Adapters) -> None:
    tone = {"name": "tone"}
    name = {"name": "The adapter."}
    named = partial(_change, "", tag="Adapters", paths=name)

    @app.post(
        "/v1/lora_adapters/{name}/rollout",
        **named(
            AdapterDone,
            NamedRolloutBody,
            Example({"version": "v1", "strategy": "rolling"}, tone, needs=PUSHED_ADAPTER),
        ),
    )
    async def rollout(request: Request, name: str) -> Response:
        """Have a staged version served."""
        return _answer(await adapters.rollout(await door.asked(request), name))

    two = Example(path=tone, needs="an adapter of which two versions were served in turn")

    @app.post("/v1/lora_adapters/{name}/rollback", **named(AdapterDone, ControlBody, two))
    async def rollback(request: Request, name: str) -> Response:
        """Have the previous version served again."""
        return _answer(await adapters.rollback(await door.asked(request), name))

    canary = "a canary that goes on: `rkserve lora push --strategy canary`"
    trial = Example(path=tone, needs=canary)

    @app.post("/v1/lora_adapters/{name}/promote", **named(AdapterDone, ControlBody, trial))
    async def promote(request: Request, name: str) -> Response:
        """Have the version on trial served to everybody."""
        return _answer(await adapters.promote(await door.asked(request), name))

    whole = Example(path=tone)

    @app.delete("/v1/lora_adapters/{name}", **named(AdapterDeleted, ControlBody, whole))
    async def delete(request: Request, name: str) -> Response:
        """Serve an adapter no more."""
        return _answer(await adapters.delete(await door.asked(request), name, None))

    # A path parameter, so that a version with slashes gets the error of the naming rule.
    @app.delete(
        "/v1/lora_adapters/{name}/{version:path}",
        **_change(
            "",
            AdapterDeleted,
            ControlBody,
            Example(path={**tone, "version": "v1"}),
            "Adapters",
            paths={**name, "version": "The version."},
        ),
    )
    async def delete_version(request: Request, name: str, version: str) -> Response:
        """Serve a version no more."""
        return _answer(await adapters.delete(await door.asked(request), name, version))


def _add_weights(app: FastAPI, door: _Door, weights: WeightsControl, max_model_bytes: int) -> None:
    other = {"model": SIM, "model_path": "/srv/models/other.rkllm"}
    routes: dict[str, tuple[_Change, dict[str, Any]]] = {
        "/receive_weight_update": (
            weights.receive,
            _change(
                "Serve a trainer's weights everywhere.",
                UpdateDone,
                UpdateBody,
                Example(
                    {"version": 7, "artifact": f"{SIM}@step-7"},
                    needs="weights that were uploaded as `step-7`: `POST /v1/weights`",
                ),
                "Weights",
            ),
        ),
        "/update_weights_from_disk": (
            weights.from_disk,
            _change(
                "Load other base weights, board by board.",
                DiskDone,
                DiskBody,
                Example(other, needs=HEADS_FILE),
                "Weights",
            ),
        ),
    }
    _add_posts(app, door, routes)

    @app.post(
        "/v1/weights",
        **described(
            "Weights",
            Access.OPERATOR,
            told(WeightsTakenAnswer, "They are on the head."),
            errors=CHANGE,
            headers=(KEY,),
            asked=NewWeightsBody,
            file=True,
            example=Example({"model": SIM, "path": "/srv/models/other.rkllm"}, needs=HEADS_FILE),
        ),
    )
    async def push(request: Request) -> Response:
        """Take base weights to the head: their bytes, or where they are."""
        if not _is_file(request):
            return await door.change(request, weights.register)
        asked = await door.asked(request, body=False)
        length = announced(request, max_model_bytes)
        parts = door.parts(request, max_model_bytes)
        return _answer(await weights.upload(asked, parts, length))


def _is_file(request: Request) -> bool:
    """Return whether the body is a file instead of JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == OCTETS


def _answer(made: AdminAnswer) -> Response:
    if isinstance(made.body, str):
        return PlainTextResponse(made.body, made.status, made.headers)
    return JSONResponse(made.body, made.status, made.headers)
