"""The verdict, the live events and the history over HTTP: who gets what, and when it ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.board_report import BoardState
from rkserve.http.view_routes import STUCK_S
from tests.support.boards.fake_boards import FakeBoards, eventually, report
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat, send
from tests.support.values.cluster_facts import HEALTHY

VERDICT, EVENTS, USAGE = "/v1/cluster/verdict", "/v1/cluster/events", "/v1/usage"
ADMIN = {"authorization": "Bearer admin"}


def two(**changes: Any) -> House:
    """A Router with two boards, of which the first is different."""
    return House(FakeBoards([report("a", **changes), report("b")]))


def test_a_cluster_that_is_well_is_ready() -> None:
    answer = send(two(), "GET", VERDICT).json()
    assert (answer["verdict"], answer["reasons"]) == ("READY", [])
    assert (answer["boards"], answer["ready"]) == (2, 2)


def test_a_reason_has_its_command_and_its_place_in_the_runbook() -> None:
    answer = send(two(state=BoardState.QUARANTINED), "GET", VERDICT).json()
    assert (answer["verdict"], answer["ready"]) == ("DEGRADED", 1)
    (only,) = answer["reasons"]
    assert (only["rule"], only["boards"]) == ("BoardQuarantined", ["a"])
    assert (only["command"], only["run_on"]) == ("rkserve doctor", "board")
    assert only["runbook"] == "docs/how-to/runbook.md#boardquarantined"


def test_the_view_needs_an_api_key_where_keys_are_configured(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret name=alice\n")
    of = House(FakeBoards([report("a")]), RouterConfig(api_keys_file=keys))
    paths = (VERDICT, EVENTS, "/v1/boards/a/history")
    for path in paths:
        assert send(of, "GET", path, params={}).status_code == 401
        headers = {"authorization": "Bearer secret"}
        query = {"seconds": "0"} if path == EVENTS else {}
        assert send(of, "GET", path, params=query, headers=headers).status_code == 200


@pytest.mark.parametrize(("headers", "operator"), [({}, False), (ADMIN, True)])
def test_the_operator_s_stream_is_another_one(headers: dict[str, str], operator: bool) -> None:
    config = RouterConfig(admin_key=SecretStr("admin"))
    of = House(FakeBoards([report("a")]), config)
    answer = send(of, "GET", EVENTS, params={"seconds": "0"}, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("retry: 1000\n\nevent: snapshot\nid: 1\ndata: {")
    assert f'"operator":{str(operator).lower()}' in answer.text
    assert of.feed.readers == 0


def test_usage_has_the_calls_of_each_key(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret name=alice\n")
    config = RouterConfig(api_keys_file=keys, admin_key=SecretStr("admin"))
    of = House(FakeBoards.answering("a"), config)
    client = {"authorization": "Bearer secret"}
    assert send(of, "POST", CHAT, json=chat(), headers=client).status_code == 200
    assert send(of, "GET", USAGE).status_code == 401
    answer = send(of, "GET", USAGE, headers=ADMIN).json()
    assert send(of, "GET", USAGE, headers=client).json() == answer, "it may read"
    (only,) = answer["data"]
    assert (only["key"], only["requests"]) == ("alice", 1)
    assert only["prompt_tokens"] > 0
    assert only["completion_tokens"] > 0
    assert answer["routers"] == {"up": ["0"], "silent": []}
    assert "secret" not in json.dumps(answer)


@pytest.mark.parametrize("days", ["0", "63", "all"])
def test_days_that_are_not_kept_are_refused(days: str) -> None:
    answer = send(two(), "GET", USAGE, params={"days": days})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "days")


@pytest.mark.parametrize("seconds", ["-1", "901", "soon"])
def test_a_time_that_no_stream_takes_is_refused(seconds: str) -> None:
    assert send(two(), "GET", EVENTS, params={"seconds": seconds}).status_code == 400


def test_viewers_beyond_the_limit_are_told_when_to_come_back() -> None:
    of = House(FakeBoards([report("a")]), RouterConfig(max_viewers=0))
    answer = send(of, "GET", EVENTS)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
    assert answer.json()["error"]["code"] == "too_many_viewers"


def test_a_board_s_history_is_there_as_soon_as_it_was_sampled() -> None:
    of = House(FakeBoards([report("node/a", running=1, hardware=HEALTHY)]))
    assert send(of, "GET", "/v1/boards/node/a/history").json()["columns"]["running"] == []
    of.view.sample()
    answer = send(of, "GET", "/v1/boards/node/a/history").json()
    assert answer["states"] == [{"state": "ready", "points": 1}]
    assert answer["columns"]["ddr_mhz"] == [2112]
    assert send(of, "GET", "/v1/boards/c/history").status_code == 404
    assert send(of, "GET", "/v1/boards/node/a").json()["id"] == "node/a"


def test_a_client_that_does_not_read_is_left() -> None:
    async def stick() -> float:
        of = two()
        await of.service.fleet.refresh()
        sent: list[Any] = []

        async def send_(message: Any) -> None:
            sent.append(message)
            if message.get("body"):
                await asyncio.Event().wait()  # its buffers are full

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "GET",
            "path": EVENTS,
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
        }
        began_s = asyncio.get_running_loop().time()
        call = asyncio.ensure_future(of.app(scope, receive, send_))
        await eventually(lambda: of.feed.readers)
        await call
        assert of.feed.readers == 0
        assert not any(one.get("more_body") is False for one in sent)
        return asyncio.get_running_loop().time() - began_s

    assert run_loop(stick()) == pytest.approx(STUCK_S, abs=5)
