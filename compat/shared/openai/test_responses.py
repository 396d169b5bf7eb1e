"""OpenAI's newer API."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from scene import CHAT, CITY

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "What the sky does",
    "parameters": CITY,
    "strict": True,
}


def test_a_response_is_made(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=CHAT, input="Count to 5", instructions="Be brief.")
    assert answer.output_text == "1, 2, 3, 4, 5."
    assert answer.status == "completed"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_response_is_streamed(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=CHAT, input="Count to 5", stream=True))
    kinds = [one.type for one in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == "1, 2, 3, 4, 5." == events[-1].response.output_text
    assert [one.sequence_number for one in events] == list(range(len(events)))


def test_the_stream_helper_collects_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=CHAT, input="Count to 4") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "1, 2, 3, 4."


def test_a_response_goes_on_from_another_and_is_kept(client: openai.OpenAI) -> None:
    first = client.responses.create(model=CHAT, input="Hello there")
    second = client.responses.create(
        model=CHAT, input="What did I say first?", previous_response_id=first.id
    )
    assert second.output_text == 'You said first: "Hello there"'
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == second.output_text
    items = client.responses.input_items.list(second.id)
    assert [one.type for one in items.data] == ["message"] * 3
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_response_calls_a_tool_and_tells_its_result(
    client: openai.OpenAI, streamed: bool
) -> None:
    asked: dict[str, Any] = {"model": CHAT, "tools": [WEATHER]}
    text = "What is the weather in Oslo?"
    if streamed:
        with client.responses.stream(input=text, **asked) as stream:
            kinds = {event.type for event in stream}
            answer: Any = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
    else:
        answer = client.responses.create(input=text, **asked)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}
    last = client.responses.create(input=[result], previous_response_id=answer.id, **asked)
    assert last.output_text == "The tool answered: 3 degrees"


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "get_weather"}],
    ids=["any", "named"],
)
def test_a_call_can_be_demanded(client: openai.OpenAI, choice: Any) -> None:
    answer = client.responses.create(model=CHAT, input="Hello", tools=[WEATHER], tool_choice=choice)
    assert [one.type for one in answer.output] == ["function_call"]


class Depth(BaseModel):
    """How deep it is."""

    place: str
    metres: int


def test_a_response_is_parsed_to_a_model(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=CHAT, input="How deep is the sea?", text_format=Depth)
    assert isinstance(answer.output_parsed, Depth)


def test_a_forced_call_wins_over_a_format(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": CITY, "strict": True}}
    answer = client.responses.create(
        model=CHAT, input="Hello", tools=[WEATHER], tool_choice="required", text=form
    )
    assert [one.type for one in answer.output] == ["function_call"]


def test_thoughts_are_an_item(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=CHAT, input="Count to 3", reasoning={"effort": "low"})
    assert [one.type for one in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "1, 2, 3."
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_a_limit_makes_it_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=CHAT, input="Write 90 tokens", max_output_tokens=20)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_what_cannot_be_done_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=CHAT, input="Hello", background=True)
    assert caught.value.param == "background"
