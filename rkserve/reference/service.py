"""Endpoints about the Router itself: health, metrics, the document, and the chat page."""

from __future__ import annotations

from rkserve.reference.endpoints import (
    OK,
    PLAIN,
    Access,
    Endpoint,
    EndpointAnswer,
    Example,
    in_header,
    in_path,
    told,
)
from rkserve.reference.shapes import ANYTHING, TEXT, Schema, const, obj, ref

_SERVICE, _PAGE = "Service", "Chat page"
HTML, CSS, SCRIPT, SVG = "text/html", "text/css", "text/javascript", "image/svg+xml"

SCHEMAS: dict[str, Schema] = {
    "Health": obj({"status": const("ok"), "version": TEXT}),
    "Ready": obj({"status": const("ready")}),
}


def _both(path: str, summary: str, schema: str, errors: tuple[int, ...]) -> tuple[Endpoint, ...]:
    return (
        Endpoint(
            "GET",
            path,
            _SERVICE,
            summary,
            Access.OPEN,
            (told(ref(schema), says=summary),),
            errors,
        ),
        Endpoint(
            "HEAD", path, _SERVICE, summary, Access.OPEN, (EndpointAnswer(OK, summary),), errors
        ),
    )


_TAGGED = {"etag": "What tells this content from another."}
_KNOWN = in_header("if-none-match", TEXT, "The `etag` that is known already.")
_SAME = EndpointAnswer(304, "It is the one that is known already.")


def _file(path: str, summary: str, types: tuple[str, ...], name: str = "") -> tuple[Endpoint, ...]:
    here = (in_path("name", "The name of the file."),) if name else ()
    errors = (404,) if name else ()
    example = Example(path={"name": name} if name else {})
    whole = EndpointAnswer(OK, "The file.", dict.fromkeys(types, TEXT), _TAGGED)
    return tuple(
        Endpoint(
            method,
            path,
            _PAGE,
            summary,
            Access.OPEN,
            (
                whole if method == "GET" else EndpointAnswer(OK, "What the file is.", {}, _TAGGED),
                _SAME,
            ),
            errors,
            (*here, _KNOWN),
            example=example,
        )
        for method in ("GET", "HEAD")
    )


_ALIVE = EndpointAnswer(OK, "An empty answer.")
ENDPOINTS = (
    *_both("/health", "Say that the Router lives.", "Health", ()),
    *_both("/ready", "Say whether every model has a board that serves.", "Ready", (503,)),
    *(
        Endpoint(method, "/ping", _SERVICE, "Say that the Router lives.", Access.OPEN, (_ALIVE,))
        for method in ("GET", "POST")
    ),
    Endpoint(
        "GET",
        "/version",
        _SERVICE,
        "Say which release this is, in vLLM's words.",
        Access.OPEN,
        (told(obj({"version": TEXT}), says="The release."),),
    ),
    Endpoint(
        "GET",
        "/health_generate",
        _SERVICE,
        "Say that every model has a board that generates, in SGLang's words.",
        Access.OPEN,
        (_ALIVE,),
        (503,),
    ),
    Endpoint(
        "GET",
        "/metrics",
        _SERVICE,
        "Export the metrics in Prometheus' text format.",
        Access.OPEN,
        (EndpointAnswer(OK, "The metrics.", {PLAIN: TEXT}),),
    ),
    Endpoint(
        "GET",
        "/openapi.json",
        _SERVICE,
        "Describe all of these calls.",
        Access.OPEN,
        (told(ANYTHING, says="This document."),),
    ),
)
PAGE = (
    *_file("/", "Send the chat page.", (HTML,)),
    *_file("/page/{name}", "Send one of the page's files.", (HTML, CSS, SCRIPT, SVG), "main.js"),
)
