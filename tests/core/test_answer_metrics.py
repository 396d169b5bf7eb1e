"""The metrics of answers: latencies of tokens, ends and lengths, adapters of calls."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rkserve.core.answer_metrics import (
    DAY_S,
    DAYS_KEPT,
    ERROR,
    HANG_UP,
    REASONS,
    AdapterCalls,
    DayUsage,
    RouterUsage,
    TokenGaps,
    UsageByDay,
    together,
)
from rkserve.core.messages import Finished, FinishReason, Timings, Usage
from rkserve.core.metrics import RouterMetrics


@pytest.mark.parametrize(
    ("gap_s", "bucket"), [(0.0, "0.0025"), (0.0025, "0.0025"), (0.0026, "0.004"), (99.0, "+Inf")]
)
def test_a_gap_is_in_the_first_bucket_that_holds_it(gap_s: float, bucket: str) -> None:
    gaps = TokenGaps()
    gaps.observe(gap_s, 3)
    counts, sum_s = gaps.buckets()
    assert sum_s == pytest.approx(3 * gap_s)
    assert next(bound for bound, count in counts if count) == bucket
    assert counts[-1] == ("+Inf", 3)


def test_every_end_of_an_answer_has_its_count() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    figures = metrics.answers("m")
    for reason in FinishReason:
        figures.finished(Finished(reason, Usage(100, 20), Timings(0, 0, 0, 0, 0, 0)))
    figures.broken(ERROR, 2)
    figures.broken(HANG_UP, 3)
    value = metrics.registry.get_sample_value
    name = "rkserve_finish_reasons_total"
    counts = {reason: value(name, {"model": "m", "reason": reason}) for reason in REASONS}
    assert counts == {"stop": 1, "length": 1, "abort": 1, "error": 2, "hang_up": 3}
    # It has no series before it comes, which upstreams alone bring about.
    assert value(name, {"model": "m", "reason": "content_filter"}) == 1
    assert value("rkserve_request_prompt_tokens_sum", {"model": "m"}) == 400
    assert value("rkserve_request_completion_tokens_bucket", {"model": "m", "le": "32.0"}) == 4


def test_an_adapter_waits_only_while_its_call_does() -> None:
    calls = AdapterCalls()
    with calls.waits("tone"), calls.waits("tone"), calls.waits(None):
        assert +calls.waiting == {"tone": 2}
    assert not +calls.waiting


def test_usage_is_counted_on_the_day_in_utc_on_which_it_occurs() -> None:
    now_s = [100 * DAY_S - 1.0]
    metrics = RouterMetrics(CollectorRegistry(), lambda: now_s[0])
    alice, bob = metrics.key_usage("alice"), metrics.key_usage("bob")
    alice.called()
    alice.spent(prompt=7)
    now_s[0] += 1
    alice.spent(completion=2)
    alice.used_board(1.5)
    bob.called()
    assert set(metrics.usage.rows()) == {
        DayUsage(99, "alice", requests=1, prompt_tokens=7),
        DayUsage(100, "alice", completion_tokens=2, board_s=1.5),
        DayUsage(100, "bob", requests=1),
    }
    assert metrics.usage.today == 100


def test_usage_has_a_bounded_number_of_days_also_after_a_clock_was_set_back() -> None:
    now_s = [9000.0 * DAY_S]
    usage = UsageByDay(lambda: now_s[0])
    usage.of("a").requests += 1
    for day in range(DAYS_KEPT):
        now_s[0] = day * DAY_S
        usage.of("a").requests += 1
    assert [one.day for one in usage.rows()] == list(range(DAYS_KEPT))


def test_usage_that_could_not_be_stored_is_added_to_what_came_meanwhile() -> None:
    usage = UsageByDay(lambda: 5.0 * DAY_S)
    usage.of("a").requests += 1
    usage.of("a").board_s += 0.5
    taken = usage.take()
    assert usage.rows() == []
    usage.of("a").requests += 1
    usage.of("a").completion_tokens += 4
    usage.put_back(taken)
    assert usage.rows() == [DayUsage(5, "a", 2, 0, 4, 0.5)]


COUNTS = st.integers(0, 9)
ROWS = st.builds(DayUsage, st.integers(1, 2), st.sampled_from("ab"), COUNTS, COUNTS, COUNTS, COUNTS)


@given(first=st.lists(ROWS), second=st.lists(ROWS), other=st.lists(ROWS))
def test_a_file_that_two_routers_read_counts_once_as_the_later_one_has_it(
    first: list[DayUsage], second: list[DayUsage], other: list[DayUsage]
) -> None:
    def sums(*rows: DayUsage) -> tuple[DayUsage, ...]:
        return tuple(together([RouterUsage("", unstored=rows)]))

    earlier, later = sums(*first), sums(*first, *second)
    routers = [
        RouterUsage("0", "file", later, ()),
        RouterUsage("1", "file", earlier, ()),
        RouterUsage("0@rock", "another", sums(*other), ()),
    ]
    expected = sorted(sums(*later, *other), key=astuple)
    assert sorted(together(routers), key=astuple) == expected
    assert sorted(together(reversed(routers)), key=astuple) == expected


def test_routers_without_a_file_are_added() -> None:
    row = DayUsage(1, "a", 1, 2, 3, 4.0)
    found = together(
        [
            RouterUsage("0", "", (), (row,)),
            RouterUsage("1", "", (), (row,)),
            RouterUsage("2", "file", (row,), ()),
        ]
    )
    assert found == [replace(row, requests=3, prompt_tokens=6, completion_tokens=9, board_s=12.0)]
