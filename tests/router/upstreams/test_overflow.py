"""The choice between boards and upstreams."""

from __future__ import annotations

import random

from rkserve.core.board_report import UPSTREAM
from rkserve.fleet.load import ModelBoards, PauseEffect
from rkserve.router.policies import LeastLoadPolicy, RoutingRequest, SendTo, WaitFor
from rkserve.router.upstreams.overflow import OverflowPolicy
from tests.support.boards.fake_boards import report

NOW_S = 100.0


class Work:
    """A request whose rest is known."""

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def rest_ms(self, now_s: float) -> float:
        return self._ms


def boards(*rests_ms: float | None) -> ModelBoards:
    """Boards by the rest of their request, None of one that is free, and an upstream ``gpu``."""
    found = ModelBoards(random.Random(3))
    for number, rest_ms in enumerate(rests_ms):
        one = report(f"b{number}")
        board = found.update("g", one, ready=True, held=PauseEffect.NOT)
        if rest_ms is not None:
            board.began(Work(rest_ms), NOW_S)
    upstream = report("gpu", platform=UPSTREAM, replica="upstream-gpu", n_batch=2)
    found.update("up", upstream, ready=True, held=PauseEffect.OVERFLOW)
    return found


def policy(wait_s: float = 0.0) -> OverflowPolicy:
    return OverflowPolicy(LeastLoadPolicy(random.Random(3)), {"upstream-gpu": wait_s})


def asked(name: str = "r", tried: tuple[str, ...] = ()) -> RoutingRequest:
    return RoutingRequest(name, "sim-chat", 10, 20, tried=tried)


def sent_to(found: object) -> str:
    assert isinstance(found, SendTo)
    return found.board.board_id


def test_a_free_board_goes_before_the_upstream() -> None:
    assert sent_to(policy().choose(asked(), boards(500.0, None), NOW_S)) == "b1"


def test_the_upstream_takes_what_boards_have_no_place_for() -> None:
    assert sent_to(policy().choose(asked(), boards(500.0, 900.0), NOW_S)) == "gpu"


def test_a_request_waits_for_a_board_that_is_free_soon_enough() -> None:
    found = policy(wait_s=1.0).choose(asked(), boards(5000.0, 900.0), NOW_S)
    assert isinstance(found, WaitFor)
    assert found.board.board_id == "b1"
    assert sent_to(policy(wait_s=1.0).choose(asked(), boards(5000.0, 1100.0), NOW_S)) == "gpu"


def test_the_wait_so_far_counts() -> None:
    request, all_boards = asked(), boards(900.0)
    waits = policy(wait_s=1.0)
    assert isinstance(waits.choose(request, all_boards, NOW_S), WaitFor)
    assert sent_to(waits.choose(request, all_boards, NOW_S + 0.2)) == "gpu"


def test_requests_that_wait_already_count() -> None:
    all_boards, waits = boards(300.0), policy(wait_s=1.0)
    first = waits.choose(asked("first"), all_boards, NOW_S)
    assert isinstance(first, WaitFor)
    all_boards.book("first", first.board, 900.0)
    assert sent_to(waits.choose(asked("second"), all_boards, NOW_S)) == "gpu"
    assert isinstance(waits.choose(asked("first"), all_boards, NOW_S), WaitFor)


def test_an_upstream_that_is_full_takes_nothing() -> None:
    all_boards = boards(500.0)
    upstream = all_boards.get("upstream-gpu")
    assert upstream is not None
    for _ in range(2):
        assert sent_to(policy().choose(asked(), all_boards, NOW_S)) == "gpu"
        upstream.began(Work(100.0), NOW_S)
    assert policy().choose(asked(), all_boards, NOW_S) is None


def test_an_upstream_that_was_tried_is_passed_over() -> None:
    assert policy().choose(asked(tried=("upstream-gpu",)), boards(500.0), NOW_S) is None


def test_without_a_ready_board_the_upstream_is_a_board() -> None:
    all_boards = boards()
    assert sent_to(policy(wait_s=9.0).choose(asked(), all_boards, NOW_S)) == "gpu"
    assert all_boards.any_open


def test_places_of_upstreams_count_and_a_full_board_leaves_them_open() -> None:
    all_boards = boards(500.0)
    assert all_boards.places == 3
    assert all_boards.any_open
    assert all_boards.free() == []
