"""Desired state and operations as JSON text for storage: written with a schema number, read
strictly.

Reading refuses anything that writing would not produce: another schema, an unknown or missing
field, a value of another type, a duplicate key, a number that is not finite. The fields come from
the types of the values. Sequences in free JSON (``params``, ``details``) are read back as lists.
"""

from __future__ import annotations

import collections.abc
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rkserve.control.operations import ControlOperation
from rkserve.core.desired_state import Desired, DesiredCache
from rkserve.core.errors import LedgerFailed

# Raised with every change of a stored field, together with a conversion of the previous schema.
SCHEMA = 2

T = TypeVar("T")


class _Free:
    """Marks a field that holds any JSON value."""


def write_desired(desired: Desired) -> str:
    """Return a desired state as text. Raises ``LedgerFailed`` for values that JSON cannot hold."""
    return _write("desired", desired)


def read_desired(text: str) -> Desired:
    """Return the desired state of a text. Raises ``LedgerFailed`` with the reason."""
    return _parse("desired", Desired, text)


def write_operation(operation: ControlOperation) -> str:
    """Return an operation as text. Raises ``LedgerFailed`` for values that JSON cannot hold."""
    return _write("operation", operation)


def read_operation(text: str) -> ControlOperation:
    """Return the operation of a text. Raises ``LedgerFailed`` with the reason."""
    return _parse("operation", ControlOperation, text)


def write_cache(cache: DesiredCache) -> str:
    """Return a named prompt cache as text."""
    return _write("cache", cache)


def read_cache(text: str) -> DesiredCache:
    """Return the prompt cache of a text. Raises ``LedgerFailed`` with the reason."""
    return _parse("cache", DesiredCache, text)


def plain(value: object) -> Any:
    """Return a value as JSON data, for answers that show it in its stored form."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value


def _write(what: str, value: object) -> str:
    content = {"schema": SCHEMA, what: plain(value)}
    try:
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerFailed(f"A value of '{what}' cannot be kept: {error}.") from error


def _parse(what: str, kind: type[T], text: str) -> T:
    try:
        content = json.loads(text, object_pairs_hook=_once, parse_constant=_never)
    except (ValueError, RecursionError) as error:
        raise LedgerFailed(f"What is kept as '{what}' is no JSON: {error}.") from error
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise LedgerFailed(f"What is kept as '{what}' does not say its schema.")
    schema = content["schema"]
    if schema not in (SCHEMA, *_OLDER):
        raise LedgerFailed(
            f"What is kept as '{what}' has schema {schema}; this rkserve reads {SCHEMA}."
        )
    if set(content) != {"schema", what}:
        raise LedgerFailed(f"What is kept as '{what}' has the keys {sorted(content)}.")
    for older in range(schema, SCHEMA):
        content[what] = _OLDER[older](what, content[what])
    found: T = _read(kind, content[what], what)
    return found


def _of_schema_1(what: str, value: Any) -> Any:
    """Convert schema 1, which had no sleep and no base weights other than the model folder's."""
    if what != "desired" or not isinstance(value, dict):
        return value
    return {
        **value,
        "pauses": _with(value.get("pauses"), level=None, wakes=False),
        "weights": _with(value.get("weights"), base=None, rebase=None, in_flight="pin"),
    }


def _with(entries: Any, **added: Any) -> Any:
    """Return objects with added fields; a value that is no object is refused later."""
    if not isinstance(entries, list):
        return entries
    return [{**one, **added} if isinstance(one, dict) else one for one in entries]


# Conversions of each older schema to the next one.
_OLDER = {1: _of_schema_1}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _never(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


@cache
def _hints(kind: type) -> dict[str, Any]:
    # `Json` is recursive; the reader of types treats it as any JSON value.
    free = {"Json": _Free, "Params": Mapping[str, _Free]}
    return get_type_hints(kind, localns=free)


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind is _Free:
        return _finite(value, where)
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin = get_origin(kind)
    if origin is not None:
        return _READERS[origin](get_args(kind), value, where)
    if issubclass(kind, Enum):
        return _read_choice(kind, value, where)
    if kind is float and type(value) is int and abs(value) < 1 << 1000:
        return float(value)
    if type(value) is not kind:
        raise _wrong(where, f"{value!r} is no {kind.__name__}")
    return _finite(value, where)


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(value, dict):
        raise _wrong(where, "it is no object")
    if set(value) != set(hints):
        raise _wrong(where, f"it has the fields {sorted(value)}, not {sorted(hints)}")
    return kind(
        **{name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items()}
    )


def _read_optional(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    (kind,) = (one for one in kinds if one is not type(None))
    return None if value is None else _read(kind, value, where)


def _read_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(where, "it is no list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise _wrong(where, f"it has {len(value)} entries, not {len(kinds)}")
    pairs = enumerate(zip(kinds, value, strict=True))
    return tuple(_read(kind, one, f"{where}[{n}]") for n, (kind, one) in pairs)


def _read_mapping(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, "it is no object")
    return {key: _read(kinds[1], one, f"{where}[{key!r}]") for key, one in value.items()}


def _read_choice(kind: type[Enum], value: Any, where: str) -> Enum:
    # By type as well: true and 1.0 are equal to an enum value of 1.
    for one in kind:
        if type(one.value) is type(value) and one.value == value:
            return one
    raise _wrong(where, f"{value!r} is none of {[one.value for one in kind]}")


_READERS = {
    tuple: _read_tuple,
    collections.abc.Mapping: _read_mapping,
    types.UnionType: _read_optional,
    Union: _read_optional,
}


def _finite(value: Any, where: str) -> Any:
    # Python reads 1e999 as infinity, which JSON cannot represent.
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(where, "the number is not finite")
    if isinstance(value, list):
        return [_finite(one, f"{where}[{n}]") for n, one in enumerate(value)]
    if isinstance(value, dict):
        return {key: _finite(one, f"{where}[{key!r}]") for key, one in value.items()}
    return value


def _wrong(where: str, why: str) -> LedgerFailed:
    return LedgerFailed(f"What is kept cannot be read at {where}: {why}.")
