"""A client of the wire that hides nothing: every event of a stream, as it came, and hang-ups."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "sim-chat"
# A model that is asked to write this many tokens writes until somebody stops it.
ENDLESS = "Write 4000 tokens"
CHAT = "/v1/chat/completions"


def chat_body(text: str, **extra: Any) -> dict[str, Any]:
    """Return the body of a chat of one turn."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **extra}


@dataclass
class Reply:
    """A streamed answer as far as it was read."""

    headers: httpx.Headers
    lines: AsyncIterator[str]
    id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    deltas: int = 0
    retracted: int = 0
    pauses: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, Any] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    comments: list[str] = field(default_factory=list)

    @property
    def board(self) -> str:
        """The board that answers."""
        return str(self.headers["x-rkserve-board"])

    @property
    def text(self) -> str:
        """What its choices say, one after the other, without what was taken back."""
        return "".join(text for _, text in sorted(self.texts.items()))

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; of several choices, the one that ended last."""
        return next(reversed(self.reasons.values()), None)

    async def read(self, deltas: int | None = None) -> Reply:
        """Read to the end, or until so many deltas have come in all."""
        while deltas is None or self.deltas < deltas:
            line = await anext(self.lines, None)
            if line is None:
                break
            self._take(line)
        return self

    async def read_until(self, seen: Callable[[Reply], bool]) -> Reply:
        """Read until ``seen`` says so of what was read, which has to happen before the end."""
        while not seen(self):
            line = await anext(self.lines, None)
            assert line is not None, f"the stream ended before, with {self}"
            self._take(line)
        return self

    def _take(self, line: str) -> None:
        assert not (self.done and line), f"after [DONE] came {line!r}"
        if line.startswith(":"):
            self.comments.append(line)
        elif line == "data: [DONE]":
            self.done = True
        elif line:
            self._event(json.loads(line.removeprefix("data: ")))

    def _event(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        self.id = event.get("id", self.id)
        told = event.get("rkserve", {})
        if told.get("status") == "paused":
            self.pauses.append(told)
        self.timings = event.get("timings", self.timings)
        for choice in event.get("choices", ()):
            index = choice["index"]
            if retract := told.get("retract", 0):
                self.retracted += retract
                self.texts[index] = self.texts[index][:-retract]
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self.texts[index] = self.texts.get(index, "") + (piece or "")
            self.deltas += bool(piece)
            if choice["finish_reason"] is not None:
                self.reasons[index] = choice["finish_reason"]


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, text: str, **extra: Any) -> AsyncIterator[Reply]:
    """Open a streamed chat; leaving the block before its end is a hang-up."""
    body = chat_body(text, stream=True, **extra)
    async with client.stream("POST", CHAT.removeprefix("/"), json=body) as response:
        assert response.status_code == 200, await response.aread()
        yield Reply(response.headers, response.aiter_lines())


async def ask(client: httpx.AsyncClient, text: str, **extra: Any) -> Reply:
    """Stream a chat to its end."""
    async with streaming(client, text, **extra) as reply:
        return await reply.read()


async def act(client: httpx.AsyncClient, generation: str, action: str, **body: Any) -> Any:
    """Control a generation: return what the answer says, which has to be a good one."""
    response = await client.post(f"/v1/generations/{generation}/{action}", json=body)
    assert response.status_code == 200, response.text
    return response.json()
