"""Priorities, deadlines, limits and a full queue, as clients meet them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.api.common import output
from rkserve.config.router import RouterConfig
from rkserve.control.calls import OperationKind
from rkserve.core.board_report import GenerationInfo, GenerationState, RouterGenerations
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import BoardFailed, ConfigError, GenerationNotFound
from rkserve.core.messages import ControlAction, Delta, QueueChange, Timings
from rkserve.http.app import make_app
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    answer,
    eventually,
    finished,
    report,
)
from tests.support.cluster.fake_cluster import Control, FakeCluster, started
from tests.support.http.router_house import CHAT, House, chat, events, send

pytestmark = pytest.mark.virtual_time

MODEL = "sim-chat"
COMPLETIONS = "/v1/completions"


def house(*boards: str, **config: Any) -> House:
    """A Router with boards that answer at once."""
    return House(FakeBoards.answering(*(boards or ("a",))), RouterConfig(**config))


def held(gate: asyncio.Event, *, took_ms: float = 30.0, **config: Any) -> House:
    """One board that waits for the gate after its first token, each time.

    An answer takes so long, as the board says.
    """
    end = replace(finished(2), timings=Timings(0.0, 20.0, 5, took_ms, 2, 100.0))
    script: list[Step] = [accepted("a"), Delta("he", (1,)), gate, Delta("llo", (2,)), end]
    return House(FakeBoards([report("a")], {"replica of a": [script]}), RouterConfig(**config))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return OpenAI's error object."""
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def authorized(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- what is nonsense -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"priority": 11}, "priority", id="less urgent than anything"),
        pytest.param({"priority": -11}, "priority", id="too urgent"),
        pytest.param({"priority": 10**400}, "priority", id="a huge number"),
        pytest.param({"priority": 1.5}, "priority", id="half a priority"),
        pytest.param({"priority": "high"}, "priority", id="a word"),
        pytest.param({"priority": True}, "priority", id="a boolean"),
        pytest.param({"timeout": 0}, "timeout", id="no time at all"),
        pytest.param({"timeout": -1}, "timeout", id="less than that"),
        pytest.param({"timeout": 3601}, "timeout", id="longer than an hour"),
        pytest.param({"timeout": "soon"}, "timeout", id="a word for a time"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    of = house()
    prompt = chat() if path == CHAT else {"model": MODEL, "prompt": "Hello"}
    response = send(of, "POST", path, json={**prompt, **body})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(error["message"]) < 300
    assert of.boards.opened == []


@pytest.mark.parametrize("value", ["", "soon", "nan", "inf", "-inf", "0", "-3", "3600.1", "1e999"])
def test_a_timeout_header_that_makes_no_sense_is_refused(value: str) -> None:
    of = house()
    response = send(of, "POST", CHAT, json=chat(), headers={"x-request-timeout": value})
    assert response.status_code == 400
    assert error_of(response)["param"] == "x-request-timeout"
    assert of.boards.opened == []


@pytest.mark.parametrize("priority", [-10, 0, 10, None])
def test_priorities_within_bounds_are_taken(priority: int | None) -> None:
    response = send(house(), "POST", CHAT, json=chat(priority=priority, timeout=3600))
    assert response.status_code == 200


def test_the_bounds_of_priorities_are_the_operator_s() -> None:
    of = house(priority_min=-2, priority_max=0)
    assert send(of, "POST", CHAT, json=chat(priority=-2)).status_code == 200
    refused = send(of, "POST", CHAT, json=chat(priority=1))
    assert "from -2 to 0" in error_of(refused)["message"]


# -- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "config"),
    [
        pytest.param({"timeout": 5}, {}, {}, id="by the body"),
        pytest.param({}, {"x-request-timeout": "5"}, {}, id="by the header"),
        pytest.param({"timeout": 60}, {"x-request-timeout": "5.0"}, {}, id="the shorter one"),
        pytest.param({}, {}, {"request_timeout_s": 5.0}, id="by the configuration"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_late_is_stopped_and_its_board_is_free(
    body: dict[str, Any], headers: dict[str, str], config: dict[str, Any], stream: bool
) -> None:
    of = held(asyncio.Event(), **config)
    began_s = asyncio.get_running_loop().time()
    response = await of("POST", CHAT, json=chat(stream=stream, **body), headers=headers)
    took_s = asyncio.get_running_loop().time() - began_s
    assert took_s == pytest.approx(5.0, abs=0.5)
    if stream:
        assert response.status_code == 200
        *_, error, done = events(response.text)
        assert (error["error"]["code"], done) == ("deadline_exceeded", "data: [DONE]")
    else:
        assert response.status_code == 504
        assert error_of(response)["code"] == "deadline_exceeded"
    of.expect_nothing_left()
    assert of.metric("rkserve_goodput_tokens_total", model=MODEL) == 0


async def test_what_would_be_late_is_not_begun() -> None:
    gate = asyncio.Event()
    of = held(gate, took_ms=4000.0, queue_limit=9)
    for _ in range(12):  # until it is known what an answer takes
        gate.clear()
        talk = asyncio.create_task(of("POST", CHAT, json=chat()))
        await eventually(lambda: of.boards.running == 1)
        await asyncio.sleep(4.0)
        gate.set()
        assert (await talk).status_code == 200
    gate.clear()
    running = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running == 1)
    opened = len(of.boards.opened)
    late = await of("POST", CHAT, json=chat(timeout=6))
    assert late.status_code == 503
    assert error_of(late)["code"] == "deadline_unreachable"
    assert int(late.headers["retry-after"]) >= 1
    hopeless = await of("POST", CHAT, json=chat(timeout=0.5))
    assert hopeless.status_code == 503
    assert "retry-after" not in hopeless.headers
    assert len(of.boards.opened) == opened
    reason = {"model": MODEL, "reason": "deadline_unreachable"}
    assert of.metric("rkserve_turned_away_total", **reason) == 2
    gate.set()
    assert (await running).status_code == 200
    of.expect_nothing_left()


# -- the queue ------------------------------------------------------------------------------------


async def test_a_full_queue_says_when_to_come_back() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=1)
    talks = [asyncio.create_task(of("POST", CHAT, json=chat())) for _ in range(2)]
    await eventually(lambda: of.boards.running == 1)
    await asyncio.sleep(1.0)
    full = await of("POST", CHAT, json=chat())
    assert full.status_code == 429
    error = error_of(full)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(full.headers["retry-after"]) >= 1
    depth = {"model": MODEL, "priority": "0"}
    assert of.metric("rkserve_queue_depth", **depth) == 1
    gate.set()
    assert {(await talk).status_code for talk in talks} == {200}
    assert of.metric("rkserve_queue_depth", **depth) == 0
    assert of.metric("rkserve_queue_wait_seconds_count", model=MODEL) == 2
    assert of.metric("rkserve_goodput_tokens_total", model=MODEL) == 4
    of.expect_nothing_left()


async def test_a_client_that_hangs_up_in_the_queue_leaves_no_trace() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9)
    running, waiting = (asyncio.create_task(of("POST", CHAT, json=chat())) for _ in range(2))
    await eventually(lambda: of.metric("rkserve_queue_depth", model=MODEL, priority="0") == 1)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert of.metric("rkserve_queue_depth", model=MODEL, priority="0") == 0
    gate.set()
    await running
    assert len(of.boards.opened) == 1
    of.expect_nothing_left()


