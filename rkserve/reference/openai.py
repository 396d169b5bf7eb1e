"""OpenAI's endpoints: chats, completions, responses and models."""

from __future__ import annotations

from rkserve.api.common import output, version_policy
from rkserve.api.json import limits
from rkserve.reference import failures
from rkserve.reference.endpoints import (
    EVENTS,
    JSON,
    OK,
    Access,
    Endpoint,
    EndpointAnswer,
    EndpointParameter,
    Example,
    in_header,
    in_json,
    in_path,
    in_query,
    told,
)
from rkserve.reference.shapes import (
    ANYTHING,
    COUNT,
    FLAG,
    INTEGER,
    TEXT,
    Schema,
    array,
    const,
    integer,
    maybe,
    number,
    obj,
    ref,
    words,
)

OPENAI = "OpenAI"
SIM = "sim-chat"
HELLO = [{"role": "user", "content": "Hello"}]
TIMEOUT = in_header(
    output.TIMEOUT,
    number(0, limits.MAX_TIMEOUT_S, above=True),
    "Seconds for which the answer is of use.",
)
ASKED: tuple[EndpointParameter, ...] = (
    in_header(
        version_policy.POLICY,
        TEXT,
        "`any`, `latest-only` or `min-version:<version>` of the weights.",
    ),
    in_header(version_policy.SESSION, TEXT, "Keeps the requests of a session on one version."),
    TIMEOUT,
)
ANSWERED = {
    output.BOARD: "The boards that answer.",
    output.RELEASE: "The release of their runtime.",
    output.QUEUED_AHEAD: "How many requests were before this one.",
    output.SAMPLING_IGNORED: "Sampling parameters that the runtime could not honour.",
    output.TOOLS_IGNORED: "Types of offered tools that are not known here and were left out.",
    output.EPOCH: "The epoch of what the boards obey.",
    output.WEIGHT_VERSION: "The versions of the weights.",
}


def generated(whole: str, piece: str, stream: str = EVENTS) -> tuple[EndpointAnswer, ...]:
    """An answer in one piece, or as a stream."""
    pieces = ref(piece)
    return (
        EndpointAnswer(
            OK,
            "The answer, whole or with `stream` in pieces.",
            {JSON: ref(whole), stream: {"type": "string"}},
            ANSWERED,
            {stream: pieces},
        ),
    )


_OWN = obj(
    {"context_length": COUNT},
    {
        "state": words("ready", "loading", "paused", "asleep", "failed"),
        "embedding": maybe(ANYTHING),
        "vision": maybe(obj({"image_tokens": COUNT})),
        "boards": array(
            obj(
                dict.fromkeys(
                    ("id", "state", "reason", "release", "platform", "library", "node"), TEXT
                )
            )
        ),
        "adapter": TEXT,
        "scale": maybe({"type": "number"}),
        "version": maybe(TEXT),
        "digest": maybe(TEXT),
        "bytes": COUNT,
        "broken": maybe(TEXT),
        "candidate": maybe(TEXT),
        "weight": maybe({"type": "number"}),
        "versions": array(ANYTHING),
    },
)

SCHEMAS: dict[str, Schema] = {
    "Model": obj(
        {
            "id": TEXT,
            "object": const("model"),
            "created": INTEGER,
            "owned_by": TEXT,
            "type": const("model"),
            "display_name": TEXT,
            "created_at": TEXT,
            "lifecycle": const("active"),
            "rkserve": _OWN,
        },
        {"parent": TEXT},
        "OpenAI's model with Anthropic's keys beside them. An adapter has a `parent`.",
    ),
    "Models": obj(
        {
            "object": const("list"),
            "data": array(ref("Model")),
            "has_more": const(False),
            "first_id": maybe(TEXT),
            "last_id": maybe(TEXT),
        }
    ),
}
_SOME = f"resp_{'0' * 32}"
_RESPONSE = in_path("response_id", "A response's id.")
_KEPT = {"response_id": _SOME}

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        OPENAI,
        "Answer a conversation.",
        Access.CLIENT,
        generated("ChatCompletion", "ChatChunk"),
        failures.GENERATION,
        ASKED,
        in_json(ref("ChatRequest")),
        Example({"model": SIM, "messages": HELLO}),
        "Streams end with `data: [DONE]`.",
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        OPENAI,
        "Continue a prompt.",
        Access.CLIENT,
        generated("Completion", "CompletionChunk"),
        failures.GENERATION,
        ASKED,
        in_json(ref("CompletionRequest")),
        Example({"model": SIM, "prompt": "The sea is", "max_tokens": 8}),
        "Streams end with `data: [DONE]`.",
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        OPENAI,
        "Answer a conversation as OpenAI's newer API does.",
        Access.CLIENT,
        generated("Response", "ResponseEvent"),
        failures.GENERATION,
        ASKED,
        in_json(ref("ResponseRequest")),
        Example({"model": SIM, "input": "Hello"}),
        "Streams end with `data: [DONE]`, as Open Responses demands.",
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}",
        OPENAI,
        "Tell a stored response again.",
        Access.CLIENT,
        (told(ref("Response"), says="The response as it was."),),
        (400, *failures.ASK),
        (
            _RESPONSE,
            in_query("stream", FLAG, "Only `false`: what is over cannot be streamed again."),
        ),
        example=Example(path=_KEPT),
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{response_id}",
        OPENAI,
        "Forget a stored response.",
        Access.CLIENT,
        (told(ref("ResponseDeleted"), says="It is forgotten."),),
        failures.ASK,
        (_RESPONSE,),
        example=Example(path=_KEPT),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}/input_items",
        OPENAI,
        "List what a stored response was made of.",
        Access.CLIENT,
        (told(ref("ResponseItems"), says="The items."),),
        (400, *failures.ASK),
        (
            _RESPONSE,
            in_query("after", TEXT, "The id of an item: the list begins behind it."),
            in_query("limit", integer(1, 100), "How many; 20 unless it is said."),
            in_query("order", words("asc", "desc"), "`desc` unless it is said."),
        ),
        example=Example(path=_KEPT, query={"limit": "5"}),
    ),
    Endpoint(
        "GET",
        "/v1/models",
        OPENAI,
        "List the models and adapters.",
        Access.CLIENT,
        (told(ref("Models"), says="All of them, in one page."),),
        failures.CLIENT,
        says="Anthropic's clients list models at the same path, and find their keys too.",
    ),
    Endpoint(
        "GET",
        "/v1/models/{model_id}",
        OPENAI,
        "Describe one model or adapter.",
        Access.CLIENT,
        (told(ref("Model"), says="The model."),),
        (400, *failures.ASK),
        (in_path("model_id", "A model or an adapter; it may contain `/`."),),
        example=Example(path={"model_id": SIM}),
    ),
)
