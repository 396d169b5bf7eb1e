"""The route of the OpenAPI document, for anybody: there is no secret in it."""

from __future__ import annotations

import json

from fastapi import FastAPI
from fastapi.responses import Response

from rkserve.reference.document import document


def add_reference(app: FastAPI, *, page: bool) -> None:
    """Add the route. The document is written once; ``page`` says whether there is a chat page."""
    written = json.dumps(document(page=page), separators=(",", ":")).encode()

    @app.get("/openapi.json")
    async def openapi() -> Response:
        """Describe all calls."""
        return Response(written, media_type="application/json")
