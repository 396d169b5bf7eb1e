"""HTTP through a real cluster: every refusal is the error object; the other APIs, and the pages."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseInputParam

from tests.support.cluster.local_cluster import NO_TLS, App, wait_for
from tests.support.http.talk import CHAT, ENDLESS, MODEL, chat_body, streaming
from tests.support.paths import PROJECT

pytestmark = pytest.mark.ray

COMPLETIONS = "/v1/completions"
MEGABYTE = b"x" * 1_000_000


def chat(**changes: Any) -> bytes:
    """A chat's body with changes; a value of None takes the key out."""
    body = {**chat_body("Hello"), **changes}
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode()


@pytest.fixture(scope="module")
def http(boards: App) -> Iterator[httpx.Client]:
    """A client that hides nothing."""
    with boards.http_sync() as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response that holds OpenAI's error object and nothing else."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"], body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        pytest.param(CHAT, b"", (400, None, None), id="no body"),
        pytest.param(CHAT, b'{"model": ', (400, None, None), id="bad JSON"),
        pytest.param(CHAT, b"\xff\xfe{}", (400, None, None), id="not UTF-8"),
        pytest.param(CHAT, b"[]", (400, None, None), id="an array"),
        pytest.param(CHAT, b'"text"', (400, None, None), id="a string"),
        pytest.param(CHAT, b"[" * 10_000 + b"]" * 10_000, (400, None, None), id="deep arrays"),
        pytest.param(
            CHAT, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, (400, None, None), id="deep objects"
        ),
        pytest.param(CHAT, chat(model=None), (400, "model", None), id="no model"),
        pytest.param(CHAT, chat(model=7), (400, "model", None), id="a number for the model"),
        pytest.param(
            CHAT, chat(model="gpt-4"), (404, "model", "model_not_found"), id="unknown model"
        ),
        pytest.param(CHAT, chat(messages=None), (400, "messages", None), id="no messages"),
        pytest.param(CHAT, chat(messages="hi"), (400, "messages", None), id="a text for messages"),
        pytest.param(CHAT, chat(messages=[{}]), (400, "messages[0].role", None), id="no role"),
        pytest.param(
            CHAT, chat(max_tokens="5"), (400, "max_tokens", None), id="a text for a number"
        ),
        pytest.param(CHAT, chat(max_tokens=0), (400, "max_tokens", None), id="no tokens"),
        pytest.param(CHAT, chat(temperature=3), (400, "temperature", None), id="too hot"),
        pytest.param(CHAT, chat(n=1000), (400, "n", None), id="too many choices"),
        pytest.param(
            CHAT,
            chat(bad_words=["x"]),
            (400, "bad_words", "unsupported_parameter"),
            id="what is not offered",
        ),
        pytest.param(
            CHAT,
            chat(messages=[{"role": "user", "content": "word " * 5000}]),
            (400, "messages", "context_length_exceeded"),
            id="a prompt beyond the context",
        ),
        pytest.param(
            COMPLETIONS,
            json.dumps({"model": MODEL, "prompt": [1] * 5000}).encode(),
            (400, "prompt", "context_length_exceeded"),
            id="ids beyond the context",
        ),
        pytest.param(
            COMPLETIONS,
            json.dumps({"model": MODEL, "prompt": [10**9]}).encode(),
            (400, "prompt[0]", None),
            id="an id that is no token",
        ),
        pytest.param(COMPLETIONS, b'{"model":"sim-chat"}', (400, "prompt", None), id="no prompt"),
    ],
)
def test_a_bad_request_is_refused_with_what_is_wrong(
    http: httpx.Client, path: str, body: bytes, expected: tuple[int, str | None, str | None]
) -> None:
    """``expected`` is the status, and the error's ``param`` and ``code``."""
    response = http.post(path, content=body)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == expected
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("announced", [True, False], ids=["with a length", "in chunks"])
def test_a_body_of_100_megabytes_is_refused(http: httpx.Client, announced: bool) -> None:
    content = MEGABYTE * 100 if announced else (MEGABYTE for _ in range(100))
    response = http.post(CHAT, content=content)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        pytest.param("GET", "/v1/nothing", 404, "not_found", id="an unknown path"),
        pytest.param("POST", "/", 405, "method_not_allowed", id="POST to the page"),
        pytest.param("POST", f"{CHAT}/", 404, "not_found", id="a slash too many"),
        pytest.param("GET", "/v1/models/gpt-4", 404, "model_not_found", id="an unknown model"),
        pytest.param("GET", CHAT, 405, "method_not_allowed", id="GET where POST is due"),
        pytest.param("DELETE", "/v1/models", 405, "method_not_allowed", id="DELETE"),
    ],
)
def test_what_is_not_there_says_so(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    response = http.request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (status, code)


def test_the_openai_client_raises_its_own_classes(boards: App) -> None:
    with openai.OpenAI(base_url=f"{boards.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=9
            )
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(
                model="gpt-4", messages=[{"role": "user", "content": "hi"}]
            )


def test_a_full_queue_is_a_429_that_says_when_to_come_back(old_board: App) -> None:
    """The board runs one request and one waits at the Router; the third is turned away."""

    async def crowd() -> tuple[httpx.Response, httpx.Response]:
        async with old_board.http() as http:
            async with streaming(http, ENDLESS):
                waits = asyncio.create_task(http.post(CHAT, json=chat_body("Hello")))
                await asyncio.to_thread(wait_for, "one waits", lambda: old_board.waiting() == 1)
                full = await http.post(CHAT, json=chat_body("Hello"))
                assert not waits.done()
            return full, await waits

    full, later = asyncio.run(crowd())
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    error = error_of(full)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert later.status_code == 200


def test_health_and_readiness_and_metrics_answer(http: httpx.Client) -> None:
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/ready").json() == {"status": "ready"}
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'rkserve_board_state{board="sim-0",model="sim-chat",state="ready"} 1' in metrics.text
    assert (
        'rkserve_requests_total{route="/v1/chat/completions",status="400",router="' in metrics.text
    )
    assert 'route="unknown",status="404"' in metrics.text


# -- what else than OpenAI's API a cluster serves: Anthropic's, Ollama's, and the chat page --


SAYS = "Repeat after me: crème 你好 👋🏽 and the end"
TURNS = chat_body(SAYS)["messages"]


def ask(boards: App, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{boards.url}{path}", json={"model": MODEL, **body}, timeout=60, verify=NO_TLS
    )


def reports(boards: App) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(
        f"{boards.url}/v1/boards", timeout=60, verify=NO_TLS
    ).json()["data"]
    return found


def test_every_dialect_says_the_same_and_a_board_tells_its_stop_sequence(boards: App) -> None:
    said = ask(boards, "/v1/chat/completions", {"messages": TURNS, "stop": [" the"]}).json()
    text, usage = said["choices"][0]["message"]["content"], said["usage"]
    message = {"messages": TURNS, "max_tokens": 99, "stop_sequences": ["xyz", " the"]}
    told = ask(boards, "/v1/messages", message).json()
    assert told["content"][0]["text"] == text == "crème 你好 👋🏽 and"
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", " the")
    counted = told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]
    assert counted == usage["prompt_tokens"]
    count = ask(boards, "/v1/messages/count_tokens", {"messages": TURNS}).json()
    assert count == {"input_tokens": usage["prompt_tokens"]}
    response = ask(boards, "/v1/responses", {"input": SAYS, "stop": [" the"]}).json()
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["input_tokens"] == usage["prompt_tokens"]
    lines = ask(boards, "/api/chat", {"messages": TURNS, "options": {"stop": " the"}}).text
    *pieces, last = [json.loads(line) for line in lines.splitlines()]
    assert "".join(one["message"]["content"] for one in pieces) == text
    assert (last["done_reason"], last["prompt_eval_count"]) == ("stop", usage["prompt_tokens"])
    assert last["eval_duration"] > 0


