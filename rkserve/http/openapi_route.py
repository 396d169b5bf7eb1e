"""The route of the OpenAPI document, for anybody: there is no secret in it."""

from __future__ import annotations

import asyncio
import json
from functools import cache

from fastapi import FastAPI
from fastapi.responses import Response


def add_reference(app: FastAPI, *, page: bool) -> None:
    """Add the route; ``page`` says whether there is a chat page.

    The document is written when somebody asks for it first: declaring it all takes longer than a
    Router may take for its start, or its loop for anything.
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
