"""Pydantic settings and their validation errors in words."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

SCALARS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
LONGEST_QUOTE = 40


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return what is wrong and what is allowed: one sentence for each wrong key of ``model``."""
    problems = error.errors(include_url=False)
    places = [problem["loc"] for problem in problems]
    return " ".join(
        _sentence(problem, model)
        for problem in problems
        # Pydantic omits wrong entries from a list, and then reports the list as too short as well.
        if not (problem["type"] == "too_short" and _is_around(problem["loc"], places))
    )


def allowed(field: FieldInfo) -> str:
    """Return the allowed values of a setting in words: ``a whole number from 1 to 256``."""
    return _allowed(field.annotation, field.metadata)


def inner_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings inside a setting: those of a block, or of each entry of a list."""
    bare = _without_none(annotation)
    if get_origin(bare) is tuple:
        bare = get_args(bare)[0]
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def _is_around(outer: Sequence[Any], places: Iterable[Sequence[Any]]) -> bool:
    return any(len(inner) > len(outer) and inner[: len(outer)] == outer for inner in places)


def _sentence(problem: ErrorDetails, model: type[BaseModel]) -> str:
    place = problem["loc"]
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        place = (*place[:-1], str(place[-1]))  # a key that YAML read as a number is no index
        said = _unknown_key(place, model)
    elif problem["type"] == "value_error":
        said = _own_words(problem)
    else:
        said = _expectation(problem, model)
    return f"{key}: {said}" if (key := _key(place)) else said


def _key(place: Sequence[Any]) -> str:
    """Return a location as ``boards[0].simulated.release``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place).removeprefix(".")


def _unknown_key(place: Sequence[Any], model: type[BaseModel]) -> str:
    *above, key = place
    annotation, _ = _look_up(above, model)
    inside = inner_model(annotation)
    known = list(inside.model_fields) if inside is not None else []
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        return f"unknown key '{key}'; did you mean '{near[0]}'?"
    return f"unknown key '{key}'; the keys here are {', '.join(known)}."


def _own_words(problem: ErrorDetails) -> str:
    """Return the message of a validator of ours; for a single value, with that value quoted."""
    said = str(problem["ctx"]["error"])
    if isinstance(problem["input"], Mapping):
        return f"{said}."
    return f"{said}; not {_quote(problem['input'])}."


def _expectation(problem: ErrorDetails, model: type[BaseModel]) -> str:
    words = _allowed(*_look_up(problem["loc"], model))
    if problem["type"] == "missing":
        return f"this key is missing; it must be {words}."
    return f"must be {words}, not {_quote(problem['input'])}."


def _look_up(place: Sequence[Any], model: type[BaseModel]) -> tuple[Any, Sequence[Any]]:
    """Return the type of a setting, and its limits."""
    annotation: Any = model
    limits: Sequence[Any] = ()
    for part in place:
        bare = _without_none(annotation)
        if isinstance(part, int):
            annotation, limits = get_args(bare)[0], ()
            continue
        if get_origin(bare) is dict:
            annotation, limits = get_args(bare)[1], ()
            continue
        inside = inner_model(annotation)
        assert inside is not None, f"{part} of {place} is below no block of settings"
        field = inside.model_fields[part]
        annotation, limits = field.annotation, field.metadata
    return annotation, limits


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (kind for kind in get_args(annotation) if kind is not type(None))
    return annotation


def _allowed(annotation: Any, limits: Sequence[Any]) -> str:
    bare = _without_none(annotation)
    if get_origin(bare) is Annotated:
        return _allowed(get_args(bare)[0], bare.__metadata__)
    if get_origin(bare) is Literal:
        return " or ".join(str(choice) for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return f"a list{_length(limits)}, each entry {_allowed(get_args(bare)[0], ())}"
    if get_origin(bare) is dict:
        return f"a block of names, each with {_allowed(get_args(bare)[1], ())}"
    if inner_model(bare) is not None:
        return "a block of keys"
    bounds = dict(_bounds(limits))
    step = bounds.get("multiple_of")
    kind = f"a multiple of {step}" if step else SCALARS.get(bare, "text")
    return f"{kind}{_range(bounds)}"


def _bounds(limits: Sequence[Any]) -> Iterator[tuple[str, float]]:
    for limit in limits:
        for name in ("ge", "gt", "le", "multiple_of"):
            if hasattr(limit, name):
                yield name, getattr(limit, name)


def _range(bounds: Mapping[str, float]) -> str:
    match bounds:
        case {"ge": lowest, "le": highest}:
            return f" from {lowest} to {highest}"
        case {"gt": below, "le": highest}:
            return f" above {below}, up to {highest}"
        case {"ge": lowest}:
            return f" of at least {lowest}"
        case {"gt": below}:
            return f" above {below}"
    return ""


def _length(limits: Sequence[Any]) -> str:
    return " with at least one entry" if any(hasattr(x, "min_length") for x in limits) else ""


def _quote(value: Any) -> str:
    """Return a value as in the file, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "a block of keys"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list" if value else "an empty list"
    if not isinstance(value, str):
        return str(value)
    return repr(value if len(value) <= LONGEST_QUOTE else f"{value[:LONGEST_QUOTE]}...")
