"""Run the cases of the control benchmark, each with its line of progress, and sum them up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from benchmarks.control.cases import (
    BOARDS,
    LARGE_BYTES,
    LINE,
    PAUSED_ANSWER,
    PAUSED_PROMPT,
    SIMULATED_MS_PER_MIB,
    VERSIONS,
    ControlBench,
    Played,
    Staged,
)
from benchmarks.control.checks import Checked, Era, check, eras
from benchmarks.control.faults import FaultFigures, fault_verdicts, summed
from benchmarks.control.faults_cases import FaultBench, chosen
from benchmarks.control.faults_list import Fault
from benchmarks.control.figures import (
    ATOMIC,
    ROLLING,
    PauseFigures,
    RoundFigures,
    StagedFigures,
    SwitchFigures,
    pause_figures,
    phases_ms,
    refusals,
    refused,
    switch_figures,
    verdicts,
)
from benchmarks.control.report import ControlResults
from benchmarks.harness.command import ProgressLine
from benchmarks.harness.figures import Spread
from benchmarks.harness.growth import growth
from benchmarks.harness.prompts import profile
from rkserve.bench.processes import BenchFailed
from rkserve.bench.results import machine

CASES = ("pauses", "switches", "staged", "rounds", "faults")
MAX_UNAVAILABLE = 2  # boards of eight, in a rolling switch


@dataclass(frozen=True)
class Size:
    """The size of a run: each fault with a word of ``fault`` is made ``faults`` times."""

    pauses: int
    atomic: int
    rolling: int
    staged: int
    rounds: int
    faults: int
    fault: tuple[str, ...] = ("",)


FULL = Size(pauses=200, atomic=200, rolling=50, staged=4, rounds=1000, faults=20)
QUICK = Size(pauses=20, atomic=20, rolling=4, staged=2, rounds=16, faults=2)


class ControlMeasurement:
    """The cases on one cluster; faults are on one with fewer boards."""

    def __init__(
        self, bench: ControlBench, faults: FaultBench, progress: ProgressLine, size: Size
    ) -> None:
        self._bench, self._faults = bench, faults
        self._progress, self._size = progress, size

    def measure(self, cases: Collection[str]) -> ControlResults:
        """Run these cases. Raises ``BenchFailed``."""
        if set(cases) - {"faults"}:
            self._progress.begin(f"{BOARDS} boards")
            self._bench.deploy()
            self._progress.end("ready")
        pauses = self._pauses() if "pauses" in cases else None
        if {"switches", "rounds"} & set(cases):
            self._bench.prepare_switches()
        switches = self._both_switches() if "switches" in cases else []
        rounds = self._rounds() if "rounds" in cases else None
        staged = self._staged() if "staged" in cases else None
        faults = self._all_faults() if "faults" in cases else []
        return ControlResults(
            machine=machine(),
            verdicts=[
                *verdicts(
                    None if pauses is None else pauses[1:],
                    [figures for _, figures in switches],
                    staged and staged[1],
                    None if rounds is None else rounds[1],
                ),
                *(fault_verdicts(faults, self._size.faults) if faults else ()),
            ],
            pauses=pauses,
            switches=switches,
            staged=staged,
            rounds=rounds,
            faults=faults,
            cpu=self._bench.cpu,
        )

    def _pauses(self) -> tuple[Played, PauseFigures, Checked]:
        self._progress.begin("pauses")
        played = self._bench.pauses(self._size.pauses)
        step_ms = profile().decode_ms(PAUSED_PROMPT + PAUSED_ANSWER)
        figures = pause_figures(played.calls, played.answers, step_ms)
        checked = check(played.answers, played.said, [Era(v) for v, _ in played.said])
        self._progress.end(
            f"acknowledged after {figures.answered_ms.p50:.0f} ms (p50), "
            f"{figures.answered_ms.p99:.0f} ms (p99), {figures.late} texts after that; "
            f"{_told(checked)}{_refused(played)}"
        )
        return played, figures, checked

    def _both_switches(self) -> list[tuple[Played, SwitchFigures]]:
        size = self._size
        return [
            self._switches(ATOMIC, size.atomic),
            self._switches(ROLLING, size.rolling, max_unavailable=MAX_UNAVAILABLE),
        ]

    def _switches(self, strategy: str, count: int, **more: int) -> tuple[Played, SwitchFigures]:
        self._progress.begin(f"{strategy} switches")
        played = self._bench.switches(strategy, count, **more)
        figures = switch_figures(strategy, played.calls, _checked(played))
        took, checked = figures.took_ms, figures.checked
        self._progress.end(
            f"{took.p50:.0f} ms (p50), {took.p99:.0f} ms (p99); {_told(checked)}, "
            f"{checked.stale} stale of {checked.decided}{_refused(played)}"
        )
        return played, figures

    def _staged(self) -> tuple[Sequence[Staged], StagedFigures]:
        self._progress.begin("staging")
        found = self._bench.staged(self._size.staged)
        steps = [{"phases": {**_phases(one, "staging"), **_phases(one)}} for one in found]
        figures = StagedFigures(
            LARGE_BYTES,
            BOARDS,
            Spread.of([one.took_ms for one in found]),
            SIMULATED_MS_PER_MIB * (LARGE_BYTES >> 20),
            phases_ms(steps),
        )
        self._progress.end(f"{figures.took_ms.p50:.0f} ms (p50), {figures.took_ms.p99:.0f} (p99)")
        return found, figures

    def _rounds(self) -> tuple[Played, RoundFigures]:
        self._progress.begin("rounds")
        count = self._size.rounds
        played = self._bench.rounds(count)
        checked = _checked(played)
        figures = RoundFigures(count, refused(played.calls), checked, growth(played.samples))
        self._progress.end(f"{count}; {_told(checked)}{_refused(played)}")
        return played, figures

    def _all_faults(self) -> list[FaultFigures]:
        self._progress.begin("faults")
        self._faults.deploy()
        self._progress.end("ready")
        found = []
        for fault in chosen(self._size.fault):
            self._progress.begin(fault.name)
            one = self._tried(fault)
            found.append(one)
            self._progress.end(_told_of_fault(one))
        return found

    def _tried(self, fault: Fault) -> FaultFigures:
        """Try a fault; where nothing can be tried any more, that is what is found."""
        try:
            return self._faults.tried(fault, self._size.faults)
        except BenchFailed as exc:
            return replace(summed(fault.name, []), unsettled=1, flaws=[str(exc)])


def _told_of_fault(one: FaultFigures) -> str:
    whole = "never" if one.p50_s is None else f"{one.p50_s:.1f} s (p50), {one.max_s:.1f} s (max)"
    flaws = f"; {'; '.join((*one.flaws, *one.errors))}" if one.flaws or one.errors else ""
    return (
        f"{one.hits} times in {one.tries} tries, whole again after {whole}; {one.left_paused} left "
        f"paused, {one.mixed} mixed, {one.lost} lost, {one.lost_of_killed} of killed boards, of "
        f"{one.answers}{flaws}"
    )


def _checked(played: Played) -> Checked:
    """Hold answers to the switches that were made, each call of which is named as its version."""
    made = [(call, _label(call.what)) for call in played.calls if call.what in VERSIONS]
    return check(played.answers, played.said, eras(_label(VERSIONS[0]), made))


def _label(version: str) -> str:
    return f"{LINE}@{version}"


def _phases(staged: Staged, *path: str) -> dict[str, float]:
    """Return the phases of an operation of the answer, each with the operation's kind."""
    said = staged.said
    for name in path:
        said = said.get(name, {})
    kind = said.get("kind", "")
    return {f"{kind}: {name}": ms for name, ms in said.get("phases", {}).items()}


def _told(checked: Checked) -> str:
    return f"{checked.answers} answers, {checked.aborted} aborted, {checked.wrong} wrong"


def _refused(played: Played) -> str:
    found = refusals(played.calls)
    return f"; refused: {'; '.join(found)}" if found else ""
