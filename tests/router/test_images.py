"""Images in calls to a Router on scripted boards: what boards are sent, and what they are not."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rkserve.api.prompting.images import ImagePart
from rkserve.config.router import ImagesConfig, RouterConfig
from rkserve.core.errors import RequestError
from rkserve.core.messages import GenerateRequest
from rkserve.models.folder import open_model_folder
from rkserve.models.settings import VisionSettings
from rkserve.router.images import MAX_SCANS, ImageInputs, picture_of
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards, Step, answer, report
from tests.support.http.router_house import CHAT, House, send
from tests.support.http.router_house import house as blind
from tests.support.paths import PROJECT

pytestmark = pytest.mark.virtual_time

MODEL = "sim-vision"
FOLDER = PROJECT / "models" / MODEL
SIDE, TOKENS = 392, 196


@cache
def model() -> ServedModel:
    return ServedModel.open(open_model_folder(FOLDER))


def seeing(**images: Any) -> House:
    boards = FakeBoards([report("a", model=MODEL)], {"replica of a": [answer("a", "hello")]})
    return House(boards, RouterConfig(images=ImagesConfig(**images)), model())


def file_of(colour: Any, size: tuple[int, int] = (20, 20), form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, form)
    return out.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def body(*parts: Any, **extra: Any) -> dict[str, Any]:
    words = {"type": "text", "text": "What is this?"}
    return {"model": MODEL, "messages": [{"role": "user", "content": [*parts, words]}], **extra}


def opened(of: House) -> GenerateRequest:
    ((_, request),) = of.boards.opened
    return request


def test_a_board_is_sent_pixels_and_a_prompt_with_their_places() -> None:
    house = seeing()
    told = send(house, "POST", CHAT, json=body(image(file_of("red")), image(file_of("blue"))))
    assert told.status_code == 200
    request = opened(house)
    assert request.prompt_ids == ()
    assert request.prompt_text is not None
    assert "user\n<image><image>What is this?<|im_end|>" in request.prompt_text
    red, blue = request.images
    assert (red.width, red.height, len(red.pixels)) == (SIDE, SIDE, SIDE * SIDE * 3)
    assert (red.pixels[:3], blue.pixels[:3]) == (b"\xff\0\0", b"\0\0\xff")
    assert request.counted > 2 * TOKENS
    assert request.max_tokens == 4096 - request.counted
    house.expect_nothing_left()


RED = base64.b64encode(file_of("red")).decode()
BLUE = base64.b64encode(file_of("blue")).decode()
ANTHROPIC = {"type": "base64", "media_type": "image/png", "data": RED}
RESPONSE = {"type": "input_image", "image_url": f"data:image/png;base64,{RED}", "detail": "auto"}
ASKED = {"model": MODEL, "stream": False, "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        pytest.param(
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": ANTHROPIC},
                            {"type": "image", "source": {**ANTHROPIC, "data": BLUE}},
                            {"type": "text", "text": "What "},
                            {"type": "text", "text": "is this?"},
                        ],
                    }
                ]
            },
            id="Anthropic's",
        ),
        pytest.param(
            "/api/chat",
            {"messages": [{"role": "user", "content": "What is this?", "images": [RED, BLUE]}]},
            id="Ollama's chat",
        ),
        pytest.param(
            "/api/generate", {"prompt": "What is this?", "images": [RED, BLUE]}, id="its generate"
        ),
        pytest.param(
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            RESPONSE,
                            {**RESPONSE, "image_url": f"data:image/png;base64,{BLUE}"},
                            {"type": "input_text", "text": "What is this?"},
                        ],
                    }
                ]
            },
            id="OpenAI's responses",
        ),
    ],
)
def test_every_dialect_shows_images(path: str, asked: dict[str, Any]) -> None:
    house = seeing()
    told = send(house, "POST", path, json={**ASKED, **asked})
    assert told.status_code == 200, told.text
    request = opened(house)
    assert request.prompt_text is not None
    assert "user\n<image><image>What is this?<|im_end|>" in request.prompt_text
    assert [one.pixels[:3] for one in request.images] == [b"\xff\0\0", b"\0\0\xff"]


def test_images_of_a_stored_response_are_seen_again(tmp_path: Path) -> None:
    said: list[Sequence[Step]] = [answer("a", "red"), answer("a", "still")]
    boards = FakeBoards([report("a", model=MODEL)], {"replica of a": said})
    house = House(boards, RouterConfig(), model(), kept=tmp_path)
    try:
        shown = [{"role": "user", "content": [RESPONSE]}]
        first = send(house, "POST", "/v1/responses", json={"model": MODEL, "input": shown})
        again = {**RESPONSE, "image_url": f"data:image/png;base64,{BLUE}"}
        turn = {
            "model": MODEL,
            "input": [{"role": "user", "content": [again]}],
            "previous_response_id": first.json()["id"],
        }
        told = send(house, "POST", "/v1/responses", json=turn)
    finally:
        house.responses.close()
    assert told.status_code == 200, told.text
    request = boards.opened[-1][1]
    assert [one.pixels[:3] for one in request.images] == [b"\xff\0\0", b"\0\0\xff"]


def test_the_listings_say_who_sees() -> None:
    (entry,) = send(seeing(), "GET", "/v1/models").json()["data"]
    assert entry["rkserve"]["vision"] == {"image_tokens": TOKENS}
    told = send(seeing(), "POST", "/api/show", json={"model": MODEL}).json()
    assert "vision" in told["capabilities"]


def test_a_request_without_images_is_one_in_ids() -> None:
    house = seeing()
    assert send(house, "POST", CHAT, json=body()).status_code == 200
    assert opened(house).prompt_ids
    assert opened(house).images == ()


@pytest.mark.parametrize(
    ("parts", "limits", "words", "at"),
    [
        pytest.param([image(b"no image")], {}, "damaged", 0, id="no image"),
        pytest.param([image(file_of("red")[:60])], {}, "damaged", 0, id="a broken one"),
        pytest.param(
            [image(file_of("red")), image(file_of("red", (11, 10)))],
            {"max_pixels": 100 * 4},
            None,
            None,
            id="within the limits",
        ),
        pytest.param(
            [image(file_of("red", (21, 20)))], {"max_pixels": 400}, "21 x 20", 0, id="too large"
        ),
        pytest.param([image(file_of("red"))], {"max_bytes": 20}, "bytes", 0, id="too long a file"),
        pytest.param([image(file_of("red"))] * 3, {"max_count": 2}, "2 images", 2, id="too many"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}],
            {},
            "fetches none",
            0,
            id="a URL where none are fetched",
        ),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}],
            {"fetch": True},
            "network",
            0,
            id="a URL of our own networks",
        ),
    ],
)
def test_what_is_wrong_with_an_image_is_said_before_a_board_is_asked(
    parts: list[Any], limits: dict[str, Any], words: str | None, at: int | None
) -> None:
    house = seeing(**limits)
    told = send(house, "POST", CHAT, json=body(*parts))
    if words is None:
        assert told.status_code == 200
        return
    error = told.json()["error"]
    assert (told.status_code, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert error["param"] == f"messages[0].content[{at}].image_url.url"
    assert house.boards.opened == []
    house.expect_nothing_left()


async def test_a_request_brings_no_more_pixels_than_one_frame_can_hold() -> None:
    large = VisionSettings(size=2048, tokens=1, tags=("", "", ""))
    images = tuple(ImagePart(f"m[{at}]", data=file_of("red")) for at in range(3))
    sight = ImageInputs(ImagesConfig())
    assert len(await sight.pictures(images[:2], large)) == 2
    with pytest.raises(RequestError, match="2 images") as caught:
        await sight.pictures(images, large)
    assert caught.value.param == "m[2]"


def test_a_context_full_of_images_is_an_overflow() -> None:
    house = seeing(max_count=64)
    told = send(house, "POST", CHAT, json=body(*[image(file_of("red"))] * 21))
    assert told.status_code == 400
    assert told.json()["error"]["code"] == "context_length_exceeded"


def test_images_of_earlier_turns_are_seen_again() -> None:
    house = seeing()
    messages = [
        {"role": "user", "content": [image(file_of("red"))]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "And now?"},
    ]
    assert send(house, "POST", CHAT, json={"model": MODEL, "messages": messages}).status_code == 200
    assert len(opened(house).images) == 1


COUNT = "/v1/messages/count_tokens"


def asked_twice(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A question about so many images, to OpenAI's routes and to Anthropic's."""
    files = [file_of(colour) for colour in ("red", "blue", "green")[:count]]
    blocks: list[dict[str, Any]] = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(file).decode(),
            },
        }
        for file in files
    ]
    words = {"type": "text", "text": "What is this?"}
    messages = [{"role": "user", "content": [*blocks, words]}]
    return body(*map(image, files)), {"model": MODEL, "messages": messages}


