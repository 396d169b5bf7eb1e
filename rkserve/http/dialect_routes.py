"""Routes of the Anthropic, Ollama, SGLang and vendor APIs, with errors in each API's own format."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve import __version__
from rkserve.api import sglang_generate, vllm_generate
from rkserve.api.anthropic import answers as anthropic_answers
from rkserve.api.anthropic.requests import CountRequest, MessagesRequest, parse_count
from rkserve.api.common.answer import Dialect
from rkserve.api.common.calls import ChatRequest
from rkserve.api.common.output import error_object
from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Example
from rkserve.api.ollama import answers as ollama_answers
from rkserve.api.ollama import models as ollama_models
from rkserve.api.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, parse_load
from rkserve.api.openai.embeddings import EmbeddingDialect
from rkserve.api.rkllm_chat import NAME, RkllmChatAnswer, rkllm_dialect
from rkserve.http.auth import key_of
from rkserve.http.bodies import body_of, generation, respond
from rkserve.http.openai_routes import visit_of
from rkserve.http.openapi import (
    ASK,
    EMBED,
    HELLO,
    INFER,
    JSON,
    LINES,
    LIST,
    OPEN,
    PLAIN,
    SIM,
    Routes,
    returns,
)
from rkserve.router.auth.callers import Caller
from rkserve.router.features.embeddings import Embeddings
from rkserve.router.features.tokenize import count_prompt, folder_facts, let_in, make_ready
from rkserve.router.service import Service

ErrorOf = Callable[[BaseException], tuple[int, dict[str, str], JsonObject]]

_ERRORS: dict[str, ErrorOf] = {
    "/v1/messages": anthropic_answers.anthropic_error,
    "/api": ollama_answers.ollama_error,
}


def error_of(request: Request) -> ErrorOf:
    """Return the function that makes status, headers and body of an exception."""
    # The application may be mounted below a prefix, which is not part of its routes.
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    for root, made in _ERRORS.items():
        if path == root or path.startswith(f"{root}/"):
            return made
    return error_object


def add_dialects(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    _add_anthropic(Routes(app, "Anthropic"), service)
    ollama = Routes(app, "Ollama")
    _add_ollama(ollama, service)
    _add_ollama_embeddings(ollama, service)
    _add_ollama_models(ollama, service)
    _add_vendor(Routes(app, "RKLLM"), service)
    _add_generate(Routes(app, "Trainers"), service)


def _add_generate(route: Routes, service: Service) -> None:
    few = {"max_tokens": 4, "temperature": 0}

    @generation(
        route,
        "POST /inference/v1/generate",
        vllm_generate.VllmGenerateRequest,
        {"model": SIM, "token_ids": [1, 2, 3], "sampling_params": few},
        vllm_generate.Generated,
        vllm_generate.GeneratedChunk,
    )
    async def generate_ids(request: Request) -> Response:
        """Continue token ids with token ids, as vLLM does."""
        return await respond(service, request, vllm_generate.GENERATE)

    made = sglang_generate.SglangGenerated
    short = {"max_new_tokens": 4, "temperature": 0}

    @generation(
        route,
        "POST,PUT /generate",
        sglang_generate.SglangGenerateRequest,
        {"model": SIM, "input_ids": [1, 2, 3], "sampling_params": short},
        made | list[made],  # type: ignore[valid-type] # a type made at run time
        made,
        says="The answer is an array for several prompts or `n`.",
    )
    async def generate(request: Request) -> Response:
        """Continue a text or token ids as SGLang does."""
        return await respond(service, request, sglang_generate.GENERATE)


def _add_anthropic(route: Routes, service: Service) -> None:
    @generation(
        route,
        "POST /v1/messages",
        MessagesRequest,
        {"model": SIM, "max_tokens": 16, "messages": HELLO},
        anthropic_answers.MessageObject,
        anthropic_answers.MessageEvent,
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation as Anthropic does."""
        return await respond(service, request, anthropic_answers.MESSAGES)

    @route(
        "POST /v1/messages/count_tokens",
        INFER,
        returns(anthropic_answers.TokenCountAnswer, "The count."),
        errors=(*ASK, 429),
        body=CountRequest,
        example=Example({"model": SIM, "messages": HELLO}),
    )
    async def count_tokens(request: Request) -> JSONResponse:
        """Count the tokens of a conversation's prompt."""
        caller = service.callers.of(key_of(request))
        with let_in(service, caller):
            tokens = await count_prompt(service, await body_of(service, request), parse_count)
        return JSONResponse(anthropic_answers.TokenCountAnswer(input_tokens=tokens))


