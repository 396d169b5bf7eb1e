"""Routes that control generations, caches and boards.

The client that knows a generation's ID may control it. Lists of all generations, and changes of
shared caches, are for the operator.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rkserve.api.admin.query import ControlRequest
from rkserve.api.json.body import JsonObject
from rkserve.config.router import RouterConfig
from rkserve.core.messages import ControlAction
from rkserve.http.auth import check_client, check_operator
from rkserve.http.request_body import query_of, read_body
from rkserve.router.auth import Keys
from rkserve.router.features.caches import Caches
from rkserve.router.features.generations import GenerationPeers, Generations
from rkserve.router.service import Service


def add_control(app: FastAPI, service: Service, peers: GenerationPeers | None = None) -> None:
    """Add the routes to the application; ``peers`` are all Routers, if there are several."""
    generations = Generations(service, peers)
    _add_generations(app, service.config, service.keys, generations)
    caches = Caches(service, generations)
    _add_kv(app, service.config, service.keys, caches)
    _add_prompt_caches(app, service.config, service.keys, caches)
    _add_boards(app, service)


def _add_generations(
    app: FastAPI, config: RouterConfig, keys: Keys, generations: Generations
) -> None:
    @app.get("/v1/generations")
    async def listed(request: Request) -> JSONResponse:
        """List everybody's generations."""
        check_operator(request, keys)
        return JSONResponse(await generations.listed())

    @app.get("/v1/generations/{generation}")
    async def one(request: Request, generation: str) -> JSONResponse:
        """Describe one generation."""
        check_client(request, keys)
        return JSONResponse(await generations.one(generation))

    @app.post("/v1/generations/{generation}/edit")
    async def edit(request: Request, generation: str) -> JSONResponse:
        """Change a paused generation."""
        check_client(request, keys)
        return _answer(await generations.edit(generation, await _asked(request, config)))

    async def control(request: Request, generation: str, action: ControlAction) -> JSONResponse:
        check_client(request, keys)
        asked = await _asked(request, config)
        return _answer(await generations.control(generation, action, asked))

    @app.post("/v1/generations/{generation}/pause")
    async def pause(request: Request, generation: str) -> JSONResponse:
        """Pause a generation; answer when nothing more of it comes."""
        return await control(request, generation, ControlAction.PAUSE)

    @app.post("/v1/generations/{generation}/resume")
    async def resume(request: Request, generation: str) -> JSONResponse:
        """Let a paused generation go on."""
        return await control(request, generation, ControlAction.RESUME)

    @app.post("/v1/generations/{generation}/abort")
    async def abort(request: Request, generation: str) -> JSONResponse:
        """End a generation, whatever it does."""
        return await control(request, generation, ControlAction.ABORT)


def _add_kv(app: FastAPI, config: RouterConfig, keys: Keys, caches: Caches) -> None:
    @app.get("/v1/cache/kv/size")
    async def size(request: Request) -> JSONResponse:
        """Say what the KV caches hold."""
        check_client(request, keys)
        return JSONResponse(await caches.kv(ControlRequest(query_of(request))))

    @app.post("/v1/cache/kv/clear")
    async def clear(request: Request) -> JSONResponse:
        """Clear KV caches."""
        check_operator(request, keys)
        return _answer(await caches.clear(await _asked(request, config)))


def _add_prompt_caches(app: FastAPI, config: RouterConfig, keys: Keys, caches: Caches) -> None:
    @app.post("/v1/cache/{model}")
    async def build(request: Request, model: str) -> JSONResponse:
        """Build a named prompt cache."""
        check_operator(request, keys)
        return _answer(await caches.build(model, await _asked(request, config)))

    @app.get("/v1/cache/{model}")
    async def listed(request: Request, model: str) -> JSONResponse:
        """List prompt caches."""
        check_client(request, keys)
        return JSONResponse(await caches.listed(model))

    # A path parameter, so that a name with slashes gets the error of the naming rule.
    @app.delete("/v1/cache/{model}/{cache_name:path}")
    async def delete(request: Request, model: str, cache_name: str) -> JSONResponse:
        """Delete a named prompt cache."""
        check_operator(request, keys)
        return _answer(await caches.delete(model, cache_name, await _asked(request, config)))


def _add_boards(app: FastAPI, service: Service) -> None:
    @app.get("/v1/boards")
    async def boards(request: Request) -> JSONResponse:
        """List the boards with what they say of themselves."""
        check_client(request, service.keys)
        return JSONResponse(service.boards())

    @app.get("/v1/boards/{board_id:path}")
    async def board(request: Request, board_id: str) -> JSONResponse:
        """Describe one board."""
        check_client(request, service.keys)
        return JSONResponse(service.board(board_id))


async def _asked(request: Request, config: RouterConfig) -> ControlRequest:
    body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
    return ControlRequest(query_of(request), body)


def _answer(made: tuple[int, JsonObject]) -> JSONResponse:
    status, body = made
    return JSONResponse(body, status)
