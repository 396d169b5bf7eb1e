"""A stored response and what goes on from it on a simulated board: nothing is computed twice."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.plan import plan, reading
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.responses.answers import ResponseAnswer
from rkserve.api.responses.requests import ResponseCall, parse_response
from rkserve.config.router import RouterConfig
from rkserve.core.messages import Delta, Finished
from rkserve.router.stored_responses import CallMemory, Responses
from tests.support.boards.board_bench import collect
from tests.support.boards.fakes import run_loop
from tests.support.http.tool_talk import GREEDY, Talk
from tests.support.sim.sim_board import CONTEXT_LEN, FOLDER, Sim

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
Respond = Callable[..., Awaitable[dict[str, Any]]]


def talked(body: Callable[[Respond], Awaitable[None]], place: Path, release: str = "1.3.0") -> None:
    """Do something with a board, and with a Router's memory of its answers."""
    (place / "sim").mkdir()

    async def go() -> None:
        responses = Responses(RouterConfig(), place / "kept")
        async with Sim(place / "sim", release).board() as board:
            talk = Talk(board)

            async def respond(**keys: Any) -> dict[str, Any]:
                return await _respond(talk, responses, keys)

            await body(respond)
        responses.close()

    run_loop(go())


async def _respond(talk: Talk, responses: Responses, keys: dict[str, Any]) -> dict[str, Any]:
    memory = CallMemory(responses, "anybody")
    body = json.dumps({"model": FOLDER.id, **keys}).encode()
    call = await memory.recall(parse_response(body))
    assert isinstance(call, ResponseCall)
    name = f"resp_{uuid4().hex}"
    (request,) = plan(
        call,
        ResolvedModel(FOLDER.id),
        talk.renderer,
        defaults=GREEDY,
        context_len=CONTEXT_LEN,
        completion=name,
    )
    stamp = AnswerOrigin(FOLDER.id, "1.3.0", reading=reading(call, talk.renderer, request))
    answer = ResponseAnswer(call, name, 1, stamp)
    for event in await collect(talk.board.generate(request)):
        if isinstance(event, Delta):
            answer.add(0, event)
        elif isinstance(event, Finished):
            answer.end(0, event)
    await memory.keep(answer)
    return answer.whole()


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("release", ["1.2.3", "1.3.0"])
def test_a_follow_up_finds_the_conversation_in_the_kv_cache(tmp_path: Path, release: str) -> None:
    async def body(respond: Respond) -> None:
        first = await respond(input="Repeat after me: the sea is deep", instructions="Be brief.")
        assert cached(first) == 0
        second = await respond(
            input="Repeat after me: and cold",
            previous_response_id=first["id"],
            instructions="Be brief.",
        )
        # All but the end of the turn, which is no word.
        assert cached(second) == first["usage"]["total_tokens"] - 1
        third = await respond(
            input="Repeat after me: and blue",
            previous_response_id=second["id"],
            instructions="Be brief.",
        )
        assert cached(third) == second["usage"]["total_tokens"] - 1
        other = await respond(input="x", previous_response_id=third["id"], instructions="Sing.")
        # Other instructions are another prefix: the words of the template before them are left.
        assert cached(other) < 8

    talked(body, tmp_path, release)


def test_a_call_and_its_result_are_found_there_too(tmp_path: Path) -> None:
    async def body(respond: Respond) -> None:
        first = await respond(input="What is the weather in Oslo?", tools=[WEATHER])
        (call,) = first["output"]
        assert (call["type"], call["name"]) == ("function_call", "get_weather")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        second = await respond(input=[result], previous_response_id=first["id"], tools=[WEATHER])
        assert cached(second) == first["usage"]["total_tokens"] - 1
        assert second["output"][0]["content"][0]["text"] == "The tool answered: rain"

    talked(body, tmp_path)
