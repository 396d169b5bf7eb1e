"""The routes of sleep, and requests for what sleeps: who wakes it, and who is told why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.control import sleep as sleep_changes
from rkserve.control.calls import OperationKind, OperationRequest
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    OperationOutcome,
    OperationState,
    ResultStatus,
)
from rkserve.core.block_hashes import CachedPrefixes, pack
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import BoardAsleep, BoardOutOfOrder, EnginePaused, LedgerFailed
from rkserve.router import coordinator_client as wake_on_request
from tests.support.boards.fake_boards import FakeBoards, answer, eventually, report
from tests.support.boards.fakes import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import CHAT, House, chat, events

K = OperationKind
MODEL = "sim-chat"
EVERYWHERE: dict[str, Any] = {"models": [], "boards": []}
ASLEEP = BoardState.ASLEEP


def house(*boards: str, **head: Any) -> House:
    """Boards that answer, and a Coordinator."""
    return House(FakeBoards.answering(*(boards or ("a",))), head=FakeHead(**head))


def send(of: House, method: str, path: str, **rest: Any) -> Any:
    """Make one request."""
    return run_loop(of(method, path, **rest))


def slept(*boards: str, mode: PauseMode = PauseMode.KEEP, wakes: bool = True) -> Desired:
    """What the cluster shall be once its model was put to sleep."""
    scope = Scope((MODEL,), boards)
    return sleep_changes.sleep(
        Desired(6), "op-9", scope, mode, SleepLevel.UNLOADED, now_s=0.0, wakes=wakes
    )


def napping(
    *boards: str,
    desired: Desired | None = None,
    wake: Callable[[OperationRequest], Any] | None = None,
) -> House:
    """Boards whose model is unloaded, and a Coordinator that wakes them."""
    names = boards or ("a", "b")
    of = house(*names, desired=slept() if desired is None else desired)
    slept_well = {"state": ASLEEP, "level": 1, "epoch": 7, "queue_limit": 99}
    of.boards.reported = [report(name, **slept_well) for name in names]
    of.head.says["perform"] = wake or (lambda call: woken(of, call))
    return of


def woken(of: House, call: OperationRequest) -> OperationOutcome:
    """Say, as the Coordinator does, that boards are about to load."""
    assert call.kind is K.WAKE
    assert (call.params, call.who) == ({"models": [MODEL], "requested": True}, "request")
    assert call.background
    of.head.desired, _ = sleep_changes.wake_for_request(of.head.desired, MODEL)
    return of.head.outcome(call, 202, state=OperationState.RUNNING, results={})


# -- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "body", "level", "mode", "more"),
    [
        pytest.param({}, None, 1, "abort", {}, id="vLLM, as it is"),
        pytest.param({"level": "2"}, None, 2, "abort", {}, id="vLLM's query"),
        pytest.param({}, {"level": 0, "mode": "keep"}, 0, "keep", {}, id="a body"),
        pytest.param(
            {"lease_s": "9"},
            {"wake_on_request": True},
            1,
            "abort",
            {"lease_s": 9.0, "wakes": True},
            id="both",
        ),
    ],
)
def test_a_sleep_is_asked_for_in_vllm_s_words(
    query: dict[str, str], body: Any, level: int, mode: str, more: dict[str, Any]
) -> None:
    of = house()
    response = send(of, "POST", "/sleep", params=query, json=body)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    known = {**EVERYWHERE, "level": level, "mode": mode, "lease_s": None, "wakes": False}
    assert (call.kind, call.params) == (K.SLEEP, {**known, **more})
    told = response.json()
    assert (told["status"], told["level"], told["mode"]) == ("sleeping", level, mode)
    assert (told["operation_id"], told["applied"], told["total"]) == ("op-1", True, 1)
    assert told["results"]["a"]["status"] == "sleeping"


@pytest.mark.parametrize("path", ["/wake_up", "/wakeup"])
@pytest.mark.parametrize(
    ("query", "status", "tags"),
    [
        pytest.param({}, "awake", ["weights", "kv_cache"], id="all"),
        pytest.param({"tags": ["weights"]}, "sleeping", ["weights"], id="weights"),
        pytest.param({"tags": ["kv_cache"]}, "awake", ["kv_cache"], id="the rest"),
    ],
)
def test_a_wake_up_is_asked_for_in_every_peer_s_words(
    path: str, query: dict[str, Any], status: str, tags: list[str]
) -> None:
    of = house()
    response = send(of, "POST", path, params=query)
    assert response.status_code == 200, response.text
    (call,) = of.head.calls
    assert (call.kind, call.params) == (K.WAKE, {**EVERYWHERE, "tags": query.get("tags", [])})
    told = response.json()
    assert (told["status"], told["tags"]) == (status, tags)
    assert told["results"]["a"]["status"] == "awake"


@pytest.mark.parametrize(
    ("path", "kind", "params", "status"),
    [
        pytest.param(
            "/v1/models/unload",
            K.SLEEP,
            {"mode": "wait", "level": 1, "lease_s": None, "wakes": None},
            "asleep",
            id="unload",
        ),
        pytest.param("/v1/models/load", K.WAKE, {"tags": []}, "ready", id="load"),
    ],
)
def test_a_model_is_unloaded_and_loaded(path: str, kind: K, params: Any, status: str) -> None:
    of = house()
    told = send(of, "POST", path, json={"model": MODEL})
    (call,) = of.head.calls
    assert (call.kind, call.params) == (kind, {"models": [MODEL], "boards": [], **params})
    assert told.status_code == 200
    assert (told.json()["id"], told.json()["object"]) == (MODEL, "model")
    assert told.json()["status"] == status
    unknown = send(of, "POST", path, json={"model": "none"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert send(of, "POST", path, json={}).status_code == 400
    assert len(of.head.calls) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/sleep", {"status": "falling_asleep"}),
        ("/wake_up", {"status": "waking"}),
        ("/v1/models/load", {"status": "loading"}),
        ("/v1/models/unload", {"status": "unloading"}),
    ],
)
def test_what_goes_on_is_not_called_done(path: str, said: dict[str, str]) -> None:
    of = house()
    response = send(of, "POST", path, json={"model": MODEL, "async": True})
    assert response.status_code == 202
    told = response.json()
    assert {name: told[name] for name in said} == said


def test_a_model_that_some_boards_did_not_load_is_loading() -> None:
    results = {
        "a": BoardOutcome(ResultStatus.OK, 5.0),
        "b": BoardOutcome(ResultStatus.FAILED, 5.0, "board_failed", "It cannot be loaded."),
    }
    of = house("a", "b")
    of.head.says["perform"] = lambda call: of.head.outcome(
        call, 207, state=OperationState.PARTIAL, results=results
    )
    response = send(of, "POST", "/v1/models/load", json={"model": MODEL})
    assert response.status_code == 207
    told = response.json()
    assert (told["status"], told["succeeded"], told["total"]) == ("loading", 1, 2)
    assert told["failed"][0]["board"] == "b"


def test_a_sleep_that_was_undone_is_an_error_that_says_so() -> None:
    of = house()
    error = ControlError(504, "operation_timeout", "Board a did not answer.")
    of.head.says["perform"] = lambda call: of.head.outcome(
        call, 504, state=OperationState.UNDONE, error=error
    )
    response = send(of, "POST", "/sleep")
    assert response.status_code == 504
    told = response.json()
    assert (told["error"]["code"], told["state"]) == ("operation_timeout", "undone")
    assert "status" not in told


def test_what_sleeps_is_listed_everywhere() -> None:
    of = napping("a", "b", desired=slept("a", wakes=False))
    of.boards.reported[1] = report("b", idle_s=12.34)
    found = send(of, "GET", "/is_sleeping").json()
    assert (found["is_sleeping"], found["all"], found["epoch"]) == (True, False, 7)
    assert found["boards"]["a"]["level"] == 1
    assert send(of, "GET", "/is_sleeping", params={"model": "none"}).status_code == 404
    cluster = send(of, "GET", "/v1/cluster").json()
    assert (cluster["total"]["asleep"], cluster["total"]["paused_boards"]) == (1, 1)
    told = {one["id"]: (one["asleep"], one["level"], one["idle_s"]) for one in cluster["boards"]}
    assert told == {"a": (True, 1, 0.0), "b": (False, None, 12.3)}
    (pause,) = cluster["pauses"]
    assert (pause["level"], pause["wake_on_request"]) == (1, False)
    model, _adapter = send(of, "GET", "/v1/models").json()["data"]
    assert model["rkserve"]["state"] == "ready"
    of.head.desired = replace(slept(wakes=False), epoch=8)
    of.boards.reported = [report(name, state=ASLEEP, level=1) for name in ("a", "b")]
    assert send(of, "GET", f"/v1/models/{MODEL}").json()["rkserve"]["state"] == "asleep"
    boards = send(of, "GET", "/v1/boards").json()["data"]
    assert [(one["state"], one["level"]) for one in boards] == [("asleep", 1)] * 2
    assert of.head.calls == []


@pytest.mark.parametrize(
    "path", ["/sleep", "/wake_up", "/wakeup", "/v1/models/load", "/v1/models/unload"]
)
def test_to_change_what_sleeps_needs_the_admin_key(path: str) -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr("s3cret")))
    assert send(of, "POST", path, json={"model": MODEL}).status_code == 403
    assert of.head.asked == []
    good = {"authorization": "Bearer s3cret"}
    assert send(of, "POST", path, json={"model": MODEL}, headers=good).status_code == 200


def test_the_prefixes_of_boards_that_sleep_are_forgotten() -> None:
    of = house("a", "b")
    of.boards.reported = [
        replace(one, holdings=pack(CachedPrefixes(appends=True))) for one in of.boards.reported
    ]
    assert send(of, "POST", CHAT, json=chat()).status_code == 200
    index = of.service.fleet.listing.boards[MODEL].index
    assert index is not None
    assert len(index) == 1
    of.head.desired = slept()
    run_loop(of.cluster.refresh())
    assert len(index) == 0


# -- requests -------------------------------------------------------------------------------------


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

    def open_and_fail(request: Any, replica: str) -> Any:
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


def test_boards_that_sleep_are_passed_over_while_another_one_is_awake() -> None:
    of = napping("a", "b", "c", desired=slept("a", "b"))
    of.boards.reported[2] = report("c", queue_limit=99)
    for _ in range(6):
        assert send(of, "POST", CHAT, json=chat()).status_code == 200
    assert {replica for replica, _ in of.boards.opened} == {"replica of c"}
    assert of.head.calls == []


def test_a_board_that_fell_asleep_a_moment_ago_sends_requests_on_to_one_that_is_awake() -> None:
    of = house("a", "b")
    asleep = BoardAsleep("a", "its model is unloaded")
    of.boards.scripts["replica of a"] = [[asleep]]
    for number in range(24):  # of their own each: the same one would go where its KV cache is
        assert send(of, "POST", CHAT, json=chat(f"{number} is my number.")).status_code == 200
    first = [request for replica, request in of.boards.opened if replica == "replica of a"]
    assert first, "none was sent there first"
    assert not any(request.patient for request in first)
    candidate = of.service.fleet.listing.boards[MODEL].get("replica of a")
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

        def open_late(request: Any, replica: str) -> Any:
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
