"""Calls for the head's catalogue: uploads of models in pieces, and the list with their copies."""

from __future__ import annotations

from rkserve.api.admin.catalog import (
    CatalogAnswer,
    PieceQuery,
    PushBody,
    UploadAnswer,
    VersionQuery,
    copies,
    upload_answer,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.router.service import Service


class Catalog:
    """The models of the head that boards fetch."""

    def __init__(self, service: Service) -> None:
        self._cluster = service.cluster
        self._fleet = service.fleet

    async def listed(self) -> CatalogAnswer:
        """List the models of the catalogue, and the boards that have or fetch them."""
        return {
            "models": [
                {
                    "name": name,
                    "version": version,
                    "bytes": size,
                    "copies": copies(self._fleet.reports(name)),
                }
                for name, version, size in await self._cluster.catalog_models()
            ]
        }

    async def begin(self, asked: ControlRequest) -> UploadAnswer:
        """Begin an upload, or resume one."""
        push = asked.read(PushBody)
        return upload_answer(await self._cluster.catalog_upload(push.index(), push.replace))

    async def piece(self, asked: ControlRequest, name: str, data: bytes) -> int:
        """Write a piece; return the bytes that are there."""
        at = asked.read(PieceQuery)
        return await self._cluster.catalog_piece(name, at.version, at.path, at.number, data)

    async def end(self, asked: ControlRequest, name: str) -> UploadAnswer:
        """Publish an upload."""
        version = asked.read(VersionQuery).version
        return upload_answer(await self._cluster.catalog_end(name, version))
