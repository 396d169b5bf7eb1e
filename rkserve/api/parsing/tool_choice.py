"""The readers of tools and of the choice among them, and the grammar of a required call.

In OpenAI's bodies ``functions`` and ``function_call`` are the deprecated names of the same things;
dialects that differ from OpenAI's form use ``read_definitions``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from pydantic_core import from_json

from rkserve.api.json.fields import (
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    Fields,
    JsonObject,
    as_fields,
    quoted,
    wrong_type,
)
from rkserve.api.parsing.sampling import Named
from rkserve.api.parsing.tools.base import CallSyntax, ToolCallParser
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import Guide, GuideKind

# OpenAI's characters, and those of MCP servers' names. A name is put into the prompt unchanged.
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_TOOL_NAME_CHARS}}}")
_NONE, _AUTO, _REQUIRED = "none", "auto", "required"
ALLOWED = "allowed_tools"
TOOL_KEYS = frozenset(
    ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
)  # read by ``read_tools``


@dataclass(frozen=True)
class ToolOptions:
    """The tools of a call. ``given`` are for the template; none if the model may call no tool.

    ``forced``: some tool must be called, or the one that is ``named``. ``legacy`` calls are
    answered under their deprecated names. Calls of the ``strict`` tools follow their schemas if a
    call is certain. An answer has at most ``max_calls``. Tools of the types ``left_out`` are not
    among ``given``.
    """

    given: tuple[JsonObject, ...] = ()
    forced: bool = False
    named: str | None = None
    parallel: bool = True
    legacy: bool = False
    strict: frozenset[str] = frozenset()
    max_calls: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def most_calls(self) -> int | None:
        """The maximum number of calls in an answer; None for any."""
        return self.max_calls if self.parallel else 1

    @property
    def possible(self) -> tuple[JsonObject, ...]:
        """The tools that may be called."""
        if self.named is None:
            return self.given
        return tuple(tool for tool in self.given if tool["function"]["name"] == self.named)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool["function"]["name"] for tool in self.given)


NO_TOOLS = ToolOptions()


def read_tools(body: Fields) -> ToolOptions:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``, or their deprecated forms.

    Raises:
        RequestError: a tool without a name, a choice that is none of the tools, or a wrong type.
        UnsupportedParameter: another kind of tool than a function.
    """
    legacy = not body.get("tools") and bool(body.get("functions"))
    given = _functions(body) if legacy else _tools(body)
    choice = "function_call" if legacy else "tool_choice"
    subset = None if legacy else _allowed(body, given)
    if subset is None:
        forced, named, offered = _choice(body, choice, given)
    else:
        (given, forced), named, offered = subset, None, True
    parallel = body.maybe_flag("parallel_tool_calls")
    if not given or not offered:
        return NO_TOOLS
    return ToolOptions(
        given=given,
        forced=forced,
        named=named,
        # The deprecated answer has room for one.
        parallel=not legacy and parallel is not False,
        legacy=legacy,
        strict=strict_names(_described(body, legacy=legacy)),
    )


def strict_names(tools: Iterable[Fields]) -> frozenset[str]:
    """Return the names of the ``strict`` tools."""
    return frozenset(one.required_text("name") for one in tools if one.maybe_flag("strict"))


def allowed(
    choice: Fields,
    given: tuple[JsonObject, ...],
    name_of: Callable[[Fields], Fields],
    left_out: Collection[str] = (),
) -> tuple[tuple[JsonObject, ...], bool]:
    """Return the tools that ``tool_choice`` allows, and whether one of them must be called.

    The model is shown no others, so it does not call them. ``name_of`` returns the object with a
    tool's name. Tools of the types ``left_out`` are passed over.
    """
    mode = choice.required_choice("mode", _AUTO, _REQUIRED)
    names, listed = set(), choice.objects("tools")
    if len(listed) > MAX_TOOLS:
        raise RequestError(f"Invalid '{choice.path('tools')}': at most {MAX_TOOLS}.", "tool_choice")
    for tool in listed:
        if tool.get("type") in left_out:
            continue
        _check_kind(tool, "tool")
        function = name_of(tool)
        name = function.required_text("name")
        check_known(name, given, function.path("name"))
        names.add(name)
    return tuple(tool for tool in given if tool["function"]["name"] in names), mode == _REQUIRED


