"""Ollama's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from pydantic import BaseModel
from scene import CHAT, EMBED, URL, VISION, WEATHER, WIDTH, png, user


@pytest.fixture
def client() -> Iterator[ollama.Client]:
    """The client."""
    return ollama.Client(host=URL, timeout=60)


def test_a_chat_is_answered(client: ollama.Client) -> None:
    answer = client.chat(CHAT, user("Count to 5"))
    assert answer.message.content == "1, 2, 3, 4, 5."
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.eval_count > 5
    assert answer.eval_duration > 0


def test_a_chat_is_streamed(client: ollama.Client) -> None:
    *pieces, last = client.chat(CHAT, user("Repeat after me: crème 你好 👋🏽"), stream=True)
    assert "".join(one.message.content for one in pieces) == "crème 你好 👋🏽"
    assert last.done


def test_the_async_client_streams() -> None:
    async def said() -> str:
        client = ollama.AsyncClient(host=URL)
        stream = await client.chat(CHAT, user("Count to 3"), stream=True)
        return "".join([one.message.content async for one in stream])

    assert asyncio.run(said()) == "1, 2, 3."


def test_options_are_followed(client: ollama.Client) -> None:
    answer = client.chat(CHAT, user("Write 30 tokens"), options={"num_predict": 6})
    assert (answer.eval_count, answer.done_reason) == (6, "length")
    asked = user("Repeat after me: one two STOP three")
    answer = client.chat(CHAT, asked, options=ollama.Options(stop=["STOP"], temperature=0))
    assert answer.message.content == "one two "


def test_a_prompt_is_answered(client: ollama.Client) -> None:
    answer = client.generate(CHAT, "Who are you?", system="You are Ferris.")
    assert answer.response == "I am Ferris."
    stream = client.generate(CHAT, "Count to 4", stream=True)
    assert "".join(one.response for one in stream) == "1, 2, 3, 4."


def test_a_tool_is_called_and_its_result_is_told(client: ollama.Client) -> None:
    turns: list[Any] = user("What is the weather in Oslo?")
    answer = client.chat(CHAT, turns, tools=[WEATHER])
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    turns += [answer.message, {"role": "tool", "tool_name": "get_weather", "content": "3 degrees"}]
    last = client.chat(CHAT, turns, tools=[WEATHER])
    assert last.message.content == "The tool answered: 3 degrees"


def get_weather(city: str) -> str:
    """Get what the sky does.

    Args:
        city: where
    """
    return f"3 degrees in {city}"


def test_a_function_can_be_a_tool_in_a_stream(client: ollama.Client) -> None:
    stream = client.chat(
        CHAT, user("What is the weather in Oslo?"), tools=[get_weather], stream=True
    )
    calls = [call for one in stream for call in one.message.tool_calls or ()]
    assert [get_weather(**call.function.arguments) for call in calls] == ["3 degrees in Oslo"]


def test_thoughts_come_beside_the_answer(client: ollama.Client) -> None:
    answer = client.chat(CHAT, user("Count to 3"), think=True)
    assert answer.message.thinking.startswith("The user wrote")
    assert answer.message.content == "1, 2, 3."


class Depth(BaseModel):
    """How deep it is."""

    place: str
    metres: int


def test_an_answer_follows_a_schema(client: ollama.Client) -> None:
    answer = client.chat(CHAT, user("The sea near Oslo"), format=Depth.model_json_schema())
    assert Depth.model_validate_json(answer.message.content).place == "Oslo"


def test_images_are_seen(client: ollama.Client) -> None:
    turn = {"role": "user", "content": "Describe", "images": [png(10)]}
    answer = client.chat(VISION, [turn])
    assert answer.message.content.startswith("The picture shows pattern")


def test_texts_become_vectors(client: ollama.Client) -> None:
    answer = client.embed(EMBED, ["a cat", "a dog"])
    assert [len(one) for one in answer.embeddings] == [WIDTH, WIDTH]
    assert len(client.embeddings(EMBED, "a cat").embedding) == WIDTH


def test_the_models_are_listed_and_shown(client: ollama.Client) -> None:
    names = {one.model for one in client.list().models}
    assert {name.partition(":")[0] for name in names} >= {CHAT, EMBED}
    shown = client.show(CHAT)
    assert "tools" in shown.capabilities
    assert client.ps().models


def test_an_unknown_model_is_an_error(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("gpt-4", user("Hello"))
    assert caught.value.status_code == 404


def test_a_bad_value_is_an_error(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(CHAT, user("Hello"), options={"temperature": 9})
    assert caught.value.status_code == 400
