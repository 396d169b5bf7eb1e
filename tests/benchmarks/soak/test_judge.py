"""Judgement of a soak: which ends of a request are allowed when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.harness.exchange import Truth
from benchmarks.soak.judge import LATE_S, CallOutcome, Ending, Judge, Outcome, faults_total

TRUTH = Truth("abc", "length", 7, 3)
WHOLE = Outcome("chat", Ending.WHOLE, 10.0, 20.0, found=TRUTH, truth=TRUTH)
REFUSED = replace(WHOLE, ending=Ending.REFUSED, status=503, detail="no_board", found=None)
CALL = CallOutcome("pause", 10.0, 20.0, 200)


def flaws(*outcomes: Outcome, judge: Judge | None = None) -> list[str]:
    judge = judge or Judge()
    for one in outcomes:
        judge.take(one)
    return [*judge.flaws]


@pytest.mark.parametrize(
    "one",
    [
        WHOLE,
        REFUSED,
        replace(REFUSED, status=502, retry_after=False),
        replace(REFUSED, status=504, retry_after=False),
        replace(REFUSED, status=429),
        replace(WHOLE, ending=Ending.LEFT, found=None),
    ],
)
def test_allowed_ends_are_no_flaws(one: Outcome) -> None:
    assert flaws(one) == []


@pytest.mark.parametrize(
    ("one", "flaw"),
    [
        (replace(WHOLE, found=replace(TRUTH, text="abbc")), "an answer is wrong"),
        (replace(WHOLE, found=replace(TRUTH, finish="stop")), "an answer is wrong"),
        (replace(WHOLE, found=replace(TRUTH, prompt_tokens=8)), "an answer is wrong"),
        (replace(WHOLE, truth=None), "an answer without anything to judge it by"),
        (replace(REFUSED, status=500), "a status that is not allowed"),
        (replace(REFUSED, status=422), "a status that is not allowed"),
        (replace(REFUSED, error_object=False), "a refusal without an error object"),
        (replace(REFUSED, retry_after=False), "a refusal without Retry-After"),
        (replace(WHOLE, ending=Ending.FAILED), "an answer failed in mid-stream"),
        (replace(WHOLE, ending=Ending.CUT), "an answer ended in order before its end"),
        (replace(WHOLE, ending=Ending.SILENT), "an answer did not end in time"),
        (
            replace(WHOLE, ending=Ending.BROKEN),
            "a connection broke off without a fault of the front",
        ),
    ],
)
def test_all_other_ends_are(one: Outcome, flaw: str) -> None:
    assert flaws(one) == [flaw]


@pytest.mark.parametrize(
    ("front", "from_s", "until_s", "excused"),
    [
        pytest.param(True, 15.0, 16.0, True, id="in its time"),
        pytest.param(True, 5.0, None, True, id="the part is not back yet"),
        pytest.param(True, 5.0, 10.0 - LATE_S, True, id="just before, noticed late"),
        pytest.param(True, 1.0, 9.0 - LATE_S, False, id="long before"),
        pytest.param(True, 21.0, 22.0, False, id="later"),
        pytest.param(False, 15.0, 16.0, False, id="a board's fault"),
    ],
)
def test_a_connection_may_break_during_a_fault_of_the_front_only(
    *, front: bool, from_s: float, until_s: float | None, excused: bool
) -> None:
    judge = Judge()
    window = judge.fault_begins("some fault", front=front, at_s=from_s)
    if until_s is not None:
        judge.fault_ends(window, until_s, fired=True)
    assert (flaws(replace(WHOLE, ending=Ending.BROKEN), judge=judge) == []) is excused


def test_a_failure_names_the_faults_of_its_time() -> None:
    judge = Judge()
    judge.fault_ends(judge.fault_begins("node", front=False, at_s=12.0), 13.0, fired=True)
    judge.take(replace(WHOLE, ending=Ending.FAILED, detail="board_failed"))
    assert "during node: board_failed" in judge.examples["an answer failed in mid-stream"][0]


def test_counts_are_those_of_each_kind() -> None:
    judge = Judge()
    for one in (WHOLE, replace(WHOLE, continued=2), REFUSED, REFUSED):
        judge.take(one)
    judge.repeat("chat", replayed=True)
    figures = judge.kinds["chat"]
    assert figures.endings == {Ending.WHOLE: 2, Ending.REFUSED: 2}
    assert figures.refusals == {"503 no_board": 2}
    assert (figures.continued, figures.repeated, figures.replayed) == (1, 1, 1)


def test_faults_that_did_not_fire_are_a_share_of_all() -> None:
    judge = Judge()
    assert judge.not_fired_share == 0.0
    for fired in (True, True, True, False):
        judge.fault_ends(judge.fault_begins("node", front=False, at_s=1.0), 4.0, fired=fired)
    assert judge.not_fired_share == 0.25
    total = faults_total(judge.faults.values())
    assert (total.fired, total.missed, total.back_s) == (3, 1, [3.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("one", "flaw"),
    [
        (CALL, None),
        (replace(CALL, status=409), None),
        (replace(CALL, status=207, error_object=False), None),
        (replace(CALL, status=504, retry_after=False), None),
        (replace(CALL, status=500), "a status that is not allowed"),
        (replace(CALL, status=503, retry_after=False), "a refusal without Retry-After"),
        (replace(CALL, status=504, error_object=False), "a refusal without an error object"),
        (replace(CALL, status=0), "a connection broke off without a fault of the front"),
        (
            replace(CALL, status=422, detail="adapter_trial_failed"),
            "a status that is not allowed",
        ),
    ],
)
def test_control_calls_have_statuses_of_their_own(one: CallOutcome, flaw: str | None) -> None:
    judge = Judge()
    judge.take_call(one)
    assert [*judge.flaws] == ([] if flaw is None else [flaw])


def test_a_trial_may_fail_by_a_fault_of_its_time() -> None:
    judge = Judge()
    judge.fault_ends(judge.fault_begins("node", front=False, at_s=12.0), 13.0, fired=True)
    judge.take_call(replace(CALL, status=422, detail="adapter_trial_failed"))
    assert judge.clean


def test_only_the_first_examples_of_a_flaw_are_kept() -> None:
    judge = Judge()
    for number in range(1000):
        judge.flaw("a flaw", str(number))
    assert judge.flaws["a flaw"] == 1000
    assert judge.examples["a flaw"] == ["0", "1", "2", "3", "4"]
