"""Strict readers of a call's JSON parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias, TypeVar

from rkserve.core.desired_state import Scope, SleepLevel
from rkserve.core.errors import RequestError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Params: TypeAlias = Mapping[str, Json]
E = TypeVar("E", bound=Enum)


def text(params: Params, name: str, default: str | None = None) -> str:
    """Return a non-empty string. Raises ``RequestError`` for anything else, and if it is absent."""
    value = params.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not value:
        raise RequestError(f"'{name}' must be a non-empty string.", name)
    return value


def optional_text(params: Params, name: str) -> str | None:
    """Return a non-empty string, or None if absent or null. Raises ``RequestError``."""
    return None if params.get(name) is None else text(params, name)


def texts(params: Params, name: str) -> tuple[str, ...]:
    """Return a list of non-empty strings, empty if absent or null. Raises ``RequestError``."""
    value = params.get(name)
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestError(f"'{name}' must be a list of strings.", name)
    found = tuple(one for one in value if isinstance(one, str) and one)
    if len(found) != len(value):
        raise RequestError(f"'{name}' must be a list of non-empty strings.", name)
    return found


def number(
    params: Params,
    name: str,
    default: float | None = None,
    *,
    low: float = -math.inf,
    high: float = math.inf,
) -> float:
    """Return a finite number from ``low`` to ``high``. Raises ``RequestError`` for anything
    else.
    """
    value = params.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"'{name}' must be a number.", name)
    if not low <= value <= high:
        raise RequestError(f"'{name}' must be {_range(low, high)}.", name)
    return value


def whole(params: Params, name: str, default: int | None = None, *, low: float = -math.inf) -> int:
    """Return a whole number, at least ``low``. Raises ``RequestError`` for anything else."""
    value = params.get(name)
    if value is not None and not isinstance(value, int):
        raise RequestError(f"'{name}' must be a whole number.", name)
    return int(number(params, name, default, low=low))


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"


def choice(params: Params, name: str, kind: type[E], default: E) -> E:
    """Return one of an enum's values. Raises ``RequestError`` that lists them for anything else."""
    value = params.get(name)
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(one.value) for one in kind)
        raise RequestError(f"'{name}' must be one of {known}.", name) from None


def level(params: Params, name: str, default: SleepLevel) -> SleepLevel:
    """Return a sleep level, 0 to 2. Raises ``RequestError`` for anything else."""
    value = params.get(name)
    if value is None:
        return default
    # Python treats True as a number, and an enum accepts 1.0.
    if type(value) is not int or value not in tuple(SleepLevel):
        raise RequestError(f"'{name}' must be 0, 1 or 2.", name)
    return SleepLevel(value)


def flag(params: Params, name: str, *, default: bool) -> bool:
    """Return true or false. Raises ``RequestError`` for anything else."""
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"'{name}' must be true or false.", name)
    return value


def scope(params: Params) -> Scope:
    """Return the scope of ``models``, ``boards`` and ``adapter``; absent means all."""
    return Scope(
        tuple(sorted(set(texts(params, "models")))),
        tuple(sorted(set(texts(params, "boards")))),
        optional_text(params, "adapter"),
    )
