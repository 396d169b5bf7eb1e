"""One connection of the channel, as both ends have it: greeting, frames, signs of life, an end.

It knows asyncio's transports, and nothing of generations: what a frame says is its owner's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rkserve.transport import codec
from rkserve.transport.codec import Garbled
from rkserve.transport.framing import (
    HEARTBEAT,
    BoardSide,
    Frames,
    Refused,
    RouterSide,
    frame,
)

log = logging.getLogger(__name__)

# What a peer that does not read may make of this end's memory, besides what is merged.
HIGH_WATER = 256 * 1024


@dataclass(frozen=True, slots=True)
class Pulse:
    """Signs of life: sent each ``heartbeat_s``; a peer without any for ``silence_s`` is lost."""

    heartbeat_s: float = 1.0
    silence_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a connection is over. ``silent``: there was no sign of life, and it was cut here."""

    reason: str
    silent: bool = False


class Owner(Protocol):
    """Who has a line. None of these may raise."""

    def opened(self, line: Line) -> None:
        """The other end has proven who it is."""

    def heard(self, items: list[list[Any]]) -> None:
        """A frame came. Raises ``Garbled`` where it makes no sense; that ends the line."""

    def drained(self) -> None:
        """The other end reads again, after ``Line.full``."""

    def lost(self, loss: Loss) -> None:
        """It is over, for whatever reason; said once, also of a line that was never opened."""


class Line(asyncio.Protocol):
    """One connection. Closing it is final."""

    def __init__(self, side: BoardSide | RouterSide, pulse: Pulse, owner: Owner) -> None:
        self._side, self._pulse, self._owner = side, pulse, owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._raw = b""  # of the greeting
        self._frames = Frames()
        self._began_s = self._heard_s = self._ticked_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._loss: Loss | None = None
        self.full = False  # the other end does not read as fast as this one writes
        self.open = False

    def send(self, items: Sequence[Sequence[Any]]) -> None:
        """Write a frame; nothing where the line is over."""
        if self.open and self._transport is not None:
            self._transport.write(frame(codec.to_bytes(items)))

    def close(self, reason: str, *, silent: bool = False) -> None:
        """End it now; what was not sent yet is given up."""
        if self._loss is not None:
            return
        self._loss = Loss(reason, silent)
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._owner.lost(self._loss)

    # -- what the loop calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there, and nobody has proven anything."""
        self._transport = cast(asyncio.Transport, transport)
        if self._loss is not None:
            self._transport.abort()  # it was closed before the loop came to this
            return
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self._transport.write(self._side.opening())
        self._timer = self._loop.call_later(self._pulse.heartbeat_s, self._tick)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._heard_s = self._loop.time()
        try:
            if self.open:
                self._read(data)
            else:
                self._greet(data)
        except (Refused, Garbled) as exc:
            self.close(str(exc))

    def eof_received(self) -> None:
        """The other end has closed: returning nothing closes this one."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It broke, or was closed by the other end."""
        self.close("the connection ended" if exc is None else f"the connection broke ({exc})")

    def pause_writing(self) -> None:
        """Enough is waiting to be sent."""
        self.full = True

    def resume_writing(self) -> None:
        """It was sent."""
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
            if self._transport is not None and answer:
                self._transport.write(answer)
        if self._side.done:
            rest, self._raw = self._raw, b""
            self.open = True
            self._owner.opened(self)
            self._read(rest)

    def _read(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            if payload and self.open:
                self._owner.heard(codec.from_bytes(payload))

    def _tick(self) -> None:
        """Say that this end lives, and look whether the other one does."""
        now_s = self._loop.time()
        stood_still = now_s - self._ticked_s > 2 * self._pulse.heartbeat_s
        self._ticked_s = now_s
        if stood_still:
            # It was this process that did not run: what the other end sent waits to be read.
            self._heard_s = max(self._heard_s, now_s - self._pulse.heartbeat_s)
            self._began_s = max(self._began_s, self._heard_s)
        # Whoever has not proven anything keeps no place here by sending a byte now and then.
        since_s = self._heard_s if self.open else self._began_s
        if now_s - since_s > self._pulse.silence_s:
            self.close(f"no sign of life for {self._pulse.silence_s:g} s", silent=True)
            return
        if self.open and self._transport is not None and not self.full:
            self._transport.write(HEARTBEAT)
        self._timer = self._loop.call_later(self._pulse.heartbeat_s, self._tick)
