"""A terminal in front of a scripted control API."""

from __future__ import annotations

import pytest

from tests.support.cluster.fake_control import FakeControl
from tests.support.http.terminal import Terminal


@pytest.fixture
def server() -> FakeControl:
    return FakeControl()


@pytest.fixture
def rkserve(server: FakeControl) -> Terminal:
    return Terminal(server)
