"""The reader of request bodies: bytes to one JSON object, or a 400."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from rkserve.core.errors import RequestError

JsonObject = dict[str, Any]


class JsonText(JsonObject):
    """A JSON object with the text that it was read from."""

    def __init__(self, found: JsonObject, text: str) -> None:
        super().__init__(found)
        self.text = text


def parse_object(body: bytes) -> JsonObject:
    """Read a request body.

    The parser behind it (jiter) counts its own depth and stops near 200 levels, refuses NaN,
    Infinity, unpaired surrogates, bytes that are not UTF-8 and integers beyond 4,300 digits, and
    never recurses in Python.

    Raises:
        RequestError: the body is anything but one JSON object.
    """
    if not body.strip():
        raise RequestError("The body is empty. Send a JSON object.")
    try:
        found = from_json(body, allow_inf_nan=False)
    except ValueError as exc:
        raise RequestError(f"The body is not valid JSON: {exc}.") from exc
    if not isinstance(found, dict):
        raise RequestError(f"The body must be a JSON object, but is {kind_of(found)}.")
    return found


def kind_of(value: object) -> str:
    """Name a JSON value's type with its article, as OpenAI's messages do."""
    for types, name in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a decimal"),
        (str, "a string"),
        (list, "an array"),
        (dict, "an object"),
    ):
        if isinstance(value, types):
            return name
    return "null"
