"""The grammar requested for an answer, in OpenAI's and vLLM's forms."""

from __future__ import annotations

import json
from typing import Any

from rkserve.api.json.fields import Fields, as_fields, missing, quoted, wrong_type
from rkserve.api.json.limits import MAX_GUIDE_CHOICES
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import Guide, GuideKind

Named = tuple[str, Guide]  # the parameter, and what it asks for

JSON_OBJECT = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')
_STRUCTURED = "structured_outputs"
_SGLANG = {"regex": "regex", "ebnf": "grammar", "json_schema": "json"}
_OURS = ("json", "regex", "choice", "grammar", "json_object")


def is_extension(name: str) -> bool:
    """Return whether the parameter of a grammar is vLLM's or SGLang's own."""
    return name.startswith(("guided_", _STRUCTURED)) or name in _SGLANG


def read_guide(fields: Fields) -> Named | None:
    """Read the grammar of a call; None without one.

    Raises:
        RequestError: an invalid ``param``, or several grammars.
    """
    found = [_response_format(fields)]
    found += [_guided(fields, f"guided_{name}", name) for name in _OURS]
    found.append(_structured(fields))
    # SGLang reads a schema of this name only beside its sampling values.
    found += [_guided(fields, name, _SGLANG[name]) for name in ("regex", "ebnf")]
    asked = [one for one in found if one is not None]
    if len(asked) > 1:
        names = " and ".join(f"'{name}'" for name, _ in asked)
        raise RequestError(f"Only one of {names} can say what the answer follows.", asked[1][0])
    return asked[0] if asked else None


def _response_format(fields: Fields) -> Named | None:
    name = "response_format"
    given = fields.child(name)
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return name, JSON_OBJECT
    if kind != "json_schema":
        raise UnsupportedParameter(
            f"Unsupported parameter: '{name}' with the type {quoted(kind)}. Supported are 'text', "
            "'json_object' and 'json_schema'.",
            f"{name}.type",
        )
    schema = given.child("json_schema")
    if schema is None:
        raise missing(f"{name}.json_schema")
    schema.text("name")
    # Always strict: an answer that may leave its schema is not worth the single steps.
    schema.maybe_flag("strict")
    if schema.get("schema") is None:
        raise missing(f"{name}.json_schema.schema")
    return name, schema_guide(schema.get("schema"), f"{name}.json_schema.schema")


def _structured(fields: Fields) -> Named | None:
    """Read ``structured_outputs``, vLLM's newer form of all of them."""
    given = fields.child(_STRUCTURED)
    if given is None:
        return None
    found = [_guided(given, name, name) for name in _OURS]
    asked = [one for one in found if one is not None]
    if len(asked) != 1:
        raise RequestError(
            f"Invalid '{_STRUCTURED}': it must have exactly one of {', '.join(_OURS)}.",
            _STRUCTURED,
        )
    return _STRUCTURED, asked[0][1]


def _guided(fields: Fields, name: str, kind: str) -> Named | None:
    value, path = fields.get(name), fields.path(name)
    if value is None or value is False:
        return None
    if kind == "json":
        return path, schema_guide(value, path)
    if kind == "choice":
        return path, _choice(value, path)
    if kind == "json_object":
        fields.flag(name)
        return path, JSON_OBJECT
    text = fields.required_text(name)
    return path, Guide(GuideKind.REGEX if kind == "regex" else GuideKind.LARK, text)


def schema_guide(value: Any, path: str) -> Guide:
    """Return a schema from an object, or from text as vLLM takes it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as exc:
            raise RequestError(f"Invalid '{path}': it is not JSON: {exc}.", path) from exc
    as_fields(value, path)
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value, separators=(",", ":")))


def _choice(value: Any, path: str) -> Guide:
    if not isinstance(value, list):
        raise wrong_type(path, "an array of strings", value)
    if not 1 <= len(value) <= MAX_GUIDE_CHOICES:
        raise RequestError(
            f"Invalid '{path}': it may have 1 to {MAX_GUIDE_CHOICES} strings, but has "
            f"{len(value)}.",
            path,
        )
    for at, one in enumerate(value):
        if not isinstance(one, str) or not one:
            raise wrong_type(f"{path}[{at}]", "a string that is not empty", one)
    return Guide(GuideKind.LARK, "start: " + " | ".join(json.dumps(one) for one in value))
