"""Routes of the head's catalogue: a model is uploaded as an index, and then in pieces."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.admin import catalog
from rkserve.api.admin.query import ControlRequest
from rkserve.api.json.schemas import Example
from rkserve.http.auth import may_administer, who_of
from rkserve.http.bodies import body_of, query_of, read_parts
from rkserve.http.openapi import OCTETS, OPERATE, READ, Routes, returns
from rkserve.models.index import PIECE_MAX_BYTES
from rkserve.router.features.catalog import Catalog
from rkserve.router.service import Service

MODELS = "/v1/catalog/models"
CHANGE = (404, 409, 503, 507)
BEGIN = (400, 403, 404, 409, 422, 503, 507)
NAME = {"name": "The model."}
VERSION = "0" * 64
PUSH = "a model of your own: `rkserve model push` makes these calls"
BEGUN = Example(
    {
        "name": "chat",
        "piece_bytes": 4194304,
        "files": [{"path": "model.rkllm", "bytes": 5, "sha256": VERSION, "pieces": [VERSION]}],
    },
    needs=PUSH,
)
PIECE = Example(
    path={"name": "chat"},
    query={"version": VERSION, "path": "model.rkllm", "number": "0"},
    headers={"content-type": OCTETS},
    file="piece.bin",
    needs=PUSH,
)
PREFETCH = Example({"again": True}, path={"name": "chat"}, needs=PUSH)
ENDED = Example(path={"name": "chat"}, query={"version": VERSION}, needs=PUSH)


def add_catalog(app: FastAPI, service: Service) -> None:
    """Add the routes to the Router's application."""
    route, models = Routes(app, "Catalogue"), Catalog(service)

    @route(
        f"GET {MODELS}",
        READ,
        returns(catalog.CatalogAnswer, "Every model."),
        errors=(503,),
    )
    async def listed(_: Request) -> Response:
        """List the models of the head's catalogue, and the boards that have or fetch a copy."""
        return JSONResponse(await models.listed())

    @route(
        f"POST {MODELS}",
        OPERATE,
        returns(catalog.UploadAnswer, "What is missing; of a model that is there, nothing."),
        errors=BEGIN,
        body=catalog.PushBody,
        example=BEGUN,
        says="The same call resumes an upload that was cut off.",
    )
    async def begin(request: Request) -> Response:
        """Begin the upload of a model by its index."""
        body = await body_of(service, request)
        who, admin = who_of(request), may_administer(request)
        asked = ControlRequest(query_of(request), body, who=who, admin=admin)
        return JSONResponse(await models.begin(asked))

    @route(
        f"PUT {MODELS}/{{name}}/pieces",
        OPERATE,
        returns(catalog.PieceAnswer, "It is on the head."),
        errors=(400, *CHANGE),
        paths=NAME,
        query=catalog.PieceQuery,
        example=PIECE,
        says="The body is the piece. Those of a file come in order, unless they were damaged.",
    )
    async def piece(request: Request, name: str) -> Response:
        """Upload a piece of a model."""
        asked = ControlRequest(query_of(request))
        limit_s = service.config.body_timeout_s
        parts = read_parts(request, PIECE_MAX_BYTES, limit_s, PIECE_MAX_BYTES)
        data = b"".join([part async for part in parts])
        return JSONResponse({"received_bytes": await models.piece(asked, name, data)})

    @route(
        f"POST {MODELS}/{{name}}/complete",
        OPERATE,
        returns(catalog.UploadAnswer, "It is in the catalogue; or damaged pieces are missing."),
        errors=(400, *CHANGE),
        paths=NAME,
        query=catalog.VersionQuery,
        example=ENDED,
    )
    async def complete(request: Request, name: str) -> Response:
        """Verify the upload of a model, and put it into the catalogue."""
        return JSONResponse(await models.end(ControlRequest(query_of(request)), name))

    @route(
        f"POST {MODELS}/{{name}}/prefetch",
        OPERATE,
        returns(catalog.PrefetchAnswer, "How far each node is."),
        errors=(404, 503),
        paths=NAME,
        body=catalog.PrefetchBody,
        example=PREFETCH,
        says="It answers at once, and the boards go on; the same call shows their progress.",
    )
    async def prefetch(request: Request, name: str) -> Response:
        """Have the nodes fetch a model of the catalogue before it is deployed."""
        body = await body_of(service, request)
        asked = ControlRequest(query_of(request), body)
        return JSONResponse(await models.prefetch(asked, name))
