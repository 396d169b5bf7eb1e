"""Constructors of JSON Schemas.

Answers are open in the document, so that a client outlives a new key. Tests close them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]
Properties = Mapping[str, Schema]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SECONDS: Schema = {"type": "number", "minimum": 0}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {"type": "object", "additionalProperties": True}


def ref(name: str) -> Schema:
    """Return a reference to a named schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def said(schema: Schema, about: str) -> Schema:
    """Return a schema with a description."""
    return {**schema, "description": about}


def const(value: str | bool) -> Schema:
    """One value."""
    return {"const": value}


def words(*choices: str) -> Schema:
    """Return the schema of one of a few strings."""
    return {"type": "string", "enum": list(choices)}


def text(least: int = 0, most: int | None = None) -> Schema:
    """Return the schema of a string with a length."""
    found: Schema = {"type": "string"}
    if least:
        found["minLength"] = least
    if most is not None:
        found["maxLength"] = most
    return found


def integer(low: float | None = None, high: float | None = None) -> Schema:
    """An integer between bounds."""
    return _bounded("integer", low, high, above=False)


def number(low: float | None = None, high: float | None = None, *, above: bool = False) -> Schema:
    """A number between bounds; with ``above`` it is more than the lower one."""
    return _bounded("number", low, high, above=above)


def _bounded(kind: str, low: float | None, high: float | None, *, above: bool) -> Schema:
    found: Schema = {"type": kind}
    if low is not None:
        found["exclusiveMinimum" if above else "minimum"] = low
    if high is not None:
        found["maximum"] = high
    return found


def array(of: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list."""
    found: Schema = {"type": "array", "items": of}
    if least:
        found["minItems"] = least
    if most is not None:
        found["maxItems"] = most
    return found


def mapping(of: Schema) -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": of}


def either(*schemas: Schema) -> Schema:
    """Any of several."""
    return {"anyOf": list(schemas)}


def maybe(schema: Schema) -> Schema:
    """A value, or null."""
    kind = schema.get("type")
    if "enum" in schema:
        return {**schema, "type": [kind, "null"], "enum": [*schema["enum"], None]}
    if isinstance(kind, str):
        return {**schema, "type": [kind, "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], NULL]}
    # What may be anything may be null as well.
    return schema if set(schema) <= {"description"} else either(schema, NULL)


def obj(required: Properties, optional: Properties | None = None, about: str = "") -> Schema:
    """An object of an answer: what is always there, and what may be."""
    found: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    if required:
        found["required"] = list(required)
    return said(found, about) if about else found


def body(
    required: Properties, optional: Properties, *, strict: bool = False, about: str = ""
) -> Schema:
    """An object of a request: null is absent. ``strict`` ones refuse unknown keys."""
    given = {name: maybe(schema) for name, schema in optional.items()}
    return {**obj(required, given, about), "additionalProperties": not strict}


def listed(
    of: Schema, more: Properties | None = None, optional: Properties | None = None
) -> Schema:
    """OpenAI's list."""
    return obj({"object": const("list"), "data": array(of), **(more or {})}, optional)


def without(properties: Properties, *names: str) -> dict[str, Schema]:
    """Some of the properties."""
    return {name: schema for name, schema in properties.items() if name not in names}


def names_of(schema: Schema) -> Iterable[str]:
    """The keys of an object."""
    found: Iterable[str] = schema["properties"]
    return found
