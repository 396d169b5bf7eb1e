"""The grammar of tool calls: names, form, and arguments by their schemas. Pure.

The text before, between and after calls is part of the input: no model's form is known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rkserve.sampling.finite_schemas import is_endless

_OBJECT = "object"
_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# The root keywords of a schema whose arguments are written one by one.
_PLAIN = frozenset(
    {
        *("type", "properties", "required", "additionalProperties"),
        *("$defs", "definitions", "$schema", "$id", "title", "description", "$comment"),
        *("default", "examples", "deprecated", "strict"),
    }
)
_SHARED = ("$defs", "definitions")


def as_lark(text: str, options: Mapping[str, Any]) -> str:
    """Return the grammar in Lark; ``options`` are added to each schema.

    Raises:
        ValueError: a schema cannot be compiled; the message names the tool.
    """
    given = json.loads(text)
    rules = [_start(given)]
    for number, call in enumerate(given["calls"]):
        schema = _arguments(call)
        rules.append(f"call_{number}: {_literal(call['before'])} args_{number}{_behind(call)}")
        if call["keywords"]:
            rules += _keywords(call["name"], schema, f"args_{number}", options)
        else:
            # An optional blank: the model's tokens may begin with one.
            rules.append(f"args_{number}: / ?/ value_{number}")
            rules.append(f"value_{number}: {_json(schema, options)}")
    return "\n".join(rules)


def one_by_one(text: str) -> Iterator[tuple[str, str]]:
    """Yield each tool's name and the grammar of a call of this tool alone."""
    given = json.loads(text)
    for call in given["calls"]:
        yield call["name"], json.dumps({**given, "calls": [call]})


def _start(given: Mapping[str, Any]) -> str:
    names = " | ".join(f"call_{number}" for number in range(len(given["calls"])))
    more = "" if given["between"] is None else f" ({_literal(given['between'])} ({names}))*"
    end = f" {_literal(given['end'])}" if given["end"] else ""
    return f"start: ({names}){more}{end}"


def _behind(call: Mapping[str, Any]) -> str:
    return f" {_literal(call['after'])}" if call["after"] else ""


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    schema, name = call["schema"], call["name"]
    kind = schema.get("type", _OBJECT)
    if kind != _OBJECT and not (isinstance(kind, list) and _OBJECT in kind):
        raise ValueError(f"the tool '{name}': the type of its parameters must be object.")
    schema = {**schema, "type": _OBJECT}
    if is_endless(schema):
        raise ValueError(
            f"the tool '{name}': the schema requires itself within itself, so that it has no "
            "finite instance."
        )
    return schema


def _keywords(
    tool: str, schema: dict[str, Any], rule: str, options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield rules for arguments of the form ``a=1, b=2``, in the order of the schema.

    There are two per argument: for the first written argument, and for one after a comma.
    """
    properties, required = _properties(tool, schema)
    shared = {key: schema[key] for key in _SHARED if key in schema}
    last = len(properties)
    yield f"{rule}: {rule}_f0"
    for at, (name, value) in enumerate(properties.items()):
        own = {**shared, **value} if isinstance(value, dict) else value
        yield f"{rule}_p{at}: {_literal(f'{name}=')} {rule}_v{at}"
        yield f"{rule}_v{at}: {_json(own, options)}"
        written, following = f"{rule}_p{at} {rule}_r{at + 1}", f"{rule}_r{at + 1}"
        first, behind = written, f'", " {written}'
        if name not in required:
            first, behind = f"{first} | {rule}_f{at + 1}", f"{behind} | {following}"
        yield f"{rule}_f{at}: {first}"
        yield f"{rule}_r{at}: {behind}"
    yield f'{rule}_f{last}: ""'
    yield f'{rule}_r{last}: ""'


def _properties(tool: str, schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments and the required ones. Raises ``ValueError``."""
    beyond = sorted(schema.keys() - _PLAIN)
    if beyond:
        raise ValueError(
            f"the tool '{tool}': '{beyond[0]}' is not supported at the root, because this model "
            "writes each argument separately."
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not _are_names(required):
        raise ValueError(f"the tool '{tool}': invalid properties or required.")
    missing = [name for name in required if name not in properties]
    wrong = [name for name in properties if not _KEYWORD.fullmatch(name)]
    if missing or wrong:
        raise ValueError(f"the tool '{tool}': invalid argument name {(missing or wrong)[0]!r}.")
    if any(_leads_away(value) for value in properties.values()):
        raise ValueError(
            f"the tool '{tool}': references must point into '#/$defs', because this model writes "
            "each argument separately."
        )
    return properties, required


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _leads_away(schema: Any) -> bool:
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            target = node.get("$ref")
            if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
                return True
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return False


def _json(schema: Any, options: Mapping[str, Any]) -> str:
    if isinstance(schema, dict):  # their options, whatever the schema says of them
        schema = {**schema, **options}
    return f"%json {json.dumps(schema, separators=(',', ':'))}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
