"""From outcomes to figures: percentiles with intervals, rates, goodput, prefix hits, ratios. Pure.

Intervals are of 95 %: those of percentiles by the ranks between which the true one lies, without
any assumption about the distribution; those of ratios by resampling sessions, because turns of one
session depend on each other. Figures of too few answers are None.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from rkserve.bench.outcome import NO_ERRORS, OutcomeKind, RequestOutcome
from rkserve.bench.player import PlayedRun

CONFIDENCE = 0.95
SEED = 0  # of the resampling: the same measurements give the same interval
Pair = tuple[float, float]  # a value and its weight, or a part and its whole
SHARES = (0.5, 0.9, 0.99)
Z = 1.959964  # of the normal distribution, for CONFIDENCE
RESAMPLES = 1000
BUSY_SHARE, LATE_MS = 0.8, 25.0  # beyond this the load generator measures itself


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; None is no limit.

    ``itl_ms`` is for the mean time per token after the first, ``gap_ms`` for the longest silence
    between two texts.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    gap_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, one: RequestOutcome) -> bool:
        """Return True if an answer was complete and within the limits."""
        return one.ok and (
            _within(one.ttft_ms, self.ttft_ms)
            and _within(one.e2e_ms, self.e2e_ms)
            and _within(one.token_ms or 0.0, self.itl_ms)
            and (self.gap_ms is None or _within(max(one.gaps_ms, default=0.0), self.gap_ms))
        )

    def __str__(self) -> str:
        """Return the limits as text."""
        words = {"ttft_ms": "TTFT", "itl_ms": "per token", "gap_ms": "gap", "e2e_ms": "end-to-end"}
        limits = asdict(self).items()
        limits_text = [
            f"{words[name]} ≤ {limit:g} ms" for name, limit in limits if limit is not None
        ]
        return ", ".join(limits_text) or "answered to the end"


def parse_slo(text: str) -> Slo:
    """Parse limits from the command line. Raises ``ValueError``."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        field = f"{name.strip()}_ms"
        if field not in Slo.__dataclass_fields__:
            raise ValueError(f"{name.strip()!r} is none of ttft, itl, gap, e2e")
        try:
            limits[field] = float(value)
        except ValueError:
            raise ValueError(f"{part!r} is not a limit in milliseconds") from None
        if not limits[field] > 0:
            raise ValueError(f"{part!r}: a limit is more than 0")
    return Slo(**limits)


