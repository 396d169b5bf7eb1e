"""Speeds and rates of boards."""

from __future__ import annotations

import pytest

from rkserve.fleet.speeds import Rate, Rates, TokenCounts
from tests.support.routing import (
    boards,
    join,
    speed,
)


def test_speeds_are_measured_and_guessed_from_boards_of_the_same_kind() -> None:
    known = boards()
    unknown = join(known, "a", kind="RK3576")
    prior = unknown.speed.decode_ms
    join(known, "b", kind="RK3576", counters=speed("b", 6, 100))
    join(known, "c", kind="RK3588", counters=speed("c", 2, 50))
    join(known, "a", kind="RK3576")
    assert unknown.speed.decode_ms == pytest.approx(100) != prior
    assert unknown.speed.prefill_ms == pytest.approx(6)
    join(known, "a", kind="RK3576", counters=speed("a", 3, 70))
    assert unknown.speed.decode_ms == pytest.approx(70)


# -- rates ----------------------------------------------------------------------------------------


def counted(*figures: tuple[float, str, int]) -> Rate:
    """The rate after reports of (time, replica, decoded tokens)."""
    rates = Rates(window_s=10.0)
    for now_s, replica, tokens in figures:
        rates.heard(TokenCounts(now_s, replica, 2 * tokens, tokens))
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
