"""Frames, headers and error objects of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall
from rkserve.api.common.output import answer_headers, broken_stream, error_object
from rkserve.api.openai.answers import ChatAnswer
from rkserve.core.errors import ModelNotFound, QueueFull, RkserveError
from rkserve.core.messages import (
    Accepted,
    Delta,
)

MESSAGES = ({"role": "user", "content": "Hi"},)


STAMP = AnswerOrigin("tiny", "1.3.0")


def chat_answer(**keys: Any) -> ChatAnswer:
    return ChatAnswer(
        ChatCall("tiny", None, messages=MESSAGES, **keys), "chatcmpl-abc", 1700000000, STAMP
    )


def client_of(answer: Callable[[httpx2.Request], httpx2.Response], strict: bool) -> openai.OpenAI:
    return openai.OpenAI(
        api_key="none",
        base_url="http://rkserve.test/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
        _strict_response_validation=strict,
    )


def streaming(raw: bytes) -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda _request: httpx2.Response(200, content=raw, headers=output.HEADERS)


def whole(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return lambda _request: httpx2.Response(status, json=body, headers=headers)


@pytest.fixture(params=[True, False], ids=["strict", "lenient"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(ModelNotFound("x"), openai.NotFoundError, id="unknown model"),
        pytest.param(QueueFull(3, 7), openai.RateLimitError, id="full queue"),
    ],
)
def test_the_client_raises_its_own_errors(
    strict: bool, error: RkserveError, raised: type[openai.APIStatusError]
) -> None:
    status, headers, body = error_object(error)
    with (
        client_of(whole(body, status, headers), strict) as client,
        pytest.raises(raised) as caught,
    ):
        client.models.list()
    assert (caught.value.code, caught.value.param) == (error.code, error.param)
    assert error.message in caught.value.message


def test_the_client_raises_an_error_in_mid_stream(strict: bool) -> None:
    answer = chat_answer(stream=True)
    raw = answer.opening(0) + answer.delta(0, Delta("Hi", (1,))) + broken_stream(QueueFull(3, 7))

    def texts(client: openai.OpenAI) -> Iterator[str]:
        for chunk in client.chat.completions.create(model="tiny", messages=[], stream=True):
            yield chunk.choices[0].delta.content or ""

    with client_of(streaming(raw), strict) as client:
        got = texts(client)
        assert [next(got), next(got)] == ["", "Hi"]
        with pytest.raises(openai.APIError, match="All boards are busy"):
            next(got)


def test_headers_name_boards_releases_and_what_was_ignored_once_each() -> None:
    accepted = [
        Accepted("b1", "1.2.3", 0, ("top_k", "temperature")),
        Accepted("b2", "1.3.0", 0),
        Accepted("b1", "1.2.3", 1, ("top_k", "temperature")),
    ]
    assert answer_headers(accepted, ["tone@v1", "default", "tone@v1"]) == {
        "x-rkserve-board": "b1, b2",
        "x-rkserve-release": "1.2.3, 1.3.0",
        "x-rkserve-queued-ahead": "1",
        "x-rkserve-sampling-ignored": "top_k, temperature",
        "x-rkserve-epoch": "0",
        "x-weight-version": "tone@v1, default",
    }
    assert "x-rkserve-sampling-ignored" not in answer_headers([accepted[1]], ["default"])


def test_a_frame_holds_no_line_break_and_no_nan() -> None:
    assert output.data({"a": "x\ny é"}) == 'data: {"a":"x\\ny é"}\n\n'.encode()
    with pytest.raises(ValueError, match="JSON compliant"):
        output.data({"a": float("nan")})
