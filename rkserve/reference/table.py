"""All endpoints, and all schemas that have names."""

from __future__ import annotations

from rkserve.reference import cluster, failures, generations, weights
from rkserve.reference.endpoints import Endpoint
from rkserve.reference.shapes import Schema

_PARTS = (generations, cluster, weights)
_NAMED = (failures, *_PARTS)

SCHEMAS: dict[str, Schema] = {
    name: schema for part in _NAMED for name, schema in part.SCHEMAS.items()
}


def endpoints() -> tuple[Endpoint, ...]:
    """Return the endpoints that are not described at their routes yet."""
    return tuple(one for part in _PARTS for one in part.ENDPOINTS)
