"""One connection of the channel, for both ends: handshake, frames, heartbeats and loss.

In the handshake both ends prove that they know the board's key before anything else is read; the
key itself is never sent. Where the board has a certificate, all after its opening is encrypted, and
the proofs are about that certificate too. The content of frames is left to the connection's owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import next_round
from rkserve.transport import codec
from rkserve.transport.codec import SEAL, MalformedMessage
from rkserve.transport.encryption import BoardIdentity, EncryptionError, TlsRecords

MAGIC, MAGIC_TLS = b"rkserve1", b"rkservet"  # without encryption, and with it
NONCE_BYTES = PROOF_BYTES = 32
KEY_BYTES = 32
# A frame holds the pending items: usually a few tokens, at most ``ITEMS`` whole answers.
MAX_FRAME = 64 * 1024 * 1024
HEARTBEAT = b"\0\0\0\0"  # a frame of nothing
RAW = b"\0"  # begins a frame of raw bytes; JSON has no such byte
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class ChannelError(Exception):
    """The handshake failed, or a frame is too long."""


def _magic(fingerprint: bytes) -> bytes:
    return MAGIC_TLS if fingerprint else MAGIC


def new_key() -> bytes:
    """Return a new key for the channel of one replica."""
    return secrets.token_bytes(KEY_BYTES)


def frame(payload: bytes) -> bytes:
    """Return a payload with its length prefix."""
    return _LENGTH.pack(len(payload)) + payload


class ChannelFrames:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held = 0
        self._need = _LENGTH.size  # bytes needed before the next frame is complete

    def feed(self, data: bytes) -> list[bytes]:
        """Return the complete payloads; an empty one is a heartbeat.

        Raises:
            ChannelError: a frame is longer than ``MAX_FRAME``.
        """
        if not self._held and len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if len(data) == _LENGTH.size + length:  # one frame, as most are
                return [data[_LENGTH.size :]]
        self._parts.append(data)
        self._held += len(data)
        if self._held < self._need:
            return []  # joined only when complete: a long frame arrives in thousands of pieces
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        found, at, end = [], 0, len(data)
        self._need = _LENGTH.size
        while end - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME:
                raise ChannelError(f"a frame of {length} bytes")
            after = at + _LENGTH.size + length
            if after > end:
                self._need = after - at
                break
            found.append(data[at + _LENGTH.size : after])
            at = after
        self._parts, self._held = ([data[at:]] if at < end else []), end - at
        return found


def _prove(key: bytes, who: bytes, fingerprint: bytes, *parts: bytes) -> bytes:
    # Every part has a fixed length, so that no byte can move from one part to the next; the first
    # one tells whether there is a fingerprint.
    magic = _magic(fingerprint)
    return hmac.new(key, b"".join((who, magic, SEAL, fingerprint, *parts)), hashlib.sha256).digest()


class BoardHandshake:
    """The board's side of the handshake: it sends first, and its connection number last."""

    def __init__(
        self,
        key: bytes,
        number: int,
        identity: BoardIdentity | None = None,
        limited: bytes = b"",
    ) -> None:
        """Encrypt with the certificate of ``identity``. ``limited`` is a key that is taken, too,
        and sets ``is_limited``; empty: none is.
        """
        self._key, self._number, self._limited = key, number, limited
        self.is_limited = False
        self._pinned = identity.fingerprint if identity is not None else b""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.need = NONCE_BYTES + PROOF_BYTES  # length of the next message
        self.done = False
        self.tls = TlsRecords(identity) if identity is not None else None
        self.opened = True  # the board's opening is behind it, in clear: TLS is next

    def opening(self) -> bytes:
        """Return the bytes to send on connection."""
        return _magic(self._pinned) + SEAL + self._nonce

    def take(self, message: bytes) -> bytes:
        """Verify the Router's proof; return the board's. Raises ``ChannelError``."""
        theirs, proof = message[:NONCE_BYTES], message[NONCE_BYTES:]
        if self._limited and self._proves(self._limited, theirs, proof):
            self._key, self.is_limited = self._limited, True
        elif not self._proves(self._key, theirs, proof):
            raise ChannelError("the Router does not know the key")
        self.done = True
        number = _NUMBER.pack(self._number)
        return _prove(self._key, b"B", self._pinned, self._nonce, theirs, number) + number

    def _proves(self, key: bytes, theirs: bytes, proof: bytes) -> bool:
        expected = _prove(key, b"R", self._pinned, self._nonce, theirs)
        return hmac.compare_digest(proof, expected)