@pytest.mark.parametrize("count", [1, 3])
def test_images_are_counted_as_a_chat_about_them_has_them(count: int) -> None:
    chat, message = asked_twice(count)
    house = seeing()
    assert send(house, "POST", CHAT, json=chat).status_code == 200
    expected = opened(house).counted
    assert expected > count * TOKENS
    told = send(house, "POST", "/tokenize", json=chat).json()
    assert (told["count"], len(told["tokens"])) == (expected, expected)
    strings = send(house, "POST", "/tokenize", json={**chat, "return_token_strs": True}).json()
    assert strings["token_strs"].count("<|image_pad|>") == count * TOKENS
    assert strings["token_strs"].count("<|vision_start|>") == count
    assert send(house, "POST", COUNT, json=message).json() == {"input_tokens": expected}
    assert len(house.boards.opened) == 1  # counting asks no board


def test_a_tag_that_a_user_typed_is_no_image() -> None:
    house = seeing()
    told = body(image(file_of("red")))
    told["messages"][0]["content"][1]["text"] = "<|image_pad|>" * 9
    counted = send(house, "POST", "/tokenize", json={**told, "return_token_strs": True}).json()
    assert counted["token_strs"].count("<|image_pad|>") == TOKENS
    assert counted["count"] == len(counted["tokens"])


