"""The whole cluster paused and resumed over HTTP, and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.control.checks import Era
from benchmarks.control.figures import pause_figures
from rkserve.core.board_report import BoardState
from tests.support.cluster.controlled import (
    BASE,
    BOARDS,
    COUNT,
    COUNTED,
    KEEP,
    LIMIT_S,
    all_report,
    body,
    coordinator_pid,
    flaws,
    get,
    kill,
    kill_coordinator,
    load,
    post,
    step,
    truth,
)
from tests.support.cluster.local_cluster import App, wait_for
from tests.support.http.talk import CHAT, ENDLESS, MODEL, Reply, chat_body, streaming

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.controlled_fixtures"]

STAMPED: dict[str, Any] = {"temperature": 0, "stream_options": {"include_usage": True}}


@contextlib.contextmanager
def paused(http: httpx.Client, **asked: Any) -> Iterator[Any]:
    """Pause until the block ends; gives what the pause's answer says."""
    yield post(http, "/pause", **{**KEEP, **asked})
    post(http, "/resume")


def chat(http: httpx.Client, text: str = "Count to 3") -> httpx.Response:
    return http.post(CHAT, json=chat_body(text, temperature=0, max_tokens=20))


# -- keep -----------------------------------------------------------------------------------------


@pytest.mark.promise("Pause", "It is answered when every selected board has stopped emitting")
def test_nothing_arrives_after_a_pause_s_answer_and_nothing_is_lost_by_it(app: App) -> None:
    said = truth(app, [body()])
    assert [one.text for one in said.values()] == [COUNTED]
    plan = [
        step("pause", "/pause", 0.2, **KEEP),
        step("resume", "/resume", 0.4),
        step("pause", "/pause", 0.3, mode="keep"),  # as vLLM: the KV caches are dropped
        step("resume", "/resume", 0.2),
        step("pause", "/pause_generation", 0.3, mode="in_place"),
        step("resume", "/continue_generation", 0.2),
    ]

    answers, calls = load(app, [body()], plan)

    figures = pause_figures(calls, answers, step_ms=6.0)
    assert (figures.count, figures.refused, figures.late) == (3, 0, 0)
    assert figures.resumed_ms.count >= 3, "the pauses have interrupted something"
    assert flaws(answers, said, [Era(BASE)]) == {}
    for call, status in zip(calls, ["paused", "resumed", "paused", "resumed"], strict=False):
        told = call.body
        assert (told["status"], told["state"], told["applied"]) == (status, "succeeded", True)
        assert (told["total"], told["succeeded"], told["failed"]) == (3, 3, [])
        assert set(told["results"]) == set(BOARDS)
    assert len({call.body["operation_id"] for call in calls}) == len(calls)
    epochs = [call.body["epoch"] for call in calls]
    assert epochs == sorted(set(epochs))


@pytest.mark.promise("Single boards", "`move`: other boards continue what runs, and lose nothing")
def test_boards_that_are_drained_in_turn_under_load_hand_over_every_answer(app: App) -> None:
    said = truth(app, [body()])
    plan = [
        one
        for board in BOARDS
        for one in (
            step("drain", "/v1/boards/drain", 0.4, boards=[board], mode="move"),
            step("undrain", "/v1/boards/undrain", 0.2, boards=[board]),
        )
    ]

    answers, calls = load(app, [body()], plan)

    assert flaws(answers, said, [Era(BASE)]) == {}
    assert any(one.continued for one in answers), "no board was busy when it was drained"
    assert [call.body["state"] for call in calls] == ["succeeded"] * len(plan)
    with app.http_sync() as http:
        assert get(http, "/v1/cluster")["total"]["drained"] == 0


@pytest.mark.promise("Pause", "`keep`: streams stay open, new requests wait")
def test_a_paused_cluster_says_so_and_lets_new_requests_wait(app: App, http: httpx.Client) -> None:
    async def ask(client: httpx.AsyncClient) -> Reply:
        async with streaming(client, COUNT, **STAMPED) as reply:
            await reply.read_until(lambda r: len(r.comments) >= 3)
            assert reply.text == ""
            asked = await client.post("/resume", json={})
            assert asked.status_code == 200, asked.text
            return await reply.read()

    async def talk() -> Reply:
        async with app.http() as client:
            return await asyncio.wait_for(ask(client), LIMIT_S)

    told = post(http, "/pause", **KEEP)
    said = get(http, "/is_paused")
    assert (said["is_paused"], said["all"], said["epoch"]) == (True, True, told["epoch"])
    assert {(b, one["paused"], one["mode"]) for b, one in said["boards"].items()} == {
        (board, True, "keep") for board in BOARDS
    }
    assert get(http, "/is_paused", model=MODEL)["is_paused"] is True
    wait_for("the totals", lambda: get(http, "/v1/cluster")["total"]["paused_boards"] == 3)

    reply = asyncio.run(talk())

    assert (reply.text, reply.finish_reason) == (COUNTED, "stop")
    said = get(http, "/is_paused")
    assert (said["is_paused"], said["all"]) == (False, False)


