"""Additions to the catalogue: local folders and files, repositories, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.catalog import add as add_module
from rkserve.catalog.add import AddedModel, AddRequest, add
from rkserve.catalog.catalog import ModelManifest
from rkserve.catalog.hub import Hub, open_hub
from rkserve.core.errors import ConfigError
from rkserve.models.folder import open_model_folder
from rkserve.models.shelf import MANIFEST_FILE
from tests.support.http.fake_hub import COMMIT, FakeHub, serving
from tests.support.paths import PROJECT

SIM_CHAT = PROJECT / "models" / "sim-chat"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
FILE = "Qwen2.5-1.5B-Instruct-rk3588-w8a8-1.2.3.rkllm"
REAL = b"\1" * 1_200_000  # nothing is known about the format


def no_hub() -> Hub:
    raise AssertionError("the network is not needed")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as it is downloaded: the model's file and those of its tokenizer."""
    folder = tmp_path / "download"
    folder.mkdir()
    (folder / FILE).write_bytes(REAL)
    for name in TOKENIZER:
        shutil.copy(SIM_CHAT / name, folder)
    return folder


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "models"


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if not one.name.endswith(".index.json"))


def test_a_folder_is_added_without_a_question(source: Path, into: Path) -> None:
    added = add(AddRequest(str(source), into, name="chat"), no_hub)
    assert added.complete
    assert added.warnings == ()
    folder = open_model_folder(into / "chat")
    assert folder.require_weights().name == FILE
    assert folder.settings.eos_token_ids == (2913,)
    assert folder.settings.tool_format == "hermes"
    assert folder.settings.thinking.marks == ("<think>", "</think>")
    manifest = ModelManifest.model_validate_json((into / "chat" / MANIFEST_FILE).read_bytes())
    assert (manifest.platform, manifest.dtype, manifest.toolkit) == ("RK3588", "w8a8", "1.2.3")
    assert manifest.bytes == len(REAL)
    assert names(into) == ["chat"]
    assert names(source) == sorted([FILE, *TOKENIZER])


def test_a_file_is_named_by_itself_and_linked(source: Path, into: Path) -> None:
    added = add(AddRequest(str(source / FILE), into), no_hub)
    assert added.folder == into / "Qwen2.5-1.5B-Instruct"
    assert (added.folder / FILE).samefile(source / FILE)
    assert not (added.folder / "tokenizer.json").samefile(source / "tokenizer.json")


def test_a_folder_of_the_catalogue_is_completed_in_its_place(source: Path, into: Path) -> None:
    place = into / "chat"
    shutil.copytree(source, place)
    (place / "adapters" / "a" / "v1").mkdir(parents=True)
    (place / "rkserve.yaml").write_text("context_length: 2048 # mine\n")
    add(AddRequest(str(place), into, name="chat"), no_hub)
    assert open_model_folder(place).settings.context_length == 2048
    assert open_model_folder(place).settings.tool_format == "hermes"
    assert (place / "adapters" / "a" / "v1").is_dir()
    with pytest.raises(ConfigError, match="--replace"):
        add(AddRequest(str(place), into, name="chat"), no_hub)
    again = AddRequest(str(place), into, name="chat", template="chatml", replace=True)
    assert add(again, no_hub).template_source == "built-in chatml"
    assert open_model_folder(place).settings.chat_template == "chatml"


def test_a_name_that_is_taken_is_refused_and_replaced_if_asked(source: Path, into: Path) -> None:
    request = AddRequest(str(source), into, name="chat")
    add(request, no_hub)
    (into / "chat" / "adapters" / "tone").mkdir(parents=True)
    (into / "chat" / "old").touch()
    with pytest.raises(ConfigError, match=r"exists already.*--replace"):
        add(request, no_hub)
    add(replace(request, replace=True), no_hub)
    assert (into / "chat" / "adapters" / "tone").is_dir()
    assert not (into / "chat" / "old").exists()
    assert names(into) == ["chat"]


