"""The catalogue of models: what is listed, shown and removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from rkserve.catalog.add import AddRequest, add
from rkserve.catalog.catalog import (
    GroupUse,
    details,
    entries,
    entry,
    group_uses,
    remove,
    summary,
)
from rkserve.catalog.hub import Hub
from rkserve.core.errors import ConfigError
from rkserve.models.index import PIECE_BYTES
from rkserve.models.shelf import MANIFEST_FILE, index_of
from tests.support.paths import PROJECT

SIM_CHAT = PROJECT / "models" / "sim-chat"
CONFIG = PROJECT / "serve_config.yaml"


def no_hub() -> Hub:
    raise AssertionError("the network is not needed")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A catalogue with an added model, one of a head, one by hand, a broken one, and a rest."""
    into = tmp_path / "models"
    add(AddRequest(str(SIM_CHAT), into, name="added"), no_hub)
    shutil.copytree(SIM_CHAT, into / "by-hand")
    shutil.copytree(SIM_CHAT, into / "head")
    (into / "head" / "model.rkllm").unlink()
    shutil.copytree(SIM_CHAT, into / "broken")
    (into / "broken" / "model.rkllm").write_bytes(b"GGUF")
    (into / ".begun.adding" / "begun").mkdir(parents=True)
    (into / ".begun.adding" / "begun" / "x.rkllm.0123.part").write_bytes(b"12345")
    (into / "no model").mkdir()
    (into / "file").touch()
    return into


def test_all_models_are_listed(models: Path) -> None:
    found = {one.id: one for one in entries(models)}
    assert list(found) == ["added", "begun", "broken", "by-hand", "head"]
    assert {name: one.problem[:30] for name, one in found.items()} == {
        "added": "",
        "begun": "its download is incomplete",
        "broken": "its weights cannot be used: it",
        "by-hand": "",
        "head": "there is no .rkllm file, as on",
    }
    assert found["begun"].partial_bytes == 5
    assert found["added"].sha256 is not None
    assert found["by-hand"].sha256 is None
    row = summary(found["added"])
    assert (row["soc"], row["context_length"], row["bytes"]) == ("any", 4096, 44376)


def test_a_changed_file_has_no_known_sha256(models: Path) -> None:
    file = models / "added" / "model.rkllm"
    content = file.read_bytes()
    file.unlink()  # it is a link to the source
    file.write_bytes(content + b"1")
    assert entry(models, "added").problem.startswith("its weights cannot be used")
    file.write_bytes(content[:-1] + b"!")
    with pytest.raises(ConfigError, match="checksum mismatch"):
        details(entry(models, "added"), verify=True)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"{" * 100_000])
def test_a_foreign_manifest_is_ignored(models: Path, content: bytes) -> None:
    (models / "added" / MANIFEST_FILE).write_bytes(content)
    found = entry(models, "added")
    assert (found.manifest, found.sha256, found.problem) == (None, None, "")


def test_details_have_the_sha256_and_the_settings(models: Path) -> None:
    shown = details(entry(models, "by-hand"), verify=False)
    assert shown["sha256"] == entry(models, "added").sha256
    assert shown["source"] is None
    assert "eos_token_ids: [2913, 2911]" in shown["settings"]
    assert details(entry(models, "added"), verify=True)["source"].endswith("sim-chat/model.rkllm")
    assert details(entry(models, "head"), verify=True)["sha256"] is None


def test_groups_use_a_folder_by_its_path_or_by_its_name_on_boards(
    models: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    boards = [
        {"name": "here", "model": str(models / "added")},
        {"name": "there", "model": "/opt/no/such/added"},
        {"name": "other", "model": str(models / "by-hand")},
    ]
    config.write_text(json.dumps({"applications": [{"args": {"boards": boards}}, {"args": None}]}))
    used = entry(models, "added", group_uses([config])).used_by
    assert [use.group for use in used] == ["here", "there"]
    own = entries(PROJECT / "models", group_uses([CONFIG]))
    assert {one.id: [use.group for use in one.used_by] for one in own} == {
        "sim-chat": ["sim"],
        "sim-embed": ["embed"],
        "sim-vision": [],
        "tiny-docs": [],
    }


@pytest.mark.parametrize(
    "content", ["[", "5", "{}", "applications: [{args: {boards: [{name: x}]}}]"]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        group_uses([config])


def test_models_are_removed(models: Path) -> None:
    assert remove(models, "added") > 100_000
    assert remove(models, "begun") == 5
    assert SIM_CHAT.joinpath("model.rkllm").is_file()
    left = sorted(one.name for one in models.iterdir())
    assert left == ["broken", "by-hand", "file", "head", "no model"]


def test_a_model_that_is_used_is_not_removed(models: Path) -> None:
    use = GroupUse("sim", models / "added", CONFIG)
    with pytest.raises(ConfigError, match=r"added is served by sim \(.*serve_config"):
        remove(models, "added", [use])
    assert entry(models, "added").problem == ""
    remove(models, "by-hand", [use])


def test_a_group_of_the_catalogue_uses_the_model_of_its_name(models: Path) -> None:
    use = GroupUse("sim", Path("catalog:added"), CONFIG)
    assert [one.id for one in entries(models, [use]) if one.used_by] == ["added"]
    with pytest.raises(ConfigError, match="is served by sim"):
        remove(models, "added", [use])


def test_a_removed_model_leaves_no_index(models: Path) -> None:
    index_of(models / "added", PIECE_BYTES)
    remove(models, "added")
    assert not [one for one in models.iterdir() if "added" in one.name]


def test_a_link_is_removed_and_not_its_folder(models: Path) -> None:
    (models / "link").symlink_to(models / "by-hand")
    remove(models, "link")
    assert (models / "by-hand" / "model.rkllm").is_file()


def test_a_model_that_is_being_added_is_not_removed(models: Path) -> None:
    lock = os.open(models / ".begun.adding", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another command adds begun"):
            remove(models, "begun")
    finally:
        os.close(lock)


@pytest.mark.parametrize("name", ["../models", ".begun.adding", "", "nothing", "file", "a/b"])
def test_names_of_no_model_are_refused(models: Path, name: str) -> None:
    before = sorted(models.rglob("*"))
    for call in (remove, entry):
        with pytest.raises(ConfigError, match=r"no model|is no name|no folder"):
            call(models, name)
    assert sorted(models.rglob("*")) == before


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be listed"):
        entries(tmp_path / "nowhere")


def test_an_addition_that_has_just_begun_or_ended_is_no_model(models: Path) -> None:
    before = [one.id for one in entries(models)]
    (models / ".fresh.adding").mkdir()
    assert [one.id for one in entries(models)] == before
