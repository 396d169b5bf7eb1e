"""JSON Merge Patches between two objects."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.merge_patch import merge_patch, patched

NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=2)
LEAVES = st.one_of(
    st.integers(0, 3), st.text("ab", max_size=2), st.lists(st.one_of(st.none(), st.integers(0, 3)))
)
OBJECTS = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(NAMES, st.one_of(LEAVES, inner), max_size=4),
    max_leaves=12,
)


@given(OBJECTS, OBJECTS)
def test_a_patch_makes_the_later_document_of_the_earlier_one(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    patch = merge_patch(before, after)
    assert patched(before, json.loads(json.dumps(patch))) == after
    assert (patch == {}) == (before == after)


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_the_standard(
    before: dict[str, Any], patch: dict[str, Any], after: dict[str, Any]
) -> None:
    assert patched(before, patch) == after
