"""The memory of calls: stored streams, broken disks, and responses of other Routers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.responses.stored import StoredResponse
from rkserve.config.router import ResponsesConfig
from rkserve.core.errors import BoardFailed, EngineDied
from rkserve.core.messages import Delta, FinishReason
from rkserve.router.stored_responses import Responses
from tests.support.boards.fake_boards import (
    Step,
    accepted,
    eventually,
    finished,
)
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import send
from tests.support.http.storing_house import (
    ABSENT,
    ROUTE,
    ask,
    error,
    storing,
    streamed,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        pytest.param([finished(1)], "completed", id="its end"),
        pytest.param([finished(1, FinishReason.LENGTH)], "incomplete", id="the limit"),
        pytest.param([finished(1, FinishReason.ABORT)], "cancelled", id="an abort"),
        pytest.param([EngineDied("a", "SIGSEGV")], "failed", id="the loss of its board"),
    ],
)
def test_a_stored_stream_says_how_it_ended(folder: Path, ends: list[Step], status: str) -> None:
    of = storing(folder, accepted("a"), Delta("half", (1,)), *ends, max_continuations=0)
    body = {"model": "sim-chat", "input": "Hello", "stream": True}
    last = streamed(send(of, "POST", ROUTE, json=body).text)[-1]["response"]
    found = send(of, "GET", f"{ROUTE}/{last['id']}").json()
    assert found == last
    assert (found["status"], found["output"][0]["content"][0]["text"]) == (status, "half")
    assert (found["error"] is None) == (status != "failed")
    of.responses.close()


def test_a_stream_whose_client_went_away_is_kept_as_cancelled(folder: Path) -> None:
    of = storing(folder, accepted("a"), Delta("half", (1,)), asyncio.Event())
    kept: list[StoredResponse] = []

    async def main() -> None:
        body = {"model": "sim-chat", "input": "Hello", "stream": True}
        task = asyncio.create_task(of("POST", ROUTE, json=body))
        await eventually(lambda: of.boards.running)
        await asyncio.sleep(1.0)
        (request_id,) = {request.request_id for _, request in of.boards.opened}
        task.cancel()
        await asyncio.wait({task})
        response_id = request_id.partition("/")[0]

        # It was handed to the one thread before this is.
        kept.extend(await of.responses.chain_here("anybody", response_id, None))

    run_loop(main())
    assert kept[0].response["status"] == "cancelled"
    assert kept[0].response["output"][0]["content"][0]["text"] == "half"
    of.responses.close()


def test_what_fails_as_a_whole_leaves_nothing(folder: Path) -> None:
    of = storing(folder, accepted("a"), Delta("half", (1,)), EngineDied("a", "SIGSEGV"))
    assert send(of, "POST", ROUTE, json={"model": "sim-chat", "input": "x"}).status_code == 503
    (_, request) = of.boards.opened[0]
    response_id = request.request_id.partition("/")[0]
    assert send(of, "GET", f"{ROUTE}/{response_id}").status_code == 404
    of.responses.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_broken_disk_costs_no_answer_and_is_told(folder: Path, stream: bool) -> None:
    folder.write_text("a file in its place")
    of = storing(folder)
    body = {"model": "sim-chat", "input": "Hello", "stream": stream}
    response = send(of, "POST", ROUTE, json=body)
    told = streamed(response.text)[-1]["response"] if stream else response.json()
    assert (told["status"], told["store"]) == ("completed", False)
    assert error(send(of, "GET", f"{ROUTE}/{told['id']}"))[:2] == (503, "responses_failed")
    follow = {"model": "sim-chat", "input": "x", "previous_response_id": told["id"]}
    assert error(send(of, "POST", ROUTE, json=follow))[:2] == (503, "responses_failed")
    folder.unlink()  # mended, it is used without a restart
    again = ask(of)
    assert send(of, "GET", f"{ROUTE}/{again['id']}").status_code == 200
    of.expect_nothing_left()
    of.responses.close()


def test_a_conversation_that_is_longer_than_a_body_may_be_is_refused(folder: Path) -> None:
    of = storing(folder, max_body_bytes=20_000)
    told: dict[str, Any] = {"id": None}
    for _ in range(2):
        told = ask(of, "word " * 1200, previous_response_id=told["id"])
    body = {"model": "sim-chat", "input": "word " * 1200, "previous_response_id": told["id"]}
    told = ask(of, "word " * 1200, previous_response_id=told["id"])
    body["previous_response_id"] = told["id"]
    assert error(send(of, "POST", ROUTE, json=body))[:2] == (413, "body_too_large")
    assert send(of, "GET", f"{ROUTE}/{told['id']}").status_code == 200
    of.responses.close()


class Others:
    """The Routers of other nodes."""

    def __init__(self, *responses: Responses) -> None:
        self.responses, self.away = responses, False

    async def kept_chain(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        if self.away:
            raise BoardFailed("other Routers", "no answer")
        found = [await one.chain_here(owner, response_id, most_bytes) for one in self.responses]
        return max(found, key=len)

    async def forget_response(self, owner: str, response_id: str) -> bool:
        return any([await one.forget_here(owner, response_id) for one in self.responses])


def test_routers_of_other_nodes_are_asked_for_what_is_not_here(tmp_path: Path) -> None:
    houses = [storing(tmp_path / name) for name in ("one", "two")]
    others = Others(*(one.responses for one in houses))
    for one in houses:
        one.responses._peers = others
    first, second = houses
    told: dict[str, Any] = {"id": None}
    for turn in range(4):  # each on the other node than the one before
        told = ask(houses[turn % 2], f"Turn {turn}", previous_response_id=told["id"])
    assert send(first, "GET", f"{ROUTE}/{told['id']}").json() == told
    listed = send(first, "GET", f"{ROUTE}/{told['id']}/input_items?order=asc").json()["data"]
    texts = [item["content"][0]["text"] for item in listed]
    assert texts == ["Turn 0", "Hello", "Turn 1", "Hello", "Turn 2", "Hello", "Turn 3"]
    assert send(first, "DELETE", f"{ROUTE}/{told['id']}").status_code == 200
    for one in houses:
        assert send(one, "GET", f"{ROUTE}/{told['id']}").status_code == 404
    others.away = True
    assert send(second, "GET", f"{ROUTE}/{ABSENT}").status_code == 503
    for one in houses:
        one.responses.close()


def test_where_nothing_is_kept_any_more_what_was_is_removed(folder: Path) -> None:
    of = storing(folder)
    ask(of)
    of.responses.close()
    assert (folder / "responses.sqlite3").exists()
    never = storing(folder, responses=ResponsesConfig(store="never"))
    run_loop(never.responses.forget_old())
    assert not (folder / "responses.sqlite3").exists()
