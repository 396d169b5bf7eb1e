"""A model that comes in pieces: a partial copy on the disk, resumed, verified and published whole.

Boards fetch by it, and the head takes uploads. The size of a partial file tells where to go on, so
that a copy survives the end of its process. Callers check each piece before it is written, and all
are verified once more before the copy is published; pieces that the disk has damaged are missing
again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rkserve.core.errors import ArtifactRefused, DiskFull
from rkserve.core.files import FULL, free_bytes, sync
from rkserve.models.index import IndexedFile, ModelIndex, Piece
from rkserve.models.shelf import PART, PIECES_OF, keep_index, known_index, publish

log = logging.getLogger(__name__)

RESERVE_BYTES = 64 << 20  # for logs and lock files of everything else on the machine


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """The state of an upload: what is there, and the numbers of the missing pieces by file."""

    name: str
    version: str
    received_bytes: int
    total_bytes: int
    complete: bool
    missing: tuple[tuple[str, tuple[int, ...]], ...] = ()


class IncomingModel:
    """A partial copy in a folder of ``shelf.staging``, whose lock the caller holds.

    Its methods touch the disk. One thread at a time may use it.
    """

    def __init__(
        self,
        index: ModelIndex,
        staged: Path,
        target: Path,
        *,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """``target`` is the model's final folder, and ``free`` returns a disk's free bytes."""
        self.index = index
        self._staged = staged
        self._target = target
        self._free = free
        self._damaged: set[tuple[str, int]] = set()

    def begin(self) -> int:
        """Prepare the folder, and take unchanged files of an earlier version from its copy.

        Returns:
            The number of bytes that are there.

        Raises:
            DiskFull: the disk has no room for the rest; nothing was written.
            OSError: the folder cannot be used.
        """
        self._remove_foreign()
        for file in self._unchanged():
            place = self._place(file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            self._part(file.path).unlink(missing_ok=True)
            place.hardlink_to(self._target / file.path)
        rest, free = self.index.total_bytes - self.present_bytes, self._free(self._staged)
        if rest and free < rest + RESERVE_BYTES:
            raise DiskFull(self.index.name, str(self._target.parent), free, rest, RESERVE_BYTES)
        for file in self.index.files:
            if not self._place(file.path).exists():
                part = self._part(file.path)
                part.parent.mkdir(parents=True, exist_ok=True)
                part.touch(mode=0o644)
        return self.present_bytes

    @property
    def present_bytes(self) -> int:
        """The number of bytes that are there, without pieces found damaged."""
        damaged = sum(self.index.piece(*one).size_bytes for one in self._damaged)
        return sum(self._size(file) for file in self.index.files) - damaged

    def missing(self) -> Iterator[Piece]:
        """Yield the pieces that are missing, in order, as the disk is now."""
        for path, number in sorted(self._damaged):
            yield self.index.piece(path, number)
        for file in self.index.files:
            # Rounded up: the last piece of a whole file may be short.
            there = -(-self._size(file) // self.index.piece_bytes)
            yield from self.index.pieces(file.path, there)

    def write(self, piece: Piece, data: bytes) -> None:
        """Write a missing piece that was checked, or one that is there already.

        Raises:
            DiskFull: the disk has become full.
            ArtifactRefused: pieces before it are missing.
            OSError: the file cannot be written.
        """
        size = self._size(self.index.by_path[piece.path])
        again = (piece.path, piece.number) in self._damaged
        if not again and size >= piece.offset + piece.size_bytes:
            return
        if piece.offset > size:
            there = size // self.index.piece_bytes
            raise ArtifactRefused(f"{piece.title} leaves a gap: {there} pieces are there", "offset")
        try:
            _write(self._part(piece.path), piece.offset, data)
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            free = self._free(self._staged)
            rest = self.index.total_bytes - self.present_bytes
            raise DiskFull(
                self.index.name, str(self._target.parent), free, rest, RESERVE_BYTES
            ) from exc
        self._damaged.discard((piece.path, piece.number))

    def finish(self) -> tuple[Piece, ...]:
        """Verify all files and publish the model, if no piece is missing or damaged.

        Returns:
            The damaged pieces, which are missing from now on; none if the model is published.

        Raises:
            ArtifactRefused: pieces are missing, or the index contradicts itself.
            OSError: it cannot be published.
        """
        if any(True for _ in self.missing()):
            raise ArtifactRefused(f"{self.index.name} is not whole yet: send what is missing")
        damaged = tuple(piece for file in self.index.files for piece in self._damage(file))
        self._damaged = {(piece.path, piece.number) for piece in damaged}
        if damaged:
            return damaged
        for file in self.index.files:
            part = self._part(file.path)
            if part.exists():
                sync(part)
                part.replace(self._place(file.path))
        for folder in {self._place(file.path).parent for file in self.index.files}:
            sync(folder)
        publish(self._staged, self._target)
        keep_index(self._target, self.index)
        log.info("model %s (%s) is complete", self.index.name, self.index.version[:12])
        return ()

    # -- internal -----------------------------------------------------------------------------

    def _damage(self, file: IndexedFile) -> list[Piece]:
        """Return the damaged pieces of a file. Raises ``ArtifactRefused``."""
        if self._place(file.path).exists():  # linked from a verified copy
            return []
        damaged = []
        whole = hashlib.sha256()
        with self._part(file.path).open("rb") as content:
            for piece in self.index.pieces(file.path):
                found = content.read(piece.size_bytes)
                whole.update(found)
                if hashlib.sha256(found).hexdigest() != piece.sha256:
                    damaged.append(piece)
        if not damaged and whole.hexdigest() != file.sha256:
            raise ArtifactRefused(
                f"The index contradicts itself: by its pieces {file.path} has the sha256 "
                f"{whole.hexdigest()}, and as a whole {file.sha256}."
            )
        return damaged

    def _unchanged(self) -> Iterator[IndexedFile]:
        """Yield the files that an earlier version's copy has."""
        before = known_index(self._target)
        if before is None:
            return
        for file in self.index.files:
            old = before.by_path.get(file.path)
            if old is not None and (old.sha256, old.bytes) == (file.sha256, file.bytes):
                yield file

    def _remove_foreign(self) -> None:
        """Remove the files of another version, or of another kind of addition."""
        stamp = self._staged.parent / PIECES_OF
        if not stamp.exists() or stamp.read_text(encoding="ascii") != self.index.version:
            shutil.rmtree(self._staged)
            self._staged.mkdir()
            stamp.write_text(self.index.version, encoding="ascii")
        for file in self.index.files:
            part = self._part(file.path)
            if part.exists() and part.stat().st_size > file.bytes:
                part.unlink()

    def _place(self, path: str) -> Path:
        return self._staged / path

    def _part(self, path: str) -> Path:
        return self._staged / f"{path}{PART}"

    def _size(self, file: IndexedFile) -> int:
        """Return the bytes of a file that are there, in whole pieces."""
        if self._place(file.path).exists():
            return file.bytes
        try:
            size = self._part(file.path).stat().st_size
        except FileNotFoundError:
            return 0
        return size if size == file.bytes else size - size % self.index.piece_bytes


def _write(file: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        news = memoryview(data)
        while news:
            written = os.pwrite(descriptor, news, offset)
            news, offset = news[written:], offset + written
    finally:
        os.close(descriptor)
