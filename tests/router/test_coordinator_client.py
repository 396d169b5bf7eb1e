"""Requests that wake their model through the Coordinator, once for all of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from rkserve.control.calls import OperationRequest
from rkserve.control.operations import (
    OperationOutcome,
)
from rkserve.core.api_keys import ApiKey, KeyScope, KeyTable, digest_of
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import PauseMode
from rkserve.core.errors import (
    BoardAsleep,
    BoardOutOfOrder,
    CoordinatorAway,
    EnginePaused,
    LedgerFailed,
)
from rkserve.router import coordinator_client as wake_on_request
from rkserve.router.auth.key_ring import KeyRing, Keys
from rkserve.router.coordinator_client import CoordinatorClient
from tests.support.boards import own_time
from tests.support.boards.fake_boards import answer, eventually, report
from tests.support.boards.fakes import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import CHAT, House, chat, events
from tests.support.http.sleeping_house import MODEL, K, house, napping, send, slept, woken


@pytest.mark.promise("Sleep", "A request wakes its model if that is configured")
def test_many_requests_wake_their_model_once_and_are_answered() -> None:
    async def wake(call: OperationRequest) -> OperationOutcome:
        await asyncio.sleep(1.0)  # of the loop's own time: until then all of them have come
        return woken(of, call)

    of = napping(wake=wake)

    async def main() -> None:
        found = await asyncio.gather(*(of("POST", CHAT, json=chat()) for _ in range(8)))
        assert [one.status_code for one in found] == [200] * 8

    run_loop(main())
    assert [call.kind for call in of.head.calls] == [K.WAKE]
    # A board that has not heard of it would still refuse, or queue them until somebody wakes it.
    assert {request.min_epoch for _, request in of.boards.opened} == {8}
    of.expect_nothing_left()


async def test_a_stream_is_opened_while_its_model_loads() -> None:
    of = napping("a")
    loaded = asyncio.Event()
    first, *rest = answer("a", "hello")
    of.boards.scripts = {"replica of a": [[first, loaded, *rest]]}
    of.service.config = of.service.config.model_copy(update={"ping_s": 0.01})
    asked = asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
    await eventually(lambda: of.boards.running == 1)
    await asyncio.sleep(0.05)
    loaded.set()
    response = await asked
    assert response.status_code == 200
    told = events(response.text)
    assert any(isinstance(one, str) and one.startswith(":") for one in told)
    assert told[-1] == "data: [DONE]"


def _away(of: House) -> None:
    of.head.away = True


def _cannot_write(of: House) -> None:
    of.head.says["perform"] = LedgerFailed("The disk is full.")


def _never_answers(of: House) -> None:
    async def silence(_call: OperationRequest) -> None:
        await asyncio.Event().wait()

    of.head.says["perform"] = silence


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        pytest.param(_away, "cannot be reached", id="no Coordinator"),
        pytest.param(_cannot_write, "disk is full", id="it cannot write"),
        pytest.param(_never_answers, "did not answer within", id="it is silent"),
    ],
)
def test_requests_that_could_not_wake_their_model_are_told_why_and_when_to_come_back(
    trouble: Callable[[House], None], said: str
) -> None:
    of = napping()
    of.service.waking._limit_s = 0.1

    async def main() -> None:
        await of("GET", "/v1/models")  # it hears what sleeps
        trouble(of)
        of.cluster.reachable = of.cluster.reachable and not of.head.away
        found = await asyncio.gather(*(of("POST", CHAT, json=chat()) for _ in range(4)))
        for response in found:
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            error = response.json()["error"]
            assert error["code"] == "model_asleep"
            assert said in error["message"]

    run_loop(main())
    assert len(of.head.calls) <= 1
    assert of.boards.opened == []


def test_a_request_whose_board_cannot_load_its_model_is_told_why() -> None:
    of = napping("a")
    reason = "its model cannot be loaded: no memory"
    of.boards.scripts = {
        "replica of a": [[*answer("a")[:1], BoardOutOfOrder("a", reason)]],
    }
    opens = of.boards.open

    def open_and_fail(request: Any, replica: str, take: object = None) -> Any:
        of.boards.reported = [report("a", state=BoardState.FAILED, reason=reason)]
        return opens(request, replica)

    of.boards.open = open_and_fail  # type: ignore[method-assign]
    response = send(of, "POST", CHAT, json=chat())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_board")
    assert reason in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1


async def test_a_wake_up_that_failed_is_tried_again_by_those_who_come_later() -> None:
    of = napping()
    wakes = of.head.says["perform"]
    of.head.says["perform"] = LedgerFailed("The disk is full.")
    assert (await of("POST", CHAT, json=chat())).status_code == 503
    of.head.says["perform"] = wakes
    assert (await of("POST", CHAT, json=chat())).status_code == 503
    failed_s, error = of.service.waking._failed[MODEL]
    of.service.waking._failed[MODEL] = (failed_s - wake_on_request.FAILED_S, error)
    assert (await of("POST", CHAT, json=chat())).status_code == 200


def test_a_client_that_leaves_takes_no_other_client_s_wake_up_with_it() -> None:
    of = napping()
    go_on = asyncio.Event()

    async def slow(call: OperationRequest) -> OperationOutcome:
        await go_on.wait()
        return woken(of, call)

    of.head.says["perform"] = slow

    async def main() -> None:
        leaves = asyncio.create_task(of("POST", CHAT, json=chat()))
        await eventually(lambda: of.head.calls)
        stays = asyncio.create_task(of("POST", CHAT, json=chat()))
        await eventually(lambda: of.service.waking._going_on)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        go_on.set()
        assert (await stays).status_code == 200

    run_loop(main())
    assert len(of.head.calls) == 1


def test_a_model_that_no_request_wakes_takes_requests_as_its_sleep_says() -> None:
    keeps = napping("a", desired=slept(wakes=False))
    assert send(keeps, "POST", CHAT, json=chat()).status_code == 200  # the board queues it
    ((_, request),) = keeps.boards.opened
    assert request.patient
    refuses = napping("a", desired=slept(wakes=False, mode=PauseMode.WAIT))
    refuses.boards.scripts = {"replica of a": [[EnginePaused("board a, which sleeps", 9)]]}
    response = send(refuses, "POST", CHAT, json=chat())
    assert (response.status_code, response.headers["retry-after"]) == (503, "9")
    assert response.json()["error"]["code"] == "engine_paused"
    assert keeps.head.calls == refuses.head.calls == []


@pytest.mark.promise("Sleep", "Sleeping boards are skipped while another is awake")
def test_boards_that_sleep_are_passed_over_while_another_one_is_awake() -> None:
    of = napping("a", "b", "c", desired=slept("a", "b"))
    of.boards.reported[2] = report("c", queue_limit=99)
    for _ in range(6):
        assert send(of, "POST", CHAT, json=chat()).status_code == 200
    assert {replica for replica, _ in of.boards.opened} == {"replica of c"}
    assert of.head.calls == []


@pytest.mark.promise("Sleep", "Sleeping boards are skipped while another is awake")
def test_a_board_that_fell_asleep_a_moment_ago_sends_requests_on_to_one_that_is_awake() -> None:
    of = house("a", "b")
    asleep = BoardAsleep("a", "its model is unloaded")
    of.boards.scripts["replica of a"] = [[asleep]]
    for number in range(24):  # of their own each: the same one would go where its KV cache is
        assert send(of, "POST", CHAT, json=chat(f"{number} is my number.")).status_code == 200
    first = [request for replica, request in of.boards.opened if replica == "replica of a"]
    assert first, "none was sent there first"
    assert not any(request.patient for request in first)
    candidate = of.service.fleet.boards[MODEL].get("replica of a")
    assert candidate is not None
    assert candidate.ready  # it is well


@pytest.mark.parametrize("state", [BoardState.LOADING, BoardState.RECOVERING])
def test_while_all_boards_load_a_request_waits_for_the_first_that_it_comes_to(
    state: BoardState,
) -> None:
    of = house("a", "b", "c")
    of.boards.reported = [report(name, state=state) for name in ("a", "b", "c")]
    assert send(of, "POST", CHAT, json=chat()).status_code == 200
    ((_, request),) = of.boards.opened
    assert request.patient


def test_where_no_other_board_is_awake_a_request_waits_for_the_one_that_fell_asleep() -> None:
    of = house("a", "b")
    of.boards.scripts["replica of a"] = [[BoardAsleep("a", "its model is unloaded")]]
    of.boards.scripts["replica of b"] = [[BoardAsleep("b", "its model is unloaded")]]

    async def main() -> None:
        await of.service.fleet.refresh()
        response = await of("POST", CHAT, json=chat())
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "board_asleep"

    run_loop(main())
    (_, first), (_, last) = of.boards.opened[:2]
    assert (first.patient, last.patient) == (False, True)


def test_a_request_that_is_refused_because_its_model_fell_asleep_meanwhile_wakes_it() -> None:
    of = house("a")
    refused = [EnginePaused("board a, which sleeps", 9)]
    of.boards.scripts["replica of a"] = [refused, answer("a", "hello")]
    of.head.says["perform"] = lambda call: woken(of, call)
    answering = of.boards.open

    async def main() -> None:
        await of.service.fleet.refresh()
        await of.cluster.refresh()

        def open_late(request: Any, replica: str, take: object = None) -> Any:
            # It slept when the request was on its way, and this Router hears of it now.
            if not of.head.calls:
                of.head.desired = slept(mode=PauseMode.WAIT)
                of.cluster._take(of.head.desired)
            return answering(request, replica)

        of.boards.open = open_late  # type: ignore[method-assign]
        response = await of("POST", CHAT, json=chat())
        assert response.status_code == 200, response.text

    run_loop(main())
    assert [call.kind for call in of.head.calls] == [K.WAKE]
    assert [request.min_epoch for _, request in of.boards.opened] == [0, 8]


@pytest.mark.parametrize("wakes", [True, False], ids=["requests wake them", "and stay asleep"])
def test_a_router_whose_models_were_put_to_sleep_is_ready(wakes: bool) -> None:
    of = napping(desired=slept(wakes=wakes))
    assert send(of, "GET", "/ready").status_code == 200


def test_the_coordinator_learns_the_id_of_the_request_for_its_log() -> None:
    of = house("a")
    answer = send(of, "POST", "/pause", headers={"x-request-id": "theirs"})
    assert answer.status_code == 200
    (call,) = of.head.calls
    assert re.fullmatch("[0-9a-f]{32}", call.request_id)


@pytest.mark.promise("Pause", "A Coordinator that is frozen does not answer a pause with success")
def test_a_pause_that_a_frozen_coordinator_does_not_answer_is_an_error_after_its_limit() -> None:
    of, thaws, limit_s = house("a"), asyncio.Event(), 3.0

    async def frozen(call: OperationRequest) -> OperationOutcome:
        await thaws.wait()
        return woken(of, call)

    of.head.says["perform"] = frozen

    async def main() -> None:
        began_s = time.monotonic()
        paused = await of("POST", "/pause", json={"timeout_s": limit_s})
        assert (paused.status_code, paused.json()["error"]["code"]) == (504, "operation_timeout")
        assert "/v1/operations" in paused.json()["error"]["message"]
        assert limit_s < time.monotonic() - began_s < limit_s + wake_on_request.LATE_S + 1
        thaws.set()
        await eventually(lambda: not of.cluster._going_on)

    own_time.run_loop(main())
    (call,) = of.head.calls
    assert call.boot
    assert call.sent_s > 0


# -- keys of the cluster --------------------------------------------------------------------------


async def test_a_router_follows_the_keys_and_keeps_them_while_the_coordinator_is_away() -> None:
    head = FakeHead()
    client, keys = CoordinatorClient(head), KeyRing(Keys(), table=None)
    await client.find_keys(keys, 1.0)
    assert keys.revision == 0
    following = asyncio.create_task(client.follow_keys(keys))
    one = ApiKey("key_1", "one", digest_of(b"one").hex(), "", (KeyScope.INFER,))
    head.keys = KeyTable(1, (one,))
    await eventually(lambda: keys.find(b"one") is not None)
    head.away = True
    await asyncio.sleep(0.05)
    assert keys.find(b"one") is not None
    head.keys, head.away = KeyTable(2), False
    await eventually(lambda: keys.find(b"one") is None)
    following.cancel()


async def test_an_older_answer_brings_no_revoked_key_back() -> None:
    head = FakeHead(keys=KeyTable(2))
    client, keys = CoordinatorClient(head), KeyRing(Keys(), table=KeyTable(2))
    one = ApiKey("key_1", "one", digest_of(b"one").hex(), "", (KeyScope.INFER,))
    head.keys = KeyTable(1, (one,))
    await client.refresh_keys(keys)
    assert keys.find(b"one") is None


async def test_uses_of_keys_that_could_not_be_sent_are_sent_later() -> None:
    sent: list[dict[str, float]] = []
    one = ApiKey("key_1", "one", digest_of(b"one").hex(), "", (KeyScope.INFER,))
    table = KeyTable(1, (one,))

    def answer(_router: str, _revision: int, _wait_s: float, used: dict[str, float]) -> KeyTable:
        sent.append(used)
        return table

    head = FakeHead(says={"api_keys": answer}, away=True)
    client, keys = CoordinatorClient(head), KeyRing(Keys(), table=table, now_s=lambda: 5.0)
    keys.find(b"one")
    with pytest.raises(CoordinatorAway):
        await client.refresh_keys(keys)
    head.away = False
    await client.refresh_keys(keys)
    await client.refresh_keys(keys)
    assert sent == [{"key_1": 5.0}, {}]


@pytest.mark.virtual_time
async def test_a_router_that_does_not_hear_of_the_keys_gives_up_waiting() -> None:
    keys, now_s = KeyRing(Keys(), table=None), asyncio.get_running_loop().time
    began_s = now_s()
    await CoordinatorClient(FakeHead(away=True)).find_keys(keys, 30.0)
    assert keys.revision == -1
    assert 30.0 <= now_s() - began_s < 60.0
