"""The binding of librknnrt over the simulated one: its layout, what it makes, what it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import CallFailed, LibraryMissing, LoadFailed, Misuse, ReleaseRefused
from rkserve.native.binding.image_encoder import ImageEncoderShape, RknnEncoder
from rkserve.native.decl.rknn_api import ffi
from rkserve.native.sim.build import ensure_built, ensure_encoder_built
from rkserve.native.sim.models import SimEncoder
from tests.support.paths import TESTS

FACTS = json.loads((TESTS / "data" / "rknn_abi.json").read_text())["structs"]
SMALL = SimEncoder(width=24, height=16, tokens=9, embed=64)


def picture(seed: int, width: int = 24, height: int = 16) -> bytes:
    return random.Random(seed).randbytes(width * height * 3)


@contextmanager
def opened(place: Path, sim: SimEncoder = SMALL, **how: Any) -> Iterator[RknnEncoder]:
    sim.write(place / "vision.rknn")
    encoder = RknnEncoder(ensure_encoder_built(), place / "vision.rknn", **how)
    try:
        yield encoder
    finally:
        encoder.close()


@pytest.mark.parametrize("name", FACTS)
def test_a_struct_has_the_members_of_the_interface_where_they_are(name: str) -> None:
    facts = FACTS[name]
    assert (ffi.sizeof(name), ffi.alignof(name)) == (facts["size"], facts["align"])
    found = {
        field: [offset.offset, ffi.sizeof(offset.type)] for field, offset in ffi.typeof(name).fields
    }
    assert found == facts["fields"]


@pytest.mark.parametrize(
    "sim",
    [
        pytest.param(SMALL, id="one output"),
        pytest.param(SimEncoder(24, 16, tokens=7, embed=16), id="no whole grid"),
        pytest.param(SimEncoder(24, 16, tokens=4, embed=8, n_output=4), id="several outputs"),
    ],
)
def test_an_image_becomes_its_rows(tmp_path: Path, sim: SimEncoder) -> None:
    with opened(tmp_path, sim) as encoder:
        assert encoder.shape == ImageEncoderShape(24, 16, sim.tokens, sim.embed * sim.n_output)
        assert encoder.release == "2.3.2"
        rows = [encoder.encode(picture(seed)) for seed in (1, 2, 1)]
    assert len(rows[0]) == sim.tokens * sim.embed * sim.n_output * 4
    assert rows == [sim.encoded(picture(seed)) for seed in (1, 2, 1)]
    assert rows[0] != rows[1]


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_several_cores_make_the_same_rows(tmp_path: Path, cores: int) -> None:
    with opened(tmp_path, cores=cores) as encoder:
        assert encoder.encode(picture(5)) == SMALL.encoded(picture(5))


def test_one_pixel_changes_one_row(tmp_path: Path) -> None:
    pixels = picture(3)
    changed = bytes([pixels[0] ^ 1]) + pixels[1:]
    with opened(tmp_path) as encoder:
        before, after = encoder.encode(pixels), encoder.encode(changed)
    row = 64 * 4
    assert before[:row] != after[:row]
    assert before[row:] == after[row:]


@pytest.mark.parametrize("size", [0, 24 * 16 * 3 - 1, 24 * 16 * 3 + 1])
def test_an_image_of_another_size_never_reaches_the_library(tmp_path: Path, size: int) -> None:
    with opened(tmp_path) as encoder, pytest.raises(Misuse, match="24x16"):
        encoder.encode(bytes(size))


def test_a_run_that_fails_leaves_an_encoder_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as encoder:
        monkeypatch.setenv("RKSIM_ENCODER_FAULT", "run")
        with pytest.raises(CallFailed, match="rknn_run returned -1"):
            encoder.encode(picture(1))
        monkeypatch.delenv("RKSIM_ENCODER_FAULT")
        assert encoder.encode(picture(1)) == SMALL.encoded(picture(1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "image encoder .* does not exist", id="no file"),
        pytest.param(b"", "rknn_init returned -6", id="an empty file"),
        pytest.param(b"RKNN" + bytes(100), "rknn_init returned -6", id="another file"),
    ],
)
def test_a_file_that_is_no_encoder_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    model = tmp_path / "vision.rknn"
    if content is not None:
        model.write_bytes(content)
    with pytest.raises(LoadFailed, match=words):
        RknnEncoder(ensure_encoder_built(), model)
    with opened(tmp_path) as encoder:  # and leaves nothing behind
        assert encoder.shape.tokens == SMALL.tokens


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        pytest.param("2.3.2", True, id="the oldest that the vendor wants"),
        pytest.param("2.4.0", True, id="a later one"),
        pytest.param("2.2.0", False, id="too old"),
        pytest.param("3.0.0", False, id="unknown"),
        pytest.param("what", False, id="no version at all"),
    ],
)
def test_only_known_releases_are_driven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool
) -> None:
    monkeypatch.setenv("RKSIM_ENCODER_VERSION", version)
    if accepted:
        with opened(tmp_path) as encoder:
            assert encoder.release == version
        return
    with pytest.raises(ReleaseRefused, match=version), opened(tmp_path):
        pass
    monkeypatch.delenv("RKSIM_ENCODER_VERSION")
    with opened(tmp_path):
        pass  # the context of the refused one was given back: there is only one


def test_a_missing_library_is_called_by_its_name(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "vision.rknn")
    with pytest.raises(LibraryMissing, match=r"librknnrt\.so"):
        RknnEncoder(tmp_path / "nothing.so", tmp_path / "vision.rknn")


def test_another_library_is_refused_before_it_is_called(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "vision.rknn")
    with pytest.raises(LibraryMissing, match="rknn_init"):
        RknnEncoder(ensure_built("1.3.0"), tmp_path / "vision.rknn")
