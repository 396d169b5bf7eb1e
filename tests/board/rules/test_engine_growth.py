"""Replacing engines that grow: after a rest, above a limit of the board's own."""

from __future__ import annotations

import pytest

from rkserve.board.rules.engine_growth import MB, REST_S, SPREAD, EngineGrowth
from rkserve.core.board_report import EngineUse

LIMIT = 100 * MB
MOST = round(LIMIT * (1 + SPREAD))


def first_excess(board: str, step: int = MB) -> int:
    """Return the growth from which on a board's engine is replaced."""
    growth = EngineGrowth(board, LIMIT)
    growth.excess(7, EngineUse(0), 0.0)
    for grown in range(0, 2 * LIMIT, step):
        if growth.excess(7, EngineUse(grown), REST_S):
            return grown
    raise AssertionError("it is never replaced")


def test_an_engine_is_replaced_above_the_limit_and_boards_one_after_the_other() -> None:
    limits = [first_excess(f"board-{n}") for n in range(20)]
    assert min(limits) > LIMIT
    assert max(limits) <= MOST + MB
    assert len(set(limits)) > 10


def test_growth_counts_from_the_first_look_at_each_engine() -> None:
    growth = EngineGrowth("b", LIMIT)
    assert not growth.excess(1, EngineUse(5 * LIMIT), 0.0), "a large model"
    assert not growth.excess(1, EngineUse(6 * LIMIT), REST_S)
    assert "grew by 200 MB to 700 MB" in growth.excess(1, EngineUse(7 * LIMIT), REST_S)
    assert not growth.excess(2, EngineUse(7 * LIMIT), REST_S + 1), "the fresh one"
    assert not growth.excess(2, EngineUse(7 * LIMIT), 3 * REST_S)


def test_a_fresh_engine_has_its_time_however_fast_it_grows() -> None:
    growth = EngineGrowth("b", LIMIT)
    growth.excess(1, EngineUse(0), 0.0)
    assert not growth.excess(1, EngineUse(10 * LIMIT), REST_S - 1)
    assert growth.excess(1, EngineUse(10 * LIMIT), REST_S)


@pytest.mark.parametrize(
    ("files", "most", "replaced"),
    [(512, 1024, False), (513, 1024, True), (10_000, None, False), (None, 1024, False)],
)
def test_half_of_the_files_is_too_many(files: int | None, most: int | None, replaced: bool) -> None:
    growth = EngineGrowth("b", LIMIT)
    growth.excess(1, EngineUse(0), 0.0)
    found = growth.excess(1, EngineUse(0, files, most), REST_S)
    assert bool(found) is replaced
    assert not replaced or found == "the engine has 513 open files of at most 1024"