async def test_an_answer_of_several_choices_begins_with_the_first_and_the_others_wait() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9)
    talk = asyncio.create_task(of("POST", CHAT, json=chat(stream=True, n=3)))
    depth = {"model": MODEL, "priority": "0"}
    await eventually(lambda: of.metric("rkserve_requests_in_flight") == 1)
    assert (of.boards.running, of.metric("rkserve_queue_depth", **depth)) == (1, 2)
    gate.set()
    told = [one for one in events((await talk).text) if isinstance(one, dict)]
    texts = ["", "", ""]
    for one in told:
        for choice in one["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["hello"] * 3
    of.expect_nothing_left()


async def test_what_waits_is_listed_and_cannot_be_controlled_yet() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9)
    talk = asyncio.create_task(of("POST", CHAT, json=chat(stream=True, n=2)))
    await eventually(lambda: of.metric("rkserve_requests_in_flight") == 1)
    name = of.boards.opened[0][1].request_id.partition("/")[0]
    waits = await of("POST", f"/v1/generations/{name}/pause", json={"choice": 1})
    assert waits.status_code == 409
    assert error_of(waits)["code"] == "state_conflict"
    assert "queued" in error_of(waits)["message"]
    info = GenerationInfo(f"{name}/0", "a", MODEL, GenerationState.PAUSED, 5, 1, 6)
    of.boards.says[("", "generations")] = [info]
    listed = (await of("GET", "/v1/generations")).json()["data"]
    assert {(one["choice"], one["board"], one["state"]) for one in listed} == {
        (0, "a", "paused"),
        (1, "", "queued"),
    }
    one = (await of("GET", f"/v1/generations/{name}")).json()
    assert [choice["state"] for choice in one["choices"]] == ["paused", "queued"]
    of.boards.says[("", "control")] = [info]
    both = await of("POST", f"/v1/generations/{name}/pause")
    assert both.status_code == 207
    (failed,) = both.json()["failed"]
    assert failed["board"] == "queue"
    gate.set()
    assert (await talk).status_code == 200


