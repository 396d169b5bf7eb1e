"""The description of an endpoint, which stands at its route, and the OpenAPI document of all.

``Routes`` adds routes with their descriptions (access, bodies, answers, an example) to the
application. ``document`` makes the OpenAPI document of the descriptions of all routes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.routing import Match, Route
from starlette.types import Scope

from rkserve import __version__
from rkserve.api.common.output import AnthropicErrorAnswer, ErrorAnswer, OllamaErrorAnswer
from rkserve.api.json.fields import MAX_KEY_CHARS
from rkserve.api.json.schemas import REF, Example, RequestModel, json_schemas
from rkserve.core.errors import BoardStartFailed, ConfigError, RkserveError
from rkserve.http.auth import Access, check_listener

JSON = "application/json"
OCTETS = "application/octet-stream"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
PLAIN = "text/plain"
OK = 200
# Values of the examples, which are answered by a cluster fresh from ``make demo``.
SERVICE = "Service"
SIM, EMBED = "sim-chat", "sim-embed"
HELLO = [{"role": "user", "content": "Hello"}]
PUSHED_ADAPTER = (
    "an adapter of that name in the cluster: `rkserve sim adapter adapter.rkllm` and "
    "`rkserve lora push adapter.rkllm --name tone --version v1`"
)
# The tags of the document, and the order of their chapters in the reference.
TAGS = (
    *("OpenAI", "Vectors and ranks", "Tokens", "Gradio", "RKLLM", "Anthropic", "Ollama"),
    *("Trainers", "Generations", "Caches", "Boards", "Cluster", "Operations", "Adapters"),
    *("Weights", "Catalogue", "Keys", "Service", "Pages"),
)


OPEN, INFER, CONTROL, LIST, READ, FIGURES, OPERATE, ADMIN = Access


class ErrorShape(Enum):
    """The error object of an endpoint, by the name of its schema."""

    OPENAI = "Error"
    ANTHROPIC = "AnthropicError"
    OLLAMA = "OllamaError"


STATUSES = {
    400: "The request cannot be served as it was sent.",
    401: "The call needs an API key, or the key is unknown, revoked or expired.",
    403: "The key does not have the scope of the call, or is for other models; without such a key "
    "the call has to come from the Router's own machine; or a web page of another origin made it.",
    404: "What the request names does not exist.",
    405: "The path has other methods.",
    408: "The body did not arrive in time.",
    409: "The state of things does not allow it; nothing was changed.",
    413: "The body is longer than the configured limit.",
    415: "The body is not JSON by its headers, or compressed.",
    421: "The request is addressed to a host name that is not in the allow-list.",
    422: "Boards failed while they worked on this request, and no other one is asked.",
    429: "Too much at once; `retry-after` says when to come back.",
    500: "A hook of the operator's failed while the answer was generated.",
    502: "The runtime refused or ended this run.",
    503: "No board can serve it now; `retry-after` says when to come back.",
    504: "It was not done in time.",
    507: "A disk has no room for it.",
}
# Statuses of errors, beside those of access and of bodies, which follow from the description.
GENERATION = (404, 409, 422, 429, 500, 502, 503, 504)  # of calls that a board answers
ASK = (404, 503)  # of calls that ask boards about what they have
CHANGE = (404, 409, 503, 504)  # of calls that the Coordinator carries out
_NAME = {"type": "string", "minLength": 1}
_BODY = (400, 408, 413, 415)
_ALWAYS = (403, 421)  # requests by other sites' pages, and to other host names
# Of each call that needs a key: a wrong one, too many wrong ones, and keys that are not known yet.
_OF_KEYS = (400, 401, 403, 429, 503)


@dataclass(frozen=True)
class EndpointParameter:
    """One parameter of the ``path``, the ``query`` or a ``header``.

    ``schema`` is a type, or a JSON Schema.
    """

    name: str
    place: str
    schema: Any
    says: str
    required: bool = False


@dataclass(frozen=True)
class RequestBody:
    """The body of a request: a type by media type."""

    content: Mapping[str, Any]
    required: bool = True


@dataclass(frozen=True)
class EndpointAnswer:
    """The answer of a status other than an error: a type by media type, none without a body.

    ``pieces`` holds the types of single events or lines of a stream, by media type.
    """

    status: int
    says: str
    content: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Endpoint:
    """One method of one path. ``errors`` are the statuses of its error objects; ``operators``
    marks a call without a key that is for operators nevertheless. ``named`` are parameters beside
    those of the ``queries``: models whose keys may be in the query, each with the keys it needs.
    """

    method: str
    path: str
    tag: str
    summary: str
    access: Access
    answers: tuple[EndpointAnswer, ...]
    errors: tuple[int, ...] = ()
    named: tuple[EndpointParameter, ...] = ()
    queries: tuple[tuple[type[RequestModel], tuple[str, ...]], ...] = ()
    body: RequestBody | None = None
    example: Example = field(default_factory=Example)
    says: str = ""
    operators: bool = False

    @cached_property  # the document knows a schema by its identity
    def parameters(self) -> tuple[EndpointParameter, ...]:
        """All parameters. Their schemas are made here: a Router's start needs none of them."""
        queried = (one for model, needed in self.queries for one in in_query(model, needed))
        return (*self.named, *queried)

    @property
    def is_control(self) -> bool:
        """True if the control port alone answers it, where there is one."""
        return self.operators or self.access.is_control

    @property
    def name(self) -> str:
        """A unique name in letters and digits."""
        parts = self.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
        return "_".join([self.method.lower(), *(part for part in parts if part)])

    @property
    def shape(self) -> ErrorShape:
        """The error object, which the path decides."""
        if self.path.startswith("/v1/messages"):
            return ErrorShape.ANTHROPIC
        return ErrorShape.OLLAMA if self.path.startswith("/api/") else ErrorShape.OPENAI


