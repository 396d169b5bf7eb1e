"""Arguments of calls for dialects that want an object where OpenAI's has JSON text."""

from __future__ import annotations

from pydantic_core import from_json

from rkserve.api.json.body import JsonObject

RAW = "raw_arguments"


def as_object(arguments: str) -> JsonObject:
    """Return what a model wrote as the arguments of a call.

    Models do not always write JSON; what is none is passed on as it is, under a key of its own, so
    that whoever called can see what is wrong.
    """
    try:
        found = from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {RAW: arguments}
