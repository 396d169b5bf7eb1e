"""Completions, vectors, models, and what errors become."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from scene import CHAT, EMBED, KEY, V1, WIDTH, user


def test_a_prompt_is_completed(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=CHAT, prompt=["Repeat after me: x", "Repeat after me: y"], n=2, max_tokens=8
    )
    assert [one.text.strip() for one in answer.choices] == ["x", "x", "y", "y"]
    assert [one.index for one in answer.choices] == [0, 1, 2, 3]


def test_completions_are_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model=CHAT, prompt="Count to 4", max_tokens=50, stream=True)
    )
    assert "".join(one.choices[0].text for one in chunks).strip() == "1, 2, 3, 4."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_prompt_is_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=CHAT, prompt="The sea is deep", max_tokens=1, echo=True, logprobs=2, temperature=0
    )
    log = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("The sea is deep")
    assert len(log.tokens) == len(log.token_logprobs) == len(log.text_offset)
    assert log.token_logprobs[0] is None
    assert all(value <= 0 for value in log.token_logprobs[1:])


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_texts_become_vectors(client: openai.OpenAI, form: Any) -> None:
    asked: dict[str, Any] = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model=EMBED, input=["a cat", "a dog"], **asked)
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens > 2
    if form != "base64":
        assert {len(one.embedding) for one in answer.data} == {WIDTH}


def test_vectors_can_be_shorter(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(
        model=EMBED, input="a cat", dimensions=16, encoding_format="float"
    )
    assert len(answer.data[0].embedding) == 16


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert {one.id for one in client.models.list()} >= {CHAT, EMBED, "sim-vision"}
    assert client.models.retrieve(CHAT).owned_by == "rkserve"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=user("Hello"))
    assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        pytest.param({"temperature": 3}, "temperature", id="a value out of range"),
        pytest.param({"n": "two"}, "n", id="a wrong type"),
        pytest.param({"stop": ["a"] * 5}, "stop", id="too many"),
        pytest.param({"modalities": ["audio"]}, "modalities", id="what no board can"),
    ],
)
def test_a_bad_request_names_its_parameter(
    client: openai.OpenAI, wrong: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=CHAT, messages=user("Hello"), **wrong)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=CHAT, messages=user("sea " * 9000))
    assert caught.value.code == "context_length_exceeded"


def test_an_answer_that_takes_too_long_is_a_timeout() -> None:
    with (
        openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=0.05) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.chat.completions.create(model=CHAT, messages=user("Write 3000 tokens"))


def test_a_path_that_is_none_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.files.list()


def test_raw_answers_have_their_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=CHAT, messages=user("Count to 2"))
    assert raw.headers["x-rkserve-board"].startswith("sim-")
    assert raw.parse().choices[0].message.content == "1, 2."
