"""Endpoints that show and control single generations, caches and boards."""

from __future__ import annotations

from rkserve.api.admin.generations import AT_ONCE, AT_RESUME
from rkserve.api.admin.pause import NAMES
from rkserve.api.json import limits
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.reference import failures
from rkserve.reference.asking import IDS, MODEL
from rkserve.reference.endpoints import (
    Access,
    Endpoint,
    EndpointParameter,
    Example,
    in_json,
    in_path,
    in_query,
    told,
)
from rkserve.reference.openai import HELLO, SIM
from rkserve.reference.shapes import (
    ANYTHING,
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    SECONDS,
    TEXT,
    Schema,
    array,
    body,
    const,
    either,
    integer,
    listed,
    mapping,
    maybe,
    obj,
    ref,
    said,
    text,
    words,
)

_GENERATIONS, _CACHES, _BOARDS = "Generations", "Caches", "Boards"
_STATE = words(*(one.value for one in GenerationState))
_KV = maybe(words("kept", "recomputed"))
_CHOICE = said(integer(0, limits.MAX_CHOICES - 1), "Which choice is meant; all without it.")
_RANGES = array(
    {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2}, 1, limits.MAX_CLEAR_RANGES
)
_PLACES = {
    "model": said(MODEL, "Only boards of this model."),
    "boards": said(NAMES, "Only these boards."),
    "board": said(NAMES, "Another name of `boards`."),
}
_CLEAR = {
    **_PLACES,
    "all": said(FLAG, "All boards; needed where neither of these three is there."),
    "keep_system_prompt": said(FLAG, "Spare the system prompt; true unless it is said."),
    "generation": said(text(1), "The id of a paused answer, instead of boards."),
    "ranges": said(_RANGES, "Positions of that answer's context."),
    "choice": _CHOICE,
}
_EDIT = {
    "choice": _CHOICE,
    "replace_last": COUNT,
    "text": TEXT,
    "token_ids": IDS,
    "role": words("assistant", "tool"),
    "clear": _RANGES,
}
_BUILD = {
    "cache_name": TEXT,
    "prompt": either(text(1), IDS),
    "messages": array(ref("ChatMessage"), 1),
}
FAILED = array(obj({"board": TEXT, "error": TEXT, "message": TEXT}))

_ENTRY: dict[str, Schema] = {
    "id": TEXT,
    "object": const("generation"),
    "choice": COUNT,
    "board": TEXT,
    "model": TEXT,
    "adapter": maybe(TEXT),
    "state": _STATE,
    "prompt_tokens": COUNT,
    "tokens": COUNT,
    "context_tokens": COUNT,
    "kv_positions": COUNT,
    "kv": _KV,
    "native_pause": FLAG,
    "paused_by": maybe(TEXT),
    "age_s": NUMBER,
}
_PROGRESS: dict[str, Schema] = {
    "tokens": COUNT,
    "context_tokens": COUNT,
    "kv": _KV,
    "kv_positions": COUNT,
    "can_resume": FLAG,
}
_DONE: dict[str, Schema] = {
    "id": TEXT,
    "choice": COUNT,
    "status": words("paused", "resumed", "aborted"),
    "state": _STATE,
    "board": TEXT,
    **_PROGRESS,
}
_WORDS = {"partial_output": TEXT}
_APPLIED = {"applied": said(words(AT_RESUME), "Of an edit: when the KV cache follows it.")}
_ONE = {**_ENTRY, **_PROGRESS, **_WORDS, "status": _STATE}
_KV_BOARD = obj(
    {
        "board": TEXT,
        "model": TEXT,
        "positions": COUNT,
        "entries": array(COUNT),
        "capacity": COUNT,
        "bytes": maybe(COUNT),
        "status": words("ok", "cleared", "pending"),
        "applied": said(
            words(AT_ONCE, AT_RESUME),
            "`at_resume`: a paused generation's edits change it when that is resumed.",
        ),
        "positions_at_resume": said(
            maybe(COUNT), "The positions that stay then; null where nothing is to be changed."
        ),
    }
)
_KV_LIST: dict[str, Schema] = {
    "total": obj({"positions": COUNT, "capacity": COUNT, "bytes": maybe(COUNT)}),
    "failed": FAILED,
}
_CLEARED = {"results": mapping(obj({"status": TEXT, "latency_ms": SECONDS}))}
_COUNTERS = (
    *("pid", "engine_pid", "context_len", "kv_positions", "running"),
    *("queued", "queue_limit", "requests", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "aborted", "failed", "engine_starts", "engine_renewals"),
    *("prefill_tokens", "decode_tokens", "paused", "n_batch", "adapter_bytes"),
    *("pauses", "parked", "restored", "batch_runs", "batch_entries"),
    *("missing",),
)

