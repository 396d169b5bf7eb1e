"""Ollama's embedding calls, the newer and the older one."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import replace

from rkserve.api.json.body import JsonObject, parse_object
from rkserve.api.json.fields import Fields, Range
from rkserve.api.json.limits import MAX_DIMENSIONS
from rkserve.api.ollama.requests import LoadRequest, asked_model
from rkserve.api.openai.embeddings import (
    EmbeddingCall,
    EmbeddingDialect,
    check_count,
    read_text,
    read_wanted,
    written,
)
from rkserve.core.errors import RequestError

_NS_PER_S = 1e9


def parse_embed(body: bytes) -> EmbeddingCall:
    """Read the body of POST /api/embed: a text, or a list of them. Raises ``RequestError``."""
    fields = Fields(parse_object(body))
    call = _call(fields, "input")
    return replace(
        call,
        cut=fields.maybe_flag("truncate") is not False,
        dimensions=fields.integer("dimensions", Range(1, MAX_DIMENSIONS)),
    )


def parse_embed_one(body: bytes) -> EmbeddingCall:
    """Read the body of POST /api/embeddings: one text. Raises ``RequestError``."""
    fields = Fields(parse_object(body))
    fields.required_text("prompt")
    return replace(_call(fields, "prompt"), cut=True)


def _call(fields: Fields, name: str) -> EmbeddingCall:
    wanted = replace(read_wanted(fields), model=asked_model(fields))
    value = fields.get(name)
    if isinstance(value, str):
        return EmbeddingCall(wanted, (_text(value, name),), (name,))
    texts = fields.items(name)
    check_count(len(texts), name)
    paths = tuple(f"{name}[{index}]" for index in range(len(texts)))
    inputs = tuple(_text(one, path) for one, path in zip(texts, paths, strict=True))
    return EmbeddingCall(wanted, inputs, paths)


def _text(value: object, path: str) -> str:
    text = read_text(value, path)
    if not isinstance(text, str):
        raise RequestError(f"Invalid '{path}': a string is expected.", path)
    return text


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


def nothing(asked: LoadRequest, what: str) -> JsonObject:
    """Return the answer to a call without a text: the model is ready."""
    if what == "prompt":
        return {"embedding": []}
    return {"model": asked.model, "embeddings": [], "total_duration": 0, "load_duration": 0}


EMBED = EmbeddingDialect(parse_embed, _embedded)
EMBED_ONE = EmbeddingDialect(parse_embed_one, _embedded_one)
