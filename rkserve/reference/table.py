"""All endpoints, and all schemas that have names."""

from __future__ import annotations

from rkserve.reference import (
    answers,
    asking,
    cluster,
    dialects,
    failures,
    generations,
    openai,
    service,
    texts,
    weights,
)
from rkserve.reference.endpoints import Endpoint
from rkserve.reference.shapes import Schema

_PARTS = (openai, texts, dialects, generations, cluster, weights, service)
_NAMED = (
    failures,
    asking,
    answers,
    openai,
    texts,
    dialects,
    generations,
    cluster,
    weights,
    service,
)

SCHEMAS: dict[str, Schema] = {
    name: schema for part in _NAMED for name, schema in part.SCHEMAS.items()
}


def endpoints(*, page: bool = True) -> tuple[Endpoint, ...]:
    """Return all endpoints of a Router, with or without the chat page."""
    found = tuple(one for part in _PARTS for one in part.ENDPOINTS)
    return (*found, *service.PAGE) if page else found
