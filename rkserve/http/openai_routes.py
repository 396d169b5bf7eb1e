"""Routes of the OpenAI API and its extensions: chat, completions, models, embeddings, rerank,
tokenizer, responses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.common.output import TIMEOUT, read_timeout
from rkserve.api.common.version_policy import POLICY, SESSION, read_policy
from rkserve.api.openai.answers import CHAT, COMPLETION
from rkserve.api.responses.answers import RESPONSES
from rkserve.api.responses.stored import check_lookup, deleted, read_page
from rkserve.http.auth import check_client
from rkserve.http.request_body import read_body
from rkserve.http.streaming import respond
from rkserve.router.auth import ClientKey
from rkserve.router.features.embeddings import CallContext, Embeddings
from rkserve.router.features.rerank import Reranking
from rkserve.router.features.tokenize import Tokenization, let_in
from rkserve.router.service import Service
from rkserve.router.stored_responses import ResponseMemory, Responses, owner_of

JSON = "application/json"


def add_openai(app: FastAPI, service: Service, responses: Responses) -> None:
    """Add the routes; ``responses`` are the stored responses of all Routers."""
    _add_generation(app, service)
    _add_models(app, service)
    _add_embeddings(app, service)
    _add_tokenizer(app, service)
    _add_responses(app, service, responses)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await respond(service, request, CHAT)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await respond(service, request, COMPLETION)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        """List the models and the boards behind each."""
        check_client(request, service.keys)
        return JSONResponse(await service.models.listed())

    @app.get("/v1/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> JSONResponse:
        """Describe one model."""
        check_client(request, service.keys)
        return JSONResponse(await service.models.one(model_id))


def _add_embeddings(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    embeddings = Embeddings(service)

    ranking = Reranking(embeddings)

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


def visit_of(service: Service, request: Request) -> CallContext:
    """Authenticate a client. Raises ``InvalidApiKey``, ``RequestError``."""
    client = check_client(request, service.keys)
    return CallContext(
        service.callers.of(client),
        read_policy(request.headers.get(POLICY)),
        request.headers.get(SESSION),
        read_timeout(request.headers.get(TIMEOUT)),
    )


async def body_of(service: Service, request: Request) -> bytes:
    """Read the body within the configured limits."""
    config = service.config
    return await read_body(request, config.max_body_bytes, config.body_timeout_s)


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    tokenizing, config = Tokenization(service), service.config

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


_ROUTE = "/v1/responses"


def _add_responses(app: FastAPI, service: Service, responses: Responses) -> None:
    """Add the routes."""

    def owner(request: Request) -> str:
        return owner_of(check_client(request, service.keys), service.keys)

    def memory(client: ClientKey | None) -> ResponseMemory:
        return responses.memory(owner_of(client, service.keys))

    @app.post(_ROUTE)
    async def respond_to(request: Request) -> Response:
        """Answer a conversation as OpenAI's newer API does."""
        return await respond(service, request, RESPONSES, remember=memory)

    @app.get(f"{_ROUTE}/{{response_id}}")
    async def read(request: Request, response_id: str) -> JSONResponse:
        """Tell a response again."""
        whose = owner(request)
        check_lookup(request.query_params.multi_items())
        return JSONResponse((await responses.one(whose, response_id)).response)

    @app.get(f"{_ROUTE}/{{response_id}}/input_items")
    async def read_items(request: Request, response_id: str) -> JSONResponse:
        """List what a response was made of."""
        whose = owner(request)
        page = read_page(request.query_params.multi_items())
        last = await responses.one(whose, response_id)
        said = []
        if last.previous is not None:
            before = await responses.conversation(whose, last.previous, as_far=True)
            said = [item for one in before for item in one.said]
        return JSONResponse(page.of([*said, *last.items]))

    @app.delete(f"{_ROUTE}/{{response_id}}")
    async def delete(request: Request, response_id: str) -> JSONResponse:
        """Forget a response."""
        await responses.delete(owner(request), response_id)
        return JSONResponse(deleted(response_id))
