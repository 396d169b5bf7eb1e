"""Counts of traffic, their sums and differences, and percentiles of histograms."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.verdicts.facts import NO_TRAFFIC, TrafficCounts, percentile

COUNT = st.integers(0, 10**6)
BUCKETS = st.tuples(COUNT, COUNT, COUNT)
COUNTS = st.builds(
    TrafficCounts, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, BUCKETS, st.tuples(COUNT, COUNT)
)


@given(COUNTS, COUNTS)
def test_the_difference_to_an_earlier_count_is_what_came_since(
    one: TrafficCounts, more: TrafficCounts
) -> None:
    assert one.plus(more).minus(one) == more
    assert one.plus(NO_TRAFFIC) == one == NO_TRAFFIC.plus(one)


@given(COUNTS)
def test_packed_counts_are_unpacked_as_they_were(counts: TrafficCounts) -> None:
    assert TrafficCounts.unpacked(counts.packed()) == counts
    assert pickle.loads(pickle.dumps(counts)) == counts
    assert counts.packed().itemsize == 8


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        pytest.param((0, 0, 0), 0.95, None, id="no sample"),
        pytest.param((10, 0, 0), 0.5, 0.5, id="the middle of the first bucket"),
        pytest.param((0, 10, 0), 0.5, 1.5, id="linear within a bucket"),
        pytest.param((5, 5, 0), 0.5, 1.0, id="a bound"),
        pytest.param((0, 0, 10), 0.95, 2.0, id="beyond the last bound"),
    ],
)
def test_a_percentile_is_estimated_as_prometheus_does(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    assert percentile(counts, (1.0, 2.0), share) == expected
