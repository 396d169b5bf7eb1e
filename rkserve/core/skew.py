"""Versions of rkserve that may serve together, and values that cross from one to another.

Boards and the head of a cluster are updated one after the other. Versions of the same minor number
or of the next one serve together: the later one reads values without its new fields, and the
earlier one leaves out fields that it does not know.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def numbers(version: str) -> tuple[int, int, int]:
    """Return the three numbers of a version, without what follows them.

    Raises:
        ValueError: it does not begin with three numbers.
    """
    found = VERSION.match(version)
    if found is None:
        raise ValueError(f"'{version}' is no version such as 0.2.0")
    return int(found[1]), int(found[2]), int(found[3])


def skew_problem(board: str, head: str) -> str:
    """Return why a board and a head of these versions do not serve together; empty if they do.

    An empty version is that of a release that sent none: before such checks there was only 0.1.
    """
    try:
        one, other = numbers(board or "0.1.0"), numbers(head or "0.1.0")
    except ValueError as exc:
        return f"{exc}."
    if one[0] == other[0] and abs(one[1] - other[1]) <= 1:
        return ""
    return (
        f"rkserve is {board or '0.1'} on the board and {head or '0.1'} on the head; they serve "
        "together if they are at most one minor version apart. On the head: rkserve update FOLDER "
        "with the version in between."
    )


def crosses_versions(kind: type[T]) -> type[T]:
    """Have values of a frozen dataclass pickled by the names of their fields.

    Python's own form for dataclasses with slots is the list of values: a field that one end lacks
    would shift all later ones, or be an attribute without a value. A later version's field is left
    out here, and an absent one has its default; new fields therefore need one.
    """
    for method in (_getstate, _setstate):
        setattr(kind, f"_{method.__name__}__", method)
    return kind


def _getstate(self: Any) -> dict[str, Any]:
    return {name: getattr(self, name) for name in _fields(type(self))}


def _setstate(self: Any, state: dict[str, Any]) -> None:
    for name, make in _fields(type(self)).items():
        if name in state:
            value = state[name]
        elif make is not None:
            value = make()
        else:
            raise TypeError(f"a {type(self).__name__} of another version has no '{name}'")
        object.__setattr__(self, name, value)


_FIELDS: dict[type[Any], dict[str, Callable[[], Any] | None]] = {}


def _fields(kind: type[Any]) -> dict[str, Callable[[], Any] | None]:
    """Return a function that makes the default of each field, None for one without default."""
    found = _FIELDS.get(kind)
    if found is None:
        found = _FIELDS[kind] = {one.name: _maker(one) for one in dataclasses.fields(kind)}
    return found


def _maker(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    """Return a function that makes a field's default, None where it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    if field.default is not dataclasses.MISSING:
        value = field.default
        return lambda: value
    return None
