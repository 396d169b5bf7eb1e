"""Pydantic models of request bodies, their JSON Schemas, and the translation of their errors.

A model is the only statement of a body's shape: names, types, bounds and meanings of its keys. The
reader and the reference documentation both use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import Fields, missing, quoted, wrong_type
from rkserve.core.errors import RequestError

M = TypeVar("M", bound="RequestModel")

_TYPES = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
_BOUNDS = {
    "greater_than": ("below minimum value", ">", "gt"),
    "greater_than_equal": ("below minimum value", ">=", "ge"),
    "less_than_equal": ("above maximum value", "<=", "le"),
}


class RequestModel(BaseModel):
    """Base of request bodies that refuse unknown keys, and for which ``null`` is absent.

    A validator may raise ``RequestError`` itself, which pydantic passes on unchanged.
    """

    # Validators are built when a model is first used: a Router uses few of them.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Return the attribute of each key."""
        return {field.alias or name: name for name, field in cls.model_fields.items()}

    @classmethod
    def needed(cls) -> tuple[str, ...]:
        """Return the keys without which the body is refused."""
        fields = cls.model_fields
        return tuple(key for key, name in cls.keys().items() if fields[name].is_required())

    @classmethod
    def properties(cls) -> dict[str, JsonObject]:
        """Return the JSON Schema of each key, without ``null``."""
        schema = cls.model_json_schema()
        found = {
            key: _plain(value, schema.get("$defs", {}))
            for key, value in schema["properties"].items()
        }
        for key, name in cls.keys().items():
            # An enum's schema brings the description of its class.
            found[key].pop("description", None)
            if description := cls.model_fields[name].description:
                found[key]["description"] = description
        return found


def read_model(model: type[M], values: JsonObject) -> M:
    """Read the keys of a body. Raises ``RequestError`` with the path of the parameter at fault."""
    Fields(values).only(model.keys())
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as exc:
        raise request_error(exc) from None


def request_error(exc: ValidationError) -> RequestError:
    """Translate the first error of a validation into OpenAI's words for it."""
    first = exc.errors(include_url=False)[0]
    path, kind, value = _path(first["loc"]), first["type"], first["input"]
    limits: Mapping[str, Any] = first.get("ctx", {})
    if kind == "missing":
        return missing(path)
    if kind in _TYPES:
        if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
            return RequestError(f"Invalid '{path}': too large for a number.", path)
        return wrong_type(path, _TYPES[kind], value)
    if kind in ("enum", "literal_error"):
        if not isinstance(value, str):
            return wrong_type(path, "a string", value)
        choices = str(limits["expected"]).replace("' or '", "', '")
        return RequestError(
            f"Invalid '{path}': {quoted(value)}. Supported values are: {choices}.", path
        )
    return RequestError(f"Invalid '{path}': {_complaint(kind, value, limits, first['msg'])}.", path)


def _complaint(kind: str, value: object, limits: Mapping[str, Any], message: str) -> str:
    if kind in _BOUNDS:
        what, sign, name = _BOUNDS[kind]
        return f"{what}. Expected a value {sign} {limits[name]:g}, but got {quoted(value)}"
    if kind == "string_too_short" and not value:
        return "empty string"
    if kind == "string_too_long" and isinstance(value, str):
        limit = limits["max_length"]
        return f"string too long. Expected at most {limit} characters, but got {len(value)}"
    return message


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for one in loc:
        if isinstance(one, int):
            path += f"[{one}]"
        else:
            path += f".{one}" if path else one
    return path


def _plain(schema: JsonObject, defs: Mapping[str, JsonObject]) -> JsonObject:
    """Return a schema without references, titles and defaults, and without ``null``."""
    if "$ref" in schema:
        schema = {**defs[schema["$ref"].rpartition("/")[2]], **schema}
    options = schema.get("anyOf", ())
    if {"type": "null"} in options:
        (schema,) = (one for one in options if one != {"type": "null"})
        return _plain(schema, defs)
    found = {key: value for key, value in schema.items() if key not in ("$ref", "title", "default")}
    if "type" in found and "const" in found:  # a literal of one string
        found["enum"] = [found.pop("const")]
    return found
