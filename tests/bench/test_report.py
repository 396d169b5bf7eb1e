"""What is made of results: Markdown, plots, JSON, answers side by side; and watched processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.bench.figures import Slo, compare, figures
from rkserve.bench.player import PlayedRun, PlayOptions
from rkserve.bench.report import charts, summary
from rkserve.bench.report import render as render_report
from rkserve.bench.results import BenchResults, RunResult, TargetVerdict, machine
from tests.support.values.bench_load import answered, failed, played

SLO = Slo(ttft_ms=1000)


def result(run: PlayedRun) -> RunResult:
    return RunResult(run, figures(run, SLO))


def results(*runs: PlayedRun, **more: Any) -> BenchResults:
    about = {"trace": "2 sessions"}
    return BenchResults("Load", machine(), about, SLO, [result(one) for one in runs], **more)


FAST = played([answered(11.0, board="sim-0", cached_tokens=50), failed(12.0)], target="fast")
SLOW = played([answered(11.0, ttft_s=2.0, board="sim-1", cached_tokens=0)], target="slow")


# -- the report -----------------------------------------------------------------------------------


def row(text: str, begins: str) -> list[str]:
    line = next(one for one in text.splitlines() if one.startswith(f"| {begins}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_report_has_rates_latencies_errors_and_ratios() -> None:
    both = [compare(FAST, SLOW, SLO)]
    text = render_report(results(FAST, SLOW, comparisons=both), charts([FAST, SLOW]))
    assert row(text, "fast |")[:4] == ["fast", "2", "1", "1"]
    assert row(text, "TTFT: slow")[1] == "2 000.0"
    assert row(text, "refused 429 queue_full")[1:] == ["1", "0"]
    assert row(text, "fast / slow")[2] == "0.250 (0.250 to 0.250)"
    assert row(text, "sim-1")[1:] == ["0", "1"]
    assert "(ttft.svg)" in text
    assert "TTFT ≤ 1000 ms" in text


def test_a_missed_target_is_said() -> None:
    missed = TargetVerdict("TTFT p50: a / b", 0.5, 0.4, at_most=True)
    found = results(FAST, verdicts=[missed, TargetVerdict("answered", 1.0, 1.0, at_most=False)])
    assert row(summary(found), "TTFT p50: a / b")[-1] == "missed"
    assert row(summary(found), "answered")[-1] == "reached"
    assert found.missed == [missed]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        pytest.param(played([answered(11.0)], cpu_s=19.5), "98% of a core", id="busy itself"),
        pytest.param(played([answered(11.0, usage=False)]), "came without usage", id="no usage"),
        pytest.param(played([answered(11.0, streamed=False)]), "not streamed", id="not streamed"),
    ],
)
def test_figures_that_may_mislead_say_so(run: PlayedRun, said: str) -> None:
    assert said in summary(results(run))
    assert said in render_report(results(run))


def test_an_interrupted_benchmark_says_so() -> None:
    found = results(played([], interrupted=True), complete=False)
    assert "Interrupted" in summary(found)
    assert json.loads(json.dumps(found.to_json()))["complete"] is False


def test_a_closed_loop_says_what_it_cannot_see() -> None:
    closed = played([answered(11.0)], plan=PlayOptions(clients=2))
    assert "closed loop a slow server" in render_report(results(closed))
    assert "closed loop a slow server" not in render_report(results(FAST))


# -- plots ----------------------------------------------------------------------------------------


# -- side by side ---------------------------------------------------------------------------------


# -- processes ------------------------------------------------------------------------------------
