"""The reader of OpenAI's ``messages`` into the form that chat templates take."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic_core import from_json

from rkserve.api.json.fields import (
    MAX_MESSAGES,
    Fields,
    JsonObject,
    JsonText,
    as_fields,
    quoted,
    wrong_type,
)
from rkserve.api.prompting.images import ImagePart, read_image, shown
from rkserve.core.errors import RequestError, UnsupportedParameter

_REASONING = "reasoning_content"
Message = JsonObject
IMAGE_PART = "image_url"
LEGACY_ID_CHARS = 9  # required by Mistral's templates

# The key of a part's text by its type. A refusal is a text of the model instead of an answer.
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}


def read_messages(body: Fields) -> tuple[Message, ...]:
    """Read ``messages``: at least one; each becomes a plain dict for the template.

    Content parts become one string, or where a user shows images a list of strings and images.
    ``developer`` becomes ``system``, and the JSON text of an assistant's call arguments becomes an
    object, since templates print them with ``tojson``. The deprecated ``function_call``,
    and the role of its result, become a tool's. Tool calls and results without an id get one.
    """
    pairing = PendingToolCalls()
    listed = body.objects("messages", MAX_MESSAGES)
    return tuple(pairing.add(_message(fields), fields) for fields in listed)


def read_prefill(body: Fields, messages: Sequence[Message]) -> bool:
    """Read vLLM's ``continue_final_message``, or ``prefix`` of the last message, as DeepSeek's and
    Mistral's clients send it: the answer continues the last message.

    Raises ``RequestError``.
    """
    name = "continue_final_message"
    asked = body.flag(name)
    if asked and body.maybe_flag("add_generation_prompt"):
        raise RequestError(
            f"'{name}' and 'add_generation_prompt' cannot both be true: an answer either continues "
            "the final message or begins a new one.",
            name,
        )
    last = as_fields(body.items("messages", MAX_MESSAGES)[-1], f"messages[{len(messages) - 1}]")
    prefix = messages[-1]["role"] == "assistant" and last.flag("prefix")
    if not asked and not prefix:
        return False
    check_prefill(messages, last.path("role") if asked else last.path("prefix"))
    return True


def check_prefill(messages: Sequence[Message], param: str) -> None:
    """Raise ``RequestError`` if no answer can continue the last message."""
    last = messages[-1]
    if last["role"] != "assistant":
        raise RequestError(
            f"The final message is of the role {quoted(last['role'])}: an answer continues a "
            "message of the assistant only.",
            param,
        )
    if last.get("tool_calls"):
        raise RequestError(
            "The final message calls tools: an answer continues a message of text only. Send the "
            "results of the calls.",
            param,
        )


class PendingToolCalls:
    """Tool calls without a result so far, for results without the ID of their call.

    Templates that print IDs require nine letters and digits, so generated IDs have these. With
    ``orphans`` a result may name no call, or answer none.
    """

    def __init__(self, *, orphans: bool = False) -> None:
        self._orphans = orphans
        self._open: list[tuple[str, str]] = []  # id and name of each
        self._calls = 0

    def add(self, message: Message, fields: Fields) -> Message:
        """Return the next message with the missing IDs added. Raises ``RequestError``."""
        if message["role"] == "tool":
            return self._result(message, fields)
        if "tool_calls" not in message:
            return message
        calls = [self._call(call) for call in message["tool_calls"]]
        self._open = [(call["id"], call["function"]["name"]) for call in calls]
        return {**message, "tool_calls": calls}

    def _call(self, call: Message) -> Message:
        self._calls += 1
        return call if "id" in call else {"id": _made_id(self._calls - 1), **call}

    def _result(self, message: Message, fields: Fields) -> Message:
        call_id = message.get("tool_call_id")
        if call_id is None:
            call_id = self._first_open(message.get("name"), fields)
        self._open = [one for one in self._open if one[0] != call_id]
        return {**message, "tool_call_id": call_id}

    def _first_open(self, name: str | None, fields: Fields) -> str:
        """Return the id of the first call without a result, by its name where there is one."""
        for call_id, called in self._open:
            if name is None or name == called:
                return call_id
        if self._orphans:
            self._calls += 0 if self._open else 1
            return self._open[0][0] if self._open else _made_id(self._calls - 1)
        path = fields.path("tool_call_id")
        of = "" if name is None else f" of {quoted(name)}"
        raise RequestError(
            f"Missing required parameter: '{path}'. It may be left out where the assistant's "
            f"last tool calls include one{of} without a result, and there is none.",
            path,
        )


def _made_id(number: int) -> str:
    return f"call{number:05d}"


def _message(fields: Fields) -> Message:
    role = fields.required_text("role")
    read = _READERS.get(role)
    if read is None:
        raise RequestError(
            f"Invalid value: {quoted(role)}. Supported values are: "
            f"{', '.join(repr(name) for name in _READERS)}.",
            fields.path("role"),
        )
    message = read(fields)
    name = fields.text("name")
    return message if name is None else {**message, "name": name}


def _system(fields: Fields) -> Message:
    return {"role": "system", "content": _text(fields)}


def _user(fields: Fields) -> Message:
    return {"role": "user", "content": read_shown(fields, _TEXT_PARTS, IMAGE_PART, read_image)}


def _tool(fields: Fields) -> Message:
    message: Message = {"role": "tool", "content": _text(fields)}
    if fields.get("tool_call_id") is None:
        return message
    return {**message, "tool_call_id": fields.required_text("tool_call_id")}


def _function(fields: Fields) -> Message:
    name = fields.required_text("name")
    content = "" if fields.get("content") is None else _text(fields)
    return {"role": "tool", "content": content, "tool_call_id": _legacy_id(name)}


def _assistant(fields: Fields) -> Message:
    content = "" if fields.get("content") is None else _text(fields)
    message: Message = {"role": "assistant", "content": content}
    thoughts = fields.text("reasoning_content") or fields.text("reasoning")
    if thoughts:
        message["reasoning_content"] = thoughts
    function = fields.child("function_call")
    if function is not None and fields.get("tool_calls") is None:
        called = _called(function)
        message["tool_calls"] = [
            {"id": _legacy_id(called["name"]), "type": "function", "function": called}
        ]
    if fields.get("tool_calls") is not None:
        message["tool_calls"] = [_tool_call(call) for call in fields.objects("tool_calls")]
    return message


_READERS: dict[str, Callable[[Fields], Message]] = {
    "system": _system,
    "developer": _system,
    "user": _user,
    "assistant": _assistant,
    "tool": _tool,
    "function": _function,
}


def _tool_call(call: Fields) -> Message:
    kind = call.text("type") or "function"
    if kind != "function":
        raise UnsupportedParameter(
            f"Unsupported tool call: only the type 'function' is known, not {quoted(kind)}.",
            call.path("type"),
        )
    read = {"type": "function", "function": _called(call.required_child("function"))}
    return read if call.get("id") is None else {"id": call.required_text("id"), **read}


def _called(function: Fields) -> Message:
    return {"name": function.required_text("name"), "arguments": _arguments(function)}


def _legacy_id(name: str) -> str:
    """The id of a call that came without one: its result names the function only."""
    return hashlib.sha256(name.encode()).hexdigest()[:LEGACY_ID_CHARS]


def _arguments(function: Fields) -> JsonObject:
    path, text = function.path("arguments"), function.any_text("arguments")
    try:
        found = from_json(text or "{}", allow_inf_nan=False)
    except ValueError as exc:
        raise RequestError(f"Invalid '{path}': not valid JSON: {exc}.", path) from exc
    if not isinstance(found, dict):
        raise RequestError(f"Invalid '{path}': its JSON text must be an object.", path)
    # Unchanged, so that the model's own text is found in the KV cache to the last blank.
    return JsonText(found, text) if text.strip() else found


def _text(fields: Fields) -> str:
    return read_text(fields, "content", _TEXT_PARTS, IMAGE_PART)


def read_text(fields: Fields, name: str, keys: Mapping[str, str], image: str) -> str:
    """Read a string or a list of parts, which are joined without anything between them.

    ``keys`` holds the key of a part's text by its type, and ``image`` the type of a user's images,
    which the error of another type names. Raises ``RequestError``.
    """
    value = fields.get(name)
    if isinstance(value, str):
        return value
    if value is not None and not isinstance(value, list):
        raise wrong_type(fields.path(name), "a string or an array of content parts", value)
    return "".join(_part(part, keys, image) for part in fields.objects(name, MAX_MESSAGES))


def read_shown(
    fields: Fields, keys: Mapping[str, str], image: str, read: Callable[[Fields], ImagePart]
) -> str | list[str | ImagePart]:
    """Read the content of a user's message, which may contain images; see ``read_text``."""
    if not isinstance(fields.get("content"), list):
        return read_text(fields, "content", keys, image)
    return shown(
        read(part) if part.get("type") == image else _part(part, keys, image)
        for part in fields.objects("content", MAX_MESSAGES)
    )


