"""What makes a compatibility suite fail, and that the page is what was measured and is excepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.judge import Excepted, faults
from compat.run import PAGE, exceptions, page, suites
from compat.suite import Outcome, Result, read

P, F, S = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED


@pytest.mark.parametrize(
    ("outcomes", "excepted", "found"),
    [
        pytest.param({"a": P}, [], [], id="all pass"),
        pytest.param({"a": P, "b": F}, [], ["b failed"], id="one fails"),
        pytest.param({"a": S}, [], ["a skipped"], id="one is skipped"),
        pytest.param({"a[x]": F, "a[y]": S, "b": P}, ["a[*"], [], id="exceptions"),
        pytest.param({"a": P}, ["a"], ["a passes, and is an exception"], id="one that passes"),
        pytest.param({"a": P}, ["b"], ["the exception b names no test"], id="one of nothing"),
    ],
)
def test_a_suite_fails(outcomes: dict[str, Outcome], excepted: list[str], found: list[str]) -> None:
    assert faults(Result(outcomes), [Excepted(name, "why") for name in excepted]) == found


def test_trouble_makes_a_suite_fail() -> None:
    assert faults(Result({}, trouble="no test was run"), []) == ["no test was run"]


def test_outcomes_are_read(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="x.test_a" name="one"/>
        <testcase classname="x.test_a.TestB" name="two"><failure>no</failure></testcase>
        <testcase classname="test" name="three"><skipped/></testcase>
        <testcase classname="x" name="four"/><testcase classname="x" name="four"><error/></testcase>
        </testsuite></testsuites>""",
        encoding="utf-8",
    )
    assert read(report) == {"one": P, "TestB::two": F, "three": S, "four": F}


def test_the_page_says_what_was_measured() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_suite_is_pinned_and_every_exception_has_a_reason() -> None:
    for suite in suites().values():
        assert suite.version
    by_suite, left_out = exceptions()
    assert by_suite.keys() <= suites().keys()
    reasons = [one.reason for named in by_suite.values() for one in named]
    assert all(reasons)
    assert all(left_out.values())
