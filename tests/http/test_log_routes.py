"""The operator's view of the logs over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import Message

from rkserve.config.router import RouterConfig
from rkserve.core.logs import ENGINE, LogRing
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import House, send

LOGS = "/v1/boards/a/logs"


def ring_of(*messages: str, **extra: Any) -> LogRing:
    ring = LogRing()
    for message in messages:
        record = logging.LogRecord("rkserve.x", logging.INFO, "", 1, message, None, None)
        record.created = 1.5
        vars(record).update(extra)
        ring.handle(record)
    return ring


def logging_house(ring: LogRing, **config: Any) -> House:
    boards = FakeBoards([report("a")], says={("replica of a", "logs"): ring.page})
    head = FakeHead(says={"logs": ring_of("the epoch is 3").page})
    return House(boards, RouterConfig(**config), head=head)


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_boards_lines_are_lines_of_json() -> None:
    house = logging_house(ring_of("E rkllm: no memory", **{ENGINE: 12}))
    (line,) = lines(send(house, "GET", LOGS))
    assert line == {
        "source": "a",
        "time_s": 1.5,
        "level": "INFO",
        "logger": "rkserve.x",
        "request_id": "",
        "message": "E rkllm: no memory",
        "engine_pid": 12,
    }


def test_a_line_stays_one_line_whatever_characters_it_has() -> None:
    text = "a\nb\u2028c\x85d\ud800"
    (line,) = lines(send(logging_house(ring_of(text)), "GET", LOGS))
    assert line["message"] == text


def test_the_tail_and_all_sources() -> None:
    house = logging_house(ring_of("one", "two"))
    assert [line["message"] for line in lines(send(house, "GET", f"{LOGS}?tail=1"))] == ["two"]
    found = lines(send(house, "GET", "/v1/logs"))
    assert {line["source"] for line in found} == {"a", "coordinator"}


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        pytest.param("/v1/boards/b/logs", 404, "board_not_found", id="an unknown board"),
        pytest.param(f"{LOGS}?tail=-1", 400, None, id="a negative tail"),
        pytest.param(f"{LOGS}?tail=5000", 400, None, id="more than is remembered"),
        pytest.param(f"{LOGS}?folow=true", 400, None, id="an unknown parameter"),
    ],
)
def test_a_wrong_query_is_an_error_object(path: str, status: int, code: str | None) -> None:
    answer = send(logging_house(ring_of("x")), "GET", path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_logs_are_for_the_operator() -> None:
    house = logging_house(ring_of("x"), admin_key="secret")
    for path in (LOGS, "/v1/logs"):
        assert send(house, "GET", path).status_code == 403
        answer = send(house, "GET", path, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


def test_a_client_that_hangs_up_ends_the_polls_of_the_board() -> None:
    async def main() -> None:
        ring = ring_of("one")
        house = logging_house(ring)
        await house.service.fleet.refresh()
        sent: list[Message] = []
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send_(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "path": LOGS,
            "raw_path": LOGS.encode(),
            "query_string": b"follow=true",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
        }
        call = asyncio.ensure_future(house.app(scope, receive, send_))
        await asyncio.sleep(5)
        body = b"".join(message.get("body", b"") for message in sent)
        assert json.loads(body)["message"] == "one"
        left.set()
        await call
        asked = len(house.boards.asked)
        assert asked > 5
        await asyncio.sleep(60)
        assert len(house.boards.asked) == asked

    run_loop(main())
