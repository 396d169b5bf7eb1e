"""Requests of the control API: parameters of the query string and of the JSON body as one object.

The type of each parameter decides how its text in a query is read. Unknown names are refused: these
requests change the cluster, and a mistyped name must not be taken for one that was left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, TypeVar

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, from_json

from rkserve.api.json.fields import (
    MAX_KEY_CHARS,
    MAX_LISTED,
    MAX_MODEL_CHARS,
    Fields,
    JsonObject,
    parse_object,
    quoted,
)
from rkserve.api.json.schemas import RequestModel, nullable, read_model
from rkserve.core.errors import RequestError

_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
M = TypeVar("M", bound=RequestModel)
Name = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]


class ParameterKind(Enum):
    """The type of a parameter, which decides how its text in a query is read."""

    TEXT = auto()
    TEXTS = auto()
    FLAG = auto()
    NUMBER = auto()
    JSON = auto()


class QueryOrBody(RequestModel):
    """Base of parameters that may be in the query and in a body alike."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonObject:
        """Require no key of the body, because all may be in the query."""
        made = super().__get_pydantic_json_schema__(core_schema, handler)
        schema = handler.resolve_ref_schema(made)
        for key in schema.pop("required", ()):
            schema["properties"][key] = nullable(schema["properties"][key])
        if needed := ", ".join(f"`{name}`" for name in cls.needed()):
            about = schema.get("description", "")
            schema["description"] = f"{about} Needed, here or in the query: {needed}.".strip()
        return made


ParameterKinds = Mapping[str, ParameterKind]
_KIND_OF_TYPE = {
    "string": ParameterKind.TEXT,
    "boolean": ParameterKind.FLAG,
    "integer": ParameterKind.NUMBER,
    "number": ParameterKind.NUMBER,
}


@dataclass(frozen=True)
class ControlRequest:
    """A request as received. ``query`` holds the decoded pairs of the query string in order.

    ``key`` is the idempotency key; ``who`` names the caller in the audit log, and ``admin`` tells
    that the caller has the scope ``admin``.
    """

    query: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    key: str | None = None
    who: str = ""
    admin: bool = False

    def read(self, model: type[M]) -> M:
        """Return the parameters as a model.

        Raises:
            RequestError: an unknown name, one in both places, or a value that the model refuses.
        """
        return read_model(model, self._values(kinds_of(model)))

    def fields(self, kinds: ParameterKinds) -> Fields:
        """Return the parameters of query and body together.

        Raises ``RequestError``: an unknown name, one in both places, or a text of another type.
        """
        return Fields(self._values(kinds))

    def _values(self, kinds: ParameterKinds) -> JsonObject:
        body = parse_object(self.body) if self.body.strip() else {}
        Fields(body).only(kinds)
        asked = _from_query(self.query, kinds)
        for name in asked:
            if name in body:
                raise RequestError(f"'{name}' is in the query and in the body.", name)
        return {**asked, **body}


def kinds_of(model: type[RequestModel]) -> ParameterKinds:
    """Return the kind of each parameter: the one its type names, or that of its JSON Schema."""
    schemas = model.properties()
    return {
        key: _stated(model, name) or _KIND_OF_TYPE.get(_type_of(schemas[key]), ParameterKind.JSON)
        for key, name in model.keys().items()
    }


def _stated(model: type[RequestModel], name: str) -> ParameterKind | None:
    metadata = model.model_fields[name].metadata
    return next((one for one in metadata if isinstance(one, ParameterKind)), None)


def _type_of(schema: JsonObject) -> str:
    return "boolean" if isinstance(schema.get("const"), bool) else str(schema.get("type"))


def read_key(header: str | None) -> str | None:
    """Return the value of an Idempotency-Key header. Raises ``RequestError``."""
    if header is None or _KEY.fullmatch(header):
        return header
    raise RequestError(
        f"Invalid 'Idempotency-Key': it has 1 to {MAX_KEY_CHARS} printable ASCII characters "
        "without spaces.",
        "Idempotency-Key",
    )


def _from_query(pairs: tuple[tuple[str, str], ...], kinds: ParameterKinds) -> JsonObject:
    texts: dict[str, list[str]] = {}
    for name, text in pairs:
        texts.setdefault(name, []).append(text)
    Fields(texts).only(kinds)
    return {name: _value(name, given, kinds[name]) for name, given in texts.items()}


def _value(name: str, given: list[str], kind: ParameterKind) -> Any:
    if kind is ParameterKind.TEXTS:
        return [one for text in given for one in text.split(",")]
    if len(given) > 1:
        raise RequestError(f"'{name}' is in the query {len(given)} times.", name)
    (text,) = given
    if kind is ParameterKind.TEXT:
        return text
    if kind is ParameterKind.JSON:
        return _json(name, text)
    if kind is ParameterKind.FLAG:
        if text.lower() not in _FLAGS:
            raise RequestError(
                f"Invalid '{name}': expected true or false, got {quoted(text)}.", name
            )
        return _FLAGS[text.lower()]
    return _number(name, text)


def _json(name: str, text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        raise RequestError(
            f"Invalid '{name}': in a query it is JSON, got {quoted(text)}.", name
        ) from None


def _number(name: str, text: str) -> int | float:
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError:
        found = None
    if isinstance(found, int | float) and not isinstance(found, bool):
        return found
    raise RequestError(f"Invalid '{name}': expected a number, got {quoted(text)}.", name)


class ModelQuery(RequestModel):
    """Query of a call about one model, or about all."""

    model: Name | None = Field(None, description="Only this model; all without it.")


class ListQuery(RequestModel):
    """Query of a list of the latest records."""

    limit: int | None = Field(None, ge=1, le=MAX_LISTED, description="The default is 100.")


class WorldSizeQuery(RequestModel):
    """Query of GET /get_world_size."""

    include_dp: bool = Field(False, description="vLLM's.")


class NoParameters(RequestModel):
    """No parameters at all."""
