"""Random samples of a set of boards, and sessions on a consistent hash ring."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rkserve.fleet.load import Candidate, HashRing, ModelBoards, RandomSet
from rkserve.fleet.measurements import Speed

SESSIONS = [f"session {number}" for number in range(400)]


def board(key: str) -> Candidate:
    boards = ModelBoards(random.Random(1))
    return Candidate(boards, key, "group", key, 0, Speed(boards.speeds, ""))


def items(*keys: str) -> RandomSet:
    found = RandomSet()
    for key in keys:
        found.add(board(key))
    return found


def keys(sample: list[Candidate]) -> set[str]:
    return {one.key for one in sample}


@pytest.mark.parametrize("removed", ["a", "b", "c"])
def test_an_item_is_removed_wherever_it_is(removed: str) -> None:
    found = items("a", "b", "c")
    found.remove(board(removed))
    assert len(found) == 2
    assert keys(found.sample(random.Random(1), 3)) == {"a", "b", "c"} - {removed}
    found.add(board(removed))
    found.remove(board("b"))
    assert keys(found.sample(random.Random(1), 3)) == {"a", "c"}


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_a_sample_has_no_repeats_and_none_of_the_excluded(most: int) -> None:
    found, rng = items(*"abcdef"), random.Random(1)
    for _ in range(50):
        sample = found.sample(rng, most, but=("a", "b"))
        assert len(sample) == len(keys(sample)) == min(most, 4)
        assert keys(sample) <= set("cdef")


def test_every_item_is_sampled_equally_often_and_a_seed_repeats_itself() -> None:
    found = items(*"abcd")
    rng = random.Random(7)
    counts = Counter(found.sample(rng, 1)[0].key for _ in range(4000))
    assert all(850 < counts[key] < 1150 for key in "abcd")
    samples = [found.sample(random.Random(3), 2) for _ in range(2)]
    assert samples[0] == samples[1]


def ring(*names: str) -> HashRing:
    found = HashRing()
    for name in names:
        found.add(name)
    return found


def test_a_session_meets_every_board_once_in_an_order_of_its_own() -> None:
    found = ring("a", "b", "c")
    orders = {tuple(found.of(session)) for session in SESSIONS}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert {order[0] for order in orders} == {"a", "b", "c"}
    assert list(ring().of("x")) == []


def test_only_the_sessions_of_a_removed_board_move_and_they_come_back() -> None:
    found = ring("a", "b", "c", "d")
    before = {session: next(found.of(session)) for session in SESSIONS}
    found.remove("b")
    after = {session: next(found.of(session)) for session in SESSIONS}
    assert all(after[one] == before[one] for one in SESSIONS if before[one] != "b")
    assert "b" not in after.values()
    found.add("b")
    found.add("b")  # a repeat changes nothing
    assert {session: next(found.of(session)) for session in SESSIONS} == before


def test_sessions_are_spread_over_boards_whatever_the_order_of_their_joining() -> None:
    counts = Counter(next(ring("a", "b", "c", "d").of(session)) for session in SESSIONS)
    assert all(50 < counts[name] < 170 for name in "abcd"), counts
    assert [next(ring("d", "a", "c", "b").of(session)) for session in SESSIONS] == [
        next(ring("a", "b", "c", "d").of(session)) for session in SESSIONS
    ]