class RouterHandshake:
    """The Router's side of the handshake. ``number`` is the board's connection number."""

    def __init__(self, key: bytes, fingerprint: bytes = b"") -> None:
        """Encrypt with the certificate of this ``fingerprint``, and with no other one."""
        self._key, self._pinned = key, fingerprint
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._theirs = b""
        self.need = len(MAGIC) + len(SEAL) + NONCE_BYTES
        self.done = False
        self.tls = TlsRecords(fingerprint) if fingerprint else None
        self.opened = False
        self.number = 0

    def opening(self) -> bytes:
        """Return nothing: the board sends first."""
        return b""

    def take(self, message: bytes) -> bytes:
        """Process a message of the board; return the reply. Raises ``ChannelError``."""
        if not self._theirs:
            magic, seal = message[: len(MAGIC)], message[len(MAGIC) : -NONCE_BYTES]
            if magic not in (MAGIC, MAGIC_TLS):
                raise ChannelError("there is something else than a board")
            if magic != _magic(self._pinned):
                raise ChannelError("one end encrypts and the other one does not")
            if seal != SEAL:
                raise ChannelError("the board runs another version of rkserve")
            self._theirs, self.opened = message[-NONCE_BYTES:], True
            self.need = PROOF_BYTES + _NUMBER.size
            return self._nonce + _prove(self._key, b"R", self._pinned, self._theirs, self._nonce)
        proof, number = message[:PROOF_BYTES], message[PROOF_BYTES:]
        expected = _prove(self._key, b"B", self._pinned, self._theirs, self._nonce, number)
        if not hmac.compare_digest(proof, expected):
            raise ChannelError("the board does not know the key")
        (self.number,) = _NUMBER.unpack(number)
        self.done = True
        return b""


log = logging.getLogger(__name__)

# The memory that an unread write buffer may use, besides merged events.
HIGH_WATER = 256 * 1024


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat is sent every ``heartbeat_s``; a peer silent for ``silence_s`` is lost, and one
    whose handshake takes longer than ``connect_s``.
    """

    heartbeat_s: float
    silence_s: float
    connect_s: float

    @classmethod
    def of(cls, config: ChannelConfig) -> Heartbeat:
        """Return the intervals of a configuration."""
        return cls(config.heartbeat_s, config.silence_s, config.connect_s)


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The reason of a disconnection. ``silent``: this end closed it after missing heartbeats."""

    reason: str
    silent: bool = False


class ConnectionOwner(Protocol):
    """The receiver of a connection's events. Its methods must not raise, except as stated."""

    def opened(self) -> None:
        """Handle the end of the handshake."""

    def handle(self, items: list[list[Any]]) -> None:
        """Handle a frame. Raises ``MalformedMessage``, which closes the connection."""

    def handle_raw(self, data: bytes) -> None:
        """Handle a frame of raw bytes. Raises as ``handle``."""

    def drained(self) -> None:
        """Handle the end of backpressure, after ``ChannelConnection.full``."""

    def lost(self, loss: Disconnect) -> None:
        """Handle the end of the connection; called once, even if it was never opened."""


