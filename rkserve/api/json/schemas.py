"""Schemas of bodies: pydantic models of requests, types of answers, and their JSON Schemas.

A schema is the only statement of a body's shape: names, types, bounds and meanings of its keys.
Requests are ``RequestModel``s, which read them; a validation error becomes an error of the API with
the parameter's path. Answers are ``typing_extensions.TypedDict``s: the type checker compares the
dictionaries that the code builds with them, and nothing is checked or copied at run time. The
OpenAPI document is made of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from rkserve.api.json.fields import Fields, JsonObject, missing, quoted, wrong_type
from rkserve.core.errors import RequestError

M = TypeVar("M", bound="RequestModel")
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
REF = "#/components/schemas/"


@dataclass(frozen=True)
class Example:
    """One call of an endpoint, for the reference.

    ``path`` are the values of its parameters; ``file`` is a body from a file. ``needs`` is what
    a cluster fresh from ``make demo`` lacks for it.
    """

    body: Any = None
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    status: int = 200
    needs: str = ""


def one_of(words: type[Enum] | tuple[str, ...]) -> WithJsonSchema:
    """Return the annotation of a string that is one of a few; of an enum, those are its values."""
    listed = words if isinstance(words, tuple) else [one.value for one in words]
    return WithJsonSchema({"type": "string", "enum": [*listed]})


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
    @cache  # it takes milliseconds, and each call of the control API needs it
    def properties(cls) -> Mapping[str, JsonObject]:
        """Return the JSON Schema of each key, without ``null``."""
        schema = cls.model_json_schema()
        defs = schema.get("$defs", {})
        return {key: _not_null(plain(value, defs)) for key, value in schema["properties"].items()}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonObject:
        """Add ``null``, which is absent, to keys that may be left out."""
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        required, found = schema.get("required", ()), schema.get("properties", {})
        schema["properties"] = {key: found[key] for key in required} | {
            key: nullable(value) for key, value in found.items() if key not in required
        }
        schema.setdefault("additionalProperties", True)
        return made


def read_model(model: type[M], values: JsonObject) -> M:
    """Read the keys of a body. Raises ``RequestError`` with the path of the parameter at fault."""
    if model.model_config.get("extra") != "ignore":  # of another version
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
    if kind in _TYPES or kind == "wrong_type":  # the latter is a validator's of our own
        if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
            return RequestError(f"Invalid '{path}': too large for a number.", path)
        return wrong_type(path, _TYPES.get(kind) or limits["expected"], value)
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
    if kind == "too_short":
        return "empty array"
    if kind == "too_long" and isinstance(value, list):
        limit = limits["max_length"]
        return f"array too long. Expected at most {limit} items, but got {len(value)}"
    return message


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for one in loc:
        if isinstance(one, int):
            path += f"[{one}]"
        else:
            path += f".{one}" if path else one
    return path


def json_schemas(types: Iterable[Any]) -> tuple[list[JsonObject], dict[str, JsonObject]]:
    """Return the JSON Schemas of types, in order, and the named schemas that they refer to.

    A schema's name is its class's without the suffix ``Answer``, or its configured title. Values
    that are JSON Schemas already stay as they are.
    """
    given = list(types)
    mode: Literal["validation"] = "validation"
    adapted = [
        (index, mode, TypeAdapter[Any](one))
        for index, one in enumerate(given)
        if not isinstance(one, dict)
    ]
    made, whole = TypeAdapter.json_schemas(adapted, ref_template=f"{REF}{{model}}")
    defs = whole.get("$defs", {})
    names = {
        name: str(schema.get("title", name)).removesuffix("Answer")
        for name, schema in defs.items()
        if _is_named(schema)
    }
    found = [
        one if isinstance(one, dict) else plain(made[index, mode], defs, names)
        for index, one in enumerate(given)
    ]
    return found, {names[name]: plain(defs[name], defs, names) for name in names}


def plain(
    schema: JsonObject, defs: Mapping[str, JsonObject], names: Mapping[str, str] | None = None
) -> JsonObject:
    """Return a schema without titles and defaults.

    References to objects with ``names`` get that name; others are replaced by their schema.
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        described = {key: value for key, value in schema.items() if key == "description"}
        if names is not None and name in names:
            return {"$ref": f"{REF}{names[name]}", **described}
        inner = {key: value for key, value in defs[name].items() if key != "description"}
        return plain({**inner, **described}, defs, names)
    found = {key: value for key, value in schema.items() if key not in ("title", "default")}
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = plain(found[key], defs, names)
    if "properties" in found:
        found["properties"] = {
            key: plain(value, defs, names) for key, value in found["properties"].items()
        }
    if "prefixItems" in found:
        found["prefixItems"] = [plain(one, defs, names) for one in found["prefixItems"]]
    if "oneOf" in found:  # a tagged union
        found["anyOf"] = found.pop("oneOf")
        found.pop("discriminator", None)
    if "anyOf" in found:
        options = [plain(one, defs, names) for one in found.pop("anyOf")]
        found = {**_any_of(options), **found}
    if "type" in found and "const" in found:  # a literal of one string
        found["enum"] = [found.pop("const")]
    return found


def nullable(schema: JsonObject) -> JsonObject:
    """Return the schema of a value or null."""
    options = schema.get("anyOf") or [
        {key: value for key, value in schema.items() if key != "description"}
    ]
    if not options[0] or _NULL in options:
        return schema
    made: JsonObject = {"anyOf": [*options, _NULL]}
    return {**made, "description": schema["description"]} if "description" in schema else made


_NULL: JsonObject = {"type": "null"}


def _any_of(options: list[JsonObject]) -> JsonObject:
    """Return a union; one of a plain type and null has two types."""
    others = [one for one in options if one != _NULL]
    if (
        len(others) == len(options)
        or len(others) != 1
        or not isinstance(others[0].get("type"), str)
    ):
        return {"anyOf": options}
    (found,) = others
    more = {"enum": [*found["enum"], None]} if "enum" in found else {}
    return {**found, "type": [found["type"], "null"], **more}


def _not_null(schema: JsonObject) -> JsonObject:
    """Return the schema of what is not null."""
    kinds = schema.get("type")
    if isinstance(kinds, list):
        found = {**schema, "type": next(kind for kind in kinds if kind != "null")}
        if "enum" in found:
            found["enum"] = [one for one in found["enum"] if one is not None]
        return found
    options = [one for one in schema.get("anyOf", ()) if one != _NULL]
    if not options:
        return schema
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    return {**options[0], **rest} if len(options) == 1 else {**rest, "anyOf": options}


def _is_named(schema: JsonObject) -> bool:
    return "properties" in schema
