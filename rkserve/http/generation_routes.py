"""Routes that control generations, caches and boards.

The client that knows a generation's ID may control it. Lists of all generations, and changes of
shared caches, are for the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rkserve.api.admin.caches import (
    CacheBody,
    CacheBuiltAnswer,
    CacheDeletedAnswer,
    KvCachesAnswer,
    KvClearBody,
    KvClearedAnswer,
    KvSizeQuery,
    PromptCachesAnswer,
)
from rkserve.api.admin.generations import (
    ChoiceBody,
    ControlledAnswer,
    EditBody,
    GenerationAnswer,
    GenerationsAnswer,
)
from rkserve.api.admin.query import ControlRequest, QueryOrBody
from rkserve.api.json.schemas import Example
from rkserve.api.openai.models import BoardAnswer, BoardsAnswer
from rkserve.core.messages import ControlAction
from rkserve.http.bodies import body_of, query_of
from rkserve.http.openapi import ASK, CONTROL, HELLO, OPERATE, READ, SIM, H, Routes, returns
from rkserve.router.features.caches import Caches
from rkserve.router.features.generations import GenerationPeers, Generations
from rkserve.router.service import Service


def add_control(app: FastAPI, service: Service, peers: GenerationPeers | None = None) -> None:
    """Add the routes to the application; ``peers`` are all Routers, if there are several."""
    generations = Generations(service, peers)
    _add_generations(Routes(app, "Generations"), service, generations)
    _add_caches(Routes(app, "Caches"), service, Caches(service, generations))
    _add_boards(Routes(app, "Boards"), service)


_ID = {"generation": "The id of an answer."}
_RUNNING = {"generation": "chatcmpl-1"}
_CACHE = {"model": "A model or an adapter."}
_PARTLY = "Not all boards could do it; `failed` says which."


def _add_generations(route: Routes, service: Service, generations: Generations) -> None:
    def action(name: str, asked: type[QueryOrBody], body: Any = None) -> Callable[[H], H]:
        return route(
            f"POST /v1/generations/{{generation}}/{name}",
            CONTROL,
            returns(ControlledAnswer, "It is done."),
            returns(ControlledAnswer, "Not all choices could do it; `failed` says which.", 207),
            errors=(404, 409, 429, 503, 504),
            paths=_ID,
            asked=asked,
            example=Example(body, _RUNNING),
        )

    listing = returns(GenerationsAnswer, "The oldest first, without prompts and answers.")

    @route("GET /v1/generations", OPERATE, listing)
    async def listed(_: Request) -> JSONResponse:
        """List the generations of all keys."""
        return JSONResponse(await generations.listed())

    @route(
        "GET /v1/generations/{generation}",
        CONTROL,
        returns(GenerationAnswer, "The generation, with its words."),
        errors=ASK,
        paths=_ID,
        example=Example(path=_RUNNING),
    )
    async def one(_: Request, generation: str) -> JSONResponse:
        """Describe one generation."""
        return JSONResponse(await generations.one(generation))

    @action("edit", EditBody, {"replace_last": 1, "text": "Sea"})
    async def edit(request: Request, generation: str) -> JSONResponse:
        """Change a paused generation."""
        return _answer(await generations.edit(generation, await _asked(request, service)))

    async def control(request: Request, generation: str, action: ControlAction) -> JSONResponse:
        asked = await _asked(request, service)
        return _answer(await generations.control(generation, action, asked))

    @action("pause", ChoiceBody)
    async def pause(request: Request, generation: str) -> JSONResponse:
        """Pause a generation; answer when nothing more of it comes."""
        return await control(request, generation, ControlAction.PAUSE)

    @action("resume", ChoiceBody)
    async def resume(request: Request, generation: str) -> JSONResponse:
        """Let a paused generation go on."""
        return await control(request, generation, ControlAction.RESUME)

    @action("abort", ChoiceBody, {"choice": 0})
    async def abort(request: Request, generation: str) -> JSONResponse:
        """End a generation, whatever it does."""
        return await control(request, generation, ControlAction.ABORT)


def _add_caches(route: Routes, service: Service, caches: Caches) -> None:
    sizes, either = (
        returns(KvCachesAnswer, "By board and together."),
        KvClearedAnswer | ControlledAnswer,
    )

    @route("GET /v1/cache/kv/size", READ, sizes, errors=(400, *ASK), query=KvSizeQuery)
    async def size(request: Request) -> JSONResponse:
        """Say what the KV caches hold."""
        return JSONResponse(await caches.kv(ControlRequest(query_of(request))))

    @route(
        "POST /v1/cache/kv/clear",
        OPERATE,
        returns(either, "They are cleared."),
        returns(either, _PARTLY, 207),
        errors=(404, 409, 429, 503, 504),
        asked=KvClearBody,
        example=Example({"model": SIM}),
    )
    async def clear(request: Request) -> JSONResponse:
        """Clear KV caches."""
        return _answer(await caches.clear(await _asked(request, service)))

    @route(
        "POST /v1/cache/{model}",
        OPERATE,
        returns(CacheBuiltAnswer, "It is built."),
        returns(CacheBuiltAnswer, "Not all boards could build it.", 207),
        errors=(404, 409, 429, 502, 503, 504),
        paths=_CACHE,
        asked=CacheBody,
        example=Example({"cache_name": "doc", "messages": HELLO}, {"model": SIM}),
    )
    async def build(request: Request, model: str) -> JSONResponse:
        """Build a named prompt cache on every board of a model."""
        return _answer(await caches.build(model, await _asked(request, service)))

    @route(
        "GET /v1/cache/{model}",
        READ,
        returns(PromptCachesAnswer, "Those with a name first."),
        errors=(400, *ASK),
        paths=_CACHE,
        example=Example(path={"model": SIM}),
    )
    async def listed(_: Request, model: str) -> JSONResponse:
        """List prompt caches."""
        return JSONResponse(await caches.listed(model))

    # A path parameter, so that a name with slashes gets the error of the naming rule.
    @route(
        "DELETE /v1/cache/{model}/{cache_name:path}",
        OPERATE,
        returns(CacheDeletedAnswer, "It is gone."),
        returns(CacheDeletedAnswer, _PARTLY, 207),
        errors=(400, 404, 408, 413, 415, 503),
        paths={**_CACHE, "cache_name": "Its name."},
        example=Example(path={"model": SIM, "cache_name": "doc"}),
    )
    async def delete(request: Request, model: str, cache_name: str) -> JSONResponse:
        """Delete a named prompt cache wherever it is."""
        return _answer(await caches.delete(model, cache_name, await _asked(request, service)))


def _add_boards(route: Routes, service: Service) -> None:
    @route("GET /v1/boards", READ, returns(BoardsAnswer, "All boards."))
    async def boards(_: Request) -> JSONResponse:
        """List the boards with their reports."""
        return JSONResponse(service.boards())

    @route(
        "GET /v1/boards/{board_id:path}",
        READ,
        returns(BoardAnswer, "The board."),
        errors=(404,),
        paths={"board_id": "Its name; it may contain `/`."},
        example=Example(path={"board_id": "sim-0"}),
    )
    async def board(_: Request, board_id: str) -> JSONResponse:
        """Describe one board."""
        return JSONResponse(service.board(board_id))


async def _asked(request: Request, service: Service) -> ControlRequest:
    return ControlRequest(query_of(request), await body_of(service, request))


def _answer(made: tuple[int, Mapping[str, object]]) -> JSONResponse:
    status, body = made
    return JSONResponse(body, status)
