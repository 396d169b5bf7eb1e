"""Where Serve's view of a hang-up meets ASGI's."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import TaskCancelledError
from starlette.types import Message

from rkserve.deployments.router import _until_gone

pytestmark = pytest.mark.virtual_time


class Client:
    """As Serve: it hands the body out, raises at the hang-up, and is then silent for good."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self) -> Message:
        self.asked += 1
        if self.asked == 1:
            return {"type": "http.request", "body": b"x", "more_body": False}
        if self.asked == 2:
            raise TaskCancelledError
        await asyncio.Event().wait()
        raise AssertionError("it never comes back")


async def test_a_hang_up_is_said_as_asgi_does_and_as_often_as_it_is_asked() -> None:
    client = Client()
    receive = _until_gone(client)
    assert (await receive())["body"] == b"x"
    for _ in range(3):
        assert await asyncio.wait_for(receive(), 5) == {"type": "http.disconnect"}
    assert client.asked == 2


async def test_what_is_no_hang_up_is_raised() -> None:
    async def broken() -> Message:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await _until_gone(broken)()
