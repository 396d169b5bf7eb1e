"""Base weights in the head's store: what is taken for a model, and what was said of a content."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import ArtifactMetadata, DeclaredArtifact
from rkserve.coordinator.artifacts.metadata import FOLDER, MetadataFolder
from rkserve.coordinator.artifacts.store import ArtifactRules, ArtifactStore
from rkserve.core.desired_state import BaseVersion
from rkserve.core.errors import ArtifactNotFound, ArtifactRefused, BodyTooLarge, ManifestInvalid
from rkserve.models.files import Parameter
from rkserve.native.sim.models import reseed
from tests.support.paths import PROJECT

MODEL = "sim-chat"
OWN = PROJECT / "models" / MODEL / "model.rkllm"
CONTENT = OWN.read_bytes()
OTHER = reseed(CONTENT, 7)
DIGEST = hashlib.sha256(OTHER).hexdigest()
PARAMETERS = (Parameter("lm_head", (4, 8), "bfloat16"),)


def claim(**said: Any) -> DeclaredArtifact:
    return DeclaredArtifact(
        **{"name": MODEL, "version": None, "model": MODEL, "base": True, **said}
    )


def store_in(folder: Path, *allowed: Path, **rules: Any) -> ArtifactStore:
    known = {"allowed_paths": allowed, "reserve_bytes": 0, **rules}
    made = ArtifactStore(folder, ArtifactRules(**known), own={MODEL: OWN})
    made.open()
    return made


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    folder = tmp_path / "shelf"
    folder.mkdir()
    (folder / "new.rkllm").write_bytes(OTHER)
    return folder


@pytest.fixture
def store(tmp_path: Path, shelf: Path) -> ArtifactStore:
    return store_in(tmp_path / "store", shelf)


def register(store: ArtifactStore, path: Path | str, **said: Any) -> BaseVersion | None:
    found = store.register("path", str(path), claim(**said))
    assert found is None or isinstance(found, BaseVersion)
    return found


@pytest.mark.parametrize("as_folder", [False, True], ids=["a file", "a model's folder"])
def test_base_weights_are_copied_and_known_by_their_content(
    store: ArtifactStore, shelf: Path, as_folder: bool
) -> None:
    base = register(store, shelf if as_folder else shelf / "new.rkllm")
    assert base == BaseVersion(MODEL, DIGEST[:12], DIGEST, len(OTHER))
    assert store.read(DIGEST, 0, len(OTHER)) == OTHER
    store.check(base)
    assert store.model(MODEL, DIGEST[:12]) == base


@pytest.mark.parametrize("way", ["the file", "its folder", "a copy", "a link"])
def test_the_model_s_own_file_is_nobody_s_copy(store: ArtifactStore, shelf: Path, way: str) -> None:
    (shelf / "copy.rkllm").write_bytes(CONTENT)
    (shelf / "link.rkllm").symlink_to(OWN)
    paths = {
        "the file": OWN,
        "its folder": OWN.parent,
        "a copy": shelf / "copy.rkllm",
        "a link": shelf / "link.rkllm",
    }
    found = store.located("path", str(paths[way]), claim())
    assert (found is None) == (way != "a copy"), "the folder's own file needs no manifest"
    assert register(store, paths[way]) is None
    assert store.own_digest(MODEL) == hashlib.sha256(CONTENT).hexdigest()
    assert store.own_digest("another") is None


def test_a_manifest_is_looked_for_beside_the_file_and_in_allowed_folders_alone(
    store: ArtifactStore, shelf: Path, tmp_path: Path
) -> None:
    asked = claim()
    assert store.located("url", "https://models.example/new.rkllm", asked) == asked
    given = replace(asked, manifest="{}")
    assert store.located("path", str(shelf / "new.rkllm"), given) == given
    (shelf / "new.rkllm.manifest.json").write_text(" {1}\n", encoding="utf-8")
    for place in (shelf / "new.rkllm", shelf):
        assert store.located("path", str(place), asked) == replace(asked, manifest="{1}")
    (shelf / "new.rkllm.manifest.json").write_bytes(b"\xff")
    with pytest.raises(ManifestInvalid, match=r"new\.rkllm\.manifest\.json cannot be read"):
        store.located("path", str(shelf / "new.rkllm"), asked)
    (tmp_path / "out.manifest.json").write_text("{}", encoding="utf-8")
    (shelf / "led.rkllm.manifest.json").symlink_to(tmp_path / "out.manifest.json")
    for outside in (tmp_path / "out", shelf / "led.rkllm", "relative"):
        with pytest.raises(ArtifactRefused):
            store.located("path", str(outside), asked)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b"GGUF" + bytes(400), "cannot be base weights", id="another format"),
        pytest.param(b"<html>not found</html>", "cannot be base weights", id="a page"),
        pytest.param(OTHER[:-9], "cannot be base weights", id="cut off"),
        pytest.param(reseed(CONTENT, 7, model_id="sim-code"), "model_id", id="another model"),
        pytest.param(b"real weights" * 50, "simulated", id="not for these boards"),
    ],
)
def test_what_is_no_model_for_these_boards_is_refused_and_not_kept(
    store: ArtifactStore, shelf: Path, content: bytes, why: str
) -> None:
    (shelf / "bad.rkllm").write_bytes(content)
    with pytest.raises(ArtifactRefused, match=why):
        register(store, shelf / "bad.rkllm")
    assert store.digests() == ()


def test_a_model_for_another_soc_is_refused(tmp_path: Path, shelf: Path) -> None:
    for platform in ("rk3588", "rk3576", "any"):
        (shelf / f"{platform}.rkllm").write_bytes(reseed(CONTENT, 3, platform=platform))
    own = {MODEL: shelf / "rk3588.rkllm"}
    rules = ArtifactRules(allowed_paths=(shelf,), reserve_bytes=0)
    store = ArtifactStore(tmp_path / "store", rules, own=own)
    store.open()
    with pytest.raises(ArtifactRefused, match="'platform' is rk3576"):
        register(store, shelf / "rk3576.rkllm")
    assert register(store, shelf / "any.rkllm") is not None


def test_paths_lead_nowhere_else(store: ArtifactStore, tmp_path: Path, shelf: Path) -> None:
    outside = tmp_path / "outside.rkllm"
    outside.write_bytes(OTHER)
    (shelf / "out.rkllm").symlink_to(outside)
    for path in (outside, shelf / "out.rkllm", shelf / ".." / "outside.rkllm"):
        with pytest.raises(ArtifactRefused, match="allowed_paths"):
            register(store, path)
    with pytest.raises(ArtifactRefused, match="absolute"):
        register(store, "new.rkllm")
    with pytest.raises(ArtifactNotFound):
        register(store, shelf / "missing.rkllm")
    (shelf / "empty").mkdir()
    with pytest.raises(ArtifactNotFound, match=r"no \*.rkllm"):
        register(store, shelf / "empty")
    with pytest.raises(ArtifactRefused, match="names no folder"):
        register(store_in(tmp_path / "closed"), shelf / "new.rkllm")


def test_models_have_a_limit_of_their_own(tmp_path: Path, shelf: Path) -> None:
    small = store_in(tmp_path / "small", shelf, max_model_bytes=len(OTHER) - 1)
    with pytest.raises(BodyTooLarge, match="max_model_bytes"):
        register(small, shelf / "new.rkllm")
    large = store_in(tmp_path / "large", shelf, max_bytes=10, max_model_bytes=len(OTHER))
    assert register(large, shelf / "new.rkllm") is not None


def test_they_can_be_sent_as_well(store: ArtifactStore) -> None:
    upload = store.upload_begin(claim(version="step-7", parameters=PARAMETERS))
    half = len(OTHER) // 2
    assert store.upload_part(upload, 0, OTHER[:half]) == half
    store.upload_part(upload, half, OTHER[half:])
    base = store.upload_end(upload, {"base_model": MODEL})
    assert base == BaseVersion(MODEL, "step-7", DIGEST, len(OTHER))
    assert store.facts(DIGEST) == ArtifactMetadata(PARAMETERS, None, (f"{MODEL}@step-7",))


def test_what_was_said_of_a_content_outlives_a_restart_and_goes_with_it(
    store: ArtifactStore, tmp_path: Path, shelf: Path
) -> None:
    register(store, shelf / "new.rkllm", version="step-7", parameters=PARAMETERS)
    again = store_in(tmp_path / "store", shelf)
    assert again.model(MODEL, "step-7").digest == DIGEST
    assert again.facts(DIGEST).parameters == PARAMETERS
    assert again.remove(DIGEST)
    assert again.facts(DIGEST) == ArtifactMetadata()
    with pytest.raises(ArtifactNotFound, match="send them anew"):
        again.model(MODEL, "step-7")
    assert list((tmp_path / "store" / FOLDER).iterdir()) == []


def test_a_name_stands_for_one_content(store: ArtifactStore, shelf: Path) -> None:
    register(store, shelf / "new.rkllm", version="step-7")
    (shelf / "newer.rkllm").write_bytes(reseed(CONTENT, 8))
    with pytest.raises(ArtifactRefused, match="another content"):
        register(store, shelf / "newer.rkllm", version="step-7")
    assert store.digests() == (DIGEST,)
    register(store, shelf / "new.rkllm", version="best")
    assert store.model(MODEL, "best") == BaseVersion(MODEL, "best", DIGEST, len(OTHER))


def test_what_is_said_of_an_adapter_is_kept_beside_it(store: ArtifactStore) -> None:
    said = DeclaredArtifact("tone", "v1", MODEL, parameters=PARAMETERS, base_digest="c" * 64)
    upload = store.upload_begin(said)
    store.upload_part(upload, 0, b"an adapter")
    version = store.upload_end(upload)
    assert store.facts(version.digest) == ArtifactMetadata(PARAMETERS, "c" * 64)
    with pytest.raises(ArtifactRefused, match="base_digest"):
        store.upload_begin(DeclaredArtifact("tone", "v1", MODEL, base_digest="short"))


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"parameters": [1], "base_digest": null, "labels": []}', '{"labels": 1}'],
)
def test_facts_that_cannot_be_read_are_forgotten(tmp_path: Path, content: str) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / f"{DIGEST}.json").write_text(content)
    (folder / f"{'e' * 64}.json").write_text("{}")  # of a file that is gone
    (folder / "torn.new").write_text("{")
    facts = MetadataFolder(folder)
    facts.open((DIGEST,))
    assert facts.of(DIGEST) == ArtifactMetadata()
    assert list(folder.iterdir()) == []
    facts.add(DIGEST, ArtifactMetadata(PARAMETERS))
    reread = MetadataFolder(folder)
    reread.open((DIGEST,))
    assert reread.of(DIGEST) == ArtifactMetadata(PARAMETERS)


def test_a_damaged_file_of_facts_stops_neither_the_start_nor_their_end(tmp_path: Path) -> None:
    folder, other = tmp_path / FOLDER, "e" * 64
    for digest in (DIGEST, other, "f" * 64):
        (folder / f"{digest}.json" / "in").mkdir(parents=True)
    (folder / f"{'a' * 64}.json").write_text("[" * 100_000)  # deeper than a parser goes
    facts = MetadataFolder(folder)
    facts.open((DIGEST, "a" * 64))
    assert list(folder.iterdir()) == []
    facts.add(DIGEST, ArtifactMetadata(PARAMETERS))
    (folder / f"{DIGEST}.json").unlink()
    (folder / f"{DIGEST}.json").mkdir()  # by a hand, or a file system's repair
    facts.forget(DIGEST)
    assert facts.of(DIGEST) == ArtifactMetadata()
    assert list(folder.iterdir()) == []


def test_facts_are_added_up() -> None:
    first = ArtifactMetadata(PARAMETERS, None, ("m@1",))
    assert first.with_more(
        ArtifactMetadata(base_digest="c" * 64, labels=("m@2",))
    ) == ArtifactMetadata(PARAMETERS, "c" * 64, ("m@1", "m@2"))
