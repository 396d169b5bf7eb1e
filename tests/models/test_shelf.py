"""Folders of models: locks, publication, and indexes that are kept while nothing changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rkserve.core.errors import ConfigError
from rkserve.models.shelf import (
    MANIFEST_FILE,
    ModelBusy,
    discard,
    index_of,
    known_index,
    model_path,
    partial_bytes,
    publish,
    staged_bytes,
    staging,
    staging_of,
)
from tests.models.test_index import PIECE, folder_with


@pytest.mark.parametrize("name", ["", "../chat", "a/b", ".chat", "a b"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name of a model"):
        model_path(tmp_path, name)


def test_one_process_builds_a_model_at_a_time(tmp_path: Path) -> None:
    target = tmp_path / "chat"
    with staging(target), pytest.raises(ModelBusy), staging(target):
        pass
    with staging(target):
        pass
    assert not staging_of(target).exists()


def test_partial_files_keep_the_staging_folder(tmp_path: Path) -> None:
    target = tmp_path / "chat"
    with staging(target, pieces=True) as staged:
        (staged / "model.rkllm.part").write_bytes(b"12345")
    assert partial_bytes(target) == 5
    with staging(target, pieces=True) as staged:
        assert (staged / "model.rkllm.part").read_bytes() == b"12345"


def test_an_addition_finds_no_pieces_of_a_fetch(tmp_path: Path) -> None:
    target = tmp_path / "chat"
    with staging(target, pieces=True) as staged:
        (staged.parent / "version").write_text("0")
        (staged / "model.rkllm.part").write_bytes(b"12345")
    with staging(target) as staged:
        assert list(staged.iterdir()) == []


def test_a_published_model_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = folder_with(tmp_path / "chat", b"old")
    fresh = folder_with(tmp_path / "other", b"new")
    with (target / "model.rkllm").open("rb") as opened:
        publish(fresh, target)
        assert opened.read() == b"old"
    assert (target / "model.rkllm").read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["chat"]


def test_an_index_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    assert known_index(folder) is None
    made = index_of(folder, PIECE)
    assert known_index(folder) == made == index_of(folder, PIECE)
    (folder / "rkserve.yaml").write_text("context_length: 512\n")
    assert known_index(folder) is None
    assert index_of(folder, PIECE).version != made.version
    (folder / "more.txt").write_text("a new file")
    assert known_index(folder) is None


def test_an_index_with_other_pieces_is_computed_again(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    index_of(folder, PIECE)
    assert index_of(folder, 2 * PIECE).piece_bytes == 2 * PIECE


def test_a_damaged_index_is_ignored(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    index_of(folder, PIECE)
    for text in ("{", "[]", '{"stamps": {}, "index": {}}', '{"stamps": 5, "index": 5}'):
        (tmp_path / ".chat.index.json").write_text(text)
        assert known_index(folder) is None
    assert index_of(folder, PIECE) is not None


def test_weights_that_are_not_those_of_the_manifest_are_not_served(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    manifest = {"weights": "model.rkllm", "sha256": "0" * 64, "bytes": 2500}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="checksum mismatch"):
        index_of(folder, PIECE)


def test_a_discarded_model_leaves_nothing(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "chat")
    index_of(folder, PIECE)
    discard(folder)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_removed_while_they_are_counted_take_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging_of(tmp_path / "chat")
    staged.mkdir()
    (staged / "one.part").write_bytes(b"123")
    listed: list[tuple[str, list[str], list[str]]] = [(str(staged), [], ["one.part", "gone.part"])]
    monkeypatch.setattr("rkserve.models.shelf.os.walk", lambda _: listed)
    assert staged_bytes(tmp_path / "chat") == partial_bytes(tmp_path / "chat") == 3
