"""Routing by cached prefixes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.core.block_hashes import BlockHashes, seed_of
from rkserve.core.messages import (
    Accepted,
    AdapterRef,
    Delta,
    Event,
)
from rkserve.fleet.load import PauseEffect
from rkserve.fleet.prefix_index import Reuse
from rkserve.router.policies import (
    PolicySettings,
    PrefixPolicy,
    RoutingRequest,
    SendTo,
    WaitFor,
)
from rkserve.router.queue.reservation import InFlightRequest
from tests.support.routing import (
    NOTHING_ELSE,
    TALK,
    ask,
    boards,
    chosen,
    finished,
    holds,
    join,
    speed,
)

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
    stay.observe(Accepted("board b", "1.3.0", 0))
    stay.observe(Delta("words", TALK[400:450]))
    stay.observe(finished())
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
        stay.observe(event)
    stay.ended(1.0, left=left)
    assert known.index is not None
    assert known.index.holders(BlockHashes(TALK, seed_of(None))) == {}


@pytest.mark.parametrize(
    ("slow_ms", "wins"),
    [
        pytest.param(4.0, "holds", id="RK3576 with the cache before RK3588 without"),
        pytest.param(400.0, "fast", id="not where the rest takes it longer than all the other"),
    ],
)
def test_what_is_held_is_weighed_against_speed(slow_ms: float, wins: str) -> None:
    known = boards()
    join(known, "fast", **speed(2.6, 60), platform="RK3588")
    join(
        known,
        "holds",
        **speed(slow_ms, 70),
        platform="RK3576",
        holdings=holds(TALK[:1400]),
    )
    assert chosen(PrefixPolicy().choose(ask(), known, 0.0)) == wins


def test_it_waits_for_the_board_that_will_be_sooner_and_others_know() -> None:
    known = boards()
    busy = join(known, "a", **speed(3, 10), holdings=holds(None, TALK[:1400]))
    join(known, "b", **speed(3, 10))
    stay = InFlightRequest(known, busy, ask((1, 2, 3), "other"), 0.0)
    verdict = PrefixPolicy(settings=NOTHING_ELSE).choose(ask(), known, 0.0)
    assert isinstance(verdict, WaitFor)
    assert verdict.board is busy
    assert stay.rest_ms(0.0) <= verdict.until_ms < 1500 * 3
    known.book("first", busy, 4_000)
    assert chosen(PrefixPolicy(settings=NOTHING_ELSE).choose(ask(), known, 0.0)) == "b", (
        "two before it"
    )
    known.unbook("first")
    assert busy.booked_ms == 0
    stay.ended(1.0, left=False)
    assert chosen(PrefixPolicy(settings=NOTHING_ELSE).choose(ask(), known, 1.0)) == "a"


def test_it_does_not_wait_longer_than_it_is_told() -> None:
    known = boards()
    busy = join(known, "a", **speed(3, 10), holdings=holds(None, TALK[:1400]))
    join(known, "b", **speed(3, 10))
    InFlightRequest(known, busy, ask((1, 2, 3), "other"), 0.0)
    assert (
        chosen(PrefixPolicy(settings=PolicySettings(max_wait_s=0.1)).choose(ask(), known, 0.0))
        == "b"
    )


def test_a_session_is_a_hint_where_nothing_else_is_known_and_no_more() -> None:
    known = boards()
    for number in range(8):
        join(known, str(number), **speed(3, 60))
    board = known.get("5")
    assert board is not None
    stay = InFlightRequest(known, board, ask((1, 2), session="s"), 0.0)
    stay.ended(1.0, left=True)
    strange = ask(tuple(range(300)), session="s")
    for _ in range(5):
        assert chosen(PrefixPolicy().choose(strange, known, 2.0)) == "5"
    join(known, "3", **speed(3, 60), holdings=holds(TALK[:900]))
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
        join(known, key, **speed(prefill_ms, 20 * prefill_ms), holdings=held_so)
        if busy:
            board = known.get(key)
            assert board is not None
            InFlightRequest(known, board, RoutingRequest(f"other {key}", "m", 10, 64), 0.0)
    verdict = PrefixPolicy(settings=NOTHING_ELSE).choose(ask(TALK[:prompt]), known, 0.0)
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


# -- estimates, in exact figures ------------------------------------------------------------------

FILED = 1376  # a whole number of blocks
PRICES = PolicySettings(restore_ms=0.5, park_ms=0.25)


def test_a_hit_in_a_file_pays_for_restoring_it() -> None:
    known = boards()
    join(known, "a", **speed(3, 10), holdings=holds(None, TALK[:FILED]))
    verdict = PrefixPolicy(settings=PRICES).choose(ask(), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert verdict.reuse == Reuse(FILED, live=False)
    assert verdict.spared_ms == pytest.approx(FILED * (3 - 0.5))
    assert verdict.ttft_ms == pytest.approx(1500 * 3 - FILED * (3 - 0.5))


def test_a_hit_in_the_context_costs_the_rest_of_the_prefill_only() -> None:
    known = boards()
    join(known, "a", **speed(3, 10), holdings=holds(TALK[:900]))
    verdict = PrefixPolicy(settings=PRICES).choose(ask(), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert verdict.spared_ms == pytest.approx(900 * 3)
    assert verdict.ttft_ms == pytest.approx(600 * 3)


def test_who_displaces_a_context_waits_until_it_is_parked() -> None:
    known = boards()
    join(known, "a", **speed(3, 10), holdings=holds(TALK[:900]))
    verdict = PrefixPolicy(settings=PRICES).choose(ask(tuple(range(300))), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert verdict.reuse == Reuse(0, live=False)
    assert verdict.spared_ms == 0
    assert verdict.ttft_ms == pytest.approx(10 + 900 * 0.25 + 300 * 3)


def test_a_short_context_is_displaced_at_once() -> None:
    known = boards()
    join(known, "a", **speed(3, 10), holdings=holds(TALK[:200]))
    verdict = PrefixPolicy(settings=PRICES).choose(ask(tuple(range(300))), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert verdict.ttft_ms == pytest.approx(300 * 3)


def test_a_request_that_waits_books_its_prefill_and_a_part_of_its_answer() -> None:
    known = boards()
    busy = join(known, "a", **speed(3, 10), holdings=holds(None, TALK[:FILED]))
    join(known, "b", **speed(3, 10))
    other = InFlightRequest(known, busy, ask((1, 2, 3), "other"), 0.0)
    policy = PrefixPolicy(settings=NOTHING_ELSE)
    verdict = policy.choose(ask(), known, 0.0)
    assert isinstance(verdict, WaitFor)
    assert verdict.work_ms == pytest.approx(124 * 3 + 64 * 10)
    assert verdict.until_ms == pytest.approx(FILED * 3)
    assert verdict.until_ms > other.rest_ms(0.0)
    short = RoutingRequest("s", "m", 1500, 8, ask().chain)
    told = policy.choose(short, known, 0.0)
    assert isinstance(told, WaitFor)
    assert told.work_ms == pytest.approx(124 * 3 + 8 * 10), "no more than the answer may have"


def test_the_time_that_a_request_has_waited_counts_against_its_limit() -> None:
    known = boards()
    busy = join(known, "a", **speed(3, 10), holdings=holds(None, TALK[:FILED]))
    join(known, "b", **speed(3, 10))
    InFlightRequest(known, busy, ask((1, 2, 3), "other"), 0.0)
    policy = PrefixPolicy(settings=PolicySettings(max_wait_s=3.0, restore_ms=0.0, park_ms=0.0))
    asked = ask()
    first = policy.choose(asked, known, 0.0)
    assert isinstance(first, WaitFor)
    assert first.until_ms == pytest.approx(3_000)
    second = policy.choose(asked, known, 1.0)
    assert isinstance(second, WaitFor)
    assert second.until_ms == pytest.approx(2_000)


def test_a_hit_on_a_slow_board_is_taken_where_every_board_has_one() -> None:
    known = boards()
    for key, prefill_ms in (("a", 3.0), ("b", 4.0)):
        join(known, key, **speed(prefill_ms, 10), holdings=holds(TALK[:FILED]))
    verdict = PrefixPolicy(settings=NOTHING_ELSE).choose(ask(), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert verdict.board.key == "a"
    assert verdict.ttft_ms == pytest.approx(372)


@pytest.mark.parametrize(
    ("spared_ms", "overtaken", "first"),
    [
        pytest.param([0], 0, 0, id="alone"),
        pytest.param([0, 100], 0, 0, id="a small gain is not worth it"),
        pytest.param([0, 101], 0, 1, id="a larger one is"),
        pytest.param([0, 150, 250], 0, 1, id="nor is a small one over the best so far"),
        pytest.param([0, 150, 251], 0, 2, id="a larger one over the best so far"),
        pytest.param([0, 500], 3, 1, id="overtaken thrice"),
        pytest.param([0, 500], 4, 0, id="overtaken often enough"),
    ],
)
def test_who_saves_much_goes_first_and_who_was_overtaken_often_is_not_again(
    spared_ms: list[float], overtaken: int, first: int
) -> None:
    board = join(boards(), "a")
    offers = [(ask(), SendTo(board, spared_ms=saved)) for saved in spared_ms]
    offers[0][0].overtaken = overtaken
    assert PrefixPolicy().first(offers) == first
    assert offers[0][0].overtaken == overtaken + (first > 0)
    assert [one.overtaken for one, _ in offers[1:]] == [n < first for n in range(1, len(offers))]


@pytest.mark.parametrize(
    ("said", "tried"),
    [
        pytest.param({"ready": False}, (), id="not ready"),
        pytest.param({"held": PauseEffect.QUEUES}, (), id="paused"),
        pytest.param({}, ("a",), id="tried before"),
    ],
)
def test_a_board_that_may_not_be_asked_is_not_chosen_for_its_context(
    said: dict[str, Any], tried: tuple[str, ...]
) -> None:
    known = boards()
    join(known, "a", holdings=holds(TALK[:1400]), **said)
    join(known, "b")
    assert chosen(PrefixPolicy().choose(ask(tried=tried), known, 0.0)) == "b"


def test_a_hit_that_is_slower_than_a_miss_elsewhere_is_not_taken_for_its_faster_decoding() -> None:
    known = boards()
    join(known, "hit", **speed(40, 1), holdings=holds(TALK[:FILED]))
    join(known, "miss", **speed(3, 60))
    assert chosen(PrefixPolicy().choose(ask(), known, 0.0)) == "miss"


# Qwen3-1.7B on an RK3588: its NPU, and llama.cpp on its four big cores.
NPU = {"group": "npu", "platform": "RK3588", **speed(1000 / 220, 1000 / 12.5)}
BIG_CORES = {"group": "cpu", "platform": "RK3588", **speed(1000 / 94, 1000 / 18.9)}


@pytest.mark.parametrize(
    ("prompt", "wins"),
    [
        pytest.param(50, "cpu", id="a short chat goes where decoding is fast"),
        pytest.param(1400, "npu", id="a long prompt goes where prefill is fast"),
    ],
)
def test_boards_of_two_kinds_get_the_requests_that_they_end_first(prompt: int, wins: str) -> None:
    known = boards()
    join(known, "npu", **NPU), join(known, "cpu", **BIG_CORES)
    assert chosen(PrefixPolicy().choose(ask(TALK[:prompt], max_tokens=128), known, 0.0)) == wins


def test_the_length_of_an_answer_decides_between_kinds() -> None:
    known = boards()
    join(known, "npu", **NPU), join(known, "cpu", **BIG_CORES)
    for most, wins in ((8, "npu"), (128, "cpu")):
        asked = ask(TALK[:300], max_tokens=most)
        assert chosen(PrefixPolicy().choose(asked, known, 0.0)) == wins


def test_a_request_waits_for_another_kind_only_while_its_answer_ends_sooner_there() -> None:
    known, rules = boards(), PrefixPolicy(settings=NOTHING_ELSE)
    npu = join(known, "npu", **NPU)
    join(known, "cpu", **BIG_CORES)
    InFlightRequest(known, npu, ask((1, 2, 3), "other"), 0.0)
    verdict = rules.choose(ask(TALK[:1400]), known, 0.0)
    assert isinstance(verdict, WaitFor)
    assert verdict.board is npu
    assert npu.wait_ms(0.0) <= verdict.until_ms
    assert chosen(rules.choose(ask(TALK[:50]), known, 0.0)) == "cpu"
    known.book("before it", npu, verdict.work_ms)
    assert chosen(rules.choose(ask(TALK[:1400], "next"), known, 0.0)) == "cpu", "the NPU is taken"


def test_nothing_waits_for_a_kind_that_nothing_is_known_of() -> None:
    known = boards()
    npu = join(known, "npu", group="npu")
    join(known, "cpu", group="cpu", **speed(10, 50))
    InFlightRequest(known, npu, ask((1, 2, 3), "other"), 0.0)
    assert chosen(PrefixPolicy().choose(ask(), known, 0.0)) == "cpu"


def test_a_kind_is_gone_with_its_last_board() -> None:
    known = boards()
    npu = join(known, "npu", **NPU)
    join(known, "cpu", **BIG_CORES)
    assert known.mixed
    known.silent(npu, 1.0)
    assert not known.mixed
    assert chosen(PrefixPolicy().choose(ask(TALK[:1400]), known, 2.0)) == "cpu"


def test_a_free_board_that_others_have_booked_is_passed_over() -> None:
    known = boards()
    first = join(known, "a")
    join(known, "b")
    known.book("other", first, 60_000)
    for number in range(5):
        assert chosen(PrefixPolicy().choose(ask(name=str(number)), known, 0.0)) == "b"


def test_the_context_that_is_idle_for_longest_is_displaced_first() -> None:
    known = boards()
    for key, used_s in (("a", 100.0), ("b", 0.0), ("c", 90.0)):
        join(known, key, holdings=holds(TALK)).used_s = used_s
    assert chosen(PrefixPolicy().choose(ask(tuple(range(300))), known, 100.0)) == "b"


# -- files of other boards ------------------------------------------------------------------------

EXCHANGE = {"compatibility": 7, "fetch_ms": 0.5}
OTHER = {"compatibility": 8, "fetch_ms": 0.5}


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [
        pytest.param(EXCHANGE, EXCHANGE, Reuse(1024, source=0), id="of the same kind"),
        pytest.param(OTHER, EXCHANGE, Reuse(), id="of another kind"),
        pytest.param(EXCHANGE, {}, Reuse(), id="one that loads no files of others"),
        pytest.param({}, EXCHANGE, Reuse(), id="one that sends none"),
        pytest.param(EXCHANGE, {"compatibility": 7, "fetch_ms": 4.0}, Reuse(), id="a slow network"),
        pytest.param(EXCHANGE, {"compatibility": 7, "fetch_ms": 1.5}, Reuse(), id="a small gain"),
    ],
)
def test_a_free_board_fetches_the_file_of_a_busy_one_where_that_is_faster(
    there: dict[str, Any], here: dict[str, Any], expected: Reuse
) -> None:
    known = boards()
    fast = speed(2.5, 50.0)
    join(known, "a", running=1, holdings=holds(None, TALK[:1030], **there), **fast)
    join(known, "b", holdings=holds(None, **here), **fast)
    verdict = PrefixPolicy().choose(ask(), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert (verdict.board.key, verdict.reuse) == ("b", expected)
    sent = InFlightRequest(known, verdict.board, ask(), 0.0)
    assert sent.expected == expected
    source = sent.source
    assert (None if source is None else source.key) == ("a" if expected else None)


def test_a_board_fetches_no_file_that_it_has_itself_or_that_saves_little_more() -> None:
    for own, found in ((1030, Reuse(1024)), (900, Reuse(896)), (300, Reuse(1024, source=0))):
        known = boards()
        fast = speed(2.5, 50.0)
        join(known, "a", running=1, holdings=holds(None, TALK[:1030], **EXCHANGE), **fast)
        join(known, "b", holdings=holds(None, TALK[:own], **EXCHANGE), **fast)
        verdict = PrefixPolicy().choose(ask(), known, 0.0)
        assert isinstance(verdict, SendTo)
        assert (verdict.board.key, verdict.reuse) == ("b", found), own


def test_a_request_waits_for_a_busy_board_only_if_no_free_one_can_have_its_file_sooner() -> None:
    def decide(**exchange: Any) -> object:
        known, fast = boards(), speed(2.5, 50.0)
        busy = join(known, "a", holdings=holds(None, TALK[:1030], **exchange), **fast)
        InFlightRequest(known, busy, RoutingRequest("other", "m", 8, 16), 0.0)
        join(known, "b", holdings=holds(None, **exchange), **fast)
        return PrefixPolicy().choose(ask(), known, 0.0)

    assert isinstance(decide(), WaitFor)
    assert isinstance(decide(**EXCHANGE), SendTo)


def test_a_drained_board_still_gives_its_files() -> None:
    known, fast = boards(), speed(2.5, 50.0)
    join(
        known,
        "a",
        held=PauseEffect.DRAINED,
        holdings=holds(None, TALK[:1030], **EXCHANGE),
        **fast,
    )
    join(known, "b", holdings=holds(None, **EXCHANGE), **fast)
    verdict = PrefixPolicy().choose(ask(), known, 0.0)
    assert isinstance(verdict, SendTo)
    assert (verdict.board.key, verdict.reuse) == ("b", Reuse(1024, source=0))


def test_each_kind_of_boards_has_its_own_longest_file_until_its_board_is_gone() -> None:
    known = boards()
    index, chain = known.index, ask().chain
    assert index is not None
    assert chain is not None
    assert index.sources(chain) == {}
    a = join(known, "a", holdings=holds(None, TALK[:1030], **EXCHANGE))
    b = join(known, "b", holdings=holds(None, TALK[:600], **OTHER))
    c = join(known, "c", holdings=holds(None, TALK[:520], **EXCHANGE))
    short, of_other = Reuse(512, source=c.slot), {8: Reuse(576, source=b.slot)}
    assert index.sources(chain) == {7: Reuse(1024, source=a.slot), **of_other}
    index.forget(a.slot)
    assert index.sources(chain) == {7: short, **of_other}
    join(known, "b", holdings=holds(None, TALK[:600]))  # it exchanges none any more
    assert index.sources(chain) == {7: short}
    index.forget(c.slot)
    assert index.sources(chain) == {}
