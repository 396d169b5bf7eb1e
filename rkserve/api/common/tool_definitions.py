"""Tool definitions and arguments of dialects that differ from OpenAI's form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic_core import from_json

from rkserve.api.json.body import JsonObject
from rkserve.api.json.fields import Fields, as_fields, missing, quoted
from rkserve.api.json.limits import MAX_TOOLS
from rkserve.api.parsing.tool_choice import check_name, strict_names
from rkserve.core.errors import RequestError

RAW = "raw_arguments"
_TYPE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # left-out types stand in a response header


@dataclass(frozen=True)
class ToolDefinitions:
    """The tools of a body. ``left_out`` are the types of tools that only other servers know."""

    tools: tuple[JsonObject, ...] = ()
    strict: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def read_tools(
    fields: Fields, known: str, schema: str, default: str | None = None
) -> ToolDefinitions:
    """Read ``tools``: those of the type ``known``, whose arguments the key ``schema`` describes.

    A tool of another type that the client only offers is left out: agents offer their provider's
    own tools to every server and do not need them. ``default`` is the type of a tool without one.

    Raises:
        RequestError: a tool without a name, or a wrong type.
    """
    found = fields.get("tools")
    given = [] if found in (None, []) else fields.items("tools")
    if len(given) > MAX_TOOLS:
        raise RequestError(f"Invalid 'tools': at most {MAX_TOOLS} are read.", "tools")
    listed = [as_fields(one, f"tools[{at}]") for at, one in enumerate(given)]
    kinds = [one.text("type") or default for one in listed]
    own = [one for one, kind in zip(listed, kinds, strict=True) if kind == known]
    others = (one for one, kind in zip(listed, kinds, strict=True) if kind != known)
    left_out = dict.fromkeys(map(_other_type, others))
    tools = tuple(_tool(one, schema) for one in own)
    return ToolDefinitions(tools, strict_names(own), tuple(left_out))


def _other_type(tool: Fields) -> str:
    kind, path = tool.text("type"), tool.path("type")
    if kind is None:
        raise missing(path)
    if not _TYPE.fullmatch(kind):
        raise RequestError(f"Invalid '{path}': {quoted(kind)} is not the name of a type.", path)
    return kind


def _tool(tool: Fields, schema: str) -> JsonObject:
    """Return a tool with ``name`` and ``description``, whose arguments ``schema`` describes."""
    function: JsonObject = {"name": check_name(tool.required_text("name"), tool.path("name"))}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    empty: JsonObject = {"type": "object", "properties": {}}
    given = tool.child(schema)
    function["parameters"] = empty if given is None else tool.get(schema)
    return {"type": "function", "function": function}


def as_object(arguments: str) -> JsonObject:
    """Return the arguments of a tool call as an object.

    Models do not always write JSON; invalid text is passed on unchanged under a key of its own, so
    that the client can see the mistake.
    """
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {RAW: arguments}
