"""The index of a model folder: pieces, versions, and names that must not lead elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rkserve.core.errors import ArtifactNotFound, ConfigError, PieceCorrupted
from rkserve.models.index import ModelIndex, index_folder, is_plain_path, piece_of, read_piece
from tests.support.values.tiny_gguf import tiny_folder

PIECE = 1024


def folder_with(path: Path, weights: bytes = b"w" * 2500) -> Path:
    """Make a model folder with adapters."""
    (path / "adapters" / "tone" / "v1").mkdir(parents=True)
    (path / "model.rkllm").write_bytes(weights)
    (path / "rkserve.yaml").write_text("context_length: 4096\n")
    (path / "adapters" / "tone" / "v1" / "adapter.rkllm").write_bytes(b"a" * 100)
    (path / ".hidden").write_text("no part of the model")
    return path


def test_an_index_has_every_file_with_its_pieces(tmp_path: Path) -> None:
    index = index_folder(folder_with(tmp_path / "chat"), PIECE)
    paths = [file.path for file in index.files]
    assert paths[-1] == "model.rkllm"  # the large file comes last
    assert set(paths) == {"rkserve.yaml", "adapters/tone/v1/adapter.rkllm", "model.rkllm"}
    weights = index.by_path["model.rkllm"]
    assert weights.sha256 == hashlib.sha256(b"w" * 2500).hexdigest()
    assert [piece.size_bytes for piece in index.pieces("model.rkllm")] == [1024, 1024, 452]
    assert index.total_bytes == 2500 + 100 + len("context_length: 4096\n")


def test_a_version_depends_on_the_contents_and_not_on_the_pieces(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    before = index_folder(folder, PIECE)
    assert index_folder(folder, 2 * PIECE).version == before.version
    (folder / "rkserve.yaml").write_text("context_length: 8192\n")
    assert index_folder(folder, PIECE).version != before.version


def test_a_model_for_cpus_alone_is_copied_as_well(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    index = index_folder(folder)
    assert {*index.by_path} == {one.name for one in folder.iterdir()}
    assert index.by_path["model.gguf"].bytes == (folder / "model.gguf").stat().st_size


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    (folder / "model.rkllm").unlink()
    (folder / "adapters" / "tone" / "v1" / "adapter.rkllm").unlink()
    with pytest.raises(ConfigError, match=r"no \.rkllm or \.gguf file"):
        index_folder(folder, PIECE)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../../x", "a\\b", ".hidden", "a/.hidden", "", "a//b", "a\nb", "a/"],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    assert not is_plain_path(name)
    found = index_folder(folder_with(tmp_path / "chat"), PIECE).model_dump()
    found["files"][0]["path"] = name
    with pytest.raises(ValidationError):
        ModelIndex.model_validate(found)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"name": "../chat"}, "no name", id="a name with a path"),
        pytest.param({"files": []}, "files", id="no file"),
        pytest.param({"piece_bytes": 1 << 30}, "piece_bytes", id="pieces larger than memory"),
        pytest.param({"piece_bytes": 2048}, "pieces for its size", id="another number of pieces"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    change: dict[str, object], match: str, tmp_path: Path
) -> None:
    found = index_folder(folder_with(tmp_path / "chat"), PIECE).model_dump()
    with pytest.raises(ValidationError, match=match):
        ModelIndex.model_validate(found | change)


def test_a_file_may_not_be_listed_twice_or_be_a_folder(tmp_path: Path) -> None:
    found = index_folder(folder_with(tmp_path / "chat"), PIECE).model_dump()
    first = dict(found["files"][0])
    with pytest.raises(ValidationError, match="listed twice"):
        ModelIndex.model_validate(found | {"files": [*found["files"], first]})
    below = first | {"path": f"{first['path']}/below"}
    with pytest.raises(ValidationError, match="folder of another"):
        ModelIndex.model_validate(found | {"files": [*found["files"], below]})


def test_a_piece_is_read_and_checked(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat", bytes(range(256)) * 10)
    index = index_folder(folder, PIECE)
    piece = index.piece("model.rkllm", 1)
    data = read_piece(folder, piece)
    piece.check(data)
    assert data == (bytes(range(256)) * 10)[1024:2048]
    with pytest.raises(PieceCorrupted, match=r"piece 2 of model\.rkllm"):
        piece.check(b"x" + data[1:])


def test_a_piece_of_another_version_or_beyond_the_end_is_not_found(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    index = index_folder(folder, PIECE)
    assert piece_of(index, folder, index.version, "model.rkllm", 2) == b"w" * 452
    for version, path, number in (
        ("0" * 64, "model.rkllm", 0),
        (index.version, "model.rkllm", 3),
        (index.version, "model.rkllm", -1),
        (index.version, "../chat/model.rkllm", 0),
    ):
        with pytest.raises(ArtifactNotFound):
            piece_of(index, folder, version, path, number)
