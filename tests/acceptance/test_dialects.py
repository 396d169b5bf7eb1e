"""What else than OpenAI's API a cluster serves: Anthropic's, Ollama's, and the chat page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseInputParam

from tests.support.cluster.local_cluster import NO_TLS, App
from tests.support.http.talk import ENDLESS, MODEL, chat_body
from tests.support.paths import PROJECT

pytestmark = pytest.mark.ray

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
    client = openai.OpenAI(base_url=f"{old_board.url}/v1", api_key="x", max_retries=0, timeout=60)
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
