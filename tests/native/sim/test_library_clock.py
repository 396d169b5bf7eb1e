"""What the simulated runtime costs: the time of a board, and next to no CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("sanitize", "scenario"),
    [
        pytest.param("address,undefined", ["tour"], id="a tour of everything"),
        pytest.param("address,undefined", ["fuzz", "2000"], id="any ids in any order"),
        pytest.param("address,undefined", ["mutate", "500", "broken.rkllm"], id="any model file"),
        pytest.param("thread", ["threads"], id="threads"),
    ],
)
def test_sanitizers_find_nothing(
    release: str,
    sanitize: str,
    scenario: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, printed = run_probe(
        probe("sim_probe", release, sanitize), *scenario, time_scale="0.002"
    )
    assert code == 0, printed[-4000:]
    assert "Sanitizer" not in printed


def test_a_token_costs_less_than_20_us_of_cpu(
    release: str, record_property: Callable[[str, object], None]
) -> None:
    code, printed, _ = run_probe(probe("sim_probe", release), "bench", "3500")
    assert code == 0
    record_property("cpu_us_per_token", printed.strip())
    assert float(printed) < 20
