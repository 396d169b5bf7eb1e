"""The head's catalogue: pieces for boards, and uploads that resume, are refused or replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.coordinator.artifacts.model_catalog import UPLOAD_IDLE_S, ModelCatalog
from rkserve.core.errors import (
    ArtifactNotFound,
    ConfigError,
    DiskFull,
    OperationConflict,
    PieceCorrupted,
)
from rkserve.models.index import ModelIndex, index_folder, read_piece
from rkserve.models.shelf import staging
from tests.models.test_incoming import WEIGHTS, contents
from tests.models.test_index import PIECE, folder_with


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The folder of the catalogue."""
    return tmp_path / "models"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model on a PC."""
    return folder_with(tmp_path / "pc" / "chat", WEIGHTS)


def send(catalog: ModelCatalog, index: ModelIndex, source: Path, most: int = 1000) -> int:
    """Upload at most so many missing pieces; return their number."""
    state = catalog.upload_begin(index, replace=False)
    missing = [(path, number) for path, numbers in state.missing for number in numbers][:most]
    for path, number in missing:
        data = read_piece(source, index.piece(path, number))
        catalog.upload_piece("chat", index.version, path, number, data)
    return len(missing)


def test_pieces_are_those_of_the_current_version(models: Path) -> None:
    folder = folder_with(models / "chat", WEIGHTS)
    catalog = ModelCatalog(models, PIECE)
    index = catalog.index("chat")
    assert catalog.piece("chat", index.version, "model.rkllm", 1) == WEIGHTS[PIECE : 2 * PIECE]
    (folder / "rkserve.yaml").write_text("context_length: 128\n")
    with pytest.raises(ArtifactNotFound, match="another version"):
        catalog.piece("chat", index.version, "model.rkllm", 1)
    assert catalog.index("chat").version != index.version


@pytest.mark.parametrize(
    ("manifest", "platform"),
    [
        pytest.param('{"platform": "RK3576", "weights": "model.rkllm"}', "RK3576", id="stated"),
        pytest.param('{"platform": null}', "", id="unknown when it was added"),
        pytest.param("[1]", "", id="no manifest"),
        pytest.param("{", "", id="damaged"),
        pytest.param(None, "", id="copied by hand"),
    ],
)
def test_the_soc_of_a_model_is_its_manifest_s(
    manifest: str | None, platform: str, models: Path
) -> None:
    folder = folder_with(models / "chat", WEIGHTS)
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    assert ModelCatalog(models, PIECE).platform("chat") == platform
    with pytest.raises(ArtifactNotFound, match="no model 'absent'"):
        ModelCatalog(models, PIECE).platform("absent")


@pytest.mark.parametrize("name", ["../chat", "/etc", "a/b", ""])
def test_a_name_that_leads_elsewhere_is_refused(name: str, models: Path) -> None:
    folder_with(models / "chat", WEIGHTS)
    with pytest.raises(ConfigError, match="no name of a model"):
        ModelCatalog(models, PIECE).piece(name, "0" * 64, "model.rkllm", 0)


def test_a_model_that_is_not_there_is_not_found(models: Path) -> None:
    with pytest.raises(ArtifactNotFound, match="no model 'chat'"):
        ModelCatalog(models, PIECE).index("chat")
    assert ModelCatalog(models, PIECE).models() == []


def test_an_upload_is_published_and_can_be_fetched(models: Path, source: Path) -> None:
    catalog, index = ModelCatalog(models, PIECE), index_folder(source, PIECE)
    assert send(catalog, index, source) == 8
    assert catalog.upload_end("chat", index.version).complete
    assert contents(models / "chat") == contents(source)
    assert catalog.index("chat") == index
    assert catalog.models() == [("chat", index.version, index.total_bytes)]
    again = catalog.upload_begin(index, replace=False)
    assert (again.complete, again.missing) == (True, ())


def test_an_upload_resumes_after_a_restart(models: Path, source: Path) -> None:
    index = index_folder(source, PIECE)
    first = ModelCatalog(models, PIECE)
    send(first, index, source, 5)
    first.close()  # as the end of its process does
    second = ModelCatalog(models, PIECE)
    with pytest.raises(ArtifactNotFound, match="it resumes"):
        second.upload_piece("chat", index.version, "model.rkllm", 0, WEIGHTS[:PIECE])
    assert send(second, index, source) == 3
    assert second.upload_end("chat", index.version).complete


def test_damage_on_the_way_and_on_the_disk_is_noticed(models: Path, source: Path) -> None:
    catalog, index = ModelCatalog(models, PIECE), index_folder(source, PIECE)
    catalog.upload_begin(index, replace=False)
    with pytest.raises(PieceCorrupted):
        catalog.upload_piece("chat", index.version, "model.rkllm", 0, bytes(PIECE))
    send(catalog, index, source)
    part = models / ".chat.adding" / "chat" / "model.rkllm.part"
    part.write_bytes(part.read_bytes()[:-5] + b"wrong")
    state = catalog.upload_end("chat", index.version)
    assert (state.complete, state.missing) == (False, (("model.rkllm", (5,)),))
    assert send(catalog, index, source) == 1
    assert catalog.upload_end("chat", index.version).complete


def test_a_disk_without_room_is_refused(models: Path, source: Path) -> None:
    catalog = ModelCatalog(models, PIECE, free=lambda _folder: 1000)
    with pytest.raises(DiskFull):
        catalog.upload_begin(index_folder(source, PIECE), replace=False)
    assert not (models / ".chat.adding").exists()


def test_another_model_of_the_name_is_replaced_only_on_request(models: Path, source: Path) -> None:
    folder_with(models / "chat", b"another one")
    catalog, index = ModelCatalog(models, PIECE), index_folder(source, PIECE)
    with pytest.raises(OperationConflict, match="--replace"):
        catalog.upload_begin(index, replace=False)
    catalog.upload_begin(index, replace=True)
    for file in index.files:
        for piece in index.pieces(file.path):
            data = read_piece(source, piece)
            catalog.upload_piece("chat", index.version, piece.path, piece.number, data)
    assert catalog.upload_end("chat", index.version).complete
    assert contents(models / "chat") == contents(source)


def test_one_upload_of_a_name_goes_on_at_a_time(models: Path, source: Path) -> None:
    now_s = [0.0]
    catalog = ModelCatalog(models, PIECE, now_s=lambda: now_s[0])
    first = index_folder(source, PIECE)
    catalog.upload_begin(first, replace=False)
    (source / "rkserve.yaml").write_text("context_length: 128\n")
    second = index_folder(source, PIECE)
    with pytest.raises(OperationConflict, match="being uploaded"):
        catalog.upload_begin(second, replace=False)
    now_s[0] = UPLOAD_IDLE_S + 1
    catalog.upload_begin(second, replace=False)
    with pytest.raises(ArtifactNotFound):
        catalog.upload_piece("chat", first.version, "model.rkllm", 0, WEIGHTS[:PIECE])


def test_an_addition_by_command_excludes_an_upload(models: Path, source: Path) -> None:
    catalog, index = ModelCatalog(models, PIECE), index_folder(source, PIECE)
    with staging(models / "chat"), pytest.raises(OperationConflict, match="another command"):
        catalog.upload_begin(index, replace=False)


def test_an_upload_that_was_given_up_unlocks_the_folder(models: Path, source: Path) -> None:
    now_s = [0.0]
    catalog = ModelCatalog(models, PIECE, now_s=lambda: now_s[0])
    index = index_folder(source, PIECE)
    send(catalog, index, source, 5)
    catalog.sweep()
    with pytest.raises(OperationConflict):
        ModelCatalog(models, PIECE).upload_begin(index, replace=False)
    now_s[0] = UPLOAD_IDLE_S + 1
    catalog.sweep()
    assert len(ModelCatalog(models, PIECE).upload_begin(index, replace=False).missing) == 1


def test_a_piece_that_the_model_lacks_is_not_found(models: Path, source: Path) -> None:
    catalog, index = ModelCatalog(models, PIECE), index_folder(source, PIECE)
    catalog.upload_begin(index, replace=False)
    for path, number in (("../x", 0), ("model.rkllm", 6), ("model.rkllm", -1)):
        with pytest.raises(ArtifactNotFound, match="no such piece"):
            catalog.upload_piece("chat", index.version, path, number, b"")
