"""The declaration as an OpenAPI document, which is what ``/openapi.json`` answers."""

from __future__ import annotations

from typing import Any

from rkserve import __version__
from rkserve.reference import failures
from rkserve.reference.endpoints import (
    JSON,
    Access,
    Endpoint,
    EndpointAnswer,
    EndpointParameter,
    ErrorShape,
    RequestBody,
)
from rkserve.reference.shapes import TEXT, Schema, ref
from rkserve.reference.table import SCHEMAS, endpoints

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


def document(*, page: bool = True) -> Json:
    """Return the OpenAPI document of a Router, with or without its chat page."""
    found = endpoints(page=page)
    paths: dict[str, Json] = {}
    for one in found:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "rkserve",
            "version": __version__,
            "description": "An OpenAI-compatible service for clusters of Rockchip boards.",
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(one.tag for one in found)],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "responses": {
                f"{shape.value}{status}": _refusal(shape, status)
                for shape in ErrorShape
                for status in failures.statuses()
            },
            "securitySchemes": {
                _BEARER: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of `router.api_keys_file`, where keys are configured.",
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
                    "description": "The admin key; without one, such calls are taken from the "
                    "Router's own machine only.",
                },
            },
        },
    }


def _operation(one: Endpoint) -> Json:
    made: Json = {
        "operationId": one.name,
        "tags": [one.tag],
        "summary": one.summary,
        "responses": {
            **{str(answer.status): _answer(answer) for answer in one.answers},
            **{str(status): _error(one, status) for status in sorted({*one.errors, *failures.ANY})},
        },
        "security": _SECURITY[one.access],
    }
    if one.says:
        made["description"] = one.says
    if one.parameters:
        made["parameters"] = [_parameter(each, one) for each in one.parameters]
    if one.body is not None:
        made["requestBody"] = _body(one.body, one)
    return made


def _error(one: Endpoint, status: int) -> Json:
    if one.method == "HEAD":  # an answer to it has no body
        return {"description": failures.about(status)}
    return {"$ref": f"#/components/responses/{one.shape.value}{status}"}


def _refusal(shape: ErrorShape, status: int) -> Json:
    schema: Schema = ref(shape.value)
    return {"description": failures.about(status), "content": {JSON: {"schema": schema}}}


def _answer(answer: EndpointAnswer) -> Json:
    made: Json = {"description": answer.says}
    if answer.content:
        made["content"] = {
            media: {
                "schema": schema,
                # What OpenAPI calls itemSchema from 3.2 on.
                **({"x-item-schema": piece} if (piece := answer.pieces.get(media)) else {}),
            }
            for media, schema in answer.content.items()
        }
    if answer.headers:
        made["headers"] = {
            name: {"description": says, "schema": TEXT} for name, says in answer.headers.items()
        }
    return made


def _parameter(each: EndpointParameter, one: Endpoint) -> Json:
    given = {"path": one.example.path, "query": one.example.query}.get(each.place, {})
    example = {"example": given[each.name]} if each.name in given else {}
    return {
        "name": each.name,
        "in": each.place,
        "required": each.required,
        "description": each.says,
        "schema": each.schema,
        **example,
    }


def _body(body: RequestBody, one: Endpoint) -> Json:
    return {
        "required": body.required,
        "content": {
            media: {
                "schema": schema,
                **(
                    {"example": one.example.body}
                    if media == JSON and one.example.body is not None
                    else {}
                ),
            }
            for media, schema in body.content.items()
        },
    }
