"""Values of the dataclasses that are sent, as hypothesis makes them up."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from hypothesis import strategies as st


def value_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, but what is no number: that equals nothing, not even itself."""
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is str:
        return st.text(st.characters())
    if hint is tuple[tuple[int, str], ...]:
        return st.lists(st.tuples(st.integers(0), st.text())).map(tuple)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return record_of(hint)
    holder = value_with(typing.get_origin(hint), typing.get_args(hint))
    return st.from_type(hint) if holder is None else holder


def value_with(outer: Any, inner: tuple[Any, ...]) -> st.SearchStrategy[Any] | None:
    """Any value that holds others; what hypothesis would make of it may hold a NaN."""
    if outer in (typing.Union, types.UnionType):
        return st.one_of(*map(value_of, inner))
    if outer is tuple and inner[-1] is Ellipsis:
        return st.lists(value_of(inner[0])).map(tuple)
    if outer is tuple:
        return st.tuples(*map(value_of, inner))
    return None


_RECORDS: dict[type[Any], st.SearchStrategy[Any]] = {}


def record_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a dataclass. Kept: a strategy takes longer to make than to draw from."""
    if kind not in _RECORDS:
        fields = typing.get_type_hints(kind)
        values = {name: value_of(hint) for name, hint in fields.items()}
        _RECORDS[kind] = st.builds(kind, **values)
    return _RECORDS[kind]
