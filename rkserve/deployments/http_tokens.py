"""The routes of the tokenizer; it knows FastAPI and no Ray. vLLM has them without ``/v1``."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rkserve.deployments.bodies import read_body
from rkserve.deployments.guard import check_client
from rkserve.deployments.service import Service
from rkserve.deployments.tokenizing import Tokenizing


def add_tokens(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    tokenizing, config = Tokenizing(service), service.config

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        """Return the token ids of a text or a conversation."""
        check_client(request, service.keys)
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        return JSONResponse(await tokenizing.tokenize(body))

    @app.get("/tokenizer_info")
    @app.get("/v1/tokenizer_info")
    async def tokenizer_info(request: Request) -> JSONResponse:
        """Describe the tokenizer of a model."""
        check_client(request, service.keys)
        return JSONResponse(await tokenizing.info(request.query_params.multi_items()))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        """Return the text of token ids."""
        check_client(request, service.keys)
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        return JSONResponse(await tokenizing.detokenize(body))
