"""A tool as templates expect it, of dialects that describe it without OpenAI's inner object."""

from __future__ import annotations

from rkserve.wire.fields import Fields
from rkserve.wire.jsonbody import JsonObject
from rkserve.wire.tooling import check_name


def offered(tool: Fields, schema: str) -> JsonObject:
    """Return a tool with ``name`` and ``description``, whose arguments ``schema`` describes."""
    function: JsonObject = {"name": check_name(tool.required_text("name"), tool.path("name"))}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    empty: JsonObject = {"type": "object", "properties": {}}
    given = tool.child(schema)
    function["parameters"] = empty if given is None else tool.get(schema)
    return {"type": "function", "function": function}
