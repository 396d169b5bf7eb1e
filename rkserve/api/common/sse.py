"""Server-sent events as bytes."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

PING = b": ping\n\n"  # a comment: keeps the connection alive, and every client skips it
PAUSED = b": paused\n\n"
DONE = b"data: [DONE]\n\n"

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # without it nginx buffers the tokens
}


def event(name: str, value: Any) -> bytes:
    """Frame a JSON value as an event that has a name."""
    return f"event: {name}\ndata: {dumps(value)}\n\n".encode()


def data(value: Any) -> bytes:
    """Frame a JSON value. JSON escapes line breaks, so one ``data:`` line holds it."""
    return f"data: {dumps(value)}\n\n".encode()


def dumps(value: Any) -> str:
    """Return compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class EventTemplate:
    """An event rendered in advance around its one changing string.

    ``value`` holds ``HOLE`` in place of the changing string, and no ``HOLE`` after it.
    ``before`` and ``after`` frame the JSON value.
    """

    HOLE = "\ufdd0"

    def __init__(self, value: Any, before: str = "data: ", after: str = "\n\n") -> None:
        # The last one: a client may have named its model like this, and names come first.
        head, _, tail = dumps(value).rpartition(encode_basestring(self.HOLE))
        self._head, self._tail = f"{before}{head}", f"{tail}{after}"

    def fill(self, text: str) -> bytes:
        """Return the event with ``text``."""
        return f"{self._head}{encode_basestring(text)}{self._tail}".encode()
