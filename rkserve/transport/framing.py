"""The bytes of the channel between board and Router: who is there, and where a frame ends.

Both ends prove that they know the board's key before anything else is read; the key itself never
crosses the wire. The board's number of the connection comes with its proof. It does no input or
output, and does not know what is in a frame.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from rkserve.transport.calls import SEAL

MAGIC = b"rkserve1"
NONCE_BYTES = PROOF_BYTES = 32
KEY_BYTES = 32
# A frame holds what has piled up; as a rule a few tokens, and never more than some answers.
MAX_FRAME = 64 * 1024 * 1024
HEARTBEAT = b"\0\0\0\0"  # a frame of nothing
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class Refused(Exception):
    """The other end does not speak this language, or does not know the key."""


def new_key() -> bytes:
    """Return a key for the channel of one replica."""
    return secrets.token_bytes(KEY_BYTES)


def frame(payload: bytes) -> bytes:
    """Return a payload with its length before it."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held = 0
        self._need = _LENGTH.size  # bytes before anything more can be said

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that are complete now; an empty one is a heartbeat.

        Raises:
            Refused: a frame is too long to be one.
        """
        self._parts.append(data)
        self._held += len(data)
        if self._held < self._need:
            return []  # joined once it is whole: a long frame comes in thousands of pieces
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        found, at, end = [], 0, len(data)
        self._need = _LENGTH.size
        while end - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME:
                raise Refused(f"a frame of {length} bytes")
            after = at + _LENGTH.size + length
            if after > end:
                self._need = after - at
                break
            found.append(data[at + _LENGTH.size : after])
            at = after
        self._parts, self._held = ([data[at:]] if at < end else []), end - at
        return found


def _prove(key: bytes, who: bytes, *said: bytes) -> bytes:
    # Every part has a fixed length: nothing can be moved from one to the next.
    return hmac.new(key, b"".join((who, MAGIC, SEAL, *said)), hashlib.sha256).digest()


class BoardSide:
    """The board's part of the greeting: it speaks first, and says its number last."""

    def __init__(self, key: bytes, number: int) -> None:
        self._key, self._number = key, number
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.need = NONCE_BYTES + PROOF_BYTES  # bytes of the next message
        self.done = False

    def opening(self) -> bytes:
        """What is sent at once."""
        return MAGIC + SEAL + self._nonce

    def take(self, message: bytes) -> bytes:
        """Read the Router's proof; return the board's. Raises ``Refused``."""
        theirs, proof = message[:NONCE_BYTES], message[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(self._key, b"R", self._nonce, theirs)):
            raise Refused("the Router does not know the key")
        self.done = True
        number = _NUMBER.pack(self._number)
        return _prove(self._key, b"B", self._nonce, theirs, number) + number


class RouterSide:
    """The Router's part of the greeting. ``number`` is the board's for this connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self.need = len(MAGIC) + len(SEAL) + NONCE_BYTES
        self.done = False
        self.number = 0

    def opening(self) -> bytes:
        """What is sent at once: nothing."""
        return b""

    def take(self, message: bytes) -> bytes:
        """Read what the board says; return what to answer. Raises ``Refused``."""
        if not self._theirs:
            magic, seal = message[: len(MAGIC)], message[len(MAGIC) : -NONCE_BYTES]
            if magic != MAGIC:
                raise Refused("there is something else than a board")
            if seal != SEAL:
                raise Refused("the board runs another version of rkserve")
            self._theirs = message[-NONCE_BYTES:]
            self.need = PROOF_BYTES + _NUMBER.size
            return self._nonce + _prove(self._key, b"R", self._theirs, self._nonce)
        proof, number = message[:PROOF_BYTES], message[PROOF_BYTES:]
        if not hmac.compare_digest(
            proof, _prove(self._key, b"B", self._theirs, self._nonce, number)
        ):
            raise Refused("the board does not know the key")
        (self.number,) = _NUMBER.unpack(number)
        self.done = True
        return b""
