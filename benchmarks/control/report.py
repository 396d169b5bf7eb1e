"""The report of the control benchmark as Markdown: bars, verdicts and the figures behind. Pure.

It contains no date, no host name and no path, so that two reports differ in figures only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.control.cases import (
    BETWEEN_S,
    BOARDS,
    LARGE_BYTES,
    PAUSED_ANSWER,
    PAUSED_PROMPT,
    REST_S,
    STREAMS,
    SWITCHED_ANSWER,
    SWITCHED_PROMPT,
    Played,
    Staged,
)
from benchmarks.control.checks import Checked
from benchmarks.control.faults import FaultFigures
from benchmarks.control.faults_cases import BOARDS as FAULT_BOARDS
from benchmarks.control.faults_cases import CLIENTS, CONTENT_BYTES, LIMIT_S, TIME_SCALE
from benchmarks.control.figures import (
    PauseFigures,
    RoundFigures,
    StagedFigures,
    SwitchFigures,
)
from benchmarks.harness.figures import Spread, machine_line
from benchmarks.harness.prompts import PROFILE
from benchmarks.serving.report import noise_section
from rkserve.bench.processes import CpuUse
from rkserve.bench.results import (
    MISSING,
    Machine,
    TargetVerdict,
    figure,
    megabytes,
    percent,
    table,
    verdicts_section,
)

_HEAD = [
    "fault",
    "times",
    "tries",
    "whole again p50, s",
    "max, s",
    "left paused",
    "mixed",
    "lost",
    "of killed",
    "answers",
]


@dataclass(frozen=True)
class ControlResults:
    """Everything that one run of the control benchmark found."""

    machine: Machine
    verdicts: Sequence[TargetVerdict]
    pauses: tuple[Played, PauseFigures, Checked] | None = None
    switches: Sequence[tuple[Played, SwitchFigures]] = ()
    staged: tuple[Sequence[Staged], StagedFigures] | None = None
    rounds: tuple[Played, RoundFigures] | None = None
    faults: Sequence[FaultFigures] = ()
    cpu: Mapping[str, CpuUse] = field(default_factory=dict)


def render(results: ControlResults) -> str:
    """Return the report."""
    parts: tuple[Callable[[ControlResults], str], ...] = (
        _opening,
        _targets,
        _pauses,
        _switches,
        _staged,
        _rounds,
        _faults,
        _noise,
        _method,
    )
    return "\n".join(text for part in parts if (text := part(results)))


def _opening(results: ControlResults) -> str:
    return (
        "# Benchmarks of control\n\n"
        "Written by `make bench-control`, which starts a Ray cluster of its own with "
        f"{BOARDS} simulated boards (`{PROFILE}`) at their real pace, keeps {STREAMS} streams "
        "open, and pauses, resumes and switches adapters meanwhile. A board makes one run at a "
        f"time, so that {BOARDS} of the streams bring tokens at any moment and the others wait.\n\n"
        f"{machine_line(results.machine)}"
    )


def _targets(results: ControlResults) -> str:
    return verdicts_section(results.verdicts)


def _pauses(results: ControlResults) -> str:
    if results.pauses is None:
        return ""
    _, figures, checked = results.pauses
    rows = [
        _spread("pause call to its answer, ms", figures.answered_ms),
        _steps("pause call to its answer, decode steps", figures.answered_ms, figures.step_ms),
        _beyond("pause call to its answer, ms more than a step", figures),
        _spread("a board told, to its answer, ms", figures.boards_ms),
        _spread("first to last board stopped, ms", figures.skew_ms),
        _spread("resume call to its answer, ms", figures.resume_answered_ms),
        _spread("resume call to next token, ms", figures.resumed_ms),
    ]
    return (
        "## Pausing the whole cluster\n\n"
        f"{table(['', 'p50', 'p99', 'count'], rows)}\n"
        f"{figures.count} pauses (`mode=keep`, `clear_cache=false`), each at a random moment; the "
        f"slowest decode step takes {figures.step_ms:.1f} ms. Texts that any client received after "
        f"the pause's answer and before the resumption, {REST_S * 1e3:.0f} ms later, was asked "
        f"for: {figures.late}{_latest(figures)}. {_of_answers(checked)} Prompts have "
        f"{PAUSED_PROMPT} tokens and answers {PAUSED_ANSWER}.\n"
    )


def _latest(figures: PauseFigures) -> str:
    return f" (the last one after {figures.latest_ms:.1f} ms)" if figures.late else ""


def _spread(name: str, spread: Spread | None, digits: int = 1) -> list[str]:
    if spread is None:
        return [name, *[MISSING] * 3]
    return [name, figure(spread.p50, digits), figure(spread.p99, digits), figure(spread.count, 0)]


def _steps(name: str, spread: Spread, step_ms: float) -> list[str]:
    values = (spread.p50 / step_ms, spread.p99 / step_ms)
    return [name, *(figure(value, 2) for value in values), figure(spread.count, 0)]


def _beyond(name: str, figures: PauseFigures) -> list[str]:
    spread, step_ms = figures.answered_ms, figures.step_ms
    return [name, figure(spread.p50 - step_ms), figure(spread.p99 - step_ms), str(figures.count)]


def _of_answers(checked: Checked) -> str:
    text = (
        f"Of {checked.answers} answers {checked.aborted} were aborted and {checked.wrong} differ "
        "from what their version says of the prompt uninterrupted."
    )
    return f"{text} Errors: {'; '.join(checked.errors)}." if checked.errors else text


def _switches(results: ControlResults) -> str:
    if not results.switches:
        return ""
    found = [figures for _, figures in results.switches]
    rows = [row for figures in found for row in _switch_rows(figures)]
    of_answers = "".join(_switch_text(figures) for figures in found)
    return (
        "## Switching an adapter\n\n"
        f"{table(['', 'p50', 'p99', 'count'], rows)}\n"
        "From one version to the other and back, while the clients ask for the adapter by its bare "
        "name (`in_flight=pin`: what runs keeps its version). Prompts have "
        f"{SWITCHED_PROMPT} tokens and answers {SWITCHED_ANSWER}. A phase is what the "
        "operation itself says it took; first to last board is how far apart they answered the "
        f"epoch that ended the switch.\n\n{of_answers}\n"
        "An answer is stale when its first run began, by its own timings, after a switch had been "
        "acknowledged, and with the version before. Of some answers the timings leave open whether "
        "it was before or after; the others are counted as decided.\n"
    )


def _switch_rows(figures: SwitchFigures) -> list[list[str]]:
    name = figures.strategy
    phases = [
        _spread(f"{name}: phase {phase}, ms", spread) for phase, spread in figures.phases_ms.items()
    ]
    return [
        _spread(f"{name}: call to its answer, ms", figures.took_ms),
        _spread(f"{name}: first to last board, ms", figures.skew_ms),
        *phases,
    ]


def _switch_text(figures: SwitchFigures) -> str:
    checked = figures.checked
    return (
        f"- {figures.strategy}: {_of_answers(checked)} {checked.mixed} have tokens of several "
        f"versions, {checked.unstamped} do not say whose all of their tokens are, {checked.stale} "
        f"were stale ({checked.decided} decided).\n"
    )


def _staged(results: ControlResults) -> str:
    if results.staged is None:
        return ""
    figures = results.staged[1]
    rows = [
        _spread("upload to answer, ms", figures.took_ms, 0),
        *(_spread(f"phase {phase}, ms", spread, 0) for phase, spread in figures.phases_ms.items()),
    ]
    return (
        "## A large adapter on its way to all boards\n\n"
        f"{table(['', 'p50', 'p99', 'count'], rows)}\n"
        f"{LARGE_BYTES >> 20} MiB, uploaded over HTTP, staged and verified on {figures.boards} "
        "boards, loaded, tried and served by all of them, without requests. Before that one board "
        "tries it in a fresh engine, which loads the model once more (phase `adapter_stage: "
        "trying`). All boards write to the same disk and share the cores. The simulated runtime "
        f"waits {figures.simulated_ms:.0f} ms for the loading, which the target leaves out.\n"
    )


def _rounds(results: ControlResults) -> str:
    if results.rounds is None:
        return ""
    rounds = results.rounds[1]
    rows = [
        [
            one.part,
            megabytes(one.before.rss),
            megabytes(one.after.rss),
            percent(one.rss_share),
            f"{one.before.files} to {one.after.files}",
            f"{one.before.threads} to {one.after.threads}",
        ]
        for one in rounds.growth
    ]
    head = ["", "MB before", "MB after", "more", "files", "threads"]
    text = (
        "Too few rounds to say whether anything grows."
        if not rows
        else f"{table(head, rows)}\nAll processes of a part together: medians of the second and of "
        f"the last quarter of the samples, between which there are {rounds.growth[0].rounds} "
        "rounds."
    )
    return (
        "## Over and over again\n\n"
        f"{text} {rounds.count} rounds of pause, switch (`atomic`) and resume, one after the other "
        f"(`--rounds`). {_of_answers(rounds.checked)} Calls refused, undone or done in part: "
        f"{rounds.refused}.\n"
    )


def _faults(results: ControlResults) -> str:
    return faults_section(results.faults)


def _noise(results: ControlResults) -> str:
    return noise_section(results.cpu.items())


def _method(_: ControlResults) -> str:
    first_s, last_s = BETWEEN_S
    return (
        "## How\n\n"
        "Clients and the controller are raw asyncio connections in one process with one clock. "
        "The moment of a call's answer lies behind everything that had arrived on any connection "
        "when the answer did, and before everything that came later. Between a resumption, or a "
        f"switch, and the next call there are {first_s:g} to {last_s:g} s. What a version says of "
        "a prompt was asked before, on the same cluster at rest, by its full name. Ray runs "
        "without its dashboard and log forwarding, otherwise with its defaults.\n"
    )


def faults_section(found: Sequence[FaultFigures]) -> str:
    """Return the section; empty where no fault was tried."""
    if not found:
        return ""
    states = [[one.name, _states(one), *map(str, (one.unsettled, one.stale))] for one in found]
    return (
        "## Faults\n\n"
        f"{table(_HEAD, [_row(one) for one in found])}\n"
        f"{_how()}\n"
        f"{table(['fault', 'operations', 'not whole', 'stale'], states)}\n"
        f"{_flaws(found)}"
    )


def _row(one: FaultFigures) -> list[str]:
    counts = (one.left_paused, one.mixed, one.lost, one.lost_of_killed, one.answers)
    return [
        one.name,
        str(one.hits),
        str(one.tries),
        figure(one.p50_s),
        figure(one.max_s),
        *map(str, counts),
    ]


def _states(one: FaultFigures) -> str:
    return ", ".join(f"{count} x {state}" for state, count in one.states.items())


def _how() -> str:
    return (
        f"On {FAULT_BOARDS} boards at {TIME_SCALE:g} of their times, under {CLIENTS} streams, with "
        f"adapters of {CONTENT_BYTES >> 20} MiB. A time counts where the fault happened at its "
        "moment: the ledger, or the file, was there still right after it. To make sure of a short "
        "moment a board stands still (SIGSTOP) for as long. Whole again is the cluster, by itself, "
        "when nothing is paused, all operations are over, and all boards are ready, obey the epoch "
        f"of now and have all versions, within {LIMIT_S:.0f} s. Mixed answers have tokens of "
        "several versions, or others than their version's; stale ones began with a version that "
        "was not served any more once the cluster was whole. Lost are answers that ended in an "
        "error, beyond the one that a killed board (`of killed`) was in the middle of. All tries "
        "count for these.\n\n"
        "A corrupted chunk is a byte that is flipped in the file on its way to one board's disk. A "
        "full disk is a limit on the size of files that one board's process may write "
        "(RLIMIT_FSIZE): its writes fail as those on a full disk do. A board that joins is one "
        "whose process was killed and whose disk was emptied. One that comes back with an old "
        "version was killed and started late, or stood still during the update.\n"
    )


def _flaws(found: Sequence[FaultFigures]) -> str:
    rows = [
        f"- {one.name}: {'; '.join((*one.flaws, *one.errors))}\n"
        for one in found
        if one.flaws or one.errors
    ]
    return "".join(rows)
