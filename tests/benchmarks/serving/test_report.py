"""The benchmark's targets, and the report that says whether they are reached."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.serving.cases import Load, Loaded, Pair
from benchmarks.serving.oneboard_figures import parked_figures, pause_figures
from benchmarks.serving.report import Results, render
from benchmarks.serving.summary import hang_up_figures, load_figures, pair_figures, verdicts
from rkserve.bench.processes import CpuUse, ProcessMemory
from rkserve.bench.results import Machine
from tests.support.values.bench_answers import (
    answer,
    back_to_back,
    batches,
    interrupted,
    left_at,
    parked_round,
    reading,
)

MB = 1_000_000


def loaded(boards: int, time_scale: float = 1.0, replica_mb: float = 166.0) -> Loaded:
    runs = [run for n in range(boards) for run in back_to_back(f"sim-{n}", 20, 0.1 * n)]
    cpu, idle = CpuUse(2), CpuUse(2)
    cpu.add(reading(0, 0, router=0.0, proxy=0.0), reading(20, 900, router=300.0, proxy=100.0))
    idle.add(reading(0, 0, router=0.0), reading(10, 90, router=50.0))
    memories = {
        "board replica": [
            ProcessMemory(100 * MB, 50 * MB),
            ProcessMemory(int(replica_mb * MB), 90 * MB),
        ]
    }
    load = Load(boards, 4 * boards, time_scale)
    return Loaded(load, runs, 5.0, 25.0, 30.0, cpu, memories, idle)


def test_a_load_is_summed_up_against_the_boards_that_it_had() -> None:
    figures = load_figures(loaded(3), board_rate=2.5)

    assert figures.rate == pytest.approx(7.5)
    assert figures.of_sum == pytest.approx(1.0)
    assert figures.unqueued_ttft_ms is not None
    assert figures.unqueued_ttft_ms.p50 == pytest.approx(400)
    assert figures.cpu_ms_per_token == pytest.approx({"router": 2.0, "proxy": 2 / 3}, rel=0.02)
    # 400 ms in 20 s of which idling would take 100.
    assert figures.work_ms_per_token == pytest.approx(2.0, rel=0.02)


def test_a_window_in_which_no_answer_ends_says_nothing_of_what_they_take_without_a_queue() -> None:
    measured = loaded(1)
    measured.exchanges = [
        replace(one, end_s=None) if one.sent_s >= 5.0 else one for one in measured.exchanges
    ]

    figures = load_figures(measured, board_rate=None)

    assert figures.unqueued_ttft_ms is None
    assert figures.ttft_ms.p50 == pytest.approx(500)
    assert figures.answers_per_s == pytest.approx(1 / 20)  # one began before the window


def test_a_board_that_never_answers_is_missing_from_the_sum() -> None:
    measured = loaded(3)
    measured.exchanges = [one for one in measured.exchanges if one.board != "sim-2"]

    assert load_figures(measured, board_rate=2.5).of_sum == pytest.approx(2 / 3)


def test_targets_are_judged_from_what_was_measured() -> None:
    alone = [answer(10 * n, 10 * n + 1.0, 10 * n + 3.0) for n in range(5)]
    slow = [answer(10 * n, 10 * n + 1.04, 10 * n + 3.2) for n in range(5)]
    pair = pair_figures(Pair(alone=alone, through=slow))
    paced = loaded(1, replica_mb=251)

    left = hang_up_figures([left_at(1.0, free_after_s=0.27)])

    found = verdicts(pair, left, [(paced, load_figures(paced, board_rate=2.5))])

    measured = [1.04, 2.0 / 2.16, 3.0 / 3.2, 270, 1.0, 251]
    assert [v.measured for v in found] == pytest.approx(measured)
    assert [v.reached for v in found] == [True, False, False, False, True, False]
    assert found[3].bound == pytest.approx(left.step_ms + 200)


@pytest.mark.parametrize(("free_after_s", "reached"), [(0.25, True), (0.27, False)])
def test_a_hang_up_may_take_a_decode_step_and_200_ms(free_after_s: float, reached: bool) -> None:
    left = [left_at(10.0 * n, free_after_s) for n in range(20)]

    (verdict,) = verdicts(None, hang_up_figures(left), [])

    assert verdict.reached is reached


def results() -> Results:
    alone = [answer(10 * n, 10 * n + 1.0, 10 * n + 3.0) for n in range(5)]
    pair = Pair(alone=alone, through=alone)
    pair.cpu.add(reading(0, 0, router=0.0), reading(20, 900, router=300.0))
    figures = pair_figures(pair)
    paced = [(one, load_figures(one, 2.5)) for one in (loaded(1), loaded(3))]
    ceiling = [(one, load_figures(one, None)) for one in [loaded(1, time_scale=0)]]
    left = [left_at(10.0 * n) for n in range(20)]
    return Results(
        machine=Machine(2, "Some CPU", 24.0, {"Ray": "2.60.0"}),
        verdicts=verdicts(figures, hang_up_figures(left), [*paced, *ceiling]),
        pair=(pair, figures),
        hang_ups=(left, hang_up_figures(left)),
        paced=paced,
        ceiling=ceiling,
    )


def tables_of(text: str) -> list[list[str]]:
    """The Markdown tables in a text, each as its lines."""
    blocks = (block.splitlines() for block in text.split("\n\n"))
    return [block for block in blocks if block and block[0].startswith("|")]


def test_the_report_holds_every_part_and_well_formed_tables() -> None:
    text = render(results())

    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.partition(" ")[2][:8] for title in titles] == [
        "What it ",
        "(a) The ",
        "A client",
        "(c) Boar",
        "(d) The ",
        "CPU per ",
        "Idle: CP",
        "Resident",
        "Noise",
        "How",
    ]
    found = tables_of(text)
    assert len(found) == 9
    for lines in found:
        assert len({line.count("|") for line in lines}) == 1
        assert len({len(line) for line in lines}) == 1
    assert "| (b) / (a) TTFT, medians " in text
    assert "reached" in text
    assert "| (b) hang-up to free board, p99: decode step + 200 ms " in text
    assert "2 x 166 (90)" in text
    assert "Measured windows: 20 s in (c), 20 s in (d)." in text


def test_the_cases_about_one_board_come_between_the_loads_and_the_processes() -> None:
    rounds, pauses = [parked_round(n) for n in range(3)], [interrupted()]
    found = replace(
        results(),
        parked=(rounds, parked_figures(rounds)),
        pauses=[(pauses, pause_figures(pauses, step_ms=100.0))],
        batches=batches(),
        one_board_cpu={"(f) kept": loaded(1).cpu},
    )

    text = render(found)

    titles = [line[3:6] for line in text.splitlines() if line.startswith("## ")]
    assert titles[3:9] == ["(c)", "(d)", "(e)", "(f)", "(g)", "CPU"]
    lines = tables_of(text)
    assert len(lines) == 9 + 2 + 1 + 2
    for block in lines:
        assert len({len(line) for line in block}) == 1
    assert "0.250 (" in text
    assert "| (f) kept " in text
    assert "**The disk is simulated**" in text
    assert "input of the simulator and no measurement" in text


def test_a_report_of_some_cases_leaves_the_others_out() -> None:
    everything = results()
    assert everything.pair is not None
    alone_only = Pair(alone=everything.pair[0].alone)
    pair = (alone_only, pair_figures(alone_only))
    some = Results(everything.machine, [], pair, hang_ups=None, paced=[], ceiling=[])

    text = render(some)

    assert "(c)" not in text
    assert "must reach" not in text
    assert len(tables_of(text)) == 1