KEY = EndpointParameter(
    "idempotency-key",
    "header",
    {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}$"},
    "A repeat with the same key is answered as the first call.",
)


def returns(
    schema: Any, says: str = "Done.", status: int = OK, headers: Mapping[str, str] | None = None
) -> EndpointAnswer:
    """An answer in JSON."""
    return EndpointAnswer(status, says, {JSON: schema}, headers or {})


H = TypeVar("H", bound=Callable[..., Any])


class DescribedRoute(Route):
    """A route whose handler takes the request and the parameters of the path.

    FastAPI's own routes would read the rest of a request by the handler's signature, too. Handlers
    do so themselves, with the errors of their dialects.
    """

    def __init__(
        self, path: str, handler: Callable[..., Any], methods: list[str], description: Endpoint
    ) -> None:
        is_control = description.is_control

        async def answer(request: Request) -> Any:
            if is_control:
                check_listener(request)
            request.app.state.gate.admit(request, description.access)
            return await handler(request, **request.path_params)

        super().__init__(path, answer, methods=methods)
        self.methods = set(methods)  # HEAD where it is named, not wherever GET is
        self.handler, self.description = handler, description

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how well the route matches; metrics count by the route of the scope."""
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class Routes:
    """The decorators of an application's routes of one tag."""

    def __init__(self, app: FastAPI, tag: str) -> None:
        self._app, self._tag = app, tag

    def __call__(
        self,
        call: str,
        access: Access,
        *answers: EndpointAnswer,
        summary: str = "",
        errors: tuple[int, ...] = (),
        paths: Mapping[str, str] | None = None,
        query: type[RequestModel] | None = None,
        body: type[RequestModel] | None = None,
        asked: type[RequestModel] | None = None,
        file: bool = False,
        may_be_empty: bool = False,
        headers: tuple[EndpointParameter, ...] = (),
        example: Example | None = None,
        says: str = "",
        operators: bool = False,
    ) -> Callable[[H], H]:
        """Return the decorator of a route's handler. ``call`` is as in ``GET,HEAD /ready /live``.

        The summary is the first paragraph of the handler's docstring, unless it is given.
        ``errors`` lack those statuses that follow from ``access`` and from the presence of a body.
        ``paths`` has the meanings of the parameters of the path. ``asked`` are parameters that may
        be in the query or in a body that may be left out, as one with ``may_be_empty``; with
        ``file`` the body may be a file instead. ``operators`` is that of the endpoint.
        """
        methods, *routes = call.split()
        named = [
            EndpointParameter(name, "path", _NAME, meaning, required=True)
            for name, meaning in (paths or {}).items()
        ]
        queried = [(query, () if body else query.needed())] if query else []
        either = [(asked, ())] if asked else []
        taken = body or asked
        of_keys = () if access is Access.OPEN else _OF_KEYS
        content = {JSON: taken, **({OCTETS: bytes} if file else {})}
        made = Endpoint(
            "",
            "",
            self._tag,
            summary,
            access,
            answers,
            tuple(sorted({*errors, *of_keys, *(_BODY if taken else ())})),
            (*headers, *named),
            (*queried, *either),
            RequestBody(content, not (may_be_empty or asked)) if taken else None,
            example or Example(),
            says,
            operators,
        )

        def add(handler: H) -> H:
            for path in routes:
                self._app.router.routes.append(
                    DescribedRoute(path, handler, methods.split(","), made)
                )
            return handler

        return add


