"""Who may control which generation, from which Router, and what is refused without harm."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rkserve.router.auth.callers import SHARE_S
from tests.support.boards.pausing import (
    COUNT,
    COUNTED,
    FAST,
    KEPT_FIRST,
    KEPT_OR_NOT,
    KEY,
    OPERATOR,
    pace,
    paused,
    refused,
    run,
    settle,
    state_of,
    stop_at,
)
from tests.support.cluster.controlled import coordinator_pid, kill
from tests.support.cluster.local_cluster import App
from tests.support.http.scraping import Scraper
from tests.support.http.talk import CHAT, act, ask, chat_body, streaming

pytestmark = pytest.mark.ray
BUILD = "rkserve_build_info"
AT_ONCE = 6  # control calls of a test that has to reach both Routers
pytest_plugins = ["tests.support.cluster.pausing_fixtures"]


@pytest.fixture
def boards(slow_boards: App) -> App:
    """Slow boards, which the test leaves free, with the same engines."""
    return slow_boards


# -- who may do what, from where ------------------------------------------------------------------


def test_every_router_controls_the_generations_of_all(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http) as (reply, _):
            streams: set[float] = set()
            one_edit = asyncio.Lock()

            async def control() -> None:
                for _ in range(200):
                    response = await http.get(f"/v1/generations/{reply.id}")
                    assert response.status_code == 200, response.text
                    state = response.json()
                    assert (state["state"], state["can_resume"]) == ("paused", True)
                    async with one_edit:
                        edit = await http.post(
                            f"/v1/generations/{reply.id}/edit",
                            json={"text": "!", "replace_last": 0},
                        )
                    assert edit.status_code == 200, edit.text
                    streams.add(await _answers_of_this_router(http))
                    if streams == {0.0, 1.0}:
                        return

            # Several at once: the proxy prefers the Router with fewer requests, and requests that
            # come one after the other find that to be the one without the stream each time.
            await asyncio.gather(*(control() for _ in range(AT_ONCE)))
            assert streams == {0.0, 1.0}, "only one Router has answered"
            await act(http, reply.id, "abort")
            await reply.read()
        assert reply.finish_reason == "abort"

    run(boards, talk)


async def _answers_of_this_router(http: httpx.AsyncClient) -> float:
    return float((await http.get("/load")).json()["server_load"])


def test_every_router_has_the_metrics_of_all(boards: App) -> None:
    pace(boards, FAST)
    prometheus = Scraper()

    async def talk(http: httpx.AsyncClient) -> None:
        async def scrape() -> None:
            # A connection of its own, which may lead to another Router than the one before.
            async with boards.http() as fresh:
                prometheus.take((await fresh.get("/metrics")).text)

        def up() -> int:
            return len([one for one in prometheus.last if one[0] == "rkserve_router_up"])

        await scrape()
        while up() < 2:
            await scrape()
        for turn in range(20):
            async with boards.http() as fresh:
                assert (await ask(fresh, "Repeat after me: done", max_tokens=3)).error is None
            if turn % 2:
                await scrape()
        await scrape()

    run(boards, talk)
    count = prometheus.increase
    assert count("rkserve_requests_total", route="/v1/chat/completions", status="200") == 20
    assert count("rkserve_ttft_seconds_count") == 20
    assert prometheus.value("rkserve_router_up", router="0") == 1
    assert prometheus.value("rkserve_router_up", router="1") == 1
    replicas = {dict(labels)["replica"] for name, labels in prometheus.last if name == BUILD}
    assert len(replicas) == 2


def test_every_router_has_the_usage_of_all_from_the_file_of_their_node(boards: App) -> None:
    pace(boards, FAST)

    async def usage(http: httpx.AsyncClient) -> tuple[int, int]:
        """Return the requests and the tokens of answers of all keys on all days."""
        answer = (await http.get("/v1/usage", headers=OPERATOR)).json()
        assert answer["routers"] == {"up": ["0", "1"], "silent": []}
        assert answer["unstored"] == []
        rows = answer["data"]
        return sum(row["requests"] for row in rows), sum(row["completion_tokens"] for row in rows)

    async def talk(http: httpx.AsyncClient) -> None:
        before = await usage(http)
        found: set[tuple[int, int]] = set()
        for _ in range(10):
            async with boards.http() as fresh:
                assert (await ask(fresh, "Repeat after me: done", max_tokens=3)).error is None
        for _ in range(20):
            # A connection of its own, which may lead to another Router than the one before.
            async with boards.http() as fresh:
                found.add(await usage(fresh))
        assert len(found) == 1, "Routers differ"
        ((requests, tokens),) = found
        assert requests - before[0] == 10
        assert 10 <= tokens - before[1] <= 30

    run(boards, talk)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param(OPERATOR, 200, id="the operator's key"),
        pytest.param({"authorization": "Bearer another"}, 401, id="another key"),
        pytest.param({"authorization": f"Basic {KEY}"}, 403, id="another scheme"),
        pytest.param({}, 403, id="no key"),
    ],
)
def test_the_list_of_everybody_is_for_the_operator_and_holds_nobody_s_words(
    boards: App, headers: dict[str, str], status: int
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http) as (reply, told):
            response = await http.get("/v1/generations", headers=headers)
            assert response.status_code == status
            if status == 200:
                (entry,) = response.json()["data"]
                assert (entry["id"], entry["state"], entry["kv"]) == (
                    reply.id,
                    "paused",
                    "recomputed",
                )
                assert entry["board"] == reply.board
                assert entry["tokens"] == told["tokens"]
                assert told["partial_output"] not in response.text
            else:
                code = {401: "invalid_api_key", 403: "forbidden"}[status]
                assert response.json()["error"]["code"] == code
            # Who has the id needs no key.
            one = await http.get(f"/v1/generations/{reply.id}")
            assert one.json()["partial_output"] == told["partial_output"]
            await act(http, reply.id, "abort")

    run(boards, talk)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "body", "words"),
    [
        pytest.param("edit", {"text": "x"}, "generating", id="edit"),
        pytest.param("resume", {}, "generating", id="resume"),
    ],
)
def test_what_a_running_generation_does_not_allow_does_it_no_harm(
    boards: App, action: str, body: dict[str, Any], words: str
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with streaming(http, COUNT, temperature=0) as reply:
            await reply.read(deltas=3)
            error = await refused(http, reply, action, **body)
            assert (error["status"], error["code"]) == (409, "state_conflict")
            assert words in error["message"]
            pace(boards, FAST)
            await reply.read()
        assert (reply.text, reply.finish_reason) == (COUNTED, "stop")

    run(boards, talk)


# What is asked of a paused generation, with the status and words of the answer.
BAD_INPUT: list[tuple[str, dict[str, Any], int, str]] = [
    ("pause", {}, 409, "paused"),  # a pause of a paused one
    ("edit", {"clear": [[0, 100_000]]}, 400, "outside"),  # outside the cache
    ("edit", {"clear": [[5, 2]]}, 400, "start <= end; got [5, 2]"),  # end before start
    ("edit", {"clear": [[-1, 2]]}, 400, "0 <= start"),  # a negative start
    ("edit", {"clear": [[0, 1, 2]]}, 400, "at most 2 items"),  # no range
    ("edit", {"token_ids": [10_000_000]}, 400, "vocabulary"),  # no such token
    ("edit", {"token_ids": [-1]}, 400, "token_ids"),  # a negative token
    ("edit", {"token_ids": [1], "text": "a"}, 400, "not both"),  # text and ids
    ("edit", {"replace_last": 9999}, 400, "9999"),  # more than it has said
    ("edit", {"replace_last": -1}, 400, "replace_last"),  # less than nothing
    ("edit", {"text": "x" * 50_000}, 400, "context"),  # longer than the context
    ("edit", {}, 400, "at least one"),  # an edit of nothing
    ("edit", {"txet": "a", "text": "b"}, 400, "txet"),  # a mistyped key
    ("resume", {"choice": 7}, 404, ""),  # a choice that is not there
    ("resume", {"choice": -1}, 400, "choice"),  # a negative choice
    ("edit", {"clear": [[1, 4], [3, 5]]}, 400, "overlap"),
]


@pytest.mark.parametrize("native", KEPT_OR_NOT)
def test_bad_input_is_refused_and_the_paused_generation_unharmed(boards: App, native: bool) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=native) as (reply, told):
            for action, body, status, words in BAD_INPUT:
                error = await refused(http, reply, action, **body)
                assert (error["status"], words in error["message"]) == (status, True), (body, error)
                assert error["type"] == "invalid_request_error"
                state = await state_of(http, reply)
                assert {key: state[key] for key in PROGRESS} == {key: told[key] for key in PROGRESS}
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert (reply.text, reply.finish_reason, reply.retracted) == (COUNTED, "stop", 0)

    run(boards, talk)


PROGRESS = ("partial_output", "tokens", "context_tokens", "kv", "kv_positions", "can_resume")


@pytest.mark.parametrize("native", KEPT_FIRST)
def test_of_two_resumptions_at_once_one_is_refused(boards: App, native: bool) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=native) as (reply, _):
            url = f"/v1/generations/{reply.id}/resume"
            first, second = await asyncio.gather(http.post(url), http.post(url))
            assert sorted([first.status_code, second.status_code]) == [200, 409]
            (error,) = (r.json()["error"] for r in (first, second) if r.status_code == 409)
            assert any(state in error["message"] for state in GOING_ON), error
            pace(boards, FAST)
            await reply.read()
        assert (reply.text, reply.finish_reason) == (COUNTED, "stop")

    run(boards, talk)


GOING_ON = ("resuming", "queued", "prefilling", "generating")


@pytest.mark.parametrize("action", ["pause", "edit", "resume"])
def test_a_finished_generation_cannot_be_controlled(boards: App, action: str) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        pace(boards, FAST)
        reply = await ask(http, "Repeat after me: done")
        error = await refused(http, reply, action, **({"text": "x"} if action == "edit" else {}))
        assert (error["status"], error["code"]) == (409, "state_conflict")
        assert "ended" in error["message"]

    run(boards, talk)


@pytest.mark.parametrize("generation", ["chatcmpl-nobody", "x" * 500, "..", "%2e%2e%2fv1"])
@pytest.mark.parametrize("action", ["pause", "edit", "resume", "abort"])
def test_a_generation_that_nobody_has_is_a_404(boards: App, generation: str, action: str) -> None:
    body = {"text": "x"} if action == "edit" else {}
    url = f"{boards.url}/v1/generations/{generation}/{action}"
    with boards.http_sync() as http:
        response = http.post(httpx.URL(url), json=body)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


NO_JSON = {
    "no JSON": b"{",
    "no object": b"[1]",
    "no UTF-8": b'{"text": "\xff"}',
    "no number": b'{"text": NaN}',
}


def test_a_body_that_is_no_json_is_refused(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http) as (reply, _):
            for name, content in NO_JSON.items():
                response = await http.post(f"/v1/generations/{reply.id}/edit", content=content)
                assert response.status_code == 400, name
                assert response.json()["error"]["type"] == "invalid_request_error", name
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.text == COUNTED

    run(boards, talk)


def test_a_generation_that_prefills_or_waits_cannot_be_paused_yet(boards: App) -> None:
    settle(boards)
    stop_at(boards, "prefill")

    async def talk(http: httpx.AsyncClient) -> None:
        async with streaming(http, COUNT, n=3, max_tokens=3) as reply:
            await reply.read_until(lambda r: bool(r.id))
            errors = [await refused(http, reply, "pause", choice=choice) for choice in range(3)]
            assert {(e["status"], e["code"]) for e in errors} == {(409, "state_conflict")}
            states = ["prefilling", "queued"]
            found = [state for e in errors for state in states if state in e["message"]]
            assert sorted(found) == ["prefilling", "prefilling", "queued"]
            pace(boards, FAST)
            await reply.read()
        assert reply.reasons == {0: "length", 1: "length", 2: "length"}
        assert reply.error is None

    run(boards, talk)


# -- keys -----------------------------------------------------------------------------------------


async def statuses(app: App, secret: str, calls: int = 40) -> set[int]:
    """Return the statuses of calls on connections of their own, which lead to any Router."""
    headers, found = {"authorization": f"Bearer {secret}"}, set()
    for _ in range(calls):
        async with app.http() as fresh:
            found.add((await fresh.get("/v1/generations", headers=headers)).status_code)
    return found


async def made(http: httpx.AsyncClient, name: str) -> tuple[str, str]:
    """Make a key, and return its id and its secret."""
    body = {"name": name, "scopes": ["operate"]}
    answer = await http.post("/v1/keys", json=body, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"], answer.json()["value"]


async def revoked(app: App, http: httpx.AsyncClient, key_id: str, secret: str) -> float:
    """Revoke a key that is used meanwhile; return for how long its calls began after that."""
    accepted_s = [0.0]

    async def use() -> None:
        while True:
            began_s = time.monotonic()
            if 200 in await statuses(app, secret, 1):
                accepted_s[0] = began_s

    using = [asyncio.create_task(use()) for _ in range(4)]
    await asyncio.sleep(0.2)
    asked_s = time.monotonic()
    answer = await http.delete(f"/v1/keys/{key_id}", headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    for task in using:
        task.cancel()
    assert 200 not in await statuses(app, secret), "a Router takes it after its revocation"
    return max(0.0, accepted_s[0] - asked_s)


def test_a_limit_of_a_key_is_that_of_all_routers_together(two_routers: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        limited = {"name": "limited", "requests_per_minute": 20}
        answer = await http.post("/v1/keys", json=limited, headers=OPERATOR)
        headers = {"authorization": f"Bearer {answer.json()['value']}"}

        async def asked(calls: int) -> Counter[int]:
            found: Counter[int] = Counter()
            for _ in range(calls):
                async with two_routers.http() as fresh:
                    body = chat_body("Hi", max_tokens=1)
                    found[(await fresh.post(CHAT, json=body, headers=headers)).status_code] += 1
            return found

        pace(two_routers, FAST)
        assert await asked(20) == {200: 20}
        await asyncio.sleep(2 * SHARE_S)
        # Without the reports each Router would admit half as many again.
        assert (await asked(20))[429] >= 10

    run(two_routers, talk)


# The last one: this machine has sent too many wrong keys after it.
def test_a_revoked_key_is_refused_by_every_router_also_after_the_coordinator_s_death(
    two_routers: App, figures: Callable[[str], None]
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        key_id, secret = await made(http, "one")
        assert await statuses(two_routers, secret) == {200}, "a Router does not know the new key"
        took_s = await revoked(two_routers, http, key_id, secret)
        key_id, secret = await made(http, "two")
        await asyncio.to_thread(kill, await asyncio.to_thread(coordinator_pid, two_routers))
        assert await statuses(two_routers, secret) == {200}, "Routers keep what they know"
        while (  # noqa: ASYNC110 # the answer of another process
            await http.get("/v1/operations", headers=OPERATOR)
        ).status_code != 200:
            await asyncio.sleep(0.2)
        assert await statuses(two_routers, secret, 10) == {200}
        again_s = await revoked(two_routers, http, key_id, secret)
        figures(
            "calls with a revoked key that began after the revocation was asked for: the last "
            f"after {took_s * 1e3:.0f} ms, after the Coordinator's death {again_s * 1e3:.0f} ms"
        )

    run(two_routers, talk)
