"""Routes of the Anthropic, Ollama, SGLang and vendor APIs, with errors in each API's own format."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve import __version__
from rkserve.api import sglang_generate, vllm_generate
from rkserve.api.anthropic import answers as anthropic_answers
from rkserve.api.anthropic.requests import CountRequest, MessagesRequest, parse_count
from rkserve.api.common.answer import Dialect
from rkserve.api.common.calls import ChatRequest
from rkserve.api.common.output import error_object
from rkserve.api.json.body import JsonObject
from rkserve.api.ollama import answers as ollama_answers
from rkserve.api.ollama import models as ollama_models
from rkserve.api.ollama.requests import OllamaChatRequest, OllamaGenerateRequest, parse_load
from rkserve.api.openai.embeddings import EmbeddingDialect
from rkserve.api.rkllm_chat import NAME, RkllmChatAnswer, rkllm_dialect
from rkserve.http.auth import check_client
from rkserve.http.bodies import generation, read_body, respond
from rkserve.http.openai_routes import visit_of
from rkserve.http.openapi import (
    ASK,
    EMBED,
    HELLO,
    JSON,
    LINES,
    PLAIN,
    SIM,
    Access,
    Example,
    described,
    told,
)
from rkserve.router.auth import Caller
from rkserve.router.features.embeddings import Embeddings
from rkserve.router.features.tokenize import count_prompt, folder_facts, let_in, make_ready
from rkserve.router.service import Service

ErrorOf = Callable[[BaseException], tuple[int, dict[str, str], JsonObject]]

OLLAMA, TRAINERS = "Ollama", "Trainers"
_MESSAGES = "/v1/messages"
_OLLAMA = "/api"
_ERRORS: dict[str, ErrorOf] = {
    _MESSAGES: anthropic_answers.anthropic_error,
    _OLLAMA: ollama_answers.ollama_error,
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
    _add_anthropic(app, service)
    _add_ollama(app, service)
    _add_ollama_embeddings(app, service)
    _add_ollama_models(app, service)
    _add_vendor(app, service)
    _add_generate(app, service)


def _add_generate(app: FastAPI, service: Service) -> None:
    @app.post(
        "/inference/v1/generate",
        **generation(
            TRAINERS,
            vllm_generate.VllmGenerateRequest,
            {
                "model": SIM,
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 4, "temperature": 0},
            },
            vllm_generate.Generated,
            vllm_generate.GeneratedChunk,
        ),
    )
    async def generate_ids(request: Request) -> Response:
        """Continue token ids with token ids, as vLLM does."""
        return await respond(service, request, vllm_generate.GENERATE)

    made = sglang_generate.SglangGenerated

    @app.api_route(
        "/generate",
        methods=["POST", "PUT"],
        **generation(
            TRAINERS,
            sglang_generate.SglangGenerateRequest,
            {
                "model": SIM,
                "input_ids": [1, 2, 3],
                "sampling_params": {"max_new_tokens": 4, "temperature": 0},
            },
            made | list[made],  # type: ignore[valid-type]
            made,
            says="The answer is an array for several prompts or `n`.",
        ),
    )
    async def generate(request: Request) -> Response:
        """Continue a text or token ids as SGLang does."""
        return await respond(service, request, sglang_generate.GENERATE)


def _add_anthropic(app: FastAPI, service: Service) -> None:
    @app.post(
        _MESSAGES,
        **generation(
            "Anthropic",
            MessagesRequest,
            {"model": SIM, "max_tokens": 16, "messages": HELLO},
            anthropic_answers.MessageObject,
            anthropic_answers.MessageEvent,
        ),
    )
    async def messages(request: Request) -> Response:
        """Answer a conversation as Anthropic does."""
        return await respond(service, request, anthropic_answers.MESSAGES)

    @app.post(
        f"{_MESSAGES}/count_tokens",
        **described(
            "Anthropic",
            Access.CLIENT,
            told(anthropic_answers.TokenCountAnswer, "The count."),
            errors=(*ASK, 429),
            body=CountRequest,
            example=Example({"model": SIM, "messages": HELLO}),
        ),
    )
    async def count_tokens(request: Request) -> JSONResponse:
        """Count the tokens of a conversation's prompt."""
        caller = service.callers.of(check_client(request, service.keys))
        with let_in(service, caller):
            body = await _body(service, request)
            tokens = await count_prompt(service, body, parse_count)
        return JSONResponse(anthropic_answers.tokens_counted(tokens))


def _add_ollama(app: FastAPI, service: Service) -> None:
    @app.post(
        f"{_OLLAMA}/chat",
        **generation(
            OLLAMA,
            OllamaChatRequest,
            {"model": SIM, "messages": HELLO, "stream": False},
            ollama_answers.OllamaChatAnswer,
            ollama_answers.OllamaChatAnswer,
            LINES,
        ),
    )
    async def chat(request: Request) -> Response:
        """Answer a conversation as Ollama does."""
        return await _ollama(service, request, ollama_answers.CHAT, "messages")

    @app.post(
        f"{_OLLAMA}/generate",
        **generation(
            OLLAMA,
            OllamaGenerateRequest,
            {"model": SIM, "prompt": "Hello", "stream": False},
            ollama_answers.OllamaGenerateAnswer,
            ollama_answers.OllamaGenerateAnswer,
            LINES,
        ),
    )
    async def generate(request: Request) -> Response:
        """Answer a prompt as Ollama does."""
        return await _ollama(service, request, ollama_answers.GENERATE, "prompt")


