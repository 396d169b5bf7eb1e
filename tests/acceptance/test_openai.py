"""The official openai client against a cluster of simulated boards, its strict mode on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import jinja2
import openai
import pytest
import tokenizers
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.support.cluster.local_cluster import App
from tests.support.http.talk import ENDLESS, MODEL, chat_body, streaming
from tests.support.paths import PROJECT

pytestmark = pytest.mark.ray

FOLDER = PROJECT / "models" / MODEL
MANY_LANGUAGES = "Greet me in many languages"


@pytest.fixture(scope="module")
def client(boards: App) -> Iterator[openai.OpenAI]:
    """The client as its users make it, but for the strict mode."""
    with openai.OpenAI(
        base_url=f"{boards.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=60,
        _strict_response_validation=True,
    ) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """The model's tokenizer, opened without rkserve."""
    return tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def rendered(messages: list[dict[str, str]]) -> str:
    """Render a conversation with the model's template, without rkserve."""
    config = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(config["chat_template"])
    return template.render(messages=messages, add_generation_prompt=True, tools=None)


def user(text: str) -> list[ChatCompletionMessageParam]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


def test_the_models_are_listed_with_the_boards_that_serve_them(client: openai.OpenAI) -> None:
    listed, adapter = client.models.list().data
    assert adapter.id == f"{MODEL}:pirate"  # of the model folder
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "rkserve")
    retrieved = client.models.retrieve(MODEL)
    assert retrieved.id == MODEL
    extra: Any = retrieved.model_extra
    boards = extra["rkserve"]["boards"]
    assert [b["id"] for b in boards] == ["sim-0", "sim-1", "sim-2"]
    assert {(b["state"], b["release"]) for b in boards} == {("ready", "1.3.0")}


def test_a_model_that_nobody_serves_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered_and_its_usage_is_exact(
    client: openai.OpenAI, tokenizer: tokenizers.Tokenizer
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("Write 20 tokens"))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    prompt = rendered([{"role": "user", "content": "Write 20 tokens"}])
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    assert usage.completion_tokens == 20 + 1  # and the one that ends the answer
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("plain words", id="ASCII"),
        pytest.param("crème brûlée, señor Łukasz", id="accents"),
        pytest.param("你好 世界", id="Chinese"),
        pytest.param("👋🏽 👩‍👩‍👧 🇫🇷", id="emoji of several code points"),
        pytest.param('quote " backslash \\ tab \t brace {', id="JSON's own characters"),
    ],
)
def test_text_comes_back_as_it_was_sent(client: openai.OpenAI, text: str) -> None:
    asked = user(f"Repeat after me: {text}")
    whole = client.chat.completions.create(model=MODEL, messages=asked)
    assert whole.choices[0].message.content == text
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model=MODEL, messages=asked, stream=True)
    ]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_has_one_role_then_text_then_one_reason_then_the_usage(
    client: openai.OpenAI,
) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user("Count to 5"),
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in (*middle, end))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == "1, 2, 3, 4, 5."
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * len(middle)
    assert end.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > len(middle) - 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len({chunk.id for chunk in chunks}) == 1


WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the sky does",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called_after_thoughts_and_its_result_is_told(
    client: openai.OpenAI, streamed: bool
) -> None:
    asked: list[ChatCompletionMessageParam] = user("What is the weather in Oslo?")
    keys: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "reasoning_effort": "low"}
    if streamed:
        with client.chat.completions.stream(messages=asked, **keys) as stream:
            answer: Any = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(messages=asked, **keys)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None or choice.message.content == ""
    assert choice.message.to_dict()["reasoning_content"].startswith("The user wrote: What is")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    called: Any = choice.message.to_dict()
    result: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"celsius": 3}',
    }
    last = client.chat.completions.create(messages=[*asked, called, result], **keys)
    assert last.choices[0].message.content == 'The tool answered: {"celsius": 3}'
    assert last.choices[0].finish_reason == "stop"


