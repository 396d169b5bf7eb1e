"""The routes of Anthropic's and Ollama's APIs at ASGI level, on scripted boards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from rkserve.api.anthropic.answers import anthropic_error
from rkserve.api.common.output import error_object
from rkserve.api.ollama.answers import ollama_error
from rkserve.config.router import RouterConfig
from rkserve.core.errors import BoardFailed, EngineDied, QueueFull
from rkserve.core.messages import Delta
from rkserve.http.dialect_routes import error_of
from rkserve.models.folder import ModelFolder
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    answer,
    eventually,
    finished,
    report,
)
from tests.support.http.router_house import FOLDER, House, house, model, scripted, send

pytestmark = pytest.mark.virtual_time

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CHAT, GENERATE = "/api/chat", "/api/generate"
RESPONSES = "/v1/responses"
EVENTS = (MESSAGES, RESPONSES)  # in whose streams events have names
TURN: dict[str, Any] = {"model": "sim-chat", "messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {**TURN, "max_tokens": 50},
    CHAT: TURN,
    GENERATE: {"model": "sim-chat", "prompt": "Hello"},
    RESPONSES: {"model": "sim-chat", "input": "Hello"},
}
each_route = pytest.mark.parametrize("path", list(BODIES))


def words(path: str, told: Any) -> str:
    """What a whole answer or a line of a stream says."""
    if path == MESSAGES:
        return str(told["content"][0]["text"])
    if path == RESPONSES:
        return str(told["output"][0]["content"][0]["text"])
    return str(told["message"]["content"] if path == CHAT else told["response"])


def streamed(path: str, text: str) -> list[dict[str, Any]]:
    """The events of a stream."""
    if path in EVENTS:
        if path == RESPONSES:
            assert text.endswith("\n\ndata: [DONE]\n\n")
            text = text.removesuffix("data: [DONE]\n\n")
        data = [one.partition("data: ")[2] for one in text.split("\n\n") if one]
        return [json.loads(one) if one else {"type": "ping"} for one in data]
    return [json.loads(line) for line in text.splitlines()]


def piece(path: str, event: dict[str, Any]) -> str:
    """The text that an event of a stream adds."""
    if path == MESSAGES:
        return str(event.get("delta", {}).get("text", ""))
    if path == RESPONSES:
        return str(event.get("delta", ""))
    return "" if "error" in event else words(path, event)


def message_of(body: Any) -> str:
    """The sentence of an error, in whichever dialect."""
    error = body["response"]["error"] if "response" in body else body["error"]
    return str(error if isinstance(error, str) else error["message"])


@each_route
def test_a_whole_answer_says_who_gave_it(path: str) -> None:
    of = House(FakeBoards.answering("a", text="Hel|lo"))
    response = send(of, "POST", path, json={**BODIES[path], "stream": False})
    assert (response.status_code, words(path, response.json())) == (200, "Hello")
    assert response.headers["x-rkserve-board"] == "a"
    of.expect_nothing_left()
    assert of.metric("rkserve_requests_total", route=path, status="200") == 1


@each_route
def test_a_stream_is_the_same_answer_in_pieces(path: str) -> None:
    of = House(FakeBoards.answering("a", text="Hel|lo"))
    response = send(of, "POST", path, json={**BODIES[path], "stream": True})
    kind = "text/event-stream; charset=utf-8" if path in EVENTS else "application/x-ndjson"
    assert response.headers["content-type"] == kind
    assert response.headers["x-rkserve-board"] == "a"
    told = streamed(path, response.text)
    assert "".join(piece(path, event) for event in told) == "Hello"
    ends = {MESSAGES: "message_stop", RESPONSES: "response.completed"}
    assert told[-1].get("type") == ends.get(path)
    assert told[-1].get("done", path in EVENTS)
    of.expect_nothing_left()


LOOK = {"type": "object", "properties": {"at": {"type": "integer"}}}
OFFERED: dict[str, list[dict[str, Any]]] = {
    MESSAGES: [
        {"name": "look", "input_schema": LOOK},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ],
    RESPONSES: [
        {"type": "namespace", "name": "agents", "tools": []},
        {"type": "function", "name": "look", "parameters": LOOK},
        {"type": "web_search"},
    ],
}


@pytest.mark.parametrize(
    ("path", "types"),
    [(MESSAGES, "web_search_20250305, bash_20250124"), (RESPONSES, "namespace, web_search")],
    ids=str,
)
def test_a_header_names_the_types_of_tools_that_were_left_out(path: str, types: str) -> None:
    of, prompts = house(), []
    for stream in (False, True):
        body = {**BODIES[path], "tools": OFFERED[path], "stream": stream}
        response = send(of, "POST", path, json=body)
        assert (response.status_code, response.headers["x-rkserve-tools-ignored"]) == (200, types)
    known = [one for one in OFFERED[path] if one.get("name") == "look"]
    response = send(of, "POST", path, json={**BODIES[path], "tools": known})
    assert "x-rkserve-tools-ignored" not in response.headers
    prompts = [request.prompt_ids for _, request in of.boards.opened]
    assert prompts[0] == prompts[1] == prompts[2]


async def test_a_stream_that_waits_for_a_board_names_them_too() -> None:
    gate = asyncio.Event()
    boards = FakeBoards([report("a")], {"replica of a": [[gate, *answer("a", "x")]]})
    of = House(boards, RouterConfig(headers_after_s=1.0, ping_s=1.0))
    body = {**BODIES[RESPONSES], "tools": OFFERED[RESPONSES], "stream": True}
    asked = asyncio.create_task(of("POST", RESPONSES, json=body))
    await asyncio.sleep(3.0)
    gate.set()
    assert (await asked).headers["x-rkserve-tools-ignored"] == "namespace, web_search"


def test_many_types_of_tools_are_named_in_part() -> None:
    of = house()
    many = [{"type": f"{'t' * 60}{at}", "name": "x"} for at in range(100)]
    response = send(of, "POST", MESSAGES, json={**BODIES[MESSAGES], "tools": many})
    named = response.headers["x-rkserve-tools-ignored"].split(", ")
    assert (len(named), named[-1]) == (9, "...")


def test_a_response_tells_the_sampling_values_in_force() -> None:
    """The values that the client sent, unless its board ignored them, and the model's own."""
    own = model().folder.settings.sampling.values()
    asked = {**BODIES[RESPONSES], "temperature": 0.25, "presence_penalty": 1.5}
    for ignored in ((), ("temperature",)):
        steps: list[Step] = [accepted("a", ignored), Delta("x", (1,)), finished(1)]
        of = House(FakeBoards([report("a")], {"replica of a": [steps]}))
        told = send(of, "POST", RESPONSES, json=asked).json()
        assert told["temperature"] == (own.temperature if ignored else 0.25)
        assert (told["top_p"], told["presence_penalty"]) == (own.top_p, 1.5)


