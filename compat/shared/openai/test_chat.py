"""Chats: whole, streamed, limits, choices, images, thoughts, logprobs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from scene import CHAT, KEY, V1, VISION, data_uri, user


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=CHAT, messages=user("Count to 5"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "1, 2, 3, 4, 5.")
    assert (choice.finish_reason, answer.model, answer.object) == ("stop", CHAT, "chat.completion")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_is_streamed_with_its_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model=CHAT,
        messages=user("Repeat after me: crème 你好 👋🏽"),
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "crème 你好 👋🏽"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens > 3


def test_the_stream_helper_collects_the_answer(client: openai.OpenAI) -> None:
    api = getattr(client.chat.completions, "stream", None) or client.beta.chat.completions.stream
    with api(model=CHAT, messages=user("Count to 4")) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "1, 2, 3, 4."


def test_the_async_client_streams(strict: bool) -> None:
    async def said() -> str:
        async with openai.AsyncOpenAI(
            base_url=V1, api_key=KEY, max_retries=0, timeout=60, _strict_response_validation=strict
        ) as client:
            stream = await client.chat.completions.create(
                model=CHAT, messages=user("Count to 3"), stream=True
            )
            return "".join([one.choices[0].delta.content or "" async for one in stream])

    assert asyncio.run(said()) == "1, 2, 3."


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_limits_are_exact(client: openai.OpenAI, limit: str) -> None:
    asked: dict[str, Any] = {limit: 6}
    answer = client.chat.completions.create(model=CHAT, messages=user("Write 30 tokens"), **asked)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"]], ids=["one", "several"])
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, stop: Any) -> None:
    answer = client.chat.completions.create(
        model=CHAT, messages=user("Repeat after me: one two STOP three"), stop=stop
    )
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"


def test_n_answers_are_n_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=CHAT, messages=user("Count to 2"), n=3)
    assert [one.index for one in answer.choices] == [0, 1, 2]
    assert {one.message.content for one in answer.choices} == {"1, 2."}


def test_a_conversation_is_remembered(client: openai.OpenAI) -> None:
    turns = [
        {"role": "system", "content": "You are Ferris."},
        *user("Hello there"),
        {"role": "assistant", "content": "Hi."},
        *user("What did I say first?"),
    ]
    answer = client.chat.completions.create(model=CHAT, messages=turns)
    assert answer.choices[0].message.content == 'You said first: "Hello there"'
    turns[-1] = {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}
    answer = client.chat.completions.create(model=CHAT, messages=turns)
    assert answer.choices[0].message.content == "I am Ferris."


def test_a_seed_makes_the_same_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": CHAT, "messages": user("Tell me about the sea"), "seed": 7}
    one, two = (client.chat.completions.create(temperature=1.5, **asked) for _ in range(2))
    assert one.choices[0].message.content == two.choices[0].message.content
    assert one.system_fingerprint == two.system_fingerprint


def test_logprobs_cover_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT, messages=user("Count to 3"), temperature=0, logprobs=True, top_logprobs=2
    )
    found = answer.choices[0].logprobs.content
    # The hidden token that ends the answer is counted in the usage and has no entry.
    assert "".join(one.token for one in found) == answer.choices[0].message.content == "1, 2, 3."
    assert len(found) == answer.usage.completion_tokens - 1
    assert all(len(one.top_logprobs) == 2 for one in found)


def test_logprobs_are_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=CHAT, messages=user("Count to 3"), temperature=0, logprobs=True, stream=True
    )
    found = [
        entry.token
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or ()
    ]
    assert "".join(found) == "1, 2, 3."


def test_thoughts_come_beside_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=CHAT, messages=user("Count to 3"), reasoning_effort="low"
    )
    message = answer.choices[0].message
    assert message.content == "1, 2, 3."
    assert message.to_dict()["reasoning_content"].startswith("The user wrote")
    assert answer.usage.completion_tokens_details.reasoning_tokens > 3


def test_thoughts_are_streamed_first(client: openai.OpenAI) -> None:
    deltas = [
        chunk.choices[0].delta.to_dict()
        for chunk in client.chat.completions.create(
            model=CHAT, messages=user("Count to 3"), reasoning_effort="low", stream=True
        )
    ]
    thought = [at for at, one in enumerate(deltas) if one.get("reasoning_content")]
    spoken = [at for at, one in enumerate(deltas) if one.get("content")]
    assert thought
    assert max(thought) < min(spoken)


def test_images_are_seen(client: openai.OpenAI) -> None:
    def seen(*reds: int) -> str:
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": data_uri(red)}} for red in reds
        ]
        turn: Any = {"role": "user", "content": [*parts, {"type": "text", "text": "Describe"}]}
        answer = client.chat.completions.create(model=VISION, messages=[turn], temperature=0)
        return answer.choices[0].message.content.split(".")[0]

    one, other = seen(10), seen(200)
    assert one.startswith("The picture shows pattern ")
    assert one != other
    assert seen(10, 200) == f"The pictures show patterns {one[-4:]} and {other[-4:]}"
