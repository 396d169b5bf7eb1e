"""The order of an update: one board on trial, then a few at a time, and the head last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkserve.bringup.update_plan import (
    BoardPhase,
    PlanStep,
    canary_problem,
    described,
    next_step,
    phase_of,
    ray_problem,
    version_problem,
)
from rkserve.router.fleet_update import FleetUpdate, MemberNews

UPDATE = FleetUpdate("u1", "0.2.0")


def news(name: str, **changes: object) -> MemberNews:
    return replace(MemberNews(name * 4, name, "0.1.0"), **changes)  # type: ignore[arg-type] # any


def installed(name: str) -> MemberNews:
    return news(name, update="u1", stage="installed")


def updated(name: str) -> MemberNews:
    return news(name, update="u1", version="0.2.0")


@pytest.mark.parametrize(
    ("go", "member", "phase"),
    [
        ((), news("a"), BoardPhase.WAITING),
        ((), news("a", update="u0", stage="installed"), BoardPhase.WAITING),
        ((), news("a", update="u0", problem="an earlier one"), BoardPhase.WAITING),
        ((), news("a", update="u1", stage="installing"), BoardPhase.INSTALLING),
        ((), installed("a"), BoardPhase.INSTALLED),
        (("aaaa",), installed("a"), BoardPhase.SWITCHING),
        (("aaaa",), replace(updated("a"), stage="trial"), BoardPhase.SWITCHING),
        (("aaaa",), updated("a"), BoardPhase.DONE),
        ((), news("a", version="0.2.0"), BoardPhase.DONE),  # it was joined with it
        (("aaaa",), news("a", update="u1", problem="slower"), BoardPhase.FAILED),
    ],
)
def test_a_phase_follows_from_order_and_news(
    go: tuple[str, ...], member: MemberNews, phase: BoardPhase
) -> None:
    assert phase_of(replace(UPDATE, go=go), member) is phase


def run(names: str, most: int, canary: str | None = None) -> list[str]:
    """Return the hosts that switch at each step, where each switch succeeds at once."""
    boards = {name: installed(name) for name in names}
    update = UPDATE
    found: list[str] = []
    for _ in range(100):
        step = next_step(update, [*boards.values()], canary, most)
        if step.over:
            assert step == PlanStep(boards_done=True, over=True)
            return found
        hosts = "".join(key[0] for key in step.go)
        found.append(hosts)
        update = replace(update, go=(*update.go, *step.go))
        # While they switch, no more than these are away.
        again = next_step(update, [*boards.values()], canary, most)
        assert len(hosts) + len(again.go) <= max(1, most)
        for name in hosts:
            boards[name] = updated(name)
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    ("names", "most", "canary", "steps"),
    [
        ("a", 1, None, ["a"]),
        ("abcde", 1, None, ["a", "b", "c", "d", "e"]),
        ("abcde", 3, None, ["a", "bcd", "e"]),
        ("abcde", 3, "d", ["d", "abc", "e"]),
        ("", 1, None, []),
    ],
)
def test_one_board_tries_it_before_the_others(
    names: str, most: int, canary: str | None, steps: list[str]
) -> None:
    assert run(names, most, canary) == steps


def test_nothing_switches_before_the_canary_is_installed() -> None:
    boards = [installed("a"), news("b", update="u1", stage="installing")]
    assert next_step(UPDATE, boards, "b", 4) == PlanStep()


def test_a_board_that_had_the_version_is_no_trial() -> None:
    boards = [news("a", version="0.2.0"), installed("b"), installed("c")]
    assert next_step(UPDATE, boards, None, 4).go == ("bbbb",)


def test_a_failure_stops_the_update_when_the_others_have_come_back() -> None:
    update = replace(UPDATE, go=("aaaa", "bbbb", "cccc"))
    bad = news("b", update="u1", problem="it decodes 8.0 tokens/s")
    boards = [updated("a"), bad, installed("c"), installed("d")]
    step = next_step(update, boards, None, 3)
    assert step == PlanStep(over=False, problem="b: it decodes 8.0 tokens/s")
    boards[2] = updated("c")
    assert next_step(update, boards, None, 3).over


def test_a_board_that_does_not_come_back_stops_the_update() -> None:
    update = replace(UPDATE, go=("aaaa",))
    boards = [installed("a"), installed("b")]
    step = next_step(update, boards, overdue={"aaaa"})
    assert step == PlanStep(over=True, problem="a has not come back in time")


def test_versions_and_names_are_checked_before_anything_changes() -> None:
    boards = [news("a"), news("b")]
    assert canary_problem(boards, "a") == canary_problem([], None) == ""
    assert canary_problem(boards, "x") == "No board has the host name x; there are: a, b."
    assert version_problem(UPDATE, boards, "0.1.0") == ""
    far = replace(UPDATE, version="0.3.0")
    assert version_problem(far, boards, "0.2.0").startswith("a cannot go from 0.1.0 to 0.3.0")
    assert version_problem(far, [], "0.1.0").startswith("the head cannot go from 0.1.0")


def test_another_version_of_ray_needs_a_flag() -> None:
    assert ray_problem("2.60.0", None, restart=False) == ""
    assert ray_problem("2.60.0", "2.60.0", restart=False) == ""
    assert ray_problem("2.60.0", "2.61.0", restart=True) == ""
    assert "Repeat the command with --restart-cluster" in ray_problem(
        "2.60.0", "2.61.0", restart=False
    )


def test_the_plan_is_shown_in_its_order() -> None:
    boards = [news("a"), news("b", version="0.2.0"), news("c"), news("d"), news("e")]
    assert described(UPDATE, boards, "d", 2) == [
        "first  d: 0.1.0 to 0.2.0, on trial",
        "then   a, c",
        "then   e",
        "last   the head, to 0.2.0",
    ]
    assert "503 with Retry-After" in described(UPDATE, boards[:1], None, 2)[-1]
