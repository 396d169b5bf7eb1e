"""The head's catalogue of models, from which boards fetch, and into which models are uploaded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rkserve.core.errors import (
    ArtifactNotFound,
    ConfigError,
    OperationConflict,
)
from rkserve.core.files import Stamp, free_bytes
from rkserve.models.folder import MODEL_ID
from rkserve.models.incoming import IncomingModel, UploadProgress
from rkserve.models.index import ModelIndex, files_of, piece_of
from rkserve.models.shelf import (
    ModelBusy,
    index_of,
    known_index,
    model_path,
    staging,
    stamps_of,
    stated_of,
)

log = logging.getLogger(__name__)

UPLOAD_IDLE_S = 300.0  # an upload without pieces for so long gives way to another one


@dataclass
class _Upload:
    """An upload that goes on, with the lock of its folder."""

    index: ModelIndex
    incoming: IncomingModel
    stack: ExitStack
    touched_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)

    def progress(self, *, complete: bool = False) -> UploadProgress:
        """Return the state; that of a complete one without looking at the disk."""
        missing: dict[str, list[int]] = {}
        for piece in () if complete else self.incoming.missing():
            missing.setdefault(piece.path, []).append(piece.number)
        total = self.index.total_bytes
        return UploadProgress(
            self.index.name,
            self.index.version,
            total if complete else self.incoming.present_bytes,
            total,
            complete,
            tuple((path, tuple(numbers)) for path, numbers in missing.items()),
        )


class ModelCatalog:
    """The models in one folder of the head. Its methods block; any thread may call them."""

    def __init__(
        self,
        folder: Path,
        piece_bytes: int,
        *,
        now_s: Callable[[], float] = time.monotonic,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """``free`` returns a disk's free bytes."""
        self.folder = folder
        self._piece_bytes = piece_bytes
        self._now_s = now_s
        self._free = free
        self._lock = threading.Lock()
        self._indexing: dict[str, threading.Lock] = {}
        self._known: dict[str, tuple[dict[str, Stamp], ModelIndex]] = {}
        self._uploads: dict[str, _Upload] = {}

    # -- serving ------------------------------------------------------------------------------

    def index(self, name: str) -> ModelIndex:
        """Return the index of a model; the first call after a change reads all of its files.

        Raises:
            ArtifactNotFound: there is no such model.
            ConfigError: it cannot be served to boards.
        """
        path = self._path(name)
        with self._lock:
            lock = self._indexing.setdefault(name, threading.Lock())
        with lock:
            try:
                stamps = stamps_of(path)
                known = self._known.get(name)
                if known is None or known[0] != stamps:
                    known = (stamps, index_of(path, self._piece_bytes))
                    self._known[name] = known
            except OSError as exc:
                raise ConfigError(f"the model {path} cannot be read: {exc}") from exc
            return known[1]

    def piece(self, name: str, version: str, path: str, number: int) -> bytes:
        """Return a piece of a model, unverified.

        Raises:
            ArtifactNotFound: the catalogue has another version by now, or no such piece.
        """
        index = self.index(name)
        return piece_of(index, self._path(name), version, path, number)

    def models(self) -> list[tuple[str, str, int]]:
        """Return name, version and size of all models; files that were not read have no version."""
        found = []
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():
            if MODEL_ID.fullmatch(path.name) and path.is_dir():
                known = known_index(path)
                size = sum(one.stat().st_size for one in files_of(path).values())
                found.append((path.name, "" if known is None else known.version, size))
        return found

    def platform(self, name: str) -> str:
        """Return the SoC that a model was converted for; empty where its manifest has none.

        Raises:
            ArtifactNotFound: there is no such model.
        """
        return str(stated_of(self._path(name)).get("platform") or "")

    def _path(self, name: str) -> Path:
        path = model_path(self.folder, name)
        if not path.is_dir():
            raise ArtifactNotFound(f"The catalogue has no model '{name}'.", "model")
        return path

    # -- uploads ------------------------------------------------------------------------------

    def upload_begin(self, index: ModelIndex, *, replace: bool) -> UploadProgress:
        """Begin an upload, or go on with one; the answer says which pieces are missing.

        Raises:
            OperationConflict: another model has the name, or another command adds it.
            DiskFull: there is no room for it.
        """
        target = model_path(self.folder, index.name)
        if target.exists():
            found = known_index(target) or self.index(index.name)
            if found.version == index.version:
                total = index.total_bytes
                return UploadProgress(index.name, index.version, total, total, complete=True)
            if not replace:
                raise OperationConflict(
                    f"The catalogue has another model '{index.name}' already; replace it with "
                    "'replace' (rkserve model push --replace), or take another name.",
                    "name",
                )
        with self._lock:
            self._sweep(but=index.name)
            going_on = self._uploads.get(index.name)
            if going_on is not None and going_on.index != index:
                if self._now_s() - going_on.touched_s < UPLOAD_IDLE_S:
                    raise OperationConflict(
                        f"Another '{index.name}' is being uploaded just now.", "name"
                    )
                self._close(index.name)
                going_on = None
            if going_on is None:
                going_on = self._open(index, target)
            going_on.touched_s = self._now_s()
        with going_on.lock:
            return going_on.progress()

    def _open(self, index: ModelIndex, target: Path) -> _Upload:
        with ExitStack() as stack:
            try:
                staged = stack.enter_context(staging(target, pieces=True))
                incoming = IncomingModel(index, staged, target, free=self._free)
                incoming.begin()
            except ModelBusy as exc:
                raise OperationConflict(f"{exc.message}.", "name") from exc
            except OSError as exc:
                raise ConfigError(f"{target} cannot be written: {exc.strerror or exc}") from exc
            upload = _Upload(index, incoming, stack.pop_all(), self._now_s())
        self._uploads[index.name] = upload
        return upload

    def upload_piece(self, name: str, version: str, path: str, number: int, data: bytes) -> int:
        """Write a piece; return the number of bytes that are there.

        Raises:
            ArtifactNotFound: no such upload is going on, or the model has no such piece.
            PieceCorrupted: it was damaged on its way.
            DiskFull: the disk is full.
        """
        upload = self._upload(name, version)
        with upload.lock:
            try:
                piece = upload.index.piece(path, number)
            except (KeyError, IndexError) as exc:
                raise ArtifactNotFound(f"'{name}' has no such piece.", "path") from exc
            piece.check(data)
            try:
                upload.incoming.write(piece, data)
            except OSError as exc:
                raise ConfigError(f"a piece cannot be written: {exc.strerror or exc}") from exc
            upload.touched_s = self._now_s()
            return upload.incoming.present_bytes

    def upload_end(self, name: str, version: str) -> UploadProgress:
        """Verify and publish an upload; damaged pieces are missing again.

        Raises:
            ArtifactNotFound: no such upload is going on.
            ArtifactRefused: pieces are missing, or the index contradicts itself.
        """
        upload = self._upload(name, version)
        with upload.lock:
            try:
                damaged = upload.incoming.finish()
            except OSError as exc:
                raise ConfigError(f"{name} cannot be published: {exc.strerror or exc}") from exc
            upload.touched_s = self._now_s()
            if damaged:
                return upload.progress()
        with self._lock:
            self._close(name)
        return upload.progress(complete=True)

    def sweep(self) -> None:
        """Unlock the folders of uploads that were given up; their pieces are kept."""
        with self._lock:
            self._sweep()

    def close(self) -> None:
        """Unlock all folders."""
        with self._lock:
            for name in list(self._uploads):
                self._close(name)

    def _upload(self, name: str, version: str) -> _Upload:
        with self._lock:
            found = self._uploads.get(name)
        if found is None or found.index.version != version:
            raise ArtifactNotFound(
                f"No upload of '{name}' with that version goes on; begin it again, and it resumes.",
                "name",
            )
        return found

    def _sweep(self, but: str = "") -> None:
        before_s = self._now_s() - UPLOAD_IDLE_S
        for name, one in list(self._uploads.items()):
            if name != but and one.touched_s < before_s and not one.lock.locked():
                log.warning("the upload of %s got nothing for %.0f s", name, UPLOAD_IDLE_S)
                self._close(name)

    def _close(self, name: str) -> None:
        upload = self._uploads.pop(name, None)
        if upload is not None:
            upload.stack.close()
