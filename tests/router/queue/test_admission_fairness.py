"""The order of service among owners and priorities, and who leaves a queue that is full."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.router.queue.admission import FairQueue, QueueEntry, QueueTerms

_numbers = count()


def one(
    flow: str = "",
    priority: int = 0,
    cost_ms: float = 100.0,
    weight: float = 1.0,
    *,
    ahead: bool = False,
) -> QueueEntry[None]:
    """One more request that waits."""
    number, terms = next(_numbers), QueueTerms()
    return QueueEntry(
        number, flow, weight, priority, cost_ms, ahead, None, terms, 0.0, 0.0, math.inf
    )


def queue(*waiting: QueueEntry[None]) -> FairQueue[None]:
    """Return a queue of those."""
    made: FairQueue[None] = FairQueue()
    for each in waiting:
        made.add(each)
    return made


def served(of: FairQueue[None], times: int) -> list[QueueEntry[None]]:
    """Serve the next ones, each as the queue stands then."""
    found = []
    for _ in range(times):
        found.append(next(of.order()))
        of.serve(found[-1])
    return found


def flows(found: list[QueueEntry[None]]) -> str:
    return "".join(each.flow for each in found)


def test_one_owner_s_requests_are_served_as_they_came() -> None:
    first, second, third = one(), one(), one()
    assert served(queue(first, second, third), 3) == [first, second, third]


def test_a_crowd_of_one_owner_does_not_keep_another_waiting() -> None:
    crowd = [one("a") for _ in range(20)]
    late = one("b")
    of = queue(*crowd)
    assert flows(served(of, 3)) == "aaa"
    of.add(late)
    assert late in served(of, 2)


@pytest.mark.parametrize(
    ("heavy", "light"),
    [
        pytest.param((3.0, 100.0), (1.0, 100.0), id="the weight"),
        pytest.param((1.0, 100.0), (1.0, 300.0), id="service and not requests"),
    ],
)
def test_shares_follow(heavy: tuple[float, float], light: tuple[float, float]) -> None:
    of = queue(
        *(one("a", weight=heavy[0], cost_ms=heavy[1]) for _ in range(60)),
        *(one("b", weight=light[0], cost_ms=light[1]) for _ in range(60)),
    )
    counted = Counter(each.flow for each in served(of, 40))
    assert counted == {"a": 30, "b": 10}


def test_who_was_away_has_saved_nothing_up() -> None:
    of = queue(*(one("a") for _ in range(100)))
    served(of, 50)
    for _ in range(50):
        of.add(one("b"))
    assert Counter(flows(served(of, 20))) == {"a": 10, "b": 10}


def test_what_took_longer_than_thought_is_made_good() -> None:
    of = queue(*(one("a") for _ in range(20)), *(one("b") for _ in range(20)))
    served(of, 2)
    of.bill(one("a"), 400.0)
    assert flows(served(of, 4)) == "bbbb"


def test_the_urgent_go_first_and_what_is_ahead_before_them() -> None:
    later, normal, urgent = one("a", 5), one("a"), one("b", -5)
    back = one("b", 5, ahead=True)
    of = queue(later, normal, urgent, back)
    assert served(of, 4) == [back, urgent, normal, later]
    assert of.by_priority() == {}


def test_what_is_ahead_goes_by_priority_and_then_as_it_came() -> None:
    first, second, urgent = one(ahead=True), one(ahead=True), one("", -1, ahead=True)
    of = queue(second, first, urgent)
    assert served(of, 3) == [urgent, first, second]


def test_depth_is_told_by_priority() -> None:
    of = queue(one("a"), one("b"), one("b", 3), one("", 3, ahead=True))
    assert of.by_priority() == {0: 2, 3: 2}
    assert (len(of), of.size) == (4, 3)


@pytest.mark.parametrize(
    ("waiting", "newcomer", "leaves"),
    [
        pytest.param(["a0"], "a0", "new", id="the youngest of one owner"),
        pytest.param(["a0", "a5"], "b0", "a5", id="the least urgent"),
        pytest.param(["a0"], "a5", "new", id="the newcomer is the least urgent"),
        pytest.param(["a0", "a0", "b0"], "c0", "a0", id="of the owner who has most waiting"),
        pytest.param(["a0", "b0", "b0", "b0"], "a0", "b0", id="which need not be the newcomer's"),
        pytest.param(["a0", "b0", "a0"], "a0", "new", id="or is"),
        pytest.param(["a-5", "b5", "b5"], "a-5", "b5", id="urgent ones stay"),
    ],
)
def test_who_leaves_a_full_queue(waiting: list[str], newcomer: str, leaves: str) -> None:
    there = [one(text[0], int(text[1:])) for text in waiting]
    new = one(newcomer[0], int(newcomer[1:]))
    victim = queue(*there).victim(new)
    if leaves == "new":
        assert victim is new
    else:
        alike = [each for each in there if f"{each.flow}{each.priority}" == leaves]
        assert victim is alike[-1], "the youngest of them"


def test_what_is_ahead_never_leaves_for_a_newcomer() -> None:
    back = one("a", 9, ahead=True)
    new = one("b", -9)
    assert queue(back).victim(new) is new


def test_the_wait_counts_what_comes_before_a_newcomer_and_no_more() -> None:
    of = queue(one("a", cost_ms=10.0), one("a", cost_ms=10.0), one("b", cost_ms=500.0))
    of.add(one("c", -1, cost_ms=7.0))
    of.add(one("c", 1, cost_ms=1000.0))
    assert of.ahead_of("a", 0) == 7.0 + 20.0 + 20.0, "of b as much as a has"
    assert of.ahead_of("d", 0) == 7.0, "who has nothing waiting is next"
    assert of.ahead_of("b", 0) == 7.0 + 500.0 + 20.0
    assert of.ahead_of("a", -1) == 0.0


WAITERS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(-1, 1),
        st.floats(1.0, 1000.0),
        st.booleans(),
    ),
    max_size=30,
)


@given(WAITERS, st.data())
def test_the_order_told_is_the_order_served(
    figures: list[tuple[str, int, float, bool]], data: st.DataObject
) -> None:
    of = queue(*(one(flow, level, cost, ahead=ahead) for flow, level, cost, ahead in figures))
    for gone in data.draw(st.sets(st.integers(0, 29))):
        for number, each in enumerate(list(of.order())):
            if number == gone:
                of.remove(each)
    told = list(of.order())
    assert len(told) == len(of) == len({each.number for each in told})
    keys = [(not each.ahead, each.priority) for each in told]
    assert keys == sorted(keys)
    assert served(of, len(told)) == told
    assert (len(of), of.size, of.by_priority()) == (0, 0, {})


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(10.0, 100.0)), min_size=80, max_size=80))
def test_two_owners_who_always_wait_never_get_far_apart(asked: list[tuple[str, float]]) -> None:
    of = queue(*(one(flow, cost_ms=cost) for flow, cost in asked))
    had = {"a": 0.0, "b": 0.0}
    while len({each.flow for each in of.order()}) > 1:
        (each,) = served(of, 1)
        had[each.flow] += each.cost_ms
        assert abs(had["a"] - had["b"]) <= 100.0, "no more than one request"
