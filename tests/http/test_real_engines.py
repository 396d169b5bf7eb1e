"""The APIs over real engines: what holds whichever model answers, in a whole answer and a stream.

On the simulated runtime, and on llama.cpp with the trained model.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from tests.support.http.tool_talk import WEATHER
from tests.support.sim.cpu_board import Cpu
from tests.support.sim.real_house import RealHouse, real_house
from tests.support.sim.sim_board import GREEDY, Sim

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDILY: dict[str, Any] = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "boards": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["npu", "cpu"]},
    },
    "required": ["name", "boards", "kind"],
    "additionalProperties": False,
}

PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": PARAMETERS, "strict": True},
}


@pytest.fixture(scope="module", params=[Sim, Cpu], ids=["simulated", "cpu"])
def app(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealHouse]:
    place = tmp_path_factory.mktemp("board")
    with real_house(request.param(place, sampling=GREEDY)) as opened:
        yield opened


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(app: RealHouse, text: str | None = None, **extra: Any) -> Any:
    return app.post(CHAT, messages=user(text or app.question()), **{**GREEDILY, **extra})


def said(answer: Any, index: int = 0) -> str:
    return str(answer["choices"][index]["message"]["content"])


def forget(app: RealHouse) -> None:
    """Empty the KV cache."""
    body = {"model": app.model, "keep_system_prompt": False}
    answer = app.send("POST", "/v1/cache/kv/clear", json=body)
    assert answer.status_code == 200, answer.text


def test_an_answer_ends_by_itself_and_its_stream_is_the_same(app: RealHouse) -> None:
    whole = chat(app)
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert len(said(whole)) > 60
    events = app.events(
        CHAT,
        messages=user(app.question()),
        stream_options={"include_usage": True},
        **GREEDILY,
    )
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(one["delta"].get("content") or "" for one in choices) == said(whole)
    assert choices[-1]["finish_reason"] == "stop"
    streamed, usage = events[-1]["usage"], whole["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed[key] == usage[key]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_characters_of_several_tokens_come_whole(app: RealHouse) -> None:
    whole = chat(app, app.question("multi-byte"))
    assert "你好" in said(whole)
    assert "\N{REPLACEMENT CHARACTER}" not in said(whole)
    events = app.events(CHAT, messages=user(app.question("multi-byte")), **GREEDILY)
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == said(whole)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@dataclass(frozen=True)
class Dialect:
    """An API: its path and body, and the text of a whole answer and of one event of a stream."""

    path: str
    body: Callable[[str], dict[str, Any]]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]


DIALECTS = {
    "Anthropic": Dialect(
        "/v1/messages",
        lambda text: {"messages": user(text), "max_tokens": 1000, **GREEDILY},
        lambda answer: str(answer["content"][0]["text"]),
        lambda event: str(event.get("delta", {}).get("text", "")),
    ),
    "Responses": Dialect(
        "/v1/responses",
        lambda text: {"input": text, **GREEDILY},
        lambda answer: str(answer["output"][0]["content"][0]["text"]),
        lambda event: str(event["delta"]) if event["type"] == "response.output_text.delta" else "",
    ),
    "Ollama": Dialect(
        "/api/chat",
        lambda text: {"messages": user(text), "options": GREEDILY},
        lambda answer: str(answer["message"]["content"]),
        lambda event: str(event["message"]["content"]),
    ),
    "Ollama, one turn": Dialect(
        "/api/generate",
        lambda text: {"prompt": text, "options": GREEDILY},
        lambda answer: str(answer["response"]),
        lambda event: str(event["response"]),
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_every_api_gives_the_same_answer(app: RealHouse, dialect: Dialect) -> None:
    body = dialect.body(app.question())
    expected = said(chat(app))
    assert dialect.whole(app.post(dialect.path, **body, stream=False)) == expected
    assert "".join(map(dialect.piece, app.events(dialect.path, **body))) == expected


def test_a_limit_and_a_stop_string_cut_the_same_answer(app: RealHouse) -> None:
    whole = said(chat(app))
    cut = chat(app, max_tokens=9)
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 9)
    assert whole.startswith(said(cut))
    stop = whole[30:38]
    stopped = chat(app, stop=[stop])
    assert (said(stopped), stopped["choices"][0]["finish_reason"]) == (
        whole.partition(stop)[0],
        "stop",
    )


def test_log_probabilities_are_those_of_the_choice(app: RealHouse) -> None:
    plain = said(chat(app, max_tokens=12))
    scored = chat(app, max_tokens=12, logprobs=True, top_logprobs=3)
    assert said(scored) == plain
    tokens = scored["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in tokens) == plain
    for one in tokens:
        best = one["top_logprobs"]
        assert [given["logprob"] for given in best] == sorted(
            (given["logprob"] for given in best), reverse=True
        )
        assert best[0]["token"] == one["token"], "greedily"
        assert best[0]["logprob"] == one["logprob"] <= 0


def test_a_completion_continues_its_prompt(app: RealHouse) -> None:
    prompt = "The quick"
    body = {"prompt": prompt, "max_tokens": 8, **GREEDILY}
    plain = app.post(COMPLETIONS, **body)["choices"][0]["text"]
    echoed = app.post(COMPLETIONS, **body, echo=True, logprobs=1)["choices"][0]
    assert echoed["text"] == prompt + plain
    scores = echoed["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert all(score <= 0 for score in scores[1:])


def test_choices_have_answers_of_their_own_which_a_seed_repeats(app: RealHouse) -> None:
    def drawn(seed: int) -> list[str]:
        forget(app)  # behind a cached prefix llama.cpp rounds otherwise, which may draw another
        hot: dict[str, Any] = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 24}
        answer = chat(app, "Tell me about the sea", n=3, seed=seed, **hot)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        return [said(answer, index) for index in range(3)]

    first = drawn(4711)
    assert len(set(first)) > 1
    assert drawn(4711) == first
    assert drawn(4712) != first
    greedy = chat(app, n=2, max_tokens=9)
    assert said(greedy, 0) == said(greedy, 1)
    assert greedy["usage"]["completion_tokens"] == 18


def test_a_schema_is_followed(app: RealHouse) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = chat(app, response_format=form, temperature=1.0, seed=seed, max_tokens=200)
        assert answer["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(said(answer)), SCHEMA)


def test_a_tool_is_called_where_one_is_demanded(app: RealHouse) -> None:
    tools = [WEATHER, TIME]
    chosen = {"type": "function", "function": {"name": "get_time"}}
    answer = chat(app, "Hello there", tools=tools, tool_choice=chosen, max_tokens=300)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_time"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    turns = [
        *user("Hello there"),
        answer["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "noon"},
    ]
    after = app.post(CHAT, messages=turns, tools=tools, max_tokens=40, **GREEDILY)
    assert after["usage"]["prompt_tokens"] > answer["usage"]["total_tokens"]


def test_a_conversation_finds_its_kv_cache_again(app: RealHouse) -> None:
    first = chat(app, app.question("multi-byte"))
    turns = [
        *user(app.question("multi-byte")),
        {"role": "assistant", "content": said(first)},
        *user(app.question()),
    ]
    forget(app)
    cold = app.post(CHAT, messages=turns, **GREEDILY)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chat(app, app.question("multi-byte"))
    warm = app.post(CHAT, messages=turns, **GREEDILY)
    cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 2
    assert said(warm) == said(cold)


def test_a_named_prompt_cache_saves_its_tokens_and_changes_nothing(app: RealHouse) -> None:
    turns = [{"role": "system", "content": "You are a helpful assistant."}, *user(app.question())]
    plain = app.post(CHAT, messages=turns, **GREEDILY)
    built = app.send(
        "POST", f"/v1/cache/{app.model}", json={"cache_name": "doc", "messages": turns[:1]}
    )
    assert built.status_code == 200, built.text
    chat(app, "Hello")  # another conversation in the KV cache
    cached = app.post(CHAT, messages=turns, use_cache="doc", **GREEDILY)
    assert said(cached) == said(plain)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 10


def test_a_generation_that_pauses_and_is_resumed_gives_the_same_answer(app: RealHouse) -> None:
    whole = said(chat(app))
    stop = whole[30:34]

    async def talk() -> Any:
        body = {"model": app.model, "messages": user(app.question()), "pause_on": [stop]}
        asked = asyncio.create_task(app.house("POST", CHAT, json={**body, **GREEDILY}))
        limit_s = time.monotonic() + 60
        while time.monotonic() < limit_s:
            listed = (await app.house("GET", "/v1/generations")).json()
            paused = [one for one in listed["data"] if one["state"] == "paused"]
            if paused:
                break
            await asyncio.sleep(0.01)
        [one] = paused
        resumed = await app.house("POST", f"/v1/generations/{one['id']}/resume")
        assert resumed.status_code == 200, resumed.text
        return (await asked).json()

    assert said(app.thread.call(talk())) == whole


def test_texts_become_ids_and_texts_again(app: RealHouse) -> None:
    text = "Router, 你好 \N{TEACUP WITHOUT HANDLE}\n  ok"
    ids = app.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert app.post("/detokenize", tokens=ids)["prompt"] == text


def test_what_the_model_cannot_do_is_refused_by_name(app: RealHouse) -> None:
    refused = app.send("POST", "/v1/embeddings", json={"model": app.model, "input": "x"})
    assert refused.status_code == 400
    assert "embeddings" in refused.json()["error"]["message"]
