"""Parameters of the control API, in the query and in the body alike."""

from __future__ import annotations

from rkserve.api.json import limits
from rkserve.api.json.schemas import RequestModel
from rkserve.reference.endpoints import (
    EndpointParameter,
    RequestBody,
    in_header,
    in_json,
    in_query,
)
from rkserve.reference.shapes import TEXT, Schema, body

KEY = in_header(
    "idempotency-key",
    {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{limits.MAX_KEY_CHARS}}}$"},
    "A repeat with the same key is answered as the first call.",
)


def query_of(*models: type[RequestModel]) -> tuple[EndpointParameter, ...]:
    """Return the parameters of a call in its query string, which has no lists of objects."""
    schemas = {name: one for model in models for name, one in model.properties().items()}
    return tuple(
        in_query(name, _in_query(schema), schema["description"])
        for name, schema in schemas.items()
        if schema.get("type") != "array"
    )


def body_of(model: type[RequestModel]) -> RequestBody:
    """Return the same parameters as a body, which may be empty.

    Those that are needed must be in one of the two places.
    """
    about = ", ".join(f"`{name}`" for name in model.needed())
    return in_json(
        body(
            {},
            model.properties(),
            strict=True,
            about=f"Needed, here or in the query: {about}." * bool(about),
        ),
        required=False,
    )


def _in_query(schema: Schema) -> Schema:
    """Return the schema in a query, where lists are texts with commas."""
    return TEXT if "anyOf" in schema else {k: v for k, v in schema.items() if k != "description"}