async def test_what_waits_for_a_board_is_aborted_by_its_id() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9)
    talk = asyncio.create_task(of("POST", CHAT, json=chat(stream=True, n=2)))
    await eventually(lambda: of.metric("rkserve_requests_in_flight") == 1)
    name = of.boards.opened[0][1].request_id.partition("/")[0]
    of.boards.says[("", "control")] = GenerationNotFound(name)
    aborted = await of("POST", f"/v1/generations/{name}/abort?choice=1")
    assert (aborted.status_code, aborted.json()["status"]) == (200, "aborted")
    assert (aborted.json()["choice"], aborted.json()["board"]) == (1, "")
    again = await of("POST", f"/v1/generations/{name}/abort?choice=1")
    assert (again.status_code, error_of(again)["code"]) == (409, "state_conflict")
    gate.set()
    told = [one for one in events((await talk).text) if isinstance(one, dict)]
    ends = {
        choice["index"]: choice["finish_reason"]
        for one in told
        for choice in one["choices"]
        if choice["finish_reason"]
    }
    assert ends == {0: "stop", 1: "abort"}
    assert len(of.boards.opened) == 1
    of.expect_nothing_left()


async def test_an_abort_of_a_request_that_waits_is_an_answer_without_text() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9)
    running, waiting = (asyncio.create_task(of("POST", CHAT, json=chat())) for _ in range(2))
    depth = {"model": MODEL, "priority": "0"}
    await eventually(lambda: of.metric("rkserve_queue_depth", **depth) == 1)
    assert of.service.unassigned.abort(Scope(), None) == 1
    answer = await waiting
    assert answer.status_code == 200
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "")
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert answer.json()["usage"]["prompt_tokens"] > 0
    assert of.metric("rkserve_queue_depth", **depth) == 0
    gate.set()
    assert (await running).json()["choices"][0]["finish_reason"] == "stop"
    of.expect_nothing_left()


@dataclass
class BothRouters:
    """All Routers of an application, as the Coordinator reaches them."""

    houses: list[House]

    async def abort(self, scope: Scope, request_ids: list[str] | None, timeout_s: float) -> int:
        assert timeout_s > 0
        return sum(one.service.unassigned.abort(scope, request_ids) for one in self.houses)


async def test_an_abort_of_everything_reaches_the_queues_of_all_routers(tmp_path: Path) -> None:
    """Eight streams, two Routers, two boards: those that wait must not start afterwards."""
    gate = asyncio.Event()
    houses = [held(gate, queue_limit=9) for _ in range(2)]
    control = Control(tmp_path, FakeCluster.of("a", "b"), routers=BothRouters(houses))
    async with started(control) as it:
        talks = [
            asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
            for of in houses
            for _ in range(4)
        ]
        depth = {"model": MODEL, "priority": "0"}
        await eventually(
            lambda: [of.metric("rkserve_queue_depth", **depth) for of in houses] == [3, 3]
        )
        done = await it.call(OperationKind.ABORT)
        assert done.status == 200
        assert done.operation.results["queue"].details["aborted"] == 6
        assert sorted(done.operation.results) == ["a", "b", "queue"]
        waited = [talks[at] for at in (1, 2, 3, 5, 6, 7)]
        texts = [one.text for one in await asyncio.gather(*waited)]
        assert all('"finish_reason":"abort"' in text for text in texts)
        gate.set()
        await asyncio.gather(*talks)
        assert [len(of.boards.opened) for of in houses] == [1, 1]


