"""The load of boards, from reports and from a Router's own requests."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.core.messages import (
    Delta,
    Kv,
    Paused,
)
from rkserve.fleet.load import PauseEffect
from tests.support.routing import (
    TALK,
    boards,
    holds,
    join,
    sent,
)

# -- load -----------------------------------------------------------------------------------------


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
    stay.observe(Paused(None, 1, Kv.RECOMPUTED))
    assert (board.load, board.unused, known.any_open) == (0, False, True)
    board.asked(1.0)
    join(known, "a")
    stay.observe(Delta("", (), paused=True))
    assert board.load == 0, "an edit does not end the pause"
    stay.observe(Delta("w", (1,)))
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
    stay.observe(Paused(None, 1, Kv.KEPT))
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


class Work:
    """A request with a known rest."""

    def __init__(self, rest_ms: float) -> None:
        self._rest_ms = rest_ms

    def rest_ms(self, now_s: float) -> float:
        del now_s
        return self._rest_ms


@pytest.mark.parametrize(
    ("more", "wait_ms"),
    [
        pytest.param({"n_batch": 1}, 300.0, id="one after the other"),
        pytest.param({"n_batch": 2}, 200.0, id="both end together"),
        pytest.param({"n_batch": 2, "joins": True}, 100.0, id="each ends by itself"),
    ],
)
def test_a_full_board_has_a_place_when_its_requests_end(
    more: dict[str, Any], wait_ms: float
) -> None:
    known = boards()
    board = join(known, "a", **more)
    for rest_ms in (100.0, 200.0):
        board.began(Work(rest_ms), 0.0)
    assert board.wait_ms(0.0) == wait_ms
