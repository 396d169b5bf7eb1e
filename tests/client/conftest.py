"""A scripted control API and its client."""

from __future__ import annotations

import httpx
import pytest

from rkserve.client import (
    Client,
)
from tests.support.cluster.fake_control import FakeControl


@pytest.fixture
def server() -> FakeControl:
    return FakeControl()


@pytest.fixture
def client(server: FakeControl) -> Client:
    return Client(
        "http://head:8000/v1",
        admin_key="secret",
        transport=httpx.MockTransport(server.handle),
        sleep=server.sleep,
        clock=server.clock,
    )
