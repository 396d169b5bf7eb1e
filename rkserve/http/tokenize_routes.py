"""The routes of the tokenizer; it knows FastAPI and no Ray. vLLM has them without ``/v1``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.http.auth import check_client
from rkserve.http.embedding_routes import JSON
from rkserve.http.request_body import read_body
from rkserve.router.features.model_info import let_in
from rkserve.router.features.tokenize import Tokenizing
from rkserve.router.service import Service


def add_tokens(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    tokenizing, config = Tokenizing(service), service.config

    async def answer(request: Request, of: Callable[[bytes], Awaitable[bytes]]) -> Response:
        caller = service.callers.of(check_client(request, service.keys))
        with let_in(service, caller):
            body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
            return Response(await of(body), media_type=JSON)

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        return await answer(request, tokenizing.tokenize)

    @app.get("/tokenizer_info")
    @app.get("/v1/tokenizer_info")
    async def tokenizer_info(request: Request) -> JSONResponse:
        """Describe the tokenizer of a model."""
        check_client(request, service.keys)
        return JSONResponse(await tokenizing.info(request.query_params.multi_items()))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return await answer(request, tokenizing.detokenize)
