"""Ollama's listings of models, its embedding calls, and its version.

Listings are made from OpenAI's model entries and the facts in a model folder.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, SkipValidation, model_validator
from typing_extensions import NotRequired, TypedDict

from rkserve.api.common.parameters import ModelName, Nonempty, OpenModel
from rkserve.api.json.fields import (
    MAX_DIMENSIONS,
    MAX_INPUTS,
    Fields,
    JsonObject,
    missing,
    parse_object,
)
from rkserve.api.json.schemas import Count
from rkserve.api.ollama.answers import timestamp
from rkserve.api.ollama.requests import without_tag
from rkserve.api.openai.embeddings import (
    EmbeddingCall,
    EmbeddingDialect,
    VectorRequest,
    read_inputs,
    written,
)
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.errors import RequestError
from rkserve.core.run_params import Sampling

# The release of this API, by which clients detect its features.
API_RELEASE = "0.12.0"
FORMAT = "rkllm"
_MEBIBYTE = 2**20
_NEVER = "9999-12-31T23:59:59Z"


@dataclass(frozen=True)
class FolderFacts:
    """Facts in a model folder; 0 and empty where this machine does not have the model's file.

    ``tools``, ``thinking``, ``embedding`` and ``vision``: the model can call tools, reasons before
    it answers, computes embeddings, takes images.
    """

    size_bytes: int = 0
    digest: str = ""
    sampling: Sampling | None = None
    chat_template: str | None = None
    tools: bool = False
    thinking: bool = False
    embedding: bool = False
    vision: bool = False


class ModelDetails(TypedDict):
    """Facts from the name or the folder of a model."""

    parent_model: str
    format: str
    family: str
    parameter_size: str
    quantization_level: str
    families: list[str]


class OllamaTag(TypedDict):
    """A model or an adapter."""

    name: str
    model: str
    modified_at: str
    digest: str
    size: Count
    details: ModelDetails


class RunningTag(OllamaTag):
    """A model that a board has loaded."""

    expires_at: str
    size_vram: Count
    context_length: Count


class OllamaTagsAnswer(TypedDict):
    """The models and adapters."""

    models: list[OllamaTag]


class OllamaShowAnswer(TypedDict):
    """One model."""

    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: ModelDetails
    model_info: JsonObject
    capabilities: list[str]


class OllamaRunningAnswer(TypedDict):
    """The models that are loaded."""

    models: list[RunningTag]


class OllamaVersionAnswer(TypedDict):
    """The release of this API, and rkserve's."""

    version: str
    rkserve: str


class OllamaEmbedAnswer(TypedDict):
    """A vector for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: Count
    load_duration: Count
    prompt_eval_count: NotRequired[Count]


class OllamaEmbeddingsAnswer(TypedDict):
    """The vector of a text."""

    embedding: list[float]


def tags(entries: Iterable[JsonObject], facts: Mapping[str, FolderFacts]) -> OllamaTagsAnswer:
    """Return the answer of GET /api/tags: OpenAI's entries, with facts from the folders."""
    return {"models": [_tag(entry, facts) for entry in entries]}


def show(entry: JsonObject, facts: FolderFacts) -> OllamaShowAnswer:
    """Return the answer of POST /api/show."""
    return {
        "modelfile": "",
        "parameters": _parameters(facts.sampling),
        "template": facts.chat_template or "",
        "details": _details(entry),
        "model_info": {
            "general.architecture": FORMAT,
            f"{FORMAT}.context_length": entry["rkserve"]["context_length"],
        },
        "capabilities": _capabilities(facts),
        "modified_at": timestamp(entry["created"]),
    }


def running(
    entries: Iterable[JsonObject], facts: Mapping[str, FolderFacts], reports: Iterable[BoardReport]
) -> OllamaRunningAnswer:
    """Return the answer of GET /api/ps: the base models that a board has loaded."""
    ready = [one for one in reports if one.state is BoardState.READY]
    found: list[RunningTag] = []
    for entry in entries:
        boards = [one for one in ready if one.model == entry["id"]]
        if boards and "parent" not in entry:
            memory = round(max(one.memory_mb for one in boards) * _MEBIBYTE)
            found.append(
                {
                    **_tag(entry, facts),
                    "expires_at": _NEVER,
                    "size_vram": memory,
                    "context_length": entry["rkserve"]["context_length"],
                }
            )
    return {"models": found}


def base_of(entry: JsonObject) -> str:
    """Return the base model of an entry."""
    return str(entry["parent"] if "parent" in entry else entry["id"])


def parse_show(body: bytes) -> str:
    """Return the model of POST /api/show. Raises ``RequestError``."""
    asked = OllamaShowRequest.read(parse_object(body))
    name = asked.model or asked.name
    if name is None:
        raise missing("model")
    return without_tag(name)


