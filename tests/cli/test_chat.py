"""``rkserve chat``: streamed answers and conversations."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from typing import Any

import httpx
import pytest

from rkserve.cli.context import Exit
from tests.support.cluster.fake_control import FakeControl, error, ok
from tests.support.http.fake_openai import serving
from tests.support.http.terminal import Terminal

pytestmark = pytest.mark.slow


def stream(*events: dict[str, Any]) -> httpx.Response:
    text = "".join(f": ping\n\ndata: {json.dumps(event)}\n\n" for event in events)
    return httpx.Response(200, text=text + "data: [DONE]\n\n")


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def test_a_question_is_answered_as_it_streams(server: FakeControl, rkserve: Terminal) -> None:
    server.on("GET /v1/models", ok({"data": [{"id": "sim-chat"}]}))
    server.on("POST /v1/chat/completions", stream(piece("Hel"), piece("lo"), piece("", "stop")))
    code, out, _ = rkserve("chat", "Who", "are you?", "--system", "Be brief.", RKSERVE_API_KEY="k")
    assert (code, out) == (Exit.DONE, "Hello\n")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    assert server.json() == {"model": "sim-chat", "messages": said, "stream": True}
    assert server.asked[-1].headers["authorization"] == "Bearer k"
    _, out, _ = rkserve("chat", "Hi", "--model", "m", "--json")
    assert json.loads(out) == {"model": "m", "content": "Hello", "finish_reason": "stop"}


def test_an_answer_that_ends_with_an_error_is_no_success(
    server: FakeControl, rkserve: Terminal
) -> None:
    failed = {"error": {"message": "It was lost.", "code": "board_failed"}}
    server.on("POST /v1/chat/completions", stream(piece("Hel"), failed))
    code, out, err = rkserve("chat", "Hi", "--model", "m")
    assert (code, out) == (Exit.FAILED, "Hel")
    assert "It was lost." in err
    server.on("POST /v1/chat/completions", error(401, "invalid_api_key"))
    assert rkserve("chat", "Hi", "--model", "m")[0] == Exit.FAILED


def test_a_conversation_goes_on_until_exit() -> None:
    leader, follower = pty.openpty()
    with serving() as fake:
        process = subprocess.Popen(
            [sys.executable, "-m", "rkserve", "chat", "--url", fake.url, "--model", "ok"],
            stdin=follower,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.write(leader, b"Hello\nAgain\n/new\nAfresh\n/exit\n")
        out, err = process.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 0, err
    assert "/new begins anew" in err
    turns = [len(asked.messages) for asked in fake.asked]
    assert turns == [1, 3, 1], out
