"""JSON schemas in grammars: whether an instance is finite, and the grammar of tool calls. Pure.

A schema may require itself within itself: each instance is then infinitely deep, and generation
under its grammar never ends. Unknown keywords count as finite: the grammar compiler checks them.

A tool call's grammar has the names, the form, and the arguments by their schemas. The text before,
between and after calls is part of the input: no model's form is known here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

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
    targets = (node.get("$ref") for node in _nodes(schema))
    return any(
        isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/"))
        for target in targets
    )


def _json(schema: Any, options: Mapping[str, Any]) -> str:
    if isinstance(schema, dict):  # their options, whatever the schema says of them
        schema = {**schema, **options}
    return f"%json {json.dumps(schema, separators=(',', ':'))}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_ANY = ("anyOf", "oneOf")
_LOCAL = "#"


def is_endless(schema: Any) -> bool:
    """Return True if a schema has no finite instance.

    A least fixed point: a node is finite as soon as all nodes that it needs are known to be.
    """
    nodes = {id(node): node for node in _nodes(schema)}
    ends: set[int] = set()
    grown = True
    while grown:
        found = {
            key for key, node in nodes.items() if key not in ends and _ends(node, schema, ends)
        }
        ends |= found
        grown = bool(found)
    return isinstance(schema, dict) and id(schema) not in ends


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in the schema, also those that are not schemas themselves."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending += node.values()
        elif isinstance(node, list):
            pending += node


def _ends(node: dict[str, Any], root: Any, ends: set[int]) -> bool:
    def finite(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in ends

    if "$ref" in node and not finite(_target(node["$ref"], root)):
        return False
    if "const" in node or "enum" in node:
        return True
    if not all(finite(part) for part in _list(node.get("allOf"))):
        return False
    for name in _ANY:
        choices = _list(node.get(name))
        if choices and not any(finite(part) for part in choices):
            return False
    return _is_other(node) or all(finite(part) for part in _needed(node))


def _is_other(node: dict[str, Any]) -> bool:
    """Return True if an instance may be neither an object nor an array."""
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list):
        # Without a type the keywords determine it, as in the grammar compiler.
        return not any(key in node for key in ("properties", "required", "items", "prefixItems"))
    return any(kind not in ("object", "array") for kind in kinds)


def _needed(node: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas of required properties and items."""
    kinds = node.get("type")
    required = _list(node.get("required"))
    properties = node.get("properties")
    may_be_object = kinds in (None, "object") or (isinstance(kinds, list) and "object" in kinds)
    may_be_array = kinds in (None, "array") or (isinstance(kinds, list) and "array" in kinds)
    if may_be_object and isinstance(properties, dict):
        yield from (properties.get(name) for name in required if isinstance(name, str))
    least = node.get("minItems")
    if may_be_array and isinstance(least, int) and least > 0:
        before = _list(node.get("prefixItems"))
        yield from before[:least]
        if least > len(before):
            yield node.get("items")


def _target(reference: Any, root: Any) -> Any:
    """Return the target of a local reference; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith(_LOCAL):
        return None
    node = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isascii() and key.isdigit() and len(key) < 10:  # noqa: PLR2004 - an index
            node = node[int(key)] if int(key) < len(node) else None
        else:
            return None
    return node


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
