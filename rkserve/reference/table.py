"""All endpoints, and all schemas that have names."""

from __future__ import annotations

from rkserve.reference import (
    answers,
    asking,
    dialects,
    failures,
    generations,
    openai,
    texts,
)
from rkserve.reference.endpoints import Endpoint
from rkserve.reference.shapes import Schema

_PARTS = (openai, texts, dialects, generations)
_NAMED = (
    failures,
    asking,
    answers,
    openai,
    texts,
    dialects,
    generations,
)

SCHEMAS: dict[str, Schema] = {
    name: schema for part in _NAMED for name, schema in part.SCHEMAS.items()
}


def endpoints() -> tuple[Endpoint, ...]:
    """Return the endpoints that are not described at their routes yet."""
    return tuple(one for part in _PARTS for one in part.ENDPOINTS)