def test_the_prompt_is_that_of_openai_s_route() -> None:
    of = house()
    turns = [{"role": "system", "content": "Be brief."}, *TURN["messages"]]
    body = {**TURN, "messages": turns}
    for path, asked in (
        ("/v1/chat/completions", body),
        (CHAT, {**body, "stream": False}),
        (MESSAGES, {**BODIES[MESSAGES], "system": "Be brief."}),
        (GENERATE, {**BODIES[GENERATE], "system": "Be brief.", "stream": False}),
        (RESPONSES, {**BODIES[RESPONSES], "instructions": "Be brief."}),
    ):
        assert send(of, "POST", path, json=asked).status_code == 200
    assert len({request.prompt_ids for _, request in of.boards.opened}) == 1


def test_message_start_has_the_tokens_of_the_prompt() -> None:
    of = house()
    response = send(of, "POST", MESSAGES, json={**BODIES[MESSAGES], "stream": True})
    start = streamed(MESSAGES, response.text)[0]
    (_, request) = of.boards.opened[0]
    assert start["message"]["usage"]["input_tokens"] == len(request.prompt_ids)
    assert request.request_id == f"{start['message']['id']}/0"
    assert start["message"]["id"].startswith("msg_")


def test_counting_says_what_the_prompt_will_have_and_asks_no_board() -> None:
    of = house()
    counted = send(of, "POST", COUNT, json=TURN).json()
    assert of.boards.opened == []
    send(of, "POST", MESSAGES, json=BODIES[MESSAGES])
    (_, request) = of.boards.opened[0]
    assert counted == {"input_tokens": len(request.prompt_ids)}


def test_tools_are_counted_as_they_are_rendered() -> None:
    of = house()
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    counted = send(of, "POST", COUNT, json={**TURN, "tools": tools}).json()
    send(of, "POST", MESSAGES, json={**BODIES[MESSAGES], "tools": tools})
    (_, request) = of.boards.opened[0]
    assert counted == {"input_tokens": len(request.prompt_ids)}