@pytest.mark.promise(
    "Every call that changes something", "A repeat of a key answers the same, with `applied: false`"
)
def test_a_repeat_of_a_call_s_key_changes_nothing_and_is_told_the_same(http: httpx.Client) -> None:
    headers = {"idempotency-key": "one-pause"}
    calls = [http.post("/pause", json=KEEP, headers=headers) for _ in range(2)]
    assert [call.status_code for call in calls] == [200, 200], [call.text for call in calls]
    first, again = (call.json() for call in calls)
    post(http, "/resume")

    assert (first["applied"], again["applied"]) == (True, False)
    assert first["operation_id"] == again["operation_id"]
    late = http.post("/pause", json=KEEP, headers=headers)
    assert late.json()["applied"] is False
    assert get(http, "/is_paused")["is_paused"] is False, "a repeat pauses nothing again"
    other = http.post("/pause", json={"mode": "abort"}, headers=headers)
    assert other.status_code in {400, 409, 422}, other.text


@pytest.mark.promise(
    "Every call that changes something",
    "It takes `model`, `selector`, `timeout_s`, `lease_s` and an idempotency key",
)
def test_a_pause_of_one_board_leaves_the_others_to_everybody(app: App, http: httpx.Client) -> None:
    with paused(http, boards=[BOARDS[1]]) as told:
        assert set(told["results"]) == {BOARDS[1]}
        said = get(http, "/is_paused")
        assert (said["is_paused"], said["all"]) == (True, False)
        assert [b for b, one in said["boards"].items() if one["paused"]] == [BOARDS[1]]
        answers, _ = load(app, [body("Count to 9")], clients=6, requests_each=1)
        assert {one.exchange.board for one in answers} == {BOARDS[0], BOARDS[2]}
    assert post(http, "/pause", boards=["nobody"], status=404)["error"]["code"] == "board_not_found"


@pytest.mark.promise("Every call that changes something", "A conflict, and a stale epoch, is a 409")
def test_a_call_with_an_epoch_that_is_over_is_refused(http: httpx.Client) -> None:
    epoch = get(http, "/is_paused")["epoch"]

    found = post(http, "/pause", **KEEP, epoch=epoch + 100, status=409)

    assert found["error"]["code"] == "stale_epoch"
    assert get(http, "/is_paused")["is_paused"] is False


# -- abort, wait, leases --------------------------------------------------------------------------


@pytest.mark.promise(
    "Pause", "`abort` and `wait`: new requests get 503 `engine_paused` with `Retry-After`"
)
@pytest.mark.parametrize(
    ("mode", "text", "reason"),
    [
        pytest.param("abort", ENDLESS, "abort", id="abort ends what runs"),
        pytest.param("wait", COUNT, "stop", id="wait lets it run to its end"),
    ],
)
def test_new_requests_are_refused_while_the_cluster_is_paused_so(
    app: App, http: httpx.Client, mode: str, text: str, reason: str
) -> None:
    async def talk() -> tuple[Reply, httpx.Response]:
        async with app.http() as client, streaming(client, text, **STAMPED) as reply:
            await reply.read(deltas=3)
            said, _ = await asyncio.gather(client.post("/pause", json={"mode": mode}), reply.read())
            return reply, said

    reply, said = asyncio.run(asyncio.wait_for(talk(), LIMIT_S))
    refused = chat(http)
    post(http, "/resume")

    assert said.status_code == 200, said.text
    assert (reply.finish_reason, reply.error) == (reason, None)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_paused"
    assert int(refused.headers["retry-after"]) >= 1
    assert chat(http).status_code == 200


@pytest.mark.promise("Pause", "A lease ends it if its caller is gone")
def test_a_lease_ends_a_pause_whose_controller_is_gone(http: httpx.Client) -> None:
    asked_s = time.monotonic()
    post(http, "/pause", **KEEP, lease_s=2.0)
    assert get(http, "/is_paused")["is_paused"] is True

    assert chat(http).status_code == 200, "it has waited for the lease's end"

    assert time.monotonic() - asked_s >= 1.9
    assert get(http, "/is_paused")["is_paused"] is False