def _part(part: Fields, keys: Mapping[str, str], image: str) -> str:
    kind = part.required_text("type")
    if kind not in keys:
        raise UnsupportedParameter(
            f"Unsupported content part: {quoted(kind)}. This server reads text, and images "
            f"({image!r}) in messages of the user.",
            part.path("type"),
        )
    return part.any_text(keys[kind])


def images_of(messages: Iterable[Message]) -> tuple[ImagePart, ...]:
    """Return all images of a conversation, in their order."""
    return tuple(
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, ImagePart)
    )


def with_thoughts(
    messages: Iterable[Message],
    history: str,
    marks: tuple[str, str] | None,
    *,
    prefill: bool = False,
) -> list[Message]:
    """Return the messages as the template gets them.

    With ``template`` they are unchanged: most templates remove reasoning themselves, whether it is
    in ``reasoning_content`` or in the text. ``strip`` removes both, and ``keep`` puts the reasoning
    before the text of its turn. The last message of a ``prefill`` is no earlier turn, so nothing is
    removed from it.
    """
    found = list(messages)
    if history == "template" or marks is None:
        return found
    change = _with_reasoning if history == "keep" else _without_reasoning
    changed = [
        change(message, marks) if message["role"] == "assistant" else message for message in found
    ]
    return [*changed[:-1], found[-1]] if prefill and history == "strip" else changed


def _with_reasoning(message: Message, marks: tuple[str, str]) -> Message:
    rest = {key: value for key, value in message.items() if key != _REASONING}
    thoughts = message.get(_REASONING)
    if thoughts is None:
        return rest
    begin, end = marks
    return {**rest, "content": f"{begin}\n{thoughts}\n{end}\n\n{message['content']}"}


def _without_reasoning(message: Message, marks: tuple[str, str]) -> Message:
    rest = {key: value for key, value in message.items() if key != _REASONING}
    begin, end = marks
    content: str = rest["content"]
    thoughts, found, words = content.partition(end)
    if found and thoughts.lstrip().startswith(begin):
        rest["content"] = words.lstrip("\n")
    return rest
