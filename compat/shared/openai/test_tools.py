"""Calls of tools, and answers that follow a schema."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from scene import CHAT, TIME, WEATHER, function, user


def test_the_model_calls_a_tool_and_tells_its_result(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": CHAT, "tools": [WEATHER, TIME]}
    turns = user("What is the weather in Oslo?")
    answer = client.chat.completions.create(messages=turns, tool_choice="auto", **asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    turns = [
        *turns,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"},
    ]
    last = client.chat.completions.create(messages=turns, **asked)
    assert last.choices[0].message.content == "The tool answered: 3 degrees"
    assert last.choices[0].finish_reason == "stop"


def test_a_call_can_be_demanded(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT, messages=user("Hello"), tools=[WEATHER], tool_choice="required"
    )
    assert [one.function.name for one in answer.choices[0].message.tool_calls] == ["get_weather"]


def test_a_tool_can_be_named(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT,
        messages=user("What is the weather in Oslo?"),
        tools=[WEATHER, TIME],
        tool_choice={"type": "function", "function": {"name": "get_time"}},
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_time"
    assert set(json.loads(call.function.arguments)) == {"zone"}


def test_calls_can_be_forbidden(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT,
        messages=user("What is the weather in Oslo?"),
        tools=[WEATHER],
        tool_choice="none",
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_come_in_parallel_where_they_may(client: openai.OpenAI, parallel: bool) -> None:
    answer = client.chat.completions.create(
        model=CHAT,
        messages=user("Weather and time in parallel, in Oslo"),
        tools=[WEATHER, TIME],
        parallel_tool_calls=parallel,
    )
    calls = answer.choices[0].message.tool_calls
    assert [one.function.name for one in calls] == ["get_weather", "get_time"][: 1 + parallel]
    assert len({one.id for one in calls}) == len(calls)


def test_calls_are_streamed_in_pieces(client: openai.OpenAI) -> None:
    names: dict[int, str] = {}
    texts: dict[int, str] = {}
    pieces = 0
    for chunk in client.chat.completions.create(
        model=CHAT,
        messages=user("Weather and time in parallel, in Oslo"),
        tools=[WEATHER, TIME],
        stream=True,
    ):
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.function.name:
                names[call.index] = call.function.name
            texts[call.index] = texts.get(call.index, "") + (call.function.arguments or "")
            pieces += 1
        reason = chunk.choices[0].finish_reason
    assert names == {0: "get_weather", 1: "get_time"}
    assert [json.loads(text) for text in texts.values()] == [{"city": "Oslo"}, {"zone": "Oslo"}]
    assert pieces > 2
    assert reason == "tool_calls"


class Forecast(BaseModel):
    """What the sky will do."""

    city: str
    celsius: int
    sky: Literal["sun", "rain", "snow"]
    hours: list[int]


class Person(BaseModel):
    """Somebody, and where they live."""

    name: str
    age: int
    email: str | None
    home: Forecast


def parse(client: openai.OpenAI) -> Any:
    """Where the client's `parse` is; older releases have it in `beta` only."""
    api = client.chat.completions
    return api.parse if hasattr(api, "parse") else client.beta.chat.completions.parse


@pytest.mark.parametrize("kind", [Forecast, Person])
def test_an_answer_is_parsed_to_a_model(client: openai.OpenAI, kind: type[BaseModel]) -> None:
    answer = parse(client)(
        model=CHAT, messages=user("Describe the weather in Oslo"), response_format=kind
    )
    assert isinstance(answer.choices[0].message.parsed, kind)
    assert answer.choices[0].finish_reason == "stop"


def test_the_values_come_from_the_prompt_where_they_can(client: openai.OpenAI) -> None:
    answer = parse(client)(
        model=CHAT, messages=user("The weather in Oslo"), response_format=Forecast, temperature=0
    )
    assert answer.choices[0].message.parsed.city == "Oslo"


def test_a_schema_is_streamed(client: openai.OpenAI) -> None:
    api = getattr(client.chat.completions, "stream", None) or client.beta.chat.completions.stream
    with api(model=CHAT, messages=user("Weather in Oslo"), response_format=Forecast) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Forecast)


def test_an_answer_is_a_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT,
        messages=user("Say it in JSON"),
        response_format={"type": "json_object"},
    )
    assert json.loads(answer.choices[0].message.content)["simulated"] is True


def test_a_strict_tool_is_parsed(client: openai.OpenAI) -> None:
    strict = openai.pydantic_function_tool(Forecast, name="get_weather", description="The sky")
    answer = parse(client)(
        model=CHAT, messages=user("What is the weather in Oslo?"), tools=[strict]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Forecast)


def test_nested_arguments_fit_their_schema(client: openai.OpenAI) -> None:
    nested = function("get_weather", "The sky", Person.model_json_schema())
    answer = client.chat.completions.create(
        model=CHAT, messages=user("What is the weather in Oslo?"), tools=[nested]
    )
    (call,) = answer.choices[0].message.tool_calls
    assert Person.model_validate_json(call.function.arguments)
