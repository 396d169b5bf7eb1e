"""Desired state and operations as JSON text for storage: written with a schema number, read
strictly.

Reading refuses anything that writing would not produce: another schema, an unknown or missing
field, a value of another type, a duplicate key, a number that is not finite. The fields come from
the types of the values. Sequences in free JSON (``details``) are read back as lists.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rkserve.control.calls import OperationKind
from rkserve.control.operations import ControlOperation
from rkserve.core.api_keys import ApiKey
from rkserve.core.desired_state import Desired, DesiredCache
from rkserve.core.errors import LedgerFailed

# Raised with every change of a stored field, together with a conversion of the previous schema.
SCHEMA = 5

T = TypeVar("T")


def write_desired(desired: Desired) -> str:
    """Return a desired state as text. Raises ``LedgerFailed`` for values that JSON cannot hold."""
    return _write("desired", desired)


def read_desired(text: str) -> Desired:
    """Return the desired state of a text. Raises ``LedgerFailed`` with the reason."""
    return _read("desired", Desired, text)


def write_operation(operation: ControlOperation) -> str:
    """Return an operation as text. Raises ``LedgerFailed`` for values that JSON cannot hold."""
    return _write("operation", operation)


def read_operation(text: str) -> ControlOperation:
    """Return the operation of a text. Raises ``LedgerFailed`` with the reason."""
    return _read("operation", ControlOperation, text)


def write_cache(cache: DesiredCache) -> str:
    """Return a named prompt cache as text."""
    return _write("cache", cache)


def write_api_key(key: ApiKey) -> str:
    """Return an API key as text: its digest, never its secret."""
    return _write("api_key", key)


def read_api_key(text: str) -> ApiKey:
    """Return the API key of a text. Raises ``LedgerFailed`` with the reason."""
    return _read("api_key", ApiKey, text)


def read_cache(text: str) -> DesiredCache:
    """Return the prompt cache of a text. Raises ``LedgerFailed`` with the reason."""
    return _read("cache", DesiredCache, text)


# Built at first use, since a Router stores nothing.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _plain(value: Any) -> Any:
    """Return a value's fields. An operation's kind and parameters stand beside each other."""
    if isinstance(value, ControlOperation):
        found = _adapter(ControlOperation).dump_python(value, exclude={"action"}, warnings=False)
        return {**found, "kind": value.kind, "params": value.params}
    return _adapter(type(value)).dump_python(value, warnings=False)


def _write(what: str, value: object) -> str:
    try:
        content = {"schema": SCHEMA, what: _plain(value)}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerFailed(f"A value of '{what}' cannot be kept: {error}.") from error


def _read(what: str, kind: type[T], text: str) -> T:
    content = _content(what, text)
    try:
        given = json.dumps(_with_action(content) if kind is ControlOperation else content)
        found: T = _adapter(kind).validate_json(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{first['msg']}, not {reprlib.repr(first['input'])}"
        raise _wrong(_path(what, first["loc"]), problem) from error
    # The types alone would accept unknown fields, and absent ones that have a default.
    _compare(content, json.loads(json.dumps(_plain(found))), what)
    return found


def _content(what: str, text: str) -> Any:
    """Return the value in a text, converted to the current schema."""
    try:
        content = json.loads(
            text, object_pairs_hook=_once, parse_constant=_never, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise LedgerFailed(f"What is kept as '{what}' is no JSON: {error}.") from error
    if not isinstance(content, dict) or type(content.get("schema")) is not int:
        raise LedgerFailed(f"The stored '{what}' has no schema version.")
    schema = content["schema"]
    if schema not in (SCHEMA, *_OLDER):
        newer = ": a newer rkserve wrote it" if schema > SCHEMA else ""
        raise LedgerFailed(
            f"What is kept as '{what}' has schema {schema}; this rkserve reads {SCHEMA}{newer}."
        )
    if set(content) != {"schema", what}:
        raise LedgerFailed(f"What is kept as '{what}' has the keys {sorted(content)}.")
    for older in range(schema, SCHEMA):
        content[what] = _OLDER[older](what, content[what])
    return content[what]


def _with_action(content: Any) -> Any:
    """Return a stored operation with its kind and parameters as one value."""
    if not isinstance(content, dict) or not isinstance(content.get("params"), dict):
        return content
    rest = {name: value for name, value in content.items() if name not in ("kind", "params")}
    return {**rest, "action": {**content["params"], "kind": content.get("kind")}}


def _of_schema_1(what: str, value: Any) -> Any:
    """Convert schema 1, which had no sleep and no base weights other than the model folder's."""
    if what != "desired" or not isinstance(value, dict):
        return value
    return {
        **value,
        "pauses": _with(value.get("pauses"), level=None, wakes=False),
        "weights": _with(value.get("weights"), base=None, rebase=None, in_flight="pin"),
    }


def _of_schema_2(what: str, value: Any) -> Any:
    """Convert schema 2, which had no drained boards."""
    if what != "desired" or not isinstance(value, dict):
        return value
    return {**value, "drained": [], "moved": []}


def _of_schema_3(what: str, value: Any) -> Any:
    """Convert schema 3, which had no trials of adapters."""
    if not isinstance(value, dict):
        return value
    if what == "desired":
        return {**value, "trials": []}
    staging = what == "operation" and value.get("kind") == OperationKind.ADAPTER_STAGE.value
    if staging and isinstance(value.get("params"), dict):
        return {**value, "params": {**value["params"], "force": False}}
    return value


def _of_schema_4(what: str, value: Any) -> Any:
    """Convert schema 4, whose trials did not name scale, base weights and release."""
    if what != "desired" or not isinstance(value, dict):
        return value
    return {**value, "trials": _with(value.get("trials"), scale=1.0, base="", release="")}


def _with(entries: Any, **added: Any) -> Any:
    """Return objects with added fields; a value that is no object is refused later."""
    if not isinstance(entries, list):
        return entries
    return [{**one, **added} if isinstance(one, dict) else one for one in entries]


# Conversions of each older schema to the next one.
_OLDER = {1: _of_schema_1, 2: _of_schema_2, 3: _of_schema_3, 4: _of_schema_4}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _never(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(number: str) -> float:
    found = float(number)
    if not math.isfinite(found):  # Python reads 1e999 as infinity
        raise ValueError(f"{number} is not finite")
    return found


def _compare(read: Any, written: Any, where: str) -> None:
    """Raise ``LedgerFailed`` unless a value that was read is written in the same way."""
    if isinstance(read, dict) and isinstance(written, dict):
        if read.keys() != written.keys():
            raise _wrong(where, f"it has the fields {sorted(read)}, not {sorted(written)}")
        for name, value in read.items():
            if name != "params":  # an action refuses both
                _compare(value, written[name], f"{where}.{name}")
    elif isinstance(read, list) and isinstance(written, list) and len(read) == len(written):
        for number, value in enumerate(read):
            _compare(value, written[number], f"{where}[{number}]")
    # True and 1.0 are equal to 1, and an enum of integers accepts them.
    elif read != written or (type(written) is int and type(read) is not int):
        raise _wrong(where, f"{read!r} would be written as {written!r}")


def _path(what: str, loc: tuple[int | str, ...]) -> str:
    return what + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in loc)


def _wrong(where: str, why: str) -> LedgerFailed:
    return LedgerFailed(f"What is kept cannot be read at {where}: {why}.")
