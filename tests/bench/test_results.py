"""Results as JSON and as lines of outcomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.bench.figures import Slo, compare, figures
from rkserve.bench.player import PlayedRun
from rkserve.bench.results import (
    BenchResults,
    RunResult,
    TargetVerdict,
    figure,
    machine,
    outcome_lines,
    table,
)
from tests.support.values.bench_load import answered, failed, played


@pytest.mark.parametrize(
    ("measured", "at_most", "reached"),
    [
        pytest.param(1.05, True, True, id="exactly at an upper bound"),
        pytest.param(1.051, True, False, id="above it"),
        pytest.param(1.05, False, True, id="exactly at a lower bound"),
        pytest.param(1.049, False, False, id="below it"),
    ],
)
def test_a_bound_belongs_to_what_reaches_it(measured: float, at_most: bool, reached: bool) -> None:
    assert TargetVerdict("x", measured, 1.05, at_most).reached is reached


def test_tables_are_padded_and_figures_stand_to_the_right() -> None:
    assert table(["", "ms"], [["TTFT", figure(12345.678, 1)], ["gap", figure(None)]]) == (
        "|      |       ms |\n| ---- | -------: |\n| TTFT | 12 345.7 |\n| gap  |        - |\n"
    )


SLO = Slo(ttft_ms=1000)


def result(run: PlayedRun) -> RunResult:
    return RunResult(run, figures(run, SLO))


def results(*runs: PlayedRun, **more: Any) -> BenchResults:
    about = {"trace": "2 sessions"}
    return BenchResults("Load", machine(), about, SLO, [result(one) for one in runs], **more)


FAST = played([answered(11.0, board="sim-0", cached_tokens=50), failed(12.0)], target="fast")
SLOW = played([answered(11.0, ttft_s=2.0, board="sim-1", cached_tokens=0)], target="slow")


def test_errors_are_counted_over_all_runs() -> None:
    assert results(FAST, SLOW).error_share == pytest.approx(1 / 3)
    assert results().error_share == 0.0
    assert not results(FAST).unreachable


def test_json_says_all_figures_and_no_times_of_day() -> None:
    found = json.loads(json.dumps(results(FAST, comparisons=[compare(FAST, SLOW, SLO)]).to_json()))
    (run,) = found["runs"]
    assert run["ttft_ms"]["p50"] == {"value": pytest.approx(500.0), "low": None, "high": None}
    assert run["prefix"]["ratio"] == pytest.approx(0.5)
    assert run["errors"] == {"refused 429 queue_full": 1}
    assert found["comparisons"][0]["ratios"]["TTFT p50"]["value"] == pytest.approx(0.25)


def test_each_outcome_is_a_line_with_times_from_the_start_of_its_run() -> None:
    first, second = (json.loads(line) for line in outcome_lines([result(FAST)]))
    assert (first["run"], first["session"], first["kind"]) == ("fast", "s0", "ok")
    assert first["due_s"] == pytest.approx(1.0)
    assert first["text_s"] == pytest.approx([1.5, 1.6, 1.7, 1.8, 1.9])
    assert (second["kind"], second["end_s"]) == ("refused", None)
