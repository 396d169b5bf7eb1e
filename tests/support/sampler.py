"""Some cases of tests that try every possible one."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Sampler:
    """Draws one of so many cases; the seed, which the header of a run shows, says which."""

    every: int
    seed: int

    def __call__(self, cases: Iterable[T]) -> list[T]:
        """Return the cases to try, in their order, and at least one."""
        there = list(cases)
        count = -(-len(there) // self.every)
        drawn = random.Random(self.seed).sample(range(len(there)), count)
        return [there[at] for at in sorted(drawn)]