def _within(value_ms: float, limit_ms: float | None) -> bool:
    return limit_ms is None or value_ms <= limit_ms


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of them lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two medians, and between which two it lies with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Percentile:
    """A percentile, and between which values the true one lies; None where too few were seen."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, ordered: Sequence[float], share: float) -> Percentile:
        """Return a percentile of at least one value, in order."""
        count = len(ordered)
        middle, reach = count * share, Z * math.sqrt(count * share * (1 - share))
        low, high = math.floor(middle - reach), math.ceil(middle + reach)
        value = percentile(ordered, share)
        if low < 0 or high >= count:
            return cls(value, None, None)
        return cls(value, ordered[low], ordered[high])


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of some durations."""

    count: int
    mean: float
    largest: float
    p50: Percentile
    p90: Percentile
    p99: Percentile

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Return the distribution, or None of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        cuts = (Percentile.of(ordered, share) for share in SHARES)
        return cls(len(ordered), fmean(ordered), ordered[-1], *cuts)


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """The prefill that the servers' caches saved, in tokens.

    ``reporting`` is the number of answers with it, ``reusable`` the tokens of previous turns.
    """

    reporting: int
    prompt: int
    cached: int
    reusable: int
    hits: int

    @property
    def ratio(self) -> float | None:
        """Share of all prompt tokens that were not prefilled."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def of_reusable(self) -> float | None:
        """Cached tokens by what the same sessions could have reused; shared prompts come on top."""
        return self.cached / self.reusable if self.reusable else None


@dataclass(frozen=True, slots=True)
class GeneratorFigures:
    """The load of the generator itself; ``doubt`` warns if it may have limited the results."""

    cpu_share: float
    lag_p99_ms: float
    late_p99_ms: float
    late_most_ms: float
    us_per_event: float

    @property
    def doubt(self) -> str:
        """Return a warning if the load generator may have limited the figures."""
        reasons = []
        if self.cpu_share > BUSY_SHARE:
            reasons.append(f"it used {self.cpu_share:.0%} of a core")
        if self.late_p99_ms > LATE_MS:
            reasons.append(
                f"one request in a hundred was sent {self.late_p99_ms:.0f} ms late or more"
            )
        if self.lag_p99_ms > LATE_MS:
            reasons.append(f"its loop came {self.lag_p99_ms:.0f} ms late to one thing in a hundred")
        if not reasons:
            return ""
        return f"The load generator itself is in these figures: {', '.join(reasons)}."


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """The figures of one run. Rates are per second of the window, durations in milliseconds."""

    target: str
    asked: int
    answered: int
    cut: int
    errors: Mapping[str, int]
    window_s: float
    offered_rate: float
    answer_rate: float
    token_rate: float
    good: int
    good_share: float
    goodput: float
    good_token_rate: float
    ttft_ms: Distribution | None
    gap_ms: Distribution | None
    token_ms: Distribution | None
    e2e_ms: Distribution | None
    queue_ms: Distribution | None
    refused_ms: Distribution | None
    retry_after_s: Distribution | None
    prefix: PrefixReuse
    tokens_per_event: float
    without_usage: int
    not_streamed: int
    continued: int
    finish_reasons: Mapping[str, int]
    boards: Mapping[str, int]
    generator: GeneratorFigures
    interrupted: bool


def figures(played: PlayedRun, slo: Slo) -> TraceFigures:
    """Sum up a run."""
    start_s, end_s = played.window_s
    seconds = max(end_s - start_s, 1e-9)
    asked = [one for one in played.outcomes if one.asked.due_s >= start_s]
    ended = [one for one in asked if one.kind is not OutcomeKind.CUT]
    answered = [one for one in asked if one.ok]
    good = [one for one in answered if slo.met(one)]
    # Rates count what happened in the window, whenever it was asked.
    done = [o for o in played.outcomes if o.ok and o.end_s and start_s <= o.end_s <= end_s]
    good_done = [one for one in done if slo.met(one)]
    return TraceFigures(
        target=played.target,
        asked=len(asked),
        answered=len(answered),
        cut=len(asked) - len(ended),
        errors=dict(Counter(one.label for one in asked if one.kind not in NO_ERRORS).most_common()),
        window_s=end_s - start_s,
        offered_rate=len(asked) / seconds,
        answer_rate=len(done) / seconds,
        token_rate=tokens_between(played.outcomes, start_s, end_s) / seconds,
        good=len(good),
        good_share=len(good) / len(ended) if ended else 0.0,
        goodput=len(good_done) / seconds,
        good_token_rate=sum(one.completion_tokens for one in good_done) / seconds,
        ttft_ms=Distribution.of([one.ttft_ms for one in answered]),
        gap_ms=Distribution.of([gap for one in answered for gap in one.gaps_ms]),
        token_ms=Distribution.of([one.token_ms for one in answered if one.token_ms is not None]),
        e2e_ms=Distribution.of([one.e2e_ms for one in answered]),
        queue_ms=Distribution.of([one.queue_ms for one in answered if one.queue_ms is not None]),
        refused_ms=Distribution.of(
            [one.e2e_ms for one in asked if one.kind is OutcomeKind.REFUSED and one.end_s]
        ),
        retry_after_s=Distribution.of(
            [one.retry_after_s for one in asked if one.retry_after_s is not None]
        ),
        prefix=prefix_hits(played.outcomes, start_s),
        tokens_per_event=tokens_per_event(answered),
        without_usage=sum(not one.usage for one in answered),
        not_streamed=sum(not one.streamed for one in answered),
        continued=sum(one.continued for one in asked),
        finish_reasons=dict(Counter(one.finish_reason or "none" for one in answered)),
        boards=dict(sorted(Counter(one.board for one in answered if one.board).items())),
        generator=generator(played),
        interrupted=played.interrupted,
    )


def prefix_hits(outcomes: Sequence[RequestOutcome], since_s: float = 0.0) -> PrefixReuse:
    """Count the prompt tokens that were not prefilled, over answers that report it."""
    last: dict[str, int] = {}
    reported = prompt = cached = reusable = hits = 0
    for one in sorted(outcomes, key=lambda one: (one.asked.session, one.asked.turn)):
        if not one.ok:
            continue
        left, name = last.get(one.asked.session, 0), one.asked.session
        last[name] = one.prompt_tokens + one.completion_tokens
        if one.cached_tokens is None or one.asked.due_s < since_s:
            continue
        reported, hits = reported + 1, hits + (one.cached_tokens > 0)
        prompt, cached = prompt + one.prompt_tokens, cached + one.cached_tokens
        reusable += min(left, one.prompt_tokens)
    return PrefixReuse(reported, prompt, cached, reusable, hits)


def tokens_per_event(answered: Sequence[RequestOutcome]) -> float:
    """Tokens that one event with text brings; more than 1 where they are sent together."""
    texts = sum(len(one.text_s) for one in answered)
    return sum(one.completion_tokens for one in answered) / texts if texts else 0.0


def tokens_between(outcomes: Sequence[RequestOutcome], start_s: float, end_s: float) -> float:
    """Tokens that arrived in a window, also those of answers that it cuts or that failed."""
    each = tokens_per_event([one for one in outcomes if one.ok]) or 1.0
    return each * sum(start_s <= at_s <= end_s for one in outcomes for at_s in one.text_s)


def generator(played: PlayedRun) -> GeneratorFigures:
    """Return the load of the generator."""
    late = [one.late_ms for one in played.outcomes] or [0.0]
    events = sum(len(one.text_s) for one in played.outcomes)
    return GeneratorFigures(
        cpu_share=played.cpu_s / max(played.end_s - played.start_s, 1e-9),
        lag_p99_ms=percentile(played.lag_ms or [0.0], 0.99),
        late_p99_ms=percentile(late, 0.99),
        late_most_ms=max(late),
        us_per_event=played.cpu_s * 1e6 / events if events else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run by another one, as ratios; None where a side has no such figure, or it is 0."""

    target: str
    to: str
    ratios: Mapping[str, Ratio | None]


