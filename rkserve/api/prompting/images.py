"""Image parts of messages, and their placeholders in rendered prompts.

Parts are OpenAI's, with data URIs or URLs. URLs are checked and fetched, and files decoded,
elsewhere.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rkserve.api.json.fields import MAX_PATH_CHARS, Fields, missing, quoted, wrong_type
from rkserve.api.prompting.tokenizer import IMAGE, ControlTokenGuard, PromptSegment
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.models.settings import VisionSettings

PLACE, OTHER_PLACE = "<image>", "<video>"  # the runtime replaces it by an image or a video
DETAILS = ("auto", "low", "high")  # the encoder has one image size
_STAND_IN = re.compile(f"{IMAGE}([0-9]+){IMAGE}")
_MEDIA = re.compile(r"data:(image/[a-z0-9.+-]+|)((?:;[^;,]*)*?);base64", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """One image: its file or its URL. ``path`` is its unique place in the body."""

    path: str
    data: bytes = field(default=b"", repr=False)
    url: str = ""


def read_image(part: Fields) -> ImagePart:
    """Read a part of the type ``image_url``. Raises ``RequestError``."""
    given = part.get("image_url")
    if given is None:
        raise missing(part.path("image_url"))
    if isinstance(given, str):  # as some clients write it
        return image_at(given, part.path("image_url"))
    if not isinstance(given, dict):
        raise wrong_type(part.path("image_url"), "an object", given)
    inner = Fields(given, part.path("image_url"))
    inner.choice("detail", *DETAILS)
    return image_at(inner.required_text("url"), inner.path("url"))


def image_at(url: str, path: str) -> ImagePart:
    """Return the image of a data URI or URL. Raises ``RequestError``."""
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return ImagePart(path, data=_data(url, path))
    if not scheme.startswith(("http://", "https://")):
        raise RequestError(
            f"Invalid '{path}': {quoted(url)} is neither a data URI with base64 nor an http(s) "
            "URL.",
            path,
        )
    if len(url) > MAX_PATH_CHARS:
        raise RequestError(
            f"Invalid '{path}': a URL has at most {MAX_PATH_CHARS} characters.", path
        )
    return ImagePart(path, url=url)


def _data(url: str, path: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or _MEDIA.fullmatch(head) is None:
        raise RequestError(
            f"Invalid '{path}': a data URI of an image begins as in 'data:image/png;base64,...'.",
            path,
        )
    return image_file(body, path).data


def image_file(text: str, path: str) -> ImagePart:
    """Return the image of a base64 file. Raises ``RequestError``."""
    try:
        found = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise RequestError(f"Invalid '{path}': not valid base64: {exc}.", path) from exc
    if not found:
        raise RequestError(f"Invalid '{path}': the image is empty.", path)
    return ImagePart(path, data=found)


def shown(pieces: Iterable[str | ImagePart]) -> str | list[str | ImagePart]:
    """Return a user's text and images as a message's content: a string without images.

    Text between two images is one piece, so that a marker across two parts is found.
    """
    found: list[str | ImagePart] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        else:
            found.append(piece)
    if any(isinstance(one, ImagePart) for one in found):
        return found
    return "".join(one for one in found if isinstance(one, str))


def with_stand_ins(message: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return a message whose content is text, with a stand-in for each image.

    ``numbers`` are those of images by their paths. Clients' markers must be hidden before.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    words = (
        f"{IMAGE}{numbers[part.path]}{IMAGE}" if isinstance(part, ImagePart) else part
        for part in content
    )
    return {**message, "content": "".join(words)}


class ImagePlaceholders:
    """The placeholders of images in the prompts of one model."""

    def __init__(self, vision: VisionSettings | None, markers: Iterable[str]) -> None:
        """``markers`` are those of its prompts without images."""
        self._vision = vision
        tags = () if vision is None else filter(None, vision.tags)
        # In the text of a prompt with images the runtime looks for these, too.
        self.shield = ControlTokenGuard({*markers, PLACE, OTHER_PLACE, *tags})

    @property
    def tokens(self) -> int:
        """The number of tokens of an image."""
        return 0 if self._vision is None else self._vision.tokens

    def numbers(self, images: Sequence[ImagePart], *, answered: bool) -> dict[str, int]:
        """Return the numbers of all images of a conversation by their paths.

        Raises ``UnsupportedParameter`` if the model takes none, or nothing is ``answered``.
        """
        if self._vision is not None and answered:
            return {image.path: number for number, image in enumerate(images)}
        why = "images are read where they are answered, and not here"
        if self._vision is None:
            why = "this model takes no images"
        raise UnsupportedParameter(f"Unsupported content part: {why}.", images[0].path)

    def placed(
        self, parts: Iterable[PromptSegment], unmarked: Callable[[PromptSegment], str]
    ) -> tuple[str, tuple[int, ...]]:
        """Return a rendered prompt as the runtime takes it, and the image numbers in order.

        ``unmarked`` turns a marker that a client typed into plain text. Raises ``RequestError``.
        """
        order: list[int] = []

        def place(found: re.Match[str]) -> str:
            order.append(int(found[1]))
            return PLACE

        text = "".join(
            unmarked(part) if part.typed else _STAND_IN.sub(place, part.text) for part in parts
        )
        if text.count(PLACE) != len(order) or OTHER_PLACE in text:
            raise RequestError(
                f"Invalid 'messages': the chat template makes a '{PLACE}' or '{OTHER_PLACE}' of "
                "their words, where the runtime would look for another one.",
                "messages",
            )
        return text, tuple(order)

    @property
    def tag(self) -> str:
        """The text of the token that stands for each token of an image."""
        return "" if self._vision is None else self._vision.tags[2]

    def spelled(self, text: str) -> str:
        """Return such a prompt with the tags of each image, as if it had one token."""
        if self._vision is None:
            return text
        begin, end, tag = self._vision.tags
        return text.replace(PLACE, f"{begin}{tag}{end}")

    def words(self, text: str) -> str:
        """Return such a prompt as it is tokenized, without the tokens of the images themselves."""
        return text if self._vision is None else text.replace(PLACE, "".join(self._vision.tags[:2]))
