"""Figures of the token path: CPU time per token, added TTFT, and delays by long prompts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.harness.exchange import Exchange
from benchmarks.harness.figures import Spread, complete, ttft_ms
from benchmarks.serving.cases import Loaded
from benchmarks.serving.summary import LoadFigures, load_figures
from benchmarks.serving.tokenpath import (
    PROMPT_BYTES,
    STREAMS,
    TOKEN_MS,
    LongPrompt,
    Shown,
    Taken,
    TokenPaths,
)
from rkserve.bench.processes import hold
from rkserve.bench.results import TargetVerdict

PATH = ("proxy", "router", "board replica")  # whose CPU time a token costs
COST_AT_MOST = 0.15  # of the plain way's
ADDED_AT_MOST_MS = {1: 3.0, STREAMS: 15.0}
HELD_UP_AT_MOST_MS = 20.0
CEILING_AT_LEAST = 15_000.0


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one token, in milliseconds: all of it, and without what idling takes in that time."""

    by_part: dict[str, float]
    idle: float

    @property
    def gross(self) -> float:
        """Proxy, Router and boards together."""
        return sum(self.by_part.values())

    @property
    def net(self) -> float:
        """Without their idle use."""
        return self.gross - self.idle


@dataclass(frozen=True, slots=True)
class LoadTaken:
    """One load on one way. ``added_ms`` is what TTFT is above the runtime's own."""

    figures: LoadFigures
    added_ms: Spread
    cost: Cost


@dataclass(frozen=True, slots=True)
class ShownFigures:
    """Long prompts of one size: how long until they were read, and whom they held up how long.

    ``held_up_ms`` are the largest gaps of other streams beyond the token's own time; ``calm_ms``
    the same over as much time when nothing else went on.
    """

    size: int
    answered_ms: Spread
    held_up_ms: Spread
    largest_ms: float
    calm_ms: Spread
    calm_largest_ms: float


@dataclass(frozen=True, slots=True)
class WayFigures:
    """One way."""

    name: str
    lone_added_ms: Spread
    one: LoadTaken
    many: LoadTaken
    shown: tuple[ShownFigures, ...]
    ceiling: LoadFigures


def path_figures(found: TokenPaths) -> list[WayFigures]:
    """Sum up all ways."""
    own_ms = median(ttft_ms(one) - one.prefill_ms for one in found.alone)
    return [way_figures(taken, own_ms) for taken in found.taken]


def way_figures(taken: Taken, own_ms: float) -> WayFigures:
    """Sum up one way. ``own_ms`` is the binding's TTFT beyond the prefill that it reports."""
    idle = taken.one  # measured on the same boards
    return WayFigures(
        taken.way.name,
        _added_ms(taken.lone, own_ms),
        _load(taken.one, idle, own_ms),
        _load(taken.many, idle, own_ms),
        tuple(_shown(taken.shown, size) for size in PROMPT_BYTES),
        load_figures(taken.ceiling, None),
    )


def _load(loaded: Loaded, idle: Loaded, own_ms: float) -> LoadTaken:
    figures = load_figures(loaded, None)
    parts = {part: figures.cpu_ms_per_token.get(part, 0.0) for part in PATH}
    share = sum(idle.idle.by_part_ms.get(part, 0.0) for part in PATH) / idle.idle.wall_ms
    tokens = figures.rate * (loaded.end_s - loaded.start_s)
    cost = Cost(parts, share * loaded.cpu.wall_ms / tokens)
    return LoadTaken(figures, _added_ms(loaded, own_ms), cost)


def _added_ms(loaded: Loaded, own_ms: float) -> Spread:
    window = (loaded.start_s, loaded.end_s)
    added = [
        ttft_ms(one) - one.prefill_ms - own_ms  # no request waits for another one here
        for one in complete(loaded.exchanges)
        if one.content_s and window[0] <= one.content_s[0] < window[1]
    ]
    name = loaded.load.name
    hold([] if added else [f"{name}: no answer that began in the window came to its end"])
    return Spread.of(added)


def _shown(found: Shown, size: int) -> ShownFigures:
    prompts = [one for one in found.prompts if one.size == size]
    held_up = [_held_up_ms(found.against, one.sent_s, one.answered_s) for one in prompts]
    calm = [_held_up_ms(found.against, *window) for window in _calm_windows(found, prompts)]
    return ShownFigures(
        size,
        Spread.of([(one.answered_s - one.sent_s) * 1e3 for one in prompts]),
        Spread.of(held_up),
        max(held_up),
        Spread.of(calm),
        max(calm),
    )


def _calm_windows(found: Shown, prompts: Sequence[LongPrompt]) -> Iterable[tuple[float, float]]:
    """As many stretches of the calm time, as long as the prompts took."""
    start_s, end_s = found.calm_s
    step_s = (end_s - start_s) / len(prompts)
    for number, one in enumerate(prompts):
        at_s = start_s + number * step_s
        yield at_s, at_s + (one.answered_s - one.sent_s)


def _held_up_ms(streams: Iterable[Exchange], start_s: float, end_s: float) -> float:
    """Return the largest gap between tokens of any stream that touches a stretch of time."""
    gaps = [
        after - before
        for one in streams
        for before, after in pairwise(one.content_s)
        if after > start_s and before < end_s
    ]
    return max(0.0, max(gaps, default=0.0) * 1e3 - TOKEN_MS)


def path_verdicts(ways: Sequence[WayFigures]) -> list[TargetVerdict]:
    """Hold the fast way, which is the last one, to the targets."""
    plain, fast = ways[0], ways[-1]
    found: list[TargetVerdict] = []
    if fast is not plain:
        # The idle use of boards grows with their number: it is no token's.
        what = f"(h) CPU per token above idle at {STREAMS} streams, of the plain way's"
        ratio = fast.many.cost.net / plain.many.cost.net
        gross = fast.many.cost.gross / plain.many.cost.gross
        found.append(
            TargetVerdict(what, ratio, COST_AT_MOST, at_most=True, detail=f"with it {gross:.3f}")
        )
    added = (
        (1, "1 stream, 1 board", fast.lone_added_ms),
        (1, f"1 stream, {STREAMS} boards", fast.one.added_ms),
        (STREAMS, f"{STREAMS} streams, {STREAMS} boards", fast.many.added_ms),
    )
    for streams, where, spread in added:
        what = f"(h) TTFT above the runtime's own, p50, {where}"
        bound = ADDED_AT_MOST_MS[streams]
        found.append(TargetVerdict(what, spread.p50, bound, at_most=True, unit="ms"))
    for shown in fast.shown:
        # What streams stand still with nothing beside them is no prompt's doing.
        what = f"(h) a prompt of {shown.size // 1000} KB holds up others, beyond the calm, by"
        detail = f"{shown.largest_ms:.1f}, calm {shown.calm_largest_ms:.1f}"
        found.append(
            TargetVerdict(
                what,
                max(0.0, shown.largest_ms - shown.calm_largest_ms),
                HELD_UP_AT_MOST_MS,
                at_most=True,
                unit="ms",
                detail=detail,
            )
        )
    what = "(h) tokens/s through one Router, boards that take no time"
    found.append(TargetVerdict(what, fast.ceiling.rate, CEILING_AT_LEAST, at_most=False))
    return found
