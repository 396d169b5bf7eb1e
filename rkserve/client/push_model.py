"""The flows that upload a model folder to the head's catalogue piece by piece, and that have boards
fetch it from there. Both resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkserve.client import flows
from rkserve.client.errors import NotFound, Refused, SourceFailed
from rkserve.client.flows import BlockingCall, Delay, Flow, OnProgress, Progress, RetryPolicy
from rkserve.client.requests import FILE_S, Request, Upload, given, path_of

if TYPE_CHECKING:
    from rkserve.models.index import ModelIndex, Piece

MODELS = "/v1/catalog/models"
PIECE_READ_S = 120.0
ATTEMPTS = 5  # in a row without a piece more
LOOK_S = 1.0  # between looks at the boards
STALL_S = 300.0  # a board without progress for so long is not waited for
FETCHING, SETTLED = "fetching", ("present", "staged", "unfit")


@dataclass(frozen=True, slots=True)
class PushedModel:
    """A model of the head's catalogue. ``sent_bytes`` were missing there."""

    name: str
    version: str
    size_bytes: int
    sent_bytes: int
    body: dict[str, Any] = field(default_factory=dict, hash=False, repr=False)


def push_model(
    folder: Path,
    manifest: Path | str | Mapping[str, Any] | None,
    more: Mapping[str, Any],
    *,
    retry: RetryPolicy,
    on_progress: OnProgress | None,
) -> Flow[PushedModel]:
    """Upload the pieces that the head lacks, until it has published the model; ``more`` are
    parameters of the call that begins it.

    Raises:
        SourceFailed: the folder is no model, or cannot be read.
        Conflict: another model has the name.
    """
    index: ModelIndex = yield BlockingCall(lambda: _index_of(folder))
    envelope = yield from flows.manifest_of(folder, manifest)
    body = given(**index.model_dump(mode="json"), **more, manifest=envelope)
    begin = Request("POST", MODELS, body=body, read_s=FILE_S)
    sent = failures = 0
    while True:
        before = sent
        state: dict[str, Any] = yield from flows.ask(begin, retry, dict)
        try:
            for piece in _missing(index, state):
                received = yield from _send(folder, index, piece, retry)
                sent += piece.size_bytes
                if on_progress is not None:
                    on_progress(Progress("upload", received, index.total_bytes))
            if not state["complete"]:
                state = yield from flows.ask(_end(index), retry, dict)
        except NotFound as exc:
            # Another Coordinator does not know the upload; to begin it again resumes it.
            failures = 0 if sent > before else failures + 1
            if exc.code != "artifact_not_found" or failures >= ATTEMPTS:
                raise
            continue
        if state["complete"]:
            return PushedModel(index.name, index.version, index.total_bytes, sent, state)


def prefetch_model(
    name: str, *, retry: RetryPolicy, on_progress: OnProgress | None
) -> Flow[list[dict[str, Any]]]:
    """Have a board of each node fetch a model, and wait while any of them makes progress.

    Raises:
        NotFound: the catalogue has no such model.
    """
    path = path_of(MODELS, name, "prefetch")
    moved: dict[str, tuple[int, float]] = {}  # by board: its bytes, and when they became as many
    again = True  # boards that failed for an earlier call
    while True:
        call = Request("POST", path, body={"again": again})
        rows: list[dict[str, Any]] = yield from flows.ask(call, retry, lambda body: body["boards"])
        again, now_s = False, retry.clock()
        waits = False
        for row in rows:
            board, there = row["board"], row["fetched_bytes"]
            if on_progress is not None:
                on_progress(Progress("fetch", there, row["total_bytes"], board))
            if row["state"] == FETCHING:
                if moved.get(board, (-1, 0.0))[0] != there:
                    moved[board] = there, now_s
                waits |= now_s - moved[board][1] < STALL_S
        if not waits:
            return rows
        yield Delay(LOOK_S)


def unsettled(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the boards that a fetch failed on, or that have made no progress for long."""
    return [row for row in rows if row["state"] not in SETTLED]


def _index_of(folder: Path) -> ModelIndex:
    # Late: programs that push no model need none of it.
    from rkserve.core.errors import ConfigError
    from rkserve.models.index import PIECE_BYTES
    from rkserve.models.shelf import index_of

    try:
        if not folder.is_dir():
            raise SourceFailed(f"{folder} is no model folder")
        return index_of(folder, PIECE_BYTES)
    except (OSError, ConfigError) as exc:
        raise SourceFailed(f"{folder} cannot be pushed: {exc}") from exc


def _missing(index: ModelIndex, state: dict[str, Any]) -> Iterator[Piece]:
    for path, numbers in state["missing"].items():
        for number in numbers:
            yield index.piece(path, number)


def _send(folder: Path, index: ModelIndex, piece: Piece, retry: RetryPolicy) -> Flow[int]:
    """Send a piece, again if it was damaged on its way; return the bytes that are there."""
    data = yield BlockingCall(lambda: _read(folder, piece))
    query = {"version": index.version, "path": piece.path, "number": str(piece.number)}
    upload = Upload(data, len(data), hashlib.sha256(data).hexdigest())
    path = path_of(MODELS, index.name, "pieces")
    request = Request("PUT", path, query, upload=upload, read_s=PIECE_READ_S)
    for left in reversed(range(ATTEMPTS)):
        try:
            received: int = yield from flows.ask(
                request, retry, lambda body: body["received_bytes"]
            )
        except Refused as exc:
            if exc.code != "piece_corrupted" or not left:
                raise
        else:
            return received
    raise AssertionError("the last attempt returns or raises")


def _read(folder: Path, piece: Piece) -> bytes:
    from rkserve.core.errors import PieceCorrupted
    from rkserve.models.index import read_piece

    try:
        data = read_piece(folder, piece)
        piece.check(data)
    except (OSError, PieceCorrupted) as exc:
        raise SourceFailed(f"{folder / piece.path} was changed during the upload") from exc
    return data


def _end(index: ModelIndex) -> Request:
    path = path_of(MODELS, index.name, "complete")
    return Request("POST", path, {"version": index.version}, read_s=FILE_S)
