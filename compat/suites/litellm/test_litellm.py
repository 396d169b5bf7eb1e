"""LiteLLM: as any server that speaks as OpenAI's, and by Anthropic's and Ollama's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel
from scene import CHAT, EMBED, KEY, TIME, URL, V1, VISION, WEATHER, WIDTH, data_uri, user

litellm.telemetry = False
ASKED: dict[str, Any] = {"api_base": V1, "api_key": KEY, "num_retries": 0, "timeout": 60}
WAYS = {
    "openai": {"model": f"openai/{CHAT}", **ASKED},
    "hosted_vllm": {"model": f"hosted_vllm/{CHAT}", **ASKED},
    "anthropic": {"model": f"anthropic/{CHAT}", **ASKED, "api_base": URL},
    "ollama": {"model": f"ollama_chat/{CHAT}", **ASKED, "api_base": URL},
}


@pytest.fixture(params=WAYS)
def asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The keys of a call, for one of the ways to rkserve."""
    return WAYS[request.param]


def test_a_chat_is_answered(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=user("Count to 5"), **asked)
    assert answer.choices[0].message.content == "1, 2, 3, 4, 5."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 5


def test_a_chat_is_streamed(asked: dict[str, Any]) -> None:
    text = "crème 你好 👋🏽"
    chunks = list(
        litellm.completion(messages=user(f"Repeat after me: {text}"), stream=True, **asked)
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == text
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == text


def test_the_async_call_streams(asked: dict[str, Any]) -> None:
    async def said() -> str:
        stream = await litellm.acompletion(messages=user("Count to 3"), stream=True, **asked)
        return "".join([one.choices[0].delta.content or "" async for one in stream])

    assert asyncio.run(said()) == "1, 2, 3."


def test_limits_and_stop_strings_are_exact(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=user("Write 30 tokens"), max_tokens=6, **asked)
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "length"
    told = user("Repeat after me: one two STOP three")
    answer = litellm.completion(messages=told, stop=["STOP"], **asked)
    assert answer.choices[0].message.content.strip() == "one two"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_is_told(asked: dict[str, Any], streamed: bool) -> None:
    turns: list[Any] = user("What is the weather in Oslo?")
    tools = [WEATHER, TIME]
    answer = litellm.completion(messages=turns, tools=tools, stream=streamed, **asked)
    if streamed:
        answer = litellm.stream_chunk_builder(list(answer))
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}
    turns += [answer.choices[0].message, {**result, "name": "get_weather"}]
    last = litellm.completion(messages=turns, tools=tools, **asked)
    assert last.choices[0].message.content == "The tool answered: 3 degrees"


class Depth(BaseModel):
    """How deep it is."""

    place: str
    metres: int


def test_an_answer_follows_a_schema(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=user("The sea near Oslo"), response_format=Depth, **asked)
    assert Depth.model_validate_json(answer.choices[0].message.content).place == "Oslo"


def test_an_unknown_model_is_not_found(asked: dict[str, Any]) -> None:
    wrong = {**asked, "model": asked["model"].replace(CHAT, "gpt-5")}
    with pytest.raises((litellm.NotFoundError, litellm.APIConnectionError)) as caught:
        litellm.completion(messages=user("Hello"), **wrong)
    assert "gpt-5" in str(caught.value)


def test_a_response_is_made() -> None:
    answer = litellm.responses(model=f"openai/{CHAT}", input="Count to 3", **ASKED)
    assert answer.output[-1].content[0].text == "1, 2, 3."


def test_texts_become_vectors() -> None:
    answer = litellm.embedding(
        model=f"openai/{EMBED}", input=["a cat", "a dog"], encoding_format="float", **ASKED
    )
    assert [len(one["embedding"]) for one in answer.data] == [WIDTH, WIDTH]


def test_texts_are_ranked() -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{EMBED}",
        query="Where does the cat sit?",
        documents=["Trains leave for Berlin", "The cat sat on the mat"],
        top_n=1,
        api_base=URL,
        api_key=KEY,
    )
    assert answer.results[0]["index"] == 1


def test_a_prompt_is_completed() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{CHAT}", prompt="Count to 3", max_tokens=20, **ASKED
    )
    assert answer.choices[0].text.strip() == "1, 2, 3."


def test_images_are_seen() -> None:
    parts = [
        {"type": "text", "text": "Describe"},
        {"type": "image_url", "image_url": {"url": data_uri(10)}},
    ]
    turn = {"role": "user", "content": parts}
    answer = litellm.completion(model=f"openai/{VISION}", messages=[turn], **ASKED)
    assert answer.choices[0].message.content.startswith("The picture shows pattern")