def test_a_long_conversation_is_counted_like_a_short_one() -> None:
    of = house()
    turn = {"role": "user", "content": "word " * 4000}
    counted = send(of, "POST", COUNT, json={**TURN, "messages": [turn]}).json()
    assert counted["input_tokens"] > 4000


def test_a_model_without_a_tokenizer_cannot_count(tmp_path: Path) -> None:
    known = model().folder
    folder = ModelFolder(id=known.id, path=tmp_path, weights=None, settings=known.settings)
    served = ServedModel.open(folder)
    of = House(FakeBoards.answering("a"), served=served)
    response = send(of, "POST", COUNT, json=TURN)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    # Nor is its file on the Router's machine.
    (tag,) = send(of, "GET", "/api/tags").json()["models"]
    assert (tag["size"], tag["digest"]) == (0, "")


@each_route
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(QueueFull(3, 7), 429, id="full"),
        pytest.param(BoardFailed("a", "gone"), 503, id="no board"),
        pytest.param(ZeroDivisionError("secret"), 500, id="a bug"),
    ],
)
def test_what_fails_before_the_answer_begins_has_its_status_and_its_dialect_s_object(
    path: str, stream: bool, error: Exception, status: int
) -> None:
    of = scripted(error)
    response = send(of, "POST", path, json={**BODIES[path], "stream": stream})
    assert response.status_code == status
    assert response.json().get("type") == ("error" if path == MESSAGES else None)
    assert message_of(response.json())
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in {429, 503})
    of.expect_nothing_left()


@each_route
def test_what_fails_in_mid_stream_ends_it_with_the_dialect_s_error(path: str) -> None:
    of = scripted(accepted("a"), Delta("half", (1,)), EngineDied("a", "SIGSEGV"))
    response = send(of, "POST", path, json={**BODIES[path], "stream": True})
    *before, last = streamed(path, response.text)
    assert "half" in "".join(piece(path, event) for event in before)
    assert "SIGSEGV" in message_of(last)
    codes = {MESSAGES: ("error", "code"), RESPONSES: ("response", "error", "type")}
    found: Any = last
    for key in codes.get(path, ("code",)):
        found = found[key]
    assert found == "board_failed"
    of.expect_nothing_left()


@each_route
@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(b"", 400, id="nothing"),
        pytest.param(b'{"model":', 400, id="cut off"),
        pytest.param(b"[1]", 400, id="an array"),
        pytest.param(b'{"model": "sim-chat", "x": "\\ud800"}', 400, id="half a character"),
        pytest.param(b'{"a":' * 3000 + b"1" + b"}" * 3000, 400, id="deep"),
        pytest.param(b'{"model": "' + b"x" * 300 + b'", "prompt": "x"}', 400, id="a long name"),
        pytest.param(b"x" * 70_000, 413, id="too long"),
    ],
)
def test_hostile_bodies_are_refused_in_the_dialect_s_own_words(
    path: str, content: bytes, status: int
) -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(max_body_bytes=65536))
    response = send(of, "POST", path, content=content)
    assert response.status_code == status
    assert message_of(response.json())
    assert ("type" in response.json()) == (path == MESSAGES)


@each_route
def test_an_unknown_model_is_a_404(path: str) -> None:
    response = send(house(), "POST", path, json={**BODIES[path], "model": "gpt-4"})
    assert response.status_code == 404
    assert "gpt-4" in message_of(response.json())


@pytest.mark.parametrize(
    ("method", "path", "status", "dialect"),
    [
        pytest.param("GET", MESSAGES, 405, "anthropic", id="a wrong method"),
        pytest.param("POST", f"{MESSAGES}/batches", 404, "anthropic", id="batches"),
        pytest.param("POST", "/api/pull", 404, "ollama", id="pull"),
        pytest.param("GET", CHAT, 405, "ollama", id="a wrong method of Ollama's"),
        pytest.param("GET", "/v1/messagesx", 404, "openai", id="another path"),
        pytest.param("GET", "/apix", 404, "openai", id="one more"),
    ],
)
def test_the_framework_s_own_refusals_speak_the_dialect_of_the_path(
    method: str, path: str, status: int, dialect: str
) -> None:
    response = send(house(), method, path)
    assert response.status_code == status
    body = response.json()
    expected = {"anthropic": {"type", "error"}, "ollama": {"error", "param", "code"}}
    assert set(body) == expected.get(dialect, {"error"})


