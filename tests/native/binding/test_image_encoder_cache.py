"""What an engine makes of the images of a run: which are encoded, which are kept, what is left."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import CallFailed, LoadFailed
from rkserve.core.run_params import Picture
from rkserve.native.binding.image_encoder import CachedEncoder, ImageEncoderShape
from rkserve.native.binding.releases import RELEASES
from rkserve.native.runtime import Image, VisionParams

SIDE, TOKENS, ROWS = 4, 2, 24  # bytes that the encoder makes of an image
TAGS = ("<s>", "</s>", "<c>")
PARAMS = VisionParams(Path("lib.so"), Path("m.rknn"), SIDE, SIDE, TOKENS, TAGS)


@dataclass
class Encoder:
    """Makes the beginning of an image its rows, and notes which ones it was given."""

    shape: ImageEncoderShape = field(
        default_factory=lambda: ImageEncoderShape(SIDE, SIDE, TOKENS, 3)
    )
    given: list[bytes] = field(default_factory=list)
    failure: Exception | None = None

    def encode(self, pixels: bytes) -> bytes:
        self.given.append(pixels)
        if self.failure is not None:
            raise self.failure
        return pixels[:ROWS]


def picture(seed: int) -> Picture:
    return Picture(SIDE, SIDE, random.Random(seed).randbytes(SIDE * SIDE * 3))


def vision(release: str = "1.3.0", **changes: Any) -> tuple[Encoder, CachedEncoder]:
    encoder = Encoder()
    return encoder, CachedEncoder(
        encoder,
        replace(PARAMS, **changes),
        tags_at_load=RELEASES[release].image_tags_at_load,
    )


def seen(of: CachedEncoder, *seeds: int, owner: int = 0) -> Image:
    found = of.encode([(picture(seed), owner) for seed in seeds], lambda: False)
    assert found is not None
    assert found.data == b"".join(picture(seed).pixels[:ROWS] for seed in seeds)
    return found


@pytest.mark.parametrize(
    ("release", "tags"),
    [
        pytest.param("1.3.0", TAGS, id="with the input"),
        pytest.param("1.2.3", ("", "", ""), id="at the load"),
    ],
)
def test_rows_come_with_all_that_the_release_wants(release: str, tags: tuple[str, ...]) -> None:
    _, one = vision(release)
    found = seen(one, 1, 2)
    assert (found.n_images, found.n_tokens, found.width, found.height) == (2, TOKENS, SIDE, SIDE)
    assert found.tags == tags


def test_an_image_is_encoded_once_however_often_it_comes() -> None:
    encoder, one = vision()
    for seeds in ((1,), (1,), (2, 1, 2), (1, 2)):
        seen(one, *seeds)
    assert encoder.given == [picture(1).pixels, picture(2).pixels]
    assert one.encoded == 2


def test_the_image_of_another_owner_is_encoded_as_if_it_were_new() -> None:
    encoder, one = vision()
    for owner in (0, 7, 0, 7):
        seen(one, 1, owner=owner)
    assert encoder.given == [picture(1).pixels] * 2


@pytest.mark.parametrize(
    ("room", "encoded"),
    [
        pytest.param(2 * ROWS, [1, 2, 3, 2], id="room for two: the longest unused goes"),
        pytest.param(3 * ROWS - 1, [1, 2, 3, 2], id="almost room for three"),
        pytest.param(3 * ROWS, [1, 2, 3], id="room for all"),
        pytest.param(0, [1, 2, 1, 3, 1, 2], id="no room"),
    ],
)
def test_what_is_kept_is_bounded(room: int, encoded: list[int]) -> None:
    encoder, one = vision(cache_bytes=room)
    for seed in (1, 2, 1, 3, 1, 2):
        seen(one, seed)
    assert encoder.given == [picture(seed).pixels for seed in encoded]


def test_a_run_that_is_left_encodes_no_further_image() -> None:
    encoder, one = vision()
    assert one.encode([(picture(1), 0), (picture(2), 0)], lambda: bool(encoder.given)) is None
    assert len(encoder.given) == 1


def test_what_could_not_be_encoded_is_not_kept() -> None:
    encoder, one = vision()
    encoder.failure = CallFailed("rknn_run", -1)
    with pytest.raises(CallFailed):
        seen(one, 1)
    encoder.failure = None
    seen(one, 1)
    assert len(encoder.given) == 2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tokens": TOKENS + 1}, id="other tokens"),
        pytest.param({"width": SIDE + 1}, id="another width"),
        pytest.param({"height": SIDE + 1}, id="another height"),
    ],
)
def test_an_encoder_that_is_not_the_folders_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LoadFailed, match=r"has 4x4 pixels and 2 tokens"):
        vision(**changes)
