"""Routes that control generations, caches and boards.

The client that knows a generation's ID may control it. Lists of all generations, and changes of
shared caches, are for the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from rkserve.api.openai.models import BoardAnswer, BoardsAnswer
from rkserve.config.router import RouterConfig
from rkserve.core.messages import ControlAction
from rkserve.http.auth import check_client, check_operator
from rkserve.http.bodies import query_of, read_body
from rkserve.http.openapi import ASK, HELLO, SIM, Access, Example, described, told
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


_ID = {"generation": "The id of an answer."}
_RUNNING = {"generation": "chatcmpl-1"}
_CACHE = {"model": "A model or an adapter."}
_PARTLY = "Not all boards could do it; `failed` says which."


def _act(asked: type[QueryOrBody], body: Any = None) -> dict[str, Any]:
    """Return the description of an action on a generation."""
    return described(
        "Generations",
        Access.CLIENT,
        told(ControlledAnswer, "It is done."),
        told(ControlledAnswer, "Not all choices could do it; `failed` says which.", 207),
        errors=(404, 409, 429, 503, 504),
        paths=_ID,
        asked=asked,
        example=Example(body, _RUNNING),
    )


def _add_generations(
    app: FastAPI, config: RouterConfig, keys: Keys, generations: Generations
) -> None:
    everybody = told(GenerationsAnswer, "The oldest first, and nobody's words.")

    @app.get("/v1/generations", **described("Generations", Access.OPERATOR, everybody))
    async def listed(request: Request) -> JSONResponse:
        """List everybody's generations."""
        check_operator(request, keys)
        return JSONResponse(await generations.listed())

    @app.get(
        "/v1/generations/{generation}",
        **described(
            "Generations",
            Access.CLIENT,
            told(GenerationAnswer, "The generation, with its words."),
            errors=ASK,
            paths=_ID,
            example=Example(path=_RUNNING),
        ),
    )
    async def one(request: Request, generation: str) -> JSONResponse:
        """Describe one generation."""
        check_client(request, keys)
        return JSONResponse(await generations.one(generation))

    edited = {"replace_last": 1, "text": "Sea"}

    @app.post("/v1/generations/{generation}/edit", **_act(EditBody, edited))
    async def edit(request: Request, generation: str) -> JSONResponse:
        """Change a paused generation."""
        check_client(request, keys)
        return _answer(await generations.edit(generation, await _asked(request, config)))

    async def control(request: Request, generation: str, action: ControlAction) -> JSONResponse:
        check_client(request, keys)
        asked = await _asked(request, config)
        return _answer(await generations.control(generation, action, asked))

    @app.post("/v1/generations/{generation}/pause", **_act(ChoiceBody))
    async def pause(request: Request, generation: str) -> JSONResponse:
        """Pause a generation; answer when nothing more of it comes."""
        return await control(request, generation, ControlAction.PAUSE)

    @app.post("/v1/generations/{generation}/resume", **_act(ChoiceBody))
    async def resume(request: Request, generation: str) -> JSONResponse:
        """Let a paused generation go on."""
        return await control(request, generation, ControlAction.RESUME)

    @app.post("/v1/generations/{generation}/abort", **_act(ChoiceBody, {"choice": 0}))
    async def abort(request: Request, generation: str) -> JSONResponse:
        """End a generation, whatever it does."""
        return await control(request, generation, ControlAction.ABORT)


def _add_kv(app: FastAPI, config: RouterConfig, keys: Keys, caches: Caches) -> None:
    sizes = told(KvCachesAnswer, "By board and together.")

    @app.get(
        "/v1/cache/kv/size",
        **described("Caches", Access.CLIENT, sizes, errors=(400, *ASK), query=KvSizeQuery),
    )
    async def size(request: Request) -> JSONResponse:
        """Say what the KV caches hold."""
        check_client(request, keys)
        return JSONResponse(await caches.kv(ControlRequest(query_of(request))))

    either = KvClearedAnswer | ControlledAnswer

    @app.post(
        "/v1/cache/kv/clear",
        **described(
            "Caches",
            Access.OPERATOR,
            told(either, "They are cleared."),
            told(either, _PARTLY, 207),
            errors=(404, 409, 429, 503, 504),
            asked=KvClearBody,
            example=Example({"model": SIM}),
        ),
    )
    async def clear(request: Request) -> JSONResponse:
        """Clear KV caches."""
        check_operator(request, keys)
        return _answer(await caches.clear(await _asked(request, config)))


def _add_prompt_caches(app: FastAPI, config: RouterConfig, keys: Keys, caches: Caches) -> None:
    @app.post(
        "/v1/cache/{model}",
        **described(
            "Caches",
            Access.OPERATOR,
            told(CacheBuiltAnswer, "It is built."),
            told(CacheBuiltAnswer, "Not all boards could build it.", 207),
            errors=(404, 409, 429, 502, 503, 504),
            paths=_CACHE,
            asked=CacheBody,
            example=Example({"cache_name": "doc", "messages": HELLO}, {"model": SIM}),
        ),
    )
    async def build(request: Request, model: str) -> JSONResponse:
        """Build a named prompt cache on every board of a model."""
        check_operator(request, keys)
        return _answer(await caches.build(model, await _asked(request, config)))

    @app.get(
        "/v1/cache/{model}",
        **described(
            "Caches",
            Access.CLIENT,
            told(PromptCachesAnswer, "Those with a name first."),
            errors=(400, *ASK),
            paths=_CACHE,
            example=Example(path={"model": SIM}),
        ),
    )
    async def listed(request: Request, model: str) -> JSONResponse:
        """List prompt caches."""
        check_client(request, keys)
        return JSONResponse(await caches.listed(model))

    # A path parameter, so that a name with slashes gets the error of the naming rule.
    @app.delete(
        "/v1/cache/{model}/{cache_name:path}",
        **described(
            "Caches",
            Access.OPERATOR,
            told(CacheDeletedAnswer, "It is gone."),
            told(CacheDeletedAnswer, _PARTLY, 207),
            errors=(400, 404, 408, 413, 415, 503),
            paths={**_CACHE, "cache_name": "Its name."},
            example=Example(path={"model": SIM, "cache_name": "doc"}),
        ),
    )
    async def delete(request: Request, model: str, cache_name: str) -> JSONResponse:
        """Delete a named prompt cache wherever it is."""
        check_operator(request, keys)
        return _answer(await caches.delete(model, cache_name, await _asked(request, config)))


def _add_boards(app: FastAPI, service: Service) -> None:
    @app.get("/v1/boards", **described("Boards", Access.CLIENT, told(BoardsAnswer, "All boards.")))
    async def boards(request: Request) -> JSONResponse:
        """List the boards with what they say of themselves."""
        check_client(request, service.keys)
        return JSONResponse(service.boards())

    @app.get(
        "/v1/boards/{board_id:path}",
        **described(
            "Boards",
            Access.CLIENT,
            told(BoardAnswer, "The board."),
            errors=(404,),
            paths={"board_id": "Its name; it may contain `/`."},
            example=Example(path={"board_id": "sim-0"}),
        ),
    )
    async def board(request: Request, board_id: str) -> JSONResponse:
        """Describe one board."""
        check_client(request, service.keys)
        return JSONResponse(service.board(board_id))


async def _asked(request: Request, config: RouterConfig) -> ControlRequest:
    body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
    return ControlRequest(query_of(request), body)


def _answer(made: tuple[int, Mapping[str, object]]) -> JSONResponse:
    status, body = made
    return JSONResponse(body, status)
