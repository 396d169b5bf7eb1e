"""Least load, round robin and session affinity."""

from __future__ import annotations

import random

import pytest

from rkserve.fleet.prefix_index import Reuse
from rkserve.router.policies import POLICIES, PolicySettings, SendTo, WaitFor
from rkserve.router.queue.reservation import InFlightRequest
from tests.support.routing import (
    ask,
    boards,
    chosen,
    join,
    speed,
)


@pytest.mark.parametrize("name", ["least_load", "prefix"])
def test_among_equals_chance_decides(name: str) -> None:
    found = set()
    for seed in range(40):
        known = boards(seed)
        for key in "abc":
            join(known, key)
        found.add(chosen(POLICIES[name](random.Random(seed)).choose(ask((1,)), known, 0.0)))
    assert found == {"a", "b", "c"}


def test_round_robin_gives_each_its_turn() -> None:
    known, chooses = boards(), POLICIES["round_robin"](random.Random(1))
    for key in "abc":
        join(known, key)
    order = []
    for now in range(6):
        verdict = chooses.choose(ask(), known, float(now))
        assert isinstance(verdict, SendTo)
        order.append(verdict.board.key)
        stay = InFlightRequest(known, verdict.board, ask(), float(now))
        stay.ended(now + 0.5, left=False)
    assert order == [*"abc", *"abc"]


def test_a_session_keeps_its_board_while_others_come_and_waits_for_it() -> None:
    known, chooses = boards(), POLICIES["session"](random.Random(1), PolicySettings(max_wait_s=5))
    for number in range(8):
        join(known, str(number), **speed(1, 10))
    mine = {s: chosen(chooses.choose(ask(session=s), known, 0.0)) for s in map(str, range(40))}
    assert len(set(mine.values())) > 3
    board = known.get(mine["7"] or "")
    assert board is not None
    stay = InFlightRequest(known, board, ask(name="other"), 0.0)
    verdict = chooses.choose(ask(session="7"), known, 0.0)
    assert isinstance(verdict, WaitFor)
    assert (verdict.board, verdict.until_ms) == (board, 5000)
    stay.ended(1.0, left=False)
    late = ask(session="7")
    assert chosen(chooses.choose(late, known, 1.0)) == mine["7"]
    for number in range(8, 12):
        join(known, str(number))
    moved = [
        s for s, was in mine.items() if chosen(chooses.choose(ask(session=s), known, 2.0)) != was
    ]
    assert len(moved) < 30


def test_a_session_waits_no_longer_than_it_may() -> None:
    known, chooses = boards(), POLICIES["session"](random.Random(1), PolicySettings(max_wait_s=1))
    join(known, "a"), join(known, "b")
    one = ask(session="s")
    mine = chosen(chooses.choose(one, known, 0.0))
    stay = InFlightRequest(
        known, known.get(mine or "") or next(iter(known)), ask(name="other"), 0.0
    )
    assert stay.rest_ms(0.0) > 1000
    assert chosen(chooses.choose(one, known, 0.1)) not in (None, mine)


def test_the_time_that_a_session_has_waited_counts_against_its_limit() -> None:
    known, chooses = boards(), POLICIES["session"](random.Random(1), PolicySettings(max_wait_s=60))
    join(known, "a"), join(known, "b")
    one = ask(session="s")
    mine = known.get(chosen(chooses.choose(one, known, 0.0)) or "")
    assert mine is not None
    InFlightRequest(known, mine, ask(name="other"), 0.0)
    for now_s, left_ms in ((0.0, 60_000), (20.0, 40_000)):
        verdict = chooses.choose(one, known, now_s)
        assert isinstance(verdict, WaitFor)
        assert (verdict.board, verdict.until_ms) == (mine, left_ms)
    assert chosen(chooses.choose(one, known, 61.0)) not in (None, mine.key)


def test_a_session_moves_on_from_a_board_that_was_tried_or_is_not_ready() -> None:
    known, chooses = boards(), POLICIES["session"](random.Random(1), PolicySettings())
    for key in "abc":
        join(known, key)
    mine = chosen(chooses.choose(ask(session="s"), known, 0.0))
    assert mine is not None
    second = chosen(chooses.choose(ask(session="s", tried=frozenset({mine})), known, 0.0))
    assert second not in (None, mine)
    join(known, mine, ready=False)
    assert chosen(chooses.choose(ask(session="s"), known, 0.0)) == second


@pytest.mark.parametrize("name", ["least_load", "round_robin", "session"])
def test_other_policies_keep_the_order(name: str) -> None:
    known, chooses = boards(), POLICIES[name](random.Random(1))
    board = join(known, "a")
    offers = [(ask(), SendTo(board)), (ask(), SendTo(board, Reuse(900), spared_ms=2000))]
    assert chooses.satisfied(offers[0][1])
    assert chooses.first(offers) == 0