@dataclass(frozen=True, slots=True)
class _Measure:
    """A figure over many answers: the contribution of each, and their aggregate."""

    each: Callable[[RequestOutcome], Pair | None]
    sum_up: Callable[[Sequence[Pair]], float | None]


def compare(of: PlayedRun, to: PlayedRun, slo: Slo) -> Comparison:
    """Return the ratios of one run to another of the same trace, sessions drawn in pairs."""
    ttft, e2e = _of_answers(lambda one: one.ttft_ms), _of_answers(lambda one: one.e2e_ms)
    measures = {
        "prefix hit ratio": _Measure(_cached, _share),
        "TTFT p50": _Measure(ttft, _cut(0.5)),
        "TTFT p99": _Measure(ttft, _cut(0.99)),
        "end-to-end p50": _Measure(e2e, _cut(0.5)),
        "end-to-end p99": _Measure(e2e, _cut(0.99)),
        "share within the limits": _Measure(lambda one: (float(slo.met(one)), 1.0), _share),
    }
    return Comparison(
        of.target, to.target, {name: _ratio(of, to, measure) for name, measure in measures.items()}
    )


def _of_answers(
    value: Callable[[RequestOutcome], float],
) -> Callable[[RequestOutcome], Pair | None]:
    return lambda one: (value(one), 1.0) if one.ok else None


def _cached(one: RequestOutcome) -> Pair | None:
    if not one.ok or one.cached_tokens is None:
        return None
    return float(one.cached_tokens), float(one.prompt_tokens)


def _share(pairs: Sequence[Pair]) -> float | None:
    whole = sum(of for _, of in pairs)
    return sum(part for part, _ in pairs) / whole if whole else None


def _cut(share: float) -> Callable[[Sequence[Pair]], float | None]:
    return lambda pairs: percentile([value for value, _ in pairs], share) if pairs else None


def _ratio(of: PlayedRun, to: PlayedRun, measure: _Measure) -> Ratio | None:
    ours, theirs = (_by_session(side, measure.each) for side in (of, to))
    names = sorted(ours.keys() & theirs.keys())

    def quotient(drawn: Sequence[str]) -> float | None:
        above, below = (
            measure.sum_up([pair for name in drawn for pair in side[name]])
            for side in (ours, theirs)
        )
        return None if above is None or not below else above / below

    if (value := quotient(names)) is None:
        return None
    rng = random.Random(SEED)
    found = (quotient(rng.choices(names, k=len(names))) for _ in range(RESAMPLES))
    drawn = [one for one in found if one is not None]
    outside = (1 - CONFIDENCE) / 2
    return Ratio(value, percentile(drawn, outside), percentile(drawn, 1 - outside))


def _by_session(
    played: PlayedRun, each: Callable[[RequestOutcome], Pair | None]
) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for one in played.outcomes:
        if one.kind is not OutcomeKind.CUT and one.asked.due_s >= played.window_s[0]:
            pairs = found.setdefault(one.asked.session, [])
            if (pair := each(one)) is not None:
                pairs.append(pair)
    return found
