"""The figures of scripts/bars.py, as far as they read pages: recipes and the walk."""

from __future__ import annotations

import pytest

from scripts import bars
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow


def test_every_recipe_names_files_that_are_there() -> None:
    found = bars.recipes()
    assert {"A routing policy", "A metric", "A control call with its command"} <= found.keys()
    for name, paths in found.items():
        assert paths, name
        assert [path for path in paths if not (PROJECT / path).exists()] == []


def test_the_walk_names_files_that_are_there() -> None:
    walk = bars.spine()
    assert len(walk) > 10
    assert [path for path in walk if not (PROJECT / path).is_file()] == []


@pytest.mark.long
def test_all_figures_are_measured() -> None:
    found = bars.measure()
    assert len({bar.name for bar in found}) == len(found)
    assert all(bar.now >= 0 for bar in found)