def check_name(name: str, path: str) -> str:
    """Return the name of a tool. Raises ``RequestError``."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"Invalid '{path}': {quoted(name)}. A name has 1 to {MAX_TOOL_NAME_CHARS} letters, "
            "digits, '_', '-', '.', ':' and '/'.",
            path,
        )
    return name


def _listed(body: Fields, key: str) -> list[Fields]:
    return [] if body.get(key) in (None, []) else body.objects(key, MAX_TOOLS)


def _described(body: Fields, *, legacy: bool) -> Iterator[Fields]:
    if legacy:
        yield from _listed(body, "functions")
        return
    for tool in _listed(body, "tools"):
        if (function := tool.child("function")) is not None:
            yield function


def _tools(body: Fields) -> tuple[JsonObject, ...]:
    given = []
    for tool in _listed(body, "tools"):
        _check_kind(tool, "tool")
        given.append(_tool(tool.required_child("function")))
    return tuple(given)


def _functions(body: Fields) -> tuple[JsonObject, ...]:
    return tuple(_tool(function) for function in _listed(body, "functions"))


def _tool(function: Fields, schema: str = "parameters") -> JsonObject:
    """Return a tool as templates expect it, with the keys and the order of the training data.

    The key ``schema`` describes its arguments. ``strict`` concerns the generation and is not shown
    to the model.
    """
    described: JsonObject = {
        "name": check_name(function.required_text("name"), function.path("name"))
    }
    description, parameters = function.text("description"), function.child(schema)
    if description is not None:
        described["description"] = description
    # Templates require them.
    described["parameters"] = (
        {"type": "object", "properties": {}} if parameters is None else function.get(schema)
    )
    return {"type": "function", "function": described}


def _allowed(
    body: Fields, given: tuple[JsonObject, ...]
) -> tuple[tuple[JsonObject, ...], bool] | None:
    value = body.get("tool_choice")
    if not isinstance(value, dict) or value.get("type") != ALLOWED:
        return None
    choice = as_fields(value, "tool_choice").required_child(ALLOWED)
    return allowed(choice, given, lambda tool: tool.required_child("function"))


def _choice(body: Fields, key: str, given: tuple[JsonObject, ...]) -> tuple[bool, str | None, bool]:
    """Return whether a tool must be called, its name if given, and whether any may be called."""
    value = body.get(key)
    if value is None or value == _AUTO:
        return False, None, True
    if value == _NONE:
        return False, None, False
    if value == _REQUIRED and key == "tool_choice":
        check_offered(given, key)
        return True, None, True
    if isinstance(value, str):
        words = (_NONE, _AUTO, *((_REQUIRED,) if key == "tool_choice" else ()))
        raise RequestError(
            f"Invalid '{key}': {quoted(value)}. Supported values are: "
            f"{', '.join(repr(word) for word in words)}, or an object that names a function.",
            key,
        )
    if not isinstance(value, dict):
        raise wrong_type(key, "a string or an object", value)
    return True, _named(as_fields(value, key), key, given), True


def _named(choice: Fields, key: str, given: tuple[JsonObject, ...]) -> str:
    function = choice
    if key == "tool_choice":
        _check_kind(choice, "'tool_choice'")
        function = choice.required_child("function")
    check_offered(given, key)
    name = function.required_text("name")
    check_known(name, given, function.path("name"))
    return name


def _check_kind(fields: Fields, what: str) -> None:
    if (kind := fields.required_text("type")) != "function":
        raise UnsupportedParameter(
            f"Unsupported {what}: only the type 'function' is known, not {quoted(kind)}.",
            fields.path("type"),
        )


def check_known(name: str, given: tuple[JsonObject, ...], path: str) -> None:
    """Raise ``RequestError`` for the name of a tool that is not among those given."""
    if all(tool["function"]["name"] != name for tool in given):
        raise RequestError(
            f"Invalid '{path}': there is no tool {quoted(name)} among the tools of this request.",
            path,
        )


def check_offered(given: tuple[JsonObject, ...], key: str) -> None:
    """Raise ``RequestError`` if a call is required and there is no tool to call."""
    if not given:
        raise RequestError(
            f"'{key}' asks for a call, but the request offers no tools that the client runs.", key
        )


PARAM = "tools"
# Names that are valid in calls with keyword arguments.
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def calls_guide(tools: ToolOptions, form: type[ToolCallParser]) -> Named | None:
    """Return the grammar after the opening of a call; None if there is none.

    There is one only if a call is required and one of the allowed tools is strict. Raises
    ``RequestError``: a strict tool cannot be called by its name in this form.
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


RAW = "raw_arguments"
_TYPE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # left-out types stand in a response header


def read_definitions(
    fields: Fields, known: str, schema: str, default: str | None = None
) -> ToolOptions:
    """Read ``tools``: those of the type ``known``, whose arguments the key ``schema`` describes.

    A tool of another type that the client only offers is left out: agents offer their provider's
    own tools to every server and do not need them. ``default`` is the type of a tool without one.
    Raises ``RequestError``: a tool without a name, or a wrong type.
    """
    own, left_out = [], []
    for tool in _listed(fields, "tools"):
        if (tool.text("type") or default) == known:
            own.append(tool)
        else:
            left_out.append(_other_type(tool))
    return ToolOptions(
        tuple(_tool(tool, schema) for tool in own),
        strict=strict_names(own),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def _other_type(tool: Fields) -> str:
    kind, path = tool.any_text("type"), tool.path("type")
    if not _TYPE.fullmatch(kind):
        raise RequestError(f"Invalid '{path}': {quoted(kind)} is not the name of a type.", path)
    return kind


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