class OtherRouters:
    """What they say of generations that no board has."""

    def __init__(self, *says: GenerationInfo, away: bool = False) -> None:
        self._says, self._away = list(says), away

    async def unassigned(self) -> list[GenerationInfo]:
        if self._away:
            raise BoardFailed("other Routers", "no answer")
        return self._says

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        of = [
            one
            for one in await self.unassigned()
            if one.request_id.startswith(f"{generation}/")
            and choice in (None, int(one.request_id.rpartition("/")[2]))
        ]
        done = action is ControlAction.ABORT
        return RouterGenerations(
            tuple(of) if done else (), () if done else tuple(of), known=bool(of)
        )


def elsewhere(peers: OtherRouters) -> House:
    """A Router beside others, with a board that holds nothing."""
    of = house("a")
    of.boards.says[("", "generations")] = []
    of.boards.says[("", "control")] = GenerationNotFound("chatcmpl-x")
    of.app = make_app(of.service, 1000, 1000, of.responses, peers)
    return of


def test_what_waits_at_another_router_is_listed_and_cannot_be_controlled_yet() -> None:
    info = GenerationInfo("chatcmpl-x/2", "", MODEL, GenerationState.QUEUED, 5, 0, 5)
    of = elsewhere(OtherRouters(info))
    for body in ({"choice": 2}, {}):
        refused = send(of, "POST", "/v1/generations/chatcmpl-x/pause", json=body)
        assert (refused.status_code, error_of(refused)["code"]) == (409, "state_conflict")
    (listed,) = send(of, "GET", "/v1/generations").json()["data"]
    assert (listed["choice"], listed["state"]) == (2, "queued")
    one = send(of, "GET", "/v1/generations/chatcmpl-x").json()
    assert (one["choice"], one["state"]) == (2, "queued")
    other = send(of, "POST", "/v1/generations/chatcmpl-x/pause", json={"choice": 1})
    assert (other.status_code, error_of(other)["code"]) == (404, "generation_not_found")
    aborted = send(of, "POST", "/v1/generations/chatcmpl-x/abort")
    assert (aborted.status_code, aborted.json()["status"]) == (200, "aborted")


def test_a_router_that_cannot_ask_the_others_does_not_deny_a_generation() -> None:
    of = elsewhere(OtherRouters(away=True))
    refused = send(of, "POST", "/v1/generations/chatcmpl-x/pause", json={})
    assert (refused.status_code, error_of(refused)["code"]) == (503, "board_failed")
    (failed,) = send(of, "GET", "/v1/generations").json()["failed"]
    assert failed["board"] == "other Routers"


async def test_an_urgent_request_is_answered_before_those_that_wait() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9)
    talks = []
    for turns, priority in ((1, 0), (2, 0), (3, 5), (4, -5)):
        messages = [{"role": "user", "content": "Hello"}] * turns
        body = {"model": MODEL, "messages": messages, "priority": priority}
        talks.append(asyncio.create_task(of("POST", CHAT, json=body)))
        await asyncio.sleep(1.0)
    gate.set()
    await asyncio.gather(*talks)
    lengths = [len(request.prompt_ids) for _, request in of.boards.opened]
    assert [sorted(lengths).index(length) + 1 for length in lengths] == [1, 4, 2, 3]


async def test_a_stream_that_waits_for_long_gets_its_headers_and_pings() -> None:
    gate = asyncio.Event()
    of = held(gate, queue_limit=9, headers_after_s=3.0, ping_s=1.0)
    running = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running == 1)
    late = asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
    whole = asyncio.create_task(of("POST", CHAT, json=chat()))
    await asyncio.sleep(10.0)
    gate.set()
    response = await late
    assert (response.status_code, (await whole).status_code) == (200, 200)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith(output.PING.decode())
    assert 5 <= response.text.count(output.PING.decode()) <= 10
    told = [one for one in events(response.text) if isinstance(one, dict)]
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in told)
    assert text == "hello"
    assert response.text.endswith("data: [DONE]\n\n")
    await running
    of.expect_nothing_left()


