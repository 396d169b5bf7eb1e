"""The measurement of prompt cache files on disks of several speeds."""

from __future__ import annotations

import random
from itertools import pairwise

from benchmarks.serving.disks import (
    CONVERSATIONS,
    FIRST,
    MORE,
    ONE_SHOTS,
    TURNS,
    DiskFigures,
    conversations,
    one_shots,
    table,
)


def test_conversations_displace_each_other_and_grow() -> None:
    turns = list(conversations(random.Random(1)))
    assert len(turns) == CONVERSATIONS * TURNS
    assert any(one != other for (one, _), (other, _) in pairwise(turns))
    sizes = {number: [len(ids) for of, ids in turns if of == number] for number, _ in turns}
    assert all(found == [FIRST, *[MORE] * (TURNS - 1)] for found in sizes.values())


def test_prompts_of_one_turn_share_nothing() -> None:
    prompts = [tuple(ids) for _, ids in one_shots(random.Random(1))]
    assert len(set(prompts)) == ONE_SHOTS
    assert len({prompt[:8] for prompt in prompts}) == ONE_SHOTS


def test_the_table_has_the_ratio_to_a_board_without_files() -> None:
    without, parked = DiskFigures([100.0, 300.0]), DiskFigures([50.0, 150.0], 3, 2)
    assert table([("p", "t", 20.0, without, parked)]).splitlines()[2:] == [
        "| p | t | 20 | 200 | 100 | 0.50 | 3 | 2 |"
    ]
