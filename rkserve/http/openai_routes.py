"""Routes of the OpenAI API and its extensions: chat, completions, models, embeddings, rerank,
tokenizer, responses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.common.calls import ChatRequest, CompletionRequest
from rkserve.api.common.output import TIMEOUT, read_timeout
from rkserve.api.common.version_policy import SESSION
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Example
from rkserve.api.openai import answers, embeddings, rerank, tokenize
from rkserve.api.openai.models import ModelAnswer, ModelsAnswer
from rkserve.api.responses import stored
from rkserve.api.responses.answers import RESPONSES, ResponseEvent, ResponseObject
from rkserve.api.responses.requests import ResponseRequest
from rkserve.http.auth import key_of
from rkserve.http.bodies import body_of, generation, policy_of, respond
from rkserve.http.openapi import ASK, EMBED, HELLO, INFER, JSON, LIST, SIM, Routes, returns
from rkserve.router.auth.key_ring import ClientKey
from rkserve.router.features.embeddings import CallContext, Embeddings
from rkserve.router.features.rerank import Reranking
from rkserve.router.features.tokenize import Tokenization, let_in
from rkserve.router.service import Service
from rkserve.router.stored_responses import CallMemory, Responses, owner_of

_DONE = "Streams end with `data: [DONE]`."


def add_openai(app: FastAPI, service: Service, responses: Responses) -> None:
    """Add the routes; ``responses`` are the stored responses of all Routers."""
    route = Routes(app, "OpenAI")
    _add_generation(route, service)
    _add_models(route, service)
    _add_embeddings(Routes(app, "Vectors and ranks"), service)
    _add_tokenizer(Routes(app, "Tokens"), service)
    _add_responses(route, service, responses)


def _add_generation(route: Routes, service: Service) -> None:
    @generation(
        route,
        "POST /v1/chat/completions",
        ChatRequest,
        {"model": SIM, "messages": HELLO},
        answers.ChatCompletion,
        answers.ChatChunk,
        says=_DONE,
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await respond(service, request, answers.CHAT)

    @generation(
        route,
        "POST /v1/completions",
        CompletionRequest,
        {"model": SIM, "prompt": "The sea is", "max_tokens": 8},
        answers.Completion,
        answers.CompletionChunk,
        says=_DONE,
    )
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await respond(service, request, answers.COMPLETION)


def _add_models(route: Routes, service: Service) -> None:
    @route(
        "GET /v1/models",
        LIST,
        returns(ModelsAnswer, "All of them, in one page."),
        says="Anthropic's clients list models at the same path, and find their keys too.",
    )
    async def models(_: Request) -> JSONResponse:
        """List the models and adapters."""
        return JSONResponse(await service.models.listed())

    @route(
        "GET /v1/models/{model_id:path}",
        LIST,
        returns(ModelAnswer, "The model."),
        errors=(400, *ASK),
        paths={"model_id": "A model or an adapter; it may contain `/`."},
        example=Example(path={"model_id": SIM}),
    )
    async def model(_: Request, model_id: str) -> JSONResponse:
        """Describe one model or adapter."""
        return JSONResponse(await service.models.one(model_id))


def _add_embeddings(route: Routes, service: Service) -> None:
    vectors = Embeddings(service)
    ranking = Reranking(service, vectors)
    texts: JsonObject = {"model": EMBED, "input": ["A trout.", "A stone."]}
    one: JsonObject = {"model": EMBED, "input": ["A trout."]}
    documents = {"model": EMBED, "query": "fish", "documents": ["A trout.", "A stone."]}
    pairs = {"model": EMBED, "text_1": "fish", "text_2": ["A trout.", "A stone."]}

    @generation(
        route,
        "POST /v1/embeddings",
        embeddings.EmbeddingsRequest,
        texts,
        embeddings.EmbeddingsAnswer,
    )
    async def create(request: Request) -> Response:
        """Make vectors of texts."""
        visit = visit_of(service, request)
        body, headers = await vectors.create(await body_of(service, request), visit)
        return Response(body, media_type=JSON, headers=headers)

    @generation(
        route,
        "POST /pooling",
        embeddings.PoolingRequest,
        one,
        embeddings.PooledAnswer,
        answered="A row for each token of each text.",
    )
    async def pool(request: Request) -> Response:
        """Return the hidden states of all tokens of texts, as vLLM does."""
        visit = visit_of(service, request)
        body, headers = await vectors.pool(await body_of(service, request), visit)
        return Response(body, media_type=JSON, headers=headers)

    @generation(
        route,
        "POST /v1/rerank /v2/rerank /rerank",
        rerank.RerankRequest,
        documents,
        rerank.RankingAnswer,
        answered="The most relevant one first.",
    )
    async def ranked(request: Request) -> Response:
        """Order documents by how near they are to a query."""
        visit = visit_of(service, request)
        answer, headers = await ranking.rerank(await body_of(service, request), visit)
        return JSONResponse(answer, headers=headers)

    @generation(
        route,
        "POST /v1/score /score",
        rerank.ScoreRequest,
        pairs,
        rerank.ScoresAnswer,
        answered="A score for each pair, in their order.",
    )
    async def score(request: Request) -> Response:
        """Say how near texts are to each other."""
        visit = visit_of(service, request)
        answer, headers = await ranking.score(await body_of(service, request), visit)
        return JSONResponse(answer, headers=headers)


def visit_of(service: Service, request: Request) -> CallContext:
    """Return the context of a call. Raises ``RequestError``."""
    client = key_of(request)
    return CallContext(
        service.callers.of(client),
        policy_of(request),
        request.headers.get(SESSION),
        read_timeout(request.headers.get(TIMEOUT)),
    )


def _add_tokenizer(route: Routes, service: Service) -> None:
    tokenizing = Tokenization(service)

    async def answer(request: Request, of: Callable[[bytes], Awaitable[bytes]]) -> Response:
        caller = service.callers.of(key_of(request))
        with let_in(service, caller):
            return Response(await of(await body_of(service, request)), media_type=JSON)

    @route(
        "POST /tokenize /v1/tokenize",
        INFER,
        returns(tokenize.TokensAnswer, "The ids."),
        errors=(*ASK, 429),
        body=tokenize.TokenizeRequest,
        example=Example({"model": SIM, "messages": HELLO}),
    )
    async def tokenized(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        return await answer(request, tokenizing.tokenize)

    @route(
        "GET /tokenizer_info /v1/tokenizer_info",
        INFER,
        returns(tokenize.TokenizerInfoAnswer, "Keys of its tokenizer_config.json, as in force."),
        errors=(400, *ASK),
        query=tokenize.TokenizerQuery,
        example=Example(query={"model": SIM}),
    )
    async def tokenizer_info(request: Request) -> JSONResponse:
        """Describe the tokenizer of a model."""
        return JSONResponse(await tokenizing.info(request.query_params.multi_items()))

    @route(
        "POST /detokenize /v1/detokenize",
        INFER,
        returns(tokenize.DetokenizedAnswer, "The text."),
        errors=(*ASK, 429),
        body=tokenize.DetokenizeRequest,
        example=Example({"model": SIM, "tokens": [72, 101]}),
    )
    async def detokenized(request: Request) -> Response:
        """Return the text of token ids."""
        return await answer(request, tokenizing.detokenize)


_ONE = "/v1/responses/{response_id}"
_STORED = {"response_id": "A response's id."}
_KNOWN = {"response_id": f"resp_{'0' * 32}"}


def _add_responses(route: Routes, service: Service, responses: Responses) -> None:
    def owner(request: Request) -> str:
        return owner_of(key_of(request), service.keys)

    def memory(client: ClientKey | None) -> CallMemory:
        return CallMemory(responses, owner_of(client, service.keys))

    @generation(
        route,
        "POST /v1/responses",
        ResponseRequest,
        {"model": SIM, "input": "Hello"},
        ResponseObject,
        ResponseEvent,
        says="Streams end with `data: [DONE]`, as Open Responses demands.",
    )
    async def respond_to(request: Request) -> Response:
        """Answer a conversation as OpenAI's newer API does."""
        return await respond(service, request, RESPONSES, remember=memory)

    @route(
        f"GET {_ONE}",
        INFER,
        returns(ResponseObject, "The response as it was."),
        errors=(400, *ASK),
        paths=_STORED,
        query=stored.LookupQuery,
        example=Example(path=_KNOWN),
    )
    async def read(request: Request, response_id: str) -> JSONResponse:
        """Return a stored response."""
        whose = owner(request)
        stored.check_lookup(request.query_params.multi_items())
        return JSONResponse((await responses.one(whose, response_id)).response)

    @route(
        f"GET {_ONE}/input_items",
        INFER,
        returns(stored.ResponseItems, "The items."),
        errors=(400, *ASK),
        paths=_STORED,
        query=stored.ItemsQuery,
        example=Example(path=_KNOWN, query={"limit": "5"}),
    )
    async def read_items(request: Request, response_id: str) -> JSONResponse:
        """List the input items of a stored response."""
        whose = owner(request)
        query = stored.ItemsQuery.read(dict(request.query_params.multi_items()))
        last = await responses.one(whose, response_id)
        earlier = []
        if last.previous is not None:
            before = await responses.conversation(whose, last.previous, as_far=True)
            earlier = [item for one in before for item in one.conversation]
        return JSONResponse(query.page([*earlier, *last.items]))

    @route(
        f"DELETE {_ONE}",
        INFER,
        returns(stored.ResponseDeleted, "It is forgotten."),
        errors=ASK,
        paths=_STORED,
        example=Example(path=_KNOWN),
    )
    async def delete(request: Request, response_id: str) -> JSONResponse:
        """Forget a stored response."""
        await responses.delete(owner(request), response_id)
        return JSONResponse(stored.deleted(response_id))
