"""What the simulated runtime costs: the time of a board, and next to no CPU."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.sim.releases import BOTH
from tests.support.sim.sim_driver import Sim, chat, probe, run_probe

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")


# --- costs


def test_a_hundred_idle_boards_cost_nothing(release: str) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    boards = [Sim(release) for _ in range(100)]
    for board in boards[:3]:
        board.run(chat("Count to 3"))
    assert threads() == before
    cpu = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - cpu < 0.05
    for board in boards:
        assert board.destroy() == 0


ADDRESSES, THREADS = "address,undefined", "thread"


@pytest.fixture(scope="module")
def probes() -> dict[tuple[str, str], Path]:
    """The instrumented programs, by release and sanitizer, built side by side."""
    kinds = list(itertools.product(BOTH, (ADDRESSES, THREADS)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = pool.map(lambda kind: probe("sim_probe", *kind), kinds)
        return dict(zip(kinds, programs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("sanitize", "scenario"),
    [
        pytest.param(ADDRESSES, ["tour"], id="a tour of everything"),
        pytest.param(ADDRESSES, ["fuzz", "2000"], id="any ids in any order"),
        pytest.param(ADDRESSES, ["mutate", "500", "broken.rkllm"], id="any model file"),
        pytest.param(THREADS, ["threads"], id="threads"),
    ],
)
def test_sanitizers_find_nothing(
    *,
    probes: dict[tuple[str, str], Path],
    release: str,
    sanitize: str,
    scenario: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, printed = run_probe(probes[release, sanitize], *scenario, time_scale="0.002")
    assert code == 0, printed[-4000:]
    assert "Sanitizer" not in printed


def test_a_token_costs_less_than_20_us_of_cpu(
    release: str, record_property: Callable[[str, object], None]
) -> None:
    code, printed, _ = run_probe(probe("sim_probe", release), "bench", "3500")
    assert code == 0
    record_property("cpu_us_per_token", printed.strip())
    assert float(printed) < 20
