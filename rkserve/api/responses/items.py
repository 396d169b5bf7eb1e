"""Items of OpenAI's Responses API as a conversation for templates; ``_ITEMS`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rkserve.api.common.tool_definitions import RAW, as_object
from rkserve.api.json.body import JsonObject, JsonText
from rkserve.api.json.fields import Fields, as_fields, missing, quoted, wrong_type
from rkserve.api.json.limits import MAX_MESSAGES
from rkserve.api.prompting.conversation import Message
from rkserve.api.prompting.images import DETAILS, ImagePart, image_at, shown
from rkserve.core.errors import UnsupportedParameter

REFERENCE = "item_reference"
_IMAGE = "input_image"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def conversation(
    instructions: str | None, before: Iterable[JsonObject], items: Iterable[JsonObject]
) -> tuple[Message, ...]:
    """Return a conversation for the template. Raises ``RequestError``."""
    turns = _Turns()
    if instructions:
        turns.message("system", instructions)
    for index, item in enumerate(before):
        _read(as_fields(item, f"previous_response_id[{index}]"), turns)
    for index, item in enumerate(items):
        _read(as_fields(item, f"input[{index}]"), turns)
    return tuple(turns.messages())


def _read(item: Fields, turns: _Turns) -> None:
    kind = item.text("type") or "message"
    if (read := _ITEMS.get(kind)) is None:
        raise UnsupportedParameter(
            f"Unsupported item: {quoted(kind)}. This server reads "
            f"{', '.join(repr(one) for one in _ITEMS)}.",
            item.path("type"),
        )
    read(item, turns)


class _Turns:
    """Messages as templates take them: reasoning and calls are part of the assistant's turn."""

    def __init__(self) -> None:
        self._found: list[Message] = []
        self._thoughts = ""

    def message(self, role: str, content: str | list[str | ImagePart]) -> None:
        """Add a message."""
        self._found.append({"role": role, "content": content, **self._thought(role)})

    def think(self, text: str) -> None:
        """Add reasoning to the assistant's turn."""
        self._thoughts += text

    def call(self, call: Message) -> None:
        """Add a tool call to the assistant's turn."""
        last = self._found[-1] if self._found else None
        if last is None or last["role"] != "assistant":
            self.message("assistant", "")
        self._found[-1].setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, content: str) -> None:
        """Add the result of a call."""
        self._found.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def messages(self) -> Iterator[Message]:
        """Yield the messages."""
        yield from self._found

    def _thought(self, role: str) -> Message:
        thoughts, self._thoughts = self._thoughts, ""
        return {"reasoning_content": thoughts} if thoughts and role == "assistant" else {}


def _message(item: Fields, turns: _Turns) -> None:
    role = item.choice("role", *_ROLES)
    if role is None:
        raise missing(item.path("role"))
    turns.message(_ROLES[role], _shown(item) if role == "user" else _text(item, "content"))


def _shown(item: Fields) -> str | list[str | ImagePart]:
    """Read the content of a user's message, which may contain images."""
    if not isinstance(item.get("content"), list):
        return _text(item, "content")
    path, given = item.path("content"), item.items("content", MAX_MESSAGES)
    parts = (as_fields(value, f"{path}[{index}]") for index, value in enumerate(given))
    return shown(_image(part) if part.get("type") == _IMAGE else _part(part) for part in parts)


def _image(part: Fields) -> ImagePart:
    if part.get("file_id") is not None:
        raise UnsupportedParameter(
            "Unsupported image: this server keeps no files. Send it as 'image_url', with a data "
            "URI.",
            part.path("file_id"),
        )
    part.choice("detail", *DETAILS)
    return image_at(part.required_text("image_url"), part.path("image_url"))


def _call(item: Fields, turns: _Turns) -> None:
    text = item.text("arguments") or ""
    found = as_object(text)
    # Valid JSON stays unchanged, so that the model's own text is found in the KV cache.
    arguments = found if RAW in found or not text.strip() else JsonText(found, text)
    function = {"name": item.required_text("name"), "arguments": arguments}
    call_id = item.required_text("call_id")
    turns.call({"id": call_id, "type": "function", "function": function})


def _result(item: Fields, turns: _Turns) -> None:
    turns.result(item.required_text("call_id"), _text(item, "output"))


def _reasoning(item: Fields, turns: _Turns) -> None:
    if item.get("content") not in (None, []):
        for index, part in enumerate(item.items("content", MAX_MESSAGES)):
            turns.think(as_fields(part, f"{item.path('content')}[{index}]").text("text") or "")


def _reference(item: Fields, _turns: _Turns) -> None:
    # References are resolved before the conversation is rendered.
    item.required_text("id")


_ITEMS: dict[str, Callable[[Fields, _Turns], None]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
    REFERENCE: _reference,
}


def _text(fields: Fields, name: str) -> str:
    """Read a string or a list of parts, which are joined without anything between them."""
    value, path = fields.get(name), fields.path(name)
    if isinstance(value, str):
        return value
    if value is not None and not isinstance(value, list):
        raise wrong_type(path, "a string or an array of parts", value)
    return "".join(
        _part(as_fields(part, f"{path}[{index}]"))
        for index, part in enumerate(fields.items(name, MAX_MESSAGES))
    )


def _part(part: Fields) -> str:
    kind = part.required_text("type")
    key = _TEXTS.get(kind)
    if key is None:
        raise UnsupportedParameter(
            f"Unsupported part: {quoted(kind)}. This server reads text, and images ({_IMAGE!r}) in "
            "messages of the user.",
            part.path("type"),
        )
    if (text := part.text(key)) is None:
        raise missing(part.path(key))
    return text