def test_the_model_calls_a_tool_in_every_dialect(boards: App) -> None:
    turns = chat_body("What is the weather in Oslo?")["messages"]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"name": "get_weather", "input_schema": schema}
    message = {"messages": turns, "max_tokens": 99, "tools": [tool]}
    told = ask(boards, "/v1/messages", message).json()
    call = told["content"][-1]
    assert (told["stop_reason"], call["name"]) == ("tool_use", "get_weather")
    assert call["input"] == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "It rains."}
    turns += [
        {"role": "assistant", "content": told["content"]},
        {"role": "user", "content": [result]},
    ]
    again = ask(boards, "/v1/messages", {**message, "messages": turns}).json()
    assert again["usage"]["input_tokens"] > 0
    function = {"name": "get_weather", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    lines = ask(boards, "/api/chat", {"messages": turns[:1], "tools": tools}).text
    messages = [json.loads(line)["message"] for line in lines.splitlines()]
    (called,) = [one for message in messages for one in message.get("tool_calls", [])]
    assert called["function"] == {"name": "get_weather", "arguments": {"city": "Oslo"}}


def test_openai_s_client_goes_on_from_a_stored_response(old_board: App) -> None:
    """With one board: of several, another may be chosen that was faster on a busy machine."""
    url = f"{old_board.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=60) as client:
        rules: ResponseInputParam = [
            {"role": "developer", "content": "Follow every rule to the letter. " * 15},
            {"role": "user", "content": f"{SAYS} once"},
        ]
        first = client.responses.create(model=MODEL, input=rules)
        with client.responses.stream(
            model=MODEL, input=f"{SAYS} twice", previous_response_id=first.id
        ) as events:
            second = events.until_done().get_final_response()
        assert first.usage is not None
        assert second.usage is not None
        assert second.output_text == "crème 你好 👋🏽 and the end twice"
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
        assert client.responses.retrieve(second.id).output_text == second.output_text
        listed = [item.id for item in client.responses.input_items.list(second.id, limit=1)]
        assert len(listed) == 4
        assert first.output[0].id in listed
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
        assert caught.value.code == "previous_response_not_found"


def test_errors_of_an_application_with_a_prefix_speak_the_dialect(boards: App) -> None:
    refused = ask(boards, "/v1/messages", {"messages": TURNS})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert refused.json()["type"] == "error"
    unknown = httpx.get(f"{boards.url}/api/nothing", timeout=60, verify=NO_TLS)
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_a_client_that_hangs_up_frees_its_board(boards: App, path: str) -> None:
    body = {**chat_body(ENDLESS), "max_tokens": 4000, "stream": True}
    before = {one["id"]: one["aborted"] for one in reports(boards)}
    with httpx.stream(
        "POST", f"{boards.url}{path}", json=body, timeout=60, verify=NO_TLS
    ) as response:
        board = response.headers["x-rkserve-board"]
        assert next(response.iter_bytes())
    patience_s = time.monotonic() + 60
    while time.monotonic() < patience_s:
        (report,) = (one for one in reports(boards) if one["id"] == board)
        if report["running"] == 0 and report["aborted"] > before[board]:
            return
        time.sleep(0.1)
    pytest.fail(f"{board} goes on")


def test_the_chat_page_and_its_files_are_found_below_a_prefix(boards: App) -> None:
    for path, kind in (("/", "text/html"), ("/page/main.js", "text/javascript")):
        sent = httpx.get(f"{boards.url}{path}", timeout=60, verify=NO_TLS)
        assert (sent.status_code, sent.headers["content-type"].split(";")[0]) == (200, kind)
        assert "script-src 'self'" in sent.headers["content-security-policy"]


PAGE = (PROJECT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
DIALECTS = PAGE.partition("## Other dialects\n")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"```sh\n(.*?)```", DIALECTS, re.S)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples call curl")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: str(text).split()[1][21:])
def test_the_examples_of_the_page_are_answered(boards: App, example: str) -> None:
    here = example.replace("http://127.0.0.1:8000", boards.url)
    assert here != example
    done = subprocess.run(
        ["sh", "-c", here.replace("curl ", "curl -sS --fail-with-body ", 1)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert MODEL in json.loads(done.stdout)["model"]
