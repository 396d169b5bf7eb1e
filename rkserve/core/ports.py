"""Free ports of this machine for servers that start later."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"
# Ray's workers listen from 10002 to 19999, and replicas that serve HTTP themselves from 30000.
FIRST, LAST = 20_000, 29_999


def free_ports(rng: random.Random | None = None) -> Iterator[int]:
    """Yield ports on which nothing listens, each of them once.

    None is in the range from which a kernel assigns ports to outgoing connections and to servers
    that do not choose one (from 32768 by default): such a port could be assigned before the server
    starts, and a starting Ray takes hundreds.

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
        # As servers do: a recently closed connection does not block a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
