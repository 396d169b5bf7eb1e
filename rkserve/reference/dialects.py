"""Endpoints of other APIs than OpenAI's: Anthropic's, Ollama's, Gradio's and the vendor's."""

from __future__ import annotations

from rkserve.api import gradio, rkllm_chat
from rkserve.api.json import limits
from rkserve.reference import failures
from rkserve.reference.asking import MODEL, STANDING
from rkserve.reference.endpoints import (
    EVENTS,
    JSON,
    LINES,
    OK,
    PLAIN,
    Access,
    Endpoint,
    EndpointAnswer,
    EndpointParameter,
    ErrorShape,
    Example,
    in_json,
    in_path,
    in_query,
    told,
)
from rkserve.reference.openai import ANSWERED, ASKED, HELLO, SIM, generated
from rkserve.reference.shapes import (
    ANY,
    ANYTHING,
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Schema,
    array,
    body,
    either,
    integer,
    maybe,
    obj,
    ref,
    text,
)
from rkserve.reference.texts import EMBED

_ANTHROPIC, _OLLAMA, _GRADIO = "Anthropic", "Ollama", "Gradio"
_TRAINERS = "Trainers"
EVENT = "0" * 32

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
    "GradioCall": body(
        {"data": array(ANY)},
        {"session_hash": TEXT},
        about="`data` are the arguments in order; those left out at the end take their defaults.",
    ),
    "GradioJoin": body(
        {
            "data": array(ANY),
            "fn_index": integer(0, len(gradio.FUNCTIONS) - 1),
            "session_hash": text(1, gradio.MAX_SESSION_CHARS),
        },
        {},
    ),
    "GradioEvent": obj({"event_id": TEXT}),
    "GradioConfig": obj(
        {
            **dict.fromkeys(("version", "api_prefix", "protocol", "title", "mode"), TEXT),
            "space_id": NULL,
            **dict.fromkeys(
                ("is_space", "auth_required", "connect_heartbeat", "enable_queue", "show_error"),
                FLAG,
            ),
            "max_file_size": NULL,
            "components": array(ANYTHING),
            "dependencies": array(ANYTHING),
        }
    ),
    "GradioInfo": obj({"named_endpoints": ANYTHING, "unnamed_endpoints": ANYTHING}),
    "GradioCancel": body({"event_id": text(1)}, {"session_hash": TEXT, "fn_index": COUNT}),
    "GradioCancelled": obj({"success": FLAG}),
    "RkllmChat": obj(
        {
            **dict.fromkeys(("id", "object", "model"), TEXT),
            "created": COUNT,
            "choices": array(
                obj(
                    {"index": COUNT, "logprobs": NULL, "finish_reason": maybe(TEXT)},
                    dict.fromkeys(("message", "delta"), obj({"role": TEXT, "content": TEXT})),
                )
            ),
            "usage": ANYTHING,
        }
    ),
}


def _ollama(
    path: str, summary: str, asked: str, answers: tuple[EndpointAnswer, ...], example: Example
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
        shape=ErrorShape.OLLAMA,
    )


def _look(method: str, path: str, summary: str, schema: Schema, access: Access) -> Endpoint:
    answer = EndpointAnswer(OK, summary) if method == "HEAD" else told(schema, says=summary)
    errors = failures.CLIENT if access is Access.CLIENT else ()
    return Endpoint(
        method, path, _OLLAMA, summary, access, (answer,), errors, shape=ErrorShape.OLLAMA
    )


_SESSION = EndpointParameter(
    "session_hash",
    "query",
    text(1, gradio.MAX_SESSION_CHARS),
    "The session of the calls.",
    required=True,
)
_STREAM = EndpointAnswer(OK, "The events.", {EVENTS: {"type": "string"}})
_POSTED = told(ref("GradioEvent"), says="The call waits for its events to be read.")


def _gradio_call(root: str) -> tuple[Endpoint, Endpoint]:
    """Return the two requests of a call that has a stream of its own."""
    name = in_path("name", "`chat`, `get_user_input` or `get_RKLLM_output`.")
    event = in_path("event_id", "What the call was answered with.")
    return (
        Endpoint(
            "POST",
            f"{root}/call/{{name}}",
            _GRADIO,
            "Post a call of a function.",
            Access.CLIENT,
            (_POSTED,),
            (*failures.BODY, *failures.CLIENT, 404, 429, 503),
            (name,),
            in_json(ref("GradioCall")),
            Example({"data": ["Hello"]}, {"name": "chat"}),
        ),
        Endpoint(
            "GET",
            f"{root}/call/{{name}}/{{event_id}}",
            _GRADIO,
            "Carry a posted call out, and stream its events.",
            Access.CLIENT,
            (_STREAM,),
            failures.ASK,
            (name, event),
            example=Example(path={"name": "chat", "event_id": EVENT}),
        ),
    )