def in_query(
    model: type[RequestModel], needed: Collection[str] = ()
) -> Iterator[EndpointParameter]:
    """Yield the keys of a model as parameters of the query, where lists are JSON or have commas."""
    for name, schema in model.properties().items():
        says = schema.get("description", "As in the body.")
        kind = {key: value for key, value in schema.items() if key != "description"}
        if "anyOf" in kind or kind.get("type") == "array":
            kind = {"type": "string"}
        yield EndpointParameter(name, "query", kind, says, name in needed)


def endpoints(app: FastAPI) -> tuple[Endpoint, ...]:
    """Return the endpoints of all described routes, in the order of their tags."""
    found = []
    for route in app.routes:
        if not isinstance(route, DescribedRoute):
            continue
        made, doc = route.description, inspect.getdoc(route.handler) or ""
        path = route.path.replace(":path}", "}")
        summary = made.summary or " ".join(doc.partition("\n\n")[0].split())
        for method in sorted(route.methods or ()):
            one = replace(made, method=method, path=path, summary=summary)
            found.append(_without_body(one) if method == "HEAD" else one)
    return tuple(sorted(found, key=lambda one: TAGS.index(one.tag)))


def _without_body(one: Endpoint) -> Endpoint:
    answers = tuple(replace(answer, content={}, pieces={}) for answer in one.answers)
    return replace(one, answers=answers)


def meaning_of(status: int) -> str:
    """Return the meaning of a status of errors, with its codes."""
    codes = ", ".join(f"`{code}`" for code in codes_of(status))
    return f"{STATUSES[status]} Codes: {codes}." if codes else STATUSES[status]


def errors_of(one: Endpoint) -> list[int]:
    """Return the statuses of an endpoint's errors, with those of every call."""
    return sorted({*one.errors, *_ALWAYS})


def codes_of(status: int) -> list[str]:
    """Return the codes that come with a status, from the error tree."""
    # Errors that prevent a start are no answers.
    tree = {*_tree(RkserveError)} - {BoardStartFailed, ConfigError}
    return sorted({one.code for one in tree if one.http_status == status and one.code})


