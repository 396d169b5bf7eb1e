"""Ports of this machine for servers that somebody else starts a while later."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"
# Ray's workers listen from 10002 to 19999, and replicas that serve HTTP themselves from 30000.
FIRST, LAST = 20_000, 29_999


def free_ports(rng: random.Random | None = None) -> Iterator[int]:
    """Yield ports on which nobody listens, each of them once.

    None is of those that a kernel gives to whoever asks for any, or connects, from 32768 where
    nobody has changed that: until the server starts it would give them away again, and a starting
    Ray takes hundreds.

    Raises:
        OSError: none is left.
    """
    ports = list(range(FIRST, LAST + 1))
    (rng or random.Random()).shuffle(ports)
    for port in ports:
        if _is_free(port):
            yield port
    raise OSError(f"no port from {FIRST} to {LAST} is free")


def free_port() -> int:
    """Return one of ``free_ports``. Raises ``OSError``."""
    return next(free_ports())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: what was closed a moment ago does not keep a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
