"""Frames between a board and its engine process: length-prefixed bytes, and nothing of pipes.

A frame is ``<u32 length><u8 kind><payload>``, little-endian, the length counting kind and payload.
Tokens, the only frequent frame, are packed; everything else is JSON.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from rkserve.errors import FrameCorrupt

MAX_FRAME = 16 * 1024 * 1024  # far above the largest prompt; a larger one is a corrupt stream

_HEAD = struct.Struct("<IB")
_TOKEN = struct.Struct("<IBIi")  # the head of a token frame, then run id and token id
_TOKEN_BODY = struct.Struct("<Ii")
_RUN = struct.Struct("<II")


class Kind(IntEnum):
    """What a frame says. Commands go to the engine, events come from it."""

    LOAD = 1
    RUN = 2
    ABORT = 3
    STOP = 4
    LOADED = 16
    LOAD_FAILED = 17
    TOKEN = 18
    ENDED = 19
    BEAT = 20


def pack(kind: Kind, value: dict[str, Any]) -> bytes:
    """Return a JSON frame."""
    payload = json.dumps(value, separators=(",", ":")).encode()
    return _head(len(payload) + 1, kind) + payload


def unpack(payload: bytes) -> dict[str, Any]:
    """Return the value of a JSON frame. Raises ``FrameCorrupt``."""
    try:
        value = json.loads(payload)
    except ValueError as exc:
        raise FrameCorrupt(f"a frame is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise FrameCorrupt("a frame is not a JSON object")
    return value


def pack_token(run_id: int, token_id: int, text: bytes) -> bytes:
    """Return the frame of one generated token."""
    return _TOKEN.pack(len(text) + 9, Kind.TOKEN, run_id, token_id) + text


def unpack_token(payload: bytes) -> tuple[int, int, bytes]:
    """Return run id, token id and text of a token frame. Raises ``FrameCorrupt``."""
    if len(payload) < _TOKEN_BODY.size:
        raise FrameCorrupt(f"a token frame holds only {len(payload)} bytes")
    run_id, token_id = _TOKEN_BODY.unpack_from(payload)
    return run_id, token_id, payload[_TOKEN_BODY.size :]


def pack_run(run_id: int, params: dict[str, Any], ids: tuple[int, ...]) -> bytes:
    """Return the frame that starts a run: its parameters as JSON, its token ids packed.

    Raises ``FrameCorrupt`` for what cannot travel: an id beyond 32 bits, a prompt above the limit.
    """
    head = json.dumps(params, separators=(",", ":")).encode()
    try:
        tokens = array("i", ids).tobytes()
    except OverflowError as exc:
        raise FrameCorrupt("a token id does not fit in 32 bits") from exc
    size = 1 + _RUN.size + len(head) + len(tokens)
    return b"".join((_head(size, Kind.RUN), _RUN.pack(run_id, len(head)), head, tokens))


def unpack_run(payload: bytes) -> tuple[int, dict[str, Any], tuple[int, ...]]:
    """Return run id, parameters and token ids of a frame that starts a run.

    Raises ``FrameCorrupt``.
    """
    ids = array("i")
    try:
        run_id, head_len = _RUN.unpack_from(payload)
        start = _RUN.size + head_len
        ids.frombytes(payload[start:])
    except (struct.error, ValueError) as exc:
        raise FrameCorrupt(f"a frame that starts a run is cut: {exc}") from exc
    return run_id, unpack(payload[_RUN.size : start]), tuple(ids)


class FrameReader:
    """Cuts a byte stream into frames, however it was chunked."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[Kind, bytes]]:
        """Yield each complete frame as (kind, payload). Raises ``FrameCorrupt``."""
        self._pending += chunk
        start = 0
        while len(self._pending) - start >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._pending, start)
            if not 1 <= size <= MAX_FRAME:
                raise FrameCorrupt(f"a frame claims {size} bytes")
            end = start + 4 + size
            if len(self._pending) < end:
                break
            payload = bytes(self._pending[start + _HEAD.size : end])
            start = end
            yield _kind(kind), payload
        del self._pending[:start]


def _head(size: int, kind: Kind) -> bytes:
    # Refused here, where one request fails; the other end could only give up the whole stream.
    if size > MAX_FRAME:
        raise FrameCorrupt(f"a frame of {size} bytes is above the limit of {MAX_FRAME}")
    return _HEAD.pack(size, kind)


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError:
        raise FrameCorrupt(f"a frame is of the unknown kind {number}") from None
