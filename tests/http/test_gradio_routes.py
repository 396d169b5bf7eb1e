"""Gradio's API and the vendor's ``/rkllm_chat`` at ASGI level, on scripted boards."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rkserve.api import gradio
from rkserve.config.router import RouterConfig
from rkserve.core.errors import EngineDied, QueueFull
from rkserve.core.messages import Delta
from rkserve.http.gradio_routes import (
    MAX_PENDING,
    PENDING_S,
    GradioCalls,
    PendingCall,
)
from tests.support.boards.fake_boards import FakeBoards, answer, eventually
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import House, house, scripted, send

JOIN, DATA = "/gradio_api/queue/join", "/gradio_api/queue/data"
CALL = "/gradio_api/call/chat"
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello", "metadata": None, "options": []}
]


def called(text: str) -> list[tuple[str, Any]]:
    """The named events of a call's stream, without heartbeats."""
    found = []
    for one in text.split("\n\n"):
        if one:
            name, _, data = one.partition("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return [one for one in found if one[0] != "heartbeat"]


async def ask(of: House, path: str, data: list[Any]) -> list[tuple[str, Any]]:
    """Post a call and read its events."""
    posted = await of("POST", path, json={"data": data})
    assert posted.status_code == 200, posted.text
    read = await of("GET", f"{path}/{posted.json()['event_id']}")
    assert read.headers["content-type"].startswith("text/event-stream")
    return called(read.text)


def test_the_configuration_names_each_function_and_a_component_for_each_argument() -> None:
    told = send(house(), "GET", "/config").json()
    assert [one["api_name"] for one in told["dependencies"]] == [
        "chat",
        "get_user_input",
        "get_RKLLM_output",
    ]
    numbers = [one["id"] for one in told["components"]]
    used = [n for one in told["dependencies"] for n in (*one["inputs"], *one["outputs"])]
    assert numbers == used == list(range(1, len(numbers) + 1))
    info = send(house(), "GET", "/gradio_api/info?serialize=False").json()
    assert set(info["named_endpoints"]) == {"/chat", "/get_user_input", "/get_RKLLM_output"}


@pytest.mark.parametrize("path", [CALL, "/call/chat"])
def test_a_call_streams_the_text_so_far_and_then_completes(path: str) -> None:
    of = House(FakeBoards.answering("a", text="Hel|lo"))
    found = run_loop(ask(of, path, ["Hello"]))
    assert found[-1] == ("complete", ["Hello"])
    assert all(name == "generating" and "Hello".startswith(data[0]) for name, data in found[:-1])
    assert len(found) > 1
    of.expect_nothing_left()


def test_arguments_become_the_conversation() -> None:
    of = house()
    pairs = [["Hi", "Good day"], ["And you?", None]]
    run_loop(ask(of, CALL, [{"text": "Hello", "files": []}, pairs, "Be brief.", "sim-chat", 7.0]))
    ((_, request),) = of.boards.opened
    assert request.max_tokens == 7
    body = gradio.chat_body(
        gradio.GradioCall(gradio.CHAT, ("Hello", pairs, "Be brief.", "", 0)), "sim-chat"
    )
    assert [(one["role"], one["content"]) for one in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Good day"),
        ("user", "And you?"),
        ("user", "Hello"),
    ]


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ([], "data[0]"),
        ("Hello", "data"),
        ([5], "data[0]"),
        ([{"text": "Look", "files": [{"path": "x.png"}]}], "data[0]"),
        (["Hello", "none"], "data[1]"),
        (["Hello", [["one"]]], "data[1][0]"),
        (["Hello", [7]], "data[1][0]"),
        (["Hello", [], "", "", -1], "data[4].max_tokens"),
        (["Hello", [], "", "", 1e30], "data[4].max_tokens"),
        (["Hello", [{"role": "user", "content": 5}]], "data[1][0].content"),
        (["Hello", [{"role": "nobody", "content": "x"}]], "messages[0].role"),
        (
            ["Hello", [{"role": "user", "content": [{"file": {"path": "x"}}]}]],
            "data[1][0].content[0]",
        ),
        (["Hello", [], "", "", 0, "more"], "data"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_by_their_place(data: Any, param: str) -> None:
    refused = send(house(), "POST", CALL, json={"data": data})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CALL, '{"data": ["Hello", [{"role": "user", "content": 1e999}]]}', id="call"),
        pytest.param(CALL, '{"data": ["Hello", [], "", "", 1e999]}', id="tokens"),
        pytest.param(
            "/rkllm_chat",
            '{"messages": [{"role": "assistant", "function_call": '
            '{"name": "f", "arguments": {"x": 1e999}}}]}',
            id="arguments",
        ),
    ],
)
def test_numbers_beyond_all_are_the_requests_mistake(path: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    assert send(house(), "POST", path, content=body.encode(), headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/gradio_api/call/nothing", 404),
        ("GET", f"{CALL}/unknown", 404),
        ("GET", DATA, 400),
        ("POST", JOIN, 400),
        ("POST", "/gradio_api/cancel", 400),
    ],
)
def test_what_is_not_there_is_an_error_object(method: str, path: str, status: int) -> None:
    kwargs = {"json": {"data": ["x"]}} if method == "POST" else {}
    refused = send(house(), method, path, **kwargs)
    assert (refused.status_code, set(refused.json())) == (status, {"error"})


