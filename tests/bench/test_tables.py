"""Markdown tables, figures and verdicts."""

from __future__ import annotations

import pytest

from rkserve.bench.tables import TargetVerdict, figure, table


@pytest.mark.parametrize(
    ("measured", "at_most", "reached"),
    [
        pytest.param(1.05, True, True, id="exactly at an upper bound"),
        pytest.param(1.051, True, False, id="above it"),
        pytest.param(1.05, False, True, id="exactly at a lower bound"),
        pytest.param(1.049, False, False, id="below it"),
    ],
)
def test_a_bound_belongs_to_what_reaches_it(measured: float, at_most: bool, reached: bool) -> None:
    assert TargetVerdict("x", measured, 1.05, at_most).reached is reached


def test_tables_are_padded_and_figures_stand_to_the_right() -> None:
    assert table(["", "ms"], [["TTFT", figure(12345.678, 1)], ["gap", figure(None)]]) == (
        "|      |       ms |\n| ---- | -------: |\n| TTFT | 12 345.7 |\n| gap  |        - |\n"
    )
