"""Times in which the cluster pauses, resumes and switches, and the skew of its boards. Pure.

Times are seconds of the clients' clock, durations in results are milliseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.control.answers import Answer, Call
from benchmarks.control.checks import Checked
from benchmarks.harness.figures import Spread
from benchmarks.harness.growth import Growth
from rkserve.bench.connection import OK
from rkserve.bench.processes import BenchFailed
from rkserve.bench.results import TargetVerdict

AFTER_STEP_MS = 50.0
SKEW_MS = 50.0
STAGED_S = 5.0
PAUSE, RESUME = "pause", "resume"
REFUSED = "calls refused, undone or done in part"
ATOMIC, ROLLING = "atomic", "rolling"


@dataclass(frozen=True, slots=True)
class PauseFigures:
    """Figures of pauses of the whole cluster.

    ``late`` texts arrived after a pause was acknowledged and before the resumption was asked for,
    the last of them ``latest_ms`` after the acknowledgement. ``resumed_ms`` is from asking for the
    resumption to the next text of each answer that the pause had interrupted; ``boards_ms`` is what
    the boards say they took to stop, ``skew_ms`` the difference of the first and the last one.
    """

    count: int
    refused: int
    step_ms: float
    answered_ms: Spread
    late: int
    latest_ms: float
    boards_ms: Spread
    skew_ms: Spread
    resumed_ms: Spread
    resume_answered_ms: Spread


@dataclass(frozen=True, slots=True)
class SwitchFigures:
    """Figures of switches of one strategy.

    ``skew_ms`` is how far apart the boards answered the epoch that ended it, None where no two were
    timed. Only of an atomic switch it is the time in which two versions were served.
    """

    strategy: str
    count: int
    refused: int
    took_ms: Spread
    skew_ms: Spread | None
    phases_ms: dict[str, Spread]
    checked: Checked


@dataclass(frozen=True, slots=True)
class StagedFigures:
    """Figures of adapters of ``size_bytes``, from the upload to the first board that serves them.

    ``took_ms`` is from the first byte of the upload to the answer, which holds ``simulated_ms`` of
    loading that the simulated runtime only waits for.
    """

    size_bytes: int
    boards: int
    took_ms: Spread
    simulated_ms: float
    phases_ms: dict[str, Spread]


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Figures of ``count`` rounds of pause, switch and resume, and of the processes' growth.

    ``refused`` are calls, of which each round has three.
    """

    count: int
    refused: int
    checked: Checked
    growth: Sequence[Growth]


def pause_figures(calls: Sequence[Call], answers: Sequence[Answer], step_ms: float) -> PauseFigures:
    """Sum up pauses, each followed by its resumption. Raises ``BenchFailed`` where none worked."""
    pairs = [
        (pause, resume)
        for pause, resume in zip(calls[::2], calls[1::2], strict=True)
        if pause.status == resume.status == OK
    ]
    if not pairs:
        raise BenchFailed(f"no pause was answered by {OK}: {refusals(calls)}")
    late = [
        at_s - pause.answered_s
        for pause, resume in pairs
        for one in answers
        for at_s in _between(one.exchange.content_s, pause.answered_s, resume.asked_s)
    ]
    resumed_ms = [ms for pair in pairs for one in answers if (ms := resumed_after_ms(one, *pair))]
    if not resumed_ms:
        raise BenchFailed("no pause interrupted any answer")
    pauses = [pause for pause, _ in pairs]
    return PauseFigures(
        count=len(pairs),
        refused=refused(calls),
        step_ms=step_ms,
        answered_ms=Spread.of([pause.took_ms for pause in pauses]),
        late=len(late),
        latest_ms=max(late, default=0.0) * 1e3,
        boards_ms=Spread.of([ms for pause in pauses for ms in pause.latencies_ms]),
        skew_ms=Spread.of([_range(pause.latencies_ms) for pause in pauses]),
        resumed_ms=Spread.of(resumed_ms),
        resume_answered_ms=Spread.of([resume.took_ms for _, resume in pairs]),
    )


def resumed_after_ms(answer: Answer, pause: Call, resume: Call) -> float | None:
    """From asking for the resumption to the next text of an answer that the pause interrupted."""
    texts = answer.exchange.content_s
    if not texts or not texts[0] < pause.asked_s < resume.asked_s < texts[-1]:
        return None
    return (texts[bisect_left(texts, resume.asked_s)] - resume.asked_s) * 1e3


