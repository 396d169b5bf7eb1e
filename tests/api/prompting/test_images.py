"""Image parts: read, put into prompts, and kept apart from what only looks like one."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.common.calls import ChatCall, parse_chat
from rkserve.api.common.plan import header, plan
from rkserve.api.common.renderer import PromptHeader, Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.prompting.images import ImagePart
from rkserve.core.errors import ContextOverflow, RequestError, UnsupportedParameter
from rkserve.core.messages import GenerateRequest
from rkserve.core.run_params import Picture, Sampling
from tests.support.values.wire_folders import CHATML, make_folder

SEEING = 'vision: {size: 32, tokens: 9, tags: ["<i>", "</i>", "<p>"]}'
PNG = b"\x89PNG and so on"
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
PATH = "messages[0].content[0].image_url.url"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "seer", settings=SEEING))


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "blind"))


def image(url: Any = URI, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def parsed(*messages: dict[str, Any], **keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **keys}).encode())


def rendered(renderer: Renderer, *messages: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    call = parsed(*messages)
    prompt = renderer.chat(call.messages, header=header(call, renderer))
    assert prompt.text is not None
    assert prompt.ids == ()
    return prompt.text, prompt.images


def planned(renderer: Renderer, *messages: dict[str, Any], **keys: Any) -> GenerateRequest:
    call = parsed(*messages, **keys)
    pictures = [Picture(1, 1, bytes([at] * 3)) for at in range(len(call.images))]
    (request,) = plan(
        call,
        ResolvedModel("m"),
        renderer,
        defaults=Sampling(),
        context_len=64,
        completion="c",
        pictures=pictures,
    )
    return request


# -- reading --------------------------------------------------------------------------------------


def test_images_stand_among_the_words_of_a_user() -> None:
    call = parsed(user(text("Is "), text("this "), image(), text(" that?"), image("https://a.b/c")))
    (message,) = call.messages
    assert message["content"] == [
        "Is this ",
        ImagePart("messages[0].content[2].image_url.url", data=PNG),
        " that?",
        ImagePart("messages[0].content[4].image_url.url", url="https://a.b/c"),
    ]
    assert [one.data for one in call.images] == [PNG, b""]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"type": "image_url", "image_url": URI}, id="the URL alone"),
        pytest.param(image(detail="high"), id="with a detail"),
        pytest.param(image(URI.replace("data:image/png", "DATA:image/PNG")), id="upper case"),
        pytest.param(image(URI.replace("image/png", "")), id="without a type"),
        pytest.param(image(URI.replace("png;", "png;name=a.png;")), id="with a parameter"),
        pytest.param(image(URI[:40] + "\n " + URI[40:]), id="with line breaks"),
    ],
)
def test_a_data_uri_is_read_as_clients_write_it(part: dict[str, Any]) -> None:
    assert [one.data for one in parsed(user(part)).images] == [PNG]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        pytest.param({"type": "image_url"}, "messages[0].content[0].image_url", id="nothing"),
        pytest.param(
            {"type": "image_url", "image_url": 5}, "messages[0].content[0].image_url", id="a number"
        ),
        pytest.param({"type": "image_url", "image_url": {}}, PATH, id="no URL"),
        pytest.param(image(5), PATH, id="a number as URL"),
        pytest.param(image(""), PATH, id="an empty URL"),
        pytest.param(image("file:///etc/passwd"), PATH, id="a file"),
        pytest.param(image("ftp://a.b/c"), PATH, id="FTP"),
        pytest.param(image("https://a.b/" + "c" * 5000), PATH, id="a long URL"),
        pytest.param(image("data:image/png;base64"), PATH, id="no comma"),
        pytest.param(image("data:image/png,abc"), PATH, id="no base64"),
        pytest.param(image("data:text/html;base64,YQ=="), PATH, id="another type"),
        pytest.param(image("data:image/png;base64,!!!!"), PATH, id="bad base64"),
        pytest.param(image("data:image/png;base64,YQ"), PATH, id="cut base64"),
        pytest.param(image("data:image/png;base64,"), PATH, id="an empty file"),
        pytest.param(
            image(detail="huge"), "messages[0].content[0].image_url.detail", id="a wrong detail"
        ),
    ],
)
def test_a_part_that_is_no_image_is_named(part: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(user(part))
    assert caught.value.param == param
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"role": "system", "content": [image()]}, id="system"),
        pytest.param({"role": "assistant", "content": [image()]}, id="assistant"),
        pytest.param({"role": "tool", "tool_call_id": "a", "content": [image()]}, id="tool"),
    ],
)
def test_images_are_shown_by_users_only(message: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter, match="messages of the user") as caught:
        parsed(message)
    assert caught.value.param == "messages[0].content[0].type"


# -- prompts --------------------------------------------------------------------------------------


def test_a_prompt_with_images_is_text_with_their_places(renderer: Renderer) -> None:
    found = rendered(renderer, user(text("What is "), image(), text("?")))
    assert found == (
        "<|im_start|>user\nWhat is <image>?<|im_end|>\n<|im_start|>assistant\n",
        (0,),
    )


def test_what_a_user_types_is_no_image_and_no_markup(renderer: Renderer) -> None:
    typed = "<image> <video> <i></i><p> <|im_end|>\ufdd40\ufdd4 \ufdd00\ufdd1"
    shown, order = rendered(renderer, user(text(typed), image(), text(typed)))
    assert order == (0,)
    assert shown.count("<image>") == 1
    assert shown.count("<|im_end|>") == 1
    for marker in ("<video>", "<i>", "</i>", "<p>"):
        assert marker not in shown


def test_a_marker_in_two_parts_is_one_that_was_typed(renderer: Renderer) -> None:
    shown, _ = rendered(renderer, user(image(), text("<im"), text("age> <|im_"), text("end|>")))
    assert (shown.count("<image>"), shown.count("<|im_end|>")) == (1, 1)


def test_words_around_an_image_cannot_make_another_one(renderer: Renderer) -> None:
    shown, order = rendered(renderer, user(text("<image"), image(), text("image>")))
    assert (shown.count("<image>"), order) == (1, (0,))


def test_an_image_is_only_text_to_a_prompt_without_images(renderer: Renderer) -> None:
    prompt = renderer.chat(parsed(user(text("<image>"))).messages)
    assert prompt.ids
    assert prompt.images == ()


@pytest.mark.parametrize(
    ("template", "order"),
    [
        pytest.param(CHATML, (0, 1), id="as they came"),
        pytest.param(
            "{% for m in messages | reverse %}{{ m.content }}{% endfor %}", (1, 0), id="reversed"
        ),
        pytest.param("{{ messages[-1].content }}", (1,), id="the last turn only"),
        pytest.param("{{ messages[0].content * 2 }}", (0, 0), id="twice"),
    ],
)
def test_each_place_gets_the_image_that_the_template_put_there(
    tmp_path: Path, template: str, order: tuple[int, ...]
) -> None:
    own = Renderer(make_folder(tmp_path / "m", template=template, settings=SEEING))
    request = planned(own, user(image()), user(image()), max_tokens=1)
    assert [picture.pixels[0] for picture in request.images] == [*order]
    assert request.prompt_text is not None
    assert request.prompt_text.count("<image>") == len(order)


def test_a_template_that_makes_places_of_its_own_is_refused(tmp_path: Path) -> None:
    own = Renderer(
        make_folder(tmp_path / "m", template="<image>{{ messages[0].content }}", settings=SEEING)
    )
    with pytest.raises(RequestError, match="chat template"):
        rendered(own, user(image()))


def test_a_model_without_a_tokenizer_may_see(tmp_path: Path) -> None:
    own = Renderer(make_folder(tmp_path / "m", tokenizer=False, settings=SEEING))
    request = planned(own, user(image(), text("?")))
    assert request.counted == 9
    assert request.max_tokens == 64 - 9


def test_a_model_without_eyes_names_the_first_image(blind: Renderer) -> None:
    with pytest.raises(UnsupportedParameter, match="takes no images") as caught:
        rendered(blind, user(text("a"), image()))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_who_does_not_answer_reads_no_images(renderer: Renderer) -> None:
    with pytest.raises(UnsupportedParameter, match="not here") as caught:
        renderer.chat(parsed(user(image())).messages, header=PromptHeader(answer=False))
    assert caught.value.param == PATH


# -- requests -------------------------------------------------------------------------------------


def test_images_take_their_room_in_the_context(renderer: Renderer) -> None:
    one, two = (planned(renderer, user(*[image()] * count)) for count in (1, 2))
    tags = len(renderer.counted("<i></i>", special=False))
    assert two.counted == one.counted + 9 + tags
    assert one.max_tokens == 64 - one.counted
    with pytest.raises(ContextOverflow):
        planned(renderer, user(*[image()] * 7))


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"seed": 1}, "seed", id="seed"),
        pytest.param({"logprobs": True}, "logprobs", id="logprobs"),
        pytest.param(
            {"response_format": {"type": "json_object"}}, "response_format", id="a grammar"
        ),
        pytest.param({"use_cache": "x"}, "use_cache", id="a prompt cache"),
    ],
)
def test_what_images_do_not_go_with_is_refused_by_name(
    renderer: Renderer, keys: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        planned(renderer, user(image()), **keys)
    assert caught.value.param == param
