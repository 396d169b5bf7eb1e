"""Files of images to pixels: sizes, borders, turns, and files that mean harm."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zlib
from typing import Any

import pytest
from PIL import Image

from rkserve.core.errors import RequestError
from rkserve.models.settings import VisionSettings
from rkserve.router.images import MAX_SCANS, picture_of

PATH = "messages[0].content[1].image_url.url"
RED, BLUE, GREY = (255, 0, 0), (0, 0, 255), (128, 128, 128)
PIXELS = 1_000_000


def vision(size: int = 32, **changes: Any) -> VisionSettings:
    return VisionSettings(size=size, tokens=4, tags=("", "", ""), **changes)


def file_of(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


def plain(width: int, height: int, colour: Any = RED, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), colour)


def seen(data: bytes, size: int = 32, most: int = PIXELS, **changes: Any) -> Image.Image:
    picture = picture_of(data, PATH, vision(size, **changes), most)
    assert (picture.width, picture.height) == (size, size)
    return Image.frombytes("RGB", (size, size), picture.pixels)


def refused(data: bytes, most: int = PIXELS) -> str:
    with pytest.raises(RequestError) as caught:
        picture_of(data, PATH, vision(), most)
    assert caught.value.param == PATH
    assert PATH in caught.value.message
    return caught.value.message


def colour(image: Image.Image, at: tuple[int, int]) -> tuple[int, ...]:
    """Red, green and blue of one pixel."""
    found = image.getpixel(at)
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_square_image_fills_what_the_encoder_takes(form: str) -> None:
    shown = seen(file_of(plain(100, 100), form))
    for at in ((0, 0), (16, 16), (31, 31)):
        assert all(abs(a - b) < 8 for a, b in zip(colour(shown, at), RED, strict=True))


@pytest.mark.parametrize(
    ("size", "inside", "border"),
    [
        pytest.param((80, 40), (16, 16), (16, 2), id="wide"),
        pytest.param((40, 80), (16, 16), (2, 16), id="tall"),
        pytest.param((2, 1), (16, 16), (16, 2), id="enlarged"),
    ],
)
def test_an_image_that_is_not_square_gets_borders(
    size: tuple[int, int], inside: tuple[int, int], border: tuple[int, int]
) -> None:
    shown = seen(file_of(plain(*size)))
    assert (shown.getpixel(inside), shown.getpixel(border)) == (RED, GREY)
    stretched = seen(file_of(plain(*size)), fit="stretch")
    assert stretched.getpixel(border) == RED


def test_what_is_transparent_becomes_background() -> None:
    image = plain(40, 40, (0, 0, 0, 0), "RGBA")
    image.paste((255, 0, 0, 255), (0, 0, 40, 20))
    shown = seen(file_of(image), background=BLUE)
    assert (shown.getpixel((16, 4)), shown.getpixel((16, 28))) == (RED, BLUE)


@pytest.mark.parametrize(
    ("mode", "colour", "wanted"),
    [
        pytest.param("L", 200, (200, 200, 200), id="grey"),
        pytest.param("1", 1, (255, 255, 255), id="black and white"),
        pytest.param("I;16", 200 * 256, (200, 200, 200), id="16 bits"),
        pytest.param("LA", (200, 255), (200, 200, 200), id="grey with alpha"),
    ],
)
def test_other_depths_of_colour_are_read(mode: str, colour: Any, wanted: Any) -> None:
    assert seen(file_of(plain(40, 40, colour, mode))).getpixel((16, 16)) == wanted


def test_a_palette_is_resolved() -> None:
    image = plain(40, 40).quantize(4)
    assert seen(file_of(image)).getpixel((16, 16)) == RED


@pytest.mark.parametrize(
    ("orientation", "red_at"),
    [
        pytest.param(1, (16, 2), id="as it is"),
        pytest.param(3, (16, 29), id="upside down"),
        pytest.param(6, (29, 16), id="a quarter clockwise"),
        pytest.param(8, (2, 16), id="a quarter counter-clockwise"),
        pytest.param(99, (16, 2), id="no such way"),
    ],
)
def test_a_photo_is_shown_as_it_was_taken(orientation: int, red_at: tuple[int, int]) -> None:
    image = plain(64, 64, BLUE)
    image.paste(RED, (0, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = seen(file_of(image, "JPEG", exif=exif, quality=95))
    red, _, blue = colour(shown, red_at)
    assert red - blue > 200


def test_of_a_moving_image_the_first_frame_is_seen() -> None:
    frames = [plain(32, 32), plain(32, 32, BLUE)]
    for form in ("GIF", "WEBP"):
        data = file_of(frames[0], form, save_all=True, append_images=frames[1:], duration=10)
        red, _, blue = colour(seen(data), (16, 16))
        assert red > blue, form


def test_the_same_file_has_the_same_pixels_and_another_one_others() -> None:
    noise = Image.frombytes("RGB", (64, 64), random.Random(1).randbytes(64 * 64 * 3))
    first, again = (picture_of(file_of(noise), PATH, vision(), PIXELS) for _ in range(2))
    assert first == again
    assert first != picture_of(file_of(noise.rotate(90)), PATH, vision(), PIXELS)


# -- harm -----------------------------------------------------------------------------------------


def png(width: int, height: int, body: bytes) -> bytes:
    """A PNG whose header may lie."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def webp(width: int, height: int, kind: bytes = b"VP8X") -> bytes:
    """A WebP of nothing but a header."""
    if kind == b"VP8X":
        body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == b"VP8L":
        body = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
    else:
        body = bytes(6) + struct.pack("<HH", width, height)
    return (
        b"RIFF"
        + struct.pack("<I", len(body) + 12)
        + b"WEBP"
        + kind
        + struct.pack("<I", len(body))
        + body
    )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(60_000, 60_000, zlib.compress(bytes(10_000))), id="a PNG"),
        pytest.param(png(2**31 - 1, 1, b""), id="a PNG of one line"),
        pytest.param(webp(16_384, 16_384), id="a WebP"),
        pytest.param(webp(16_000, 16_000, b"VP8L"), id="a lossless WebP"),
        pytest.param(webp(16_000, 16_000, b"VP8 "), id="a lossy WebP"),
        pytest.param(file_of(plain(1001, 1000), "JPEG"), id="a JPEG"),
        pytest.param(file_of(plain(1001, 1000), "GIF"), id="a GIF"),
    ],
)
def test_a_bomb_is_refused_before_it_is_unpacked(data: bytes) -> None:
    assert "are the most that are read" in refused(data)