def switch_figures(strategy: str, calls: Sequence[Call], checked: Checked) -> SwitchFigures:
    """Sum up switches. Raises ``BenchFailed`` where none worked."""
    good = [call for call in calls if call.status == OK]
    if not good:
        raise BenchFailed(f"no switch was answered by {OK}: {refusals(calls)}")
    skews = [_range(call.latencies_ms) for call in good if len(call.latencies_ms) > 1]
    return SwitchFigures(
        strategy=strategy,
        count=len(good),
        refused=refused(calls),
        took_ms=Spread.of([call.took_ms for call in good]),
        skew_ms=Spread.of(skews) if skews else None,
        phases_ms=phases_ms([call.body for call in good]),
        checked=checked,
    )


def phases_ms(bodies: Iterable[Mapping[str, object]]) -> dict[str, Spread]:
    """Return how long each phase took that the answers name, in their order."""
    found: dict[str, list[float]] = {}
    for body in bodies:
        phases = body.get("phases")
        for name, ms in phases.items() if isinstance(phases, dict) else ():
            found.setdefault(name, []).append(ms)
    return {name: Spread.of(values) for name, values in found.items()}


def refused(calls: Iterable[Call]) -> int:
    """Return how many calls were not answered by a 200."""
    return sum(call.status != OK for call in calls)


def refusals(calls: Iterable[Call]) -> list[str]:
    """Note once each how calls were refused."""
    return sorted(
        {
            f"{call.what}: HTTP {call.status}, {call.body.get('error', {}).get('message', '')}"
            for call in calls
            if call.status != OK
        }
    )


def verdicts(
    pauses: tuple[PauseFigures, Checked] | None,
    switches: Iterable[SwitchFigures],
    staged: StagedFigures | None,
    rounds: RoundFigures | None,
) -> list[TargetVerdict]:
    """Hold what was measured to what it must reach."""
    found: list[TargetVerdict] = []
    if pauses is not None:
        found += _pause_verdicts(*pauses)
    for one in switches:
        found += _switch_verdicts(one)
    if staged is not None:
        seconds = max(0.0, staged.took_ms.p99 - staged.simulated_ms) / 1e3
        what = f"{staged.size_bytes >> 20} MiB adapter on {staged.boards} boards, p99"
        found.append(TargetVerdict(what, seconds, STAGED_S, at_most=True, unit="s"))
    if rounds is not None:
        found += _zeros("rounds", {REFUSED: rounds.refused, **_flaws(rounds.checked)})
        for part in rounds.growth:
            found += part.verdicts()
    return found


def _pause_verdicts(figures: PauseFigures, checked: Checked) -> list[TargetVerdict]:
    what = f"pause acknowledged, p99: slowest decode step + {AFTER_STEP_MS:.0f} ms"
    bound_ms = figures.step_ms + AFTER_STEP_MS
    return [
        TargetVerdict(what, figures.answered_ms.p99, bound_ms, at_most=True, unit="ms"),
        *_zeros(
            "pauses",
            {
                "tokens after the acknowledgement": figures.late,
                REFUSED: figures.refused,
                **_uncut(checked),
            },
        ),
    ]


def _switch_verdicts(figures: SwitchFigures) -> list[TargetVerdict]:
    found = _zeros(
        f"{figures.strategy} switches", {REFUSED: figures.refused, **_flaws(figures.checked)}
    )
    if figures.skew_ms is not None and figures.strategy == ATOMIC:
        what = f"{figures.strategy} switches: first to last board, p99"
        found.append(TargetVerdict(what, figures.skew_ms.p99, SKEW_MS, at_most=True, unit="ms"))
    return found


def _uncut(checked: Checked) -> dict[str, int]:
    return {
        "answers aborted": checked.aborted,
        "answers with tokens lost or doubled": checked.wrong,
    }


def _flaws(checked: Checked) -> dict[str, int]:
    return {
        **_uncut(checked),
        "answers of several versions": checked.mixed,
        "answers without their version": checked.unstamped,
        "answers that were stale": checked.stale,
    }


def _zeros(of: str, counts: dict[str, int]) -> list[TargetVerdict]:
    return [
        TargetVerdict(f"{of}: {what}", count, 0.0, at_most=True, unit="of them")
        for what, count in counts.items()
    ]


def _between(times_s: Sequence[float], from_s: float, until_s: float) -> Sequence[float]:
    return times_s[bisect_right(times_s, from_s) : bisect_left(times_s, until_s)]


def _range(values: Sequence[float]) -> float:
    return max(values, default=0.0) - min(values, default=0.0)
