"""Schemas of the head's catalogue: uploads of models in pieces, and models with their copies."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from rkserve.api.admin.lora import MANIFEST_MEANS, OLDER_MEANS, SignedManifest
from rkserve.api.admin.query import Name
from rkserve.api.json.schemas import Count, RequestModel
from rkserve.control.calls import DeclaredArtifact
from rkserve.core.board_report import BoardReport, BoardState, ModelCopy
from rkserve.core.errors import RequestError
from rkserve.models.incoming import UploadProgress
from rkserve.models.index import PIECE_MAX_BYTES, PIECE_MIN_BYTES, ModelIndex


class PushedFile(RequestModel):
    """A file of a model: its path in the folder, and the sha256 of it and of each piece."""

    path: str
    bytes: Count
    sha256: str
    pieces: list[str]


class PushBody(RequestModel):
    """The index of a model that is uploaded."""

    name: Name = Field(description="The model's name, which is the id in requests.")
    piece_bytes: int = Field(
        ge=PIECE_MIN_BYTES, le=PIECE_MAX_BYTES, description="The size of a piece."
    )
    files: list[PushedFile] = Field(description="The model's files.")
    replace: bool = Field(False, description="Whether to replace another model of that name.")
    manifest: SignedManifest = Field("", description=MANIFEST_MEANS)
    allow_older: bool = Field(False, description=OLDER_MEANS)

    def index(self) -> ModelIndex:
        """Return the index. Raises ``RequestError`` if names or pieces do not fit."""
        try:
            return ModelIndex.model_validate(
                self.model_dump(include={"name", "piece_bytes", "files"})
            )
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"]) or "files"
            why = first["msg"].removeprefix("Value error, ")
            raise RequestError(f"Invalid '{path}': {why}.", path) from None

    def claim(self, who: str) -> DeclaredArtifact:
        """Return the model's folder as a caller declares it."""
        return DeclaredArtifact(
            self.name,
            None,
            self.name,
            base=True,
            folder=True,
            manifest=self.manifest or None,
            allow_older=self.allow_older,
            who=who,
        )


class PieceQuery(RequestModel):
    """The place of a piece."""

    version: Name = Field(description="The version that the upload's answer has.")
    path: str = Field(description="The file.")
    number: int = Field(ge=0, description="The number of the piece, from 0.")


class VersionQuery(RequestModel):
    """The upload that ends."""

    version: Name = Field(description="The version that the upload's answer has.")


class UploadAnswer(TypedDict):
    """An upload. ``missing`` has the numbers of the missing pieces of each file."""

    name: str
    version: str
    received_bytes: int
    total_bytes: int
    complete: bool
    missing: dict[str, list[int]]


class PieceAnswer(TypedDict):
    """A piece that was written."""

    received_bytes: int


class CopyEntry(TypedDict):
    """A board with a copy of a model, or on the way to one."""

    board: str
    state: str
    version: str
    fetched_bytes: int
    total_bytes: int
    bytes_per_s: float


class CatalogModelEntry(TypedDict):
    """A model of the catalogue. ``version`` is empty until its files have been read."""

    name: str
    version: str
    bytes: int
    copies: list[CopyEntry]


class PrefetchBody(RequestModel):
    """A fetch of a model by the boards, before it is deployed."""

    again: bool = Field(
        False,
        description="Whether boards whose fetch has ended compare their copy with the head's once "
        "more, or try again.",
    )


class NodeCopy(TypedDict):
    """The copy of a node, which one of its boards has or fetches.

    ``state`` is ``fetching``, ``present``, ``staged`` (whole, beside an earlier version, which it
    replaces when a board with this model starts next), ``unfit`` (for another SoC) or ``failed``;
    ``reason`` explains it.
    """

    board: str
    node: str
    state: str
    reason: str
    version: str
    fetched_bytes: int
    total_bytes: int
    bytes_per_s: float


class PrefetchAnswer(TypedDict):
    """A model, and its copy on each node with a board."""

    name: str
    boards: list[NodeCopy]


class CatalogAnswer(TypedDict):
    """The models of the catalogue."""

    models: list[CatalogModelEntry]


def copies(reports: Iterable[BoardReport]) -> list[CopyEntry]:
    """Return the boards that have or fetch a copy."""
    found: list[CopyEntry] = []
    for one in reports:
        if one.state is BoardState.LOST or not (one.copy or one.fetch):
            continue
        fetch = one.fetch
        found.append(
            {
                "board": one.board_id,
                "state": one.state.value,
                "version": one.copy,
                "fetched_bytes": 0 if fetch is None else fetch.fetched_bytes,
                "total_bytes": 0 if fetch is None else fetch.total_bytes,
                "bytes_per_s": 0.0 if fetch is None else fetch.bytes_per_s,
            }
        )
    return found


def node_copy(board: str, node: str, copy: ModelCopy, state: str | None = None) -> NodeCopy:
    """Return the row of a node's copy; ``state`` replaces that of the copy."""
    return {
        "board": board,
        "node": node,
        "state": copy.state.value if state is None else state,
        "reason": copy.reason,
        "version": copy.version,
        "fetched_bytes": copy.fetch.fetched_bytes,
        "total_bytes": copy.fetch.total_bytes,
        "bytes_per_s": copy.fetch.bytes_per_s,
    }


def upload_answer(progress: UploadProgress) -> UploadAnswer:
    """Return the answer for the progress of an upload."""
    return {
        "name": progress.name,
        "version": progress.version,
        "received_bytes": progress.received_bytes,
        "total_bytes": progress.total_bytes,
        "complete": progress.complete,
        "missing": {path: list(numbers) for path, numbers in progress.missing},
    }
