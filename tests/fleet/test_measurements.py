"""Speeds and rates of boards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.fleet.measurements import UNUSED_S, Rate, Rates
from tests.support.routing import (
    boards,
    join,
    speed,
)


def test_speeds_are_measured_and_guessed_from_boards_of_the_same_kind() -> None:
    known = boards()
    unknown = join(known, "a", platform="RK3576")
    prior = unknown.speed.decode_ms
    join(known, "b", platform="RK3576", **speed(6, 100))
    join(known, "c", platform="RK3588", **speed(2, 50))
    join(known, "a", platform="RK3576")
    assert unknown.speed.decode_ms == pytest.approx(100) != prior
    assert unknown.speed.prefill_ms == pytest.approx(6)
    join(known, "a", platform="RK3576", **speed(3, 70))
    assert unknown.speed.decode_ms == pytest.approx(70)


def test_a_board_without_work_for_a_while_counts_as_fast_as_its_kind_again() -> None:
    known = boards()
    slow = join(known, "a", platform="RK3588", **speed(6, 900))
    slow.asked(0.0)
    for name in "abcdefghi":
        join(known, name, platform="RK3588", **speed(6, 900 if name == "a" else 100))
    assert slow.speed.decode_ms == pytest.approx(900)
    slow.asked(UNUSED_S - 1)
    join(known, "a", platform="RK3588", **speed(6, 900))
    assert slow.speed.decode_ms == pytest.approx(900)
    slow.asked(UNUSED_S + 1)
    join(known, "a", platform="RK3588", **speed(6, 900))
    assert slow.speed.decode_ms == pytest.approx(100)


def test_a_stuck_board_does_not_slow_the_average_of_its_kind() -> None:
    known = boards()
    join(known, "b", platform="RK3588", **speed(6, 100))
    stuck = join(known, "a", platform="RK3588", **speed(6, 8000))
    assert stuck.speed.decode_ms == pytest.approx(8000)
    new = join(known, "c", platform="RK3588")
    assert (new.speed.prefill_ms, new.speed.decode_ms) == pytest.approx((6, 100))
    join(known, "d", platform="RK3588", **speed(6, 700))  # hot, but at work
    join(known, "c", platform="RK3588")
    assert 100 < new.speed.decode_ms < 700


# -- rates ----------------------------------------------------------------------------------------


def counted(*figures: tuple[float, str, int]) -> Rate:
    """The rate after reports of (time, replica, decoded tokens)."""
    rates = Rates(window_s=10.0)
    for now_s, replica, tokens in figures:
        report = BoardReport("a", "m", BoardState.READY, replica=replica)
        rates.update(replace(report, prefill_tokens=2 * tokens, decode_tokens=tokens), now_s)
    return rates.now()


@pytest.mark.parametrize(
    ("figures", "rate"),
    [
        pytest.param([], 0.0, id="nothing"),
        pytest.param([(1.0, "r", 50)], 0.0, id="one report"),
        pytest.param([(1.0, "r", 50), (3.0, "r", 90)], 20.0, id="two"),
        pytest.param(
            [(1.0, "r", 0), (2.0, "r", 999), (9.0, "r", 1999), (21.0, "r", 1999)],
            0.0,
            id="what is long ago counts no more",
        ),
        pytest.param([(1.0, "r", 500), (2.0, "s", 10), (3.0, "s", 15)], 5.0, id="a new replica"),
        pytest.param([(1.0, "r", 5), (1.0, "r", 9)], 0.0, id="no time between"),
    ],
)
def test_a_rate_is_that_of_the_window(figures: list[tuple[float, str, int]], rate: float) -> None:
    found = counted(*figures)
    assert found.decode_tokens_per_s == rate
    assert found.prefill_tokens_per_s == 2 * rate
