"""Report of a soak: goals, traffic, faults, calls, resources and flaws. Pure.

It contains no date, no host name and no path, so that two reports differ in figures only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.figures import machine_line
from benchmarks.soak.judge import NOT_FIRED_SHARE, Ending, Judge, faults_total
from benchmarks.soak.resources import LONG_HOURS, RSS_GOAL_BYTES, RoleFigures, Slope, warm_up_s
from rkserve.bench.results import MISSING, Machine, figure, megabytes, percent, table

MINUTE_S, HOUR_S = 60.0, 3600.0
# Flaws by the goal that they break; all others are of answers.
END_STATE = "the cluster is not as it must be at the end"
ORPHANS = "a process is left over"
CALM = "an answer is wrong or missing at the end, at rest"


@dataclass(frozen=True)
class SoakRun:
    """The results of a run, and its description; ``load`` is the machine's mean load meanwhile."""

    machine: Machine
    judge: Judge
    roles: Sequence[RoleFigures]
    how: str
    took_s: float
    load: float
    seen: Mapping[str, int]
    interrupted: bool = False

    @property
    def long(self) -> bool:
        """True if slopes are held to the goal."""
        return self.took_s >= LONG_HOURS * HOUR_S

    @property
    def grown(self) -> list[RoleFigures]:
        """Roles of ours that have grown more than they may, in a run that is long enough."""
        return [
            one
            for one in self.roles
            if self.long and one.ours and (not one.files_constant or verdict(one) == "missed")
        ]

    @property
    def valid(self) -> bool:
        """True if the faults happened."""
        return self.judge.not_fired_share <= NOT_FIRED_SHARE

    @property
    def passed(self) -> bool:
        """True if no invariant is broken."""
        return self.judge.clean and self.valid and not self.grown


def verdict(one: RoleFigures) -> str:
    """Hold a role's slope to the goal, where its interval decides."""
    if one.slope is None:
        return MISSING
    if one.slope.per_hour + one.slope.half <= RSS_GOAL_BYTES:
        return "reached"
    if one.slope.per_hour - one.slope.half > RSS_GOAL_BYTES:
        return "missed"
    return "open"


def render(run: SoakRun) -> str:
    """Return the report."""
    ended = " It was ended before its time." if run.interrupted else ""
    return (
        "# Soak\n\n"
        "Written by `make soak`, which starts a Ray cluster of its own with HAProxy, Routers, keys "
        "and simulated boards on nodes of their own, puts every kind of traffic on it, breaks one "
        "part of it after the other, and judges every answer; "
        f"{run.took_s / MINUTE_S:.0f} minutes.{ended} What each fault may cost is in "
        "[faults](../explanation/faults.md).\n\n"
        f"{machine_line(run.machine)}\n"
        f"{run.how} The machine's load was {run.load:.1f} on average, other programs on it "
        "included.\n"
        f"\n{_goals(run)}\n{_traffic(run)}\n{_faults(run)}\n{_calls(run)}\n{_resources(run)}"
        f"{_flaws(run.judge)}"
    )


def _goals(run: SoakRun) -> str:
    judge = run.judge
    apart = (END_STATE, ORPHANS, CALM)
    answers = sum(count for what, count in judge.flaws.items() if what not in apart)
    total = faults_total(judge.faults.values())
    rows = [
        ["faults that fired", "", str(total.fired), ""],
        [
            "faults that did not fire",
            f"≤ {percent(NOT_FIRED_SHARE, 0)}",
            percent(judge.not_fired_share),
            _reached(run.valid),
        ],
        ["answers and calls against a rule", "0", str(answers), _reached(not answers)],
        *(
            [what, "0", str(judge.flaws[what]), _reached(not judge.flaws[what])]
            for what in (END_STATE, ORPHANS, CALM)
        ),
        [
            "roles that grow",
            "0",
            str(len(run.grown)) if run.long else MISSING,
            _reached(not run.grown) if run.long else MISSING,
        ],
    ]
    return f"## What it must reach\n\n{table(['what', 'target', 'measured', 'verdict'], rows)}"


def _reached(good: bool) -> str:
    return "reached" if good else "missed"


_SHOWN = (Ending.WHOLE, Ending.REFUSED, Ending.BROKEN, Ending.UNREACHED, Ending.LEFT)