# -- who dies meanwhile ---------------------------------------------------------------------------


@pytest.mark.promise("Pause", "A board that joins or restarts is paused before it serves")
def test_a_board_that_dies_while_paused_comes_back_paused_and_serves_after_the_resumption(
    app: App, http: httpx.Client
) -> None:
    (victim,) = (one for one in all_report(app) if one.board_id == BOARDS[1])

    def back() -> bool:
        found = app.report(BOARDS[1])
        return found is not None and found.pid != victim.pid and found.hold == "keep"

    with paused(http):
        kill(victim.pid)
        wait_for("the board to come back", back)
        found = app.report(BOARDS[1])
        assert found is not None
        assert found.running == found.completion_tokens == 0
        said = wait_for("all", lambda: (s := get(http, "/is_paused"))["all"] and s)
        assert set(said["boards"]) == set(BOARDS)
    app.settled()

    def all_serve() -> bool:  # once the Router has heard of it
        answers, _ = load(app, [body()], clients=9, requests_each=1, stagger_s=0.0)
        assert {one.text for one in answers} == {COUNTED}
        return {one.exchange.board for one in answers} == set(BOARDS)

    wait_for("all boards to serve", all_serve)


def test_a_coordinator_that_dies_leaves_the_cluster_paused_and_the_next_one_resumes_it(
    app: App, http: httpx.Client
) -> None:
    async def talk() -> Reply:
        async with app.http() as client, streaming(client, COUNT, **STAMPED) as reply:
            await reply.read(deltas=3)
            before = (await client.post("/pause", json=KEEP)).json()
            await asyncio.to_thread(kill_coordinator, app)
            said = (await client.get("/is_paused")).json()
            assert (said["all"], said["epoch"] >= before["epoch"]) == (True, True)
            assert {report.hold for report in await asyncio.to_thread(all_report, app)} == {"keep"}
            operation = await client.get(f"/v1/operations/{before['operation_id']}")
            assert operation.json()["state"] == "succeeded", operation.text
            resumed = await client.post("/resume", json={})
            assert resumed.status_code == 200, resumed.text
            return await reply.read()

    reply = asyncio.run(asyncio.wait_for(talk(), LIMIT_S))

    assert (reply.text, reply.finish_reason) == (COUNTED, "stop")
    assert get(http, "/is_paused")["is_paused"] is False
    assert all(report.state is BoardState.READY for report in all_report(app))


@pytest.mark.promise("Pause", "A Coordinator that is frozen does not answer a pause with success")
def test_a_pause_whose_coordinator_is_frozen_is_an_error_and_not_in_effect_when_it_goes_on(
    app: App, http: httpx.Client
) -> None:
    frozen = coordinator_pid(app)
    before = len(get(http, "/v1/operations?limit=1000")["data"])
    os.kill(frozen, signal.SIGSTOP)
    try:
        failed = http.post("/pause", json={**KEEP, "timeout_s": 1.0})
        assert failed.status_code in (503, 504), failed.text
        assert failed.json()["error"]["code"] in ("operation_timeout", "coordinator_unavailable")
    finally:
        with contextlib.suppress(ProcessLookupError):  # Serve may have replaced it
            os.kill(frozen, signal.SIGCONT)

    def answers() -> bool:
        return http.get("/v1/operations").status_code == 200

    wait_for("the Coordinator to answer", answers)
    assert get(http, "/is_paused")["is_paused"] is False
    assert chat(http).status_code == 200
    assert len(get(http, "/v1/operations?limit=1000")["data"]) <= before + 1


# -- what it tells of itself ----------------------------------------------------------------------


@pytest.mark.promise(
    "Every call that changes something", "Every call is audited, without prompts and answers"
)
def test_every_call_is_an_operation_and_a_line_of_the_audit_log(http: httpx.Client) -> None:
    with paused(http, boards=[BOARDS[2]]) as told:
        pass

    (found,) = (
        one for one in get(http, "/v1/operations")["data"] if one["id"] == told["operation_id"]
    )
    assert (found["kind"], found["state"], found["error"]) == ("pause", "succeeded", None)
    assert (found["total"], set(found["results"])) == (1, {BOARDS[2]})
    assert get(http, f"/v1/operations/{told['operation_id']}") == found
    assert http.get("/v1/operations/nobody").status_code == 404
    assert told["operation_id"] in str(get(http, "/v1/audit")["data"])
