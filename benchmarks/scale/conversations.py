"""Conversations as numbers: lengths, times, and token ids in place of words. Pure.

The ids of a conversation are made when they are needed: a hundred thousand of them would not fit
into memory otherwise. Two contexts agree exactly as far as their words do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

MOST_TOKENS = 1 << 13  # of one conversation: where the ids of the next one begin
SYSTEM_IDS = 1 << 40  # where the ids of system prompts begin
LONGEST = 4.0  # times the mean


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of conversations; lengths in tokens, all means of long-tailed distributions.

    ``rate`` is new sessions per second. The turns of a session follow Pareto's law up to
    ``most_turns``, which of ``systems`` prompts it has Zipf's. Nothing is said beyond ``longest``.
    """

    sessions: int = 200
    rate: float = 1.0
    turns: float = 6.0
    most_turns: int = 12
    think_s: float = 60.0
    systems: int = 8
    system_tokens: int = 200
    user_tokens: int = 50
    answer_tokens: int = 64
    spread: float = 0.5
    longest: int = 3800


@dataclass(frozen=True, slots=True)
class Context:
    """The first ``tokens`` of a conversation: its system prompt and then its own words.

    A system prompt has one length wherever it is used; -1 stands for none, of no tokens.
    """

    session: int
    system: int
    system_tokens: int
    tokens: int

    def common(self, other: Context) -> int:
        """Return how many tokens both begin with."""
        if self.system != other.system:
            return 0
        if self.session == other.session:
            return min(self.tokens, other.tokens)
        return min(self.system_tokens, self.tokens, other.tokens)

    def extends(self, other: Context) -> bool:
        """Return whether this one is longer and begins with all of the other."""
        return self.common(other) == other.tokens < self.tokens

    def cut(self, tokens: int) -> Context:
        """Return its first or, in the same conversation, further tokens."""
        return Context(self.session, self.system, self.system_tokens, tokens)

    def ids(self) -> tuple[int, ...]:
        """Return ids that no other conversation has, but for its system prompt's."""
        system = SYSTEM_IDS + self.system * MOST_TOKENS
        shared = min(self.system_tokens, self.tokens)
        own = self.session * MOST_TOKENS
        return (*range(system, system + shared), *range(own, own + self.tokens - shared))


@dataclass(slots=True)
class Talk:
    """One session while it goes on."""

    number: int
    turns_left: int
    context: Context
    seed: int
    answer: int = 0

    def note(self, shape: Shape) -> None:
        """The user says something; the context is the next prompt then, and ``answer`` drawn."""
        # A generator for each session would take more memory than all that Routers remember.
        rng = self._rng("said")
        user = length(rng, shape.user_tokens, shape.spread)
        self.context = self.context.cut(self.context.tokens + user)
        self.answer = length(rng, shape.answer_tokens, shape.spread)
        self.turns_left -= 1

    def over(self, shape: Shape) -> bool:
        """Return whether nothing more is said, or nothing more fits."""
        return self.turns_left <= 0 or self.context.tokens >= shape.longest

    def pause_s(self, shape: Shape) -> float:
        """Draw how long the user thinks."""
        return min(-math.log(1 - self._rng("thought").random()), LONGEST) * shape.think_s

    def _rng(self, purpose: str) -> Random:
        return Random(f"{self.seed} {self.number} {self.turns_left} {purpose}")


def talk(shape: Shape, seed: int, number: int, turns: int) -> Talk:
    """Return one session before its first words."""
    rng = Random(f"{seed} {number}")
    system = _rank(rng, shape.systems)
    size = shape.system_tokens if shape.systems else 0
    return Talk(number, turns, Context(number, system, size, size), seed)


def turns_of(shape: Shape, rng: Random) -> int:
    """Draw how many turns one session has: mostly few, some many."""
    # Pareto with the mean asked for, as far as the cap leaves it.
    alpha = shape.turns / (shape.turns - 1) if shape.turns > 1 else math.inf
    return max(1, min(shape.most_turns, int((1 - rng.random()) ** (-1 / alpha) + 0.5)))


def length(rng: Random, mean: int, spread: float) -> int:
    """Draw from a log-normal distribution with this mean."""
    drawn = mean * math.exp(rng.gauss(0, spread) - spread * spread / 2)
    return max(1, round(min(drawn, LONGEST * mean)))


def _rank(rng: Random, count: int) -> int:
    if not count:
        return -1
    # Zipf's law with exponent 1, by inverting its integral.
    return min(count - 1, int((count + 1) ** rng.random()) - 1)
