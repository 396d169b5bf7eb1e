"""Limits of request bodies, and answers to clients that hang up, on scripted boards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message, Scope

from rkserve.config.router import RouterConfig
from rkserve.core.messages import Delta
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    answer,
    eventually,
)
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat, scripted

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(
    ("kwargs", "status", "code"),
    [
        pytest.param({"content": b"x" * 2000}, 413, "body_too_large", id="too long"),
        pytest.param(
            {"content": b"", "headers": {"content-length": "9999999"}},
            413,
            "body_too_large",
            id="announced too long",
        ),
        pytest.param(
            {"content": b"{}", "headers": {"content-length": "many"}}, 400, None, id="no length"
        ),
        pytest.param({"content": b"[1]"}, 400, None, id="an array"),
        pytest.param({"content": b'{"a":' * 5000}, 413, "body_too_large", id="deep and long"),
    ],
)
async def test_bodies_have_limits(kwargs: dict[str, Any], status: int, code: str | None) -> None:
    house = House(FakeBoards.answering("a"), RouterConfig(max_body_bytes=1024))
    response = await house("POST", CHAT, **kwargs)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_body_in_chunks_is_cut_off_as_soon_as_it_is_too_long() -> None:
    house = House(FakeBoards.answering("a"), RouterConfig(max_body_bytes=1024))
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 100

    response = await asyncio.wait_for(house("POST", CHAT, content=endless()), 20)
    assert response.status_code == 413
    assert sent < 20


async def test_a_body_that_does_not_arrive_is_a_408() -> None:
    house = House(FakeBoards.answering("a"), RouterConfig(body_timeout_s=0.02))

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"model":'
        await asyncio.Event().wait()

    response = await house("POST", CHAT, content=slow())
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "body_too_slow"


# -- hang-ups -------------------------------------------------------------------------------------


@dataclass
class Exchange:
    """One HTTP exchange as a server conducts it with an ASGI application."""

    body: bytes
    spec_version: str = "2.3"
    sent: list[Message] = field(default_factory=list)
    broken: bool = False

    def __post_init__(self) -> None:
        self.gone = asyncio.Event()
        self._asked = False

    @property
    def scope(self) -> Scope:
        """A POST of the body."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": self.spec_version},
            "http_version": "1.1",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    async def receive(self) -> Message:
        """The body, and later the disconnect."""
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take a message, unless the connection is broken."""
        if self.broken:
            raise OSError("the connection is closed")
        self.sent.append(message)

    def text(self) -> str:
        """What was sent so far."""
        return b"".join(m.get("body", b"") for m in self.sent).decode()


Leave = Callable[[Exchange, "asyncio.Task[None]"], None]


def _says_so(exchange: Exchange, _: asyncio.Task[None]) -> None:
    exchange.gone.set()


def _cannot_be_sent_to(exchange: Exchange, _: asyncio.Task[None]) -> None:
    exchange.broken = True


def _is_cancelled(_: Exchange, task: asyncio.Task[None]) -> None:
    task.cancel()  # what Ray Serve does with a request whose client is gone


def endless() -> Iterable[Step]:
    """A board that never comes to an end."""
    return [accepted("a"), *(Delta(f"{k} ", (k,)) for k in range(1_000))]


async def _leave_in_mid_stream(house: House, exchange: Exchange, leave: Leave) -> None:
    await house.service.fleet.refresh()
    call: Coroutine[Any, Any, None] = house.app(  # type: ignore[assignment] # it is one
        exchange.scope, exchange.receive, exchange.send
    )
    task = asyncio.create_task(call)
    await eventually(lambda: "20 " in exchange.text())
    assert house.boards.running == 1
    leave(exchange, task)
    await eventually(lambda: house.boards.running == 0)
    await asyncio.wait({task}, timeout=20)
    assert task.cancelled() or task.exception() is None


@pytest.mark.parametrize(
    ("leave", "spec_version"),
    [
        pytest.param(_says_so, "2.3", id="the server says so"),
        pytest.param(_cannot_be_sent_to, "2.4", id="sending fails"),
        pytest.param(_is_cancelled, "2.3", id="the request is cancelled"),
    ],
)
async def test_a_client_that_leaves_a_stream_frees_the_board(
    leave: Leave, spec_version: str
) -> None:
    house = scripted(*endless())
    exchange = Exchange(json.dumps(chat(stream=True)).encode(), spec_version)
    await _leave_in_mid_stream(house, exchange, leave)
    house.expect_nothing_left()
    assert house.boards.closed == ["replica of a"]
    assert house.metric("rkserve_hang_ups_total") == 1
    assert house.metric("rkserve_generation_errors_total", code="server_error") == 0
    house.boards.scripts["replica of a"] = [answer("a", "next")]
    assert "next" in (await house("POST", CHAT, json=chat())).text


async def test_a_connection_that_breaks_before_the_first_byte_frees_the_board() -> None:
    house = scripted(*endless())
    await house.service.fleet.refresh()
    exchange = Exchange(json.dumps(chat(stream=True)).encode(), "2.4", broken=True)
    await house.app(exchange.scope, exchange.receive, exchange.send)
    house.expect_nothing_left()


def test_a_client_that_leaves_while_it_sends_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        house = House(FakeBoards.answering("a"))
        exchange = Exchange(b"")
        exchange.gone.set()

        async def receive() -> Message:
            if not exchange.sent:
                return {"type": "http.disconnect"}
            return await exchange.receive()

        await house.app(exchange.scope, receive, exchange.send)
        assert exchange.sent[0]["status"] == 400

    run_loop(main())
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="before the board has accepted"),
        pytest.param([accepted("a")], id="before the first token"),
        pytest.param([accepted("a"), Delta("x", (1,))], id="in the middle"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_cancelled_request_frees_the_board_wherever_it_was(
    steps: list[Step], stream: bool
) -> None:
    house = scripted(*steps, asyncio.Event())
    task = asyncio.create_task(house("POST", CHAT, json=chat(stream=stream)))
    await eventually(lambda: house.boards.running)
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await eventually(lambda: not house.boards.running)
    house.expect_nothing_left()
