"""Gates of the control file: a run of the simulated runtime stands still where it is told to."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.sim.sim_driver import NORMAL, Event, Gate, Run, Sim, chat, wait_idle

pytest_plugins = ["tests.support.sim.sim_fixtures"]
pytestmark = pytest.mark.usefixtures("fast_env")


@pytest.mark.parametrize(
    ("where", "states"),
    [
        pytest.param("input", [], id="before it reads its input"),
        pytest.param("prefill", [], id="in the prefill"),
        pytest.param("token:1", [NORMAL], id="after the first token"),
        pytest.param("token:4", [NORMAL] * 4, id="after a few"),
    ],
)
def test_a_run_stands_still_at_a_gate_until_that_is_opened(
    release: str, gate: Gate, where: str, states: list[int]
) -> None:
    sim = Sim(release)
    whole = sim.run(chat("Count to 6"))
    gate.shut(where)
    sim.now = Run()
    assert sim.lib.rkllm_run_async(sim.handle, *sim.prepare(chat("Count to 6")), sim.ffi.NULL) == 0
    gate.wait()
    time.sleep(0.1)
    assert sim.lib.rkllm_is_running(sim.handle) == 1
    assert [event.state for event in sim.now.events] == states
    gate.shut(where)  # the same once more, and it stays where it is
    gate.wait()
    assert len(sim.now.events) == len(states)
    gate.open()
    wait_idle(sim)
    assert not gate.sign.exists()
    assert [event.state for event in sim.now.events] == [event.state for event in whole.events]
    assert sim.now.ids == whole.ids
    assert sim.destroy() == 0


def test_a_gate_that_is_shut_late_holds_at_the_next_token(release: str, gate: Gate) -> None:
    sim = Sim(release)
    seen: list[int] = []

    def shut(event: Event, _result: Any) -> int:
        seen.append(event.state)
        if len(seen) == 7:
            gate.shut("token:3")
        return 0

    opening = gate.thread(lambda: seen.append(-1))
    sim.run(chat("Write 20 tokens"), shut)
    opening.join()
    assert seen[:9] == [NORMAL] * 8 + [-1]
    assert seen.count(NORMAL) == 21
    assert sim.destroy() == 0


@pytest.mark.parametrize("where", ["nowhere", "token:", "token:0", "token:x"])
def test_a_gate_that_is_none_is_named_and_holds_nothing(
    release: str, gate: Gate, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sim = Sim(release)
    gate.shut(where)
    assert sim.run(chat("Count to 3")).reply.startswith("1, 2, 3.")
    assert f"rkllm-sim: {'gate must be' if ':' in where else 'control file: unknown gate'}" in (
        capfd.readouterr().err
    )
    assert sim.destroy() == 0