async def test_what_goes_wrong_after_such_headers_is_an_event() -> None:
    of = held(asyncio.Event(), queue_limit=9, headers_after_s=1.0, queue_timeout_s=5.0)
    running = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running == 1)
    response = await of("POST", CHAT, json=chat(stream=True))
    assert response.status_code == 200
    *_, error, done = events(response.text)
    assert (error["error"]["code"], done) == ("queue_timeout", "data: [DONE]")
    running.cancel()
    await asyncio.wait({running})
    of.expect_nothing_left()


async def test_a_client_that_hangs_up_after_such_headers_leaves_no_trace() -> None:
    of = held(asyncio.Event(), queue_limit=9, headers_after_s=1.0)
    running = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running == 1)
    late = asyncio.create_task(of("POST", CHAT, json=chat(stream=True)))
    await asyncio.sleep(5.0)
    for task in (late, running):
        task.cancel()
        await asyncio.wait({task})
    assert of.metric("rkserve_queue_depth", model=MODEL, priority="0") == 0
    of.expect_nothing_left()


async def test_requests_wait_in_the_queue_for_the_end_of_a_pause() -> None:
    of = house("a", queue_limit=9)
    of.head.desired = Desired(3, pauses=(ActivePause("op", Scope(), PauseMode.KEEP),))
    of.boards.scripts["replica of a"] = [[accepted("a"), gate := asyncio.Event()]]
    talks = [asyncio.create_task(of("POST", CHAT, json=chat())) for _ in range(3)]
    await asyncio.sleep(5.0)
    assert not any(talk.done() for talk in talks)
    assert len(of.boards.opened) == 1, "one waits at the board, for no longer than the others"
    of.boards.scripts["replica of a"] = [answer("a", "hello")]
    of.head.desired = Desired(4)
    gate.set()
    await of.cluster.refresh()
    await asyncio.gather(*talks)
    assert sorted(talk.result().status_code for talk in talks) == [200, 200, 200]
    of.expect_nothing_left()


# -- keys -----------------------------------------------------------------------------------------


def keyed(tmp_path: Path, *lines: str, **config: Any) -> House:
    """A Router with a file of keys."""
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return house("a", "b", api_keys_file=file, **config)


async def test_requests_of_two_keys_share_no_kv_cache(tmp_path: Path) -> None:
    of = keyed(tmp_path, "tiger", "lion")
    for key in ("tiger", "lion", "tiger"):
        assert (await of("POST", CHAT, json=chat(), headers=authorized(key))).is_success
    one, two, again = (asked.salt for _, asked in of.boards.opened)
    assert one == again
    assert one != two
    of.expect_nothing_left()


@pytest.mark.parametrize(
    ("limits", "calls", "what"),
    [
        pytest.param("requests_per_minute=3", 3, "3 requests per minute", id="requests"),
        pytest.param("tokens_per_minute=20", 1, "20 tokens per minute", id="tokens"),
    ],
)
async def test_a_key_that_has_used_up_its_minute_is_told_when_to_come_back(
    tmp_path: Path, limits: str, calls: int, what: str
) -> None:
    of = keyed(tmp_path, f"tiger  {limits}", "lion name=lions weight=2")
    for _ in range(calls):
        assert (await of("POST", CHAT, json=chat(), headers=authorized("tiger"))).is_success
    refused = await of("POST", CHAT, json=chat(), headers=authorized("tiger"))
    assert refused.status_code == 429
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert what in error["message"]
    assert of.metric("rkserve_rate_limited_total") == 1
    assert (await of("POST", CHAT, json=chat(), headers=authorized("lion"))).is_success
    await asyncio.sleep(int(refused.headers["retry-after"]))
    assert (await of("POST", CHAT, json=chat(), headers=authorized("tiger"))).is_success
    of.expect_nothing_left()


