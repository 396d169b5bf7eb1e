"""Fixtures for the tests of the simulated runtime, loaded with pytest_plugins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sim.releases import BOTH
from tests.support.sim.sim_driver import FAST, Gate, Sim


@pytest.fixture
def fast_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting and little memory, unless a test says otherwise before it opens a handle."""
    for name in [name for name in os.environ if name.startswith(("RKSIM_", "RKLLM_"))]:
        monkeypatch.delenv(name)
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def files_only(fast_env: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt caches by themselves: no prefix is in RAM already."""
    monkeypatch.setenv("RKSIM_PREFIX_REUSE", "0")


@pytest.fixture(params=BOTH)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sim(release: str, fast_env: None) -> Iterator[Sim]:
    sim = Sim(release)
    assert sim.code == 0
    yield sim
    assert sim.destroy() == 0


@pytest.fixture
def gate(tmp_path: Path, fast_env: None, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The gate of the boards that the test opens; it is open."""
    monkeypatch.setenv("RKSIM_CONTROL", str(tmp_path / "board.control"))
    return Gate(tmp_path / "board.control")
