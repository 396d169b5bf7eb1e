"""The index of a model folder: its files, with the sha256 of each and of each piece of it.

By it a copy is fetched in pieces and verified, from whichever machine has the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rkserve.core.errors import ArtifactNotFound, ConfigError, PieceCorrupted
from rkserve.models.folder import MODEL_ID

PIECE_BYTES = 4 << 20
PIECE_MIN_BYTES, PIECE_MAX_BYTES = 1 << 10, 16 << 20
# More files or longer names belong to no model; an index travels as a whole.
MAX_FILES = 1000
MAX_PATH = 300
MAX_PIECES = 1 << 16

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def is_plain_path(name: str) -> bool:
    """Return whether a file's path stays in its folder, and is not hidden there."""
    path = PurePosixPath(name)
    plain = not path.is_absolute() and str(path) == name and "\\" not in name
    return plain and name.isprintable() and not any(part.startswith(".") for part in path.parts)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a file: the unit that is fetched and verified."""

    path: str
    number: int
    offset: int
    size_bytes: int
    sha256: str

    @property
    def title(self) -> str:
        """The piece's name in messages."""
        return f"piece {self.number + 1} of {self.path} (from byte {self.offset})"

    def check(self, data: bytes) -> None:
        """Raise ``PieceCorrupted`` if ``data`` is not the piece."""
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise PieceCorrupted(self.title)


class IndexedFile(BaseModel):
    """A file of a model folder. ``pieces`` are the sha256 of its pieces, in order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(max_length=MAX_PATH)
    bytes: int = Field(ge=0, le=1 << 44)
    sha256: Digest
    pieces: tuple[Digest, ...]

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        if not is_plain_path(path):
            raise ValueError(f"{path!r} leads out of the model's folder, or is hidden in it")
        return path


class ModelIndex(BaseModel):
    """The files of a model, in the order in which they are fetched: small ones first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    piece_bytes: int = Field(ge=PIECE_MIN_BYTES, le=PIECE_MAX_BYTES)
    files: tuple[IndexedFile, ...] = Field(min_length=1, max_length=MAX_FILES)

    @field_validator("name")
    @classmethod
    def _is_an_id(cls, name: str) -> str:
        if not MODEL_ID.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a model")
        return name

    @model_validator(mode="after")
    def _fits(self) -> ModelIndex:
        paths = {file.path for file in self.files}
        if len(paths) != len(self.files):
            raise ValueError("a file is listed twice")
        parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        if parents & paths:
            raise ValueError("a file is a folder of another one")
        if sum(len(file.pieces) for file in self.files) > MAX_PIECES:
            raise ValueError(f"there are more than {MAX_PIECES} pieces; make them larger")
        for file in self.files:
            if len(file.pieces) != -(-file.bytes // self.piece_bytes):
                raise ValueError(f"{file.path} has {len(file.pieces)} pieces for its size")
        if not any(path.endswith((".rkllm", ".gguf")) for path in paths):
            raise ValueError("there is no .rkllm or .gguf file")
        return self

    @cached_property
    def version(self) -> str:
        """The sha256 of all names and contents: equal for equal copies."""
        content = sorted((file.path, file.bytes, file.sha256) for file in self.files)
        return hashlib.sha256(json.dumps([self.name, content]).encode()).hexdigest()

    @cached_property
    def by_path(self) -> dict[str, IndexedFile]:
        """The files by their paths."""
        return {file.path: file for file in self.files}

    @property
    def has_adapters(self) -> bool:
        """True for a model with adapters in its folder."""
        return any(file.path.startswith("adapters/") for file in self.files)

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files)

    def piece(self, path: str, number: int) -> Piece:
        """Return a piece. Raises ``KeyError`` or ``IndexError`` where there is none."""
        file = self.by_path[path]
        if number < 0:
            raise IndexError(number)
        offset = number * self.piece_bytes
        size = min(self.piece_bytes, file.bytes - offset)
        return Piece(path, number, offset, size, file.pieces[number])

    def pieces(self, path: str, first: int = 0) -> Iterator[Piece]:
        """Yield the pieces of a file from a number on."""
        for number in range(first, len(self.by_path[path].pieces)):
            yield self.piece(path, number)


def files_of(folder: Path) -> dict[str, Path]:
    """Return the files of a model folder by their path in it, without hidden ones."""
    found = {one.relative_to(folder).as_posix(): one for one in folder.rglob("*") if one.is_file()}
    return {name: found[name] for name in sorted(found) if is_plain_path(name)}


def index_folder(folder: Path, piece_bytes: int = PIECE_BYTES) -> ModelIndex:
    """Read all files of a model folder, and return their index.

    Raises:
        OSError: a file cannot be read.
        ConfigError: the folder cannot be indexed, for example because it has no weights.
    """
    files = sorted(files_of(folder).items(), key=lambda one: one[1].stat().st_size)
    indexed = tuple(_indexed(name, file, piece_bytes) for name, file in files)
    try:
        return ModelIndex(name=folder.name, piece_bytes=piece_bytes, files=indexed)
    except ValueError as exc:
        raise ConfigError(f"{folder} cannot be copied to boards: {exc}") from exc


def _indexed(name: str, file: Path, piece_bytes: int) -> IndexedFile:
    whole, pieces, size = hashlib.sha256(), [], 0
    with file.open("rb") as content:
        while piece := content.read(piece_bytes):
            whole.update(piece)
            pieces.append(hashlib.sha256(piece).hexdigest())
            size += len(piece)
    try:
        return IndexedFile(path=name, bytes=size, sha256=whole.hexdigest(), pieces=tuple(pieces))
    except ValueError as exc:
        raise ConfigError(f"{file} cannot be copied to boards: {exc}") from exc


def read_piece(folder: Path, piece: Piece) -> bytes:
    """Return a piece of a copy, unverified. Raises ``OSError`` if the file is too short."""
    with (folder / piece.path).open("rb") as content:
        content.seek(piece.offset)
        found = content.read(piece.size_bytes)
    if len(found) != piece.size_bytes:
        raise OSError(f"{folder / piece.path} ends before byte {piece.offset + piece.size_bytes}")
    return found


def piece_of(index: ModelIndex, folder: Path, version: str, path: str, number: int) -> bytes:
    """Return a piece of the copy in ``folder``. Raises ``ArtifactNotFound``."""
    if index.version != version:
        raise ArtifactNotFound(f"{index.name} is here in another version by now.", "version")
    try:
        return read_piece(folder, index.piece(path, number))
    except (KeyError, IndexError, OSError) as exc:
        raise ArtifactNotFound(f"{index.name} has no such piece: {exc}", "path") from exc
