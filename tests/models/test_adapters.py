"""The adapters of a model folder: what is found, what is broken and why, and what a name means."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from rkserve.core.errors import AdapterBroken, ConfigError, ModelNotFound, RequestError
from rkserve.core.messages import AdapterRef
from rkserve.models.adapters import (
    Adapter,
    AdapterChoice,
    AdapterFolder,
    adapters,
    open_adapter,
    resolve,
)

CONTENT = b"weights of an adapter"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
OTHER_DIGEST = hashlib.sha256(b"other").hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "qwen"
    made.mkdir()
    return made


def put(
    folder: Path,
    name: str = "legal",
    version: str = "v1",
    content: bytes | None = CONTENT,
    manifest: object = None,
) -> Path:
    """Put an adapter into a model folder and return its own folder."""
    place = folder / "adapters" / name / version
    place.mkdir(parents=True)
    if content is not None:
        (place / "adapter.rkllm").write_bytes(content)
    if manifest is not None:
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        (place / "manifest.json").write_text(text)
    return place


def the_only(folder: Path) -> Adapter:
    (found,) = adapters(folder)
    return found


def test_a_folder_without_adapters_has_none(folder: Path) -> None:
    assert adapters(folder) == ()
    (folder / "adapters").mkdir()
    assert adapters(folder) == ()


def test_an_adapter_needs_no_manifest(folder: Path) -> None:
    place = put(folder)
    found = the_only(folder)
    assert (found.name, found.version, found.label) == ("legal", "v1", "legal@v1")
    assert (found.path, found.size_bytes) == (place / "adapter.rkllm", len(CONTENT))
    assert found.ref() == AdapterRef("legal", "v1", DIGEST, 1.0)


def test_a_manifest_gives_the_scale_and_may_say_what_is_true(folder: Path) -> None:
    truth = {"scale": 0.5, "sha256": DIGEST, "size": len(CONTENT), "base_model": "qwen"}
    put(folder, manifest=truth)
    assert the_only(folder).ref() == AdapterRef("legal", "v1", DIGEST, 0.5)


def test_a_machine_without_the_file_takes_the_manifest_s_word_and_a_board_does_not(
    folder: Path,
) -> None:
    put(folder, content=None, manifest={"sha256": DIGEST, "size": 21, "scale": 2})
    found = the_only(folder)
    assert (found.path, found.size_bytes) == (None, 21)
    assert found.ref() == AdapterRef("legal", "v1", DIGEST, 2.0)
    with pytest.raises(AdapterBroken, match=r"legal@v1.*adapter\.rkllm is missing on this board"):
        open_adapter([AdapterFolder.of_model(folder)], found.ref())


@pytest.mark.parametrize(
    ("content", "manifest", "words"),
    [
        pytest.param(None, None, r"adapter\.rkllm is missing", id="an empty folder"),
        pytest.param(None, {"scale": 2}, "no manifest.json gives its sha256", id="no digest"),
        pytest.param(
            CONTENT,
            {"sha256": OTHER_DIGEST},
            f"says sha256 {OTHER_DIGEST}, .*{DIGEST}",
            id="sha256",
        ),
        pytest.param(CONTENT, {"size": 5}, "says size 5, and it is 21", id="size"),
        pytest.param(
            CONTENT, {"base_model": "llama"}, "says base_model llama, and it is qwen", id="base"
        ),
        pytest.param(CONTENT, "{", "not valid JSON", id="no JSON"),
        pytest.param(CONTENT, "[]", "a block of keys", id="a list"),
        pytest.param(CONTENT, {"skale": 1}, "did you mean 'scale'", id="an unknown key"),
        pytest.param(CONTENT, {"scale": 0}, "scale: must be a number above 0", id="scale 0"),
        pytest.param(CONTENT, {"scale": "1"}, "scale: must be a number", id="a text for a scale"),
        pytest.param(CONTENT, '{"scale": NaN}', "scale", id="no number"),
        pytest.param(CONTENT, {"sha256": "12"}, "64 lower-case hex", id="no digest at all"),
        pytest.param(
            CONTENT, '{"scale": 1, "scale": 2}', "has 'scale' twice", id="a key that is there twice"
        ),
        pytest.param(CONTENT, " " * 70_000, "larger than 65536 bytes", id="an endless manifest"),
    ],
)
def test_what_cannot_be_true_is_listed_as_broken_with_the_reason(
    folder: Path, content: bytes | None, manifest: object, words: str
) -> None:
    put(folder, content=content, manifest=manifest)
    put(folder, "fine")
    fine, broken = adapters(folder)
    assert fine.ref().digest == DIGEST
    assert broken.label == "legal@v1"
    with pytest.raises(AdapterBroken, match=words):
        broken.ref()
    with pytest.raises(AdapterBroken, match=words):
        open_adapter([AdapterFolder.of_model(folder)], AdapterRef("legal", "v1", DIGEST))


@pytest.mark.parametrize("what", ["the file", "the version", "the name", "the manifest"])
def test_a_link_that_leads_out_of_the_model_folder_is_refused(
    folder: Path, tmp_path: Path, what: str
) -> None:
    outside = put(tmp_path / "outside", manifest={"scale": 1})
    inside = folder / "adapters" / "legal"
    if what == "the name":
        inside.parent.mkdir()
        inside.symlink_to(outside.parent)
    elif what == "the version":
        inside.mkdir(parents=True)
        (inside / "v1").symlink_to(outside)
    else:
        name = "adapter.rkllm" if what == "the file" else "manifest.json"
        place = put(folder)
        (place / name).unlink(missing_ok=True)
        (place / name).symlink_to(outside / name)
    assert "leads out of qwen, its folder" in the_only(folder).broken


def test_a_link_within_the_model_folder_is_followed(folder: Path) -> None:
    place = put(folder)
    (place.parent / "stable").symlink_to("v1")
    stable, v1 = adapters(folder)
    assert (stable.version, stable.path, stable.digest) == ("stable", v1.path, DIGEST)


def test_a_model_folder_that_is_a_link_itself_is_no_climbing_out(
    folder: Path, tmp_path: Path
) -> None:
    put(folder, manifest={"base_model": "link"})
    (tmp_path / "link").symlink_to(folder)
    assert the_only(tmp_path / "link").broken == ""


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda file: file.mkdir(), id="a folder"),
        pytest.param(os.mkfifo, id="a pipe, which would never end"),
        pytest.param(lambda file: file.symlink_to(file), id="a link to itself"),
    ],
)
def test_what_is_no_file_is_broken_and_hangs_nobody(folder: Path, make: object) -> None:
    assert callable(make)
    make(put(folder, content=None) / "adapter.rkllm")
    assert the_only(folder).broken


@pytest.mark.parametrize("name", ["my adapter", "a:b", "a@b", "-a", "x" * 65])
def test_a_name_that_could_not_be_asked_for_is_left_out_and_logged(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, name)
    put(folder, ".hidden")
    put(folder, "fine", name)
    with caplog.at_level(logging.WARNING):
        assert adapters(folder) == ()
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [
        name,
        name,
    ]


def test_stray_files_are_no_adapters(folder: Path) -> None:
    put(folder)
    (folder / "adapters" / "README.md").write_text("hello")
    (folder / "adapters" / "legal" / "notes.txt").write_text("hello")
    assert the_only(folder).label == "legal@v1"


def test_adapters_that_cannot_be_listed_are_an_error_of_the_configuration(folder: Path) -> None:
    (folder / "adapters").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be listed"):
        adapters(folder)


def test_versions_are_in_natural_order(folder: Path) -> None:
    for version in ("v10", "v9", "1.10.0", "1.9.1", "2", "1.9.01"):
        put(folder, version=version)
    found = [adapter.version for adapter in adapters(folder)]
    assert found == ["1.9.01", "1.9.1", "1.10.0", "2", "v9", "v10"]


# -- opening one on a board -----------------------------------------------------------------------


def test_a_board_opens_what_the_request_means(folder: Path) -> None:
    put(folder)
    ref = the_only(folder).ref()
    assert (
        open_adapter([AdapterFolder.of_model(folder)], ref).path
        == folder / "adapters" / "legal" / "v1" / "adapter.rkllm"
    )


def test_a_board_whose_file_differs_or_was_changed_refuses_it_and_names_both(folder: Path) -> None:
    place = put(folder)
    ref = the_only(folder).ref()
    times = (place / "adapter.rkllm").stat()
    (place / "adapter.rkllm").write_bytes(CONTENT.swapcase())
    os.utime(place / "adapter.rkllm", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(AdapterBroken, match=rf"the request means {DIGEST[:12]}"):
        open_adapter([AdapterFolder.of_model(folder)], ref)


@pytest.mark.parametrize("name", ["..", "../legal", "/etc", "", "a/b", "a\0b"])
def test_a_reference_never_leads_out_of_the_folder(folder: Path, name: str) -> None:
    put(folder)
    for ref in (AdapterRef(name, "v1", DIGEST), AdapterRef("legal", name, DIGEST)):
        with pytest.raises(AdapterBroken, match="its name is not one of an adapter"):
            open_adapter([AdapterFolder.of_model(folder)], ref)


def test_an_adapter_that_a_board_does_not_have_is_missing_by_name(folder: Path) -> None:
    with pytest.raises(AdapterBroken, match=r"'new@v1' cannot be used: .* missing"):
        open_adapter([AdapterFolder.of_model(folder)], AdapterRef("new", "v1", DIGEST))


# -- what the model of a request means ------------------------------------------------------------


def found(name: str, version: str, broken: str = "") -> Adapter:
    return Adapter(name, version, digest=f"{name}-{version}", broken=broken)


def chosen(model: str, name: str, version: str) -> AdapterChoice:
    return AdapterChoice(model, AdapterRef(name, version, f"{name}-{version}"))


CATALOG = {
    "qwen": (found("legal", "v9"), found("legal", "v10"), found("both", "1"), found("llama", "1")),
    "llama": (
        found("poet", "1"),
        found("poet", "2", broken="its size is wrong"),
        found("both", "2"),
    ),
}


@pytest.mark.parametrize(
    ("asked", "means"),
    [
        pytest.param("qwen", AdapterChoice("qwen", None), id="a model"),
        pytest.param("legal", chosen("qwen", "legal", "v10"), id="an adapter, the newest version"),
        pytest.param("legal@v9", chosen("qwen", "legal", "v9"), id="a version"),
        pytest.param("qwen:legal", chosen("qwen", "legal", "v10"), id="of a model"),
        pytest.param("qwen:legal@v9", chosen("qwen", "legal", "v9"), id="of a model, a version"),
        pytest.param("llama:poet@1", chosen("llama", "poet", "1"), id="the older one, by name"),
        pytest.param(
            "llama", AdapterChoice("llama", None), id="a model before an adapter of its name"
        ),
        pytest.param("qwen:llama", chosen("qwen", "llama", "1"), id="such an adapter by its model"),
        pytest.param("llama:both", chosen("llama", "both", "2"), id="one of two of a name"),
        pytest.param("both@1", chosen("qwen", "both", "1"), id="only one has that version"),
    ],
)
def test_the_model_of_a_request_means(asked: str, means: AdapterChoice) -> None:
    assert resolve(asked, CATALOG) == means


@pytest.mark.parametrize(
    "asked",
    [
        "gpt-4o",
        "legal@v11",
        "legal@",
        "@v9",
        "",
        ":",
        "qwen:",
        "qwen:poet",
        "gpt:legal",
        ":legal",
        "qwen:qwen",
        "qwen@v9",
        "qwen:legal:v9",
        "qwen:legal@v9@v9",
        "Legal",
        "../qwen",
    ],
)
def test_what_there_is_not_is_a_404_with_the_name_that_was_asked(asked: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve(asked, CATALOG)
    assert refused.value.model == asked


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        pytest.param("nowhere", "model", id="a name"),
        pytest.param("nowhere:legal", "model", id="an adapter of no model"),
        pytest.param("qwen:nothing", "adapter", id="an adapter of a model"),
        pytest.param("legal@v99", "adapter", id="a version"),
    ],
)
def test_an_adapter_that_there_is_not_is_called_an_adapter(asked: str, kind: str) -> None:
    with pytest.raises(ModelNotFound) as refused:
        resolve(asked, CATALOG)
    assert refused.value.message.startswith(f"The {kind} '{asked}' does not exist.")
    assert refused.value.code == "model_not_found"


def test_a_newest_version_that_is_broken_is_not_replaced_by_an_older_one_unasked() -> None:
    with pytest.raises(AdapterBroken, match="'poet@2' cannot be used: its size is wrong"):
        resolve("poet", CATALOG)


def test_an_adapter_of_several_models_has_to_be_asked_for_by_model() -> None:
    with pytest.raises(RequestError, match="ask for 'llama:both', 'qwen:both'") as refused:
        resolve("both", CATALOG)
    assert refused.value.param == "model"
