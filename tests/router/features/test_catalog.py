"""The choice of boards that fetch a model; the calls are tested in test_catalog_routes."""

from __future__ import annotations

import pytest

from rkserve.fleet.board_table import BoardAddress
from rkserve.router.features.catalog import fits, one_per_node
from tests.support.boards.fake_boards import report


def address(board: str, *, silent: bool = False) -> BoardAddress:
    return BoardAddress("g", f"replica of {board}", board, "m", silent=silent)


def test_one_board_of_each_node_fetches_and_none_that_is_silent_beside_another() -> None:
    boards = [
        (address("a-1", silent=True), report("a-1", node="a")),
        (address("a-2"), report("a-2", node="a")),
        (address("a-3"), report("a-3", node="a")),
        (address("b-1", silent=True), report("b-1", node="b")),
    ]
    chosen = one_per_node(boards)
    assert {node: one.board_id for node, (one, _) in chosen.items()} == {"a": "a-2", "b": "b-1"}


@pytest.mark.parametrize(
    ("platform", "soc", "fit"),
    [
        ("RK3588", "rk3588s", True),
        ("RK3588", "RK3576", False),
        ("any", "RK3576", True),
        ("", "RK3576", True),
        ("RK3588", "", True),
    ],
)
def test_a_model_fits_its_soc_a_revision_and_an_unknown_one(
    platform: str, soc: str, fit: bool
) -> None:
    assert fits(platform, soc) is fit