async def _ollama(service: Service, request: Request, dialect: Dialect, needs: str) -> Response:
    async def load(body: bytes, caller: Caller) -> Response | None:
        asked = parse_load(body, needs)
        if asked is None:
            return None
        with let_in(service, caller):
            await make_ready(service, asked.model)
        chat = dialect is ollama_answers.CHAT
        return JSONResponse(ollama_answers.loaded(asked, int(time.time()), chat=chat))

    return await respond(service, request, dialect, load)


def _add_ollama_embeddings(app: FastAPI, service: Service) -> None:
    embeddings = Embeddings(service)

    async def answer(request: Request, form: EmbeddingDialect, what: str) -> Response:
        visit, body = visit_of(service, request), await _body(service, request)
        asked = parse_load(body, what)
        if asked is not None:
            with let_in(service, visit.caller):
                await make_ready(service, asked.model)
            return JSONResponse(ollama_models.nothing(asked, what))
        made, headers = await embeddings.create(body, visit, form)
        return Response(made, media_type=JSON, headers=headers)

    @app.post(
        f"{_OLLAMA}/embed",
        **generation(
            OLLAMA,
            ollama_models.OllamaEmbedRequest,
            {"model": EMBED, "input": ["A trout.", "A stone."]},
            ollama_models.OllamaEmbedAnswer,
            answered="A vector for each text.",
        ),
    )
    async def embed(request: Request) -> Response:
        """Make vectors of texts as Ollama does."""
        return await answer(request, ollama_models.EMBED, "input")

    @app.post(
        f"{_OLLAMA}/embeddings",
        **generation(
            OLLAMA,
            ollama_models.OllamaEmbeddingsRequest,
            {"model": EMBED, "prompt": "A trout."},
            ollama_models.OllamaEmbeddingsAnswer,
            answered="The vector.",
        ),
    )
    async def embed_one(request: Request) -> Response:
        """Make the vector of a text, as Ollama did before."""
        return await answer(request, ollama_models.EMBED_ONE, "prompt")


def _add_ollama_models(app: FastAPI, service: Service) -> None:
    def listing(answer: type, says: str) -> dict[str, Any]:
        return described(OLLAMA, Access.CLIENT, told(answer, says))

    @app.get(f"{_OLLAMA}/tags", **listing(ollama_models.OllamaTagsAnswer, "Models and adapters."))
    async def tags(request: Request) -> JSONResponse:
        """List the models."""
        check_client(request, service.keys)
        facts = await folder_facts(service, service.fleet.models)
        return JSONResponse(ollama_models.tags((await service.models.listed())["data"], facts))

    @app.post(
        f"{_OLLAMA}/show",
        **described(
            OLLAMA,
            Access.CLIENT,
            told(ollama_models.OllamaShowAnswer, "Facts of its folder."),
            errors=ASK,
            body=ollama_models.OllamaShowRequest,
            example=Example({"model": SIM}),
        ),
    )
    async def show(request: Request) -> JSONResponse:
        """Describe one model."""
        check_client(request, service.keys)
        asked = ollama_models.parse_show(await _body(service, request))
        entry = await service.models.one(asked)
        base = ollama_models.base_of(entry)
        facts = await folder_facts(service, [base])
        return JSONResponse(ollama_models.show(entry, facts[base]))

    @app.get(f"{_OLLAMA}/ps", **listing(ollama_models.OllamaRunningAnswer, "Loaded models."))
    async def running(request: Request) -> JSONResponse:
        """List the models that are loaded."""
        check_client(request, service.keys)
        facts = await folder_facts(service, service.fleet.models)
        entries, reports = (await service.models.listed())["data"], service.fleet.reports()
        return JSONResponse(ollama_models.running(entries, facts, reports))

    @app.api_route(
        f"{_OLLAMA}/version",
        methods=["GET", "HEAD"],
        **described(OLLAMA, Access.OPEN, told(ollama_models.OllamaVersionAnswer, "The releases.")),
    )
    async def version() -> JSONResponse:
        """Say which release of Ollama's API this is."""
        return JSONResponse(ollama_models.version(__version__))


def _add_vendor(app: FastAPI, service: Service) -> None:
    @app.post(
        f"/{NAME}",
        **generation(
            "RKLLM",
            ChatRequest,
            {"model": SIM, "messages": HELLO},
            RkllmChatAnswer,
            RkllmChatAnswer,
            PLAIN,
            "`model` may be any name: one that is not served is the first model that generates "
            "text. Calls of tools and thoughts stay in the text; a stream is lines of JSON.",
        ),
    )
    async def rkllm_chat(request: Request) -> Response:
        """Answer a conversation as the vendor's demo server does."""
        check_client(request, service.keys)  # before the models are listed for it
        served = [str(one["id"]) for one in (await service.models.listed())["data"]]
        return await respond(service, request, rkllm_dialect(served, service.models.default))


async def _body(service: Service, request: Request) -> bytes:
    return await read_body(request, service.config.max_body_bytes, service.config.body_timeout_s)
