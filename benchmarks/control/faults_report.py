"""The report's section on faults, as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.control.faults import FaultFigures
from benchmarks.control.faults_cases import BOARDS, CLIENTS, CONTENT_BYTES, LIMIT_S, TIME_SCALE
from rkserve.bench.tables import figure, table

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
        f"On {BOARDS} boards at {TIME_SCALE:g} of their times, under {CLIENTS} streams, with "
        f"adapters of {CONTENT_BYTES >> 20} MiB. A time counts where the fault happened at its "
        "moment: the ledger, or the file, was there still right after it. To make sure of a short "
        "moment a board stands still (SIGSTOP) for as long. Whole again is the cluster, by itself, "
        "when nobody is paused, every operation is over, and every board is ready, obeys the epoch "
        f"of now and has all versions; it has {LIMIT_S:.0f} s. Mixed answers have tokens of "
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