async def test_calls_at_once_are_those_that_wait_and_run_whatever_becomes_of_them(
    tmp_path: Path,
) -> None:
    of = keyed(tmp_path, "tiger concurrent=2")
    sends = authorized("tiger")
    gate = asyncio.Event()
    for board in "ab":
        script = [accepted(board), gate, *answer(board, "x")[1:]]
        of.boards.scripts[f"replica of {board}"] = [script]
    talks = [asyncio.create_task(of("POST", CHAT, json=chat(), headers=sends)) for _ in "12"]
    await eventually(lambda: of.boards.running == 2)
    assert (await of("POST", CHAT, json=chat(), headers=sends)).status_code == 429
    talks[0].cancel()
    await asyncio.wait({talks[0]})
    for _ in range(3):  # what fails counts no longer either
        assert (await of("POST", CHAT, json={}, headers=sends)).status_code == 400
    gate.set()
    assert (await of("POST", CHAT, json=chat(), headers=sends)).status_code == 200
    assert (await talks[1]).status_code == 200


def test_a_key_may_be_kept_from_being_urgent(tmp_path: Path) -> None:
    of = keyed(tmp_path, "tiger min_priority=2", "lion")
    refused = send(of, "POST", CHAT, json=chat(priority=1), headers=authorized("tiger"))
    assert error_of(refused)["param"] == "priority"
    assert send(of, "POST", CHAT, json=chat(priority=2), headers=authorized("tiger")).is_success
    assert send(of, "POST", CHAT, json=chat(priority=-10), headers=authorized("lion")).is_success


def test_a_key_without_a_priority_of_its_own_has_its_most_urgent_one(tmp_path: Path) -> None:
    of = keyed(tmp_path, "tiger min_priority=2")
    assert send(of, "POST", CHAT, json=chat(), headers=authorized("tiger")).is_success


@pytest.mark.parametrize(
    "line",
    [
        "tiger lion",
        "tiger weight",
        "tiger weight=0",
        "tiger weight=nan",
        "tiger weight=-1",
        "tiger requests_per_minute=0",
        "tiger requests_per_minute=1.5",
        "tiger tokens_per_minute=many",
        "tiger concurrent=",
        "tiger min_priority=high",
        "tiger name=",
        "tiger speed=9",
        "tiger weight=1 weight=2",
    ],
)
def test_a_wrong_setting_of_a_key_stops_the_router_and_shows_no_key(
    tmp_path: Path, line: str
) -> None:
    with pytest.raises(ConfigError, match=r"api_keys_file: key number 2") as caught:
        keyed(tmp_path, "first", line)
    assert "tiger" not in str(caught.value)
    assert "lion" not in str(caught.value)


def test_two_keys_of_one_name_stop_the_router(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several keys are called team"):
        keyed(tmp_path, "one name=team", "two name=team")


# -- board time -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "config", "passes"),
    [
        pytest.param("", {"board_seconds_per_minute": 60}, False, id="of all"),
        pytest.param("board_seconds_per_minute=60", {}, False, id="of one"),
        pytest.param(
            "board_seconds_per_minute=600",
            {"board_seconds_per_minute": 60},
            True,
            id="more for one",
        ),
        pytest.param("", {"board_seconds_per_minute": None}, True, id="no limit"),
    ],
)
async def test_board_time_of_a_key_has_a_limit(
    tmp_path: Path, setting: str, config: dict[str, Any], passes: bool
) -> None:
    assert RouterConfig().board_seconds_per_minute == 600
    (tmp_path / "keys").write_text(f"tiger {setting}\nlion", encoding="utf-8")
    gate = asyncio.Event()
    of = held(gate, api_keys_file=tmp_path / "keys", **config)
    of.boards.scripts["replica of a"].append(answer("a", "x"))

    async def call(key: str) -> httpx.Response:
        return await of("POST", CHAT, json=chat(), headers=authorized(key))

    endless = asyncio.create_task(call("tiger"))
    await eventually(lambda: of.boards.running)
    await asyncio.sleep(150)
    gate.set()
    assert (await endless).status_code == 200
    again = await call("tiger")
    assert again.status_code == (200 if passes else 429)
    if not passes:
        assert error_of(again)["code"] == "rate_limit_exceeded"
        assert "60 s of board time" in error_of(again)["message"]
        wait_s = int(again.headers["retry-after"])
        assert 80 < wait_s < 100  # for 90 s too many, of which one comes back each second
        assert (await call("lion")).status_code == 200
        await asyncio.sleep(wait_s)
        assert (await call("tiger")).status_code == 200
    assert of.metric("rkserve_board_seconds_total", model=MODEL) == pytest.approx(150, abs=1)
    of.expect_nothing_left()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_generation_that_has_its_board_for_too_long_is_stopped(stream: bool) -> None:
    of = held(asyncio.Event(), max_board_s=100.0)
    call = asyncio.create_task(of("POST", CHAT, json=chat(stream=stream)))
    await eventually(lambda: of.boards.running)
    await asyncio.sleep(99)
    await of.service.fleet.refresh()
    assert not call.done()
    await asyncio.sleep(2)
    await of.service.fleet.refresh()
    response = await call
    if stream:
        assert response.status_code == 200
        assert events(response.text)[-2]["error"]["code"] == "board_time_exceeded"
    else:
        assert response.status_code == 504
        assert error_of(response)["code"] == "board_time_exceeded"
        assert "max_board_s" in error_of(response)["message"]
    of.expect_nothing_left()


