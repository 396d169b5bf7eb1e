"""The soak's report, its exit code, and what is looked at in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.__main__ import REPORT, options
from benchmarks.soak.ending import adapter_flaws, board_flaws
from benchmarks.soak.faults import FRONT, WEIGHTS, chosen
from benchmarks.soak.judge import Judge
from benchmarks.soak.operator import AdapterHistory
from benchmarks.soak.report import END_STATE, SoakRun, render, verdict
from benchmarks.soak.resources import RoleFigures, Slope
from rkserve.bench.results import Machine
from tests.benchmarks.soak.test_judge import CALL, REFUSED, WHOLE

MB = 1e6
ROUTER = RoleFigures("router", 2, 0.8, 100 * MB, Slope(0.2 * MB, 0.3 * MB), None, 1.0, 0.0, 0)


def judged(*, fired: int = 20, missed: int = 0) -> Judge:
    judge = Judge()
    for outcome in (WHOLE, WHOLE, REFUSED):
        judge.take(outcome)
    judge.take_call(CALL)
    for at in range(fired + missed):
        window = judge.fault_begins("node", front=False, at_s=float(at))
        judge.fault_ends(window, at + 2.0, fired=at < fired)
    return judge


def run_of(judge: Judge, *roles: RoleFigures, hours: float = 0.5) -> SoakRun:
    machine = Machine(2, "cpu", 4.0, {"Ray": "2"})
    return SoakRun(machine, judge, roles, "How.", hours * 3600, 3.0, {"scrape": 7000})


def test_a_good_run_passes_and_its_figures_add_up() -> None:
    run = run_of(judged(), ROUTER)
    report = render(run)
    assert run.passed
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["all"] == ["3", "2", "1", "0", "0", "0", "0", "0", "0"]
    assert rows["node"] == ["20", "0", "2.0", "2.0"]
    assert rows["pause"] == ["1", "1", "-"]
    assert rows["router"][3] == "+0.2 ± 0.3"
    assert rows["router"][5] == "reached"
    assert "Broken rules" not in report
    assert "missed" not in report


def test_a_broken_rule_is_named_and_fails_the_run() -> None:
    judge = judged()
    judge.flaw(END_STATE, "sim-1 is drained")
    report = render(run_of(judge))
    assert not run_of(judge).passed
    assert "    - sim-1 is drained\n" in report
    assert next(line for line in report.splitlines() if END_STATE in line).endswith("missed |")


@pytest.mark.parametrize(("missed", "passed"), [(1, True), (2, False)])
def test_a_run_of_which_too_many_faults_did_not_fire_is_not_valid(
    missed: int, *, passed: bool
) -> None:
    assert run_of(judged(fired=20, missed=missed)).passed is passed


@pytest.mark.parametrize(
    ("slope", "said"),
    [
        (Slope(0.2 * MB, 0.5 * MB), "reached"),
        (Slope(0.9 * MB, 0.5 * MB), "open"),
        (Slope(5 * MB, 0.5 * MB), "missed"),
        (None, "-"),
    ],
)
def test_a_slope_is_judged_where_its_interval_decides(slope: Slope | None, said: str) -> None:
    assert verdict(replace(ROUTER, slope=slope)) == said


def test_memory_and_files_are_held_to_their_goals_in_long_runs() -> None:
    growing = replace(ROUTER, slope=Slope(5 * MB, MB))
    assert run_of(judged(), growing).passed
    assert not run_of(judged(), growing, hours=24.0).passed
    opening = replace(ROUTER, files=9.0)
    assert run_of(judged(), opening).passed
    assert not run_of(judged(), opening, hours=24.0).passed
    assert "| roles that grow" in render(run_of(judged(), opening, hours=24.0))
    assert run_of(judged(), replace(opening, role="gcs"), hours=24.0).passed, "Ray's own"


def test_a_run_that_was_ended_early_says_so() -> None:
    assert "ended before its time" in render(replace(run_of(judged()), interrupted=True))


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        pytest.param([], REPORT, id="a day"),
        pytest.param(["--hours", "0.03"], None, id="a smoke run"),
        pytest.param(["--only", "node"], None, id="some faults"),
        pytest.param(["--hours", "0.03", "--output", "a.md"], Path("a.md"), id="as asked for"),
    ],
)
def test_only_a_run_of_some_length_is_published_by_itself(
    arguments: list[str], output: Path | None
) -> None:
    assert options(arguments).output == output


def test_faults_are_chosen_by_a_word_and_those_of_the_front_are_among_them() -> None:
    assert chosen([]) == dict(WEIGHTS)
    assert [*chosen(["SIGSTOP", "node"])] == ["replica, SIGSTOP for 2 s", "node"]
    assert set(WEIGHTS) >= FRONT


# -- the end ---------------------------------------------------------------------------------------

BOARD = {"id": "b", "state": "ready", "running": 0, "queued": 0}


@pytest.mark.parametrize(
    ("boards", "flaw"),
    [
        ([BOARD], []),
        ([], ["there are 0 boards, not 1"]),
        ([{**BOARD, "state": "failed"}], ["b is failed"]),
        ([{**BOARD, "drained": True}], ["b is drained"]),
        ([{**BOARD, "running": 2}], ["b has 2 running"]),
    ],
)
def test_each_board_has_to_be_ready_and_idle(boards: list[dict[str, Any]], flaw: list[str]) -> None:
    assert board_flaws(boards, 1) == flaw


def adapter(active: str, staged: int = 2, candidate: str | None = None) -> dict[str, Any]:
    on = {str(board): {"staged": board < staged} for board in range(2)}
    versions = [{"version": active, "boards": on}]
    return {"name": "tone", "active": active, "candidate": candidate, "versions": versions}


@pytest.mark.parametrize(
    ("entries", "flaw"),
    [
        ([adapter("v2")], []),
        ([], ["the adapter is gone"]),
        ([adapter("v9")], ["the adapter is v9, not v2 or v3"]),
        ([adapter("v3", staged=1)], ["v3 is staged on 1 of 2 boards"]),
        ([adapter("v3", candidate="v4")], ["the adapter has a candidate"]),
    ],
)
def test_the_adapter_has_to_be_one_that_was_asked_for_on_all_boards(
    entries: list[dict[str, Any]], flaw: list[str]
) -> None:
    assert adapter_flaws(entries, 2, ("v2", "v3")) == flaw


def test_while_a_change_is_on_its_way_both_versions_may_be_served() -> None:
    history = AdapterHistory()

    def active() -> list[str]:
        return sorted(history.active)

    history.push_begins("v1", 1)
    history.push_ends("v1")
    history.push_begins("v2", 2)
    assert active() == ["v1", "v2"]
    history.push_ends("v2")
    assert active() == ["v2"]
    assert history.previous == ("v1",)
    history.rollback_begins()
    assert active() == ["v1", "v2"]
    history.rollback_ends("v1")
    assert active() == ["v1"]


@pytest.mark.parametrize(
    ("version", "seed"),
    [("tone@v2", 2), ("tone@v9", None), ("tone@v1+tone@v2", None), ("", None)],
)
def test_a_version_is_known_by_its_seed_and_a_mixture_is_no_version(
    version: str, seed: int | None
) -> None:
    history = AdapterHistory({"v1": 1, "v2": 2})
    assert history.seed_of(version) == seed