class ChannelConnection(asyncio.Protocol):
    """One connection. Closing it is final."""

    def __init__(
        self, side: BoardHandshake | RouterHandshake, pulse: Heartbeat, owner: ConnectionOwner
    ) -> None:
        self._side, self._pulse, self._owner = side, pulse, owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._tls: TlsRecords | None = None  # of the handshake, once it is in force
        self._raw = b""  # bytes of the handshake
        self._frames = ChannelFrames()
        self._began_s = self._heard_s = self._ticked_s = self._loop.time()
        self._wrote_s = -math.inf  # the time of the latest frame, heartbeats aside
        self._timer: asyncio.TimerHandle | None = None
        self._loss: Disconnect | None = None
        self.full = False  # the peer reads more slowly than this end writes
        self.open = False

    def send(self, items: Sequence[Sequence[Any]]) -> None:
        """Write a frame; do nothing after the end."""
        if self.open:
            self._wrote_s = self._loop.time()
            self._write(frame(codec.to_bytes(items)))

    def send_raw(self, data: bytes) -> None:
        """Write a frame of raw bytes; do nothing after the end."""
        if self.open:
            self._wrote_s = self._loop.time()
            self._write(frame(RAW + data))

    def hand_to(self, owner: ConnectionOwner) -> None:
        """Have another owner from now on."""
        self._owner = owner

    def pause_reading(self) -> None:
        """Read no more for now; the peer notices once the buffers between them are full."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._transport is not None and self._loss is None:
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    def close(self, reason: str, *, silent: bool = False) -> None:
        """Close at once; unsent data is dropped."""
        if self._loss is not None:
            return
        self._loss = Disconnect(reason, silent)
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._owner.lost(self._loss)

    # -- what the loop calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake and the heartbeat."""
        self._transport = cast(asyncio.Transport, transport)
        if self._loss is not None:
            self._transport.abort()  # closed before the event loop got here
            return
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self._transport.write(self._side.opening())
        if self._side.opened:
            self._encrypt()
        self._tick_next()

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        self._heard_s = self._loop.time()
        try:
            if self._tls is not None:
                data = self._decrypted(self._tls, data)
            if self.open:
                self._read(data)
            else:
                self._greet(data)
        except (ChannelError, EncryptionError, MalformedMessage) as exc:
            self.close(str(exc))

    def eof_received(self) -> None:
        """Close this end as well, by returning None."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a connection that broke or was closed by the peer."""
        self.close("the connection ended" if exc is None else f"the connection broke ({exc})")

    def pause_writing(self) -> None:
        """Note that the write buffer is full."""
        self.full = True

    def resume_writing(self) -> None:
        """Note that the write buffer has drained."""
        self.full = False
        if self.open:
            self._owner.drained()

    # -- inside -------------------------------------------------------------------------------

    def _greet(self, data: bytes) -> None:
        self._raw += data
        while not self._side.done and len(self._raw) >= self._side.need:
            need = self._side.need
            message, self._raw = self._raw[:need], self._raw[need:]
            answer = self._side.take(message)
            self._encrypt()
            if answer:
                self._write(answer)
        if self._side.done:
            rest, self._raw = self._raw, b""
            self.open = True
            self._owner.opened()
            self._read(rest)

    def _encrypt(self) -> None:
        """Have all bytes encrypted from here on, where the handshake has a certificate."""
        if self._tls is None and self._side.tls is not None:
            if self._raw:
                raise ChannelError("more than an opening came in clear")
            self._tls = self._side.tls
            if self._transport is not None and (first := self._tls.begin()):
                self._transport.write(first)

    def _decrypted(self, tls: TlsRecords, data: bytes) -> bytes:
        plain, answer = tls.decrypt(data)
        if answer and self._transport is not None:
            self._transport.write(answer)
        return plain

    def _write(self, data: bytes) -> None:
        if self._tls is not None:
            data = self._tls.encrypt(data)
        if data and self._transport is not None:
            self._transport.write(data)

    def _read(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            if not payload or not self.open:
                continue
            if payload[:1] == RAW:
                self._owner.handle_raw(payload[1:])
            else:
                self._owner.handle(codec.from_bytes(payload))

    def _tick(self) -> None:
        """Send a heartbeat, and close the connection of a silent peer."""
        now_s = self._loop.time()
        stood_still = now_s - self._ticked_s > 2 * self._pulse.heartbeat_s
        self._ticked_s = now_s
        if stood_still:
            # This process was suspended: data of the peer may still be unread.
            self._heard_s = max(self._heard_s, now_s - self._pulse.heartbeat_s)
            self._began_s = max(self._began_s, self._heard_s)
        # Before the handshake ends, single bytes do not extend the time limit.
        pulse = self._pulse
        since_s, limit_s = (
            (self._heard_s, pulse.silence_s) if self.open else (self._began_s, pulse.connect_s)
        )
        if now_s - since_s > limit_s:
            self.close(f"no sign of life for {limit_s:g} s", silent=True)
            return
        # Whatever was written is as good a sign: a busy connection has no heartbeats, and one with
        # a report every second has half of them. The peer misses two such pauses before it closes.
        next_s = now_s + pulse.heartbeat_s
        if self.open and not self.full and next_s - self._wrote_s > pulse.silence_s / 3:
            self._write(HEARTBEAT)
        self._tick_next()

    def _tick_next(self) -> None:
        # All connections of a machine tick at once, half an interval away from the instants at
        # which boards are asked for reports.
        at_s = next_round(self._loop.time(), self._pulse.heartbeat_s, phase=0.5)
        self._timer = self._loop.call_at(at_s, self._tick)