@pytest.mark.parametrize("path", ["/tokenize", COUNT])
def test_more_images_than_a_request_may_have_are_not_counted(path: str) -> None:
    chat, message = asked_twice(3)
    of = seeing(max_count=2)
    response = send(of, "POST", path, json=message if path == COUNT else chat)
    error = response.json()["error"]
    assert response.status_code == 400
    assert "2 images" in error["message"]
    assert error["param"].startswith("messages[0].content[2]")


@pytest.mark.parametrize("path", ["/tokenize", COUNT])
def test_images_for_a_model_that_sees_none_are_not_counted(path: str) -> None:
    chat, message = asked_twice(1)
    asked = {**(message if path == COUNT else chat), "model": "sim-chat"}
    response = send(blind(), "POST", path, json=asked)
    assert response.status_code == 400
    assert "takes no images" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        pytest.param(f"/v1/cache/{MODEL}", {"cache_name": "x"}, id="building a prompt cache"),
    ],
)
def test_other_calls_read_no_images(path: str, named: dict[str, Any]) -> None:
    asked = {"messages": body(image(file_of("red")))["messages"], **named}
    told = send(seeing(), "POST", path, json=asked)
    assert told.status_code == 400
    assert told.json()["error"]["param"] == "messages[0].content[0].image_url.url"


# -- files of images to pixels: sizes, borders, turns, and files that mean harm --

PATH = "messages[0].content[1].image_url.url"
RED_PIXEL, BLUE_PIXEL, GREY = (255, 0, 0), (0, 0, 255), (128, 128, 128)
PIXELS = 1_000_000


def vision(size: int = 32, **changes: Any) -> VisionSettings:
    return VisionSettings(size=size, tokens=4, tags=("", "", ""), **changes)


