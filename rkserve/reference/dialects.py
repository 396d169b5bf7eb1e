"""Endpoints of other APIs than OpenAI's: Anthropic's and Ollama's."""

from __future__ import annotations

from rkserve.reference import failures
from rkserve.reference.asking import MODEL, STANDING
from rkserve.reference.endpoints import (
    LINES,
    OK,
    Access,
    Answer,
    Endpoint,
    Errors,
    Example,
    in_json,
    told,
)
from rkserve.reference.openai import ANSWERED, ASKED, HELLO, SIM, generated
from rkserve.reference.shapes import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Schema,
    array,
    body,
    either,
    integer,
    obj,
    ref,
    text,
)
from rkserve.reference.texts import EMBED
from rkserve.wire import limits

_ANTHROPIC, _OLLAMA = "Anthropic", "Ollama"

_DETAILS = obj(
    {
        **dict.fromkeys(
            ("parent_model", "format", "family", "parameter_size", "quantization_level"), TEXT
        ),
        "families": array(TEXT),
    }
)
_TAG: dict[str, Schema] = {
    **dict.fromkeys(("name", "model", "modified_at", "digest"), TEXT),
    "size": COUNT,
    "details": _DETAILS,
}

SCHEMAS: dict[str, Schema] = {
    "OllamaEmbedRequest": body(
        {"model": MODEL},
        {
            "input": either(TEXT, array(text(1), 0, limits.MAX_INPUTS)),
            "truncate": FLAG,
            "dimensions": integer(1, limits.MAX_DIMENSIONS),
            "keep_alive": either(TEXT, NUMBER),
            **STANDING,
        },
    ),
    "OllamaEmbed": obj(
        {
            "model": TEXT,
            "embeddings": array(array(NUMBER)),
            "total_duration": COUNT,
            "load_duration": COUNT,
        },
        {"prompt_eval_count": COUNT},
    ),
    "OllamaEmbeddingsRequest": body(
        {"model": MODEL},
        {"prompt": TEXT, "keep_alive": either(TEXT, NUMBER), **STANDING},
    ),
    "OllamaEmbeddings": obj({"embedding": array(NUMBER)}),
    "OllamaTags": obj({"models": array(obj(_TAG))}),
    "OllamaShowRequest": body(
        {}, {"model": MODEL, "name": MODEL}, about="`name` is the older name of `model`."
    ),
    "OllamaShow": obj(
        {
            **dict.fromkeys(("modelfile", "parameters", "template", "modified_at"), TEXT),
            "details": _DETAILS,
            "model_info": ANYTHING,
            "capabilities": array(TEXT),
        }
    ),
    "OllamaRunning": obj(
        {
            "models": array(
                obj({**_TAG, "expires_at": TEXT, "size_vram": COUNT, "context_length": COUNT})
            )
        }
    ),
    "OllamaVersion": obj({"version": TEXT, "rkserve": TEXT}),
}


def _ollama(
    path: str, summary: str, asked: str, answers: tuple[Answer, ...], example: Example
) -> Endpoint:
    return Endpoint(
        "POST",
        path,
        _OLLAMA,
        summary,
        Access.CLIENT,
        answers,
        failures.GENERATION,
        ASKED,
        in_json(ref(asked)),
        example,
        shape=Errors.OLLAMA,
    )


def _look(method: str, path: str, summary: str, schema: Schema, access: Access) -> Endpoint:
    answer = Answer(OK, summary) if method == "HEAD" else told(schema, says=summary)
    errors = failures.CLIENT if access is Access.CLIENT else ()
    return Endpoint(method, path, _OLLAMA, summary, access, (answer,), errors, shape=Errors.OLLAMA)


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/messages",
        _ANTHROPIC,
        "Answer a conversation as Anthropic does.",
        Access.CLIENT,
        generated("Message", "MessageEvent"),
        failures.GENERATION,
        ASKED,
        in_json(ref("MessagesRequest")),
        Example({"model": SIM, "max_tokens": 16, "messages": HELLO}),
        shape=Errors.ANTHROPIC,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        _ANTHROPIC,
        "Count the tokens of a conversation's prompt.",
        Access.CLIENT,
        (told(ref("TokenCount"), says="The count."),),
        (*failures.LOOKUP, 429),
        body=in_json(ref("CountRequest")),
        example=Example({"model": SIM, "messages": HELLO}),
        shape=Errors.ANTHROPIC,
    ),
    _ollama(
        "/api/chat",
        "Answer a conversation as Ollama does.",
        "OllamaChatRequest",
        generated("OllamaChat", "OllamaChat", LINES),
        Example({"model": SIM, "messages": HELLO, "stream": False}),
    ),
    _ollama(
        "/api/generate",
        "Answer a prompt as Ollama does.",
        "OllamaGenerateRequest",
        generated("OllamaGenerate", "OllamaGenerate", LINES),
        Example({"model": SIM, "prompt": "Hello", "stream": False}),
    ),
    _ollama(
        "/api/embed",
        "Make vectors of texts as Ollama does.",
        "OllamaEmbedRequest",
        (told(ref("OllamaEmbed"), says="A vector for each text.", headers=ANSWERED),),
        Example({"model": EMBED, "input": ["A trout.", "A stone."]}),
    ),
    _ollama(
        "/api/embeddings",
        "Make the vector of a text, as Ollama did before.",
        "OllamaEmbeddingsRequest",
        (told(ref("OllamaEmbeddings"), says="The vector.", headers=ANSWERED),),
        Example({"model": EMBED, "prompt": "A trout."}),
    ),
    _look("GET", "/api/tags", "List the models.", ref("OllamaTags"), Access.CLIENT),
    Endpoint(
        "POST",
        "/api/show",
        _OLLAMA,
        "Describe one model.",
        Access.CLIENT,
        (told(ref("OllamaShow"), says="What its folder tells."),),
        failures.LOOKUP,
        body=in_json(ref("OllamaShowRequest")),
        example=Example({"model": SIM}),
        shape=Errors.OLLAMA,
    ),
    _look(
        "GET", "/api/ps", "List the models that are loaded.", ref("OllamaRunning"), Access.CLIENT
    ),
    _look(
        "GET",
        "/api/version",
        "Say which release of Ollama's API this is.",
        ref("OllamaVersion"),
        Access.OPEN,
    ),
    _look("HEAD", "/api/version", "Say that the Router lives.", ref("OllamaVersion"), Access.OPEN),
)