SCHEMAS: dict[str, Schema] = {
    "Generations": listed(obj(_ENTRY), {"failed": FAILED}),
    "Generation": obj(_ONE, {"choices": array(obj(_ONE))}),
    "Controlled": obj(
        _DONE,
        {
            **_WORDS,
            **_APPLIED,
            "choices": array(obj(_DONE, {**_WORDS, **_APPLIED})),
            "failed": FAILED,
        },
    ),
    "ChoiceRequest": body({}, {"choice": _CHOICE}, strict=True),
    "EditRequest": body(
        {},
        _EDIT,
        strict=True,
        about="At least one of `replace_last`, `text`, `token_ids` and `clear`.",
    ),
    "KvCaches": listed(_KV_BOARD, _KV_LIST),
    "KvClearRequest": body(
        {},
        _CLEAR,
        strict=True,
        about="Either of boards, or `ranges` of one paused `generation`.",
    ),
    "KvCleared": listed(_KV_BOARD, {**_KV_LIST, **_CLEARED}),
    "CacheRequest": body(
        {},
        _BUILD,
        strict=True,
        about="`cache_name`, and either `prompt` or `messages`.",
    ),
    "CacheBuilt": obj(
        {
            "cache_name": TEXT,
            "model": TEXT,
            "tokens": COUNT,
            "boards": array(
                obj(
                    {"board": TEXT},
                    {"tokens": COUNT, "bytes": COUNT, "error": TEXT, "message": TEXT},
                )
            ),
            "kept": FLAG,
        }
    ),
    "PromptCaches": listed(
        obj(
            {
                "board": TEXT,
                "cache_name": maybe(TEXT),
                "parked": FLAG,
                "model": TEXT,
                "adapter": maybe(TEXT),
                "tokens": COUNT,
                "bytes": COUNT,
                "age_s": NUMBER,
                "idle_s": NUMBER,
            }
        ),
        {
            "failed": FAILED,
            "kept": maybe(
                array(
                    obj(
                        {
                            "cache_name": TEXT,
                            "adapter": maybe(TEXT),
                            "tokens": COUNT,
                            "configured": FLAG,
                            "failed": array(obj({"board": TEXT, "message": TEXT})),
                        }
                    )
                )
            ),
        },
    ),
    "CacheDeleted": obj(
        {
            "cache_name": TEXT,
            "deleted": const(True),
            "model": TEXT,
            "boards": array(TEXT),
            "failed": FAILED,
        }
    ),
    "Board": obj(
        {
            "id": TEXT,
            "object": const("board"),
            "state": words(*(one.value for one in BoardState)),
            "circuit": obj({"state": TEXT, "reason": TEXT}),
            **dict.fromkeys(
                ("model", "reason", "release", "platform", "node", "library", "replica", "hold"),
                TEXT,
            ),
            "base": TEXT,
            "own_digest": TEXT,
            "own_bytes": INTEGER,
            "serving": mapping(TEXT),
            **dict.fromkeys(_COUNTERS, INTEGER),
            **dict.fromkeys(
                ("prefill_ms", "decode_ms", "memory_mb", "batch_tail_ms", "idle_s"), NUMBER
            ),
            "hardware": maybe(ANYTHING),
            "adapters": array(TEXT),
            "staged": array(TEXT),
            "versions": array(ANYTHING),
            "epoch": maybe(INTEGER),
            "level": maybe(INTEGER),
        },
        about="What a board says of itself; counters run since its replica's start.",
    ),
    "Boards": listed(ref("Board")),
}

_ID = in_path("generation", "The id of an answer.")
_MODEL = in_path("model", "A model or an adapter.")
_RUNNING = "chatcmpl-1"
_AT = {"generation": _RUNNING}
_ACTS = (*failures.BODY, *failures.CLIENT, 404, 409, 429, 503, 504)
_PARTLY = "Not all boards could do it; `failed` says which."


def _query(names: dict[str, Schema]) -> tuple[EndpointParameter, ...]:
    """The keys of a body as parameters of the query, where lists are JSON or have commas."""
    return tuple(
        in_query(name, _in_query(schema), str(schema.get("description", "As in the body.")))
        for name, schema in names.items()
    )


def _in_query(schema: Schema) -> Schema:
    plain = {key: value for key, value in schema.items() if key != "description"}
    return TEXT if "anyOf" in plain or plain["type"] == "array" else plain