def encoded(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


def plain(width: int, height: int, colour: Any = RED_PIXEL, mode: str = "RGB") -> Image.Image:
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
    shown = seen(encoded(plain(100, 100), form))
    for at in ((0, 0), (16, 16), (31, 31)):
        assert all(abs(a - b) < 8 for a, b in zip(colour(shown, at), RED_PIXEL, strict=True))


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
    shown = seen(encoded(plain(*size)))
    assert (shown.getpixel(inside), shown.getpixel(border)) == (RED_PIXEL, GREY)
    stretched = seen(encoded(plain(*size)), fit="stretch")
    assert stretched.getpixel(border) == RED_PIXEL


def test_what_is_transparent_becomes_background() -> None:
    image = plain(40, 40, (0, 0, 0, 0), "RGBA")
    image.paste((255, 0, 0, 255), (0, 0, 40, 20))
    shown = seen(encoded(image), background=BLUE_PIXEL)
    assert (shown.getpixel((16, 4)), shown.getpixel((16, 28))) == (RED_PIXEL, BLUE_PIXEL)


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
    assert seen(encoded(plain(40, 40, colour, mode))).getpixel((16, 16)) == wanted


def test_a_palette_is_resolved() -> None:
    image = plain(40, 40).quantize(4)
    assert seen(encoded(image)).getpixel((16, 16)) == RED_PIXEL


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
    image = plain(64, 64, BLUE_PIXEL)
    image.paste(RED_PIXEL, (0, 0, 64, 32))
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = seen(encoded(image, "JPEG", exif=exif, quality=95))
    red, _, blue = colour(shown, red_at)
    assert red - blue > 200


def test_of_a_moving_image_the_first_frame_is_seen() -> None:
    frames = [plain(32, 32), plain(32, 32, BLUE_PIXEL)]
    for form in ("GIF", "WEBP"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=10)
        red, _, blue = colour(seen(data), (16, 16))
        assert red > blue, form


def test_the_same_file_has_the_same_pixels_and_another_one_others() -> None:
    noise = Image.frombytes("RGB", (64, 64), random.Random(1).randbytes(64 * 64 * 3))
    first, again = (picture_of(encoded(noise), PATH, vision(), PIXELS) for _ in range(2))
    assert first == again
    assert first != picture_of(encoded(noise.rotate(90)), PATH, vision(), PIXELS)


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
        pytest.param(encoded(plain(1001, 1000), "JPEG"), id="a JPEG"),
        pytest.param(encoded(plain(1001, 1000), "GIF"), id="a GIF"),
    ],
)
def test_a_bomb_is_refused_before_it_is_unpacked(data: bytes) -> None:
    assert "are the most that are read" in refused(data)


def test_an_image_of_exactly_the_limit_is_read() -> None:
    assert seen(encoded(plain(1000, 1000)), most=PIXELS).getpixel((16, 16)) == RED_PIXEL


def test_a_jpeg_of_too_many_passes_is_refused() -> None:
    data = encoded(plain(64, 64), "JPEG", progressive=True)
    scans = data.count(b"\xff\xda")
    last = data.rindex(b"\xff\xda")
    more = data[last:-2] * (MAX_SCANS + 1 - scans)
    assert "passes" in refused(data[:-2] + more + data[-2:])
    assert seen(data).getpixel((16, 16))
    several = encoded(plain(64, 64), "MPO", save_all=True, append_images=[plain(64, 64)])
    assert seen(several).getpixel((16, 16))
    assert "passes" in refused(several + more * 2)


WHOLE = encoded(Image.frombytes("RGB", (64, 64), random.Random(2).randbytes(64 * 64 * 3)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"not an image", id="text"),
        pytest.param(b"<svg xmlns='http://www.w3.org/2000/svg'/>", id="SVG"),
        pytest.param(encoded(plain(8, 8), "BMP"), id="BMP"),
        pytest.param(encoded(plain(8, 8), "TIFF"), id="TIFF"),
        pytest.param(b"%PDF-1.4", id="PDF"),
        pytest.param(WHOLE[: len(WHOLE) // 2], id="half a PNG"),
        pytest.param(WHOLE[:30], id="the head of a PNG"),
        pytest.param(png(64, 64, b"no zlib"), id="a PNG of garbage"),
        pytest.param(png(0, 64, zlib.compress(b"")), id="a PNG without width"),
        pytest.param(encoded(plain(64, 64), "JPEG")[:200], id="the head of a JPEG"),
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
        whole = encoded(noise, form)
        for _ in range(60):
            bad = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            with contextlib.suppress(RequestError):  # anything else would be a 500
                seen(bytes(bad))
