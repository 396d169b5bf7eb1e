"""The reported figures of the measurements, and their targets. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.exchange import Exchange, HangUp
from benchmarks.harness.figures import (
    Spread,
    board_rates,
    complete,
    decode_rate,
    freed_ms,
    gaps_ms,
    largest,
    never_idle_rate,
    ratio,
    tokens_between,
    tokens_per_text,
    ttft_ms,
    whole_rate,
)
from benchmarks.harness.prompts import step_ms
from benchmarks.serving.cases import Loaded, Pair
from benchmarks.serving.oneboard_figures import (
    ParkedFigures,
    PauseFigures,
    parked_verdicts,
    pause_verdicts,
)
from rkserve.bench.figures import SEED, Ratio
from rkserve.bench.results import TargetVerdict

TTFT_AT_MOST = 1.05
RATE_AT_LEAST = 0.99
SUM_AT_LEAST = 0.99
REPLICA_AT_MOST_MB = 250.0
FREED_AFTER_STEP_MS = 200.0


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one side of (a) and (b)."""

    ttft_ms: Spread
    gap_ms: Spread
    decode_rate: Spread
    whole_rate: Spread
    never_idle_rate: float

    @classmethod
    def of(cls, exchanges: Sequence[Exchange]) -> RunFigures:
        """Sum up complete answers, at least one."""
        return cls(
            ttft_ms=Spread.of([ttft_ms(one) for one in exchanges]),
            gap_ms=Spread.of([gap for one in exchanges for gap in gaps_ms(one)]),
            decode_rate=Spread.of([decode_rate(one) for one in exchanges]),
            whole_rate=Spread.of([whole_rate(one) for one in exchanges]),
            never_idle_rate=never_idle_rate(exchanges),
        )


@dataclass(frozen=True, slots=True)
class PairFigures:
    """(a), (b) and b / a. Without (b), the last three are None."""

    alone: RunFigures
    through: RunFigures | None
    ttft: Ratio | None
    decode: Ratio | None
    whole: Ratio | None


@dataclass(frozen=True, slots=True)
class HangUpFigures:
    """The time that a board is busy for a client that has left, in milliseconds.

    A run can end at a token only, so that it may take ``step_ms`` in any case.
    """

    freed_ms: Spread
    largest_ms: float
    step_ms: float


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of all boards together in a window.

    ``of_sum`` is None where there is no (a) to it, and ``unqueued_ttft_ms`` where no answer of the
    window ended. ``work_ms_per_token`` is the CPU time above what
    the same processes take while they idle, or None where that was not measured.
    """

    rate: float
    of_sum: float | None
    answers_per_s: float
    tokens_per_event: float
    ttft_ms: Spread
    unqueued_ttft_ms: Spread | None
    gap_ms: Spread
    cpu_ms_per_token: dict[str, float]
    work_ms_per_token: float | None


def pair_figures(pair: Pair) -> PairFigures:
    """Sum up (a), and (b) beside it."""
    alone = RunFigures.of(pair.alone)
    if not pair.through:
        return PairFigures(alone, None, None, None, None)
    rng = random.Random(SEED)
    ttft, decode, whole = (
        ratio([of(one) for one in pair.through], [of(one) for one in pair.alone], rng)
        for of in (ttft_ms, decode_rate, whole_rate)
    )
    return PairFigures(alone, RunFigures.of(pair.through), ttft, decode, whole)


def hang_up_figures(hang_ups: Sequence[HangUp]) -> HangUpFigures:
    """Sum up hang-ups, at least one."""
    took_ms = [freed_ms(one) for one in hang_ups]
    return HangUpFigures(Spread.of(took_ms), max(took_ms), step_ms())


def load_figures(loaded: Loaded, board_rate: float | None) -> LoadFigures:
    """Sum up a window. ``board_rate`` is what (a) says of one board that is never idle."""
    start_s, end_s = loaded.start_s, loaded.end_s
    arrived = tokens_between(loaded.exchanges, start_s, end_s)
    begun = [e for e in loaded.exchanges if e.content_s and start_s <= e.content_s[0] < end_s]
    ends = [e for e in complete(loaded.exchanges) if e.end_s and start_s <= e.end_s < end_s]
    # Only answers that ended say how long they were queued.
    unqueued_ms = [ttft_ms(one) - one.queue_ms for one in complete(begun)]
    rate = arrived / (end_s - start_s)
    of_sum = None
    if board_rate is not None:
        rate = sum(board_rates(loaded.exchanges, start_s, end_s, loaded.load_end_s).values())
        of_sum = rate / (loaded.load.boards * board_rate)
    return LoadFigures(
        rate=rate,
        of_sum=of_sum,
        answers_per_s=len(ends) / (end_s - start_s),
        tokens_per_event=tokens_per_text(loaded.exchanges),
        ttft_ms=Spread.of([ttft_ms(one) for one in begun]),
        unqueued_ttft_ms=Spread.of(unqueued_ms) if unqueued_ms else None,
        gap_ms=Spread.of([gap for one in begun for gap in gaps_ms(one)]),
        cpu_ms_per_token={part: ms / arrived for part, ms in loaded.cpu.by_part_ms.items()},
        work_ms_per_token=_work_ms(loaded) / arrived if loaded.idle.wall_ms else None,
    )


def _work_ms(loaded: Loaded) -> float:
    idle_share = sum(loaded.idle.by_part_ms.values()) / loaded.idle.wall_ms
    return sum(loaded.cpu.by_part_ms.values()) - idle_share * loaded.cpu.wall_ms


def verdicts(
    pair: PairFigures | None,
    hang_ups: HangUpFigures | None,
    loads: Iterable[tuple[Loaded, LoadFigures]],
    parked: ParkedFigures | None = None,
    pauses: Iterable[PauseFigures] = (),
) -> list[TargetVerdict]:
    """Hold what was measured to the targets."""
    loads = list(loads)
    found = [] if pair is None else _verdicts_of_pair(pair)
    if hang_ups is not None:
        what = f"(b) hang-up to free board, p99: decode step + {FREED_AFTER_STEP_MS:.0f} ms"
        bound = hang_ups.step_ms + FREED_AFTER_STEP_MS
        found.append(TargetVerdict(what, hang_ups.freed_ms.p99, bound, at_most=True, unit="ms"))
    for loaded, figures in loads:
        if figures.of_sum is not None:
            what = f"(c) tokens/s of the sum: {loaded.load.name}"
            found.append(TargetVerdict(what, figures.of_sum, SUM_AT_LEAST, at_most=False))
    sizes = [largest(loaded.memories, "board replica") for loaded, _ in loads]
    known = [size / 1e6 for size in sizes if size is not None]
    if known:
        what = "board replica without its engine, resident (the largest)"
        found.append(TargetVerdict(what, max(known), REPLICA_AT_MOST_MB, at_most=True, unit="MB"))
    return [
        *found,
        *(parked_verdicts(parked) if parked is not None else ()),
        *pause_verdicts(pauses),
    ]


def _verdicts_of_pair(pair: PairFigures) -> list[TargetVerdict]:
    bounds = (
        ("(b) / (a) TTFT, medians", pair.ttft, TTFT_AT_MOST, True),
        ("(b) / (a) tokens/s from first to last, medians", pair.decode, RATE_AT_LEAST, False),
        ("(b) / (a) tokens/s of the whole answer, medians", pair.whole, RATE_AT_LEAST, False),
    )
    return [
        TargetVerdict(what, of.value, bound, at_most, detail=f"{of.low:.3f} to {of.high:.3f}")
        for what, of, bound, at_most in bounds
        if of is not None
    ]
