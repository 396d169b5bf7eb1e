"""The routes of embeddings, and of what is compared by them; it knows FastAPI and no Ray."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.common.headers import TIMEOUT, read_timeout
from rkserve.api.common.version_policy import POLICY, SESSION, read_policy
from rkserve.http.auth import check_client
from rkserve.http.request_body import read_body
from rkserve.router.features.embeddings import Embeddings, Visit
from rkserve.router.features.rerank import Ranking
from rkserve.router.service import Service

JSON = "application/json"


def add_embeddings(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    embeddings = Embeddings(service)

    ranking = Ranking(embeddings)

    @app.post("/v1/embeddings")
    async def create(request: Request) -> Response:
        """Make vectors of texts."""
        visit = visit_of(service, request)
        body, headers = await embeddings.create(await body_of(service, request), visit)
        return Response(body, media_type=JSON, headers=headers)

    @app.post("/pooling")
    async def pool(request: Request) -> Response:
        """Return the hidden states of texts."""
        visit = visit_of(service, request)
        body, headers = await embeddings.pool(await body_of(service, request), visit)
        return Response(body, media_type=JSON, headers=headers)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(request: Request) -> Response:
        """Order documents by how near they are to a query."""
        visit = visit_of(service, request)
        answer, headers = await ranking.rerank(await body_of(service, request), visit)
        return JSONResponse(answer, headers=headers)

    @app.post("/v1/score")
    @app.post("/score")
    async def score(request: Request) -> Response:
        """Say how near texts are to each other."""
        visit = visit_of(service, request)
        answer, headers = await ranking.score(await body_of(service, request), visit)
        return JSONResponse(answer, headers=headers)


def visit_of(service: Service, request: Request) -> Visit:
    """Let a client in. Raises ``InvalidApiKey``, ``RequestError``."""
    client = check_client(request, service.keys)
    return Visit(
        service.callers.of(client),
        read_policy(request.headers.get(POLICY)),
        request.headers.get(SESSION),
        read_timeout(request.headers.get(TIMEOUT)),
    )


async def body_of(service: Service, request: Request) -> bytes:
    """Read the body within its limits."""
    config = service.config
    return await read_body(request, config.max_body_bytes, config.body_timeout_s)
