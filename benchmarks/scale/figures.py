"""Figures of a simulation, from what it has seen. Pure."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale.router import Spent
from benchmarks.scale.world import Seen


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulation in figures. decisions in CPU time, all else simulated."""

    name: str
    turns: int
    hit: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tokens_per_s: float
    busy: float
    decide_p50_us: float
    decide_p99_us: float
    hash_p50_us: float
    report_p50_us: float
    decisions: int


def outcome(name: str, seen: Seen, spent: Spent, boards: int) -> Outcome:
    """Return what came out."""
    return Outcome(
        name=name,
        turns=seen.ended,
        hit=seen.cached / max(1, seen.prompt),
        ttft_p50_ms=quantile(seen.ttft_ms, 0.5),
        ttft_p90_ms=quantile(seen.ttft_ms, 0.9),
        ttft_p99_ms=quantile(seen.ttft_ms, 0.99),
        tokens_per_s=seen.tokens / max(seen.end_s, 1e-9),
        busy=seen.board_ms / 1e3 / boards / max(seen.end_s, 1e-9),
        decide_p50_us=quantile(spent.decide_us, 0.5),
        decide_p99_us=quantile(spent.decide_us, 0.99),
        hash_p50_us=quantile(spent.hash_us, 0.5),
        report_p50_us=quantile(spent.report_us, 0.5),
        decisions=len(spent.decide_us),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share stays at or below; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 where all have the same, 1/n where one has all."""
    total = sum(shares)
    return total * total / (len(shares) * sum(one * one for one in shares)) if total else 1.0


def resident_mb() -> float:
    """The largest memory that this process had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
