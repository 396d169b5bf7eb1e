"""What a board has done, in numbers: of one run, and since the replica's start. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rkserve.board.engine import RunEnded
from rkserve.board.job import Job
from rkserve.messages import Timings, Usage


@dataclass(slots=True)
class Figures:
    """Counters since the replica's start; their names are those of ``BoardReport``."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    engine_starts: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    memory_mb: float = 0.0

    def count(self, usage: Usage, timings: Timings) -> None:
        """Add a run that ended in order."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.prefill_tokens += timings.prefill_tokens
        self.prefill_ms += timings.prefill_ms
        self.decode_tokens += timings.decode_tokens
        self.decode_ms += timings.decode_ms
        self.memory_mb = timings.memory_mb


def measure(job: Job, ended: RunEnded) -> tuple[Usage, Timings]:
    """Return what a run used and how long it took."""
    perf, generation = ended.perf, job.generation
    # In text mode only the runtime knows how many tokens the prompt became.
    prompt_tokens = len(generation.request.prompt_ids) or perf.prefill_tokens
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=len(generation.token_ids),
        # The runtime's own count where it is less than planned: what it prefilled again was not
        # reused. A run without figures (no FINISH) is left with the plan.
        cached_tokens=max(0, min(job.reused, prompt_tokens - perf.prefill_tokens)),
    )
    timings = Timings(
        queue_ms=(job.started_s - job.arrived_s) * 1e3,
        prefill_ms=perf.prefill_ms,
        prefill_tokens=perf.prefill_tokens,
        decode_ms=perf.decode_ms,
        decode_tokens=perf.decode_tokens,
        memory_mb=perf.memory_mb,
    )
    return usage, timings
