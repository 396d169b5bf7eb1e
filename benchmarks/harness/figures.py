"""Figures from timed answers: rates, ratios with their uncertainty, hang-ups. Pure.

Times are seconds of one monotonic clock, durations in results are milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from benchmarks.harness.exchange import Exchange, HangUp
from rkserve.bench.figures import CONFIDENCE, Ratio, percentile
from rkserve.bench.processes import ProcessMemory, hold
from rkserve.bench.results import Machine

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of some durations or rates."""

    count: int
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(len(values), fmean(values), median(values), percentile(values, 0.99))


def ratio(of: Sequence[float], to: Sequence[float], rng: random.Random) -> Ratio:
    """Return the ratio of the medians, its interval by resampling both."""
    drawn = sorted(
        median(rng.choices(of, k=len(of))) / median(rng.choices(to, k=len(to)))
        for _ in range(RESAMPLES)
    )
    outside = (1 - CONFIDENCE) / 2
    return Ratio(
        median(of) / median(to), percentile(drawn, outside), percentile(drawn, 1 - outside)
    )


def ttft_ms(exchange: Exchange) -> float:
    """From the request to its first text."""
    return (exchange.content_s[0] - exchange.sent_s) * 1e3


def gaps_ms(exchange: Exchange) -> list[float]:
    """Times between texts that follow each other."""
    return [(after - before) * 1e3 for before, after in pairwise(exchange.content_s)]


def decode_rate(exchange: Exchange) -> float:
    """Tokens per second between the first text and the last."""
    return (exchange.completion_tokens - 1) / (exchange.content_s[-1] - exchange.content_s[0])


def tail_ms(exchange: Exchange) -> float:
    """From the last text to the end of the answer."""
    return (_end_s(exchange) - exchange.content_s[-1]) * 1e3


def whole_rate(exchange: Exchange) -> float:
    """Tokens per second from the request to the end of its answer."""
    return exchange.completion_tokens / (_end_s(exchange) - exchange.sent_s)


def never_idle_rate(exchanges: Sequence[Exchange]) -> float:
    """Tokens per second of a board that goes from one of these runs straight to the next."""
    took_s = sum(_end_s(one) - one.sent_s for one in exchanges)
    return sum(one.completion_tokens for one in exchanges) / took_s


def complete(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Return those that were answered to the end."""
    return [one for one in exchanges if one.end_s is not None and not one.error]


def tokens_per_text(exchanges: Iterable[Exchange]) -> float:
    """Tokens that one event brings on average; 1 but for characters that take several tokens.

    Above that the path is behind: what a board has ready when it is asked travels together.
    """
    done = complete(exchanges)
    texts = sum(len(one.content_s) for one in done)
    return sum(one.completion_tokens for one in done) / texts if texts else 0.0


def tokens_between(exchanges: Sequence[Exchange], start_s: float, end_s: float) -> float:
    """Tokens that arrived in a window, also those of answers that it cuts."""
    texts = sum(start_s <= at_s < end_s for one in exchanges for at_s in one.content_s)
    return texts * tokens_per_text(exchanges)


def board_rates(
    exchanges: Iterable[Exchange], start_s: float, end_s: float, load_end_s: float
) -> dict[str, float]:
    """Tokens per second of each board, from its first answer's end in the window to a later one's.

    The last is the first end after ``end_s``, so that whole cycles are counted, with every idle
    moment between them. A board that finishes nothing after the window is taken to have idled until
    the load's end.
    """
    ends: dict[str, list[tuple[float, int]]] = {}
    done = complete(exchanges)
    hold([f"{count} x an answer names no board" for count in [_nameless(done)] if count])
    for one in done:
        ends.setdefault(one.board, []).append((_end_s(one), one.completion_tokens))
    return {
        board: _rate_of_ends(sorted(found), start_s, end_s, load_end_s)
        for board, found in ends.items()
    }


def _nameless(exchanges: Iterable[Exchange]) -> int:
    return sum(not one.board for one in exchanges)


def _rate_of_ends(
    ends: Sequence[tuple[float, int]], start_s: float, end_s: float, load_end_s: float
) -> float:
    first_s = next((at_s for at_s, _ in ends if at_s >= start_s), load_end_s)
    last_s = next((at_s for at_s, _ in ends if at_s >= end_s), load_end_s)
    tokens = sum(count for at_s, count in ends if first_s < at_s <= last_s)
    return tokens / (last_s - first_s) if last_s > first_s else 0.0


def flaws(exchanges: Iterable[Exchange], prompt_tokens: int, completion_tokens: int) -> list[str]:
    """Note what makes answers unfit for measuring; nothing where all were as they should be."""
    found: dict[str, int] = {}
    for one in exchanges:
        for flaw in _flaws_of(one, prompt_tokens, completion_tokens):
            found[flaw] = found.get(flaw, 0) + 1
    return [f"{count} x {flaw}" for flaw, count in found.items()]


def _flaws_of(one: Exchange, prompt_tokens: int, completion_tokens: int) -> list[str]:
    if one.error:
        return [one.error]
    if one.end_s is None:
        return []
    counts = {
        "prompt tokens": (one.prompt_tokens, prompt_tokens),
        "completion tokens": (one.completion_tokens, completion_tokens),
        "cached tokens": (one.cached_tokens, 0),
    }
    return [f"{is_} {name}, not {want}" for name, (is_, want) in counts.items() if is_ != want]


def _end_s(exchange: Exchange) -> float:
    assert exchange.end_s is not None  # callers pass answers that were complete
    return exchange.end_s


def freed_ms(hang_up: HangUp) -> float:
    """From a hang-up to the board being free for the next run, and a little more.

    The next answer's first text is preceded by its prefill, whose time the runtime itself reports.
    The rest is the end of the cancelled run, the start of the next one and the way of its first
    text to the client, so that the figure is never below the time in question.
    """
    return (hang_up.next.content_s[0] - hang_up.closed_s) * 1e3 - hang_up.next.prefill_ms


def flaws_of_hang_ups(
    hang_ups: Sequence[HangUp], prompt_tokens: int, completion_tokens: int
) -> list[str]:
    """Note what makes hang-ups unfit for measuring; the counts are of the answers behind them."""
    found = flaws([one.next for one in hang_ups], prompt_tokens, completion_tokens)
    not_left = sum(one.left.end_s is not None or not one.left.content_s for one in hang_ups)
    unanswered = sum(one.next.end_s is None or not one.next.content_s for one in hang_ups)
    # An answer whose headers came before it had a board names none.
    apart = sum(one.next.board not in ("", one.left.board) for one in hang_ups)
    early = sum(
        bool(one.next.content_s) and one.next.content_s[0] <= one.closed_s for one in hang_ups
    )
    counts = {
        "an answer was not left in mid-stream": not_left,
        "nothing was answered after a hang-up": unanswered,
        "the next answer came from another board": apart,
        "the next answer did not wait for the hang-up": early,
    }
    return [*found, *(f"{count} x {flaw}" for flaw, count in counts.items() if count)]


def largest(memories: Mapping[str, Sequence[ProcessMemory]], part: str) -> int | None:
    """Resident bytes of a part's largest process, or None where there is none."""
    return max((one.rss for one in memories.get(part, ())), default=None)


def machine_line(machine: Machine) -> str:
    """Return the machine as a paragraph of a report."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Machine: {machine.cores} cores ({machine.processor}), {machine.memory_gb:.0f} GB; "
        f"{versions}. Boards, engines, cluster and clients share it.\n"
    )
