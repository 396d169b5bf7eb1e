"""The pace of all sides, and the events of an answer in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

BOARDS = 8
TOKEN_S = 0.02
TOKENS = 128
PREFILL_S = 0.1
MODEL = "sim-chat"  # the name for clients, of every side
PROMPT = [{"role": "user", "content": "Write a story about a board."}]
DONE = "data: [DONE]\n\n"


async def paced_words(tokens: int) -> AsyncGenerator[str, None]:
    """Yield a word for each token, at the pace. A late word does not delay the others."""
    due_s = time.monotonic() + PREFILL_S
    for number in range(tokens):
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        due_s += TOKEN_S
        yield f" word{number % 10}"


def event(**fields: Any) -> str:
    """Return an event of a stream of chunks."""
    return f"data: {json.dumps({'object': 'chat.completion.chunk', **fields})}\n\n"


def choice(delta: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
    """Return the choices of a chunk."""
    return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
