"""Real replicas put to sleep and woken over HTTP: streams survive, requests wake their model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from rkserve.core.board_report import BoardState
from tests.support.cluster.local_cluster import App, wait_for
from tests.support.cluster.varied import NAP, REST, of
from tests.support.http.talk import CHAT, Reply, chat_body, streaming

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

BOARDS = [f"{REST}-{n}" for n in range(2)]
LIMIT_S = 120.0
COUNTS = {n: ", ".join(str(one) for one in range(1, n + 1)) + "." for n in (30, 40, 50)}
KEEP: dict[str, Any] = {"mode": "keep"}


@pytest.fixture(scope="module")
def app(varied: App) -> App:
    """Two boards of one model, and one board of a model that is unloaded while idle."""
    return of(varied, REST, len(BOARDS))


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    """A client, whose test must leave nothing asleep but what nobody uses."""
    app.settled()
    with app.http_sync() as client:
        yield client
        asleep = client.get("/is_sleeping", params={"model": "sim-rest"}).json()["is_sleeping"]
        with contextlib.suppress(httpx.HTTPError):
            client.post("/wake_up", json={"model": "sim-rest"})
    assert not asleep


def post(http: httpx.Client, path: str, status: int = 200, **asked: Any) -> Any:
    response = http.post(path, json=asked)
    assert response.status_code == status, response.text
    return response.json()


def get(http: httpx.Client, path: str, **query: Any) -> Any:
    response = http.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def state(http: httpx.Client, model: str) -> str:
    return str(get(http, f"/v1/models/{model}")["rkserve"]["state"])


@contextlib.asynccontextmanager
async def streams(client: httpx.AsyncClient) -> AsyncIterator[list[tuple[Reply, str]]]:
    """Answers of different lengths, some of which have begun, while others wait for their turn."""
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for length, text in [*COUNTS.items(), *COUNTS.items()]:
            asked = streaming(
                client, f"Count to {length}", model="sim-rest", temperature=0, max_tokens=400
            )
            opened.append((await stack.enter_async_context(asked), text))
        yield opened


async def read_begun(opened: list[tuple[Reply, str]]) -> None:
    """Read of each board's first stream what shows that it runs."""
    first = {reply.board: reply for reply, _ in reversed(opened)}
    assert sorted(first) == BOARDS
    for reply in first.values():
        await reply.read(3)


@pytest.mark.promise("Sleep", "In-flight requests survive every level, at any progress")
@pytest.mark.parametrize("level", [1, 2])
def test_streams_survive_a_sleep_and_go_on_word_for_word(
    app: App, http: httpx.Client, level: int
) -> None:
    engines = {one.board_id: one.engine_pid for one in app.reports()}

    async def main() -> tuple[Any, Any]:
        async with app.http() as client, streams(client) as opened:
            await read_begun(opened)
            asleep = await client.post("/sleep", json={**KEEP, "level": level, "model": "sim-rest"})
            assert asleep.status_code == 200, asleep.text
            assert not any(reply.done for reply, _ in opened)
            found = await asyncio.to_thread(app.reports)
            assert {one.state for one in found} == {BoardState.ASLEEP}
            assert {one.level for one in found} == {level}
            woken = await client.post("/wake_up", json={"model": "sim-rest"})
            assert woken.status_code == 200, woken.text
            for reply, text in opened:
                await reply.read()
                assert (reply.error, reply.text, reply.finish_reason) == (None, text, "stop")
            return asleep.json(), woken.json()

    asleep, woken = asyncio.run(asyncio.wait_for(main(), LIMIT_S))

    assert (asleep["status"], asleep["level"], asleep["succeeded"]) == ("sleeping", level, 2)
    for result in asleep["results"].values():
        assert (result["status"], result["level"]) == ("sleeping", level)
        kept, dropped = result["kept_tokens"], result["dropped_tokens"]
        assert (result["kv"] == "parked") is (level == 1 and kept >= 0.99 * (kept + dropped))
    assert (woken["status"], woken["state"], woken["succeeded"]) == ("awake", "succeeded", 2)
    again = {one.board_id: one.engine_pid for one in app.reports()}
    assert all(again[board] != engines[board] for board in BOARDS), "the engines were never ended"


def test_a_model_is_unloaded_listed_and_loaded(app: App, http: httpx.Client) -> None:
    told = post(http, "/v1/models/unload", model="sim-rest", wake_on_request=False)
    assert (told["id"], told["status"], told["level"]) == ("sim-rest", "asleep", 1)
    assert state(http, "sim-rest") == "asleep"
    found = get(http, "/is_sleeping", model="sim-rest")
    assert (found["is_sleeping"], found["all"]) == (True, True)
    refused = http.post(CHAT, json=chat_body("Count to 3", model="sim-rest"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_paused")
    assert int(refused.headers["retry-after"]) >= 1
    assert (
        post(http, "/v1/models/unload", model="sim-rest", wake_on_request=False)["applied"] is False
    )
    assert post(http, "/resume")["applied"] is False
    told = post(http, "/v1/models/load", model="sim-rest")
    assert (told["status"], told["succeeded"]) == ("ready", 2)
    app.settled()
    assert state(http, "sim-rest") == "ready"
    assert post(http, "/v1/models/load", model="sim-rest")["applied"] is False
    post(http, "/v1/models/load", 404, model="nobody")


@pytest.mark.promise("Sleep", "A request wakes its model if that is configured")
def test_a_model_that_nobody_uses_is_unloaded_and_woken_by_the_next_requests(
    app: App, http: httpx.Client
) -> None:
    wait_for("the idle model to be unloaded", lambda: state(http, NAP) == "asleep")
    (board,) = app.cluster.reports(app.name, NAP)
    assert board.state is BoardState.ASLEEP

    async def main() -> list[Reply]:
        async with app.http() as client:

            async def one(length: int) -> Reply:
                text = f"Count to {length}"
                async with streaming(client, text, model=NAP, temperature=0) as reply:
                    return await reply.read()

            return await asyncio.gather(*(one(length) for length in COUNTS))

    replies = asyncio.run(asyncio.wait_for(main(), LIMIT_S))

    assert [reply.text for reply in replies] == list(COUNTS.values())
    audit = get(http, "/v1/audit", limit=50)["data"]
    by = [(one["who"], one["kind"]) for one in audit if one["who"] in {"idle", "request"}]
    assert by.count(("request", "wake")) == by.count(("idle", "sleep")) >= 1
    wait_for("it to be unloaded again", lambda: state(http, NAP) == "asleep")
