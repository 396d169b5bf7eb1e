"""The pace of the simulated boards, and prompts of an exact number of tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from rkserve.api.common.renderer import Renderer
from rkserve.bench.processes import BenchFailed
from rkserve.native.sim.profiles import Profile
from rkserve.native.sim.profiles import load as load_profiles

PROFILE = "rk3588-qwen2.5-1.5b-w8a8"  # of (a) to (d)
SMALL_PROFILE = "rk3588-qwen3-0.6b-w8a8"  # of (e) to (g)
PROMPT_TOKENS = 128
NEW_TOKENS = 64
# The simulated model obeys it; the token limit of the request then ends the answer.
ASK = "Write 4000 tokens about story number {number}."
FILLERS = (" and", " the", " a", " of", ".", "!", ",")


@cache
def profile(name: str = PROFILE) -> Profile:
    """The profile of that name."""
    return next(one for one in load_profiles() if one.name == name)


def cycle_s(new_tokens: int = NEW_TOKENS) -> float:
    """Seconds of one run on a board of (a) to (d): prefill and every further token."""
    board = profile()
    context = range(PROMPT_TOKENS + 1, PROMPT_TOKENS + new_tokens)
    decode_ms = sum(board.decode_ms(length) for length in context)
    return (board.prefill_ms(PROMPT_TOKENS) + decode_ms) / 1e3


def step_ms(name: str = PROFILE) -> float:
    """Milliseconds of one decode step, at the length of the prompt."""
    return profile(name).decode_ms(PROMPT_TOKENS)


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
