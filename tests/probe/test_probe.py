"""A probe ends with a report, whatever the library does, and the report gives nobody away."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rkserve.core.errors import ConfigError
from rkserve.models.folder import open_model_folder
from rkserve.native.sim.build import ensure_built
from rkserve.probe.probe import OF_TWO_BOARDS, ProbeOptions, ending, run_probe, write_report
from rkserve.probe.verdicts import PLANS, ExperimentResult, ProbeReport
from tests.support.sim.sim_driver import FAST, MODEL

pytestmark = pytest.mark.slow


def probed(*only: str, limit_s: float = 60.0, **environ: str) -> ProbeReport:
    """Probe the simulated 1.3.0 with these switches."""
    switches = {f"RKSIM_{name}": value for name, value in environ.items()}
    return run_probe(
        ProbeOptions(
            library=ensure_built("1.3.0"),
            folder=open_model_folder(MODEL),
            simulated=True,
            only=only,
            limit_s=limit_s,
            environ=FAST | {"RKSIM_TIME_SCALE": "0.01"} | switches,
        )
    )


def values(report: ProbeReport) -> dict[str, bool | None]:
    return {one.plan.name: one.verdict.value for one in report.results}


@pytest.mark.slow
def test_a_whole_probe_settles_everything_and_tells_nothing_private(tmp_path: Path) -> None:
    report = probed(PAUSE_WITH_HISTORY="1", RANGE_WITH_HISTORY="1")
    found = values(report)
    assert list(found) == [plan.name for plan in PLANS if plan.name != OF_TWO_BOARDS]
    # Its times may overlap on a busy machine.
    assert {name for name, value in found.items() if value is None} <= {"stop_by_pause"}
    assert {plan.name for plan in PLANS if not plan.quirk and not found[plan.name]} == {
        "finish_in_hidden_modes",
        "is_running_while_paused",
        "init_may_crash",
    }
    write_report(report, tmp_path)
    written = json.loads((tmp_path / "quirks.json").read_text())
    assert written["quirks"] == report.quirks
    assert report.quirks["pause_with_history"] is True
    assert report.board["soc"] == "RK3588"
    assert report.model["quantisation"]
    texts = "".join(file.read_text() for file in tmp_path.iterdir())
    for secret in (str(MODEL), "/", os.uname().nodename, "lighthouse", "spider"):
        assert secret not in texts, secret


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("segv_at_token:2", "crashed: SIGSEGV", id="each run crashes"),
        pytest.param("hang_at_token:2", "hung", id="each run hangs"),
        pytest.param("init_signal:4", "crashed: SIGILL", id="the library is not for this CPU"),
        pytest.param("no_callback", "refused", id="runs say nothing"),
    ],
)
def test_a_library_without_a_baseline_ends_with_a_report(
    fault: str, words: str, tmp_path: Path
) -> None:
    control = tmp_path / "board.control"
    control.write_text(f"fault={fault}\nsticky=1\n")
    report = probed("run_async", limit_s=3, CONTROL=str(control))
    assert values(report) == {"detected": True, "baseline": False}
    assert words in report.results[-1].verdict.evidence
    assert report.quirks == {}
    assert report.notes


def test_wrong_counts_settle_nothing_that_needs_them() -> None:
    report = probed(
        "pause_with_history", "prefix_reuse_in_ram", "run_async", "pause_single_turn",
        WRONG_COUNTS="1",
    )  # fmt: skip
    assert values(report) == {
        "detected": True,
        "baseline": False,
        "pause_single_turn": None,
        "pause_with_history": None,
        "prefix_reuse_in_ram": None,
        "run_async": True,
    }
    assert report.quirks == {"run_async": True}


def test_an_end_token_in_the_middle_of_an_answer_counts() -> None:
    report = probed("eos_uint32_misread", EOS_MISREAD="1")
    assert values(report) == {"detected": True, "baseline": True, "eos_uint32_misread": True}


def test_a_fault_that_comes_once_is_found_by_repeating(tmp_path: Path) -> None:
    control = tmp_path / "board.control"
    options = ProbeOptions(
        library=ensure_built("1.3.0"),
        folder=open_model_folder(MODEL),
        only=("abort_in_callback",),
        repeat=2,
        environ=FAST | {"RKSIM_TIME_SCALE": "0.01", "RKSIM_CONTROL": str(control)},
    )

    def arm(result: ExperimentResult) -> None:
        if result.plan.name == "baseline":
            control.write_text("fault=error_at_token:5\n")

    (found,) = [
        one for one in run_probe(options, arm).results if one.plan.name == "abort_in_callback"
    ]
    # The fault hit the run before the trial, which settles nothing: the two repetitions differ.
    assert found.verdict.value is None
    assert found.verdict.why == "2 repetitions differ"


def test_a_file_that_is_no_library_ends_with_a_report(tmp_path: Path) -> None:
    library = tmp_path / "librkllmrt.so"
    library.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 4)
    report = run_probe(ProbeOptions(library, open_model_folder(MODEL)))
    assert values(report) == {"detected": False}
    assert str(tmp_path) not in report.as_markdown()
    assert "no ELF header" in report.as_markdown()


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.rkllm").write_bytes(b"weights")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        run_probe(ProbeOptions(ensure_built("1.3.0"), open_model_folder(folder)))


def test_an_unknown_experiment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown experiment 'run_asink'; known are"):
        probed("run_asink")


@pytest.mark.parametrize(
    ("code", "words"), [(-11, "SIGSEGV"), (-40, "signal 40"), (3, "exit code 3")]
)
def test_an_ending_is_named_by_its_signal(code: int, words: str) -> None:
    assert ending(code) == words