def test_a_link_of_the_catalogue_is_not_replaced(source: Path, into: Path, tmp_path: Path) -> None:
    into.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (into / "chat").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not replaced"):
        add(AddRequest(str(source), into, name="chat", replace=True), no_hub)
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "", ".", "..", ".x", "a b", "x" * 129])
def test_names_that_climb_out_are_refused(source: Path, into: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a model"):
        add(AddRequest(str(source), into, name=name), no_hub)
    assert not into.exists()


def cut(source: Path) -> None:
    (source / FILE).write_bytes((SIM_CHAT / "model.rkllm").read_bytes()[:-10])


def foreign(source: Path) -> None:
    (source / FILE).write_bytes(b"GGUF" + bytes(2_000_000))


def second(source: Path) -> None:
    (source / "other.rkllm").write_bytes(REAL)


def none(source: Path) -> None:
    (source / FILE).unlink()


def damaged(source: Path) -> None:
    (source / "tokenizer.json").write_text("{")


def own_settings(source: Path) -> None:
    (source / "rkserve.yaml").write_text("contextlength: 5\n")


def broken_settings(source: Path) -> None:
    (source / "rkserve.yaml").write_text("[")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(cut, "of which", id="truncated"),
        pytest.param(foreign, "GGUF", id="not an rkllm file"),
        pytest.param(second, r"holds 2 models \(.*other.rkllm\)", id="two models"),
        pytest.param(none, r"holds no \*.rkllm", id="no model"),
        pytest.param(damaged, r"tokenizer\.json", id="a damaged tokenizer"),
        pytest.param(own_settings, "contextlength", id="an unknown key"),
        pytest.param(broken_settings, "YAML", id="damaged settings"),
    ],
)
def test_unfit_folders_leave_nothing_behind(
    source: Path, into: Path, change: Callable[[Path], None], words: str
) -> None:
    change(source)
    with pytest.raises(ConfigError, match=words):
        add(AddRequest(str(source), into, name="chat"), no_hub)
    assert not into.exists() or names(into) == []


