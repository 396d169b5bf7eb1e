"""Measurements with the simulated library: the rate, the comparison, and children that fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rkserve.doctor.facts import BoardFacts, MeasuredSpeed
from rkserve.doctor.measure import MeasureLimits, compared, measure
from rkserve.doctor.rules import findings_of
from rkserve.native.sim import telemetry
from rkserve.native.sim.build import ensure_built
from tests.support.paths import PROJECT
from tests.support.sim.releases import BOTH

pytestmark = pytest.mark.engine
SHORT = MeasureLimits(seconds=0.2, load_s=60, last_run_s=120)
PROFILE = "rk3588-qwen2.5-1.5b-w8a8"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that is named like a published model, and the published speed."""
    monkeypatch.setenv("RKSIM_PROFILE", PROFILE)
    monkeypatch.setenv("RKSIM_LOAD_MS", "0")
    monkeypatch.setenv("RKSIM_STRICT", "1")
    made = tmp_path / "Qwen2.5-1.5B-Instruct"
    made.mkdir()
    shutil.copy(PROJECT / "models" / "sim-chat" / "model.rkllm", made)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "board"
    telemetry.write(made, "RK3588", telemetry.BoardReadings(ddr_mhz=528))
    return made


def run(
    folder: Path, root: Path, release: str = "1.3.0", limits: MeasureLimits = SHORT
) -> MeasuredSpeed:
    weights = folder / "model.rkllm"
    found = measure(ensure_built(release), weights, 1024, root, limits)
    return compared(found, "RK3588", folder, weights)


@pytest.mark.parametrize("release", BOTH)
def test_a_fast_board_is_as_fast_as_published(
    folder: Path, root: Path, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "0.1")
    found = run(folder, root, release)
    assert found.problem == ""
    assert found.release == release
    assert found.expected_tokens_per_s == 16.69
    assert found.decode_tokens_per_s > 16.69
    assert found.prefill_tokens_per_s > found.decode_tokens_per_s
    assert findings_of(BoardFacts(measured=found)) == ()


def test_a_slow_board_is_found_with_the_clock_under_load(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_TIME_SCALE", "2")
    found = run(folder, root)
    assert found.hardware is not None
    (finding,) = (one for one in findings_of(BoardFacts(measured=found)) if one.id == "slow")
    rate = f"{found.decode_tokens_per_s:.1f}"
    assert finding.sentence == (f"decode {rate} tokens/s, expected 16.7: DDR at 528 of 2112 MHz.")
    assert "the vendor's table" in finding.evidence[0]


def test_a_model_that_cannot_be_loaded_is_a_problem_with_the_librarys_line(
    folder: Path, root: Path
) -> None:
    (folder / "model.rkllm").write_bytes(b"RKSIMLLM" + bytes(400))
    found = run(folder, root)
    assert found.problem.startswith("rkllm_init returned -1 for")
    assert found.problem.endswith(")")
    assert "(E rkllm: " in found.problem


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        pytest.param("abort_at_token:3", "the library ended its process by SIGABRT", id="abort"),
        pytest.param("segv_at_token:3", "the library ended its process by SIGSEGV", id="segv"),
        pytest.param(
            "init_signal:4",
            "the library's build is not for this CPU: it ended its process by SIGILL",
            id="another CPU",
        ),
        pytest.param(
            "init_signal:9",
            "its process was killed, by the kernel where memory ran out",
            id="out of memory",
        ),
        pytest.param("no_callback", "answers end after 0 tokens", id="no tokens"),
        pytest.param("hang_at_token:4", "it was not measured within 3 s", id="hangs in a run"),
        pytest.param("init_hang", "it was not loaded within 3 s", id="hangs in the load"),
    ],
)
def test_a_library_that_fails_is_a_problem(
    folder: Path,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fault: str,
    problem: str,
) -> None:
    control = tmp_path / "control"
    control.write_text(f"fault={fault}\nsticky=1\n")
    monkeypatch.setenv("RKSIM_CONTROL", str(control))
    limits = {
        "init_hang": MeasureLimits(seconds=0.2, load_s=3, last_run_s=3),
        "hang_at_token:4": MeasureLimits(seconds=0.5, load_s=60, last_run_s=2.5),
    }
    found = run(folder, root, limits=limits.get(fault, SHORT))
    assert found.problem.startswith(problem)
    assert [one.id for one in findings_of(BoardFacts(measured=found))] == ["measurement-failed"]


def test_a_file_that_is_no_library_is_a_problem(folder: Path, root: Path, tmp_path: Path) -> None:
    library = tmp_path / "librkllmrt.so"
    library.write_text("no library")
    found = measure(library, folder / "model.rkllm", 1024, root, SHORT)
    assert "is not a shared library" in found.problem


def test_an_unknown_soc_is_compared_with_nothing(folder: Path) -> None:
    found = compared(MeasuredSpeed(), "RK3399", folder, folder / "model.rkllm")
    assert found.expected_tokens_per_s is None
    assert findings_of(BoardFacts(measured=found)) == ()
