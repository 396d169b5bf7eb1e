"""Files on their way to the head: each is admitted by its declaration, received, compared, recorded
in the ledger if it has a manifest, and only then kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rkserve.control.calls import DeclaredArtifact
from rkserve.coordinator.artifacts.model_catalog import ModelCatalog
from rkserve.coordinator.artifacts.sources import DownloadPool
from rkserve.coordinator.artifacts.store import ArtifactStore
from rkserve.coordinator.coordinator import Coordinator
from rkserve.core.desired_state import Artifact
from rkserve.core.errors import ArtifactRefused, ManifestMismatch
from rkserve.models.incoming import UploadProgress
from rkserve.models.index import ModelIndex

ACCEPT_S = 60.0  # a loop that is frozen for longer ends the upload


class ArtifactIntake:
    """Uploads and registrations of one Coordinator. Use it from the Coordinator's event loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: ArtifactStore,
        catalog: ModelCatalog,
        downloads: DownloadPool,
    ) -> None:
        self._coordinator, self._trust, self._store = coordinator, coordinator.trust, store
        self._catalog, self._downloads = catalog, downloads
        # The folders whose uploads go on, by name and version.
        self._folders: dict[tuple[str, str], DeclaredArtifact] = {}
        self._loop = asyncio.get_running_loop()
        store.accept = self._accept

    # -- single files --------------------------------------------------------------------------

    async def upload_begin(self, claim: DeclaredArtifact) -> str:
        """Begin an upload; raises as ``ArtifactTrust.admit`` and ``ArtifactStore.upload_begin``."""
        admitted = await self._admitted(claim)
        return await asyncio.to_thread(self._store.upload_begin, admitted)

    async def upload_part(self, upload: str, offset: int, data: bytes) -> int:
        """Write a part; return the total number of bytes."""
        with self._audited(self._store.declared(upload)):
            return await asyncio.to_thread(self._store.upload_part, upload, offset, data)

    async def upload_end(self, upload: str, manifest: Mapping[str, Any] | None = None) -> Artifact:
        """End an upload: the file is verified and kept."""
        with self._audited(self._store.declared(upload)):
            return await asyncio.to_thread(self._store.upload_end, upload, manifest)

    async def register(
        self, kind: str, place: str, claim: DeclaredArtifact, scale: float = 1.0
    ) -> Artifact | None:
        """Take a file of the head node, or fetch one; raises as ``ArtifactTrust.admit`` and
        ``ArtifactStore.register``.
        """
        found = await asyncio.to_thread(self._store.located, kind, place, claim)
        if found is None:
            return None
        admitted = await self._admitted(found)
        with self._audited(admitted):
            return await self._downloads.run(self._store.register, kind, place, admitted, scale)

    async def _admitted(
        self, claim: DeclaredArtifact, *, adapters: bool = False
    ) -> DeclaredArtifact:
        """Return a declaration with all that its manifest states; see ``ArtifactTrust.admit``.

        Raises ``ArtifactRefused`` also for an adapter that was trained on other base weights.
        """
        found = self._trust.admit(claim, adapters=adapters)
        if found.base:
            return found
        try:
            await self._coordinator.require_base(found)
        except ArtifactRefused as exc:
            if claim.base_digest is not None or found.accepted is None:
                raise
            error = ManifestMismatch(exc.message, "manifest")
            self._trust.refused(found, error)
            raise error from exc
        return found

    @contextmanager
    def _audited(self, declared: DeclaredArtifact | None) -> Iterator[None]:
        """Have a file that is not as its manifest states in the audit log."""
        try:
            yield
        except ManifestMismatch as exc:
            if declared is not None:
                self._trust.refused(declared, exc)
            raise

    def _accept(self, declared: DeclaredArtifact, digest: str) -> None:
        """Record a file with a manifest, from a thread of the store: the ledger is the loop's."""

        async def accept() -> None:
            self._trust.accept(declared, digest)

        asyncio.run_coroutine_threadsafe(accept(), self._loop).result(ACCEPT_S)

    # -- model folders -------------------------------------------------------------------------

    async def folder_begin(
        self, index: ModelIndex, *, replaces: bool, claim: DeclaredArtifact | None
    ) -> UploadProgress:
        """Begin or resume the upload of a model folder; see ``ModelCatalog.upload_begin``.

        A Router of an earlier release sends no ``claim``.
        """
        declared = replace(
            claim or DeclaredArtifact(index.name, None, index.name),
            name=index.name,
            model=index.name,
            size_bytes=index.total_bytes,
            sha256=index.version,
            base=True,
            folder=True,
        )
        admitted = await self._admitted(declared, adapters=index.has_adapters)
        begun = await asyncio.to_thread(self._catalog.upload_begin, index, replace=replaces)
        if begun.complete:
            self._record(admitted)
        else:
            self._folders[index.name, index.version] = admitted
        return begun

    async def folder_end(self, name: str, version: str) -> UploadProgress:
        """Publish the upload of a model folder; see ``ModelCatalog.upload_end``."""
        ended = await asyncio.to_thread(self._catalog.upload_end, name, version)
        if ended.complete:
            self._record(self._folders.pop((name, version), None))
        return ended

    def _record(self, folder: DeclaredArtifact | None) -> None:
        """Record a model that is whole, if it came with a manifest."""
        if folder is not None and folder.accepted is not None and folder.sha256 is not None:
            self._trust.accept(folder, folder.sha256)
