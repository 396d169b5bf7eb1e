"""What a board has done, in numbers: for one generation, and since the replica's start. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rkserve.core.messages import Timings, Usage
from rkserve.native.runtime import Perf


@dataclass(slots=True)
class BoardCounters:
    """Counters since the replica's start; their names are those of ``BoardReport``."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    aborted: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    memory_mb: float = 0.0
    pauses: int = 0
    parked: int = 0
    restored: int = 0
    batch_runs: int = 0
    batch_entries: int = 0
    batch_tail_ms: float = 0.0

    def count(self, usage: Usage, timings: Timings) -> None:
        """Add a generation that ended in order."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.prefill_tokens += timings.prefill_tokens
        self.prefill_ms += timings.prefill_ms
        self.decode_tokens += timings.decode_tokens
        self.decode_ms += timings.decode_ms
        self.memory_mb = timings.memory_mb or self.memory_mb


@dataclass(slots=True)
class GenerationCounters:
    """What one generation has cost so far, over all of its runs and pauses."""

    prompt_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    paused_s: float = 0.0
    prefill_ms: float = 0.0
    prefill_tokens: int = 0
    decode_ms: float = 0.0
    decode_tokens: int = 0
    memory_mb: float = 0.0
    batch: int = 1
    batch_wait_s: float = 0.0
    encode_ms: float = 0.0
    runs: int = 0
    continued: int = 0
    begun_tokens: int = 0  # of the answer, which came with the request

    def add(self, perf: Perf, reused: int) -> None:
        """Add a run. ``reused`` ids of its context were planned to be in the KV cache already."""
        if self.runs == 0:
            # In text mode only the runtime knows how many tokens the prompt became.
            sent = max(0, perf.prefill_tokens - self.begun_tokens)
            self.prompt_tokens = self.prompt_tokens or sent
            # The runtime's own count where it is less than planned: what it prefilled again was
            # not reused. A run without figures (no FINISH) is left with the plan.
            unread = self.prompt_tokens + self.begun_tokens - perf.prefill_tokens
            self.cached_tokens = max(0, min(reused, unread, self.prompt_tokens))
        self.runs += 1
        self.prefill_ms += perf.prefill_ms
        self.prefill_tokens += perf.prefill_tokens
        self.decode_ms += perf.decode_ms
        self.decode_tokens += perf.decode_tokens
        self.memory_mb = perf.memory_mb or self.memory_mb
        self.encode_ms += perf.encode_ms

    def usage(self, completion_tokens: int, reasoning_tokens: int = 0) -> Usage:
        """Return the token counts of the whole generation."""
        return Usage(self.prompt_tokens, completion_tokens, self.cached_tokens, reasoning_tokens)

    def timings(self) -> Timings:
        """Return the times of the whole generation."""
        return Timings(
            queue_ms=self.queue_s * 1e3,
            prefill_ms=self.prefill_ms,
            prefill_tokens=self.prefill_tokens,
            decode_ms=self.decode_ms,
            decode_tokens=self.decode_tokens,
            memory_mb=self.memory_mb,
            paused_ms=self.paused_s * 1e3,
            batch=self.batch,
            batch_wait_ms=self.batch_wait_s * 1e3,
            continued=self.continued,
            encode_ms=self.encode_ms,
        )