def _traffic(run: SoakRun) -> str:
    kinds = sorted(run.judge.kinds.items())
    rows = [
        [
            name,
            str(one.endings.total()),
            *(str(one.endings[ending]) for ending in _SHOWN),
            str(sum(n for ending, n in one.endings.items() if ending not in _SHOWN)),
            str(one.continued),
            str(one.repeated),
        ]
        for name, one in kinds
    ]
    if rows:
        sums = [str(sum(int(row[at]) for row in rows)) for at in range(1, len(rows[0]))]
        rows.append(["all", *sums])
    refusals: dict[str, int] = {}
    for _, one in kinds:
        for what, count in one.refusals.items():
            refusals[what] = refusals.get(what, 0) + count
    named = ", ".join(
        f"{count} x `{what}`" for what, count in sorted(refusals.items(), key=lambda pair: -pair[1])
    )
    seen = ", ".join(f"{what}, {figure(size / 1e3, 0)} kB" for what, size in run.seen.items())
    head = [
        *("kind", "attempts", "whole", "refused", "broken off", "not connected"),
        *("left", "others", "went on", "repeats"),
    ]
    return (
        f"## Traffic\n\n{table(head, rows)}\n"
        "*Whole* answers are equal to that of the same cluster before the first fault, in every "
        "character, finish reason and usage. *Refused* ones have an error object; *broken off* are "
        "those of a Router or HAProxy that was killed, *not connected* those until HAProxy is "
        "back; *left* are those whose client hung up; "
        "*went on* are those that went on at another board. *Repeats* have the `Idempotency-Key` "
        f"of an earlier request. Refusals: {named or 'none'}. Received beside these: "
        f"{seen}.\n"
    )


def _faults(run: SoakRun) -> str:
    rows = [
        [
            name,
            str(one.fired),
            str(one.missed),
            figure(median(one.back_s), 1) if one.back_s else MISSING,
            figure(max(one.back_s), 1) if one.back_s else MISSING,
        ]
        for name, one in sorted(run.judge.faults.items())
    ]
    return (
        f"## Faults\n\n{table(['fault', 'fired', 'not fired', 'p50, s', 'longest, s'], rows)}\n"
        "The times are those from the choice of a victim until the fault has happened, and for "
        "parts of the head until the part is there again and answers. Boards come back meanwhile; "
        "the next fault waits until more than half of them serve.\n"
    )


def _calls(run: SoakRun) -> str:
    rows = [
        [
            what,
            str(found.total()),
            str(found["200"] + found["202"]),
            ", ".join(
                f"{count} x {status}"
                for status, count in found.most_common()
                if status not in ("200", "202")
            )
            or MISSING,
        ]
        for what, found in sorted(run.judge.calls.items())
    ]
    return f"## Control calls\n\n{table(['call', 'attempts', 'done', 'others'], rows)}"


def _resources(run: SoakRun) -> str:
    head = [
        *("role", "processes", "hours", "RSS, MB", "RSS slope, MB/h", "PSS slope, MB/h"),
        *("goal", "files", "threads", "zombies"),
    ]
    rows = [
        [
            one.role,
            str(one.processes),
            figure(one.hours, 2),
            megabytes(one.rss),
            _slope(one.slope),
            _slope(one.pss_slope),
            verdict(one) if one.ours else MISSING,
            f"{one.files:+.0f}",
            f"{one.threads:+.0f}",
            str(one.zombies),
        ]
        for one in run.roles
    ]
    held = (
        "This run is long enough to be held to that."
        if run.long
        else f"Runs of less than {LONG_HOURS:g} hours are not held to that: caches still fill, and "
        "the interval is wide."
    )
    return (
        f"\n## Resources\n\n{table(head, rows)}\n"
        f"Sampled every 10 s; the first {warm_up_s(run.took_s):.0f} s of each process are left out,"
        " and so are processes that did not live for as long again; of engines 30 s. Slopes "
        "are by least squares, with half of their 95 % interval; the goal of ours (Coordinator, "
        f"Routers, boards and engines) is {megabytes(RSS_GOAL_BYTES)} MB of RSS per hour or less, "
        f"and *open* where the interval does not decide. {held} *Files* and "
        "*threads* are the largest growth of one process, from the first third of its "
        "samples to the last one; *zombies* the most at one look.\n"
    )


def _slope(found: Slope | None) -> str:
    if found is None:
        return MISSING
    return f"{found.per_hour / 1e6:+.1f} ± {found.half / 1e6:.1f}"


def _flaws(judge: Judge) -> str:
    if judge.clean:
        return ""
    lines = [
        f"- {count} x {what}\n" + "".join(f"    - {one}\n" for one in judge.examples[what])
        for what, count in judge.flaws.most_common()
    ]
    return "\n## Broken rules\n\n" + "".join(lines)