def test_the_vendors_client_takes_two_calls_for_a_turn() -> None:
    of = House(FakeBoards.answering("a", text="Good| day"))

    async def turn() -> tuple[Any, Any]:
        taken = await ask(of, "/gradio_api/call/get_user_input", ["Hello", []])
        history = taken[-1][1][1]
        return taken[-1], (await ask(of, "/gradio_api/call/get_RKLLM_output", [history]))[-1]

    taken, answered = run_loop(turn())
    assert taken == ("complete", ["", [{"role": "user", "content": "Hello"}]])
    assert answered[1] == [
        [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    ]


def joined(number: int, data: list[Any], session: str = "s") -> dict[str, Any]:
    """The body of a call of a session."""
    return {"fn_index": number, "data": data, "session_hash": session}


class Reader:
    """A client that reads a session's stream while it posts calls."""

    def __init__(self, of: House) -> None:
        self.of = of
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def start(self, session: str = "s") -> None:
        """Open the stream."""
        self.task = asyncio.get_running_loop().create_task(self._read(session))

    async def _read(self, session: str) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": DATA,
            "raw_path": DATA.encode(),
            "query_string": f"session_hash={session}".encode(),
            "headers": [(b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }

        async def receive() -> dict[str, Any]:
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def keep(message: Any) -> None:
            for one in message.get("body", b"").decode().split("\n\n"):
                if one.startswith("data: "):
                    self.messages.append(json.loads(one.removeprefix("data: ")))

        await self.of.app(scope, receive, keep)

    def of_event(self, event_id: str) -> list[dict[str, Any]]:
        """The messages of one call."""
        return [one for one in self.messages if one.get("event_id") == event_id]

    def completed(self, event_id: str) -> dict[str, Any] | None:
        """The last message of a call, None before that."""
        ended = [m for m in self.of_event(event_id) if m["msg"] == "process_completed"]
        return ended[0] if ended else None

    async def leave(self) -> None:
        """Hang up."""
        self.gone.set()
        assert self.task is not None
        await self.task


async def post(of: House, *args: Any) -> str:
    """Post a call of a session, and return its id."""
    answered = await of("POST", JOIN, json=joined(*args))
    assert answered.status_code == 200, answered.text
    return str(answered.json()["event_id"])


def test_a_session_reads_the_events_of_all_its_calls_from_one_stream() -> None:
    async def play() -> None:
        of = House(FakeBoards.answering("a", "b", text="Hel|lo"))
        reader = Reader(of)
        first = await post(of, 0, ["one"])
        reader.start()
        await eventually(lambda: reader.completed(first))
        second = await post(of, 0, ["two"])
        await eventually(lambda: reader.completed(second))
        for event_id in (first, second):
            messages = reader.of_event(event_id)
            assert messages[0]["msg"] == "process_starts"
            assert messages[-1]["output"]["data"] == ["Hello"]
            text = ""
            for at, message in enumerate(messages[1:-1]):
                (value,) = message["output"]["data"]
                if at == 0:
                    text = value
                else:
                    ((action, path, more),) = value
                    assert (action, path) == ("append", [])
                    text += more
            assert text == "Hello"
        await reader.leave()
        of.expect_nothing_left()

    run_loop(play())


def test_a_history_grows_by_edits_of_its_last_message() -> None:
    async def play() -> None:
        of = House(FakeBoards.answering("a", text="Hel|lo"))
        reader = Reader(of)
        event_id = await post(of, 2, [HISTORY])
        reader.start()
        await eventually(lambda: reader.completed(event_id))
        done = reader.completed(event_id)
        assert done is not None
        assert done["output"]["data"][0][-1] == {"role": "assistant", "content": "Hello"}
        edits = [
            edit
            for message in reader.of_event(event_id)[2:-1]
            for edit in message["output"]["data"][0]
        ]
        assert all(edit[:2] == ["append", [1, "content"]] for edit in edits)
        await reader.leave()

    run_loop(play())


def test_a_failure_completes_the_call_without_success() -> None:
    async def play() -> None:
        of = scripted(EngineDied("a", "SIGSEGV"), max_continuations=0)
        reader = Reader(of)
        event_id = await post(of, 0, ["one"])
        reader.start()
        await eventually(lambda: reader.completed(event_id))
        done = reader.completed(event_id)
        assert done is not None
        assert done["success"] is False
        assert done["output"]["error"]
        await reader.leave()

    run_loop(play())


def endless() -> House:
    """A board whose answer begins, and then waits for ever."""
    begun = answer("a", "Hel")[:2]
    return scripted(*begun, asyncio.Event())


def test_leaving_the_stream_frees_the_board() -> None:
    async def play() -> None:
        of = endless()
        reader = Reader(of)
        event_id = await post(of, 0, ["one"])
        reader.start()
        await eventually(lambda: len(reader.of_event(event_id)) > 1)
        assert of.boards.running == 1
        await reader.leave()
        of.expect_nothing_left()

    run_loop(play())


def test_cancelling_a_call_frees_the_board_and_keeps_the_stream() -> None:
    async def play() -> None:
        of = endless()
        reader = Reader(of)
        event_id = await post(of, 0, ["one"])
        reader.start()
        await eventually(lambda: len(reader.of_event(event_id)) > 1)
        body = {"event_id": event_id, "session_hash": "s", "fn_index": 0}
        cancelled = await of("POST", "/gradio_api/cancel", json=body)
        assert cancelled.json() == {"success": True}
        await eventually(lambda: reader.completed(event_id))
        await eventually(lambda: of.boards.running == 0)
        again = await of("POST", "/gradio_api/reset", json={"event_id": event_id})
        assert again.json() == {"success": False}
        await reader.leave()

    run_loop(play())


class TwoRouters:
    """``Peers`` of Routers in one process."""

    def __init__(self) -> None:
        self.all: list[GradioCalls] = []

    async def share_gradio(self, pending: PendingCall) -> None:
        for one in self.all:
            one.keep(pending)

    async def claim_gradio(self, owner: str, event_id: str, *, cancel: bool) -> bool:
        found = [one.drop(owner, event_id, cancel=cancel) for one in self.all]
        return any(found)


def a_call(event_id: str = "e", owner: str = "o", session: str = "s") -> PendingCall:
    return PendingCall(event_id, owner, gradio.GradioCall(gradio.CHAT, ("Hi",), session), 100)


def test_a_call_that_one_router_took_is_carried_out_by_any_and_only_once() -> None:
    async def play() -> None:
        peers = TwoRouters()
        first, second = GradioCalls(peers), GradioCalls(peers)
        peers.all = [first, second]
        await first.post(a_call())
        assert await second.claim("another", "e") is None
        assert await second.claim("o", "e") == a_call()
        assert await first.claim("o", "e") is None
        assert first.waiting("o", "s") == second.waiting("o", "s") == []

    run_loop(play())


def test_calls_whose_client_never_comes_are_forgotten_and_bounded() -> None:
    now_s = [0.0]
    calls = GradioCalls(clock=lambda: now_s[0])
    for number in range(MAX_PENDING):
        calls.keep(a_call(str(number)))
    with pytest.raises(QueueFull):
        calls.keep(a_call("one more"))
    now_s[0] = PENDING_S + 1
    calls.keep(a_call("one more"))
    assert [one.event_id for one in calls.waiting("o", "s")] == ["one more"]


def test_calls_of_one_key_are_not_anothers(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("key-of-ann\nkey-of-bob\n")

    async def play() -> None:
        of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=file))
        ann = {"authorization": "Bearer key-of-ann"}
        assert (await of("GET", "/config")).status_code == 401
        posted = await of("POST", CALL, json={"data": ["Hello"]}, headers=ann)
        path = f"{CALL}/{posted.json()['event_id']}"
        bob = {"authorization": "Bearer key-of-bob"}
        assert (await of("GET", path, headers=bob)).status_code == 404
        assert called((await of("GET", path, headers=ann)).text)[-1] == ("complete", ["hello"])

    run_loop(play())


# -- the vendor's flask server --------------------------------------------------------------------

TURN: dict[str, Any] = {
    "model": "your_model_deploy_with_RKLLM_Server",
    "messages": [{"role": "user", "content": "Hello"}],
    "enable_thinking": False,
}


def lines(text: str) -> list[Any]:
    """The lines of a stream as the vendor's client reads them."""
    return [json.loads(line) for line in text.splitlines() if line]


def test_rkllm_chat_answers_whole_whatever_the_model_is_called() -> None:
    of = House(FakeBoards.answering("a", text="Hel|lo"))
    told = send(of, "POST", "/rkllm_chat", json=TURN).json()
    assert told["object"] == "rkllm_chat"
    assert told["choices"][-1]["message"] == {"role": "assistant", "content": "Hello"}
    assert told["choices"][-1]["finish_reason"] == "stop"


def test_rkllm_chat_streams_lines_until_one_that_says_stop() -> None:
    of = House(FakeBoards.answering("a", text="Hel|lo"))
    answered = send(of, "POST", "/rkllm_chat", json={**TURN, "stream": True})
    assert answered.headers["content-type"].startswith("text/plain")
    found = lines(answered.text)
    texts = [one["choices"][-1]["delta"]["content"] for one in found]
    assert "".join(texts) == "Hello"
    reasons = [one["choices"][-1]["finish_reason"] for one in found]
    assert reasons == [None] * (len(found) - 1) + ["stop"]


def test_rkllm_chat_keeps_calls_of_tools_in_the_text_and_takes_them_back() -> None:
    wire = '<tool_call>\n{"name": "now", "arguments": {"at": "Oslo"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    for stream in (False, True):
        of = House(FakeBoards.answering("a", text=wire))
        asked = {**TURN, "tools": tools, "stream": stream}
        answered = send(of, "POST", "/rkllm_chat", json=asked)
        if stream:
            pieces = [one["choices"][-1]["delta"]["content"] for one in lines(answered.text)]
            text = "".join(pieces)
        else:
            text = answered.json()["choices"][-1]["message"]["content"]
        before, _, rest = text.partition("<tool_call>")
        call = json.loads(rest.partition("</tool_call>")[0])
        assert (before, call) == ("", {"name": "now", "arguments": {"at": "Oslo"}})
    results = [
        *TURN["messages"],
        {"role": "assistant", "content": "", "function_call": call},
        {"role": "assistant", "content": "", "function_call": call},
        {"role": "tool", "name": "now", "content": "12:00"},
        {"role": "tool", "name": "now", "content": "12:01"},
    ]
    of = house()
    asked = {**TURN, "messages": results, "tools": tools}
    assert send(of, "POST", "/rkllm_chat", json=asked).status_code == 200


def test_rkllm_chat_shows_thoughts_in_the_text() -> None:
    for stream in (False, True):
        of = House(FakeBoards.answering("a", text="<think>\nHm.\n</think>\n\nYes"))
        asked = {**TURN, "enable_thinking": True, "stream": stream}
        answered = send(of, "POST", "/rkllm_chat", json=asked)
        if stream:
            pieces = [one["choices"][-1]["delta"]["content"] for one in lines(answered.text)]
            text = "".join(pieces)
        else:
            text = answered.json()["choices"][-1]["message"]["content"]
        assert text.startswith("<think>\nHm.")
        assert text.endswith("</think>\n\nYes")


def test_a_stream_of_rkllm_chat_that_breaks_ends_with_the_error() -> None:
    of = scripted(*answer("a", "Hel")[:2], EngineDied("a", "SIGSEGV"), max_continuations=0)
    answered = send(of, "POST", "/rkllm_chat", json={**TURN, "stream": True})
    last = lines(answered.text)[-1]
    assert last["error"]["code"]
    assert last["choices"][-1]["finish_reason"] == "abort"


def test_the_vendors_name_for_its_one_model_is_the_default_model() -> None:
    of = house()
    body = {"model": "rkllm", "messages": TURN["messages"]}
    assert send(of, "POST", "/v1/chat/completions", json=body).status_code == 200
    other = {**body, "model": "nothing"}
    assert send(of, "POST", "/v1/chat/completions", json=other).status_code == 404


def test_a_delta_that_takes_text_back_replaces_the_output() -> None:
    of = scripted(*answer("a", "Hello")[:2], Delta("p", (7,), retract=2), answer("a")[-1])
    found = run_loop(ask(of, CALL, ["Hello"]))
    assert found[-1] == ("complete", ["Help"])