def _act(action: str, summary: str, asked: str, example: object = None) -> Endpoint:
    return Endpoint(
        "POST",
        f"/v1/generations/{{generation}}/{action}",
        _GENERATIONS,
        summary,
        Access.CLIENT,
        (
            told(ref("Controlled"), says="It is done."),
            told(ref("Controlled"), 207, "Not all choices could do it; `failed` says which."),
        ),
        _ACTS,
        (_ID, *_query(_EDIT if asked == "EditRequest" else {"choice": _CHOICE})),
        in_json(ref(asked), required=False),
        Example(example, _AT),
    )


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/generations",
        _GENERATIONS,
        "List everybody's generations.",
        Access.OPERATOR,
        (told(ref("Generations"), says="The oldest first, and nobody's words."),),
        failures.OPERATOR,
    ),
    Endpoint(
        "GET",
        "/v1/generations/{generation}",
        _GENERATIONS,
        "Describe one generation.",
        Access.CLIENT,
        (told(ref("Generation"), says="The generation, with its words."),),
        failures.ASK,
        (_ID,),
        example=Example(path=_AT),
    ),
    _act("pause", "Pause a generation; answer when nothing more of it comes.", "ChoiceRequest"),
    _act("edit", "Change a paused generation.", "EditRequest", {"replace_last": 1, "text": "Sea"}),
    _act("resume", "Let a paused generation go on.", "ChoiceRequest"),
    _act("abort", "End a generation, whatever it does.", "ChoiceRequest", {"choice": 0}),
    Endpoint(
        "GET",
        "/v1/cache/kv/size",
        _CACHES,
        "Say what the KV caches hold.",
        Access.CLIENT,
        (told(ref("KvCaches"), says="By board and together."),),
        (400, *failures.ASK),
        _query(_PLACES),
    ),
    Endpoint(
        "POST",
        "/v1/cache/kv/clear",
        _CACHES,
        "Clear KV caches.",
        Access.OPERATOR,
        (
            told(either(ref("KvCleared"), ref("Controlled")), says="They are cleared."),
            told(either(ref("KvCleared"), ref("Controlled")), 207, _PARTLY),
        ),
        (*failures.BODY, *failures.OPERATOR, 404, 409, 429, 503, 504),
        _query(_CLEAR),
        in_json(ref("KvClearRequest"), required=False),
        example=Example({"model": SIM}),
    ),
    Endpoint(
        "POST",
        "/v1/cache/{model}",
        _CACHES,
        "Build a named prompt cache on every board of a model.",
        Access.OPERATOR,
        (
            told(ref("CacheBuilt"), says="It is built."),
            told(ref("CacheBuilt"), 207, "Not all boards could build it."),
        ),
        (*failures.BODY, *failures.OPERATOR, 404, 409, 429, 502, 503, 504),
        (_MODEL, *_query(_BUILD)),
        in_json(ref("CacheRequest"), required=False),
        Example({"cache_name": "doc", "messages": HELLO}, {"model": SIM}),
    ),
    Endpoint(
        "GET",
        "/v1/cache/{model}",
        _CACHES,
        "List prompt caches.",
        Access.CLIENT,
        (told(ref("PromptCaches"), says="Those with a name first."),),
        (400, *failures.ASK),
        (_MODEL,),
        example=Example(path={"model": SIM}),
    ),
    Endpoint(
        "DELETE",
        "/v1/cache/{model}/{cache_name}",
        _CACHES,
        "Delete a named prompt cache wherever it is.",
        Access.OPERATOR,
        (
            told(ref("CacheDeleted"), says="It is gone."),
            told(ref("CacheDeleted"), 207, _PARTLY),
        ),
        (*failures.BODY, *failures.OPERATOR, 404, 503),
        (_MODEL, in_path("cache_name", "Its name.")),
        example=Example(path={"model": SIM, "cache_name": "doc"}),
    ),
    Endpoint(
        "GET",
        "/v1/boards",
        _BOARDS,
        "List the boards with what they say of themselves.",
        Access.CLIENT,
        (told(ref("Boards"), says="All boards."),),
        failures.CLIENT,
    ),
    Endpoint(
        "GET",
        "/v1/boards/{board_id}",
        _BOARDS,
        "Describe one board.",
        Access.CLIENT,
        (told(ref("Board"), says="The board."),),
        (*failures.CLIENT, 404),
        (in_path("board_id", "Its name; it may contain `/`."),),
        example=Example(path={"board_id": "sim-0"}),
    ),
)
