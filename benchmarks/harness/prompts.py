"""Prompts of an exact length: conversations that the project's own renderer makes N tokens of."""

from __future__ import annotations

from typing import Any

from rkserve.api.common.renderer import Renderer
from rkserve.bench.child import BenchFailed

# The simulated model obeys it; the token limit of the request then ends the answer.
ASK = "Write 4000 tokens about story number {number}."
FILLERS = (" and", " the", " a", " of", ".", "!", ",")


def messages_of_length(renderer: Renderer, tokens: int, number: int) -> list[dict[str, Any]]:
    """Return a conversation that renders to ``tokens`` ids; ``number`` makes it differ early."""
    text = ASK.format(number=number)
    while (count := _length(renderer, text)) < tokens:
        # All at once, where each filler is a token; otherwise one by one.
        fit = (text + FILLERS[0] * (tokens - count), *(text + filler for filler in FILLERS))
        longer = next((t for t in fit if count < _length(renderer, t) <= tokens), None)
        if longer is None:
            break
        text = longer
    if count != tokens:
        raise BenchFailed(f"no prompt of exactly {tokens} tokens was found, only of {count}")
    return _messages(text)


def _length(renderer: Renderer, text: str) -> int:
    return len(renderer.chat(_messages(text)).ids)


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
