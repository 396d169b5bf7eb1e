"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket
from itertools import islice

import pytest

from rkserve.core import ports
from rkserve.core.ports import HOST, free_port, free_ports


def test_it_is_none_that_the_kernel_gives_away_or_that_ray_uses() -> None:
    found = list(islice(free_ports(random.Random(1)), 50))
    assert len(set(found)) == 50
    assert all(20_000 <= port < 30_000 for port in found)
    assert list(islice(free_ports(random.Random(2)), 50)) != found


def test_one_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind((HOST, free_port()))
        held.listen()
        taken = held.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", taken)
        monkeypatch.setattr(ports, "LAST", taken)
        with pytest.raises(OSError, match=f"no port from {taken} to {taken} is free"):
            free_port()
