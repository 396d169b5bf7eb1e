"""The report as JSON: what is written can be read again, and nothing else can."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rkserve.doctor.facts import BoardFacts, DoctorReport, Finding, FleetReport, Severity
from tests.support.boards.doctor_board import MODELS, DoctorBoard


@pytest.mark.parametrize("soc", MODELS)
def test_a_report_is_the_same_after_json(tmp_path: Path, soc: str) -> None:
    report = DoctorBoard(tmp_path / "board", soc).report()
    assert DoctorReport.model_validate_json(report.model_dump_json()) == report
    assert report.facts.hardware is not None
    assert report.facts.hardware.soc == soc


def test_a_report_keeps_its_findings(tmp_path: Path) -> None:
    board = DoctorBoard(tmp_path / "board")
    board.sensors(ddr_mhz=528, npu_celsius=90.0)
    report = board.report()
    fleet = FleetReport(healthy=report.healthy, boards=(report,))
    (read,) = FleetReport.model_validate_json(fleet.model_dump_json()).boards
    assert [one.id for one in read.findings] == ["ddr-slow", "hot"]
    assert read.version == 1


def test_unknown_keys_and_changes_are_refused() -> None:
    with pytest.raises(ValidationError, match="kernels"):
        BoardFacts.model_validate({"kernels": "6.1"})
    finding = Finding(id="hot", severity=Severity.WARNING, sentence="Hot.", command="# cool it")
    with pytest.raises(ValidationError, match="frozen"):
        finding.sentence = "Cold."  # type: ignore[misc]


def test_a_report_of_nothing_is_healthy() -> None:
    assert DoctorReport(healthy=True, findings=(), facts=BoardFacts()).facts.simulated is False
