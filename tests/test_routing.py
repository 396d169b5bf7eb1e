"""The choice of a board from what one router knows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.routing.least_load import Candidate, choose
from rkserve.routing.rates import Counted, Rate, Rates


def board(key: str, in_flight: int = 0, foreign: int = 0, **rest: object) -> Candidate:
    """A ready board with room for three, unless said otherwise."""
    known = {"capacity": 3, "ready": True, **rest}
    return Candidate(key, in_flight=in_flight, foreign=foreign, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("boards", "chosen"),
    [
        pytest.param([], None, id="no boards"),
        pytest.param([board("a", 1), board("b")], "b", id="the idle one"),
        pytest.param([board("a", 1), board("b", 0, 2)], "a", id="other routers' requests count"),
        pytest.param([board("a", ready=False), board("b", 2)], "b", id="one that is not ready"),
        pytest.param([board("a", 3), board("b", 2)], "b", id="one that is full"),
        pytest.param([board("a", 1, 2), board("b", 3)], None, id="all are full"),
        pytest.param([board("a", ready=False)], None, id="none is ready"),
        pytest.param([board("a", capacity=0)], None, id="none has reported a capacity"),
    ],
)
def test_the_least_loaded_board_with_room_takes_the_request(
    boards: list[Candidate], chosen: str | None
) -> None:
    found = choose(boards, (), random.Random(1))
    assert (found and found.key) == chosen


def test_ties_fall_on_every_board() -> None:
    rng = random.Random(7)
    boards = [board("a"), board("b"), board("c", 1)]
    keys = {found.key for _ in range(50) if (found := choose(boards, (), rng))}
    assert keys == {"a", "b"}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=6))
def test_whoever_is_chosen_is_ready_and_nobody_with_room_has_less(
    figures: list[tuple[int, int, bool]],
) -> None:
    boards = [board(str(at), own, other, ready=up) for at, (own, other, up) in enumerate(figures)]
    usable = [b for b in boards if b.ready and b.load < b.capacity]
    found = choose(boards, (), random.Random(0))
    assert (found is None) == (not usable)
    if found is not None:
        assert found in usable
        assert found.load == min(b.load for b in usable)


def test_a_report_adds_what_other_routers_sent() -> None:
    candidate = board("a")
    candidate.began(())
    candidate.asked()
    candidate.heard(reported=3)
    assert (candidate.foreign, candidate.load) == (2, 3)
    candidate.ended(left=False)
    assert candidate.load == 2


@pytest.mark.parametrize("when", ["before the report", "while the report travels"])
def test_an_own_request_that_ends_meanwhile_is_not_taken_for_a_foreign_one(when: str) -> None:
    candidate = board("a")
    if when == "before the report":
        candidate.began(())
    candidate.asked()
    if when == "while the report travels":
        candidate.began(())
    candidate.ended(left=False)  # the board counted it, and it is over when the report arrives
    candidate.heard(reported=1)
    assert candidate.load == 0


def test_the_next_report_forgets_the_last_ones_window() -> None:
    candidate = board("a")
    candidate.began(())
    candidate.asked()
    candidate.ended(left=False)
    candidate.heard(reported=1)
    candidate.asked()
    candidate.heard(reported=1)
    assert candidate.foreign == 1


def test_a_board_that_still_ends_what_a_client_left_is_not_taken_for_busy() -> None:
    candidate = board("a")
    candidate.began(())
    candidate.ended(left=True)
    candidate.asked()
    candidate.heard(reported=1)
    assert candidate.load == 0
    candidate.asked()
    candidate.heard(reported=1)  # a second later: it does not come to an end, or it is another's
    assert candidate.load == 1


CONVERSATIONS = [
    pytest.param({"a": (1, 2), "b": (1,)}, (1, 2, 3), "a", id="the longest beginning"),
    pytest.param({"a": (1, 2, 3, 4), "b": (1,)}, (1, 2, 3), "b", id="a longer prompt is no use"),
    pytest.param({"a": (1, 2), "b": ()}, (1, 2), "ab", id="the same prompt again finds nothing"),
    pytest.param({"a": (9, 9), "b": ()}, (1, 2), "ab", id="a strange conversation counts nothing"),
]


@pytest.mark.parametrize(("held", "prompt", "chosen"), CONVERSATIONS)
def test_among_equals_a_conversation_finds_its_board_again(
    held: dict[str, tuple[int, ...]], prompt: tuple[int, ...], chosen: str
) -> None:
    boards = [board(key, last_prompt=ids) for key, ids in held.items()]
    rng = random.Random(3)
    assert {f.key for _ in range(40) if (f := choose(boards, prompt, rng))} == set(chosen)


def test_a_held_context_is_never_worth_a_wait() -> None:
    found = choose([board("a", 1, last_prompt=(1,)), board("b")], (1, 2), random.Random(0))
    assert found is not None
    assert found.key == "b"


def test_one_that_rests_takes_no_room_and_counts_again_when_it_goes_on() -> None:
    one = board("a", capacity=2)
    one.began((1,))
    one.began((2,))
    assert choose([one], (3,), random.Random(1)) is None
    one.rested(held=False)
    assert (one.load, one.unused) == (1, False)
    assert choose([one], (3,), random.Random(1)) is one
    one.asked()
    one.heard(1)
    assert one.load == 1, "the board does not count it either"
    one.went_on()
    one.heard(2)
    assert (one.load, one.foreign) == (2, 0)
    one.ended(left=False)
    one.ended(left=False)
    assert (one.load, one.unused) == (0, True)


def test_one_that_keeps_its_board_counts_until_the_board_says_otherwise() -> None:
    one = board("a")
    one.began((1,))
    one.asked()
    one.rested(held=True)
    assert one.load == 1, "who comes now would wait for it"
    one.asked()
    one.heard(1)
    assert one.load == 1
    one.asked()
    one.heard(0)
    assert one.load == 0, "it was drained for others"


def test_an_abandoned_prompt_is_not_continued() -> None:
    candidate = board("a")
    candidate.began((1, 2))
    candidate.ended(left=True)
    assert candidate.continues((1, 2, 3)) == 0


def test_what_one_adapter_computed_is_of_no_use_to_another() -> None:
    candidate = board("a")
    candidate.began((1, 2), "kind@v1")
    assert candidate.continues((1, 2, 3), "kind@v1") == 2
    assert candidate.continues((1, 2, 3), "kind@v2") == 0
    assert candidate.continues((1, 2, 3)) == 0


def test_a_conversation_with_an_adapter_finds_the_board_that_talked_with_it() -> None:
    boards = [
        board("a", last_prompt=(1, 2)),
        board("b", last_prompt=(1,), last_adapter="kind@v1"),
    ]
    rng = random.Random(3)
    found = {f.key for _ in range(40) if (f := choose(boards, (1, 2, 3), rng, "kind@v1"))}
    assert found == {"b"}


# -- rates ----------------------------------------------------------------------------------------


def counted(*figures: tuple[float, str, int]) -> Rate:
    """The rate after reports of (time, replica, decoded tokens)."""
    rates = Rates(window_s=10.0)
    for now_s, replica, tokens in figures:
        rates.heard(Counted(now_s, replica, 2 * tokens, tokens))
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