@pytest.mark.parametrize(
    ("root", "path", "made"),
    [
        pytest.param("", "/v1/messages", anthropic_error, id="alone"),
        pytest.param("/sim", "/sim/v1/messages/count_tokens", anthropic_error, id="with a prefix"),
        pytest.param("/sim", "/api/chat", ollama_error, id="a prefix that was cut off"),
        pytest.param("/api", "/api/v1/models", error_object, id="a prefix like a dialect"),
        pytest.param("", "/v1/chat/completions", error_object, id="none of them"),
    ],
)
def test_the_dialect_of_an_error_is_that_of_its_path(root: str, path: str, made: Any) -> None:
    scope = {"type": "http", "path": path, "root_path": root}
    assert error_of(Request(scope)) is made


@each_route
async def test_a_cancelled_request_frees_the_board(path: str) -> None:
    of = scripted(accepted("a"), Delta("x", (1,)), asyncio.Event())
    task = asyncio.create_task(of("POST", path, json={**BODIES[path], "stream": True}))
    await eventually(lambda: of.boards.running)
    task.cancel()
    await asyncio.wait({task})
    await eventually(lambda: not of.boards.running)
    of.expect_nothing_left()
    assert of.metric("rkserve_hang_ups_total") == 1


@each_route
async def test_a_silent_stream_is_kept_open_before_and_after_a_board_took_the_call(
    path: str,
) -> None:
    gate, second = asyncio.Event(), asyncio.Event()
    held: list[Step] = [accepted("a"), second, Delta("y", (1,)), finished(1)]
    boards = FakeBoards([report("a")], {"replica of a": [[gate, *answer("a", "x")], held]})
    config = RouterConfig(queue_limit=9, headers_after_s=3.0, ping_s=1.0)
    of = House(boards, config)
    first = asyncio.create_task(of("POST", path, json={**BODIES[path], "stream": False}))
    await eventually(lambda: of.boards.running == 1)
    late = asyncio.create_task(of("POST", path, json={**BODIES[path], "stream": True}))
    await asyncio.sleep(10.0)
    gate.set()
    await first
    await asyncio.sleep(10.0)
    second.set()
    response = await late
    told = streamed(path, response.text)
    assert "".join(piece(path, event) for event in told) == "y"
    if path in EVENTS:
        assert told[0] == {"type": "ping"}
        assert told.count({"type": "ping"}) >= 10
    else:
        assert sum(not piece(path, line) and not line["done"] for line in told) >= 10
    of.expect_nothing_left()


