"""``rkserve probe``: options, output, files and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rkserve.cli import app
from rkserve.cli.context import Exit
from rkserve.cli.probe import exit_of, summary
from rkserve.probe.verdicts import PLANS, ExperimentResult, ProbeReport, Verdict
from tests.support.http.terminal import Runner
from tests.support.sim.sim_driver import MODEL

pytestmark = pytest.mark.slow

PLAN = {plan.name: plan for plan in PLANS}


def reported(*results: tuple[str, bool | None], notes: tuple[str, ...] = ()) -> ProbeReport:
    return ProbeReport(
        simulated=True,
        board={},
        library={"release": "1.3.0", "library_sha256": ""},
        model={},
        results=tuple(
            ExperimentResult(PLAN[name], Verdict(value, "seen"), 1.0) for name, value in results
        ),
        known={"run_async": True, "abort_in_callback": False},
        notes=notes,
    )


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        pytest.param(
            reported(("run_async", False)), Exit.DONE, "  run_async: false", id="another value"
        ),
        pytest.param(
            reported(("run_async", True)), Exit.DONE, "No settled quirk differs", id="as the table"
        ),
        pytest.param(
            reported(("run_async", None)), Exit.PARTLY, "Inconclusive: run_async.", id="open"
        ),
        pytest.param(
            reported(("baseline", False), notes=("the baseline failed",)),
            Exit.FAILED,
            "the baseline failed",
            id="no baseline",
        ),
    ],
)
def test_a_report_is_summed_up(report: ProbeReport, code: Exit, words: str) -> None:
    assert exit_of(report) is code
    assert words in summary(report)


def test_one_experiment_of_a_simulated_board_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RKSIM_MEMORY_MB", "1")
    command = ["probe", "--model", str(MODEL), "--only", "run_async", "--json"]
    result = Runner().invoke(app, [*command, "--out", str(tmp_path / "new" / "folder")])
    assert result.exit_code == Exit.DONE, result.output
    report = json.loads(result.stdout)
    assert [one["name"] for one in report["experiments"]] == ["detected", "baseline", "run_async"]
    written = json.loads((tmp_path / "new" / "folder" / "quirks.json").read_text())
    assert written["quirks"] == {"run_async": True}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="ctrl-c"),
        pytest.param(signal.SIGTERM, id="kill", marks=pytest.mark.long),
    ],
)
def test_an_interrupt_ends_the_experiment_and_reports_the_others(
    number: signal.Signals, tmp_path: Path
) -> None:
    control = tmp_path / "board.control"
    control.write_text("fault=init_hang\nsticky=1\n")
    command = (sys.executable, "-m", "rkserve", "probe", "--model", str(MODEL), "--json")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RKSIM_CONTROL": str(control)},
    ) as probe:
        assert probe.stderr is not None
        assert probe.stderr.readline().startswith("true  detected")
        probe.send_signal(number)
        printed, _ = probe.communicate(timeout=60)
    assert probe.returncode == Exit.FAILED
    report = json.loads(printed)
    assert [one["name"] for one in report["experiments"]] == ["detected"]
    assert report["notes"] == ["interrupted; the remaining experiments were not made"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--only", "run_asink"], "unknown experiment 'run_asink'", id="a name"),
        pytest.param(["--release", "0.9"], "unknown simulated runtime '0.9'", id="a release"),
        pytest.param(["--model", "nowhere"], "nowhere", id="a folder"),
    ],
)
def test_wrong_options_fail_with_a_sentence(arguments: list[str], words: str) -> None:
    given = [] if "--model" in arguments else ["--model", str(MODEL)]
    result = Runner().invoke(app, ["probe", *given, *arguments])
    assert result.exit_code == Exit.FAILED
    assert words in result.output
