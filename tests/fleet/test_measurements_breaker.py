"""Circuit breakers: boards that fail are left alone for a while."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.fleet.measurements import BreakerRules, Circuit, CircuitBreaker

RULES = BreakerRules(failures=3, window_s=30.0, open_s=2.0, longest_s=8.0, probe_s=20.0)
KEY = "replica"


def allows(of: CircuitBreaker, key: str, now_s: float) -> bool:
    return key not in of.blocked(now_s)


def failed(times: int, at_s: float = 0.0) -> CircuitBreaker:
    made = CircuitBreaker(RULES)
    for _ in range(times):
        made.failed(KEY, "it hung", at_s)
    return made


def test_a_board_that_nobody_complained_of_is_sent_everything() -> None:
    made = CircuitBreaker(RULES)
    assert made.circuit(KEY, 0.0) is Circuit.CLOSED
    assert allows(made, KEY, 0.0)
    assert made.reason(KEY, 0.0) == ""
    assert made.blocked(0.0) == []
    assert made.soonest_s(0.0) is None


@pytest.mark.parametrize(("times", "allowed"), [(2, True), (3, False), (9, False)])
def test_enough_failures_open_it(times: int, allowed: bool) -> None:
    made = failed(times)
    assert allows(made, KEY, 1.9) is allowed
    assert (made.blocked(1.9) == [KEY]) is not allowed
    assert made.soonest_s(1.9) == (None if allowed else 2.0)
    assert allows(made, "another", 1.9)


def test_failures_that_lie_far_apart_do_not() -> None:
    made = CircuitBreaker(RULES)
    for at_s in (0.0, 31.0, 62.0, 93.0):
        made.failed(KEY, "it hung", at_s)
        assert allows(made, KEY, at_s)


def test_a_success_in_between_wipes_the_slate_clean() -> None:
    made = failed(2)
    made.worked(KEY)
    made.failed(KEY, "it hung", 1.0)
    assert allows(made, KEY, 1.0)


def test_after_a_while_one_probe_is_let_through() -> None:
    made = failed(3)
    assert made.circuit(KEY, 2.0) is Circuit.HALF_OPEN
    made.sent(KEY, 2.0)
    assert made.circuit(KEY, 2.1) is Circuit.OPEN
    assert made.soonest_s(2.1) == 2.0 + RULES.probe_s
    made.worked(KEY)
    assert made.circuit(KEY, 2.2) is Circuit.CLOSED


def test_a_probe_that_fails_doubles_the_rest_up_to_a_limit() -> None:
    made, now_s = failed(3), 2.0
    for rest_s in (4.0, 8.0, 8.0):
        made.sent(KEY, now_s)
        made.failed(KEY, "it hung again", now_s)
        assert not allows(made, KEY, now_s + rest_s - 0.1)
        now_s += rest_s
        assert made.circuit(KEY, now_s) is Circuit.HALF_OPEN
    assert "it hung again" in made.reason(KEY, now_s)


def test_a_probe_that_is_never_heard_of_again_makes_way_for_another() -> None:
    made = failed(3)
    made.sent(KEY, 2.0)
    assert not allows(made, KEY, 21.9)
    assert allows(made, KEY, 22.0)


def test_what_was_sent_before_it_opened_does_not_prolong_it() -> None:
    made = failed(3)
    made.failed(KEY, "it hung", 1.5)
    assert allows(made, KEY, 2.0)


def test_a_failure_that_is_forgiven_never_was() -> None:
    made = failed(3)
    made.forgive(KEY)
    assert allows(made, KEY, 0.0)
    made.failed(KEY, "it hung", 0.1)
    assert not allows(made, KEY, 0.1)
    for _ in range(4):
        made.forgive(KEY)
    assert made.circuit(KEY, 0.2) is Circuit.CLOSED


def test_a_probe_that_told_nothing_makes_room_for_the_next_one() -> None:
    made = failed(3)
    now_s = RULES.open_s + 1.0
    made.sent(KEY, now_s)
    assert made.circuit(KEY, now_s) is Circuit.OPEN
    made.undecided(KEY)
    assert made.circuit(KEY, now_s) is Circuit.HALF_OPEN


def test_boards_that_are_there_no_more_are_forgotten() -> None:
    made = failed(3)
    made.keep(frozenset({"another"}))
    assert made.blocked(0.0) == []


@dataclass
class Step:
    what: str
    after_s: float


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["failed", "worked", "forgive", "sent", "undecided"]),
        st.floats(0, 20, allow_nan=False),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_happens_no_board_is_left_alone_for_longer_than_the_limits(
    steps: list[Step],
) -> None:
    made, now_s = CircuitBreaker(RULES), 0.0
    for step in steps:
        now_s += step.after_s
        if step.what == "failed":
            made.failed(KEY, "it hung", now_s)
        elif step.what == "sent":
            if allows(made, KEY, now_s):
                made.sent(KEY, now_s)
        else:
            getattr(made, step.what)(KEY)
        assert allows(made, KEY, now_s + RULES.longest_s + RULES.probe_s)