@each_route
def test_keys_and_their_limits_hold(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret requests_per_minute=1\n", encoding="utf-8")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=keys))
    body = {**BODIES[path], "stream": False}
    assert send(of, "POST", path, json=body).status_code == 401
    assert send(of, "POST", path, json=body, headers={"x-api-key": "other"}).status_code == 401
    assert send(of, "POST", path, json=body, headers={"x-api-key": "secret"}).status_code == 200
    again = send(of, "POST", path, json=body, headers={"authorization": "Bearer secret"})
    assert again.status_code == 429
    assert "retry-after" in again.headers


@pytest.mark.parametrize("path", [COUNT, CHAT], ids=["count", "load"])
def test_what_generates_nothing_counts_as_a_call_too(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret requests_per_minute=1\n", encoding="utf-8")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=keys))
    body = TURN if path == COUNT else {"model": "sim-chat"}
    sent = {"authorization": "Bearer secret"}
    assert send(of, "POST", path, json=body, headers=sent).status_code == 200
    assert send(of, "POST", path, json=body, headers=sent).status_code == 429
    assert of.metric("rkserve_rate_limited_total") == 1


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_lookups_need_a_key_where_there_are_any(path: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n", encoding="utf-8")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=keys))
    assert send(of, "GET", path).status_code == 401
    assert send(of, "GET", path, headers={"authorization": "Bearer secret"}).status_code == 200
    assert send(of, "GET", "/api/version").status_code == 200


def test_ollama_s_clients_find_the_models() -> None:
    of = house()
    tag, adapter = send(of, "GET", "/api/tags").json()["models"]
    assert adapter["name"] == "sim-chat:pirate"
    weights = sum(file.stat().st_size for file in FOLDER.glob("*.rkllm"))
    assert (tag["name"], tag["size"]) == ("sim-chat", weights)
    told = send(of, "POST", "/api/show", json={"model": "sim-chat:latest"}).json()
    assert told["model_info"]["rkllm.context_length"] == 4096
    assert told["capabilities"] == ["completion", "tools", "thinking"]
    assert send(of, "POST", "/api/show", json={"model": "other"}).status_code == 404
    assert send(of, "POST", "/api/show", json={}).json()["param"] == "model"
    for older in ("", 5, "other", None):  # Ollama's own client sends an empty one beside `model`
        both = {"model": "sim-chat", "name": older}
        assert send(of, "POST", "/api/show", json=both).status_code == 200
    assert send(of, "POST", "/api/show", json={"name": "sim-chat"}).status_code == 200
    assert send(of, "POST", "/api/show", json={"name": 5}).json()["param"] == "name"
    (one,) = send(of, "GET", "/api/ps").json()["models"]
    assert one["name"] == "sim-chat"


def test_a_call_without_a_prompt_loads_the_model_and_generates_nothing() -> None:
    of = house()
    told = send(of, "POST", GENERATE, json={"model": "sim-chat:latest"}).json()
    assert (told["response"], told["done"], told["done_reason"]) == ("", True, "load")
    assert send(of, "POST", CHAT, json={"model": "sim-chat"}).json()["message"]["content"] == ""
    assert send(of, "POST", CHAT, json={"model": "other"}).status_code == 404
    assert of.boards.opened == []


BEGUN = "The answer is <|im_end|> 4"
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": BEGUN}]
OPEN_ITEM = {"type": "message", **TURNS[1], "status": "incomplete"}
OPENAI = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(OPENAI, {"messages": TURNS, "continue_final_message": True}, id="vLLM"),
        pytest.param(MESSAGES, {"messages": TURNS, "max_tokens": 50}, id="Anthropic"),
        pytest.param(CHAT, {"messages": TURNS, "stream": False}, id="Ollama"),
        pytest.param(RESPONSES, {"input": [TURNS[0], OPEN_ITEM]}, id="Responses"),
    ],
)
def test_an_answer_is_what_follows_the_text_of_the_assistant(path: str, body: Any) -> None:
    of = house()
    response = send(of, "POST", path, json={"model": "sim-chat", **body})
    assert response.status_code == 200
    told = response.json()
    said = told["choices"][0]["message"]["content"] if path == OPENAI else words(path, told)
    assert said == "hello"
    renderer = model().renderer
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    header = renderer.chat([TURNS[0]]).ids
    ids = of.boards.opened[-1][1].prompt_ids
    # The text is cut at no control token: the typed marker is none.
    assert ids[: len(header)] == header
    assert ids[len(header) :] == renderer.words(BEGUN)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(OPENAI, {"messages": TURNS}, id="chat"),
        pytest.param(RESPONSES, {"input": TURNS}, id="Responses"),
    ],
)
def test_without_a_word_an_answer_is_a_new_turn(path: str, body: Any) -> None:
    of = house()
    assert send(of, "POST", path, json={"model": "sim-chat", **body}).status_code == 200
    assert of.boards.opened[-1][1].prompt_ids == model().renderer.chat(TURNS).ids


def test_a_forced_call_cannot_continue_a_text() -> None:
    tool = {"name": "look", "input_schema": LOOK}
    body = {**BODIES[MESSAGES], "messages": TURNS, "tools": [tool], "tool_choice": {"type": "any"}}
    of = house()
    response = send(of, "POST", MESSAGES, json=body)
    assert (response.status_code, of.boards.opened) == (400, [])
    assert "begins with the call" in message_of(response.json())


def test_tokenizing_and_counting_see_the_same_prompt() -> None:
    of = house()
    body = {"model": "sim-chat", "messages": TURNS, "continue_final_message": True}
    ids = send(of, "POST", "/tokenize", json={**body, "add_generation_prompt": False}).json()
    both = send(of, "POST", "/tokenize", json={**body, "add_generation_prompt": True})
    count = send(of, "POST", COUNT, json={"model": "sim-chat", "messages": TURNS}).json()
    send(of, "POST", OPENAI, json=body)
    assert ids["tokens"] == list(of.boards.opened[-1][1].prompt_ids)
    assert (count["input_tokens"], both.status_code) == (ids["count"], 400)
