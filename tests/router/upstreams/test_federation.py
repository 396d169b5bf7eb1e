"""A second rkserve as the upstream of a first one, both without Ray."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from rkserve.core.errors import EngineDied
from tests.support.boards.fake_boards import FakeBoards, accepted, answer, report
from tests.support.http.router_house import House, events
from tests.support.upstreams import UpstreamHouse, group, house

URL = "http://localhost/v1"  # a name that it allows
GROUP = group(URL, "far", "far-chat", model="sim-chat", extensions=True)


async def far(*texts: str) -> tuple[House, httpx.ASGITransport]:
    """A Router with one board that says these tokens, and the way to it."""
    boards = FakeBoards([report("b")], {"replica of b": [answer("b", *texts)]})
    return await reached(House(boards))


async def reached(found: House) -> tuple[House, httpx.ASGITransport]:
    await found.service.fleet.refresh()
    await found.cluster.refresh()
    return found, httpx.ASGITransport(found.app, client=("127.0.0.1", 1))


async def asked(near: UpstreamHouse, **extra: Any) -> httpx.Response:
    return await near.chat(model="far-chat", **extra)


async def test_a_chat_goes_through_both_with_the_usage_of_the_board() -> None:
    there, way = await far("Hel", "lo", "!")
    async with house(GROUP, transport=way) as near:
        body = (await asked(near, max_tokens=9, top_k=4)).json()
        assert body["model"] == "far-chat"
        assert body["choices"][0]["message"]["content"] == "Hello!"
        assert body["usage"]["prompt_tokens"] == 5
        assert body["usage"]["completion_tokens"] == 3
        (replica, request) = there.boards.opened[-1]
        assert (replica, request.model) == ("replica of b", "sim-chat")
        assert request.max_tokens == 9
        assert request.sampling.top_k == 4
        there.expect_nothing_left()


async def test_a_stream_has_the_far_boards_tokens_one_by_one() -> None:
    _, way = await far("Hel", "lo", "!")
    async with house(GROUP, transport=way) as near:
        found = events((await asked(near, stream=True)).text)
        texts = [
            one["choices"][0]["delta"]["content"]
            for one in found
            if isinstance(one, dict) and one["choices"][0]["delta"].get("content")
        ]
        assert texts == ["Hel", "lo", "!"]


async def test_tool_calls_are_parsed_where_the_model_is() -> None:
    call = json.dumps({"name": "look", "arguments": {"at": "fish"}})
    _, way = await far("<tool_call>\n", call, "\n</tool_call>")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with house(GROUP, transport=way) as near:
        choice = (await asked(near, tools=[tool])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        called = choice["message"]["tool_calls"][0]["function"]
        assert called["name"] == "look"
        assert json.loads(called["arguments"]) == {"at": "fish"}


async def test_its_refusals_and_failures_are_told_by_its_own_words() -> None:
    there, way = await far("x")
    async with house(GROUP, transport=way) as near:
        error = (await asked(near, messages=[{"role": "user", "content": "long " * 9000}])).json()
        assert error["error"]["code"] == "upstream_refused"
        assert "context" in error["error"]["message"]
        there.boards.says["", "forgive"] = lambda: None
        there.boards.scripts["replica of b"] = [[accepted("b"), EngineDied("b", "it crashed")]]
        failed = await asked(near)
        assert failed.status_code == 503


async def test_a_cluster_whose_boards_are_gone_is_a_failed_upstream() -> None:
    _, way = await reached(House(FakeBoards([])))
    async with house(GROUP, transport=way) as near:
        failed = await asked(near)
        assert failed.status_code == 503
        assert "upstream far: it answers 503" in failed.json()["error"]["message"]


@pytest.mark.parametrize("dialect", ["/v1/messages", "/v1/responses"])
async def test_other_dialects_go_through_as_chats(dialect: str) -> None:
    _, way = await far("Hi")
    body: dict[str, Any] = {"model": "far-chat", "max_tokens": 5}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    if dialect.endswith("responses"):
        body = {"model": "far-chat", "input": "Hello"}
    async with house(GROUP, transport=way) as near:
        found = await near("POST", dialect, json=body)
        assert found.status_code == 200
        assert '"text":"Hi"' in found.text


async def test_many_at_once_all_get_their_own_answer() -> None:
    _, way = await far("Hel", "lo")
    few = group(URL, "far", "far-chat", model="sim-chat", concurrency=2)
    async with house(few, transport=way) as near:
        answers = await asyncio.gather(*(asked(near, n=2) for _ in range(4)))
        for one in answers:
            assert one.status_code == 200, one.text
            texts = [choice["message"]["content"] for choice in one.json()["choices"]]
            assert texts == ["Hello", "Hello"]
