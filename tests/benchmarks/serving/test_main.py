"""The benchmark's prompts, its command line and its children."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving.__main__ import REPORT, options
from benchmarks.serving.measure import FULL, QUICK


@pytest.mark.parametrize(
    ("arguments", "cases", "writes"),
    [
        pytest.param([], "abcdefghi", REPORT, id="a full run writes the page"),
        pytest.param(["--quick"], "abcdefghi", None, id="a quick one does not"),
        pytest.param(["--cases", "d,a"], "ad", None, id="neither do some of the cases"),
        pytest.param(["--cases", "c", "--output", "x.md"], "c", Path("x.md"), id="unless asked"),
    ],
)
def test_the_page_is_only_written_from_a_full_run(
    arguments: list[str], cases: str, writes: Path | None
) -> None:
    asked = options(arguments)

    assert (asked.cases, asked.output) == (cases, writes)
    assert asked.size == (QUICK if "--quick" in arguments else FULL)


def test_the_window_can_be_chosen_and_nothing_else_changes() -> None:
    assert options(["--seconds", "3"]).size == replace(FULL, seconds=3.0)


def test_a_case_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(["--cases", "a,z"])

    assert "is not some of a,b,c,d,e,f,g,h" in capsys.readouterr().err
