"""The OpenAPI document of an application, which is made of the descriptions of its routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from rkserve import __version__
from rkserve.api.common.output import AnthropicErrorAnswer, ErrorAnswer, OllamaErrorAnswer
from rkserve.api.json.schemas import REF, json_schemas
from rkserve.http.endpoints import (
    JSON,
    STATUSES,
    Access,
    Endpoint,
    EndpointAnswer,
    EndpointParameter,
    ErrorShape,
    RequestBody,
    endpoints,
    errors_of,
    meaning_of,
)

Json = dict[str, Any]
OPENAPI = "3.1.0"
_BEARER, _API_KEY, _ADMIN = "apiKey", "anthropicKey", "adminKey"
_SECURITY: dict[Access, list[Json]] = {
    Access.OPEN: [],
    # Where no keys are configured a client needs none.
    Access.CLIENT: [{_BEARER: []}, {_API_KEY: []}, {}],
    # Without an admin key these calls are taken from the Router's own machine.
    Access.OPERATOR: [{_ADMIN: []}, {}],
}
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
                        "description": "A key of `router.api_keys_file`, where keys are "
                        "configured.",
                    },
                    _API_KEY: {
                        "type": "apiKey",
                        "in": "header",
                        "name": "x-api-key",
                        "description": "The same, as Anthropic's clients send it.",
                    },
                    _ADMIN: {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "The admin key; without one, such calls are taken from "
                        "the Router's own machine only.",
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
            "security": _SECURITY[one.access],
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
