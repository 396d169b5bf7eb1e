"""The declaration of an endpoint: access, parameters, body, answers and an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rkserve.reference.shapes import Schema

JSON = "application/json"
OCTETS = "application/octet-stream"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
PLAIN = "text/plain"
OK = 200
PUSHED_ADAPTER = (
    "an adapter of that name in the cluster: `rkserve sim adapter adapter.rkllm` and "
    "`rkserve lora push adapter.rkllm --name tone --version v1`"
)


class _Access(Enum):
    """The callers that an endpoint admits."""

    OPEN = "anybody"
    CLIENT = "a client"
    OPERATOR = "the operator"


Access = _Access  # until the last description is at its route


class _ErrorShape(Enum):
    """The error object of an endpoint, by the name of its schema."""

    OPENAI = "Error"
    ANTHROPIC = "AnthropicError"
    OLLAMA = "OllamaError"


ErrorShape = _ErrorShape  # until the last description is at its route


@dataclass(frozen=True)
class _EndpointParameter:
    """One parameter of the ``path``, the ``query`` or a ``header``."""

    name: str
    place: str
    schema: Schema
    says: str
    required: bool = False


EndpointParameter = _EndpointParameter  # until the last description is at its route


@dataclass(frozen=True)
class _RequestBody:
    """The body of a request: a schema by media type."""

    content: Mapping[str, Schema]
    required: bool = True


RequestBody = _RequestBody  # until the last description is at its route


@dataclass(frozen=True)
class _EndpointAnswer:
    """The answer of a status other than an error: a schema by media type, none without a body.

    ``pieces`` holds the schemas of single events or lines of a stream, by media type.
    """

    status: int
    says: str
    content: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, Schema] = field(default_factory=dict)


EndpointAnswer = _EndpointAnswer  # until the last description is at its route


@dataclass(frozen=True)
class _Example:
    """One call. ``path`` are the values of its parameters; ``file`` is a body from a file.

    ``needs`` is what a cluster fresh from ``make demo`` lacks for it.
    """

    body: Any = None
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    file: str | None = None
    status: int = OK
    needs: str = ""


Example = _Example  # until the last description is at its route


@dataclass(frozen=True)
class _Endpoint:
    """One method of one path. ``errors`` are the statuses of its error objects."""

    method: str
    path: str
    tag: str
    summary: str
    access: Access
    answers: tuple[EndpointAnswer, ...]
    errors: tuple[int, ...] = ()
    parameters: tuple[EndpointParameter, ...] = ()
    body: RequestBody | None = None
    example: Example = field(default_factory=Example)
    says: str = ""
    shape: ErrorShape = ErrorShape.OPENAI

    @property
    def name(self) -> str:
        """A unique name in letters and digits."""
        parts = self.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
        return "_".join([self.method.lower(), *(part for part in parts if part)])


Endpoint = _Endpoint  # until the last description is at its route


def told(
    schema: Schema, status: int = OK, says: str = "Done.", headers: Mapping[str, str] | None = None
) -> EndpointAnswer:
    """An answer in JSON."""
    return EndpointAnswer(status, says, {JSON: schema}, headers or {})


def in_path(name: str, says: str) -> EndpointParameter:
    """A parameter of the path."""
    return EndpointParameter(name, "path", {"type": "string", "minLength": 1}, says, required=True)


def in_query(name: str, schema: Schema, says: str) -> EndpointParameter:
    """A parameter of the query string, which may be left out."""
    return EndpointParameter(name, "query", schema, says)


def in_header(name: str, schema: Schema, says: str) -> EndpointParameter:
    """A header, which may be left out."""
    return EndpointParameter(name, "header", schema, says)


def in_json(schema: Schema, *, required: bool = True) -> RequestBody:
    """A body in JSON."""
    return RequestBody({JSON: schema}, required)
