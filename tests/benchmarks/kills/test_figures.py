"""The kill run's judgement: what counts as lost, as wrong, and as silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control.answers import Answer
from benchmarks.harness.exchange import Exchange, Truth
from benchmarks.kills.__main__ import MIXED_REPORT, REPORT, deliver, options
from benchmarks.kills.report import (
    KillFigures,
    KillRun,
    MixedTruths,
    Phase,
    Truths,
    judge,
    longest_silence_ms,
    quantile,
    render,
)
from rkserve.bench.results import Machine

GOOD = Answer(
    Exchange(0.0, (1.0, 1.1, 1.9), 2.0, prompt_tokens=7, completion_tokens=3),
    prompt=4,
    text="abc",
    finish="length",
)
TRUTHS = {4: Truth("abc", "length", 7, 3)}


def judged(*answers: Answer) -> KillFigures:
    return judge(Phase("node", 2, answers), Truths(TRUTHS))


def mixed(*answers: Answer) -> KillFigures:
    return judge(Phase("node", 2, answers), MixedTruths(("n", "m"), tokens=3))


def at(board: str, text: str, **rest: Any) -> Answer:
    exchange = replace(GOOD.exchange, board=board)
    return replace(GOOD, exchange=exchange, text=text, **rest)


def test_npus_give_the_same_answers_and_cpus_may_not() -> None:
    assert mixed(at("n", "abc"), at("n,m", "abc", continued=1), at("c", "xyz")).wrong == 0
    assert mixed(at("n", "abc"), at("m", "abd")).flaws == (
        "wrong at character 2 of 3: 'abd', not 'abc'",
    )


def test_an_answer_of_a_cpu_is_held_to_its_usage() -> None:
    assert mixed(at("c", "xyz"), at("c,n", "xbc", continued=1)).wrong == 0
    short = replace(GOOD.exchange, board="n,c", completion_tokens=2)
    lacking = replace(GOOD, exchange=short, text="ab", continued=1)
    assert mixed(at("c", "xyz"), lacking).wrong == 1
    assert mixed(at("c", "xyz"), replace(lacking, finish="stop")).wrong == 0


def test_a_full_mixed_run_has_a_report_of_its_own() -> None:
    asked = options(["--mixed"])
    assert (asked.kills, asked.boards, asked.nodes) == (200, 6, 4)
    assert asked.output == MIXED_REPORT != REPORT
    assert options(["--mixed", "--kills", "12"]).output is None


def test_an_answer_as_it_must_be_is_neither_lost_nor_wrong() -> None:
    found = judged(GOOD, replace(GOOD, continued=1, lost_ms=30.0))
    assert (found.answers, found.continued, found.lost, found.wrong) == (2, 1, 0, 0)
    assert found.clean
    assert found.silences_ms == pytest.approx((800.0,))
    assert found.waits_ms == (30.0,)


@pytest.mark.parametrize(
    ("answer", "flaw"),
    [
        pytest.param(replace(GOOD, text="abbc"), "wrong at character 2", id="doubled"),
        pytest.param(replace(GOOD, text="ac"), "wrong at character 1", id="missing"),
        pytest.param(replace(GOOD, text="abcd"), "wrong at character 3", id="too long"),
        pytest.param(replace(GOOD, finish="stop"), "wrong: stop", id="another reason"),
        pytest.param(
            replace(GOOD, exchange=replace(GOOD.exchange, completion_tokens=4)),
            "wrong: length, 7 and 4 tokens",
            id="counted twice",
        ),
    ],
)
def test_what_differs_is_wrong(answer: Answer, flaw: str) -> None:
    found = judged(GOOD, answer)
    assert (found.lost, found.wrong) == (0, 1)
    assert flaw in found.flaws[0]
    assert not found.clean


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(replace(GOOD.exchange, error="board_failed"), id="an error"),
        pytest.param(replace(GOOD.exchange, end_s=None), id="no end"),
    ],
)
def test_what_has_no_end_is_lost(exchange: Exchange) -> None:
    found = judged(replace(GOOD, exchange=exchange))
    assert (found.lost, found.wrong, found.clean) == (1, 0, False)


def test_of_one_piece_there_is_no_silence() -> None:
    one = replace(GOOD, exchange=replace(GOOD.exchange, content_s=(1.0,)))
    assert longest_silence_ms(one) is None
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def run_of(*found: KillFigures) -> KillRun:
    return KillRun(Machine(2, "cpu", 4.0, {"ray": "2"}), found, "How.", 90.0)


def test_the_report_names_what_was_wrong_and_adds_up() -> None:
    report = render(run_of(judged(GOOD), judged(replace(GOOD, text="x"))))
    rows = [line for line in report.splitlines() if line.startswith("| all ")]
    assert [cell.strip() for cell in rows[0].split("|")[2:8]] == ["4", "2", "0", "0", "0", "1"]
    assert "- node: wrong at character 0" in report
    cells = [[cell.strip() for cell in line.split("|")] for line in report.splitlines()]
    verdicts = {row[1]: row[4] for row in cells if len(row) == 6 and row[2] == "0"}
    assert list(verdicts.values()) == ["reached", "missed", "reached"]


def test_a_replica_that_ended_with_its_library_is_no_clean_run() -> None:
    found = judge(Phase("abort() in the library", 2, (GOOD,), replicas_ended=1), Truths(TRUTHS))
    assert (found.replicas_ended, found.clean) == (1, False)
    assert "ended with their library |      0 |        1 |  missed |" in render(run_of(found))


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        pytest.param([], REPORT, id="a full run"),
        pytest.param(["--kills", "12"], None, id="a small one"),
        pytest.param(["--streams", "8"], None, id="few clients"),
        pytest.param(["--kills", "12", "--output", "a.md"], Path("a.md"), id="as asked for"),
    ],
)
def test_only_a_full_run_is_published_by_itself(arguments: list[str], output: Path | None) -> None:
    assert options(arguments).output == output


@pytest.mark.parametrize("whole", [True, False], ids=["to its end", "cut short"])
def test_a_run_that_was_cut_short_is_printed_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, whole: bool
) -> None:
    page = tmp_path / "page.md"
    asked = options(["--kills", "12", "--output", str(page)])
    deliver(asked, [judged(GOOD)], 90.0, publish=whole)
    assert "# Benchmark of kills" in capsys.readouterr().out
    assert page.exists() is whole
