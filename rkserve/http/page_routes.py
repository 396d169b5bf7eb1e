"""Routes of the chat page and of the OpenAPI document. Both are public: they contain no secrets."""

from __future__ import annotations

import asyncio
import json
from functools import cache

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rkserve.core.errors import RouteNotFound
from rkserve.page import FRONT, PageFile, page_files


def add_page(app: FastAPI) -> None:
    """Add the page's routes. The files are read once."""
    found = page_files()

    @app.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        """Send the page."""
        return _send(request, found[FRONT])

    @app.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(request: Request, name: str) -> Response:
        """Send one of the page's files."""
        if name not in found:
            raise RouteNotFound(f"There is nothing at {request.url.path}.")
        return _send(request, found[name])


def _send(request: Request, file: PageFile) -> Response:
    form = file.form(gzip_accepted=_accepts_gzip(request.headers.get("accept-encoding", "")))
    known = request.headers.get("if-none-match", "")
    if form.headers["etag"] in known:  # a proxy may have made it a weak one, or sent several
        return Response(status_code=304, headers={**form.headers})
    return Response(form.content, headers={**form.headers})


def _accepts_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip with a weight above zero."""
    weights: dict[str, str] = {}
    for one in accepted.lower().split(","):
        coding, *parameters = [part.strip() for part in one.split(";")]
        weights[coding] = next((p[2:] for p in parameters if p.startswith("q=")), "1")
    weight = weights.get("gzip", weights.get("*", "0"))
    return bool(weight.strip("0."))


def add_reference(app: FastAPI, *, page: bool) -> None:
    """Add the route of the OpenAPI document; ``page``: the chat page is served, too.

    The document is built on first use, because that takes longer than a Router's start or its event
    loop may be blocked.
    """

    @app.get("/openapi.json")
    async def openapi() -> Response:
        """Describe all calls."""
        written = await asyncio.to_thread(_written, page)
        return Response(written, media_type="application/json")


@cache
def _written(page: bool) -> bytes:
    from rkserve.reference.document import document  # late, see above

    return json.dumps(document(page=page), separators=(",", ":")).encode()