def _tree(parent: type[RkserveError]) -> Iterator[type[RkserveError]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _tree(child)


Json = dict[str, Any]
OPENAPI = "3.1.0"
_BEARER, _API_KEY = "apiKey", "anthropicKey"
# A client needs no key where the service is open, and this machine none where no key may operate.
_WITH_KEY: list[Json] = [{_BEARER: []}, {_API_KEY: []}, {}]
_ERRORS = (ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer)


def document(app: FastAPI) -> Json:
    """Return the OpenAPI document of a Router's application."""
    return ApiDescription(app).document()


class ApiDescription:
    """The endpoints of an application, and the JSON Schemas of their types.

    ``schemas`` are those that have names.
    """

    def __init__(self, app: FastAPI) -> None:
        self.endpoints = endpoints(app)
        types = [one for endpoint in self.endpoints for one in _types(endpoint)]
        found, self.schemas = json_schemas([*types, *_ERRORS])
        self._found = {id(one): schema for one, schema in zip(types, found, strict=False)}

    def schema(self, of: Any) -> Json:
        """Return the JSON Schema of a type of an endpoint."""
        return self._found[id(of)]

    def document(self) -> Json:
        """Return the OpenAPI document."""
        paths: dict[str, Json] = {}
        for one in self.endpoints:
            paths.setdefault(one.path, {})[one.method.lower()] = self._operation(one)
        return {
            "openapi": OPENAPI,
            "info": {
                "title": "rkserve",
                "version": __version__,
                "description": "An OpenAI-compatible service for clusters of Rockchip boards.",
            },
            "tags": [{"name": tag} for tag in dict.fromkeys(one.tag for one in self.endpoints)],
            "paths": paths,
            "components": {
                "schemas": self.schemas,
                "responses": {
                    f"{shape.value}{status}": _refusal(shape, status)
                    for shape in ErrorShape
                    for status in sorted(STATUSES)
                },
                "securitySchemes": {
                    _BEARER: {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "An API key with one of the call's scopes (`x-scopes`), "
                        "or the admin key.",
                    },
                    _API_KEY: {
                        "type": "apiKey",
                        "in": "header",
                        "name": "x-api-key",
                        "description": "The same, as Anthropic's clients send it.",
                    },
                },
            },
        }

    def _operation(self, one: Endpoint) -> Json:
        made: Json = {
            "operationId": one.name,
            "tags": [one.tag],
            "summary": one.summary,
            "responses": {
                **{str(answer.status): self._answer(answer) for answer in one.answers},
                **{str(status): _error(one, status) for status in errors_of(one)},
            },
            "security": [] if one.access is Access.OPEN else _WITH_KEY,
            "x-scopes": [scope.value for scope in one.access.value],
            "x-control-port": one.is_control,
        }
        if one.says:
            made["description"] = one.says
        if one.parameters:
            made["parameters"] = [self._parameter(each, one) for each in one.parameters]
        if one.body is not None:
            made["requestBody"] = self._body(one.body, one)
        return made

    def _answer(self, answer: EndpointAnswer) -> Json:
        made: Json = {"description": answer.says}
        if answer.content:
            made["content"] = {
                media: {
                    "schema": self.schema(of),
                    # What OpenAPI calls itemSchema from 3.2 on.
                    **(
                        {"x-item-schema": self.schema(answer.pieces[media])}
                        if media in answer.pieces
                        else {}
                    ),
                }
                for media, of in answer.content.items()
            }
        if answer.headers:
            made["headers"] = {
                name: {"description": says, "schema": {"type": "string"}}
                for name, says in answer.headers.items()
            }
        return made

    def _parameter(self, each: EndpointParameter, one: Endpoint) -> Json:
        given = {"path": one.example.path, "query": one.example.query}.get(each.place, {})
        example = {"example": given[each.name]} if each.name in given else {}
        return {
            "name": each.name,
            "in": each.place,
            "required": each.required,
            "description": each.says,
            "schema": self.schema(each.schema),
            **example,
        }

    def _body(self, body: RequestBody, one: Endpoint) -> Json:
        content = {media: {"schema": self.schema(of)} for media, of in body.content.items()}
        if JSON in content and one.example.body is not None:
            content[JSON]["example"] = one.example.body
        return {"required": body.required, "content": content}


def _types(one: Endpoint) -> Iterator[Any]:
    for answer in one.answers:
        yield from (*answer.content.values(), *answer.pieces.values())
    yield from (each.schema for each in one.parameters)
    if one.body is not None:
        yield from one.body.content.values()


def _error(one: Endpoint, status: int) -> Json:
    if one.method == "HEAD":  # an answer to it has no body
        return {"description": meaning_of(status)}
    return {"$ref": f"#/components/responses/{one.shape.value}{status}"}


def _refusal(shape: ErrorShape, status: int) -> Json:
    schema = {"$ref": f"{REF}{shape.value}"}
    return {"description": meaning_of(status), "content": {JSON: {"schema": schema}}}
