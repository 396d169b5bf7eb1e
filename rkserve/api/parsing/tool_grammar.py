"""The grammar of required calls of strict tools, in its serialized form."""

from __future__ import annotations

import json
import re

from rkserve.api.json.body import JsonObject
from rkserve.api.parsing.grammar import Named
from rkserve.api.parsing.tool_choice import ToolOptions
from rkserve.api.parsing.tools.base import CallSyntax, ToolCallParser
from rkserve.core.errors import RequestError
from rkserve.core.run_params import Guide, GuideKind

PARAM = "tools"
# Names that are valid in calls with keyword arguments.
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def calls_guide(tools: ToolOptions, form: type[ToolCallParser]) -> Named | None:
    """Return the grammar after the opening of a call; None if there is none.

    There is one only if a call is required and one of the allowed tools is strict.

    Raises:
        RequestError: a strict tool cannot be called by its name in this form.
    """
    possible = tools.possible
    strict = [tool for tool in possible if tool["function"]["name"] in tools.strict]
    if not tools.forced or not strict:
        return None
    shape = form.shape
    if shape.keywords:
        for tool in strict:
            _check_name(tool["function"]["name"])
        possible = tuple(one for one in possible if _PYTHON_NAME.fullmatch(one["function"]["name"]))
    several = tools.named is None and tools.most_calls != 1
    given = {
        "calls": [_call(tool, tools, shape) for tool in possible],
        "between": shape.between if several else None,
        "end": shape.end,
    }
    text = json.dumps(given, separators=(",", ":"), ensure_ascii=False)
    return PARAM, Guide(GuideKind.CALLS, text)


def _call(tool: JsonObject, tools: ToolOptions, shape: CallSyntax) -> JsonObject:
    name, parameters = tool["function"]["name"], tool["function"]["parameters"]
    return {
        "name": name,
        "before": shape.before.format(name) if tools.named is None else "",
        "schema": parameters if name in tools.strict else _loose(parameters, shape),
        "after": shape.after,
        "keywords": shape.keywords,
    }


def _loose(parameters: JsonObject, shape: CallSyntax) -> JsonObject:
    """Return the schema of the arguments of a tool that is not strict: any object."""
    if not shape.keywords:
        return {"type": "object"}
    properties = parameters.get("properties")
    names = properties if isinstance(properties, dict) else {}
    return {"properties": {name: {} for name in names if _KEYWORD.fullmatch(name)}}


def _check_name(name: str) -> None:
    if not _PYTHON_NAME.fullmatch(name):
        raise RequestError(
            f"Invalid '{PARAM}': this model calls tools as Python calls functions, and "
            f"'{name}', which is strict, is no name of one.",
            PARAM,
        )
