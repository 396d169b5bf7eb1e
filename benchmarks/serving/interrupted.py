"""Case (f), pure: how soon a pause takes hold, and how soon a resumption brings a new token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.exchange import InterruptedAnswer, PausedSpan
from benchmarks.harness.figures import Spread
from rkserve.bench.tables import TargetVerdict

AFTER_STEP_MS = 20.0


@dataclass(frozen=True, slots=True)
class PauseFigures:
    """How pauses of one kind went, in milliseconds, as the client saw it.

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
    """Say what makes interrupted answers unfit for measuring.

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
