"""Anthropic's client."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel
from scene import CHAT, CITY, KEY, URL, VISION, ZONE, png, user

WEATHER: Any = {"name": "get_weather", "description": "What the sky does", "input_schema": CITY}
TIME: Any = {"name": "get_time", "description": "What the clock says", "input_schema": ZONE}


@pytest.fixture(params=[True, False], ids=["strict", "lax"])
def client(request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    """The client."""
    with anthropic.Anthropic(
        base_url=URL,
        api_key=KEY,
        max_retries=0,
        timeout=60,
        _strict_response_validation=request.param,
    ) as made:
        yield made


def test_a_message_is_answered(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=CHAT, max_tokens=99, messages=user("Count to 5"))
    assert answer.content[0].text == "1, 2, 3, 4, 5."
    assert (answer.stop_reason, answer.role, answer.model) == ("end_turn", "assistant", CHAT)
    assert answer.usage.output_tokens > 5


def test_a_message_is_streamed(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model=CHAT, max_tokens=99, messages=user("Repeat after me: crème 你好 👋🏽")
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "crème 你好 👋🏽"
    assert final.stop_reason == "end_turn"


def test_raw_events_come_in_their_order(client: anthropic.Anthropic) -> None:
    events = client.messages.create(
        model=CHAT, max_tokens=99, messages=user("Count to 3"), stream=True
    )
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_the_async_client_streams() -> None:
    async def said() -> str:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
            asked: Any = user("Count to 3")
            async with client.messages.stream(model=CHAT, max_tokens=99, messages=asked) as stream:
                return "".join([text async for text in stream.text_stream])

    assert asyncio.run(said()) == "1, 2, 3."


def test_the_system_prompt_and_the_conversation_are_read(client: anthropic.Anthropic) -> None:
    turns: Any = [*user("Hello there"), {"role": "assistant", "content": "Hi."}]
    asked: Any = {"model": CHAT, "max_tokens": 99, "system": "You are Ferris."}
    answer = client.messages.create(messages=[*turns, *user("Who are you?")], **asked)
    assert answer.content[0].text == "I am Ferris."
    answer = client.messages.create(messages=[*turns, *user("What did I say first?")], **asked)
    assert answer.content[0].text == 'You said first: "Hello there"'


def test_limits_and_stop_sequences_are_told(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=CHAT, max_tokens=6, messages=user("Write 30 tokens"))
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 6)
    answer = client.messages.create(
        model=CHAT,
        max_tokens=99,
        messages=user("Repeat after me: one two STOP three"),
        stop_sequences=["STOP"],
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert answer.content[0].text == "one two "


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_and_its_result_is_told(
    client: anthropic.Anthropic, streamed: bool
) -> None:
    asked: Any = {"model": CHAT, "max_tokens": 99, "tools": [WEATHER, TIME]}
    turns: Any = user("What is the weather in Oslo?")
    if streamed:
        with client.messages.stream(messages=turns, **asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(messages=turns, **asked)
    assert answer.stop_reason == "tool_use"
    call = answer.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3 degrees"}
    turns += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(messages=turns, **asked)
    assert last.content[0].text == "The tool answered: 3 degrees"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        pytest.param({"type": "any"}, "get_weather", id="any"),
        pytest.param({"type": "tool", "name": "get_time"}, "get_time", id="named"),
    ],
)
def test_a_call_can_be_demanded(client: anthropic.Anthropic, choice: Any, name: str) -> None:
    answer = client.messages.create(
        model=CHAT,
        max_tokens=99,
        messages=user("Hello"),
        tools=[WEATHER, TIME],
        tool_choice=choice,
    )
    assert [one.name for one in answer.content if one.type == "tool_use"] == [name]


def test_tools_are_called_in_parallel(client: anthropic.Anthropic) -> None:
    asked: Any = user("Weather and time in parallel, in Oslo")
    answer = client.messages.create(
        model=CHAT, max_tokens=200, messages=asked, tools=[WEATHER, TIME]
    )
    assert [one.name for one in answer.content] == ["get_weather", "get_time"]


def test_thoughts_are_a_block(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=CHAT,
        max_tokens=2000,
        messages=user("Count to 3"),
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [one.type for one in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "1, 2, 3."


class Depth(BaseModel):
    """How deep it is."""

    place: str
    metres: int


def test_an_answer_is_parsed_to_a_model(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(
        model=CHAT, max_tokens=200, messages=user("The sea near Oslo"), output_format=Depth
    )
    assert isinstance(answer.parsed_output, Depth)
    assert answer.parsed_output.place == "Oslo"


def test_images_are_seen(client: anthropic.Anthropic) -> None:
    data = base64.b64encode(png(10)).decode()
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    turn: Any = {
        "role": "user",
        "content": [{"type": "image", "source": source}, {"type": "text", "text": "Describe"}],
    }
    answer = client.messages.create(model=VISION, max_tokens=99, messages=[turn])
    assert answer.content[0].text.startswith("The picture shows pattern")


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=CHAT, messages=user("Count to 3"))
    answer = client.messages.create(model=CHAT, max_tokens=99, messages=user("Count to 3"))
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_models_are_listed(client: anthropic.Anthropic) -> None:
    assert CHAT in {one.id for one in client.models.list()}


def test_errors_have_their_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=9, messages=user("Hello"))
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model=CHAT, max_tokens=9, messages=user("Hello"), extra_body={"top_k": "two"}
        )
    assert "top_k" in str(caught.value)