def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI) -> None:
    asked = user(MANY_LANGUAGES)
    whole = client.chat.completions.create(model=MODEL, messages=asked, temperature=0)
    chunks = client.chat.completions.create(model=MODEL, messages=asked, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert "你好" in text


def test_the_async_client_streams_many_answers_at_once(boards: App) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=user(f"Repeat after me: {text}"), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{boards.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
        ) as client:
            whole = await client.chat.completions.create(
                model=MODEL, messages=user("Repeat after me: whole")
            )
            streams = await asyncio.gather(*(one(client, f"stream {k}") for k in range(6)))
            return [whole.choices[0].message.content or "", *streams]

    assert asyncio.run(all_of_them()) == ["whole", *(f"stream {k}" for k in range(6))]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_token_limit_is_exact_and_the_reason_says_length(
    client: openai.OpenAI, name: str
) -> None:
    asked: dict[str, Any] = {name: 7}
    answer = client.chat.completions.create(
        model=MODEL, messages=user("Write 40 tokens"), stream=False, **asked
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        pytest.param("STOP", "one two ", id="one string"),
        pytest.param(["never", "two STOP th"], "one ", id="a list, across tokens"),
        pytest.param("three four", "one two STOP three", id="a string that does not come"),
    ],
)
def test_a_stop_string_ends_the_answer_before_it(
    client: openai.OpenAI, stop: str | list[str], text: str
) -> None:
    asked = user("Repeat after me: one two STOP three")
    answer = client.chat.completions.create(model=MODEL, messages=asked, stop=stop)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(model=MODEL, messages=asked, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_several_choices_come_with_their_indexes(client: openai.OpenAI) -> None:
    asked = user("Tell me something")
    answer = client.chat.completions.create(model=MODEL, messages=asked, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content for choice in answer.choices)
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    for chunk in client.chat.completions.create(
        model=MODEL, messages=user("Repeat after me: thrice"), n=3, stream=True
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["thrice"] * 3
    assert reasons == ["stop"] * 3


def test_the_system_prompt_and_content_parts_reach_the_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "You are Ferris"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Who are "},
                    {"type": "text", "text": "you?"},
                ],
            },
        ],
    )
    assert "Ferris" in (answer.choices[0].message.content or "")


def test_a_board_finds_its_conversation_in_its_cache(
    boards: App, client: openai.OpenAI, tokenizer: tokenizers.Tokenizer
) -> None:
    """Two boards are kept busy, so that every turn finds the same third one."""
    boards.settled()

    async def talk() -> tuple[Any, Any]:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(boards.http())
            # Kept in a list: a reply that nobody holds on to hangs up.
            held = [await stack.enter_async_context(streaming(http, ENDLESS)) for _ in range(2)]
            await asyncio.gather(*(reply.read(deltas=1) for reply in held))
            return await asyncio.to_thread(turns)

    def turns() -> tuple[Any, Any]:
        asked = user("Hello there, how are you?")
        first = create(model=MODEL, messages=asked, temperature=0)
        said: ChatCompletionMessageParam = {
            "role": "assistant",
            "content": first.parse().choices[0].message.content,
        }
        further = [*asked, said, *user("What did I say first?")]
        return first, create(model=MODEL, messages=further)

    create = client.chat.completions.with_raw_response.create
    answers = asyncio.run(talk())
    assert len({answer.headers["x-rkserve-board"] for answer in answers}) == 1
    first, second = (answer.parse() for answer in answers)
    assert "Hello there" in second.choices[0].message.content
    # Of another conversation at most the words of the template before the question are left.
    assert first.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens
    # All of the first turn but the token that ended it, which the runtime never computed on.
    held = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == held


@pytest.mark.parametrize(
    ("prompt", "texts", "prompt_tokens"),
    [
        pytest.param("Repeat after me: tea", ["tea"], None, id="a text"),
        pytest.param(["Repeat after me: a", "Repeat after me: b"], ["a", "b"], None, id="texts"),
        pytest.param([300, 301, 302], None, 3, id="ids"),
        pytest.param([[300, 301], [302]], None, 3, id="lists of ids"),
    ],
)
def test_completions_take_texts_and_ids(
    client: openai.OpenAI,
    tokenizer: tokenizers.Tokenizer,
    prompt: Any,
    texts: list[str] | None,
    prompt_tokens: int | None,
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8)
    if texts is not None:
        assert [choice.text.strip() for choice in answer.choices] == texts
        prompts = [prompt] if isinstance(prompt, str) else prompt
        prompt_tokens = sum(len(tokenizer.encode(text).ids) for text in prompts)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt_tokens


def test_completions_answer_each_prompt_n_times(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["Repeat after me: x", "Repeat after me: y"], n=2, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text.strip() for choice in answer.choices] == ["x", "x", "y", "y"]


