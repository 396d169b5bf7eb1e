"""Charts as SVG and as lines of points."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from rkserve.bench.report import (
    Chart,
    ChartLine,
    charts,
    decades,
    events_over_time,
    running,
    shares,
    svg,
    ticks,
)
from tests.support.values.bench_load import answered, failed, played

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize(
    "points",
    [
        pytest.param([(1.0, 2.0)], id="one point"),
        pytest.param([(5.0, 0.0), (5.0, 0.0)], id="no extent"),
        pytest.param([(float(n + 1), float(n)) for n in range(10_000)], id="many"),
        pytest.param([], id="none"),
    ],
)
def test_whatever_is_drawn_is_svg_within_its_frame(
    points: list[tuple[float, float]], log_x: bool
) -> None:
    chart = Chart("A <title> & more", "x", "y", [ChartLine("a < b", points)], log_x=log_x)
    drawn = svg(chart)
    root = ET.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    assert len(drawn) < 40_000
    for pair in (root.find(f"{SVG}polyline").get("points") or "").split():  # type: ignore[union-attr] # there is one
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 720
        assert 0 <= y <= 360


def test_a_line_begins_and_ends_where_it_should() -> None:
    drawn = ET.fromstring(svg(Chart("t", "x", "y", [ChartLine("a", [(0.0, 0.0), (10.0, 5.0)])])))
    line = drawn.find(f"{SVG}polyline")
    assert line is not None
    assert line.get("points") == "70.0,312.0 704.0,40.0"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        pytest.param(0, 10, [0, 2, 4, 6, 8, 10], id="tens"),
        pytest.param(0, 0.7, [0, 0.2, 0.4, 0.6], id="shares"),
        pytest.param(3, 3, [3], id="a point"),
        pytest.param(0, 1234, [0, 250, 500, 750, 1000], id="quarters"),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_decades() -> None:
    assert decades(3, 150) == pytest.approx([5, 10, 20, 50, 100])


def test_a_distribution_rises_to_all() -> None:
    assert shares([3.0, 1.0, 2.0, 2.0]) == [(1.0, 25.0), (2.0, 50.0), (2.0, 75.0), (3.0, 100.0)]


def test_running_requests_are_counted_from_due_to_over() -> None:
    run = played([answered(11.0), answered(11.5), failed(20.0)])
    counts = running(run)
    assert max(count for _, count in counts) == 2
    assert counts[-1][1] == 0


def test_no_text_is_no_line() -> None:
    assert events_over_time(played([failed(11.0)])) == []
    assert list(charts([played([failed(11.0)])])) == ["running"]
