"""The Router's routes at ASGI level: answers, refusals and pings, on scripted boards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rkserve.core.board_report import BoardState
from rkserve.core.errors import BoardFailed, EngineDied, QueueFull, SamplingFixed
from rkserve.core.messages import Delta
from rkserve.router.off_loop import INLINE_BODY_BYTES
from tests.support.boards.fake_boards import (
    FakeBoards,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat, events, scripted, send

pytestmark = pytest.mark.virtual_time

# -- answers --------------------------------------------------------------------------------------


async def test_a_whole_answer_carries_text_usage_and_who_gave_it() -> None:
    house = House(FakeBoards.answering("a", text="Hel|lo"))
    response = await house("POST", CHAT, json=chat())
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["usage"]["completion_tokens"] == 2
    assert response.headers["x-rkserve-board"] == "a"
    house.expect_nothing_left()
    assert house.metric("rkserve_ttft_seconds_count", model="sim-chat") == 1
    name = "rkserve_request_decode_tokens_per_second_count"
    assert house.metric(name, model="sim-chat") == 1
    assert house.metric("rkserve_requests_total", route=CHAT, status="200") == 1


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        pytest.param(CHAT, chat(), "chatcmpl-", id="chat"),
        pytest.param("/v1/completions", {"model": "sim-chat", "prompt": "a"}, "cmpl-", id="raw"),
    ],
)
def test_an_id_tells_what_it_is_the_id_of(path: str, body: dict[str, Any], prefix: str) -> None:
    answered = run_loop(House(FakeBoards.answering("a"))("POST", path, json=body)).json()
    assert answered["id"].startswith(prefix)


async def test_a_stream_is_the_same_answer_in_pieces() -> None:
    house = House(FakeBoards.answering("a", text="Hel|lo"))
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    response = await house("POST", CHAT, json=chat(**options))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, usage, done = events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [d.get("content") for d in deltas] == ["", "Hel", "lo", None]
    assert usage["usage"]["completion_tokens"] == 2
    assert done == "data: [DONE]"
    house.expect_nothing_left()
    name = "rkserve_request_decode_tokens_per_second_count"
    assert house.metric(name, model="sim-chat") == 1


async def test_a_silent_board_is_bridged_with_pings() -> None:
    gate = asyncio.Event()
    house = scripted(accepted("a"), gate, Delta("late", (1,)), finished(1), ping_s=0.005)
    request = asyncio.create_task(house("POST", CHAT, json=chat(stream=True)))
    await eventually(lambda: house.boards.running)
    await asyncio.sleep(0.05)
    gate.set()
    found = events((await request).text)
    assert found.count(": ping") >= 2
    assert found.index(": ping") > 0  # after the role: the headers came at once
    assert found[-1] == "data: [DONE]"


async def test_a_long_body_is_read_like_a_short_one() -> None:
    house = House(FakeBoards.answering("a"))
    text = "word " * (INLINE_BODY_BYTES // 4)
    response = await house("POST", CHAT, json=chat(text))
    assert response.status_code == 200
    (_, request) = house.boards.opened[0]
    assert len(request.prompt_ids) > INLINE_BODY_BYTES // 4


async def test_every_choice_has_a_request_of_its_own() -> None:
    house = House(FakeBoards.answering("a", "b", text="x"))
    response = await house("POST", CHAT, json=chat(n=3))
    assert [c["index"] for c in response.json()["choices"]] == [0, 1, 2]
    ids = sorted(request.request_id for _, request in house.boards.opened)
    assert ids == [f"{response.json()['id']}/{k}" for k in range(3)]


# -- refusals and failures ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        pytest.param(QueueFull(3, 7), 429, "queue_full", id="full"),
        pytest.param(BoardFailed("a", "gone"), 503, "no_board", id="no board"),
        pytest.param(SamplingFixed("1.2.3", ("top_p",)), 400, "sampling_fixed", id="sampling"),
        pytest.param(ZeroDivisionError("secret"), 500, "internal_error", id="a bug"),
    ],
)
async def test_what_fails_before_the_answer_begins_has_its_own_status(
    stream: bool, error: Exception, status: int, code: str
) -> None:
    house = scripted(error)
    response = await house("POST", CHAT, json=chat(stream=stream))
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status in {429, 503})
    assert "secret" not in response.text
    house.expect_nothing_left()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(EngineDied("a", "SIGSEGV"), "board_failed", id="the engine died"),
        pytest.param(ZeroDivisionError("secret"), "internal_error", id="a bug"),
    ],
)
async def test_what_fails_in_mid_stream_ends_it_with_an_error_event(
    error: Exception, code: str
) -> None:
    house = scripted(accepted("a"), Delta("half", (1,)), error)
    response = await house("POST", CHAT, json=chat(stream=True))
    assert response.status_code == 200
    *_, last, done = events(response.text)
    assert last["error"]["code"] == code
    assert "half" in response.text
    assert "secret" not in response.text
    assert done == "data: [DONE]"
    house.expect_nothing_left()
    assert house.metric("rkserve_generation_errors_total", code=code) == 1
    assert house.metric("rkserve_hang_ups_total") == 0


async def test_what_fails_before_a_whole_answer_is_complete_is_a_status() -> None:
    house = scripted(accepted("a"), Delta("half", (1,)), EngineDied("a", "SIGSEGV"))
    response = await house("POST", CHAT, json=chat())
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "half" not in response.text
    house.expect_nothing_left()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", "/nothing", 404, id="an unknown path"),
        pytest.param("GET", f"{CHAT}/", 404, id="a trailing slash"),
        pytest.param("GET", "/docs", 404, id="the framework's page about the API"),
        pytest.param("GET", "/redoc", 404, id="its other page about it"),
        pytest.param("GET", CHAT, 405, id="a wrong method"),
        pytest.param("PUT", "/v1/models", 405, id="another wrong method"),
        pytest.param("GET", "/v1/models/some/one's", 404, id="a model id with a slash"),
    ],
)
async def test_the_framework_s_own_refusals_are_openai_s_object(
    method: str, path: str, status: int
) -> None:
    response = await House(FakeBoards.answering("a"))(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_routes_are_counted_by_pattern_and_not_by_what_clients_type() -> None:
    house = House(FakeBoards.answering("a"))
    for path in ("/v1/models/one", "/v1/models/two", "/x", "/y"):
        await house("GET", path)
    pattern = "/v1/models/{model_id:path}"
    assert house.metric("rkserve_requests_total", route=pattern, status="404") == 2
    assert house.metric("rkserve_requests_total", route="unknown", status="404") == 2


async def test_a_bug_of_ours_is_counted_as_the_500_that_it_is() -> None:
    house = scripted(ZeroDivisionError("secret"))
    response = await house("POST", CHAT, json=chat())
    assert (response.status_code, "secret" in response.text) == (500, False)
    assert house.metric("rkserve_requests_total", route=CHAT, status="500") == 1
    house.expect_nothing_left()


# -- lookups --------------------------------------------------------------------------------------


async def test_readiness_follows_the_boards_and_health_does_not() -> None:
    house = House(FakeBoards([]))
    assert (await house("GET", "/health")).status_code == 200
    assert (await house("HEAD", "/health")).status_code == 200
    waiting = await house("GET", "/ready")
    assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "5")
    assert "no board has joined yet" in waiting.json()["error"]["message"]
    house.boards.reported = [report("a", state=BoardState.FAILED, reason="no such library")]
    assert "no such library" in (await house("GET", "/ready")).json()["error"]["message"]
    house.boards.reported = [report("a")]
    assert (await house("GET", "/ready")).json() == {"status": "ready"}


async def test_models_list_their_boards_with_state_and_reason() -> None:
    house = House(FakeBoards([report("b"), report("a", state=BoardState.HUNG, reason="hm")]))
    listed, adapter = (await house("GET", "/v1/models")).json()["data"]
    assert adapter["id"] == "sim-chat:pirate"  # of the model folder
    assert listed == (await house("GET", "/v1/models/sim-chat")).json()
    states = [(b["id"], b["state"], b["reason"]) for b in listed["rkserve"]["boards"]]
    assert states == [("a", "hung", "hm"), ("b", "ready", "")]


async def test_metrics_hold_the_boards_figures() -> None:
    house = House(FakeBoards([report("a", running=1, completion_tokens=70)]))
    text = (await house("GET", "/metrics")).text
    assert 'rkserve_board_running{board="a",model="sim-chat"} 1\n' in text
    assert 'rkserve_completion_tokens_total{board="a",model="sim-chat"} 70\n' in text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        pytest.param("GET", "/", None, id="a page"),
        pytest.param("GET", "/health", None, id="JSON"),
        pytest.param("GET", "/metrics", None, id="text"),
        pytest.param("GET", "/nothing", None, id="no route"),
        pytest.param("POST", "/rkllm_chat", chat(stream=True), id="a model's text"),
        pytest.param("POST", CHAT, chat(stream=True), id="a stream"),
        pytest.param("POST", CHAT, {}, id="a refusal"),
    ],
)
def test_no_browser_takes_an_answer_for_another_type(method: str, path: str, body: Any) -> None:
    answer = send(House(FakeBoards.answering("a")), method, path, json=body)
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]


@pytest.mark.parametrize("path", ["/<script>alert(1)</script>", "/page/<b>", "/%3Cb%3E"])
def test_an_error_has_no_markup_of_the_path(path: str) -> None:
    answer = send(House(FakeBoards.answering("a")), "GET", path)
    assert answer.status_code == 404
    assert "<" not in answer.text
    assert "%3C" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, None),
        ("GET", CHAT, b"", 405, "method_not_allowed"),
        ("POST", f"{CHAT}/", b"{}", 404, "not_found"),
        ("POST", CHAT, b'{"model":"sim-chat"}', 400, None),
    ],
)
def test_generations_beside_the_framework_are_answered_as_in_it(
    method: str, path: str, body: bytes, status: int, code: str | None
) -> None:
    of = House(FakeBoards.answering("a"))
    found = send(of, method, path, content=body, headers={"content-type": "application/json"})
    assert (found.status_code, found.json()["error"]["code"]) == (status, code)


def test_a_defect_in_a_generation_is_a_500_that_the_server_logs() -> None:
    of = House(FakeBoards.answering("a"))

    async def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a defect")

    of.service.open = broken  # type: ignore[method-assign] # a defect
    found = send(of, "POST", CHAT, json=chat())
    assert (found.status_code, found.json()["error"]["code"]) == (500, "internal_error")
    assert of.metric("rkserve_requests_total", route=CHAT, status="500") == 1
