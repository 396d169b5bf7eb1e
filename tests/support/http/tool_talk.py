"""Conversations with tools and thoughts: an OpenAI body to a simulated board, and its answer back.

It does what a Router does with a call, but for finding a board.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, parse_chat
from rkserve.api.common.plan import held, plan, reading
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.openai.answers import ChatAnswer
from rkserve.board.board import Board
from rkserve.core.messages import (
    Accepted,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    QueueChange,
)
from rkserve.core.run_params import Sampling
from rkserve.models.folder import ModelFolder
from tests.support.boards.board_bench import collect
from tests.support.sim.sim_board import CONTEXT_LEN, FOLDER

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)


def function(name: str, description: str = "", **types: str) -> dict[str, Any]:
    """A tool with parameters of these types."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in types.items()},
    }
    described = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


WEATHER = function("get_weather", "What the sky does", city="string")
TIME = function("get_time", "What the clock says", zone="string")


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's events."""
    lines = [line for line in stream.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def gathered(stream: bytes, index: int = 0) -> dict[str, Any]:
    """What a client has that adds up the deltas of one choice and follows retractions."""
    words = thoughts = ""
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for chunk in chunks_of(stream):
        void = chunk.get("rkserve", {})
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            words = words[: len(words) - void.get("retract", 0)]
            thoughts = thoughts[: len(thoughts) - void.get("retract_reasoning", 0)]
            for last in sorted(calls)[len(calls) - void.get("retract_tool_calls", 0) :]:
                del calls[last]
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            words += delta.get("content") or ""
            thoughts += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] not in calls, "an index is used once"
                    calls[call["index"]] = {"id": call["id"], **call["function"]}
                else:
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return {"words": words, "thoughts": thoughts, "calls": list(calls.values()), "reason": reason}


@dataclass
class Talk:
    """One board, and the model folder that its requests are rendered for."""

    board: Board
    folder: ModelFolder = FOLDER

    def __post_init__(self) -> None:
        self.renderer = Renderer(self.folder)

    def planned(self, **body: Any) -> tuple[ChatCall, list[GenerateRequest]]:
        """Return a call and what boards are sent for it."""
        call = parse_chat(json.dumps({"model": FOLDER.id, **body}).encode())
        guided = held(call, self.renderer)
        assert isinstance(guided, ChatCall)
        call = guided
        requests = plan(
            call,
            ResolvedModel(FOLDER.id),
            self.renderer,
            defaults=GREEDY,
            context_len=CONTEXT_LEN,
            completion="chatcmpl-t",
        )
        return call, requests

    async def say(self, **body: Any) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a body, whole and as the stream that it could have been."""
        call, requests = self.planned(**body)
        stamp = AnswerOrigin(FOLDER.id, "1.3.0", reading=reading(call, self.renderer, requests[0]))
        whole, streamed = (ChatAnswer(call, "chatcmpl-t", 1, stamp) for _ in range(2))
        stream = b""
        for index, request in enumerate(requests):
            stream += streamed.opening(index)
            for event in await collect(self.board.generate(request)):
                stream += tell(whole, streamed, index, event)
        return whole.whole(), stream + streamed.closing()


def tell(whole: ChatAnswer, streamed: ChatAnswer, index: int, event: Event) -> bytes:
    """Give an event to both kinds of an answer."""
    match event:
        case Delta():
            whole.add(index, event)
            return streamed.delta(index, event)
        case Finished():
            whole.end(index, event)
            return streamed.finish(index, event)
        case Accepted() | QueueChange():
            return b""
    raise AssertionError(event)


def message(answer: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """The message of a choice, as a client sends it back."""
    found: dict[str, Any] = answer["choices"][index]["message"]
    return found


def user(text: str) -> dict[str, str]:
    """A user's turn."""
    return {"role": "user", "content": text}


def result(call: dict[str, Any], text: str) -> dict[str, str]:
    """A tool's turn."""
    return {"role": "tool", "tool_call_id": call["id"], "content": text}
