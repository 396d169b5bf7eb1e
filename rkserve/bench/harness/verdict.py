"""A target of the benchmark beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """A target and what was measured. ``detail`` is how certain that is."""

    what: str
    measured: float
    bound: float
    at_most: bool
    unit: str = ""
    detail: str = ""

    @property
    def reached(self) -> bool:
        """Whether the target holds; the interval of the measurement is not counted in."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound
