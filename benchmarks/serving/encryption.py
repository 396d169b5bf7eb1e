"""Measure the CPU time that encryption of the channel costs each end.

``python -m benchmarks.serving.encryption`` sends frames with one token over loopback, in clear and
encrypted by turns, from a board's thread to a Router's, which answers each frame before the next.
CPU time is that of each thread, event loop and sockets included; the median of all rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rkserve.core.messages import Delta
from rkserve.transport import codec
from rkserve.transport.connection import (
    BoardHandshake,
    ChannelConnection,
    Disconnect,
    Heartbeat,
    RouterHandshake,
    new_key,
)
from rkserve.transport.encryption import BoardIdentity, new_identity

PULSE = Heartbeat(heartbeat_s=60, silence_s=600, connect_s=60)
FRAME = [codec.pack(1, Delta(" token", (1234,)))]
ANSWER: list[list[Any]] = [[1]]
WARM = 50  # frames before the first that counts
US = 1e6


class End:
    """The owner of one end's connection. ``frames`` is the number that came so far."""

    def __init__(self, side: BoardHandshake | RouterHandshake, *, answers: bool) -> None:
        self.frames, self._answers = 0, answers
        self.ready, self.came, self.over = (asyncio.Event() for _ in range(3))
        self.line = ChannelConnection(side, PULSE, self)

    def opened(self) -> None:
        """See ``ConnectionOwner``."""
        self.ready.set()

    def handle(self, _: list[list[Any]]) -> None:
        """Count a frame, and answer it."""
        self.frames += 1
        self.came.set()
        if self._answers:
            self.line.send(ANSWER)

    def handle_raw(self, _: bytes) -> None:
        """See ``ConnectionOwner``: there are none."""

    def drained(self) -> None:
        """See ``ConnectionOwner``."""

    def lost(self, _: Disconnect) -> None:
        """See ``ConnectionOwner``."""
        self.over.set()


@dataclass
class Round:
    """One connection with ``frames`` each way; CPU time of each end in us for each such pair."""

    identity: BoardIdentity | None
    frames: int
    board_us: float = 0.0
    router_us: float = 0.0
    _key: bytes = field(default_factory=new_key)

    def run(self) -> Round:
        """Measure in two threads, each with an event loop."""
        ends = socket.create_server(("127.0.0.1", 0))
        with ends, socket.create_connection(ends.getsockname()) as near:
            far = ends.accept()[0]
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            router = threading.Thread(target=lambda: asyncio.run(self._router(near)))
            router.start()
            asyncio.run(self._board(far))
            router.join()
        return self

    async def _board(self, sock: socket.socket) -> None:
        end = End(BoardHandshake(self._key, 1, self.identity), answers=False)
        await asyncio.get_running_loop().create_connection(lambda: end.line, sock=sock)
        await end.ready.wait()
        began_s = 0.0
        for number in range(WARM + self.frames):
            if number == WARM:
                began_s = time.thread_time()
            end.came.clear()
            end.line.send(FRAME)
            await end.came.wait()
        self.board_us = (time.thread_time() - began_s) / self.frames * US
        end.line.close("measured")

    async def _router(self, sock: socket.socket) -> None:
        pinned = self.identity.fingerprint if self.identity is not None else b""
        end = End(RouterHandshake(self._key, pinned), answers=True)
        await asyncio.get_running_loop().create_connection(lambda: end.line, sock=sock)
        while end.frames < WARM:
            end.came.clear()
            await end.came.wait()
        began_s, before = time.thread_time(), end.frames
        await end.over.wait()
        self.router_us = (time.thread_time() - began_s) / (end.frames - before) * US


def measure(rounds: int, frames: int) -> tuple[list[Round], list[Round]]:
    """Return rounds in clear and encrypted ones, measured by turns."""
    clear, encrypted, identity = [], [], new_identity()
    for _ in range(rounds):
        clear.append(Round(None, frames).run())
        encrypted.append(Round(identity, frames).run())
    return clear, encrypted


def table(clear: Sequence[Round], encrypted: Sequence[Round]) -> str:
    """Return the medians and their ratio as a Markdown table."""
    lines = [
        "| CPU of a frame and its answer, us | in clear | encrypted | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for end, name in (("board", "board_us"), ("Router", "router_us")):
        one, other = (
            statistics.median(getattr(each, name) for each in rounds)
            for rounds in (clear, encrypted)
        )
        lines.append(f"| {end} | {one:.1f} | {other:.1f} | {other / one:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of the channel's encryption")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--frames", type=int, default=4000)
    given = parser.parse_args()
    sys.stdout.write(f"{table(*measure(given.rounds, given.frames))}\n")


if __name__ == "__main__":
    main()
