"""All endpoints, and all schemas that have names."""

from __future__ import annotations

from rkserve.reference import failures, generations
from rkserve.reference.endpoints import Endpoint
from rkserve.reference.shapes import Schema

_PARTS = (generations,)
_NAMED = (failures, generations)

SCHEMAS: dict[str, Schema] = {
    name: schema for part in _NAMED for name, schema in part.SCHEMAS.items()
}


def endpoints() -> tuple[Endpoint, ...]:
    """Return the endpoints that are not described at their routes yet."""
    return tuple(one for part in _PARTS for one in part.ENDPOINTS)
