"""Images in calls to a Router on scripted boards: what boards are sent, and what they are not."""

from __future__ import annotations

import base64
import io
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
from rkserve.router.images import ImageInputs
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