def _add_ollama(route: Routes, service: Service) -> None:
    @generation(
        route,
        "POST /api/chat",
        OllamaChatRequest,
        {"model": SIM, "messages": HELLO, "stream": False},
        ollama_answers.OllamaChatAnswer,
        ollama_answers.OllamaChatAnswer,
        LINES,
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation as Ollama does."""
        return await _ollama(service, request, ollama_answers.CHAT, "messages")

    @generation(
        route,
        "POST /api/generate",
        OllamaGenerateRequest,
        {"model": SIM, "prompt": "Hello", "stream": False},
        ollama_answers.OllamaGenerateAnswer,
        ollama_answers.OllamaGenerateAnswer,
        LINES,
    )
    async def generate(request: Request) -> Response:
        """Answer a prompt as Ollama does."""
        return await _ollama(service, request, ollama_answers.GENERATE, "prompt")


async def _ollama(service: Service, request: Request, dialect: Dialect, needs: str) -> Response:
    async def load(body: bytes, caller: Caller) -> Response | None:
        model = parse_load(body, needs)
        if model is None:
            return None
        with let_in(service, caller):
            await make_ready(service, model)
        chat = dialect is ollama_answers.CHAT
        return JSONResponse(ollama_answers.loaded(model, int(time.time()), chat=chat))

    return await respond(service, request, dialect, load)


def _add_ollama_embeddings(route: Routes, service: Service) -> None:
    embeddings = Embeddings(service)

    async def answer(request: Request, form: EmbeddingDialect, what: str) -> Response:
        visit, body = visit_of(service, request), await body_of(service, request)
        if (model := parse_load(body, what)) is not None:
            with let_in(service, visit.caller):
                await make_ready(service, model)
            return JSONResponse(ollama_models.nothing(model, what))
        made, headers = await embeddings.create(body, visit, form)
        return Response(made, media_type=JSON, headers=headers)

    @generation(
        route,
        "POST /api/embed",
        ollama_models.OllamaEmbedRequest,
        {"model": EMBED, "input": ["A trout.", "A stone."]},
        ollama_models.OllamaEmbedAnswer,
        answered="A vector for each text.",
    )
    async def embed(request: Request) -> Response:
        """Make vectors of texts as Ollama does."""
        return await answer(request, ollama_models.EMBED, "input")

    @generation(
        route,
        "POST /api/embeddings",
        ollama_models.OllamaEmbeddingsRequest,
        {"model": EMBED, "prompt": "A trout."},
        ollama_models.OllamaEmbeddingsAnswer,
        answered="The vector.",
    )
    async def embed_one(request: Request) -> Response:
        """Make the vector of a text, as Ollama did before."""
        return await answer(request, ollama_models.EMBED_ONE, "prompt")


def _add_ollama_models(route: Routes, service: Service) -> None:
    @route("GET /api/tags", LIST, returns(ollama_models.OllamaTagsAnswer, "Models and adapters."))
    async def tags(_: Request) -> JSONResponse:
        """List the models."""
        facts = await folder_facts(service, service.fleet.models)
        return JSONResponse(ollama_models.tags((await service.models.listed())["data"], facts))

    @route(
        "POST /api/show",
        LIST,
        returns(ollama_models.OllamaShowAnswer, "Facts of its folder."),
        errors=ASK,
        body=ollama_models.OllamaShowRequest,
        example=Example({"model": SIM}),
    )
    async def show(request: Request) -> JSONResponse:
        """Describe one model."""
        asked = ollama_models.parse_show(await body_of(service, request))
        entry = await service.models.one(asked)
        base = ollama_models.base_of(entry)
        facts = await folder_facts(service, [base])
        return JSONResponse(ollama_models.show(entry, facts[base]))

    @route("GET /api/ps", LIST, returns(ollama_models.OllamaRunningAnswer, "Loaded models."))
    async def running(_: Request) -> JSONResponse:
        """List the models that are loaded."""
        facts = await folder_facts(service, service.fleet.models)
        entries, reports = (await service.models.listed())["data"], service.fleet.reports()
        return JSONResponse(ollama_models.running(entries, facts, reports))

    releases = returns(ollama_models.OllamaVersionAnswer, "The releases.")

    @route("GET,HEAD /api/version", OPEN, releases)
    async def version(_: Request) -> JSONResponse:
        """Say which release of Ollama's API this is."""
        release = ollama_models.API_RELEASE
        return JSONResponse(ollama_models.OllamaVersionAnswer(version=release, rkserve=__version__))


def _add_vendor(route: Routes, service: Service) -> None:
    @generation(
        route,
        f"POST /{NAME}",
        ChatRequest,
        {"model": SIM, "messages": HELLO},
        RkllmChatAnswer,
        RkllmChatAnswer,
        PLAIN,
        "`model` may be any name: one that is not served is the first model that generates text. "
        "Calls of tools and thoughts stay in the text; a stream is lines of JSON.",
    )
    async def rkllm_chat(request: Request) -> Response:
        """Answer a conversation as the vendor's demo server does."""
        served = [str(one["id"]) for one in (await service.models.listed())["data"]]
        return await respond(service, request, rkllm_dialect(served, service.models.default))
