"""The parts that a board's modules share stay small, and the board has them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rkserve.board.board import Board
from rkserve.board.run.ports import EngineSlot, RunQueue

MOST_MEMBERS = 8


def members(port: type[Any]) -> set[str]:
    declared = {*vars(port), *inspect.get_annotations(port)}
    return {name for name in declared if not name.startswith("_")}


@pytest.mark.parametrize("port", [EngineSlot, RunQueue])
def test_a_port_is_small_enough_for_a_fake(port: type[Any]) -> None:
    assert 0 < len(members(port)) <= MOST_MEMBERS


@pytest.mark.parametrize("port", [EngineSlot, RunQueue])
def test_the_board_has_the_methods_of_each_port_with_their_parameters(port: type[Any]) -> None:
    for name in members(port):
        declared = inspect.getattr_static(port, name, None)
        if inspect.isfunction(declared):
            found = inspect.signature(getattr(Board, name))
            assert found.parameters.keys() == inspect.signature(declared).parameters.keys(), name