def _gradio_cancel(name: str) -> Endpoint:
    return Endpoint(
        "POST",
        f"{gradio.PREFIX}/{name}",
        _GRADIO,
        "End a call, posted or running.",
        Access.CLIENT,
        (told(ref("GradioCancelled"), says="Whether it was there."),),
        (*failures.BODY, *failures.CLIENT, 503),
        body=in_json(ref("GradioCancel")),
        example=Example({"event_id": EVENT}),
    )


_GRADIO_ENDPOINTS = (
    Endpoint(
        "GET",
        "/config",
        _GRADIO,
        "Describe the functions and their components.",
        Access.CLIENT,
        (told(ref("GradioConfig"), says="The configuration that Gradio's clients read."),),
        failures.CLIENT,
    ),
    Endpoint(
        "GET",
        f"{gradio.PREFIX}/info",
        _GRADIO,
        "Describe the functions' arguments.",
        Access.CLIENT,
        (told(ref("GradioInfo"), says="The arguments and outputs of each."),),
        failures.CLIENT,
        (in_query("serialize", FLAG, "Ignored."),),
    ),
    Endpoint(
        "POST",
        f"{gradio.PREFIX}/queue/join",
        _GRADIO,
        "Post a call of a session.",
        Access.CLIENT,
        (_POSTED,),
        (*failures.BODY, *failures.CLIENT, 429, 503),
        body=in_json(ref("GradioJoin")),
        example=Example({"fn_index": 0, "data": ["Hello"], "session_hash": "s1"}),
    ),
    Endpoint(
        "GET",
        f"{gradio.PREFIX}/queue/data",
        _GRADIO,
        "Carry the calls of a session out, and stream their events.",
        Access.CLIENT,
        (_STREAM,),
        (400, *failures.ASK),
        (_SESSION,),
        example=Example(query={"session_hash": "s1"}),
    ),
    _gradio_cancel("cancel"),
    _gradio_cancel("reset"),
    *_gradio_call(gradio.PREFIX),
    *_gradio_call(""),
)

ENDPOINTS = (
    *_GRADIO_ENDPOINTS,
    Endpoint(
        "POST",
        f"/{rkllm_chat.NAME}",
        "RKLLM",
        "Answer a conversation as the vendor's demo server does.",
        Access.CLIENT,
        generated("RkllmChat", "RkllmChat", PLAIN),
        failures.GENERATION,
        ASKED,
        in_json(ref("ChatRequest")),
        Example({"model": SIM, "messages": HELLO}),
        "`model` may be any name: one that is not served is the first model that generates text. "
        "Calls of tools and thoughts stay in the text; a stream is lines of JSON.",
    ),
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
        shape=ErrorShape.ANTHROPIC,
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
        shape=ErrorShape.ANTHROPIC,
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
        shape=ErrorShape.OLLAMA,
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
    Endpoint(
        "POST",
        "/inference/v1/generate",
        _TRAINERS,
        "Continue token ids with token ids, as vLLM does.",
        Access.CLIENT,
        generated("Generated", "GeneratedChunk"),
        failures.GENERATION,
        ASKED,
        in_json(ref("GenerateRequest")),
        Example(
            {
                "model": SIM,
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 4, "temperature": 0},
            }
        ),
    ),
    *(
        Endpoint(
            method,
            "/generate",
            _TRAINERS,
            "Continue a text or token ids as SGLang does.",
            Access.CLIENT,
            (
                EndpointAnswer(
                    OK,
                    "The answer; an array of them for several prompts or `n`.",
                    {
                        JSON: either(ref("SglangGenerated"), array(ref("SglangGenerated"))),
                        EVENTS: {"type": "string"},
                    },
                    ANSWERED,
                    {EVENTS: ref("SglangGenerated")},
                ),
            ),
            failures.GENERATION,
            ASKED,
            in_json(ref("SglangGenerateRequest")),
            Example(
                {
                    "model": SIM,
                    "input_ids": [1, 2, 3],
                    "sampling_params": {"max_new_tokens": 4, "temperature": 0},
                }
            ),
        )
        for method in ("POST", "PUT")
    ),
)
