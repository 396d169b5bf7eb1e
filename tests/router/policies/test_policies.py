"""The choice of a board from what one router knows."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.core.block_hashes import Chain, FileHeld, Holdings, LiveHeld, pack, seed_of
from rkserve.core.messages import (
    Accepted,
    AdapterRef,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Kv,
    Paused,
    Timings,
    Usage,
)
from rkserve.fleet.load import BoardStatus, Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import PrefixIndex, Reuse
from rkserve.fleet.requests import InFlightRequest, RoutingRequest
from rkserve.fleet.speeds import Rate, Rates, TokenCounts, WorkCounters
from rkserve.router.policies.policies import (
    POLICIES,
    Decision,
    PolicySettings,
    PrefixPolicy,
    SendTo,
    WaitFor,
    policy,
)

TALK = tuple(range(5000, 6500))
NOTHING_ELSE = PolicySettings(restore_ms=0.0, park_ms=0.0)


def boards(seed: int = 1) -> ModelBoards:
    """No boards yet."""
    return ModelBoards(random.Random(seed), PrefixIndex())


def join(of: ModelBoards, key: str, running: int = 0, **said: Any) -> Candidate:
    """A board has reported; it takes one at a time and two may wait, unless said otherwise."""
    known = {"queue_limit": 2, "running": running, **said}
    return of.heard(key, "group", f"board {key}", BoardStatus(**known))


def speed(key: str, prefill_ms: float, decode_ms: float) -> WorkCounters:
    """Counters of a board that takes so long for each token."""
    return WorkCounters(key, 10_000, 10_000 * prefill_ms, 10_000, 10_000 * decode_ms)


def holds(live: tuple[int, ...] | None = None, *files: tuple[int, ...]) -> bytes:
    """What a board reports that it holds."""
    held = None if live is None else LiveHeld.of(Chain(live, seed_of(None)))
    filed = (FileHeld(len(ids), Chain(ids, seed_of(None)).marks) for ids in files)
    return pack(Holdings(appends=True, park_min=256, live=held, files=tuple(filed)))


def ask(
    ids: Sequence[int] = TALK, name: str = "r", session: str = "", **rest: Any
) -> RoutingRequest:
    """A request for that prompt."""
    chain = Chain(tuple(ids), seed_of(None))
    return RoutingRequest(name, "m", len(chain), 64, chain, session, **rest)


def chosen(verdict: Decision) -> str | None:
    """The board that takes the request."""
    return verdict.board.key if isinstance(verdict, SendTo) else None


def finished(cached: int = 0) -> Finished:
    timings = Timings(0, 1, 1, 1, 1, 1)
    return Finished(FinishReason.STOP, Usage(10, 3, cached), timings)


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
    verdict = policy(name, random.Random(1)).choose(ask(), known, 0.0)
    assert chosen(verdict) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_a_board_that_was_tried_is_passed_over_also_where_the_others_are_held(name: str) -> None:
    known = boards()
    join(known, "a")
    join(known, "b", held=PauseEffect.QUEUES)
    chooses = policy(name, random.Random(1))
    assert chosen(chooses.choose(ask(tried={"a"}), known, 0.0)) == "b"
    assert chosen(chooses.choose(ask(tried={"a"}, most=PauseEffect.NOT), known, 0.0)) is None
    assert chosen(chooses.choose(ask(tried={"a", "b"}), known, 0.0)) is None


@pytest.mark.parametrize("name", ["least_load", "prefix"])
def test_among_equals_chance_decides(name: str) -> None:
    found = set()
    for seed in range(40):
        known = boards(seed)
        for key in "abc":
            join(known, key)
        found.add(chosen(policy(name, random.Random(seed)).choose(ask((1,)), known, 0.0)))
    assert found == {"a", "b", "c"}


def test_round_robin_gives_each_its_turn() -> None:
    known, chooses = boards(), policy("round_robin", random.Random(1))
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
    known, chooses = boards(), policy("session", random.Random(1), PolicySettings(max_wait_s=5))
    for number in range(8):
        join(known, str(number), counters=speed(str(number), 1, 10))
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
    known, chooses = boards(), policy("session", random.Random(1), PolicySettings(max_wait_s=1))
    join(known, "a"), join(known, "b")
    one = ask(session="s")
    mine = chosen(chooses.choose(one, known, 0.0))
    stay = InFlightRequest(
        known, known.get(mine or "") or next(iter(known)), ask(name="other"), 0.0
    )
    assert stay.rest_ms(0.0) > 1000
    assert chosen(chooses.choose(one, known, 0.1)) not in (None, mine)


# -- prefixes -------------------------------------------------------------------------------------


def test_a_conversation_finds_its_board_again() -> None:
    known = boards()
    join(known, "a"), join(known, "b", holdings=holds(TALK[:900])), join(known, "c")
    verdict = PrefixPolicy().choose(ask(), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert (verdict.board.key, verdict.reuse) == ("b", Reuse(900, live=True))


def test_what_has_just_been_said_is_known_before_any_report() -> None:
    known = boards()
    for key in "abc":
        join(known, key, holdings=holds())
    first = ask(TALK[:400])
    board = known.get("b")
    assert board is not None
    stay = InFlightRequest(known, board, first, 0.0)
    stay.heard(Accepted("board b", "1.3.0", 0))
    stay.heard(Delta("words", TALK[400:450]))
    stay.heard(finished())
    stay.ended(1.0, left=False)
    verdict = PrefixPolicy().choose(ask(TALK[:500]), known, 2.0)
    assert isinstance(verdict, SendTo)
    assert (verdict.board, verdict.reuse) == (board, Reuse(449, live=True)), (
        "the last token is computed by the next run"
    )


UNKNOWN_ENDS: list[Any] = [
    pytest.param([Delta("w", (1,))], True, id="its client left"),
    pytest.param([Delta("w", (1,))], False, id="it failed"),
    pytest.param([Delta("w", (1,), retract=1), finished()], False, id="an edit took words back"),
    pytest.param(
        [Accepted("board a", "1", 0, adapter=AdapterRef("kind", "v1", "0" * 64)), finished()],
        False,
        id="another adapter was bound",
    ),
]


@pytest.mark.parametrize(("events", "left"), UNKNOWN_ENDS)
def test_a_run_that_ends_otherwise_leaves_nothing(events: list[Event], left: bool) -> None:
    known = boards()
    board = join(known, "a", holdings=holds())
    stay = InFlightRequest(known, board, ask(TALK[:400]), 0.0)
    for event in events:
        stay.heard(event)
    stay.ended(1.0, left=left)
    assert known.index is not None
    assert known.index.holders(Chain(TALK, seed_of(None))) == {}


@pytest.mark.parametrize(
    ("slow_ms", "wins"),
    [
        pytest.param(4.0, "holds", id="RK3576 with the cache before RK3588 without"),
        pytest.param(400.0, "fast", id="not where the rest takes it longer than all the other"),
    ],
)
def test_what_is_held_is_weighed_against_speed(slow_ms: float, wins: str) -> None:
    known = boards()
    join(known, "fast", counters=speed("fast", 2.6, 60), kind="RK3588")
    join(
        known,
        "holds",
        counters=speed("holds", slow_ms, 70),
        kind="RK3576",
        holdings=holds(TALK[:1400]),
    )
    assert chosen(PrefixPolicy().choose(ask(), known, 0.0)) == wins


def test_it_waits_for_the_board_that_will_be_sooner_and_others_know() -> None:
    known = boards()
    busy = join(known, "a", counters=speed("a", 3, 10), holdings=holds(None, TALK[:1400]))
    join(known, "b", counters=speed("b", 3, 10))
    stay = InFlightRequest(known, busy, ask((1, 2, 3), "other"), 0.0)
    verdict = PrefixPolicy(NOTHING_ELSE).choose(ask(), known, 0.0)
    assert isinstance(verdict, WaitFor)
    assert verdict.board is busy
    assert stay.rest_ms(0.0) <= verdict.until_ms < 1500 * 3
    known.book("first", busy, 4_000)
    assert chosen(PrefixPolicy(NOTHING_ELSE).choose(ask(), known, 0.0)) == "b", "two before it"
    known.unbook("first")
    assert busy.booked_ms == 0
    stay.ended(1.0, left=False)
    assert chosen(PrefixPolicy(NOTHING_ELSE).choose(ask(), known, 1.0)) == "a"


def test_it_does_not_wait_longer_than_it_is_told() -> None:
    known = boards()
    busy = join(known, "a", counters=speed("a", 3, 10), holdings=holds(None, TALK[:1400]))
    join(known, "b", counters=speed("b", 3, 10))
    InFlightRequest(known, busy, ask((1, 2, 3), "other"), 0.0)
    assert chosen(PrefixPolicy(PolicySettings(max_wait_s=0.1)).choose(ask(), known, 0.0)) == "b"


def test_a_session_is_a_hint_where_nothing_else_is_known_and_no_more() -> None:
    known = boards()
    for number in range(8):
        join(known, str(number), counters=speed(str(number), 3, 60))
    board = known.get("5")
    assert board is not None
    stay = InFlightRequest(known, board, ask((1, 2), session="s"), 0.0)
    stay.ended(1.0, left=True)
    strange = ask(tuple(range(300)), session="s")
    for _ in range(5):
        assert chosen(PrefixPolicy().choose(strange, known, 2.0)) == "5"
    join(known, "3", counters=speed("3", 3, 60), holdings=holds(TALK[:900]))
    assert chosen(PrefixPolicy().choose(ask(session="s"), known, 2.0)) == "3"
    InFlightRequest(known, board, ask((1, 2), "other"), 2.0)
    assert chosen(PrefixPolicy().choose(strange, known, 2.0)) not in ("5", None)


def test_a_new_conversation_spares_the_board_whose_context_may_be_wanted_again() -> None:
    known = boards()
    for key in "abcd":
        join(known, key, holdings=holds(TALK) if key != "c" else holds())
    for seed in range(5):
        asked = ask(tuple(range(seed, 300 + seed)))
        assert chosen(PrefixPolicy().choose(asked, known, 0.0)) == "c"


def test_under_load_who_has_its_context_on_the_free_board_goes_first_but_not_for_ever() -> None:
    known, chooses = boards(), PrefixPolicy()
    board = join(known, "a")
    stranger = ask(name="stranger")
    at_home = SendTo(board, Reuse(900), spared_ms=2000)
    for _ in range(PrefixPolicy.OVERTAKEN):
        offers = [(stranger, SendTo(board)), (ask(name="other"), at_home)]
        assert not chooses.satisfied(offers[0][1])
        assert chooses.first(offers) == 1
    assert chooses.first([(stranger, SendTo(board)), (ask(name="other"), at_home)]) == 0
    assert chooses.satisfied(at_home)


@pytest.mark.parametrize("name", ["least_load", "round_robin", "session"])
def test_other_policies_keep_the_order(name: str) -> None:
    known, chooses = boards(), policy(name, random.Random(1))
    board = join(known, "a")
    offers = [(ask(), SendTo(board)), (ask(), SendTo(board, Reuse(900), spared_ms=2000))]
    assert chooses.satisfied(offers[0][1])
    assert chooses.first(offers) == 0


def test_what_is_forgotten_is_not_believed_from_a_report_of_before() -> None:
    known = boards()
    board = join(known, "a", holdings=holds(TALK[:900]))
    board.asked(1.0)
    known.forget(board, 2.0)
    join(known, "a", holdings=holds(TALK[:900]))
    verdict = PrefixPolicy().choose(ask(), known, 2.0)
    assert isinstance(verdict, SendTo)
    assert verdict.reuse.tokens == 0
    board.asked(3.0)
    join(known, "a", holdings=holds(TALK[:900]))
    verdict = PrefixPolicy().choose(ask(), known, 3.0)
    assert isinstance(verdict, SendTo)
    assert verdict.reuse.tokens == 900


FREE = st.tuples(
    st.sampled_from([1.0, 2.6, 4.0, 9.0]), st.booleans(), st.integers(0, 1500), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(st.lists(FREE, min_size=1, max_size=8), st.integers(300, 1500))
def test_a_hit_never_costs_a_longer_estimated_wait(
    figures: list[tuple[float, bool, int, bool]], prompt: int
) -> None:
    known = boards()
    for number, (prefill_ms, busy, held, live) in enumerate(figures):
        key = str(number)
        context = TALK[:held]
        held_so = holds(context) if live else holds(None, context)
        join(known, key, counters=speed(key, prefill_ms, 20 * prefill_ms), holdings=held_so)
        if busy:
            board = known.get(key)
            assert board is not None
            InFlightRequest(known, board, RoutingRequest(f"other {key}", "m", 10, 64), 0.0)
    verdict = PrefixPolicy(NOTHING_ELSE).choose(ask(TALK[:prompt]), known, 0.0)
    free = [one for one in known if one.has_place]
    if verdict is None:
        assert not free
        return
    # What each free board would take from nothing; parking what is live there takes a token.
    cold = {one.key: prompt * one.speed.prefill_ms for one in free}
    wait_ms = verdict.board.wait_ms(0.0)
    mine = wait_ms + (prompt - verdict.reuse.tokens) * verdict.board.speed.prefill_ms
    others = [ms for key, ms in cold.items() if key != verdict.board.key]
    parks = max(one.speed.decode_ms for one in known)
    if isinstance(verdict, WaitFor) or (verdict.reuse.tokens and others):
        assert mine <= min(others) + parks


STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(300, 1400), st.booleans()), min_size=1, max_size=25
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from(POLICIES))
def test_the_same_requests_with_the_same_chance_go_to_the_same_boards(
    steps: list[tuple[int, int, bool]], name: str
) -> None:
    def play() -> list[str]:
        known = boards(7)
        for key in "abcdef":
            join(known, key, holdings=holds(), counters=speed(key, 3, 60))
        chooses, said, open_stays = policy(name, random.Random(7)), [], []
        for now, (talk, tokens, ends) in enumerate(steps):
            ids = tuple(range(10_000 * talk, 10_000 * talk + tokens))
            one = ask(ids, name=str(now), session=str(talk))
            verdict = chooses.choose(one, known, float(now))
            said.append("" if verdict is None else f"{type(verdict).__name__} {verdict.board.key}")
            if isinstance(verdict, SendTo):
                open_stays.append(InFlightRequest(known, verdict.board, one, float(now)))
            if ends and open_stays:
                stay = open_stays.pop(0)
                stay.heard(finished())
                stay.ended(now + 0.5, left=False)
        return said

    assert play() == play()


def test_among_a_thousand_boards_few_are_looked_at() -> None:
    known = boards()
    for number in range(1000):
        join(known, str(number), holdings=holds(None, TALK[:300]))
    asked, calls = ask(), 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        verdict = PrefixPolicy().choose(asked, known, 0.0)
    finally:
        sys.setprofile(None)
    assert isinstance(verdict, SendTo)
    assert verdict.reuse.tokens
    assert calls < 2000


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


# -- load -----------------------------------------------------------------------------------------


def sent(board: Candidate, known: ModelBoards) -> InFlightRequest:
    return InFlightRequest(known, board, RoutingRequest("r", "m", 1, 64), 0.0)


def test_a_report_adds_what_other_routers_sent() -> None:
    known = boards()
    board = join(known, "a")
    stay = sent(board, known)
    board.asked(1.0)
    join(known, "a", running=3)
    assert (board.foreign, board.load) == (2, 3)
    stay.ended(2.0, left=False)
    assert board.load == 2


@pytest.mark.parametrize("when", ["before the report", "while the report travels"])
def test_an_own_request_that_ends_meanwhile_is_not_taken_for_a_foreign_one(when: str) -> None:
    known = boards()
    board = join(known, "a")
    stay = sent(board, known) if when == "before the report" else None
    board.asked(1.0)
    stay = stay or sent(board, known)
    stay.ended(2.0, left=False)  # the board counted it, and it is over when the report arrives
    join(known, "a", running=1)
    assert (board.load, board.has_place) == (0, True)


def test_the_next_report_forgets_the_last_ones_window() -> None:
    known = boards()
    board = join(known, "a")
    stay = sent(board, known)
    board.asked(1.0)
    stay.ended(2.0, left=False)
    join(known, "a", running=1)
    board.asked(3.0)
    join(known, "a", running=1)
    assert board.foreign == 1


def test_a_board_that_still_ends_what_a_client_left_is_not_taken_for_busy() -> None:
    known = boards()
    board = join(known, "a")
    sent(board, known).ended(0.5, left=True)
    board.asked(1.0)
    join(known, "a", running=1)
    assert board.load == 0
    board.asked(2.0)
    join(known, "a", running=1)  # a second later: it does not come to an end, or it is another's
    assert board.load == 1


def test_one_that_rests_takes_no_room_and_counts_again_when_it_goes_on() -> None:
    known = boards()
    board = join(known, "a")
    stay = sent(board, known)
    assert not known.any_open
    stay.heard(Paused(None, 1, Kv.RECOMPUTED))
    assert (board.load, board.unused, known.any_open) == (0, False, True)
    board.asked(1.0)
    join(known, "a")
    stay.heard(Delta("", (), paused=True))
    assert board.load == 0, "an edit does not end the pause"
    stay.heard(Delta("w", (1,)))
    assert board.load == 1
    join(known, "a", running=1)
    assert (board.load, board.foreign) == (1, 0)
    stay.ended(2.0, left=False)
    stay.ended(2.0, left=False)
    assert (board.load, board.unused) == (0, True)


def test_one_that_keeps_its_board_counts_until_the_board_says_otherwise() -> None:
    known = boards()
    board = join(known, "a")
    stay = sent(board, known)
    board.asked(1.0)
    stay.heard(Paused(None, 1, Kv.KEPT))
    assert board.load == 1, "who comes now would wait for it"
    board.asked(2.0)
    join(known, "a", running=1)
    assert board.load == 1
    board.asked(3.0)
    join(known, "a")
    assert board.load == 0, "it was drained for others"


def test_places_and_tiers_follow_what_boards_say() -> None:
    known = boards()
    join(known, "a", n_batch=4)
    board = join(known, "b")
    assert (known.places, known.held, known.any_open) == (5, PauseEffect.NOT, True)
    known.hold(board, PauseEffect.REFUSES)
    assert known.places == 4
    join(known, "a", n_batch=4, ready=False)
    assert (known.places, known.held) == (0, PauseEffect.REFUSES)
    board.lost()
    assert (known.held, known.any_open) == (None, False)


def test_a_board_that_falls_silent_goes_when_nothing_of_this_router_is_there() -> None:
    known = boards()
    board = join(known, "a", holdings=holds(TALK[:900]))
    stay = sent(board, known)
    known.silent(board, 1.0)
    assert (len(known), known.held) == (1, None)
    stay.ended(2.0, left=False)
    known.silent(board, 3.0)
    assert len(known) == 0
    assert known.index is not None
    assert len(known.index) == 0


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
