"""Detection of JSON schemas without a finite instance. Pure.

A schema may require itself within itself: each instance is then infinitely deep, and generation
under its grammar never ends. Unknown keywords count as finite: the grammar compiler checks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

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