def test_sources_that_do_not_exist_are_refused(into: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(REAL)
    os.mkfifo(tmp_path / "pipe.rkllm")
    loop = tmp_path / "loop.rkllm"
    loop.symlink_to(loop)
    for given, words in (
        ("nowhere", "does not exist"),
        ("x.gguf", r"no \.rkllm file"),
        ("pipe.rkllm", "no regular file"),
        ("loop.rkllm", "loop"),
    ):
        with pytest.raises(ConfigError, match=words):
            add(AddRequest(str(tmp_path / given), into), no_hub)


def test_a_full_disk_is_noticed_before_anything_is_copied(
    source: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add_module, "free_bytes", lambda _: 60_000_000)
    with pytest.raises(ConfigError, match=r"to spare; the disk of .* has 60\.0 MB free"):
        add(AddRequest(str(source), into, name="chat"), no_hub)
    assert names(into) == []


def test_two_commands_do_not_add_one_name_at_once(source: Path, into: Path) -> None:
    staging = into / ".chat.adding"
    staging.mkdir(parents=True)
    lock = os.open(staging, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another command adds chat"):
            add(AddRequest(str(source), into, name="chat"), no_hub)
    finally:
        os.close(lock)
    assert add(AddRequest(str(source), into, name="chat"), no_hub).complete


def test_a_wrong_sha256_is_refused(source: Path, into: Path) -> None:
    request = AddRequest(str(source), into, name="chat", sha256="0" * 64)
    with pytest.raises(ConfigError, match="checksum mismatch"):
        add(request, no_hub)
    assert names(into) == []


def test_templates_and_tokenizers_are_given(source: Path, into: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}<|end|>")
    for name in TOKENIZER:
        (source / name).unlink()
    request = AddRequest(str(source), into, "chat", str(SIM_CHAT), str(own))
    added = add(request, no_hub)
    assert added.complete
    assert open_model_folder(into / "chat").chat_template == own.read_text()
    named = replace(request, template="gemma", replace=True)
    assert add(named, no_hub).settings["chat_template"].value == "gemma"
    for unfit, words in (
        (replace(named, template="nowhere"), "neither a file nor a built-in"),
        (replace(named, tokenizer=str(tmp_path)), "no tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=words):
            add(unfit, no_hub)


def test_an_older_template_file_is_unpacked(source: Path, into: Path) -> None:
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    add(AddRequest(str(source), into, "chat"), no_hub)
    assert (into / "chat" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_model_without_tokenizer_is_added_and_said_to_lack_it(source: Path, into: Path) -> None:
    for name in TOKENIZER:
        (source / name).unlink()
    added = add(AddRequest(str(source / FILE), into), no_hub)
    assert not added.complete
    assert added.settings["chat_template"].assumed
    assert any("no tokenizer.json" in one for one in added.warnings)
    assert open_model_folder(added.folder).settings.chat_template == "chatml"


REPOSITORY, BASE = "someone/Qwen2.5-1.5B-Instruct-rk3588-1.2.3", "Qwen/Qwen2.5-1.5B-Instruct"
WEIGHTS = random.Random(2).randbytes(1_500_000)


@pytest.fixture
def server() -> Iterator[FakeHub]:
    base = {name: (SIM_CHAT / name).read_bytes() for name in TOKENIZER}
    files = {"a-w8a8.rkllm": WEIGHTS, "README.md": b"# model"}
    with serving(FakeHub({REPOSITORY: files, BASE: {**base, "model.safetensors": b"x"}})) as hub:
        hub.cards[REPOSITORY] = {"base_model": [BASE]}
        yield hub


def from_hub(server: FakeHub, into: Path, address: str = f"hf:{REPOSITORY}") -> AddedModel:
    hub = replace(open_hub({"HF_ENDPOINT": server.url}), sleep=lambda _: None)
    return add(AddRequest(address, into), lambda: hub)


def test_a_repository_is_added_with_the_tokenizer_of_its_base_model(
    server: FakeHub, into: Path
) -> None:
    server.cut_after, server.cuts = 700_000, 2
    added = from_hub(server, into)
    assert added.complete
    assert added.folder.name == "Qwen2.5-1.5B-Instruct"
    assert (added.folder / "a-w8a8.rkllm").read_bytes() == WEIGHTS
    assert added.tokenizer_source == f"hf:{BASE}, the base model"
    assert added.manifest.source == f"hf:{REPOSITORY}@{COMMIT[:12]}:a-w8a8.rkllm"
    platform = added.traits.platform
    assert platform is not None
    assert (platform.value, platform.source) == ("RK3588", "the name of its folder")


def test_a_download_that_failed_is_resumed_by_the_same_command(server: FakeHub, into: Path) -> None:
    server.cut_after, server.cuts, server.ranges = 700_000, 1, True
    hub = open_hub({"HF_ENDPOINT": server.url})

    def refuse(_: float) -> None:
        server.status = 503

    with pytest.raises(ConfigError, match="the same command resumes"):
        add(AddRequest(f"hf:{REPOSITORY}", into), lambda: replace(hub, sleep=refuse))
    assert names(into) == [".Qwen2.5-1.5B-Instruct.adding"]
    server.status = 0
    from_hub(server, into)
    assert server.requests[-1] == (
        f"/{REPOSITORY}/resolve/{COMMIT}/a-w8a8.rkllm",
        "bytes=700000-",
    )
    assert names(into) == ["Qwen2.5-1.5B-Instruct"]


def test_a_wrong_checksum_adds_nothing(server: FakeHub, into: Path) -> None:
    server.forged["a-w8a8.rkllm"] = "c" * 64
    with pytest.raises(ConfigError, match="checksum mismatch"):
        from_hub(server, into)
    assert names(into) == []


def test_an_unreachable_base_model_is_a_warning(server: FakeHub, into: Path) -> None:
    del server.repositories[BASE]
    added = from_hub(server, into)
    assert not added.complete
    assert any("could not be fetched" in one and BASE in one for one in added.warnings)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        pytest.param("", "holds 2 .rkllm files", id="several"),
        pytest.param(":b.rkllm", "has no b.rkllm", id="another file"),
        pytest.param(":../../etc/passwd", "leads out", id="climbing"),
    ],
)
def test_a_repository_with_several_models_needs_a_file(
    server: FakeHub, into: Path, file: str, words: str
) -> None:
    server.repositories[REPOSITORY]["4k/c.rkllm"] = WEIGHTS
    with pytest.raises(ConfigError, match=words):
        from_hub(server, into, f"hf:{REPOSITORY}{file}")
    assert not into.exists()
    added = from_hub(server, into, f"hf:{REPOSITORY}:4k/c.rkllm")
    assert (added.folder / "c.rkllm").is_file()


def test_a_model_card_beside_a_file_names_the_base_model(
    server: FakeHub, source: Path, into: Path
) -> None:
    for name in TOKENIZER:
        (source / name).unlink()
    (source / "README.md").write_text(f"---\nbase_model: {BASE}\n---\n# x\n")
    assert from_hub(server, into, str(source / FILE)).complete
    shutil.rmtree(into)
    (source / "README.md").write_text("---\nbase_model: [a\n---\n")
    assert not add(AddRequest(str(source / FILE), into), no_hub).complete


def test_an_assumed_template_gives_way_to_a_tokenizer_that_is_given_later(
    source: Path, into: Path
) -> None:
    for name in TOKENIZER:
        (source / name).unlink()
    place = add(AddRequest(str(source / FILE), into), no_hub).folder
    settings = place / "rkserve.yaml"
    settings.write_text(f"n_keep: 4 # mine\n{settings.read_text()}")
    again = AddRequest(str(place), into, place.name, str(SIM_CHAT), replace=True)
    assert add(again, no_hub).complete
    assert open_model_folder(place).settings.chat_template is None
    assert open_model_folder(place).settings.eos_token_ids == (2913,)
    assert settings.read_text().startswith("n_keep: 4 # mine\n")


def test_settings_in_braces_are_kept(source: Path, into: Path) -> None:
    (source / "rkserve.yaml").write_text("{context_length: 2048, n_keep: 4}\n")
    added = add(AddRequest(str(source), into, "chat"), no_hub)
    settings = open_model_folder(added.folder).settings
    assert (settings.context_length, settings.n_keep, settings.tool_format) == (2048, 4, "hermes")
