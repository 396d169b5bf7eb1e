"""Every refusal through a real cluster: the right status, and always OpenAI's error object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster.local_cluster import App, wait_for
from tests.support.http.talk import CHAT, ENDLESS, MODEL, chat_body, streaming

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