def _tag(entry: JsonObject, facts: Mapping[str, FolderFacts]) -> OllamaTag:
    of = facts.get(base_of(entry), FolderFacts())
    adapter = entry["rkserve"] if "parent" in entry else None
    return {
        "name": entry["id"],
        "model": entry["id"],
        "modified_at": timestamp(entry["created"]),
        "size": of.size_bytes if adapter is None else adapter["bytes"],
        "digest": of.digest if adapter is None else adapter["digest"] or "",
        "details": _details(entry),
    }


def _details(entry: JsonObject) -> ModelDetails:
    return {
        "parent_model": entry.get("parent", ""),
        "format": FORMAT,
        "family": FORMAT,
        "families": [FORMAT],
        "parameter_size": "",
        "quantization_level": "",
    }


def _capabilities(facts: FolderFacts) -> list[str]:
    more = ("tools", "thinking", "embedding", "vision")
    return ["completion", *(name for name in more if getattr(facts, name))]


def _parameters(sampling: Sampling | None) -> str:
    """Return the model's own sampling values in the form of a Modelfile."""
    if sampling is None:
        return ""
    names = ("temperature", "top_p", "top_k", "repeat_penalty")
    return "\n".join(f"{name} {getattr(sampling, name):g}" for name in names)


_NS_PER_S = 1e9


class OllamaEmbedRequest(VectorRequest):
    """The body of POST /api/embed."""

    input: SkipValidation[str | Annotated[list[Nonempty], Field(max_length=MAX_INPUTS)] | None] = (
        None
    )
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSIONS)
    keep_alive: SkipValidation[str | float | None] = None


class OllamaEmbeddingsRequest(VectorRequest):
    """The body of POST /api/embeddings."""

    prompt: SkipValidation[str | None] = None
    keep_alive: SkipValidation[str | float | None] = None


class OllamaShowRequest(OpenModel):
    """The body of POST /api/show. `name` is the older name of `model`."""

    model: ModelName | None = Field(None, description="A model or an adapter.")
    name: ModelName | None = Field(None, description="A model or an adapter.")

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, given: object) -> object:
        # Ollama's own client sends both, and leaves the older one empty.
        if isinstance(given, dict) and given.get("model") is not None:
            return {key: value for key, value in given.items() if key != "name"}
        return given


def parse_embed(body: bytes) -> EmbeddingCall:
    """Read the body of POST /api/embed: a text, or a list of them. Raises ``RequestError``."""
    values = parse_object(body)
    asked = OllamaEmbedRequest.read(values)
    call = _call(asked, Fields(values), "input")
    return replace(call, cut=asked.truncate, dimensions=asked.dimensions)


def parse_embed_one(body: bytes) -> EmbeddingCall:
    """Read the body of POST /api/embeddings: one text. Raises ``RequestError``."""
    values = parse_object(body)
    asked, fields = OllamaEmbeddingsRequest.read(values), Fields(values)
    fields.required_text("prompt")
    return replace(_call(asked, fields, "prompt"), cut=True)


def _call(asked: VectorRequest, fields: Fields, name: str) -> EmbeddingCall:
    wanted = replace(asked.options(), model=without_tag(asked.model))
    inputs, paths = read_inputs(fields, name)
    for text, path in zip(inputs, paths, strict=True):
        if not isinstance(text, str):
            at = path if path != name else f"{name}[0]"  # one list of token IDs is one text
            raise RequestError(f"Invalid '{at}': a string is expected.", at)
    return EmbeddingCall(wanted, inputs, paths)


def _embedded(
    call: EmbeddingCall, vectors: Iterable[array[float]], tokens: int, took_s: float
) -> bytes:
    model = json.dumps(call.wanted.model).encode()
    listed = b",".join(written(one) for one in vectors)
    counts = b'"total_duration":%d,"load_duration":0,"prompt_eval_count":%d' % (
        round(took_s * _NS_PER_S),
        tokens,
    )
    return b'{"model":%b,"embeddings":[%b],%b}' % (model, listed, counts)


def _embedded_one(
    _call: EmbeddingCall, vectors: Iterable[array[float]], _tokens: int, _took_s: float
) -> bytes:
    (vector,) = vectors
    return b'{"embedding":%b}' % written(vector)


def nothing(model: str, what: str) -> OllamaEmbedAnswer | OllamaEmbeddingsAnswer:
    """Return the answer to a call without a text: the model is ready."""
    if what == "prompt":
        return {"embedding": []}
    return {"model": model, "embeddings": [], "total_duration": 0, "load_duration": 0}


EMBED = EmbeddingDialect(parse_embed, _embedded)
EMBED_ONE = EmbeddingDialect(parse_embed_one, _embedded_one)
