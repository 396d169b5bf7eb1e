"""A model that comes in pieces: order, resumption, damage, full disks and publication."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rkserve.core.errors import ArtifactRefused, DiskFull
from rkserve.models.incoming import RESERVE_BYTES, IncomingModel
from rkserve.models.index import IndexedFile, ModelIndex, index_folder, read_piece
from rkserve.models.shelf import known_index, staging, staging_of
from tests.models.test_index import PIECE, folder_with

WEIGHTS = os.urandom(5 * PIECE + 17)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The model on the machine that has it."""
    return folder_with(tmp_path / "head" / "chat", WEIGHTS)


@pytest.fixture
def index(source: Path) -> ModelIndex:
    """Its index."""
    return index_folder(source, PIECE)


@contextmanager
def incoming(index: ModelIndex, board: Path) -> Iterator[IncomingModel]:
    """Open a copy in the folder of a board."""
    with staging(board / "chat", pieces=True) as staged:
        yield IncomingModel(index, staged, board / "chat")


def pull(copy: IncomingModel, source: Path, most: int = 1000) -> int:
    """Write at most so many missing pieces; return their number."""
    pieces = list(copy.missing())[:most]
    for piece in pieces:
        copy.write(piece, read_piece(source, piece))
    return len(pieces)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a model folder."""
    return {
        str(one.relative_to(folder)): one.read_bytes()
        for one in folder.rglob("*")
        if one.is_file() and not one.name.startswith(".")
    }


def test_a_whole_copy_is_published_with_its_index(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        assert copy.begin() == 0
        assert pull(copy, source) == 8
        assert copy.present_bytes == index.total_bytes
        assert not (tmp_path / "board" / "chat").exists()
        assert copy.finish() == ()
    assert contents(tmp_path / "board" / "chat") == contents(source)
    assert known_index(tmp_path / "board" / "chat") == index
    assert not staging_of(tmp_path / "board" / "chat").exists()


def test_an_interrupted_copy_goes_on_where_it_was(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source, 5)
    with incoming(index, tmp_path / "board") as copy:
        assert copy.begin() == index.total_bytes - 2 * PIECE - 17
        assert pull(copy, source) == 3
        assert copy.finish() == ()


def test_half_a_piece_is_fetched_again(source: Path, index: ModelIndex, tmp_path: Path) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source, 5)
    part = staging_of(tmp_path / "board" / "chat") / "chat" / "model.rkllm.part"
    os.truncate(part, part.stat().st_size - 1)  # as a power cut leaves it
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        assert pull(copy, source) == 4
        assert copy.finish() == ()
    assert contents(tmp_path / "board" / "chat") == contents(source)


def test_a_piece_that_the_disk_has_damaged_is_missing_again(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source)
        part = staging_of(tmp_path / "board" / "chat") / "chat" / "model.rkllm.part"
        with part.open("r+b") as file:
            file.seek(3 * PIECE)
            file.write(bytes(PIECE))
        (damaged,) = copy.finish()
        assert (damaged.path, damaged.number) == ("model.rkllm", 3)
        assert copy.present_bytes == index.total_bytes - PIECE
        assert pull(copy, source) == 1
        assert copy.finish() == ()
    assert contents(tmp_path / "board" / "chat") == contents(source)


def test_a_copy_that_is_not_whole_is_not_published(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source, 3)
        with pytest.raises(ArtifactRefused, match="not whole"):
            copy.finish()


def test_a_piece_that_leaves_a_gap_is_refused(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        piece = index.piece("model.rkllm", 2)
        with pytest.raises(ArtifactRefused, match="gap"):
            copy.write(piece, read_piece(source, piece))


def test_a_piece_that_comes_twice_changes_nothing(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        piece = index.piece("model.rkllm", 0)
        for _ in range(2):
            copy.write(piece, read_piece(source, piece))
        assert copy.present_bytes == PIECE


def test_an_index_that_contradicts_itself_is_refused(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    files = [
        IndexedFile(**(file.model_dump() | {"sha256": "0" * 64}))
        if file.path == "model.rkllm"
        else file
        for file in index.files
    ]
    wrong = index.model_copy(update={"files": tuple(files)})
    with incoming(wrong, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source)
        with pytest.raises(ArtifactRefused, match="contradicts itself"):
            copy.finish()


def test_a_disk_without_room_is_refused_before_anything_is_written(
    index: ModelIndex, tmp_path: Path
) -> None:
    target = tmp_path / "board" / "chat"
    with staging(target, pieces=True) as staged:
        free = index.total_bytes + RESERVE_BYTES - 1
        copy = IncomingModel(index, staged, target, free=lambda _folder: free)
        with pytest.raises(DiskFull) as refused:
            copy.begin()
    assert (refused.value.free_bytes, refused.value.needed_bytes) == (free, index.total_bytes)
    assert "rkserve model rm" in refused.value.message
    assert f"{free / 1e6:.1f} MB free" in refused.value.message
    assert not staging_of(target).exists()


def test_only_the_rest_must_fit(source: Path, index: ModelIndex, tmp_path: Path) -> None:
    target = tmp_path / "board" / "chat"
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source, 5)
        rest = index.total_bytes - copy.present_bytes
    with staging(target, pieces=True) as staged:
        copy = IncomingModel(index, staged, target, free=lambda _folder: rest + RESERVE_BYTES)
        assert copy.begin() == index.total_bytes - rest


def test_unchanged_files_of_an_earlier_version_are_taken_from_its_copy(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source)
        copy.finish()
    (source / "rkserve.yaml").write_text("context_length: 8192\n")
    changed = index_folder(source, PIECE)
    with incoming(changed, tmp_path / "board") as copy:
        copy.begin()
        assert pull(copy, source) == 1
        assert copy.finish() == ()
    assert contents(tmp_path / "board" / "chat") == contents(source)


def test_the_pieces_of_another_version_are_removed(
    source: Path, index: ModelIndex, tmp_path: Path
) -> None:
    with incoming(index, tmp_path / "board") as copy:
        copy.begin()
        pull(copy, source, 6)
    (source / "model.rkllm").write_bytes(WEIGHTS[::-1])
    changed = index_folder(source, PIECE)
    with incoming(changed, tmp_path / "board") as copy:
        assert copy.begin() == 0
        pull(copy, source)
        assert copy.finish() == ()
    assert contents(tmp_path / "board" / "chat") == contents(source)
