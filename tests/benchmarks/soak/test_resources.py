"""Slopes of memory, with their intervals, and the growth of files and threads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.resources import (
    HOUR_S,
    Held,
    ProcessTrace,
    ResourceSampler,
    figures_of,
    processes_of,
    slope,
    warm_up_s,
)

MB = 1e6


def line(
    per_hour: float, level: float, noise: float = 0.0, seed: int = 0
) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    times = [10.0 * step for step in range(100)]
    return [(at, level + per_hour * at / HOUR_S + rng.gauss(0.0, noise)) for at in times]


def test_a_slope_is_that_of_all_processes_each_at_its_own_level() -> None:
    found = slope([line(3 * MB, 50 * MB), line(3 * MB, 500 * MB)])
    assert found is not None
    assert found.per_hour == pytest.approx(3 * MB)
    assert found.half == pytest.approx(0.0, abs=1.0)


def test_the_interval_holds_the_slope_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(200):
        found = slope([line(2 * MB, 0.0, noise=MB, seed=seed)])
        assert found is not None
        hits += abs(found.per_hour - 2 * MB) <= found.half
    assert 180 <= hits <= 200


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    def stairs(width: int) -> list[tuple[float, float]]:
        return [(10.0 * at, MB * ((at // width) % 2)) for at in range(120)]

    quick, slow = slope([stairs(1)]), slope([stairs(20)])
    assert quick is not None
    assert slow is not None
    assert slow.half > 3 * quick.half


def test_without_extent_in_time_there_is_no_slope() -> None:
    assert slope([]) is None
    assert slope([[(1.0, 2.0)]]) is None


def trace(role: str, samples: int, *, rss: float = 0.0, files: int = 0) -> ProcessTrace:
    """A process whose memory jumps at its start, and then grows by so much a sample."""
    held = [
        Held(10.0 * at, int((0 if at < 3 else 100 * MB) + rss * at), 1000, 5 + files * at, 2)
        for at in range(samples)
    ]
    return ProcessTrace(role, held)


def test_the_first_part_of_a_life_is_left_out_and_so_are_short_lives() -> None:
    lasted_s = 300.0
    assert warm_up_s(lasted_s) == 30.0
    traces = [trace("router", 40), trace("router", 5), trace("engine", 4)]
    (found,) = figures_of(traces, {"router": 1}, lasted_s)
    assert (found.role, found.processes, found.zombies) == ("router", 1, 1)
    assert found.slope is not None
    assert found.slope.per_hour == pytest.approx(0.0, abs=1.0)
    assert found.files_constant


def test_the_largest_growth_of_one_process_counts() -> None:
    traces = [trace("router", 40), trace("router", 40, rss=MB, files=1)]
    (found,) = figures_of(traces, {}, 300.0)
    assert found.files == pytest.approx(25.0, abs=2.0)
    assert not found.files_constant


@pytest.mark.parametrize(("hours", "warm_s"), [(0.01, 30.0), (0.5, 180.0), (24.0, 600.0)])
def test_the_warm_up_grows_with_the_run_up_to_a_limit(hours: float, warm_s: float) -> None:
    assert warm_up_s(hours * HOUR_S) == pytest.approx(warm_s)


def test_a_process_is_known_by_the_folder_in_its_environment(tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path / "home")}
    sleeps = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(sleeps, env=environ, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert processes_of(tmp_path) == [f"{process.pid} (other Ray)"]
            sampler = ResourceSampler(tmp_path)
            sampler.look()
            (found,) = sampler.traces.values()
            assert found.samples[0].rss > 0
            assert found.samples[0].files >= 3
            assert found.samples[0].threads == 1
        finally:
            process.kill()
    assert processes_of(tmp_path) == []
