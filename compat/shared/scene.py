"""The application's address, and the requests of the suites in Python."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from typing import Any

URL = os.environ["RKSERVE_URL"]
V1 = f"{URL}/v1"
KEY = "unused"
CHAT, EMBED, VISION = "sim-chat", "sim-embed", "sim-vision"
WIDTH = 64  # numbers in a vector of sim-embed

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def function(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    said = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": said}


WEATHER = function("get_weather", "What the sky does", CITY)
ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
TIME = function("get_time", "What the clock says", ZONE)


def user(text: str) -> list[dict[str, Any]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


def png(red: int, side: int = 8) -> bytes:
    """A square of one colour."""
    row = b"\0" + bytes((red, 0, 0)) * side

    def chunk(kind: bytes, data: bytes) -> bytes:
        sum_ = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", sum_)

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(row * side)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def data_uri(red: int) -> str:
    """The same as a URI."""
    return f"data:image/png;base64,{base64.b64encode(png(red)).decode()}"
