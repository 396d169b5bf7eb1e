"""Parameters of the control API, in the query and in the body alike."""

from __future__ import annotations

from rkserve.api.admin.weights import KIND, MAX_STEP
from rkserve.api.json import limits
from rkserve.api.json.schemas import RequestModel
from rkserve.core.desired_state import InFlight
from rkserve.reference.endpoints import EndpointParameter, RequestBody, in_header, in_json, in_query
from rkserve.reference.shapes import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Schema,
    array,
    body,
    either,
    integer,
    number,
    text,
    words,
)

_NAME = text(1, limits.MAX_MODEL_CHARS)
TEXTS = either(_NAME, array(_NAME, 0, limits.MAX_NAMED))
_PLACE = text(1, limits.MAX_PATH_CHARS)
_SHA = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_ARTIFACT = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}
_SHARD = either(
    COUNT,
    {"type": "string", "pattern": "^[0-9]+(/|-of-)[0-9]+$"},
    {
        "type": "object",
        "properties": {"index": COUNT, "count": COUNT, "dim": COUNT},
        "required": ["index"],
        "additionalProperties": False,
    },
)
_LIST = array(
    {
        "type": "object",
        "properties": {"name": TEXT, "shape": array(COUNT), "dtype": TEXT, "shard": _SHARD},
        "required": ["name", "shape", "dtype"],
        "additionalProperties": False,
    }
)

COMMON = ("model", "models", "timeout_s", "async", "epoch")
ROLLOUT = (
    *COMMON,
    *("strategy", "max_unavailable", "weight", "canary_weight", "in_flight", "observe_s", "auto"),
)
ARTIFACT = (
    *ROLLOUT,
    *("name", "version", "sha256", "scale", "base_model", "base_digest", "parameters", "activate"),
)
REGISTER = (*ARTIFACT, "path", "url")
UPLOAD = (*ARTIFACT, "size")

# A list in a query is separated by commas.
KNOWN: dict[str, tuple[Schema, str]] = {
    "model": (TEXTS, "Models that are meant; all without it, or the only one."),
    "models": (TEXTS, "Another name of `model`."),
    "timeout_s": (
        number(0, limits.MAX_TIMEOUT_S, above=True),
        "Seconds that it may take.",
    ),
    "async": (FLAG, "Answer 202 at once, and tell by the operation how it goes on."),
    "epoch": (COUNT, "Only if the cluster is at this epoch, else 409."),
    "is_3d_lora_weight": ({"const": False}, "vLLM's, about tensors; a board loads .rkllm files."),
    "pinned": (FLAG, "SGLang's, and of no use here."),
    "abort_all_requests": (FLAG, "Whether running requests are ended."),
    "strategy": (words("atomic", "rolling", "canary"), "How the version comes to be served."),
    "max_unavailable": (integer(1, limits.MAX_NAMED), "Boards that may load at once."),
    "weight": (number(0, 1, above=True), "Of a canary: the share of sessions."),
    "canary_weight": (number(0, 1, above=True), "Another name of `weight`."),
    "in_flight": (
        words(*(one.value for one in InFlight)),
        "What becomes of requests that run with the version before.",
    ),
    "observe_s": (number(0, limits.MAX_OBSERVE_S), "Of a canary: how long it is watched."),
    "auto": (FLAG, "Of a canary: whether it is promoted, or rolled back, by itself."),
    "name": (_ARTIFACT, "The adapter."),
    "version": (_ARTIFACT, "Its version; without it the beginning of the file's digest."),
    "sha256": (_SHA, "What the file must have."),
    "scale": (number(0, 100, above=True), "How strongly it is applied; 1 unless it is said."),
    "base_model": (TEXT, "The model that it is for."),
    "base_digest": (_SHA, "The sha256 of the weights that it was trained on."),
    "parameters": (either(_LIST, TEXT), "The tensors in the file; in a query as JSON."),
    "activate": (FLAG, "Whether it is served at once; true unless it is said."),
    "path": (_PLACE, "Where the file is on the head."),
    "url": (_PLACE, "Where the file is fetched from."),
    "size": (integer(1), "How long the file is."),
    "lora_name": (_ARTIFACT, "The adapter."),
    "lora_path": (_PLACE, "Where its file is on the head."),
    "load_inplace": (FLAG, "Whether another version of it may be served already."),
    "base_model_name": (TEXT, "The model that it is for."),
    "lora_int_id": (NUMBER, "Read by vLLM, and of no use here."),
    "kind": (words(KIND), "PipelineRL's."),
    "parameters_info": (_LIST, "The tensors that were sent."),
    "timestamp": (NUMBER, "The trainer's clock."),
    "artifact": (_NAME, "`<adapter>@<version>` or `<model>@<version>`."),
    "model_path": (_PLACE, "A path of the head, `default`, or `<model>@<version>`."),
    "load_format": (words("auto"), "SGLang's; there is one format."),
    "weight_version": (text(1, limits.MAX_LABEL_CHARS), "The label of the new weights."),
    "flush_cache": ({"const": True}, "KV caches of other weights would be wrong."),
    "keep_pause": ({"const": False}, "What is paused stays paused in any case."),
    "is_async": ({"const": False}, "SGLang's."),
    "torch_empty_cache": ({"const": False}, "SGLang's."),
    "recapture_cuda_graph": ({"const": False}, "SGLang's."),
    "token_step": (NUMBER, "SGLang's; only 0."),
}
STEP: tuple[Schema, str] = (integer(0, MAX_STEP), "The trainer's step.")
Keys = tuple[str, ...] | type[RequestModel]
KEY = in_header(
    "idempotency-key",
    {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{limits.MAX_KEY_CHARS}}}$"},
    "A repeat with the same key is answered as the first call.",
)
Changed = dict[str, tuple[Schema, str]]


def query_of(keys: Keys, changed: Changed | None = None) -> tuple[EndpointParameter, ...]:
    """Return the parameters of a call in its query string, which has no lists of objects."""
    return tuple(
        in_query(name, _in_query(schema), schema.pop("description"))
        for name, schema in _schemas(keys, changed).items()
        if schema.get("type") != "array"
    )


def body_of(
    keys: Keys, needed: tuple[str, ...] = (), changed: Changed | None = None
) -> RequestBody:
    """Return the same parameters as a body, which may be empty.

    Those ``needed`` must be in one of the two places.
    """
    if not isinstance(keys, tuple):
        needed = keys.needed()
    about = ", ".join(f"`{name}`" for name in needed)
    return in_json(
        body(
            {},
            _schemas(keys, changed),
            strict=True,
            about=f"Needed, here or in the query: {about}." * bool(needed),
        ),
        required=False,
    )


def _schemas(keys: Keys, changed: Changed | None) -> dict[str, Schema]:
    if not isinstance(keys, tuple):
        return keys.properties()
    known = {**KNOWN, **(changed or {})}
    return {name: {**known[name][0], "description": known[name][1]} for name in dict.fromkeys(keys)}


def _in_query(schema: Schema) -> Schema:
    """Return the schema in a query, where lists are texts with commas."""
    return TEXT if "anyOf" in schema else schema
