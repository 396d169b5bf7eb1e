"""Case (g), pure: what a token of a batch costs in the binding, and how fast a batch is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run: the callbacks that came, the tokens that the runtime counts, and when it was.

    ``cpu_s`` is the CPU time of the whole process, the simulated library's included.
    """

    steps: int
    tokens: int
    first_s: float
    last_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Runs with boards that take no time."""

    n_batch: int
    runs: tuple[BatchRun, ...]

    @property
    def us_per_step(self) -> float:
        """Microseconds of CPU for one callback, the median of the runs."""
        return median(run.cpu_s / run.steps for run in self.runs) * 1e6

    @property
    def us_per_token(self) -> float:
        """Microseconds of CPU for one token of one entry."""
        return self.us_per_step / self.n_batch


@dataclass(frozen=True, slots=True)
class BatchPace:
    """A run at a board's pace, with the gain that the simulator was told to give."""

    n_batch: int
    gain: str
    run: BatchRun

    @property
    def rate(self) -> float:
        """Tokens per second of all entries together, from the first step to the last."""
        return self.n_batch * (self.run.steps - 1) / (self.run.last_s - self.run.first_s)


@dataclass(frozen=True)
class Batches:
    """Everything that (g) found."""

    costs: Sequence[BatchCost]
    paces: Sequence[BatchPace]

    def rate(self, n_batch: int, gain: str) -> float | None:
        """Tokens per second, or None where that was not measured; alone nothing is gained."""
        fits = (p for p in self.paces if p.n_batch == n_batch and (p.gain == gain or n_batch == 1))
        return next((pace.rate for pace in fits), None)


def flaws_of_batch(runs: Iterable[BatchRun], n_batch: int, max_tokens: int) -> list[str]:
    """Say what makes runs unfit for measuring: every entry goes on to the limit."""
    return [
        f"{run.steps} steps with {run.tokens} tokens in a batch of {n_batch}, not {max_tokens} each"
        for run in runs
        if (run.steps, run.tokens) != (max_tokens, max_tokens * n_batch)
    ]
