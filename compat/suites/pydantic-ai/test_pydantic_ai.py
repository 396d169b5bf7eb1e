"""pydantic-ai's agents, by chat completions and by the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from scene import CHAT, KEY, V1, VISION, png


def provider() -> OpenAIProvider:
    """How rkserve is reached."""
    return OpenAIProvider(base_url=V1, api_key=KEY)


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest) -> Any:
    """The chat model, by either API."""
    return request.param(CHAT, provider=provider())


class Forecast(BaseModel):
    """What the sky will do."""

    city: str
    celsius: int


def test_an_agent_answers(model: Any) -> None:
    result = Agent(model, system_prompt="You are Ferris.").run_sync("Who are you?")
    assert result.output == "I am Ferris."
    assert result.usage.output_tokens > 2


def test_an_agent_streams(model: Any) -> None:
    async def said() -> list[str]:
        async with Agent(model).run_stream("Count to 9") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(said())
    assert "".join(pieces) == "1, 2, 3, 4, 5, 6, 7, 8, 9."
    assert len(pieces) > 1


def test_a_conversation_goes_on(model: Any) -> None:
    agent = Agent(model)
    first = agent.run_sync("Hello there")
    second = agent.run_sync("What did I say first?", message_history=first.new_messages())
    assert second.output == 'You said first: "Hello there"'


def test_an_agent_calls_its_tools(model: Any) -> None:
    agent, seen = Agent(model), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """What the sky does."""
        seen.append(city)
        return f"3 degrees in {city}"

    assert "3 degrees in Oslo" in agent.run_sync("What is the weather in Oslo?").output
    assert seen == ["Oslo"]


def test_an_agent_calls_its_tools_while_it_streams(model: Any) -> None:
    agent, seen = Agent(model), []

    @agent.tool_plain
    async def get_weather(city: str) -> str:
        """What the sky does."""
        seen.append(city)
        return f"3 degrees in {city}"

    async def said() -> str:
        async with agent.run_stream("What is the weather in Oslo?") as result:
            return await result.get_output()

    assert "3 degrees in Oslo" in asyncio.run(said())
    assert seen == ["Oslo"]


@pytest.mark.parametrize("way", [ToolOutput, NativeOutput, PromptedOutput])
def test_an_output_has_its_type(model: Any, way: Any) -> None:
    result = Agent(model, output_type=way(Forecast)).run_sync("The weather in Oslo")
    assert isinstance(result.output, Forecast)
    assert result.output.city == "Oslo"


def test_an_output_is_streamed_with_its_type(model: Any) -> None:
    async def said() -> Forecast:
        agent = Agent(model, output_type=NativeOutput(Forecast))
        async with agent.run_stream("The weather in Oslo") as result:
            return await result.get_output()

    assert asyncio.run(said()).city == "Oslo"


def test_thoughts_are_parts(model: Any) -> None:
    effort = {"openai_reasoning_effort": "low"}
    result = Agent(model, model_settings=effort).run_sync("Count to 3")
    assert result.output == "1, 2, 3."
    kinds = [part.part_kind for part in result.all_messages()[-1].parts]
    assert kinds == ["thinking", "text"]


def test_images_are_seen() -> None:
    agent = Agent(OpenAIChatModel(VISION, provider=provider()))
    result = agent.run_sync(["Describe", BinaryContent(png(10), media_type="image/png")])
    assert result.output.startswith("The picture shows pattern")


def test_an_unknown_model_is_an_error() -> None:
    agent = Agent(OpenAIChatModel("gpt-4", provider=provider()))
    with pytest.raises(ModelHTTPError) as caught:
        agent.run_sync("Hello")
    assert caught.value.status_code == 404