async def test_time_in_the_queue_is_no_board_time() -> None:
    gate = asyncio.Event()
    of = held(gate, max_board_s=100.0, queue_timeout_s=1000)
    first = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running)
    second = asyncio.create_task(of("POST", CHAT, json=chat()))
    await asyncio.sleep(80)
    await of.service.fleet.refresh()
    gate.set()
    assert [(await one).status_code for one in (first, second)] == [200, 200]


async def test_time_in_the_queue_of_a_board_is_no_board_time() -> None:
    turn, gate = asyncio.Event(), asyncio.Event()
    of = held(gate, max_board_s=100.0)
    waits = replace(accepted("a"), queued_ahead=1, waits=True)
    (script,) = of.boards.scripts["replica of a"]
    of.boards.scripts["replica of a"] = [[waits, turn, QueueChange(waits=False), *script[1:]]]
    call = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running)
    await asyncio.sleep(150)  # another Router's request has the board
    await of.service.fleet.refresh()
    assert not call.done()
    turn.set()
    await asyncio.sleep(80)
    await of.service.fleet.refresh()
    gate.set()
    response = await call
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert of.metric("rkserve_board_seconds_total", model=MODEL) == pytest.approx(80, abs=1)
    of.expect_nothing_left()


async def test_an_answer_comes_from_the_board_that_is_free_where_two_routers_chose_the_same() -> (
    None
):
    gate = asyncio.Event()
    of = House(FakeBoards.answering("a", "b"))
    busy = replace(accepted("x"), queued_ahead=1, waits=True)
    # Each board has another Router's request at first, and the second one asked is free then.
    of.boards.scripts = {
        f"replica of {name}": [[busy, gate, *answer(name, "late")], answer(name, "hello")]
        for name in "ab"
    }
    first = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: len(of.boards.opened) == 2)
    asked = [replica for replica, _ in of.boards.opened]
    assert len(set(asked)) == 2
    assert of.boards.closed == asked[:1], "the first board's queue must be left"
    # Both were busy: it waits at the second one, until a report tells that one is free.
    assert not first.done()
    await of.service.fleet.refresh()
    response = await first
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert len(of.boards.opened) == 3
    of.expect_nothing_left()


async def test_the_time_in_the_queue_of_a_board_that_was_left_counts_as_waiting() -> None:
    of = House(FakeBoards([report("a"), report("b", running=1)]))
    busy = replace(accepted("a"), queued_ahead=1, waits=True)
    of.boards.scripts = {
        "replica of a": [[busy, asyncio.Event()]],
        "replica of b": [answer("b", "hello")],
    }
    call = asyncio.create_task(of("POST", CHAT, json=chat()))
    await eventually(lambda: of.boards.running)
    await asyncio.sleep(7)
    of.boards.reported = [report("a", running=1, queued=1), report("b")]
    await of.service.fleet.refresh()
    response = await call
    assert response.json()["choices"][0]["message"]["content"] == "hello"
    assert response.json()["timings"]["queue_ms"] >= 7000
    of.expect_nothing_left()
