"""Routes of cluster operations and of the cluster's status.

Names and bodies are vLLM's and SGLang's where they have one. Operations and their audit log are for
the operator; the status is for every client.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rkserve.api.admin.query import ControlRequest, read_key
from rkserve.core.errors import RequestError
from rkserve.http.auth import check_client, check_operator
from rkserve.http.request_body import announced, query_of, read_body, read_parts
from rkserve.http.trainer_routes import Trainers, add_trainers
from rkserve.router.admin.adapters import Adapters
from rkserve.router.admin.operations import AdminAnswer, Operations, SleepControl
from rkserve.router.admin.weights import WeightsControl
from rkserve.router.service import Service

PART_BYTES = 1024 * 1024
OCTETS = "application/octet-stream"
_Change = Callable[[ControlRequest], Awaitable[AdminAnswer]]


def add_cluster(
    app: FastAPI, service: Service, max_adapter_bytes: int, max_model_bytes: int
) -> None:
    """Add the routes to the Router's application."""
    operations = Operations(service)
    adapters = Adapters(service, operations)
    door = _Door(service)
    _add_changes(app, door, operations)
    rest, weights = SleepControl(service, operations), WeightsControl(service, operations)
    _add_rest(app, door, rest)
    _add_looks(app, door, operations, adapters)
    _add_records(app, door, operations)
    _add_uploads(app, door, adapters, max_adapter_bytes)
    _add_adapters(app, door, adapters)
    _add_weights(app, door, weights, max_model_bytes)
    trainers = Trainers(service, operations, rest, adapters, weights)
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


def _add_changes(app: FastAPI, door: _Door, operations: Operations) -> None:
    routes: dict[str, tuple[_Change, str]] = {
        "/pause": (operations.pause, "Pause boards, and answer when they have stopped."),
        "/resume": (operations.resume, "Let paused boards go on."),
        "/pause_generation": (operations.pause_generation, "Pause, in SGLang's words."),
        "/continue_generation": (operations.continue_generation, "Resume, in SGLang's words."),
        "/abort_requests": (operations.abort, "End requests."),
        "/reset_prefix_cache": (operations.reset, "Drop KV caches."),
        "/update_weight_version": (operations.label, "Name a model's weights anew."),
    }
    for path, (change, says) in routes.items():
        app.add_api_route(path, _changing(door, change), methods=["POST"], description=says)


def _add_rest(app: FastAPI, door: _Door, rest: SleepControl) -> None:
    routes: dict[str, tuple[_Change, str]] = {
        "/sleep": (rest.sleep, "Put boards to sleep, and answer when their models are unloaded."),
        "/wake_up": (rest.wake, "Wake boards, and answer when their models are loaded."),
        "/wakeup": (rest.wake, "Wake boards, in Ray's words."),
        "/v1/models/load": (rest.load, "Load a model on all of its boards."),
        "/v1/models/unload": (rest.unload, "Unload a model from all of its boards."),
    }
    for path, (change, says) in routes.items():
        app.add_api_route(path, _changing(door, change), methods=["POST"], description=says)

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> Response:
        """Say whether boards sleep."""
        return await door.look(request, rest.is_sleeping)


def _changing(door: _Door, change: _Change) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        return await door.change(request, change)

    return route


def _add_looks(app: FastAPI, door: _Door, operations: Operations, adapters: Adapters) -> None:
    @app.get("/is_paused")
    async def is_paused(request: Request) -> Response:
        """Say whether boards are paused."""
        return await door.look(request, operations.is_paused)

    @app.get("/weight_info")
    async def weights(request: Request) -> Response:
        """Say which weights are served."""
        return await door.look(request, operations.weights)

    @app.get("/v1/cluster")
    async def glance(request: Request) -> Response:
        """Show totals of the cluster, and every board."""
        return await door.look(request, operations.glance)

    @app.get("/v1/lora_adapters")
    async def listed(request: Request) -> Response:
        """List adapters, their versions, and which boards have them."""
        return await door.look(request, adapters.listed)


def _add_records(app: FastAPI, door: _Door, operations: Operations) -> None:
    @app.get("/v1/operations")
    async def listed(request: Request) -> Response:
        """List the latest operations."""
        return _answer(await operations.listed(await door.asked(request, body=False)))

    @app.get("/v1/operations/{operation_id}")
    async def one(request: Request, operation_id: str) -> Response:
        """Describe one operation."""
        await door.asked(request, body=False)
        return _answer(await operations.one(operation_id))

    @app.get("/v1/audit")
    async def audit(request: Request) -> Response:
        """List who changed what."""
        return _answer(await operations.audit(await door.asked(request, body=False)))


def _add_uploads(app: FastAPI, door: _Door, adapters: Adapters, max_adapter_bytes: int) -> None:
    @app.post("/v1/lora_adapters")
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

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        """Take and serve an adapter, in vLLM's words."""
        return await door.change(request, adapters.load)

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        """Serve an adapter no more, in vLLM's words."""
        return await door.change(request, adapters.unload)


def _add_adapters(app: FastAPI, door: _Door, adapters: Adapters) -> None:
    @app.post("/v1/lora_adapters/{name}/rollout")
    async def rollout(request: Request, name: str) -> Response:
        """Have a staged version served."""
        return _answer(await adapters.rollout(await door.asked(request), name))

    @app.post("/v1/lora_adapters/{name}/rollback")
    async def rollback(request: Request, name: str) -> Response:
        """Have the previous version served again."""
        return _answer(await adapters.rollback(await door.asked(request), name))

    @app.post("/v1/lora_adapters/{name}/promote")
    async def promote(request: Request, name: str) -> Response:
        """Have the version on trial served to everybody."""
        return _answer(await adapters.promote(await door.asked(request), name))

    @app.delete("/v1/lora_adapters/{name}")
    async def delete(request: Request, name: str) -> Response:
        """Serve an adapter no more."""
        return _answer(await adapters.delete(await door.asked(request), name, None))

    # A path parameter, so that a version with slashes gets the error of the naming rule.
    @app.delete("/v1/lora_adapters/{name}/{version:path}")
    async def delete_version(request: Request, name: str, version: str) -> Response:
        """Serve a version no more."""
        return _answer(await adapters.delete(await door.asked(request), name, version))


def _add_weights(app: FastAPI, door: _Door, weights: WeightsControl, max_model_bytes: int) -> None:
    routes: dict[str, tuple[_Change, str]] = {
        "/receive_weight_update": (weights.receive, "Serve a trainer's weights everywhere."),
        "/update_weights_from_disk": (weights.from_disk, "Load other base weights in turn."),
    }
    for path, (change, says) in routes.items():
        app.add_api_route(path, _changing(door, change), methods=["POST"], description=says)

    @app.post("/v1/weights")
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
