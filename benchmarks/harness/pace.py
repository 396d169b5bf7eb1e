"""How fast the simulated boards of the benchmark are, by their profiles."""

from __future__ import annotations

from functools import cache

from rkserve.native.sim.profiles import Profile
from rkserve.native.sim.profiles import load as load_profiles

PROFILE = "rk3588-qwen2.5-1.5b-w8a8"  # of (a) to (d)
SMALL_PROFILE = "rk3588-qwen3-0.6b-w8a8"  # of (e) to (g)
PROMPT_TOKENS = 128
NEW_TOKENS = 64


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
