"""What a model folder says of its eyes: families, and what goes before them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import ConfigError
from rkserve.models.folder import open_model_folder
from rkserve.models.settings import FAMILIES, VisionSettings
from tests.support.paths import PROJECT
from tests.support.values.wire_folders import make_folder

WHOLE = {"size": 392, "tokens": 196, "tags": ["<a>", "</a>", "<b>"]}


def test_a_family_fills_in_and_the_folder_goes_before_it() -> None:
    known = VisionSettings.model_validate({"family": "qwen2-vl"})
    assert (known.size, known.tokens, known.tags[2]) == (392, 196, "<|image_pad|>")
    own = VisionSettings.model_validate({"family": "qwen2-vl", "size": 448, "tokens": 256})
    assert (own.size, own.tokens, own.tags) == (448, 256, known.tags)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_knows_is_taken_and_the_rest_is_asked_for(family: str) -> None:
    given = {**WHOLE, **FAMILIES[family]}
    whole = VisionSettings.model_validate({**WHOLE, "family": family, **FAMILIES[family]})
    assert (whole.size, whole.tokens, whole.tags) == (
        given["size"],
        given["tokens"],
        tuple(given["tags"]),
    )
    for name in {"size", "tokens", "tags"} - FAMILIES[family].keys():
        some = {key: value for key, value in WHOLE.items() if key != name}
        with pytest.raises(ValueError, match=name):
            VisionSettings.model_validate({**some, "family": family})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param("vision: {}", "size", id="nothing"),
        pytest.param("vision: {family: llava}", "family", id="an unknown family"),
        pytest.param("vision: {family: smolvlm}", "tokens", id="a family that says too little"),
        pytest.param("vision: {family: [a]}", "family", id="a list"),
        pytest.param("vision: 5", "vision", id="a number"),
        pytest.param("vision: {family: qwen2-vl, encoder: ../x.rknn}", ".rknn", id="elsewhere"),
        pytest.param("vision: {family: qwen2-vl, encoder: x.bin}", ".rknn", id="another kind"),
        pytest.param("vision: {family: qwen2-vl, size: 100000}", "2048", id="too large"),
        pytest.param("vision: {family: qwen2-vl, background: [0, 0, 256]}", "255", id="a colour"),
        pytest.param('vision: {family: qwen2-vl, tags: ["", "", "\\0"]}', "NUL", id="a NUL"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path: Path, settings: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_folder(tmp_path / "m", settings=settings)
    assert words in caught.value.message


def test_a_folder_without_the_section_sees_nothing(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "m").settings.vision is None


def test_the_shipped_folder_has_an_encoder_of_its_family() -> None:
    shipped = open_model_folder(PROJECT / "models" / "sim-vision")
    seen: Any = shipped.settings.vision
    assert seen.family == "qwen2-vl"
    assert (shipped.path / seen.encoder).is_file()
