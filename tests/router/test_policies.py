"""Properties of every routing policy."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.core.messages import GenerateRequest
from rkserve.fleet.load import PauseEffect
from rkserve.fleet.prefix_index import Reuse
from rkserve.router.policies import POLICIES, PolicySettings, RoutingRequest, SendTo, WaitFor
from rkserve.router.queue.reservation import InFlightRequest
from tests.support.paths import PROJECT
from tests.support.routing import (
    ask,
    boards,
    chosen,
    finished,
    holds,
    join,
    speed,
)


def test_every_policy_has_a_line_in_the_documentation() -> None:
    page = (PROJECT / "docs/explanation/routing.md").read_text(encoding="utf-8")
    for name in POLICIES:
        assert re.search(rf"^\| `{name}`", page, re.MULTILINE), name


# -- who may be chosen ----------------------------------------------------------------------------

STANDINGS = [
    pytest.param({}, None, id="no boards"),
    pytest.param({"a": {"running": 1}, "b": {}}, "b", id="the idle one"),
    pytest.param({"a": {"ready": False}, "b": {}}, "b", id="one that is not ready"),
    pytest.param({"a": {"running": 1}, "b": {"running": 1}}, None, id="all are busy"),
    pytest.param(
        {"a": {"n_batch": 4, "running": 3}, "b": {"running": 1}}, "a", id="a batch has room"
    ),
    pytest.param(
        {"a": {"n_batch": 4, "running": 2}, "b": {"n_batch": 4, "running": 1}}, "b", id="less load"
    ),
    pytest.param({"a": {"held": PauseEffect.QUEUES}, "b": {}}, "b", id="one that is not held"),
    pytest.param(
        {"a": {"held": PauseEffect.QUEUES}, "b": {"running": 1}},
        None,
        id="rather wait than be paused",
    ),
    pytest.param({"a": {"held": PauseEffect.QUEUES}}, "a", id="where all are held, one of them"),
    pytest.param(
        {"a": {"held": PauseEffect.REFUSES}, "b": {"held": PauseEffect.QUEUES}},
        "b",
        id="the less held one",
    ),
]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("there", "expected"), STANDINGS)
def test_only_a_ready_board_with_a_place_takes_a_request(
    there: dict[str, dict[str, Any]], expected: str | None, name: str
) -> None:
    known = boards()
    for key, said in there.items():
        join(known, key, **said)
    verdict = POLICIES[name](random.Random(1)).choose(ask(), known, 0.0)
    assert chosen(verdict) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_a_board_that_was_tried_is_passed_over_also_where_the_others_are_held(name: str) -> None:
    known = boards()
    join(known, "a")
    join(known, "b", held=PauseEffect.QUEUES)
    chooses = POLICIES[name](random.Random(1))
    assert chosen(chooses.choose(ask(tried={"a"}), known, 0.0)) == "b"
    assert chosen(chooses.choose(ask(tried={"a"}, most=PauseEffect.NOT), known, 0.0)) is None
    assert chosen(chooses.choose(ask(tried={"a", "b"}), known, 0.0)) is None


STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(300, 1400), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from(sorted(POLICIES)))
def test_the_same_requests_with_the_same_chance_go_to_the_same_boards(
    steps: list[tuple[int, int, bool]], name: str
) -> None:
    def play() -> list[str]:
        known = boards(7)
        for key in "abcdef":
            join(known, key, holdings=holds(), **speed(3, 60))
        chooses, said, open_stays = POLICIES[name](random.Random(7)), [], []
        for now, (talk, tokens, ends) in enumerate(steps):
            ids = tuple(range(10_000 * talk, 10_000 * talk + tokens))
            one = ask(ids, name=str(now), session=str(talk))
            verdict = chooses.choose(one, known, float(now))
            said.append("" if verdict is None else f"{type(verdict).__name__} {verdict.board.key}")
            if isinstance(verdict, SendTo):
                open_stays.append(InFlightRequest(known, verdict.board, one, float(now)))
            if ends and open_stays:
                stay = open_stays.pop(0)
                stay.observe(finished())
                stay.ended(now + 0.5, left=False)
        return said

    assert play() == play()


# -- asks -----------------------------------------------------------------------------------------


def test_a_prompt_without_ids_is_only_guessed_at() -> None:
    request = GenerateRequest("r", "m", (), 64, prompt_text="word " * 100)
    asked = RoutingRequest.of(request)
    assert (asked.chain, asked.prompt_tokens) == (None, 125)


def test_how_long_one_waits_counts_from_its_first_question() -> None:
    one = ask()
    assert one.waited_ms(5.0) == 0
    assert one.waited_ms(7.5) == 2500


@pytest.mark.parametrize(
    ("now_s", "change", "waits"),
    [
        pytest.param(0.9, {}, True, id="it is still taken"),
        pytest.param(1.1, {}, False, id="a second later it is asked anew whether that pays"),
        pytest.param(0.5, {"running": 0}, False, id="it has a place"),
        pytest.param(0.5, {"ready": False}, False, id="it is not ready any more"),
        pytest.param(0.5, {"held": PauseEffect.QUEUES}, False, id="it is held"),
    ],
)
def test_one_that_waits_for_a_board_asks_again_when_that_has_changed(
    now_s: float, change: dict[str, Any], waits: bool
) -> None:
    known, one = boards(), ask()
    assert not one.waits(0.0)
    one.wait_for(join(known, "a", running=1), 5000.0, 0.0)
    join(known, "a", **{"running": 1, **change})
    assert one.waits(now_s) is waits
    one.tried = {"a"}
    assert not one.waits(now_s)


# -- least load, round robin and session affinity --


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
