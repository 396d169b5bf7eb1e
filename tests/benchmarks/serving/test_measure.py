"""Cases of the benchmark that fail, and those that go on without them."""

from __future__ import annotations

from statistics import StatisticsError
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.command import ProgressLine
from benchmarks.serving import measure
from benchmarks.serving.measure import QUICK, Measurement
from benchmarks.serving.report import render
from rkserve.bench.processes import BenchFailed


@pytest.fixture
def measurement(monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """A measurement that starts no process."""
    monkeypatch.setattr(measure, "Bench", lambda _: None)
    monkeypatch.setattr(measure, "OneBoard", lambda _: SimpleNamespace(cpu={}))
    return Measurement(None, ProgressLine(), QUICK)  # type: ignore[arg-type] # nothing uses the crew


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(BenchFailed("no answer at all"), "no answer at all", id="no answer"),
        pytest.param(StatisticsError("no median for empty data"), "no median", id="no figures"),
    ],
)
def test_a_case_that_fails_is_in_the_report_and_the_others_go_on(
    error: Exception, reason: str, measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def failing(*_: Any, **__: Any) -> None:
        measurement._progress.begin("(e) parked conversations")
        raise error

    monkeypatch.setattr(measurement, "_parked", failing)
    monkeypatch.setattr(measurement, "_batches", lambda: done.append("g"))
    results = measurement.measure("eg")
    assert (results.parked, done) == (None, ["g"])
    (failed,) = results.failed
    assert failed.startswith("(e) parked conversations: ")
    assert reason in failed
    assert f"**Failed**: {failed}" in render(results)


def test_a_bug_of_the_benchmark_is_no_failed_case(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KeyError("x")

    monkeypatch.setattr(measurement, "_parked", broken)
    with pytest.raises(KeyError):
        measurement.measure("e")