def test_completions_stream(boards: App) -> None:
    # The strict mode of the client is wrong about these chunks, whoever sends them.
    with openai.OpenAI(base_url=f"{boards.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model=MODEL,
                prompt="Count to 4",
                max_tokens=50,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "1, 2, 3, 4." in "".join(c.choices[0].text for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None


def test_an_answer_says_which_board_and_release_gave_it(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=user("Hello"), temperature=0.3
    )
    assert raw.headers["x-rkserve-board"] in {"sim-0", "sim-1", "sim-2"}
    assert raw.headers["x-rkserve-release"] == "1.3.0"
    assert "x-rkserve-sampling-ignored" not in raw.headers
    assert raw.parse().choices[0].message.content


def test_release_1_2_says_that_sampling_was_not_changed(old_board: App) -> None:
    with old_board.http_sync() as http:
        told = http.post("/v1/chat/completions", json=chat_body("Hello", temperature=0.1))
        same = http.post("/v1/chat/completions", json=chat_body("Hello", temperature=0.8))
        refused = http.post(
            "/v1/chat/completions",
            json=chat_body("Hello", temperature=0.1, strict_sampling=True),
        )
    assert told.headers["x-rkserve-release"] == "1.2.3"
    assert told.headers["x-rkserve-sampling-ignored"] == "temperature"
    assert "x-rkserve-sampling-ignored" not in same.headers
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "sampling_fixed"
    assert refused.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_release_1_2_keeps_max_tokens_by_an_abort(old_board: App, limit: int) -> None:
    with old_board.http_sync() as http:
        body = chat_body("Write 200 tokens", max_tokens=limit)
        found = http.post("/v1/chat/completions", json=body).json()
    assert found["usage"]["completion_tokens"] == limit
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_seed_gives_the_same_answer_on_every_board_and_release(
    client: openai.OpenAI, old_board: App
) -> None:
    def said(asked: openai.OpenAI, **extra: Any) -> list[str | None]:
        answer = asked.chat.completions.create(
            model=MODEL,
            messages=user("Tell me about the sea"),
            temperature=1.5,
            top_p=1,
            max_tokens=24,
            **{"seed": 4711, **extra},
        )
        return [choice.message.content for choice in answer.choices]

    first = said(client, n=3)
    assert len(set(first)) > 1
    assert said(client, n=3) == first
    with openai.OpenAI(base_url=f"{old_board.url}/v1", api_key="none", max_retries=0) as other:
        assert said(other) == first[:1]
    assert said(client, n=3, seed=4712) != first


def test_logprobs_cover_the_answer_and_an_echoed_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user("Count to 3"), temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.content == "1, 2, 3."
    assert choice.logprobs is not None
    found = choice.logprobs.content or []
    assert answer.usage is not None
    # The EOS token that ends the answer counts as a token, and is not shown.
    assert len(found) == answer.usage.completion_tokens - 1
    assert all(one.top_logprobs[0].token == one.token for one in found)  # greedy
    assert "".join(one.token for one in found) == "1, 2, 3."
    # As likelihood tasks of evaluation harnesses ask; long enough for frames of all sizes.
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt=[300] * 3000, max_tokens=0, echo=True, logprobs=20
    )
    log = json.loads(raw.text)["choices"][0]["logprobs"]
    assert len(log["tokens"]) == len(log["token_logprobs"]) == 3000
    assert log["token_logprobs"][0] is None
    assert all(len(top) >= 20 for top in log["top_logprobs"][1:])


def test_a_schema_is_followed_and_an_impossible_one_is_refused(client: openai.OpenAI) -> None:
    def asked(schema: dict[str, Any]) -> Any:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return client.chat.completions.create(
            model=MODEL, messages=user("Hello"), max_tokens=200, response_format=wanted
        )

    properties = {"kind": {"enum": ["sea", "lake"]}, "metres": {"type": "integer", "maximum": 99}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    (choice,) = asked(schema).choices
    found = json.loads(choice.message.content)
    assert choice.finish_reason == "stop"
    assert found["kind"] in {"sea", "lake"}
    assert found["metres"] <= 99
    with pytest.raises(openai.BadRequestError, match="Unimplemented") as caught:
        asked({"not": {"type": "string"}})
    assert caught.value.param == "response_format"