def test_an_image_of_exactly_the_limit_is_read() -> None:
    assert seen(file_of(plain(1000, 1000)), most=PIXELS).getpixel((16, 16)) == RED


def test_a_jpeg_of_too_many_passes_is_refused() -> None:
    data = file_of(plain(64, 64), "JPEG", progressive=True)
    scans = data.count(b"\xff\xda")
    last = data.rindex(b"\xff\xda")
    more = data[last:-2] * (MAX_SCANS + 1 - scans)
    assert "passes" in refused(data[:-2] + more + data[-2:])
    assert seen(data).getpixel((16, 16))
    several = file_of(plain(64, 64), "MPO", save_all=True, append_images=[plain(64, 64)])
    assert seen(several).getpixel((16, 16))
    assert "passes" in refused(several + more * 2)


WHOLE = file_of(Image.frombytes("RGB", (64, 64), random.Random(2).randbytes(64 * 64 * 3)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"not an image", id="text"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="SVG"),
        pytest.param(file_of(plain(8, 8), "BMP"), id="BMP"),
        pytest.param(file_of(plain(8, 8), "TIFF"), id="TIFF"),
        pytest.param(b"%PDF-1.4", id="PDF"),
        pytest.param(WHOLE[: len(WHOLE) // 2], id="half a PNG"),
        pytest.param(WHOLE[:30], id="the head of a PNG"),
        pytest.param(png(64, 64, b"no zlib"), id="a PNG of garbage"),
        pytest.param(png(0, 64, zlib.compress(b"")), id="a PNG without width"),
        pytest.param(file_of(plain(64, 64), "JPEG")[:200], id="the head of a JPEG"),
        pytest.param(b"RIFF", id="the head of a WebP"),
        pytest.param(webp(16, 16), id="a WebP of a head"),
        pytest.param(b"GIF89a" + bytes(7), id="an empty GIF"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_not_repeated(data: bytes) -> None:
    message = refused(data)
    assert "or a damaged one" in message
    assert "object at 0x" not in message


def test_damage_anywhere_is_an_error_of_the_request_or_none_at_all() -> None:
    rng = random.Random(3)
    noise = Image.frombytes("RGB", (48, 48), rng.randbytes(48 * 48 * 3))
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = file_of(noise, form)
        for _ in range(60):
            bad = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            with contextlib.suppress(RequestError):  # anything else would be a 500
                seen(bytes(bad))
