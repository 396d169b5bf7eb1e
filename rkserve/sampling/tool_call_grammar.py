"""Calls of tools as one grammar: whose name, in which form, with arguments by which schemas. Pure.

It knows no model's form: what stands before, between and behind calls comes with the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rkserve.sampling.finite_schemas import is_endless

_OBJECT = "object"
_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# What the root of a schema may say where each argument is written by itself.
_PLAIN = frozenset(
    {
        *("type", "properties", "required", "additionalProperties"),
        *("$defs", "definitions", "$schema", "$id", "title", "description", "$comment"),
        *("default", "examples", "deprecated", "strict"),
    }
)
_SHARED = ("$defs", "definitions")


def as_lark(text: str, options: Mapping[str, Any]) -> str:
    """Return the grammar in Lark; ``options`` go with each schema in it.

    Raises:
        ValueError: with what cannot be followed, and the tool's name.
    """
    given = json.loads(text)
    rules = [_start(given)]
    for number, call in enumerate(given["calls"]):
        schema = _arguments(call)
        rules.append(f"call_{number}: {_literal(call['before'])} args_{number}{_behind(call)}")
        if call["keywords"]:
            rules += _keywords(call["name"], schema, f"args_{number}", options)
        else:
            # A blank or none: the model's own tokens may begin with one.
            rules.append(f"args_{number}: / ?/ value_{number}")
            rules.append(f"value_{number}: {_json(schema, options)}")
    return "\n".join(rules)


def one_by_one(text: str) -> Iterator[tuple[str, str]]:
    """Yield for each tool its name and the grammar of a call of it alone."""
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
    """Return the schema of an object, which arguments always are."""
    schema, name = call["schema"], call["name"]
    kind = schema.get("type", _OBJECT)
    if kind != _OBJECT and not (isinstance(kind, list) and _OBJECT in kind):
        raise ValueError(f"the tool '{name}': arguments are an object, and its schema's type not.")
    schema = {**schema, "type": _OBJECT}
    if is_endless(schema):
        raise ValueError(
            f"the tool '{name}': the schema demands itself within itself, so that nothing finite "
            "follows it."
        )
    return schema


def _keywords(
    tool: str, schema: dict[str, Any], rule: str, options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield rules for arguments of the form ``a=1, b=2``, in the order of the schema.

    There are two for each argument: one for where none has been written, one for behind another.
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
    """Return the arguments and which of them must be there. Raises ``ValueError``."""
    beyond = sorted(schema.keys() - _PLAIN)
    if beyond:
        raise ValueError(
            f"the tool '{tool}': the model writes each argument by itself, so that '{beyond[0]}' "
            "of all of them cannot be followed."
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not _are_names(required):
        raise ValueError(f"the tool '{tool}': its properties or what is required are none.")
    missing = [name for name in required if name not in properties]
    wrong = [name for name in properties if not _KEYWORD.fullmatch(name)]
    if missing or wrong:
        raise ValueError(
            f"the tool '{tool}': {(missing or wrong)[0]!r} cannot be the name of an argument."
        )
    if any(_leads_away(value) for value in properties.values()):
        raise ValueError(
            f"the tool '{tool}': the model writes each argument by itself, so that references may "
            "lead to '#/$defs' only."
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
