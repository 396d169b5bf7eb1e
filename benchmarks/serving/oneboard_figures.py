"""Cases (e) to (g), pure: parked conversations, pauses, and batches of the binding."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.exchange import Exchange, InterruptedAnswer, PausedSpan
from benchmarks.harness.figures import Spread, flaws, ratio, tail_ms, ttft_ms
from rkserve.bench.figures import SEED, Ratio
from rkserve.bench.results import TargetVerdict

HISTORY_TOKENS = 1000
AFTER_STEP_MS = 20.0
NOT_IN_KV = 1  # the last token of an answer is delivered, and computed only with what follows it


@dataclass(frozen=True, slots=True)
class ParkedRound:
    """The requests to one board, in this order.

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
    """The cost of returning beside that of starting anew, and for the conversation between.

    Token counts are medians. ``most_beyond_new`` is how many tokens were prefilled at most although
    the conversation had them before; ``save_ms`` is from the last text of a returned answer to its
    end, ``unsaved_ms`` of a first one: neither waits for a file. Before them were
    ``learning_rounds``, in ``learning_anew`` of which the conversation was computed again.
    """

    rounds: int
    learning_rounds: int
    learning_anew: int
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


def parked_figures(
    rounds: Sequence[ParkedRound], learning: Sequence[ParkedRound] = ()
) -> ParkedFigures:
    """Sum up rounds, at least one, after those from which the board has learned."""
    returned, cold = [r.returned for r in rounds], [r.first for r in rounds]
    displacing, calm = [r.displacing for r in rounds], [r.calm for r in rounds]
    rng = random.Random(SEED)
    returned_ms, cold_ms, displacing_ms, calm_ms = (
        [ttft_ms(one) for one in answers] for answers in (returned, cold, displacing, calm)
    )
    return ParkedFigures(
        rounds=len(rounds),
        learning_rounds=len(learning),
        learning_anew=sum(not one.returned.cached_tokens for one in learning),
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
    """Note what makes rounds unfit for measuring; nothing where all were as they should be."""
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
        TargetVerdict(what, figures.most_beyond_new, NOT_IN_KV, at_most=True, unit="tokens"),
    ]


@dataclass(frozen=True, slots=True)
class PauseFigures:
    """Figures of pauses of one kind, in milliseconds, as seen by the client.

    ``answered_ms`` is from the pause's request to its answer, ``last_ms`` to the last text that
    arrived before the resumption (0 where none did), ``resumed_ms`` from the resumption's request
    to the next text.
    """

    kv: str
    count: int
    answered_ms: Spread
    last_ms: Spread
    largest_last_ms: float
    resumed_ms: Spread
    step_ms: float


def pause_figures(found: Sequence[InterruptedAnswer], step_ms: float) -> PauseFigures:
    """Sum up interrupted answers whose pauses are of one kind, at least one."""
    pauses = [(one, pause) for one in found for pause in one.pauses]
    last_ms = [last_text_ms(one, pause) for one, pause in pauses]
    return PauseFigures(
        kv=pauses[0][1].kv,
        count=len(pauses),
        answered_ms=Spread.of([(p.answered_s - p.asked_s) * 1e3 for _, p in pauses]),
        last_ms=Spread.of(last_ms),
        largest_last_ms=max(last_ms),
        resumed_ms=Spread.of([first_text_ms(one, pause) for one, pause in pauses]),
        step_ms=step_ms,
    )


def last_text_ms(one: InterruptedAnswer, pause: PausedSpan) -> float:
    """From asking for a pause to the last text before the resumption; 0 where there was none."""
    before = [at_s for at_s in one.answer.content_s if at_s < pause.resumed_s]
    return max(0.0, before[-1] - pause.asked_s) * 1e3


def first_text_ms(one: InterruptedAnswer, pause: PausedSpan) -> float:
    """From asking for a resumption to the first text after it."""
    after = next(at_s for at_s in one.answer.content_s if at_s >= pause.resumed_s)
    return (after - pause.resumed_s) * 1e3


def flaws_of_interrupted(
    found: Iterable[InterruptedAnswer], texts: Iterable[str], completion_tokens: int, kv: str
) -> list[str]:
    """Note what makes interrupted answers unfit for measuring.

    ``texts`` are what the same requests were answered without interruption.
    """
    flaws: list[str] = []
    for one, text in zip(found, texts, strict=True):
        if one.answer.error or one.answer.end_s is None:
            flaws.append(one.answer.error or "an answer did not end")
            continue
        if one.answer.completion_tokens != completion_tokens:
            flaws.append(f"{one.answer.completion_tokens} tokens, not {completion_tokens}")
        if one.text != text:
            flaws.append("an interrupted answer says something else")
        flaws += [f"a pause with its KV cache {p.kv}, not {kv}" for p in one.pauses if p.kv != kv]
        last_s = max(one.answer.content_s, default=0.0)
        if any(p.resumed_s > last_s for p in one.pauses):
            flaws.append("nothing followed a resumption")
    return flaws


def pause_verdicts(kinds: Iterable[PauseFigures]) -> list[TargetVerdict]:
    """Hold the figures to how long a board may go on after a pause was asked for."""
    return [
        TargetVerdict(
            f"(f) pause to last token, p99, KV {one.kv}: decode step + {AFTER_STEP_MS:.0f} ms",
            one.last_ms.p99,
            one.step_ms + AFTER_STEP_MS,
            at_most=True,
            unit="ms",
        )
        for one in kinds
    ]


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
    """Note what makes runs unfit for measuring: every entry goes on to the limit.

    The runtime counts decoded tokens; an entry's first one comes with the prefill.
    """
    wanted = (max_tokens, (max_tokens - 1) * n_batch)
    return [
        f"{run.steps} steps with {run.tokens} decoded tokens in a batch of {n_batch}; "
        f"{wanted[0]} with {wanted[1]} were asked for"
        for run in runs
        if (run.steps, run.tokens) != wanted
    ]
