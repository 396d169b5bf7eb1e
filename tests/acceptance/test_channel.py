"""The channel on a real cluster: tokens take it, a frozen board is noticed by it, Ray stands in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.boards.fakes import run_loop
from tests.support.cluster.local_cluster import App, LocalCluster, wait_for
from tests.support.http.talk import CHAT, MODEL, ask, chat_body, streaming

pytestmark = pytest.mark.ray

LONG = "Write 120 tokens"


def taken(app: App) -> dict[str, float]:
    """Generations of the Router by the way that their tokens took, and its connections."""
    with app.http_sync() as http:
        text = http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "rkserve_token_streams_total":
                found[sample.labels["path"]] = sample.value
            elif sample.name == "rkserve_channels":
                found["connections"] = sample.value
    return found


@pytest.fixture
def connected(boards: App) -> Iterator[App]:
    """Three boards at a real board's speed, each with a connection, and as fast as before after."""
    for number in range(boards.boards):
        boards.cluster.control(f"sim-{number}", "time_scale=0.5")
    wait_for("a connection to every board", lambda: taken(boards)["connections"] >= boards.boards)
    yield boards
    for number in range(boards.boards):
        boards.cluster.control(f"sim-{number}")
    boards.settled()


def test_tokens_take_the_channel(connected: App) -> None:
    async def main() -> None:
        before = taken(connected)
        async with connected.http() as http:
            assert (await ask(http, "Hello!")).done
        after = taken(connected)
        assert after["channel"] == before["channel"] + 1
        assert after["ray"] == before["ray"]

    run_loop(main(), 300.0)


def test_the_log_of_every_process_is_read_and_a_request_is_found_in_it(connected: App) -> None:
    """Serve's own filters, which set its request id on every line, stand between the two."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    with connected.http_sync() as http:
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "a b"})
        request = answer.json()["id"]
        lines = [json.loads(line) for line in http.get("/v1/logs").text.splitlines()]
        found = http.get("/v1/logs", params={"request_id": request}).text.splitlines()
        engine = http.get("/v1/boards/sim-0/logs", params={"tail": 1}).text
    boards = {f"sim-{number}" for number in range(connected.boards)}
    assert {line["source"] for line in lines} == {*boards, "router", "coordinator"}
    (access,) = [json.loads(line) for line in found]
    assert access["message"].startswith("POST /v1/chat/completions 200 ")
    assert "x_request_id=a_b" in access["message"]
    assert "Hello" not in access["message"]
    assert '"engine_pid":' in engine, "its last words come first"


def test_a_board_that_is_frozen_in_mid_answer_costs_its_client_nothing(connected: App) -> None:
    """Ray alone would notice after its own checks; the answer goes on elsewhere before."""

    async def main() -> None:
        async with connected.http() as http:
            expected = (await ask(http, LONG, temperature=0)).text
            async with streaming(http, LONG, temperature=0) as reply:
                await reply.read(deltas=5)
                report = await asyncio.to_thread(connected.report, reply.board)
                assert report is not None
                os.kill(report.pid, signal.SIGSTOP)
                try:
                    await reply.read()
                finally:
                    os.kill(report.pid, signal.SIGCONT)
            assert reply.error is None
            assert (reply.text, reply.done) == (expected, True)

    run_loop(main(), 300.0)


# -- Ray's own calls ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(ray_cluster: LocalCluster) -> Iterator[App]:
    """A board without a channel, whose Router gives a control call two seconds."""
    group = ray_cluster.simulated("plain", 1)
    args = {"boards": [group], "channel": False, "router": {"control_timeout_s": 2.0}}
    ray_cluster.deploy("plain", args)
    app = App(ray_cluster, "plain", "plain", 1)
    app.settled()
    yield app
    ray_cluster.delete("plain")


@pytest.mark.long
def test_without_the_channel_tokens_come_through_ray(plain: App) -> None:
    async def main() -> None:
        before = taken(plain)
        async with plain.http() as http:
            assert (await ask(http, "Hello!")).done
        assert taken(plain) == {"channel": 0, "ray": before["ray"] + 1, "connections": 0}

    run_loop(main(), 300.0)


@pytest.mark.long
def test_a_build_that_its_caller_gave_up_leaves_the_queue_and_is_never_made(plain: App) -> None:
    """Control calls take Ray's way with a channel, too."""
    with plain.http_sync() as http:
        body = chat_body("Tell me a story.", stream=True, pause_on=[" "], native_pause=True)
        with http.stream("POST", CHAT, json=body):  # the pause keeps the board
            wait_for("the pause", lambda: plain.reports()[0].paused == 1)
            build = {"cache_name": "late", "prompt": "You are Ferris."}
            refused = http.post(f"/v1/cache/{MODEL}", json=build)
            assert refused.status_code == 503
            assert "the build was withdrawn" in refused.json()["error"]["message"]
            wait_for("the withdrawal", lambda: plain.reports()[0].queued == 0)
        plain.settled()
        assert http.get(f"/v1/cache/{MODEL}").json()["data"] == []
