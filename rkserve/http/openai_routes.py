"""Routes of the OpenAI API and its extensions: chat, completions, models, embeddings, rerank,
tokenizer, responses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.common.calls import ChatRequest, CompletionRequest
from rkserve.api.common.output import TIMEOUT, read_timeout
from rkserve.api.common.version_policy import POLICY, SESSION, read_policy
from rkserve.api.json.body import JsonObject
from rkserve.api.openai.answers import (
    CHAT,
    COMPLETION,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
)
from rkserve.api.openai.embeddings import (
    EmbeddingsAnswer,
    EmbeddingsRequest,
    PooledAnswer,
    PoolingRequest,
)
from rkserve.api.openai.models import ModelAnswer, ModelsAnswer
from rkserve.api.openai.rerank import RankingAnswer, RerankRequest, ScoreRequest, ScoresAnswer
from rkserve.api.openai.tokenize import (
    DetokenizedAnswer,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerInfoAnswer,
    TokenizerQuery,
    TokensAnswer,
)
from rkserve.api.responses.answers import RESPONSES, ResponseEvent, ResponseObject
from rkserve.api.responses.requests import ResponseRequest
from rkserve.api.responses.stored import (
    ItemsQuery,
    LookupQuery,
    ResponseDeleted,
    ResponseItems,
    check_lookup,
    deleted,
    read_page,
)
from rkserve.http.auth import check_client
from rkserve.http.bodies import generation, read_body, respond
from rkserve.http.openapi import ASK, EMBED, HELLO, JSON, SIM, Access, Example, described, told
from rkserve.router.auth import ClientKey
from rkserve.router.features.embeddings import CallContext, Embeddings
from rkserve.router.features.rerank import Reranking
from rkserve.router.features.tokenize import Tokenization, let_in
from rkserve.router.service import Service
from rkserve.router.stored_responses import ResponseMemory, Responses, owner_of

OPENAI, TEXTS, TOKENS = "OpenAI", "Vectors and ranks", "Tokens"


def add_openai(app: FastAPI, service: Service, responses: Responses) -> None:
    """Add the routes; ``responses`` are the stored responses of all Routers."""
    _add_generation(app, service)
    _add_models(app, service)
    _add_embeddings(app, service)
    _add_tokenizer(app, service)
    _add_responses(app, service, responses)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        **generation(
            OPENAI,
            ChatRequest,
            {"model": SIM, "messages": HELLO},
            ChatCompletion,
            ChatChunk,
            says="Streams end with `data: [DONE]`.",
        ),
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await respond(service, request, CHAT)

    @app.post(
        "/v1/completions",
        **generation(
            OPENAI,
            CompletionRequest,
            {"model": SIM, "prompt": "The sea is", "max_tokens": 8},
            Completion,
            CompletionChunk,
            says="Streams end with `data: [DONE]`.",
        ),
    )
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await respond(service, request, COMPLETION)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get(
        "/v1/models",
        **described(
            OPENAI,
            Access.CLIENT,
            told(ModelsAnswer, "All of them, in one page."),
            says="Anthropic's clients list models at the same path, and find their keys too.",
        ),
    )
    async def models(request: Request) -> JSONResponse:
        """List the models and adapters."""
        check_client(request, service.keys)
        return JSONResponse(await service.models.listed())

    @app.get(
        "/v1/models/{model_id:path}",
        **described(
            OPENAI,
            Access.CLIENT,
            told(ModelAnswer, "The model."),
            errors=(400, *ASK),
            paths={"model_id": "A model or an adapter; it may contain `/`."},
            example=Example(path={"model_id": SIM}),
        ),
    )
    async def model(request: Request, model_id: str) -> JSONResponse:
        """Describe one model or adapter."""
        check_client(request, service.keys)
        return JSONResponse(await service.models.one(model_id))


def _add_embeddings(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    embeddings = Embeddings(service)

    ranking = Reranking(embeddings)

    texts: JsonObject = {"model": EMBED, "input": ["A trout.", "A stone."]}

    @app.post("/v1/embeddings", **generation(TEXTS, EmbeddingsRequest, texts, EmbeddingsAnswer))
    async def create(request: Request) -> Response:
        """Make vectors of texts."""
        visit = visit_of(service, request)
        body, headers = await embeddings.create(await body_of(service, request), visit)
        return Response(body, media_type=JSON, headers=headers)

    pooled: JsonObject = {"model": EMBED, "input": ["A trout."]}

    rows = "A row for each token of each text."

    @app.post(
        "/pooling",
        **generation(TEXTS, PoolingRequest, pooled, PooledAnswer, answered=rows),
    )
    async def pool(request: Request) -> Response:
        """Return the hidden states of all tokens of texts, as vLLM does."""
        visit = visit_of(service, request)
        body, headers = await embeddings.pool(await body_of(service, request), visit)
        return Response(body, media_type=JSON, headers=headers)

    documents: JsonObject = {
        "model": EMBED,
        "query": "fish",
        "documents": ["A trout.", "A stone."],
    }
    reranked = generation(
        TEXTS, RerankRequest, documents, RankingAnswer, answered="The most relevant one first."
    )

    @app.post("/v1/rerank", **reranked)
    @app.post("/v2/rerank", **reranked)
    @app.post("/rerank", **reranked)
    async def rerank(request: Request) -> Response:
        """Order documents by how near they are to a query."""
        visit = visit_of(service, request)
        answer, headers = await ranking.rerank(await body_of(service, request), visit)
        return JSONResponse(answer, headers=headers)

    pairs: JsonObject = {"model": EMBED, "text_1": "fish", "text_2": ["A trout.", "A stone."]}
    scored = generation(
        TEXTS, ScoreRequest, pairs, ScoresAnswer, answered="A score for each pair, in their order."
    )

    @app.post("/v1/score", **scored)
    @app.post("/score", **scored)
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

    tokenized = described(
        TOKENS,
        Access.CLIENT,
        told(TokensAnswer, "The ids."),
        errors=(*ASK, 429),
        body=TokenizeRequest,
        example=Example({"model": SIM, "messages": HELLO}),
    )

    @app.post("/tokenize", **tokenized)
    @app.post("/v1/tokenize", **tokenized)
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        return await answer(request, tokenizing.tokenize)

    info = described(
        TOKENS,
        Access.CLIENT,
        told(TokenizerInfoAnswer, "Keys of its tokenizer_config.json, as in force."),
        errors=(400, *ASK),
        query=TokenizerQuery,
        example=Example(query={"model": SIM}),
    )

    @app.get("/tokenizer_info", **info)
    @app.get("/v1/tokenizer_info", **info)
    async def tokenizer_info(request: Request) -> JSONResponse:
        """Describe the tokenizer of a model."""
        check_client(request, service.keys)
        return JSONResponse(await tokenizing.info(request.query_params.multi_items()))

    detokenized = described(
        TOKENS,
        Access.CLIENT,
        told(DetokenizedAnswer, "The text."),
        errors=(*ASK, 429),
        body=DetokenizeRequest,
        example=Example({"model": SIM, "tokens": [72, 101]}),
    )

    @app.post("/detokenize", **detokenized)
    @app.post("/v1/detokenize", **detokenized)
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

    @app.post(
        _ROUTE,
        **generation(
            OPENAI,
            ResponseRequest,
            {"model": SIM, "input": "Hello"},
            ResponseObject,
            ResponseEvent,
            says="Streams end with `data: [DONE]`, as Open Responses demands.",
        ),
    )
    async def respond_to(request: Request) -> Response:
        """Answer a conversation as OpenAI's newer API does."""
        return await respond(service, request, RESPONSES, remember=memory)

    stored = {"response_id": "A response's id."}
    known = {"response_id": f"resp_{'0' * 32}"}

    @app.get(
        f"{_ROUTE}/{{response_id}}",
        **described(
            OPENAI,
            Access.CLIENT,
            told(ResponseObject, "The response as it was."),
            errors=(400, *ASK),
            paths=stored,
            query=LookupQuery,
            example=Example(path=known),
        ),
    )
    async def read(request: Request, response_id: str) -> JSONResponse:
        """Return a stored response."""
        whose = owner(request)
        check_lookup(request.query_params.multi_items())
        return JSONResponse((await responses.one(whose, response_id)).response)

    @app.get(
        f"{_ROUTE}/{{response_id}}/input_items",
        **described(
            OPENAI,
            Access.CLIENT,
            told(ResponseItems, "The items."),
            errors=(400, *ASK),
            paths=stored,
            query=ItemsQuery,
            example=Example(path=known, query={"limit": "5"}),
        ),
    )
    async def read_items(request: Request, response_id: str) -> JSONResponse:
        """List the input items of a stored response."""
        whose = owner(request)
        page = read_page(request.query_params.multi_items())
        last = await responses.one(whose, response_id)
        said = []
        if last.previous is not None:
            before = await responses.conversation(whose, last.previous, as_far=True)
            said = [item for one in before for item in one.said]
        return JSONResponse(page.of([*said, *last.items]))

    @app.delete(
        f"{_ROUTE}/{{response_id}}",
        **described(
            OPENAI,
            Access.CLIENT,
            told(ResponseDeleted, "It is forgotten."),
            errors=ASK,
            paths=stored,
            example=Example(path=known),
        ),
    )
    async def delete(request: Request, response_id: str) -> JSONResponse:
        """Forget a stored response."""
        await responses.delete(owner(request), response_id)
        return JSONResponse(deleted(response_id))
