"""Case (e), pure: conversations that lost their board to another one and came back.

It knows what a round is made of, what makes one unfit, and what all of them come to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.exchange import Exchange
from benchmarks.harness.figures import Spread, flaws, ratio, tail_ms, ttft_ms
from rkserve.bench.figures import SEED, Ratio
from rkserve.bench.tables import TargetVerdict

HISTORY_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class ParkedRound:
    """What one board was asked, in this order.

    ``first`` begins a conversation, whose whole history is new to the board; ``displacing`` takes
    the board and has it parked; ``returned`` is its next turn. ``calm`` finds nothing to park.
    """

    first: Exchange
    displacing: Exchange
    returned: Exchange
    calm: Exchange

    @property
    def new_tokens(self) -> int:
        """Tokens of the returning prompt that its conversation did not have before."""
        return self.returned.prompt_tokens - self.first.prompt_tokens - self.first.completion_tokens


@dataclass(frozen=True, slots=True)
class ParkedFigures:
    """What returning costs beside starting anew, and what it costs the one in between.

    Token counts are medians. ``most_beyond_new`` is how many tokens were prefilled at most although
    the conversation had them before; ``save_ms`` is from the last text of a returned answer to its
    end, for which its file is written again.
    """

    rounds: int
    returned_ttft_ms: Spread
    cold_ttft_ms: Spread
    ttft: Ratio
    prompt_tokens: float
    cached_tokens: float
    prefill_tokens: float
    new_tokens: float
    most_beyond_new: int
    displacing_ttft_ms: Spread
    calm_ttft_ms: Spread
    displacing: Ratio
    save_ms: Spread
    unsaved_ms: Spread


def parked_figures(rounds: Sequence[ParkedRound]) -> ParkedFigures:
    """Sum up rounds, at least one."""
    returned, cold = [r.returned for r in rounds], [r.first for r in rounds]
    displacing, calm = [r.displacing for r in rounds], [r.calm for r in rounds]
    rng = random.Random(SEED)
    returned_ms, cold_ms, displacing_ms, calm_ms = (
        [ttft_ms(one) for one in answers] for answers in (returned, cold, displacing, calm)
    )
    return ParkedFigures(
        rounds=len(rounds),
        returned_ttft_ms=Spread.of(returned_ms),
        cold_ttft_ms=Spread.of(cold_ms),
        ttft=ratio(returned_ms, cold_ms, rng),
        prompt_tokens=median(one.prompt_tokens for one in returned),
        cached_tokens=median(one.cached_tokens for one in returned),
        prefill_tokens=median(one.prefill_tokens for one in returned),
        new_tokens=median(r.new_tokens for r in rounds),
        most_beyond_new=max(r.returned.prefill_tokens - r.new_tokens for r in rounds),
        displacing_ttft_ms=Spread.of(displacing_ms),
        calm_ttft_ms=Spread.of(calm_ms),
        displacing=ratio(displacing_ms, calm_ms, rng),
        save_ms=Spread.of([tail_ms(one) for one in returned]),
        unsaved_ms=Spread.of([tail_ms(one) for one in cold]),
    )


def flaws_of_parked(
    rounds: Sequence[ParkedRound], short_tokens: int, completion_tokens: int
) -> list[str]:
    """Say what makes rounds unfit for measuring; nothing where all were as they should be."""
    short = [one for r in rounds for one in (r.displacing, r.calm)]
    returned = [r.returned for r in rounds]
    broken = [one.error for one in returned if one.error]
    whole = [one for one in returned if not one.error]
    counts = {
        "a returning conversation was computed anew": sum(not e.cached_tokens for e in whole),
        "a returning conversation was answered too briefly": sum(
            e.completion_tokens != completion_tokens for e in whole
        ),
    }
    return [
        *flaws([r.first for r in rounds], HISTORY_TOKENS, completion_tokens),
        *flaws(short, short_tokens, completion_tokens),
        *broken,
        *(f"{count} x {flaw}" for flaw, count in counts.items() if count),
    ]


def parked_verdicts(figures: ParkedFigures) -> list[TargetVerdict]:
    """Hold the figures to what a returning conversation may cost."""
    what = "(e) tokens prefilled again when a parked conversation returns (the most)"
    return [
        TargetVerdict(what, figures.most_beyond_new, 0, at_most=True, unit="tokens"),
    ]
